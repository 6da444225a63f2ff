"""Computing threads per CPU context: the machine's processors, shared out evenly.

The engine's worker thread of each CPU context starts an OpenMP team. K contexts get ``cores / K``
threads each, at least one. A worker that has computed can lose threads but not gain any: oneDNN
allocates an operator's scratch memory for the team it first ran with, and MXNet caches the
operator, so a larger team would write past the end (measured: a crash within a few steps). So teams
start as large as the machine (MXNet would take half of it, assuming hyperthreads), and only shrink.
Workers that start later get the smallest share so far: those of new contexts, and all of them after
a fork, as by a DataLoader with ``num_workers``, and any subprocess under Python 3.8 and 3.9.
"""

from __future__ import annotations

import ctypes
import os
from typing import Sequence

import mxnet as mx
from mxnet.base import _LIB

from gluonpar.runtime import engine

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
    """Return this process's number of processors: its CPU affinity, or what :func:`limit` set."""
    return _limit or len(os.sched_getaffinity(0))


def limit(num_processors: int) -> None:
    """Let all contexts of this process together use ``num_processors``; others run beside it."""
    global _limit, _last_shared
    _limit, _last_shared = num_processors, []
    if not (_SET_BY_USER or engine.has_started()):
        _openmp.thread_max = num_processors


def share(ctx: Sequence[mx.Context]) -> None:
    """Give each distinct CPU context of ``ctx`` its even share of the processors, from now on.

    GPUs are ignored. Does nothing if the user has set OMP_NUM_THREADS or MXNET_OMP_MAX_THREADS.
    Another call with the same contexts costs one comparison.
    """
    global _last_shared, _first_size
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
    return f"{each}, of {cores()} processors" if sizes else ""


def _shrink(ctx: mx.Context, num_threads: int) -> None:
    """Set the size of the context's team, on its worker thread: OpenMP keeps it per thread."""

    def on_worker() -> None:
        _libgomp.omp_set_num_threads(min(num_threads, _libgomp.omp_get_max_threads()))

    marker = mx.nd.empty((1,), ctx=ctx)
    engine.push(on_worker, ctx, writes=[marker], name="gluonpar.runtime.threads")


if not (_SET_BY_USER or engine.has_started()):
    _openmp.thread_max = cores()
