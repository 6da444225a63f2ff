"""Collectives over the processes of the job: as operators of MXNet's engine, or at once.

Every process must call the same ones in the same order, with arrays of like sizes and dtypes. They
run one after the other, in the order in which the program asked for them: all write one *marker*,
so that the engine keeps them in order on every rank.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar.cluster import sums
from gluonpar.cluster.world import World, world
from gluonpar.runtime import engine, memory

CHECK = "GLUONPAR_CHECK"
_using_mpi = threading.Lock()


def allreduce(arrays: Sequence[mx.nd.NDArray], compression: str | None = None) -> None:
    """Replace each of ``arrays`` by its sum over all processes, in place, one message a dtype.

    Arrays are dense, on any contexts, of the same shapes and dtypes on all processes; float16 is
    added in float32. With ``compression='fp16'`` floats are sent as float16: half the bytes, 11
    binary digits. All processes get the same bits. Asynchronous, as any operator. From a GPU, a
    copy goes through pinned memory. Does nothing if there is one process.
    """
    _push("allreduce", functools.partial(_sum, compression == "fp16"), arrays)


def broadcast(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Replace each of ``arrays`` by rank 0's, in place; otherwise as :func:`allreduce`."""
    _push("broadcast", _copy, arrays)


def gather(value: Any) -> list:
    """What every process brings, in the order of ranks; waits for all.

    ``value`` is anything that pickle takes.

    >>> gather({"size": 3})
    [{'size': 3}]
    """
    job = world()
    if job is None:
        return [value]
    _marker().wait_to_read()
    return _meet_and(job, "gather", lambda: job.comm.allgather(value))


def total(values: Any) -> np.ndarray:
    """The sum of NumPy arrays of like shape over all processes, in float64; waits for all.

    Added in the order of ranks: the same bits everywhere.

    >>> total([1, 2]).tolist()
    [1.0, 2.0]
    """
    return np.sum([np.asarray(brought, dtype=np.float64) for brought in gather(values)], axis=0)


class Later:
    """A number that is summed over all processes while the program goes on."""

    def __init__(self, number: float) -> None:
        self.number, self._done = number, None
        job = world()
        if job is None:
            return
        self._done = _marker()
        engine.push(
            functools.partial(self._sum, job),
            mx.cpu(0),
            writes=[self._done],
            name="gluonpar.cluster.sum",
            prioritized=True,
        )

    def _sum(self, job: World) -> None:
        self.number = _meet_and(job, "sum", lambda: job.comm.allreduce(self.number))

    def wait(self) -> float:
        """The sum. An operator that comes after a later collective may read ``number`` as it is."""
        if self._done is not None:
            self._done.wait_to_read()
        return self.number


def _push(name: str, run: Callable, arrays: Sequence[mx.nd.NDArray]) -> None:
    job = world()
    if job is None:
        return
    for dtype in sorted({str(np.dtype(array.dtype)) for array in arrays if array.size}):
        some = [array for array in arrays if array.size and np.dtype(array.dtype) == dtype]
        staged = [_on_host(array) for array in some]
        what = f"{name} of {sum(array.size for array in some)} {dtype}"
        engine.push(
            functools.partial(_work, job, what, run, staged),
            mx.cpu(0),
            writes=[*staged, _marker()],
            name=f"gluonpar.cluster.{name}",
            prioritized=True,
        )
        for array, copy in zip(some, staged):
            if copy is not array:
                copy.copyto(array)


def _on_host(array: mx.nd.NDArray) -> mx.nd.NDArray:
    """The array itself, or its copy in memory that a GPU reads and writes directly."""
    if array.context.device_type == "gpu":
        return array.copyto(mx.cpu_pinned(0))
    return array


def _work(job: World, what: str, run: Callable, arrays: Sequence[mx.nd.NDArray]) -> None:
    views = [memory.view(array) for array in arrays]
    flat = views[0] if len(views) == 1 else np.concatenate(views)
    _meet_and(job, what, lambda: run(job, flat))
    if len(views) > 1:
        start = 0
        for view in views:
            np.copyto(view, flat[start : start + view.size])
            start += view.size


def _meet_and(job: World, what: str, run: Callable[[], Any]) -> Any:
    """Wait for all ranks to come to this operation, then do it."""
    with _using_mpi:
        number = job.watch.enter(what)
        job.meet()
        if os.environ.get(CHECK, "0") not in ("", "0"):
            _check(job, number, what)
        result = run()
        job.watch.leave()
    return result


def _check(job: World, number: int, what: str) -> None:
    whats = job.comm.allgather(what)
    if set(whats) != {what}:
        others = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(whats))
        raise RuntimeError(
            f"the ranks differ in operation {number}: {others}. All must call the same collectives "
            "in the same order, on arrays of the same sizes and dtypes"
        )


def _copy(job: World, flat: np.ndarray) -> None:
    job.comm.Bcast([flat.view(np.uint8), job.mpi.BYTE])


def _sum(as_float16: bool, job: World, flat: np.ndarray) -> None:
    if flat.dtype == np.float16 or (as_float16 and flat.dtype.kind == "f"):
        sums.as_float16(job, flat)
    else:
        sums.allreduce(job, flat)


@functools.lru_cache(None)
def _marker() -> mx.nd.NDArray:
    return mx.nd.empty((1,), ctx=mx.cpu(0))
