"""The choice of an all-reduce on known links: is the plan that is chosen the fastest of all?

    python -m benchmarks.choice
    python -m benchmarks.choice --num-gpus 4 --message-seconds 2e-5

The links are measured as they are between real devices, but by simulation on each topology, and the
plan is chosen with these figures alone. Then all plans are simulated on the topology itself.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple, Sequence

import numpy as np

from gluonpar.collectives import choice, probing
from gluonpar.collectives.links import TOPOLOGIES, MeasuredLinks, Topology
from gluonpar.collectives.simulator import share, simulate
from gluonpar.diagnostics.harness import columns

SIZES = {"4 KB": 4096, "516 KB, LeNet": 516_272, "100 MB": 100_000_000}
MEMORY_BANDWIDTH = 500e9  # of sums on a GPU such as the V100, what is read and what is written
OLD = ("star", "tree", "balanced")  # what gluonpar 0.2 chose from, on links as assumed
HEADINGS = ("topology", "bytes", "chosen", "ms", "best", "ms", "old rule", "ms")
WIDTHS = (-9, -13, -18, 6, -18, 6, -9, 6)


class Row(NamedTuple):
    """The plan chosen, the best and the old rule's, and each plan's seconds on the topology."""

    topology: str
    size: str
    chosen: str
    best: str
    before: str
    seconds: dict[str, float]


class SimulatedMessages(probing.Messages):
    """Messages of ``num_bytes`` on the links of a topology, whose times are simulated."""

    def __init__(
        self, on: Topology, num_bytes: int, memory_bandwidth: float, message_seconds: float
    ) -> None:
        self.on, self.num_bytes = on, num_bytes
        self.memory_bandwidth, self.message_seconds = memory_bandwidth, message_seconds

    def several(self, pairs: Sequence[tuple[int, int]], burst: int = 1) -> list[float]:
        """Return when each pair's messages have arrived."""
        routes = np.array([self.on.routes[pair] for pair in pairs])
        begin, flows = self.on.latency[routes].sum(axis=1), np.full(len(pairs), 1.0)
        return share(begin, burst * self.num_bytes * flows, routes, self.on.bandwidth).tolist()

    def sum(self, device: int) -> float:
        """Return the time of a sum."""
        return 3 * self.num_bytes / self.memory_bandwidth

    def started(self, count: int = 1) -> float:
        """Return the calling thread's time per message."""
        return self.message_seconds


def measured(on: Topology, memory_bandwidth: float, message_seconds: float) -> MeasuredLinks:
    """Return what ``probing.measure`` would measure on a topology, by simulation."""
    k, how = on.num_devices, (memory_bandwidth, message_seconds)
    small, large = (SimulatedMessages(on, n, *how) for n in (4, probing.NUM_BYTES))
    seconds = probing.take(small, large, k, rounds=1, warmup=0, burst=probing.BURST)
    names = [f"gpu({i})" for i in range(k)]
    return probing.links(names, probing.NUM_BYTES, probing.BURST, seconds)


def table(num_devices: int, message_seconds: float) -> list[Row]:
    """Return a row for each topology and size."""
    rows = []
    for name, make in TOPOLOGIES.items():
        on = make(num_devices)
        found = measured(on, MEMORY_BANDWIDTH, message_seconds)
        for size, num_bytes in SIZES.items():
            estimated = choice.estimates(found, num_bytes)
            rule = choice.estimates(choice.assumed(found.devices), num_bytes)
            seconds = {}
            for plan in estimated:
                run = simulate(plan, num_devices, num_bytes, on, MEMORY_BANDWIDTH)
                seconds[plan] = run.seconds + len(run.hops) * message_seconds
            best = min(seconds, key=seconds.__getitem__)
            before = next(plan for plan in rule if plan in OLD)
            rows.append(Row(name, size, next(iter(estimated)), best, before, seconds))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    summary, _, details = (__doc__ or "").partition("\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=raw)
    parser.add_argument("--num-gpus", type=int, default=8, metavar="K", help="devices (default: 8)")
    help_ = "of the calling thread, to start a message and its sum (default: 4e-5)"
    parser.add_argument("--message-seconds", type=float, default=4e-5, metavar="S", help=help_)
    options = parser.parse_args(argv)
    print(columns(HEADINGS, WIDTHS))
    for row in table(options.num_gpus, options.message_seconds):
        names = (row.chosen, row.best, row.before)
        cells = itertools.chain(*((name, f"{1e3 * row.seconds[name]:.3g}") for name in names))
        print(columns((row.topology, row.size, *cells), WIDTHS))


if __name__ == "__main__":
    main()
