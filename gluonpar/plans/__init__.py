"""Plans of all-reduces as data: which device sends which chunk to which device, and when. No MXNet.

A plan can be printed, simulated and tested without any array; ``gluonpar.collectives`` carries it
out.
"""

from gluonpar.plans import algorithms
from gluonpar.plans.plan import Hop, check
from gluonpar.plans.registry import (
    ALGORITHMS,
    COMBINE,
    Algorithm,
    Trace,
    named,
    register,
    register_executor,
    trace,
)
from gluonpar.plans.simulator import Simulation, simulate

__all__ = ["ALGORITHMS", "COMBINE", "Algorithm", "Hop", "Simulation", "Trace", "algorithms"]
__all__ += ["check", "named", "register", "register_executor", "simulate", "trace"]
