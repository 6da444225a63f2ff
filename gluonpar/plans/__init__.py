"""Plans of all-reduces as data: which device sends which chunk to which device, and when. No MXNet.

A plan can be printed and tested without any array; ``gluonpar.collectives`` carries it out.
"""

from gluonpar.plans import algorithms
from gluonpar.plans.plan import Hop, check
from gluonpar.plans.registry import ALGORITHMS, Trace, register, trace

__all__ = ["ALGORITHMS", "Hop", "Trace", "algorithms", "check", "register", "trace"]
