"""Comparisons of gluonpar with other libraries, run from the repository's root.

``python -m benchmarks.training`` measures training steps, ``python -m benchmarks.cluster`` several
processes. Each candidate runs in processes of its own (``worker``), which take turns (``jobs``).
Only processes that measure gluonpar run ``gluonpar/__init__.py``, which changes MXNet: in others
it is skipped, and MXNet is as it comes.
"""
