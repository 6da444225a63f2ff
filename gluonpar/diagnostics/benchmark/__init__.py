"""The benchmark of the all-reduce, and the harness that it shares with ``benchmarks/``."""
