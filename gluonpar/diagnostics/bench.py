"""gluonpar bench: measure the all-reduce algorithms beside MXNet's kvstore and plain NumPy."""

from __future__ import annotations

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Sequence

import mxnet as mx
import numpy as np

from gluonpar import collectives
from gluonpar.diagnostics import harness
from gluonpar.diagnostics.harness import Candidate, Samples
from gluonpar.options import Bench
from gluonpar.plans import partition
from gluonpar.runtime import devices, memory, threads
from gluonpar.training import Console

PEER, NUMPY = "mxnet device", "numpy"  # the times of the others are divided by their times
NUMPY_THREADS = min(2, threads.cores())
NUMPY_MIN_BYTES = 4 << 20  # for a smaller array waking a thread costs more than it saves
NUMPY_BLOCK = 1 << 16  # elements: K blocks stay in a core's cache between the sum and the copies
HEADINGS = ("candidate", "time us", "iqr us", "algbw", "busbw", "/ device", "/ numpy", "#wrong")
WIDTHS = (-18, 10, 9, 7, 7, 8, 7, 6)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure as the options ``argv`` say; return the exit code. ``prog`` is named in messages."""
    return harness.conduct(Bench, argv, prepare, measure, prog)


def prepare(options: Bench) -> tuple:
    """Return sizes, contexts, names of candidates, and a notice on the devices."""
    collective, algorithms = options.collective, [*dict.fromkeys(options.algorithms or ())]
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min(2**31 * np.dtype(options.dtype).itemsize, memory_bytes // (4 * options.num_gpus))
    if options.max_bytes >= most:
        raise ValueError(
            f"max_bytes must be below {most}, got {options.max_bytes}: an array of MXNet has fewer "
            "than 2^31 elements, and each device's array is in this machine's memory up to 4 times"
        )
    if algorithms and collective != "allreduce":
        raise ValueError(f"algorithms must be left out with {collective}: they are allreduce's")
    ctx, notice = devices.choose(num_gpus=options.num_gpus, device=options.device)
    for name in algorithms:
        collectives.check_algorithm(name, ctx)
    names = ["gluonpar"]
    if collective == "allreduce":
        peers = [PEER, "mxnet local", NUMPY if ctx[0].device_type == "cpu" else "mxnet nccl"]
        names = [*(algorithms or collectives.usable(ctx)), *peers]
    counts = sizes(options.min_bytes, options.max_bytes, options.factor, options.dtype)
    return counts, ctx, names, notice


def measure(prepared: tuple, console: Console, record: harness.Record) -> list[str]:
    """Print a table size by size; return a complaint if there were wrong values."""
    counts, ctx, names, notice = prepared
    if notice:
        console.notice(harness.wrapped(notice))
    options = record.options
    how = threads.describe(ctx) or "; ".join(record.machine["gpus"])
    rows = {
        "devices": f"{list(ctx)}, {how}",
        options.collective: f"{options.dtype}, every value compared with NumPy's",
        "samples": f"{options.rounds} rounds after {options.warmup} to warm up, in turns",
        "columns": "median and interquartile range of the times; algbw and busbw in GB/s",
        "calls": f"{options.calls} before each wait; times are per call",
        "ratios": f"of times to those of {PEER} and {NUMPY}: below 1 is faster",
    }
    record.header(console, rows)
    for size in counts:
        results = measure_size(names, options, ctx, size)
        console.line(f"\n{results[0].num_bytes} bytes, {size} elements")
        console.line(harness.columns(HEADINGS, WIDTHS))
        for result in results:
            console.line(harness.columns(result.cells(results), WIDTHS))
        record.rows += results
        record.write()
    wrong = [f"{row.name} at {row.num_bytes} bytes" for row in record.rows if row.wrong]
    return [f"wrong values: {', '.join(wrong)}"] if wrong else []


@dataclass(frozen=True)
class Result:
    """One candidate at one size; ``wrong`` is its number of wrong elements on all devices."""

    name: str
    num_bytes: int
    elements: int
    num_devices: int
    samples: Samples
    wrong: int
    collective: str

    @property
    def algbw(self) -> float:
        """GB/s: the 1e9 bytes of one device's array over the time."""
        return self.num_bytes / self.samples.median / 1e9

    @property
    def busbw(self) -> float:
        """GB/s through one device's links, if they carry no more than they must.

        That is 2(K-1)/K arrays for an all-reduce (docs/algorithms.md), (K-1)/K for reduce-scatter
        and all-gather, and 1 for broadcast and reduce.
        """
        if self.collective in ("broadcast", "reduce"):
            return self.algbw
        passes = 2 if self.collective == "allreduce" else 1
        return self.algbw * passes * (self.num_devices - 1) / self.num_devices

    def cells(self, rows: Sequence[Result]) -> list[str]:
        """Return a line of the table; ``rows`` are the results of this size."""
        time, seconds = self.samples.median, {row.name: row.samples.median for row in rows}
        ratios = [f"{time / seconds[to]:.2f}" if to in seconds else "-" for to in (PEER, NUMPY)]
        times = (f"{1e6 * time:.1f}", f"{1e6 * self.samples.spread:.1f}")
        rates = (f"{self.algbw:.3f}", f"{self.busbw:.3f}")
        return [self.name, *times, *rates, *ratios, str(self.wrong)]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        fields = {**vars(self), "algbw": self.algbw, "busbw": self.busbw}
        samples = fields.pop("samples").as_dict()
        return {**fields, **samples}


