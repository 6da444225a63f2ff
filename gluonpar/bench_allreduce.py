"""The all-reduce algorithms measured beside MXNet's own, by the conventions of nccl-tests.

Bytes are those of one device's array. algbw = bytes / time. busbw = algbw * 2(K-1)/K: an all-reduce
over K devices sends at least 2(K-1)/K times the bytes through every device's wires, so an algorithm
that does no more than that has busbw equal to the wires' speed, whatever K is
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

``mxnet device`` and ``mxnet local`` run in the process that ``import gluonpar`` has prepared, so
they have the workspace pool, the allocator's settings and the OpenMP teams that ours have.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np

from gluonpar import collectives, measure, memory, partition, threads
from gluonpar.collectives import checks

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
PEER, FLOOR = "mxnet device", "floor"  # what all others are compared with
FLOOR_THREADS = 2
FLOOR_ALONE = 4 << 20  # bytes of one array; for less, waking a thread costs more than it saves
FLOOR_BLOCK = 1 << 16  # elements: K blocks stay in a core's cache from being summed to being copied

Maker = Callable[[Sequence[mx.nd.NDArray], str], measure.Candidate]

_COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Row:
    """One candidate at one size. ``wrong`` counts elements over all devices; None: not checked."""

    name: str
    num_bytes: int
    elements: int
    num_devices: int
    samples: measure.Samples
    wrong: int | None = None

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes) of one device's array."""
        return self.num_bytes / self.samples.median / 1e9

    @property
    def busbw(self) -> float:
        """GB/s through one device's wires, if no more than necessary goes there."""
        return self.algbw * 2 * (self.num_devices - 1) / self.num_devices

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with all samples."""
        return {
            "name": self.name,
            "num_bytes": self.num_bytes,
            "elements": self.elements,
            "num_devices": self.num_devices,
            "median_seconds": self.samples.median,
            "quartiles_seconds": list(self.samples.quartiles),
            "algbw": self.algbw,
            "busbw": self.busbw,
            "wrong": self.wrong,
            "seconds": list(self.samples.seconds),
        }


@dataclass(frozen=True)
class Setting:
    """What all candidates are asked for, and how often; ValueError for what cannot be asked."""

    ctx: Sequence[mx.Context]
    dtype: str = "float32"
    op: str = "sum"
    rounds: int = 20
    warmup: int = 5
    check: bool = True

    def __post_init__(self) -> None:
        checks.check_op(self.op, None, np.dtype(self.dtype))
        if self.rounds < 1 or self.warmup < 0:
            raise ValueError(
                f"rounds={self.rounds}, warmup={self.warmup}; need at least 1 round to be measured "
                "and 0 before it"
            )


def sizes(min_bytes: int, max_bytes: int, factor: int, dtype: str) -> list[int]:
    """Numbers of elements: those of ``min_bytes``, times ``factor`` until ``max_bytes``.

    >>> sizes(4096, 1 << 20, 8, "float32")
    [1024, 8192, 65536]
    """
    itemsize = np.dtype(dtype).itemsize
    if min_bytes > max_bytes:
        raise ValueError(f"min_bytes={min_bytes} is more than max_bytes={max_bytes}")
    if factor < 2:
        raise ValueError(f"factor={factor} never gets from min_bytes to max_bytes; give 2 or more")
    if min_bytes < itemsize:
        raise ValueError(f"min_bytes={min_bytes} hold no {dtype}, which takes {itemsize}")
    if max_bytes // itemsize >= 1 << 31:
        raise ValueError(
            f"max_bytes={max_bytes} are {max_bytes // itemsize} elements of {dtype}, but MXNet "
            "counts an array's elements in 32 bits; stay below 2147483648"
        )
    found = []
    while min_bytes <= max_bytes:
        found.append(min_bytes // itemsize)
        min_bytes *= factor
    return found


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


def split_off_unable(
    found: dict[str, Maker], setting: Setting
) -> tuple[dict[str, Maker], dict[str, str]]:
    """``found``, tried on tiny arrays: those that can do what is asked, and the others' reasons."""
    able, reasons = {}, {}
    for name, maker in found.items():
        candidate = maker(_zeros(setting, 8), setting.op)
        try:
            _once(candidate)
        except ValueError as error:
            reasons[name] = str(error)
        else:
            able[name] = maker
    return able, reasons


def measure_size(
    found: dict[str, Maker], setting: Setting, size: int, progress: Callable = iter
) -> list[Row]:
    """A row for each candidate, all working on the same arrays of ``size`` elements.

    ``progress`` as in :func:`measure.interleaved`.
    """
    arrays = _zeros(setting, size)
    candidates = [maker(arrays, setting.op) for maker in found.values()]
    wrong = count_wrong(candidates, arrays, setting.op) if setting.check else {}
    # Zeros stay zeros however often they are summed in place; other numbers would grow to inf.
    for array in arrays:
        array[:] = 0
    samples = measure.interleaved(candidates, setting.rounds, setting.warmup, progress)
    num_bytes = memory.num_bytes(arrays[0])
    return [
        Row(name, num_bytes, size, len(arrays), samples[name], wrong.get(name)) for name in samples
    ]


def count_wrong(
    candidates: Sequence[measure.Candidate], arrays: Sequence[mx.nd.NDArray], op: str
) -> dict[str, int]:
    """Each candidate run once, untimed, on :func:`payload`: wrong elements over all devices."""
    values = payload(len(arrays), arrays[0].size, np.dtype(arrays[0].dtype))
    right = values[0].copy()
    for value in values[1:]:
        _COMBINE[op](right, value, out=right)
    if op == "mean":
        right /= len(arrays)
    wrong = {}
    for candidate in candidates:
        for array, value in zip(arrays, values):
            array[:] = value
        _once(candidate)
        wrong[candidate.name] = sum(
            int(np.count_nonzero(array.asnumpy() != right)) for array in arrays
        )
    return wrong


def payload(num_devices: int, size: int, dtype: np.dtype) -> list[np.ndarray]:
    """One array a device, counting up through all of them, so small that sums are exact.

    Every cell is unique as far as that allows; beyond, the count starts again after a prime number,
    which no chunk and no array is a multiple of: a misplaced or repeated chunk changes the sum.

    >>> [array.tolist() for array in payload(2, 3, np.dtype("int8"))]
    [[0, 1, 2], [3, 4, 5]]
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
            _COMBINE[op](first, other, out=first)
        if op == "mean":
            first /= len(views)
        for other in others:
            np.copyto(other, first)


def _zeros(setting: Setting, size: int) -> list[mx.nd.NDArray]:
    return [mx.nd.zeros((size,), ctx=context, dtype=setting.dtype) for context in setting.ctx]


def _once(candidate: measure.Candidate) -> None:
    candidate.prepare()
    candidate.run()
    candidate.wait()


def _wait(arrays: Sequence[mx.nd.NDArray]) -> None:
    for array in arrays:
        array.wait_to_read()
