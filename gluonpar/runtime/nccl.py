"""NVIDIA's NCCL: collectives on arrays on different GPUs, all together one operator of the engine.

The GPUs are those of this process, or one of each process of a job. The operator runs on one of the
threads for urgent operators of CPU contexts. It launches one NCCL kernel per array on streams of
our own, and waits for these streams:

- When the engine starts the operator, all that was done to the arrays before is complete, since
  MXNet waits for its stream before it reports an operator as complete. So our streams need not wait
  for MXNet's. And the engine starts nothing on the arrays until our streams are done.
- The kernels of a group wait for each other, so nothing may come between their launches that waits
  for a GPU, as freeing memory does. They are launched under the lock under which MXNet allocates
  and frees GPU memory. (MXNet's kvstore 'nccl' does the same.)
- Each GPU has one stream for all device sets, and the groups are launched one after the other. So
  all GPUs run them in the same order, and none waits for a kernel behind the one that waits for it.
- MXNet's own kernels wait for no other GPU, so those that occupy a GPU end by themselves.

All processes run their operators in the same order, for which their caller is responsible.
Communicators are made at the first use of a set of GPUs, and kept.

Private to MXNet 1.9.1: ``Storage`` (include/mxnet/storage.h), which holds, after the pointer to its
virtual functions, two mutexes, the second of which is for GPU and pinned memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
from typing import Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import _LIB

from gluonpar.runtime import engine, memory

LIBRARY, _RUNTIME = "libnccl.so.2", "libcudart.so.11.0"  # libmxnet.so has loaded both
# ncclDataType_t and ncclRedOp_t
DTYPES = {
    **{"int8": 0, "uint8": 1, "int32": 2, "int64": 4},
    **{"float16": 6, "float32": 7, "float64": 8},
}
OPS = {"sum": 0, "max": 2, "min": 3}

Lists = Sequence[Sequence[mx.nd.NDArray]]

_storage = _LIB["_ZN5mxnet7Storage3GetEv"]  # Storage::Get()
_storage.argtypes, _storage.restype = [], ctypes.c_void_p
_GPU_MUTEX_AT = 8 + 40
_allocations_lock = threading.Lock()

_of_job: dict[int, int] = {}  # by the id of the only GPU: its communicator for all processes


class _UniqueId(ctypes.Structure):
    """``ncclUniqueId``, by which the processes of a job find each other."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class NCCLError(RuntimeError):
    """A function of NCCL, or the CUDA function that waits for it, failed."""


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

    All arrays have the same dtype, one of :data:`DTYPES`. Asynchronous: an error is raised, in
    NCCL's words, at the next wait for one of the arrays that are written.
    """
    _push("ncclAllReduce", lists, (OPS[op],), range(len(lists[0])))


def reduce(lists: Lists, root: int, op: str) -> None:
    """Replace the array at position ``root`` of each list only; otherwise as :func:`allreduce`."""
    _push("ncclReduce", lists, (OPS[op], _rank(lists[0], root)), [root])


def broadcast(lists: Lists, root: int) -> None:
    """Replace every array of each list by that at ``root``; as :func:`allreduce`, of any dtype."""
    receivers = [i for i in range(len(lists[0])) if i != root]
    _push("ncclBroadcast", lists, (_rank(lists[0], root),), receivers, "uint8")  # bytes


def _push(
    name: str,
    lists: Lists,
    arguments: tuple[int, ...],
    writes: Sequence[int],
    dtype: str | None = None,
) -> None:
    """Push one operator that calls a function of NCCL for each array, and writes some of a list.

    NCCL takes the arrays as of ``dtype``, by default their own.
    """
    lists = [tuple(data) for data in lists]
    every = [array for data in lists for array in data]
    written = [data[i] for data in lists for i in writes]
    dtype = dtype or np.dtype(lists[0][0].dtype).name
    function = functools.partial(_call, name, lists, dtype, arguments, _of_gpus)
    how = {"reads": every, "writes": written, "name": f"gluonpar.{name}", "prioritized": True}
    engine.push(function, mx.cpu(0), **how)


def _rank(data: Sequence[mx.nd.NDArray], i: int) -> int:
    """Return the rank of array i's GPU in the communicator of all of them."""
    ids = [array.context.device_id for array in data]
    return sorted(ids).index(ids[i])


def only_gpu() -> tuple[str, int] | None:
    """Return the PCI bus id of the only GPU that this process sees, and NCCL's version.

    None without NCCL, or with another number of GPUs.
    """
    number, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    if _library() is None or _cuda().cudaGetDeviceCount(ctypes.byref(number)) or number.value != 1:
        return None
    _check_cuda(_cuda().cudaDeviceGetPCIBusId(name, len(name), 0))
    _check(_library().ncclGetVersion(ctypes.byref(number)))
    return name.value.decode(), number.value


