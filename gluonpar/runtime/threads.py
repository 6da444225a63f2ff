"""The threads that compute on the host: a team for each CPU context, and a pool for whole arrays.

The engine's worker thread of each CPU context starts an OpenMP team. K contexts get ``cores / K``
threads each, at least one. A worker that has computed can lose threads but not gain any: oneDNN
allocates an operator's scratch memory for the team it first ran with, and MXNet caches the
operator, so a larger team would write past the end (measured: a crash within a few steps). So teams
start as large as the machine (MXNet would take half of it, assuming hyperthreads), and only shrink.
Workers that start later get the smallest share so far: those of new contexts, and all of them after
a fork, as by a DataLoader with ``num_workers``, and any subprocess under Python 3.8 and 3.9.

The pool's threads, and one of the engine's, apply NumPy's functions to arrays of all CPU contexts,
block by block: :func:`run`. A block of all arrays of a task is small enough to stay in a core's
cache from being read to being written, so each array crosses the memory bus once in and once out,
whatever the function does.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import queue
import threading
from typing import Callable, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import _LIB

from gluonpar.install import processors
from gluonpar.runtime import engine, heap, memory, workspaces

BLOCK_BYTES = 1 << 19  # of one array: smaller blocks cost more calls, larger ones leave the cache
BYTES_INLINE = 2 << 20  # of all arrays: up to this, the work takes less than waking a worker
BYTES_PER_THREAD = 16 << 20  # of all arrays: with fewer bytes waking a thread does not pay

_SET_BY_USER = any(name in os.environ for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"))
_last_shared: list[mx.Context] = []
_limit: int | None = None
_first_size: int | None = None  # of workers that started before any was shrunk
_team_size: dict[int, int] = {}  # of workers that were shrunk, by device id
_libgomp = ctypes.CDLL("libgomp.so.1")  # the one that libmxnet.so has loaded


class _OpenMP(ctypes.Structure):
    """The start of ``mxnet::engine::OpenMP`` (src/engine/openmp.h): a worker's first team size."""

    _fields_ = [("enabled", ctypes.c_bool), ("thread_max", ctypes.c_int)]


_get = _LIB["_ZN5mxnet6engine6OpenMP3GetEv"]  # mxnet::engine::OpenMP::Get()
_get.restype = ctypes.POINTER(_OpenMP)
_openmp = _get().contents


def cores() -> int:
    """Return this process's number of processors: those that it may use, or of :func:`limit`."""
    return _limit or processors.usable()


def limit(num_processors: int) -> None:
    """Let all contexts of this process together use ``num_processors``; others run beside it."""
    global _limit, _last_shared
    _limit, _last_shared = num_processors, []
    if not (_SET_BY_USER or engine.has_started()):
        _openmp.thread_max = num_processors


