"""The threads that compute on the host: a team for each CPU context, and a pool for NumPy.

The engine has a worker thread for each CPU context, which starts an OpenMP team. Each of K contexts
gets ``cores / K`` threads, at least one. A team can shrink but not grow: oneDNN allocates an
operator's scratch memory for the team that first runs it, and MXNet caches the operator, so a
larger team would write past the end (measured: a crash within a few steps). So teams start with a
thread per processor (MXNet starts them with half of that, assuming hyperthreads), and only shrink.
Workers that start later get the smallest share so far. All workers start again after a fork, such
as a DataLoader with ``num_workers`` makes, and under Python 3.8 and 3.9 after any subprocess.

The pool's threads, together with a thread of the engine, apply NumPy's functions to arrays of all
CPU contexts block by block (:func:`run`). A task's blocks stay in a core's cache from being read to
being written, so each array is read from memory once and written once, whatever the function does.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import queue
import threading
from typing import Any, Callable, Iterable, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB

from gluonpar.install import processors
from gluonpar.runtime import engine, heap

BLOCK_BYTES = 1 << 19  # of one array; smaller blocks cost more calls, larger ones leave the cache
BYTES_INLINE = 2 << 20  # of all arrays; up to this the work takes less time than waking a worker
BYTES_PER_THREAD = 16 << 20  # of all arrays; for less, waking a thread takes longer than it saves

_SET_BY_USER = not {"OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"}.isdisjoint(os.environ)
_last_shared: list[mx.Context] = []
_limit: int | None = None
_first_size: int | None = None  # the size of teams that started before any was shrunk
_team_size: dict[int, int] = {}  # the sizes of teams that were shrunk, by device id
_libgomp = ctypes.CDLL("libgomp.so.1")  # the one that libmxnet.so has loaded
_openmp = _LIB["_ZN5mxnet6engine6OpenMP3GetEv"]  # mxnet::engine::OpenMP::Get()
_openmp.restype = ctypes.c_void_p
# The size with which a team starts: the second field (src/engine/openmp.h), after a bool.
_thread_max = ctypes.c_int.from_address(_openmp() + 4)


def cores() -> int:
    """Return how many processors this process uses: the limit, if one is set, or all it may use."""
    return _limit or processors.usable()


def limit(num_processors: int) -> None:
    """From now on let this process use ``num_processors``, and leave the rest to other ranks."""
    global _limit, _last_shared
    _limit, _last_shared = num_processors, []
    if not (_SET_BY_USER or engine.has_started()):
        _thread_max.value = num_processors


def share(ctx: Sequence[mx.Context]) -> None:
    """From now on give each distinct CPU context of ``ctx`` an even share of the processors.

    This ignores GPUs, and all contexts if the user has set OMP_NUM_THREADS or
    MXNET_OMP_MAX_THREADS. The first call, and a thread's first call with several contexts, also
    change the memory of operators (:mod:`gluonpar.runtime.heap`). A call with the same contexts
    costs one comparison.
    """
    global _last_shared, _first_size
    heap.keep_freed()
    if len(ctx) > 1:
        heap.widen()
    if _SET_BY_USER or ctx == _last_shared:
        return
    workers = {c.device_id: c for c in ctx if c.device_type == "cpu"}
    if not workers:
        return
    _last_shared = list(ctx)
    even = max(1, cores() // len(workers))
    if not engine.has_started():
        _thread_max.value = even
        return
    _first_size = _first_size or _thread_max.value
    for device_id, context in workers.items():
        if _team_size.get(device_id, _first_size) > even:
            _shrink(context, even)
            _team_size[device_id] = even
    _thread_max.value = min(_thread_max.value, even)


def size(ctx: mx.Context) -> int:
    """Return how many threads the team of the CPU context ``ctx`` has."""
    return _team_size.get(ctx.device_id, _thread_max.value)


def describe(ctx: Sequence[mx.Context]) -> str:
    """Return "1 thread each, of 2 processors" for CPU contexts, and "" for GPUs."""
    sizes = sorted({size(c) for c in ctx if c.device_type == "cpu"})
    each = f"{' or '.join(map(str, sizes))} thread{'s' if max(sizes, default=0) > 1 else ''} each"
    return f"{each}, of {cores()} processor{'s' * (cores() > 1)}" if sizes else ""


def _shrink(ctx: mx.Context, num_threads: int) -> None:
    """Shrink the context's team: on its worker, because OpenMP has this setting per thread."""

    def on_worker() -> None:
        _libgomp.omp_set_num_threads(min(num_threads, _libgomp.omp_get_max_threads()))

    marker = mx.nd.empty((1,), ctx=ctx)
    engine.push(on_worker, ctx, writes=[marker], name="gluonpar.runtime.threads")


