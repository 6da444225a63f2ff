"""Collectives of CPU contexts, which share one memory: summed where the arrays lie, sent nowhere."""