def share(ctx: Sequence[mx.Context]) -> None:
    """Give each distinct CPU context of ``ctx`` its even share of the processors, from now on.

    GPUs are ignored. Does nothing if the user has set OMP_NUM_THREADS or MXNET_OMP_MAX_THREADS.
    Another call with the same contexts costs one comparison. From the first call on, memory that is
    freed stays in the process (:mod:`gluonpar.runtime.heap`), and from the first with several
    contexts on a thread's operators have more workspaces (:mod:`gluonpar.runtime.workspaces`).
    """
    global _last_shared, _first_size
    heap.keep_freed()
    if len(ctx) > 1:
        workspaces.widen()
    if _SET_BY_USER or ctx == _last_shared:
        return
    workers = {c.device_id: c for c in ctx if c.device_type == "cpu"}
    if not workers:
        return
    _last_shared = list(ctx)
    even = max(1, cores() // len(workers))
    if not engine.has_started():
        _openmp.thread_max = even
        return
    _first_size = _first_size or _openmp.thread_max
    for device_id, context in workers.items():
        if _team_size.get(device_id, _first_size) > even:
            _shrink(context, even)
            _team_size[device_id] = even
    _openmp.thread_max = min(_openmp.thread_max, even)


def size(ctx: mx.Context) -> int:
    """Return how many threads the CPU context ``ctx`` computes with, as far as gluonpar set it."""
    return _team_size.get(ctx.device_id, _openmp.thread_max)


def describe(ctx: Sequence[mx.Context]) -> str:
    """Return "1 thread each, of 2 processors" for CPU contexts, and "" for GPUs."""
    sizes = sorted({size(c) for c in ctx if c.device_type == "cpu"})
    each = f"{' or '.join(map(str, sizes))} thread{'s' if max(sizes, default=0) > 1 else ''} each"
    return f"{each}, of {cores()} processor{'s' * (cores() > 1)}" if sizes else ""


def _shrink(ctx: mx.Context, num_threads: int) -> None:
    """Set the size of the context's team, on its worker thread: OpenMP keeps it per thread."""

    def on_worker() -> None:
        _libgomp.omp_set_num_threads(min(num_threads, _libgomp.omp_get_max_threads()))

    marker = mx.nd.empty((1,), ctx=ctx)
    engine.push(on_worker, ctx, writes=[marker], name="gluonpar.runtime.threads")


def push(
    function: Callable[[], None], arrays: Sequence[mx.nd.NDArray], num_bytes: int, name: str
) -> None:
    """Push ``function``, which reads and writes ``arrays``, on the thread that can start first.

    It may call :func:`run` on ``num_bytes``; ``name`` is the operator's name in MXNet's profiles.
    """
    engine.push(function, memory.context(arrays[0]), writes=arrays, name=name, **place(num_bytes))


def place(num_bytes: int) -> dict[str, bool]:
    """Return the arguments of :func:`engine.push` for a function that calls :func:`run`."""
    if num_bytes >= BYTES_PER_THREAD:
        pool()  # now, since an exiting process cannot start threads
    small = num_bytes <= BYTES_INLINE
    return {"inline": small, "prioritized": not small}


def run(
    tasks: Sequence[tuple[Callable[..., None], Sequence[np.ndarray]]],
    num_bytes: int,
    max_threads: int | None = None,
) -> None:
    """Call each task's function on all blocks of its arrays; return when everything is done.

    The arrays of a task are flat and of equal length; all are cut in the same places, and the
    function is given one block of each, in no particular order and on any thread. ``num_bytes`` is
    the total of all arrays; ``max_threads`` counts the calling thread, too (default: the number of
    processors). An exception ends the work, and is raised when no thread uses the arrays any more.
    """
    if num_bytes <= BLOCK_BYTES:
        return _call_all(tasks)
    blocks = []
    for function, arrays in tasks:
        size, step = arrays[0].size, BLOCK_BYTES // arrays[0].itemsize
        if size <= step:
            blocks.append((function, arrays))
            continue
        for start in range(0, size, step):
            blocks.append((function, [array[start : start + step] for array in arrays]))
    num_threads = min(1 + num_bytes // BYTES_PER_THREAD, len(blocks))
    if num_threads <= 1:
        return _call_all(blocks)
    remaining = iter(blocks)  # threads take one at a time: a late one takes fewer

    def work() -> BaseException | None:  # not raised, which would end the pool's thread
        try:
            _call_all(remaining)
        except BaseException as error:
            blocks.clear()  # so that the other threads stop
            return error

    num_helpers = min(num_threads, max_threads or cores()) - 1
    ended: queue.SimpleQueue = queue.SimpleQueue()
    for _ in range(num_helpers):
        pool().put(lambda: ended.put(work()))
    for error in [work(), *(ended.get() for _ in range(num_helpers))]:
        if error is not None:
            raise error


def _call_each(blocks: Iterable[tuple[Callable[..., None], Sequence[np.ndarray]]]) -> None:
    for function, arrays in blocks:
        function(*arrays)


# Call blocks' functions without warnings, as MXNet's operators: overflow gives inf. np.errstate
# would take microseconds.
if hasattr(np, "geterrobj"):  # NumPy 1, which has these settings per thread

    def _call_all(blocks: Iterable) -> None:
        settings = np.geterrobj()
        np.seterrobj([settings[0], 0, None])
        try:
            _call_each(blocks)
        finally:
            np.seterrobj(settings)

else:  # in a context variable
    _SILENT = contextvars.Context()
    _SILENT.run(np.seterr, all="ignore")

    def _call_all(blocks: Iterable) -> None:
        _SILENT.copy().run(_call_each, blocks)


@functools.lru_cache(None)
def pool() -> queue.SimpleQueue:
    """Return the queue of functions that this process's pool calls: :func:`cores` threads less one.

    The functions must not raise. The threads do not keep the process from ending.
    """
    functions: queue.SimpleQueue = queue.SimpleQueue()
    for _ in range(max(1, cores() - 1)):
        threading.Thread(target=_call_from, args=[functions], daemon=True).start()
    return functions


def _call_from(functions: queue.SimpleQueue) -> None:
    while True:
        functions.get()()


os.register_at_fork(after_in_child=pool.cache_clear)  # a child has none of its parent's threads

if not (_SET_BY_USER or engine.has_started()):
    _openmp.thread_max = cores()
