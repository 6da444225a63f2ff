"""Measure the links between devices: what messages take alone, and while others are sent.

A message is a ``copyto``, as in an all-reduce; between GPUs with peer access it is direct.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from typing import Callable, Dict, Iterable, List, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar.collectives.links import MeasuredLinks
from gluonpar.runtime import peers, threads

NUM_BYTES, ROUNDS, BURST = 1 << 20, 3, 4  # for the choice of an algorithm: 10 to 100 ms
Seconds = Dict[str, Dict[tuple, List[float]]]
Progress = Callable[[Iterable[int]], Iterable[int]]


class Messages:
    """Arrays on each device, and messages between them, whose times are in seconds."""

    def __init__(self, ctx: Sequence[mx.Context], num_bytes: int) -> None:
        """Allocate three arrays of float32 on each device; ``num_bytes`` is that of one."""
        peers.enable(ctx)
        self.ctx, self.num_bytes = ctx, max(4, num_bytes // 4 * 4)
        self.data, self.targets, self.others = (
            [mx.nd.ones((self.num_bytes // 4,), ctx=context) for context in ctx] for _ in range(3)
        )
        mx.nd.waitall()

    def one(self, src: int, dst: int) -> float:
        """Return the time of a message from ``src`` to ``dst``."""
        return self.several([(src, dst)])[-1]

    def several(self, pairs: Sequence[tuple[int, int]], burst: int = 1) -> list[float]:
        """Send ``burst`` messages for each pair at once; return when each pair's have arrived.

        It is seen in the order of ``pairs``, so those expected first should come first. A device
        can receive from two others at a time.
        """
        targets: list[mx.nd.NDArray] = []
        for _, dst in pairs:
            taken = any(target is self.targets[dst] for target in targets)
            targets.append((self.others if taken else self.targets)[dst])
        start = time.perf_counter()
        for _ in range(burst):
            for (src, _), target in zip(pairs, targets):
                self.data[src].copyto(target)
        arrived = []
        for target in targets:
            target.wait_to_read()
            arrived.append(time.perf_counter() - start)
        return arrived

    def sum(self, device: int) -> float:
        """Return the time to add an array on ``device`` to another."""
        total = self.targets[device]
        start = time.perf_counter()
        mx.nd.broadcast_add(total, self.data[device], out=total)
        total.wait_to_read()
        return time.perf_counter() - start

    def started(self, count: int = 8) -> float:
        """Return the calling thread's time to start a message to the next device and its sum."""
        k = len(self.ctx)
        start = time.perf_counter()
        for i in range(count):
            came = self.data[i % k].copyto(self.ctx[(i + 1) % k])
            mx.nd.broadcast_add(came, self.targets[(i + 1) % k], out=came)
        seconds = (time.perf_counter() - start) / count
        mx.nd.waitall()
        return seconds


def measure(
    ctx: Sequence[mx.Context],
    num_bytes: int = NUM_BYTES,
    rounds: int = ROUNDS,
    warmup: int = 1,
    burst: int = BURST,
    progress: Progress = iter,
) -> Seconds:
    """Return what :func:`take` does for ``ctx``, which holds at least two different devices.

    Messages have ``num_bytes``, and 'latency' 4.
    """
    threads.share(ctx)
    with autograd.pause():
        small, large = Messages(ctx, 4), Messages(ctx, num_bytes)
        return take(small, large, len(ctx), rounds, warmup, burst, progress)


def take(
    small: Messages,
    large: Messages,
    num_devices: int,
    rounds: int,
    warmup: int,
    burst: int,
    progress: Progress = iter,
) -> Seconds:
    """Return the seconds of each round, for :func:`links`, by what was measured and its devices.

    'latency', 'alone', 'at once': (i, j); 'out', 'in', 'sum': (i,); 'message': (). 'at once', 'out'
    and 'in' are times per message of ``burst``. The first ``warmup`` rounds do not count.
    """
    k = num_devices
    shifts = [[(i, (i + shift) % k) for i in range(k)] for shift in range(1, k)]
    for round_ in progress(range(-warmup, rounds)):
        if round_ in (-warmup, 0):
            seconds: Seconds = defaultdict(lambda: defaultdict(list))
        for pair in itertools.permutations(range(k), 2):
            seconds["latency"][pair].append(small.one(*pair))
            seconds["alone"][pair].append(large.one(*pair))
        for pairs in shifts:
            pairs = sorted(pairs, key=lambda pair: min(seconds["alone"][pair]))
            for pair, arrived in zip(pairs, large.several(pairs, burst)):
                seconds["at once"][pair].append(arrived / burst)
        for i in range(k):
            to, by = zip(*(((i, j), (j, i)) for j in _beside(i, k)))
            seconds["out"][i,].append(max(large.several(to, burst)) / burst)
            seconds["in"][i,].append(max(large.several(by, burst)) / burst)
            seconds["sum"][i,].append(large.sum(i))
        seconds["message"][()].append(small.started())
    return seconds


def links(names: Sequence[str], num_bytes: int, burst: int, seconds: Seconds) -> MeasuredLinks:
    """Return latencies and bandwidths from the medians of what :func:`take` returned."""
    k = len(names)
    latency, alone, at_once = np.zeros((3, k, k))
    for pair in itertools.permutations(range(k), 2):
        latency[pair], one, all_ = (
            np.median(seconds[name][pair]) for name in ("latency", "alone", "at once")
        )
        alone[pair] = _rate(num_bytes, one, latency[pair])
        at_once[pair] = _rate(num_bytes, all_, latency[pair] / burst)
    of_two = np.zeros((2, k))
    for i in range(k):
        beside = _beside(i, k)
        ways = ("out", latency[i, beside]), ("in", latency[beside, i])
        for way, (name, waits) in enumerate(ways):
            taken = np.median(seconds[name][i,])
            of_two[way, i] = _rate(len(beside) * num_bytes, taken, waits.max() / burst)
    sums = [_rate(3 * num_bytes, np.median(seconds["sum"][i,]), 0.0) for i in range(k)]
    message = float(np.median(seconds["message"][()]))
    return MeasuredLinks([*names], latency, alone, at_once, *of_two, float(min(sums)), message)


def _beside(i: int, k: int) -> list[int]:
    """The devices before and after device i, which are one if there are two devices."""
    return sorted({(i + 1) % k, (i - 1) % k})


def _rate(num_bytes: int, seconds: float, latency: float) -> float:
    """Bytes per second without the latency, if it is not most of the time."""
    return num_bytes / max(seconds - latency, seconds / 2)
