"""Plans of all-reduces as data: which device sends which chunk to which device, and when. No MXNet.

A plan can be printed, drawn, simulated and tested without any array; ``gluonpar.collectives``
carries it out.
"""

from gluonpar.plans import algorithms
from gluonpar.plans.plan import Hop, by_step, check, num_chunks, relabel, reverse, towards
from gluonpar.plans.registry import (
    ALGORITHMS,
    COMBINE,
    Algorithm,
    checked,
    named,
    register,
    register_executor,
)
from gluonpar.plans.simulator import Simulation, simulate
from gluonpar.plans.tracing import Trace, trace

__all__ = [
    "ALGORITHMS",
    "COMBINE",
    "Algorithm",
    "Hop",
    "Simulation",
    "Trace",
    "algorithms",
    "by_step",
    "check",
    "checked",
    "named",
    "num_chunks",
    "register",
    "register_executor",
    "relabel",
    "reverse",
    "simulate",
    "towards",
    "trace",
]
