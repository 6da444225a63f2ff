"""What an all-reduce costs on P processes: a model of steps and bytes, fitted to what was measured.

seconds(P, n) = steps(P) * latency + bytes(P, n) / bandwidth, where a process sends
steps(P) = 2 ceil(log2 P) messages with bytes(P, n) = 2 n (P - 1) / P bytes in all: a reduce-scatter
by halving and an all-gather by doubling (Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005). Pure Python.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence


class Network(NamedTuple):
    """Seconds a message takes that holds nothing, and bytes a second of one that holds much."""

    latency_seconds: float
    bytes_per_second: float


def steps(num_processes: int) -> int:
    """Messages that a process sends one after the other."""
    return 2 * math.ceil(math.log2(num_processes))


def sent_bytes(num_processes: int, num_bytes: int) -> float:
    """Bytes that a process sends, and receives, in an all-reduce of ``num_bytes``.

    >>> sent_bytes(4, 100)
    150.0
    """
    return 2 * num_bytes * (num_processes - 1) / num_processes


def allreduce_seconds(num_processes: int, num_bytes: int, network: Network) -> float:
    """The model's time of an all-reduce; 0 in one process.

    >>> allreduce_seconds(2, 1000, Network(1e-3, 1e6))
    0.003
    """
    latency = steps(num_processes) * network.latency_seconds
    return latency + sent_bytes(num_processes, num_bytes) / network.bytes_per_second


def fit(measured: Sequence[tuple[int, int, float]]) -> Network:
    """The network that explains (processes, bytes, seconds) best, in relative error.

    Least squares of the relative errors: two unknowns, and their normal equations by hand. Raises
    ValueError if what was measured cannot tell latency from bandwidth.

    >>> true = Network(1e-4, 1e9)
    >>> points = [(p, n, allreduce_seconds(p, n, true)) for p in (2, 4) for n in (10, 10**7)]
    >>> ["%.3g" % x for x in fit(points)]
    ['0.0001', '1e+09']
    """
    rows = [(steps(p) / s, sent_bytes(p, n) / s) for p, n, s in measured]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    ya, yb = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        raise ValueError(f"{len(measured)} measurements of like sizes fit no model; take 2 sizes")
    latency = (ya * bb - yb * ab) / determinant
    per_byte = (yb * aa - ya * ab) / determinant
    if latency <= 0 or per_byte <= 0:
        raise ValueError(
            f"the fit gives latency {latency:g} s and {per_byte:g} s a byte: the measurement was "
            "disturbed, or its sizes are too alike"
        )
    return Network(latency, 1 / per_byte)


def step_seconds(
    num_processes: int, compute_seconds: float, num_bytes: int, network: Network
) -> tuple[float, float]:
    """A training step's time, each process with a batch of its own: at best and at worst.

    At best the sum is hidden behind backward, two thirds of the computation, but for its latency;
    at worst it begins when backward has ended.

    >>> [round(t, 3) for t in step_seconds(2, 0.3, 10**6, Network(1e-3, 1e7))]
    [0.302, 0.402]
    """
    exchange = allreduce_seconds(num_processes, num_bytes, network)
    latency = steps(num_processes) * network.latency_seconds
    hidden = min(exchange - latency, compute_seconds * 2 / 3)
    return compute_seconds + exchange - hidden, compute_seconds + exchange
