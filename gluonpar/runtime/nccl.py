"""NVIDIA's NCCL: one operator of the engine is a collective on arrays on different GPUs.

The GPUs are this process's, or one per process of a job; all processes must run their operators in
the same order. The operator runs on one of the threads for urgent operators of CPU contexts. It
launches one NCCL kernel per array on streams of our own and waits for these streams:

- MXNet waits for its stream before it reports an operator as complete. So when the engine starts
  this one, all earlier work on the arrays is complete, and our streams need not wait for MXNet's.
- The kernels of a group wait for each other, so between their launches nothing may wait for a GPU,
  as freeing memory does. They are launched with the lock held under which MXNet allocates and frees
  GPU memory, as in MXNet's kvstore 'nccl'.
- Each GPU has one stream for all sets of GPUs, and groups are launched one after another. So all
  GPUs run them in the same order, and no kernels of two groups wait for each other.
- MXNet's own kernels wait for no other GPU, so they always end.

Private to MXNet 1.9.1: ``Storage`` (include/mxnet/storage.h) has a pointer to its virtual functions
and two mutexes; the second is for GPU and pinned memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import _LIB

from gluonpar.runtime import engine, memory

LIBRARY = "libnccl.so.2"  # libmxnet.so has loaded it
DTYPES = dict(int8=0, uint8=1, int32=2, int64=4, float16=6, float32=7, float64=8)  # ncclDataType_t
OPS = {"sum": 0, "max": 2, "min": 3}  # ncclRedOp_t

Lists = Sequence[Sequence[mx.nd.NDArray]]

_storage = _LIB["_ZN5mxnet7Storage3GetEv"]  # Storage::Get()
_storage.argtypes, _storage.restype = [], ctypes.c_void_p
_GPU_MUTEX_AT = 8 + 40
_allocations_lock = threading.Lock()
_of_job: dict[int, ctypes.c_void_p] = {}  # the communicator for all processes, by the GPU's id


class _UniqueId(ctypes.Structure):  # ncclUniqueId, which is the same on all processes of a job
    _fields_ = [("internal", ctypes.c_byte * 128)]


class NCCLError(RuntimeError):
    """A function of NCCL, or a CUDA function that it needs, failed."""


def refusal(ctx: Sequence[mx.Context]) -> str:
    """Return why NCCL cannot all-reduce arrays on these contexts; "" if it can."""
    for context in ctx:
        if context.device_type != "gpu":
            return f"must be given GPU contexts only, got {context}"
        if list(ctx).count(context) > 1:
            return f"must be given every GPU once, got {context} more than once"
    if len(ctx) > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return "must launch kernels on all GPUs before one ends, but CUDA_LAUNCH_BLOCKING is set"
    if ctx and _library() is None:
        return f"needs NVIDIA's {LIBRARY}, which is not there: pip install nvidia-nccl-cu11"
    return ""


def allreduce(lists: Lists, op: str) -> None:
    """All-reduce each of ``lists``, one array per GPU, in place by 'sum', 'max' or 'min'.

    All arrays have the same dtype, one of :data:`DTYPES`. This does not wait: an error of NCCL is
    raised at the next wait for one of the arrays.
    """
    _push("ncclAllReduce", lists, range(len(lists[0])), OPS[op])


def reduce(lists: Lists, root: int, op: str) -> None:
    """Do as :func:`allreduce`, but change only the array at ``root`` in each list."""
    _push("ncclReduce", lists, [root], OPS[op], _rank(lists[0], root))


def broadcast(lists: Lists, root: int) -> None:
    """Copy each list's array at ``root``, of any dtype, into its other arrays; do not wait."""
    receivers = [i for i in range(len(lists[0])) if i != root]
    _push("ncclBroadcast", lists, receivers, _rank(lists[0], root), as_bytes=True)


def _push(
    name: str, lists: Lists, writes: Sequence[int], *arguments: int, as_bytes: bool = False
) -> None:
    """Push an operator that calls NCCL's function ``name`` for each list; it changes ``writes``."""
    lists = [tuple(data) for data in lists]
    every = [array for data in lists for array in data]
    written = [data[i] for data in lists for i in writes]
    dtype = "uint8" if as_bytes else np.dtype(lists[0][0].dtype).name
    function = functools.partial(_call, name, lists, dtype, arguments, _of_gpus)
    label = f"gluonpar.{name}"
    engine.push(function, mx.cpu(0), reads=every, writes=written, name=label, prioritized=True)


def _rank(data: Sequence[mx.nd.NDArray], i: int) -> int:
    """Return the rank of array i's GPU in the communicator of all these arrays' GPUs."""
    ids = [array.context.device_id for array in data]
    return sorted(ids).index(ids[i])