def candidate(name: str, arrays: Sequence[mx.nd.NDArray], options: Bench) -> Candidate:
    """Return the candidate ``name`` on one array per device."""
    collective = options.collective
    if name == NUMPY:
        return _of_numpy(arrays, options.calls)
    if name.startswith("mxnet "):
        store = mx.kv.create(name.partition(" ")[2])  # with the settings of this process
        store.init(0, arrays[0])
        run = functools.partial(store.pushpull, 0, arrays, out=arrays)
    else:
        more = {"algorithm": name} if collective == "allreduce" else {}
        run = functools.partial(getattr(collectives, collective), arrays, **more)

    return Candidate(name, run, lambda: [a.wait_to_read() for a in arrays], options.calls)


def _of_numpy(arrays: Sequence[mx.nd.NDArray], calls: int) -> Candidate:
    """Return one pass of NumPy over the arrays; a second thread takes half of a large array."""
    num_threads = 1 if memory.num_bytes(arrays[0]) < NUMPY_MIN_BYTES else NUMPY_THREADS
    first, *others = partition.slices(arrays[0].size, num_threads)
    pool = ThreadPoolExecutor(max(1, len(others)))  # starts threads when it gets tasks
    mx.nd.waitall()
    views = memory.views(arrays)

    def run() -> None:
        running = pool.map(functools.partial(_sum_blocks, views), others)  # starts at once
        _sum_blocks(views, first)
        list(running)

    return Candidate(NUMPY, run, calls=calls)


def _sum_blocks(views: Sequence[np.ndarray], part: slice) -> None:
    for start in range(part.start, part.stop, NUMPY_BLOCK):
        total, *others = [view[start : min(start + NUMPY_BLOCK, part.stop)] for view in views]
        for other in others:
            np.add(total, other, out=total)
        for other in others:
            np.copyto(other, total)


def sizes(min_bytes: int, max_bytes: int, factor: int, dtype: str) -> list[int]:
    """Return the sizes of the arrays, in elements: each is ``factor`` times the one before."""
    itemsize = np.dtype(dtype).itemsize
    if not itemsize <= min_bytes <= max_bytes:
        must = f"min_bytes must be at least {itemsize}, one {dtype}, and at most max_bytes"
        raise ValueError(f"{must}={max_bytes}, got {min_bytes}")
    all_bytes = (min_bytes * factor**i for i in itertools.count())
    return [n // itemsize for n in itertools.takewhile(lambda n: n <= max_bytes, all_bytes)]


def measure_size(
    names: Sequence[str], options: Bench, ctx: Sequence[mx.Context], size: int
) -> list[Result]:
    """Return a result for each candidate; all use the same arrays of ``size`` elements."""
    arrays = [mx.nd.zeros((size,), ctx=context, dtype=options.dtype) for context in ctx]
    candidates = [candidate(name, arrays, options) for name in names]
    wrong = count_wrong(candidates, arrays, options.collective)
    # Zeros stay zeros however often they are summed in place; other numbers would grow to inf.
    for array in arrays:
        array[:] = 0
    bar = harness.progress_bar(f"{size} elements")
    samples = harness.interleaved(candidates, options.rounds, options.warmup, bar)
    shape = (memory.num_bytes(arrays[0]), size, len(arrays))
    return [Result(name, *shape, samples[name], wrong[name], options.collective) for name in names]


def count_wrong(
    candidates: Sequence[Candidate], arrays: Sequence[mx.nd.NDArray], collective: str = "allreduce"
) -> dict[str, int]:
    """Run each candidate once on random integers; return its number of wrong elements, by name."""
    values, wrong = payload(len(arrays), arrays[0].size, np.dtype(arrays[0].dtype)), {}
    right = expected(collective, values)
    for each in candidates:
        for array, value in zip(arrays, values):
            array[:] = value
        replace(each, calls=1).sample()
        pairs = zip(arrays, right)
        wrong[each.name] = sum(int((array.asnumpy() != want).sum()) for array, want in pairs)
    return wrong


def payload(num_devices: int, size: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return one array of random integers per device, which are so small that sums are exact."""
    exact = {2: 1 << 11, 4: 1 << 24, 8: 1 << 24}  # by itemsize; int32 and int64 could take more
    limit = exact.get(dtype.itemsize) or np.iinfo(dtype).max
    rng, end = np.random.RandomState(0), max(2, limit // num_devices)
    return [rng.randint(end, size=size).astype(dtype) for _ in range(num_devices)]


def expected(collective: str, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return, computed by NumPy, what the arrays ``values`` are after the collective."""
    after, size = [value.copy() for value in values], values[0].size
    adds, to_one = "reduce" in collective, collective.startswith("reduce")
    by_part = collective in ("reduce_scatter", "all_gather")  # part i belongs to device i
    for i, part in enumerate(partition.slices(size, len(values)) if by_part else [slice(size)]):
        sources = [value[part] for value in (values if adds else values[i : i + 1])]
        for array in after[i : i + 1] if to_one else after:
            array[part] = functools.reduce(np.add, sources)
    return after
