"""Comparisons of gluonpar with other libraries, run from the repository's root.

``python -m benchmarks.training`` measures training steps, ``python -m benchmarks.cluster`` several
processes. Each candidate runs in processes of its own (``worker``), which take turns (``jobs``).
``worker`` and the candidates' modules import gluonpar only in processes that measure it: elsewhere
MXNet must be as it comes.
"""
