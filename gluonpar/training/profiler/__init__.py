"""Where the time of a training step goes, from MXNet's own profiler."""