def only_gpu() -> str | None:
    """Return the PCI bus id of this process's only GPU; None if it has several, or no NCCL."""
    number, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    if not _library() or _cuda().cudaGetDeviceCount(ctypes.byref(number)) or number.value != 1:
        return None
    _check_cuda(_cuda().cudaDeviceGetPCIBusId(name, len(name), 0))
    return name.value.decode()


def sum_over_ranks(arrays: Sequence[mx.nd.NDArray], comm: Any) -> None:
    """Sum arrays of one dtype on :func:`only_gpu` over all processes, in place, and wait.

    Call it in an operator that writes ``arrays``. ``comm`` is mpi4py's communicator.
    """
    dtype, join = np.dtype(arrays[0].dtype).name, functools.partial(_of_ranks, comm)
    _call("ncclAllReduce", [(array,) for array in arrays], dtype, (OPS["sum"],), join)


def _call(
    name: str, lists: Lists, dtype: str, arguments: tuple[int, ...], communicators_of: Callable
) -> None:
    nccl, ids = _library(), [array.context.device_id for array in lists[0]]
    function, itemsize = getattr(nccl, name), np.dtype(dtype).itemsize
    calls = []
    for device_id, array in (each for data in lists for each in zip(ids, data)):
        address = ctypes.c_void_p(memory.address(array))
        size = ctypes.c_size_t(memory.num_bytes(array) // itemsize)
        calls.append((device_id, (address, address, size, DTYPES[dtype], *arguments)))
    with _no_gpu_allocations():
        communicators = communicators_of(tuple(sorted(ids)))
        streams = {device_id: _stream(device_id) for device_id in ids}
        _check(nccl.ncclGroupStart())
        try:
            for device_id, first in calls:
                _check(function(*first, communicators[device_id], streams[device_id]))
        finally:
            ended = nccl.ncclGroupEnd()
        _check(ended)
    for stream in streams.values():
        _check_cuda(_cuda().cudaStreamSynchronize(stream))


@contextlib.contextmanager
def _no_gpu_allocations() -> Iterator[None]:
    """Let no other thread allocate or free GPU memory through MXNet in a ``with`` block."""
    libc, mutex = ctypes.CDLL(None), ctypes.c_void_p(_storage() + _GPU_MUTEX_AT)
    with _allocations_lock:
        collects = gc.isenabled()
        gc.disable()  # freeing or allocating an array inside would wait for ever
        libc.pthread_mutex_lock(mutex)
        try:
            yield
        finally:
            libc.pthread_mutex_unlock(mutex)
            if collects:
                gc.enable()


@functools.lru_cache(None)
def _of_gpus(ids: tuple[int, ...]) -> dict[int, ctypes.c_void_p]:
    """Return the communicators of a set of GPUs. Allocates no GPU memory through MXNet."""
    made = (ctypes.c_void_p * len(ids))()
    _check(_library().ncclCommInitAll(made, len(ids), (ctypes.c_int * len(ids))(*ids)))
    return dict(zip(ids, map(ctypes.c_void_p, made)))


def _of_ranks(comm: Any, ids: tuple[int]) -> dict[int, ctypes.c_void_p]:
    """Return this process's communicator in a job, by the id of its only GPU."""
    if not _of_job:
        unique_id, made = _UniqueId(), ctypes.c_void_p()
        if comm.rank == 0:
            _check(_library().ncclGetUniqueId(ctypes.byref(unique_id)))
        unique_id = _UniqueId.from_buffer_copy(comm.bcast(bytes(unique_id)))
        _check(_library().ncclCommInitRank(ctypes.byref(made), comm.size, unique_id, comm.rank))
        _of_job[ids[0]] = made
    return _of_job


@functools.lru_cache(None)
def _stream(device_id: int) -> ctypes.c_void_p:
    current, stream = ctypes.c_int(), ctypes.c_void_p()
    _check_cuda(_cuda().cudaGetDevice(ctypes.byref(current)))
    _check_cuda(_cuda().cudaSetDevice(device_id))
    _check_cuda(_cuda().cudaStreamCreate(ctypes.byref(stream)))
    _check_cuda(_cuda().cudaSetDevice(current))
    return stream


@functools.lru_cache(None)
def _library(name: str = LIBRARY, describe: str = "ncclGetErrorString") -> Any:
    """Return a library, by default NCCL, whose function ``describe`` describes errors; or None."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    getattr(library, describe).restype = ctypes.c_char_p
    return library


_cuda = functools.partial(_library, memory.CUDA_RUNTIME, "cudaGetErrorString")


def _check(code: int) -> None:
    if code:
        fault = _library().ncclGetErrorString(code).decode()
        raise NCCLError(f"NCCL: {fault}; NCCL_DEBUG=INFO in the environment shows more")


def _check_cuda(code: int) -> None:
    if code:
        raise NCCLError(f"CUDA: {_cuda().cudaGetErrorString(code).decode()}")
