"""Collectives of CPU contexts, which share one memory: arrays are summed in place, not sent."""