def sum_over_ranks(
    arrays: Sequence[mx.nd.NDArray], rank: int, num_ranks: int, broadcast: Callable
) -> None:
    """Sum arrays of a dtype on this process's :func:`only_gpu` over all processes, in place; wait.

    Call it in an operator that writes ``arrays``. ``broadcast(value)`` returns that of rank 0.
    """
    join = functools.partial(_of_ranks, rank, num_ranks, broadcast)
    dtype = np.dtype(arrays[0].dtype).name
    _call("ncclAllReduce", [(array,) for array in arrays], dtype, (OPS["sum"],), join)


def _call(
    name: str, lists: Lists, dtype: str, arguments: tuple[int, ...], communicators_of: Callable
) -> None:
    nccl, ids = _library(), [array.context.device_id for array in lists[0]]
    function, itemsize = getattr(nccl, name), np.dtype(dtype).itemsize
    calls = [
        (device_id, memory.address(array), memory.num_bytes(array) // itemsize)
        for data in lists
        for device_id, array in zip(ids, data)
    ]
    with _no_gpu_allocations():
        communicators = communicators_of(tuple(sorted(ids)))
        streams = {device_id: _stream(device_id) for device_id in ids}
        _check(nccl.ncclGroupStart())
        try:
            for device_id, address, size in calls:
                place = communicators[device_id], streams[device_id]
                _check(function(address, address, size, DTYPES[dtype], *arguments, *place))
        finally:
            ended = nccl.ncclGroupEnd()
        _check(ended)
    for stream in streams.values():
        _check_cuda(_cuda().cudaStreamSynchronize(stream))


@contextlib.contextmanager
def _no_gpu_allocations() -> Iterator[None]:
    """Let no other thread allocate or free GPU memory through MXNet in a ``with`` block.

    Keep the block short, and allocate and free no array in it: that would wait for the block's end.
    Therefore Python collects no garbage meanwhile, among which there could be arrays.
    """
    libc, mutex = ctypes.CDLL(None), ctypes.c_void_p(_storage() + _GPU_MUTEX_AT)
    with _allocations_lock:
        collects = gc.isenabled()
        gc.disable()
        libc.pthread_mutex_lock(mutex)
        try:
            yield
        finally:
            libc.pthread_mutex_unlock(mutex)
            if collects:
                gc.enable()


@functools.lru_cache(None)
def _of_gpus(ids: tuple[int, ...]) -> dict[int, int]:
    """Return each GPU's communicator for a set of this process's. No GPU memory is allocated."""
    made = (ctypes.c_void_p * len(ids))()
    _check(_library().ncclCommInitAll(made, len(ids), (ctypes.c_int * len(ids))(*ids)))
    return dict(zip(ids, made))


def _of_ranks(rank: int, num_ranks: int, broadcast: Callable, ids: tuple[int]) -> dict[int, int]:
    """Return the only GPU's communicator for all processes."""
    if not _of_job:
        unique_id, made = _UniqueId(), ctypes.c_void_p()
        if rank == 0:
            _check(_library().ncclGetUniqueId(ctypes.byref(unique_id)))
        unique_id = _UniqueId.from_buffer_copy(broadcast(bytes(unique_id)))
        _check(_library().ncclCommInitRank(ctypes.byref(made), num_ranks, unique_id, rank))
        _of_job[ids[0]] = made.value
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
def _library() -> ctypes.CDLL | None:
    try:
        nccl = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    arrays, place = [address, address, size, number], [address, address]
    nccl.ncclAllReduce.argtypes = [*arrays, number, *place]
    nccl.ncclReduce.argtypes = [*arrays, number, number, *place]
    nccl.ncclBroadcast.argtypes = [*arrays, number, *place]
    nccl.ncclCommInitRank.argtypes = [address, number, _UniqueId, number]
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl


@functools.lru_cache(None)
def _cuda() -> ctypes.CDLL:
    cuda = ctypes.CDLL(_RUNTIME)
    cuda.cudaGetErrorString.restype = ctypes.c_char_p
    return cuda


def _check(code: int) -> None:
    if code == 0:
        return
    nccl, words = _library(), [_library().ncclGetErrorString(code).decode()]
    if hasattr(nccl, "ncclGetLastError"):  # from NCCL 2.13
        nccl.ncclGetLastError.restype = ctypes.c_char_p
        words.append((nccl.ncclGetLastError(None) or b"").decode().strip())
    remedy = "NCCL_DEBUG=INFO in the environment shows more; other algorithms do without NCCL"
    raise NCCLError(f"NCCL: {': '.join(filter(None, words))}. {remedy}")


def _check_cuda(code: int) -> None:
    if code:
        raise NCCLError(f"CUDA: {_cuda().cudaGetErrorString(code).decode()}")
