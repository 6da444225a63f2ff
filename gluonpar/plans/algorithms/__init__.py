"""The all-reduce algorithms that have a plan. Importing a file registers its plan."""
# ruff: noqa: F401, I001 - the order of the imports is the order of registration

from gluonpar.plans.algorithms import star
from gluonpar.plans.algorithms import balanced
from gluonpar.plans.algorithms import ring
from gluonpar.plans.algorithms import bidirectional_ring
from gluonpar.plans.algorithms import tree
from gluonpar.plans.algorithms import halving_doubling
from gluonpar.plans.algorithms import recursive_doubling
