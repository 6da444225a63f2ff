"""gluonpar's algorithms, MXNet's kvstores and a NumPy floor, each as something to be timed.

``mxnet device`` and ``mxnet local`` run in the process that ``import gluonpar`` has prepared, so
they have the workspace pool, the allocator's settings and the OpenMP teams that ours have.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterable, Sequence

import mxnet as mx
import numpy as np

from gluonpar import collectives
from gluonpar.collectives import partition
from gluonpar.diagnostics.benchmark import measure
from gluonpar.runtime import memory, threads

PEER, FLOOR = "mxnet device", "floor"  # what all others are compared with
FLOOR_THREADS = 2
FLOOR_ALONE = 4 << 20  # bytes of one array; for less, waking a thread costs more than it saves
FLOOR_BLOCK = 1 << 16  # elements: K blocks stay in a core's cache from being summed to being copied

Maker = Callable[[Sequence[mx.nd.NDArray], str], measure.Candidate]

COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


def makers(ctx: Sequence[mx.Context], algorithms: Iterable[str]) -> dict[str, Maker]:
    """All candidates by name: gluonpar's ``algorithms``, MXNet's kvstores, on CPUs the floor."""
    found: dict[str, Maker] = {
        name: functools.partial(_of_gluonpar, name) for name in dict.fromkeys(algorithms)
    }
    for kind in ("device", "local"):
        found[f"mxnet {kind}"] = functools.partial(_of_mxnet, kind)
    if all(context.device_type == "cpu" for context in ctx):
        found[FLOOR] = _floor
    return found


def once(candidate: measure.Candidate) -> None:
    """Run a candidate, untimed, and wait for it."""
    candidate.prepare()
    candidate.run()
    candidate.wait()


def _of_gluonpar(name: str, arrays: Sequence[mx.nd.NDArray], op: str) -> measure.Candidate:
    return measure.Candidate(
        name,
        functools.partial(collectives.allreduce, arrays, name, op),
        functools.partial(_wait, arrays),
        mx.nd.waitall,
    )


def _of_mxnet(kind: str, arrays: Sequence[mx.nd.NDArray], op: str) -> measure.Candidate:
    """MXNet's kvstore as a user would call it; what it lacks is an error when it is run."""
    store = mx.kv.create(kind)
    store.init(0, arrays[0])

    def run() -> None:
        if op != "sum":
            raise ValueError(f"MXNet's kvstore has no op {op!r}, only 'sum'")
        store.pushpull(0, arrays, out=arrays)

    return measure.Candidate(f"mxnet {kind}", run, functools.partial(_wait, arrays), mx.nd.waitall)


def _floor(arrays: Sequence[mx.nd.NDArray], op: str) -> measure.Candidate:
    """NumPy alone on the arrays' memory: large ones half on this thread, half on a standing one."""
    alone = memory.num_bytes(arrays[0]) < FLOOR_ALONE
    parts = partition.slices(arrays[0].size, 1 if alone else floor_threads())
    views: list[np.ndarray] = []

    def prepare() -> None:
        mx.nd.waitall()
        views[:] = [memory.view(array) for array in arrays]

    def run() -> None:
        others = [_pool().submit(_sum_blocks, [v[p] for v in views], op) for p in parts[1:]]
        _sum_blocks([view[parts[0]] for view in views], op)
        for other in others:
            other.result()

    return measure.Candidate(FLOOR, run, prepare=prepare)


def floor_threads() -> int:
    """How many threads the floor sums large arrays with."""
    return min(FLOOR_THREADS, threads.cores())


@functools.lru_cache(None)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, floor_threads() - 1))


def _sum_blocks(views: Sequence[np.ndarray], op: str) -> None:
    for start in range(0, views[0].size, FLOOR_BLOCK):
        first, *others = (view[start : start + FLOOR_BLOCK] for view in views)
        for other in others:
            COMBINE[op](first, other, out=first)
        if op == "mean":
            first /= len(views)
        for other in others:
            np.copyto(other, first)


def _wait(arrays: Sequence[mx.nd.NDArray]) -> None:
    for array in arrays:
        array.wait_to_read()
