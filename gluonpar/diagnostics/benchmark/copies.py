"""The bandwidth of copies between devices: one ``copyto`` for each ordered pair, in turns."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Sequence

import mxnet as mx

from gluonpar.diagnostics.benchmark import harness
from gluonpar.diagnostics.benchmark.harness import Candidate, Samples
from gluonpar.runtime import memory, peers


@dataclass(frozen=True)
class CopyTimes:
    """Copies of ``num_bytes`` from device ``src`` to device ``dst``, positions in the list."""

    src: int
    dst: int
    num_bytes: int
    samples: Samples

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes)."""
        return self.num_bytes / self.samples.median / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        pair = {"src": self.src, "dst": self.dst, "num_bytes": self.num_bytes}
        return {**pair, "algbw": self.algbw, **self.samples.as_dict()}


def measure(
    ctx: Sequence[mx.Context], num_bytes: int, rounds: int, progress: harness.Progress = iter
) -> list[CopyTimes]:
    """Time a copy of ``num_bytes``, of float32, between each two of ``ctx``, one at a time.

    Between GPUs it is direct where there is peer access, which is enabled as for an all-reduce.
    """
    peers.enable(ctx)
    data = [mx.nd.ones((num_bytes // 4,), ctx=context) for context in ctx]
    targets = [array.copy() for array in data]
    candidates = {}
    for i, j in itertools.permutations(range(len(ctx)), 2):
        copy = functools.partial(data[i].copyto, targets[j])
        candidates[i, j] = Candidate(f"{i} to {j}", copy, targets[j].wait_to_read, mx.nd.waitall)
    samples = harness.interleaved(list(candidates.values()), rounds, 1, progress)
    return [
        CopyTimes(*pair, memory.num_bytes(data[0]), samples[candidate.name])
        for pair, candidate in candidates.items()
    ]
