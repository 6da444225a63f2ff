"""The all-reduce algorithms beside MXNet's own, timed by the conventions of nccl-tests.

Bytes are those of one device's array. algbw = bytes / time. busbw = algbw * 2(K-1)/K: an all-reduce
over K devices sends at least 2(K-1)/K times the bytes through every device's links, so an algorithm
that does no more has a busbw equal to the links' speed, whatever K is
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

``mxnet device``, ``mxnet local`` and, on GPUs, ``mxnet nccl`` run in the same process, so they have
the workspace pool, the allocator's settings and the OpenMP threads that ``import gluonpar`` sets.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np

from gluonpar import collectives
from gluonpar.collectives import arguments
from gluonpar.diagnostics.benchmark import harness
from gluonpar.diagnostics.benchmark.harness import Candidate, Samples
from gluonpar.plans import partition
from gluonpar.runtime import memory, threads

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
PEER, FLOOR = "mxnet device", "floor"  # the others' times are divided by theirs
FLOOR_THREADS = min(2, threads.cores())
FLOOR_MIN_BYTES = 4 << 20  # of one array; below, waking a thread costs more than it saves
FLOOR_BLOCK = 1 << 16  # elements: K blocks stay in a core's cache between the sum and the copies
COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}

Maker = Callable[[Sequence[mx.nd.NDArray], str], Candidate]


@dataclass(frozen=True)
class Result:
    """One candidate at one size; ``wrong`` counts elements on all devices (None: not checked)."""

    name: str
    num_bytes: int
    elements: int
    num_devices: int
    samples: Samples
    wrong: int | None = None

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes) of one device's array."""
        return self.num_bytes / self.samples.median / 1e9

    @property
    def busbw(self) -> float:
        """GB/s through one device's links, if no more than necessary is sent."""
        return self.algbw * 2 * (self.num_devices - 1) / self.num_devices

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        fields = {**vars(self), "algbw": self.algbw, "busbw": self.busbw}
        del fields["samples"]
        return {**fields, **self.samples.as_dict()}


@dataclass(frozen=True)
class Setting:
    """What all candidates do, and how often; ValueError for an ``op`` that ``dtype`` lacks.

    A sample is a call's share of ``calls`` calls on the same arrays and one wait after the last.
    """

    ctx: Sequence[mx.Context]
    dtype: str = "float32"
    op: str = "sum"
    rounds: int = 20
    warmup: int = 5
    check: bool = True
    calls: int = 1

    def __post_init__(self) -> None:
        arguments.check_op(self.op, None, np.dtype(self.dtype))

    def zeros(self, size: int) -> list[mx.nd.NDArray]:
        """Return one array of zeros per device."""
        return [mx.nd.zeros((size,), ctx=context, dtype=self.dtype) for context in self.ctx]


def makers(ctx: Sequence[mx.Context], algorithms: Iterable[str]) -> dict[str, Maker]:
    """Return what makes each candidate from one array per device and an op, by name.

    They are gluonpar's ``algorithms``, MXNet's key-value stores and, on CPUs, the floor: NumPy on
    the same memory.
    """
    found: dict[str, Maker] = {name: functools.partial(_of_gluonpar, name) for name in algorithms}
    gpus = all(context.device_type == "gpu" for context in ctx)
    for kind in ("device", "local", *(["nccl"] if gpus else [])):
        found[f"mxnet {kind}"] = functools.partial(_of_mxnet, kind)
    if all(context.device_type == "cpu" for context in ctx):
        found[FLOOR] = _floor
    return found


def without_unsupported(
    found: dict[str, Maker], setting: Setting
) -> tuple[dict[str, Maker], dict[str, str]]:
    """Try all on small arrays; return those that support the op, and the others' error messages."""
    supported, reasons = {}, {}
    for name, maker in found.items():
        try:
            maker(setting.zeros(8), setting.op).sample()
        except ValueError as error:
            reasons[name] = str(error)
        else:
            supported[name] = maker
    return supported, reasons