def push(
    function: Callable[[], None],
    ctx: mx.Context,
    arrays: Sequence[mx.nd.NDArray],
    num_bytes: int,
    name: str,
) -> None:
    """Push ``function``, which changes ``arrays`` and may call :func:`run` for ``num_bytes``."""
    engine.push(function, ctx, writes=arrays, name=name, **place(num_bytes))


def place(num_bytes: int) -> dict[str, bool]:
    """Return the arguments with which to push a function that may call :func:`run`."""
    if num_bytes >= BYTES_PER_THREAD:
        pool()  # makes it now, because a process that is ending cannot start threads
    small = num_bytes <= BYTES_INLINE
    return {"inline": small, "prioritized": not small}


Task = Tuple[Callable[..., None], Sequence[np.ndarray]]


def run(tasks: Sequence[Task], num_bytes: int, max_threads: int | None = None) -> None:
    """Call each task's function on all blocks of its arrays; return when all is done.

    The arrays of a task are flat and of equal length. All are cut in the same places, and the
    function is given one block of each, in no particular order and on any thread. ``num_bytes`` is
    the size of all arrays together. At most ``max_threads`` compute, including the calling thread
    (default: the number of processors). An exception ends the work, and is raised when no thread
    uses the arrays any more.
    """
    if num_bytes <= BLOCK_BYTES:
        return _call_all(tasks)
    blocks = [
        (function, [array[start : start + step] for array in arrays])
        for function, arrays in tasks
        for step in [BLOCK_BYTES // arrays[0].itemsize]
        for start in range(0, arrays[0].size, step)
    ]
    num_threads = min(1 + num_bytes // BYTES_PER_THREAD, len(blocks), max_threads or cores())
    if num_threads <= 1:
        return _call_all(blocks)
    remaining = iter(blocks)  # threads take one block at a time; a late thread takes fewer
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            _call_all(remaining)
            ended.put(None)
        except BaseException as error:  # uncaught, it would end the pool's thread
            blocks.clear()  # makes the other threads stop
            ended.put(error)

    for _ in range(num_threads - 1):
        pool().put(work)
    work()
    for error in [ended.get() for _ in range(num_threads)]:
        if error is not None:
            raise error


def _call_each(blocks: Iterable[Task]) -> None:
    for function, arrays in blocks:
        function(*arrays)


# Overflow gives no warning, as in MXNet's operators. np.errstate would take several times as long.
_numpy: Any = np  # has the functions of either version
if hasattr(np, "geterrobj"):  # NumPy 1 has these settings per thread

    def _call_all(blocks: Iterable[Task]) -> None:
        settings = _numpy.geterrobj()
        _numpy.seterrobj([settings[0], 0, None])
        try:
            _call_each(blocks)
        finally:
            _numpy.seterrobj(settings)

else:  # NumPy 2 has them in a context variable
    _SILENT = contextvars.Context()
    _SILENT.run(np.seterr, all="ignore")

    def _call_all(blocks: Iterable[Task]) -> None:
        _SILENT.copy().run(_call_each, blocks)


@functools.lru_cache(None)
def pool() -> queue.SimpleQueue:
    """Return the queue of functions that the pool's threads call; the functions must not raise."""
    return serve(max(1, cores() - 1), "gluonpar pool")


def serve(num_threads: int, name: str) -> queue.SimpleQueue:
    """Return a queue; new threads call the functions that are put into it, which must not raise.

    The process may end while they work, unlike with an executor.
    """
    functions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            functions.get()()

    for _ in range(num_threads):
        threading.Thread(target=work, name=name, daemon=True).start()
    return functions


os.register_at_fork(after_in_child=pool.cache_clear)  # a child has none of its parent's threads

if not (_SET_BY_USER or engine.has_started()):
    _thread_max.value = cores()
