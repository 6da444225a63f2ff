"""Plans of all-reduces as data: which device sends which chunk to which device, and when. No MXNet.

A plan can be printed, drawn, simulated and tested without any array; ``gluonpar.collectives``
carries it out.
"""

from gluonpar.plans import algorithms

__all__ = ["algorithms"]
