"""Random operators, such as dropout, that draw other numbers on each rank."""

from __future__ import annotations

from gluonpar.cluster.process_collectives import PendingGather
from gluonpar.cluster.world import rank, size
from gluonpar.runtime import device_threads

_first_devices: list[int] = []  # by rank, once they are known: how many devices lower ranks have


def draw_apart(num_devices: int | None = None) -> None:
    """From now on draw as this rank's devices, which are ``num_devices``, among those of all ranks.

    All ranks call this when their parameters have become alike: before it, ranks with one seed draw
    the same initial values. With None any number will do. Waits for all ranks.
    """
    if size() == 1 or (num_devices is None and _first_devices):
        return
    counts = PendingGather(num_devices or 1, "numbers of devices").wait()
    before = _first_devices[rank()] if _first_devices else 0
    _first_devices[:] = [sum(counts[:i]) for i in range(len(counts))]
    if _first_devices[rank()] != before:
        device_threads.number_from(lambda: _first_devices[rank()])  # it is 0 inside local()
