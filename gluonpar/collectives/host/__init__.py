"""Collectives of CPU contexts, which share one memory: sums are computed in place."""
