"""A profile of some training steps: how long each part takes on each device, and why."""

from gluonpar.training.profiler.profile import NUM_STEPS, WARM_UP, Profiler, check_trace

__all__ = ["NUM_STEPS", "WARM_UP", "Profiler", "check_trace"]
