"""The all-reduce algorithms, one file each. Importing a file registers its algorithm."""
# ruff: noqa: F401, I001 - the order of the imports is the order of registration

from gluonpar.collectives.algorithms import star
from gluonpar.collectives.algorithms import balanced
from gluonpar.collectives.algorithms import ring
from gluonpar.collectives.algorithms import bidirectional_ring
from gluonpar.collectives.algorithms import tree
from gluonpar.collectives.algorithms import halving_doubling
from gluonpar.collectives import host
from gluonpar.collectives.algorithms import mxnet_kvstore
from gluonpar.collectives.algorithms import nvidia_nccl
