"""A model of the time of an all-reduce on P processes, fitted to measurements.

    seconds(P, n) = overhead + crowding(P) * (steps(P) * latency + bytes(P, n) / bandwidth)

A process sends steps(P) = 2 ceil(log2 P) messages one after another, with bytes(P, n) =
2 n (P - 1) / P bytes in total: a reduce-scatter by halving and an all-gather by doubling (Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). The
overhead is MXNet's engine, independent of the number of processes. Processes that share a machine
of C processors take turns on them, so crowding(P) = max(1, P / C); with a machine each, it is 1.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, Sequence

import numpy as np


class Network(NamedTuple):
    """Seconds per operation, seconds per empty message, and bytes/s."""

    overhead_seconds: float
    latency_seconds: float
    bytes_per_second: float


class Measured(NamedTuple):
    """One all-reduce: number of processes, bytes, time, and crowding."""

    processes: int
    num_bytes: int
    seconds: float
    crowding: float = 1.0


def steps(num_processes: int) -> int:
    """Return the number of messages that a process sends one after another.

    >>> [steps(p) for p in (1, 2, 3, 4, 1024)]
    [0, 2, 4, 4, 20]
    """
    return 2 * math.ceil(math.log2(num_processes))


def sent_bytes(num_processes: int, num_bytes: int) -> float:
    """Return the bytes that a process sends, and receives, in an all-reduce of ``num_bytes``.

    >>> sent_bytes(4, 100)
    150.0
    """
    return 2 * num_bytes * (num_processes - 1) / num_processes


def crowding(num_processes: int, cores: int) -> float:
    """Return the number of processes per processor, if all are on one machine; at least 1.

    >>> crowding(2, 4), crowding(4, 2)
    (1.0, 2.0)
    """
    return max(1.0, num_processes / cores)


def allreduce_seconds(
    num_processes: int, num_bytes: int, network: Network, crowding: float = 1.0
) -> float:
    """Return the model's time of an all-reduce; 0 in one process.

    >>> allreduce_seconds(2, 1000, Network(0.5, 0.25, 2000.0))
    1.5
    """
    if num_processes == 1:
        return 0.0
    latency = steps(num_processes) * network.latency_seconds
    transfer = sent_bytes(num_processes, num_bytes) / network.bytes_per_second
    return network.overhead_seconds + crowding * (latency + transfer)


def fit(measured: Sequence[Measured]) -> Network:
    """Return the network that fits the measurements best.

    Least squares of the relative errors in three unknowns that must not be negative: the best
    solution without negative values over all subsets of them. Raises ValueError if the measurements
    do not determine the bandwidth.

    >>> true = Network(2e-4, 1e-4, 1e9)
    >>> points = [(p, n) for p in (2, 4) for n in (10, 10**5, 10**7)]
    >>> fitted = fit([Measured(p, n, allreduce_seconds(p, n, true)) for p, n in points])
    >>> ["%.3g" % x for x in fitted]
    ['0.0002', '0.0001', '1e+09']
    """
    rows = [
        (1.0, m.crowding * steps(m.processes), m.crowding * sent_bytes(m.processes, m.num_bytes))
        for m in measured
    ]
    seconds = np.array([m.seconds for m in measured])
    relative = np.array(rows).reshape(-1, 3) / seconds[:, None]
    scale = relative.max(axis=0, initial=1e-300)  # bytes and calls are far apart
    best = None
    for used in itertools.chain.from_iterable(
        itertools.combinations(range(3), k) for k in (3, 2, 1)
    ):
        chosen = relative[:, used] / scale[list(used)]
        fitted, _, rank, _ = np.linalg.lstsq(chosen, np.ones(len(seconds)), rcond=1e-9)
        error = float(np.sum((chosen @ fitted - 1) ** 2))
        if 2 in used and rank == len(used) and (fitted > 0).all():
            if best is None or error < best[0] * (1 - 1e-9):
                best = error, dict(zip(used, fitted / scale[list(used)]))
    if best is None or len(set((m.processes, m.num_bytes) for m in measured)) < 2:
        raise ValueError(
            "a fit needs several sizes that differ a thousandfold, "
            f"got {len(measured)} measurements of similar sizes"
        )
    overhead, latency, per_byte = (float(best[1].get(i, 0.0)) for i in range(3))
    return Network(overhead, latency, 1 / per_byte)


def step_seconds(
    num_processes: int,
    compute_seconds: float,
    num_bytes: int,
    network: Network,
    crowding: float = 1.0,
) -> tuple[float, float]:
    """Return the shortest and longest time of a training step, each process with its own batch.

    At best the transfer overlaps with backward, two thirds of the computation, and latency and
    overhead do not; at worst it begins when backward has ended.

    >>> [round(t, 3) for t in step_seconds(2, 0.3, 10**6, Network(0, 1e-3, 1e7))]
    [0.302, 0.402]
    """
    exchange = allreduce_seconds(num_processes, num_bytes, network, crowding)
    bare = allreduce_seconds(num_processes, 0, network, crowding)
    hidden = min(exchange - bare, compute_seconds * 2 / 3)
    return compute_seconds + exchange - hidden, compute_seconds + exchange
