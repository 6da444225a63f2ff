"""A profile of some training steps: how long each part takes on each device, and why."""

from gluonpar.training.profiler.profile import WARM_UP, Profiler, check_devices, check_trace

__all__ = ["WARM_UP", "Profiler", "check_devices", "check_trace"]