def sizes(min_bytes: int, max_bytes: int, factor: int, dtype: str) -> list[int]:
    """Return numbers of elements: those of ``min_bytes``, times ``factor`` up to ``max_bytes``.

    >>> sizes(4096, 1 << 20, 8, "float32")
    [1024, 8192, 65536]
    """
    itemsize = np.dtype(dtype).itemsize
    if not itemsize <= min_bytes <= max_bytes:
        must = f"min_bytes must be at least {itemsize}, one {dtype}, and at most max_bytes"
        raise ValueError(f"{must}={max_bytes}, got {min_bytes}")
    if factor < 2:
        raise ValueError(f"factor must be at least 2, got {factor}")
    if max_bytes // itemsize >= 1 << 31:
        must = f"max_bytes must be less than {itemsize << 31}, got {max_bytes}"
        raise ValueError(f"{must}: MXNet counts the elements of an array in 32 bits")
    found = []
    while min_bytes <= max_bytes:
        found.append(min_bytes // itemsize)
        min_bytes *= factor
    return found


def measure_size(
    found: dict[str, Maker], setting: Setting, size: int, progress: harness.Progress = iter
) -> list[Result]:
    """Return a result for each candidate, all on the same arrays of ``size`` elements."""
    arrays = setting.zeros(size)
    candidates = [maker(arrays, setting.op) for maker in found.values()]
    wrong = count_wrong(candidates, arrays, setting.op) if setting.check else {}
    # Zeros stay zeros however often they are summed in place; other numbers would grow to inf.
    for array in arrays:
        array[:] = 0
    candidates = [replace(candidate, calls=setting.calls) for candidate in candidates]
    samples = harness.interleaved(candidates, setting.rounds, setting.warmup, progress)
    what = (memory.num_bytes(arrays[0]), size, len(arrays))
    return [Result(name, *what, found, wrong.get(name)) for name, found in samples.items()]


def count_wrong(
    candidates: Sequence[Candidate], arrays: Sequence[mx.nd.NDArray], op: str
) -> dict[str, int]:
    """Run each candidate once on :func:`payload`; return its wrong elements over all devices."""
    values = payload(len(arrays), arrays[0].size, np.dtype(arrays[0].dtype))
    right = functools.reduce(COMBINE[op], values)
    if op == "mean":
        right = right / np.asarray(len(arrays), right.dtype)
    wrong = {}
    for candidate in candidates:
        for array, value in zip(arrays, values):
            array[:] = value
        candidate.sample()
        counts = [int(np.count_nonzero(array.asnumpy() != right)) for array in arrays]
        wrong[candidate.name] = sum(counts)
    return wrong


def payload(num_devices: int, size: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return one array per device, counting up through all of them, small enough for exact sums.

    Every element is unique as far as that allows; beyond, the count starts again after a prime
    number, of which no chunk and no array is a multiple: a misplaced or repeated chunk changes the
    sum.
    """
    exact = {2: 1 << 11, 4: 1 << 24, 8: 1 << 24}  # by itemsize; int32 and int64 could take more
    limit = exact.get(dtype.itemsize) or np.iinfo(dtype).max
    period = max(2, limit // num_devices)
    while period > 2 and (size % period == 0 or not _is_prime(period)):
        period -= 1
    counts = (np.arange(i * size, (i + 1) * size) % period for i in range(num_devices))
    return [count.astype(dtype) for count in counts]


def _is_prime(number: int) -> bool:
    return all(number % i for i in range(2, int(number**0.5) + 1))


def _of_gluonpar(name: str, arrays: Sequence[mx.nd.NDArray], op: str) -> Candidate:
    run = functools.partial(collectives.allreduce, arrays, name, op)
    return Candidate(name, run, functools.partial(_wait, arrays), mx.nd.waitall)


def _of_mxnet(kind: str, arrays: Sequence[mx.nd.NDArray], op: str) -> Candidate:
    store = mx.kv.create(kind)
    store.init(0, arrays[0])

    def run() -> None:
        if op != "sum":
            raise ValueError(f"op must be 'sum' for MXNet's kvstore, got {op!r}")
        store.pushpull(0, arrays, out=arrays)

    return Candidate(f"mxnet {kind}", run, functools.partial(_wait, arrays), mx.nd.waitall)


def _wait(arrays: Sequence[mx.nd.NDArray]) -> None:
    for array in arrays:
        array.wait_to_read()


def _floor(arrays: Sequence[mx.nd.NDArray], op: str) -> Candidate:
    """NumPy on the arrays' memory; one half of a large array on a second thread."""
    small = memory.num_bytes(arrays[0]) < FLOOR_MIN_BYTES
    parts = partition.slices(arrays[0].size, 1 if small else FLOOR_THREADS)
    views: list[np.ndarray] = []

    def prepare() -> None:
        mx.nd.waitall()
        views[:] = [memory.view(array) for array in arrays]

    def run() -> None:
        others = [_pool().submit(_sum_blocks, [v[p] for v in views], op) for p in parts[1:]]
        _sum_blocks([view[parts[0]] for view in views], op)
        for other in others:
            other.result()

    return Candidate(FLOOR, run, prepare=prepare)


@functools.lru_cache(None)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, FLOOR_THREADS - 1))


def _sum_blocks(views: Sequence[np.ndarray], op: str) -> None:
    for start in range(0, views[0].size, FLOOR_BLOCK):
        first, *others = (view[start : start + FLOOR_BLOCK] for view in views)
        for other in others:
            COMBINE[op](first, other, out=first)
        if op == "mean":
            first /= len(views)
        for other in others:
            np.copyto(other, first)
