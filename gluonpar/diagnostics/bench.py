"""gluonpar bench: measure the all-reduce algorithms beside MXNet's kvstore and plain NumPy.

--collective measures gluonpar's other collectives beside NumPy. The figures mean the same as
in nccl-tests.
"""

# Bytes are those of one device's array. algbw = bytes / time. busbw = algbw * 2(K-1)/K: an
# all-reduce over K devices sends at least 2(K-1)/K times the bytes through every device's links, so
# an algorithm that does no more has a busbw equal to the links' speed, whatever K is. The factor is
# (K-1)/K for reduce-scatter and all-gather, and 1 for broadcast and reduce
# (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
#
# MXNet's stores run in the same process, so with the settings that ``import gluonpar`` makes.

from __future__ import annotations

import argparse
import functools
import re
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

import mxnet as mx
import numpy as np

from gluonpar import collectives
from gluonpar.collectives import arguments
from gluonpar.diagnostics import harness
from gluonpar.diagnostics.harness import Candidate, Samples, at_least
from gluonpar.install import entry
from gluonpar.plans import COMBINE, partition
from gluonpar.runtime import devices, memory, threads
from gluonpar.training import Console

EXAMPLES = """
gluonpar bench --num-gpus 2
gluonpar bench --num-gpus 4 --device cpu --min-bytes 64K --factor 4
gluonpar bench --algorithms host,ring --json bench.json
gluonpar bench --collective reduce_scatter
"""
COLLECTIVES = ("allreduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
ADDING = ("allreduce", "reduce", "reduce_scatter")
COPYING = ("allreduce", "broadcast", "all_gather")
BY_PART = ("reduce_scatter", "all_gather")  # part i of all arrays belongs to device i
PEER, NUMPY = "mxnet device", "numpy"  # the others' times are divided by theirs
NUMPY_THREADS = min(2, threads.cores())
NUMPY_MIN_BYTES = 4 << 20  # of one array; below, waking a thread costs more than it saves
NUMPY_BLOCK = 1 << 16  # elements: K blocks stay in a core's cache between the sum and the copies
HEADINGS = ("candidate", "time us", "iqr us", "algbw", "busbw", "/ device", "/ numpy", "#wrong")
WIDTHS = (-18, 10, 9, 7, 7, 8, 7, 6)

Task = List[Tuple[List[np.ndarray], List[np.ndarray]]]


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Measure what ``argv`` asks for; return the exit code. ``prog`` is the name in messages."""
    return harness.conduct(parser(prog), argv, prepare, measure)


def parser(prog: str | None) -> harness.BenchmarkParser:
    """Return the options, named as in nccl-tests."""
    epilog = entry.epilog(EXAMPLES, harness.EXIT_CODES)
    made = harness.BenchmarkParser(entry.about(__doc__), prog=prog, epilog=epilog)
    size, count = {"type": num_bytes, "metavar": "SIZE"}, {"metavar": "N"}
    made.add("--min-bytes", "4K", "smallest array of one device, such as 4096 or 4K", **size)
    made.add("--max-bytes", "64M", "largest array", **size)
    made.add("--factor", 8, "ratio of one size to the one before", type=at_least(2), **count)
    made.add("--num-gpus", 2, "number of devices", type=int, metavar="K")
    made.add("--dtype", "float32", "dtype of the arrays", choices=arguments.DTYPES)
    made.add("--collective", "allreduce", "gluonpar's function to measure", choices=COLLECTIVES)
    made.add("--op", "sum", "how arrays are combined", choices=arguments.OPS)
    made.add("--iters", 20, "samples", type=at_least(1), dest="rounds", **count)
    help_ = "calls on the same arrays before the wait; a sample is one call's share"
    made.add("--calls", 1, help_, type=at_least(1), **count)
    made.add("--warmup", 5, "samples before that do not count", type=at_least(0), **count)
    made.add("--check", 1, "compare every value with NumPy's", type=int, choices=(0, 1))
    known = harness.one_of(collectives.ALGORITHMS)
    help_ = "algorithms of allreduce to measure (default: all that these devices can use)"
    made.add_argument("--algorithms", metavar="A,B", type=known, help=help_)
    return made


def num_bytes(argument: str) -> int:
    """Convert 4096, 4K, 64M or 1G to a number."""
    match = re.fullmatch(r"(\d{1,20})([KMG]?)", argument.upper())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must be a size such as 4096, 4K, 64M or 1G, got {argument!r}"
        )
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


def prepare(options: argparse.Namespace) -> tuple:
    """Return sizes, contexts, candidates, why others are left out, and a notice on the devices."""
    counts = sizes(options.min_bytes, options.max_bytes, options.factor, options.dtype)
    if options.num_gpus == 1:
        raise ValueError("one device has nothing to exchange; --num-gpus must be at least 2")
    collective = options.collective
    if options.algorithms and collective != "allreduce":
        raise ValueError(f"--algorithms is for allreduce only; leave it out with {collective}")
    if options.op != "sum" and collective not in ADDING:
        raise ValueError(f"{collective} adds nothing; leave out --op {options.op}")
    chosen = devices.choose(num_gpus=options.num_gpus, device=options.device)
    arguments.check_op(options.op, None, np.dtype(options.dtype))
    names, left_out = [], {}
    for name in candidate_names(options, chosen.ctx):
        try:
            candidate(name, zeros(options, chosen.ctx, 8), options).sample()
            names.append(name)
        except ValueError as error:  # it does not support the op
            left_out[name] = str(error)
    return counts, chosen.ctx, names, left_out, chosen.notice


def measure(prepared: tuple, console: Console, record: harness.Record) -> list[str]:
    """Print a table size by size; return a complaint if there were wrong values."""
    counts, ctx, names, left_out, notice = prepared
    record.more["left_out"] = left_out
    reasons = [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    for line in filter(None, [notice, *reasons]):
        console.notice(harness.wrapped(line))
    header(console, record, ctx)
    for size in counts:
        rows = measure_size(names, record.options, ctx, size)
        console.line(f"\n{rows[0].num_bytes} bytes, {size} elements")
        console.line(harness.columns(HEADINGS, WIDTHS))
        for row in rows:
            console.line(harness.columns(row.cells(rows), WIDTHS))
        record.rows += rows
        record.write()
    busbw = {name: [row.busbw for row in record.rows if row.name == name] for name in names}
    console.line("\naverage busbw over all sizes, GB/s")
    for name, each in busbw.items():
        console.line(harness.columns((name, f"{statistics.fmean(each):.3f}"), WIDTHS))
    wrong = [f"{row.name} at {row.num_bytes} bytes" for row in record.rows if row.wrong]
    return [f"wrong values: {', '.join(wrong)}"] if wrong else []


def header(console: Console, record: harness.Record, ctx: Sequence[mx.Context]) -> None:
    """Print the conditions of the measurement and the meaning of the figures."""
    options = record.options
    how = threads.describe(ctx) or "; ".join(record.machine["gpus"])
    checked = "every value compared with NumPy's" if options.check else "values not checked"
    rows = {
        "devices": f"{list(ctx)}, {how}",
        NUMPY: f"on the same memory, {NUMPY_THREADS} threads from {NUMPY_MIN_BYTES} bytes up",
        options.collective: f"{combined(options)}{options.dtype}, {checked}",
        "calls": f"{options.calls} before each wait; times are per call",
        "samples": f"{options.rounds} rounds after {options.warmup} to warm up, all candidates in "
        "turns; time is the median, iqr the interquartile range, algbw and busbw in GB/s",
        "ratios": f"of times to those of {PEER} and {NUMPY}: below 1 is faster",
    }
    record.header(console, rows)


def combined(options: argparse.Namespace) -> str:
    """Return how arrays are combined, such as "sum of "; "" if the collective adds nothing."""
    return f"{options.op} of " if options.collective in ADDING else ""


@dataclass(frozen=True)
class Result:
    """One candidate at one size; ``wrong`` counts elements on all devices (None: not checked)."""

    name: str
    num_bytes: int
    elements: int
    num_devices: int
    samples: Samples
    wrong: int | None = None
    collective: str = "allreduce"

    @property
    def algbw(self) -> float:
        """GB/s (1e9 bytes) of one device's array."""
        return self.num_bytes / self.samples.median / 1e9

    @property
    def busbw(self) -> float:
        """GB/s through one device's links, if no more than necessary is sent."""
        if self.collective in ("broadcast", "reduce"):
            return self.algbw
        passes = 2 if self.collective == "allreduce" else 1
        return self.algbw * passes * (self.num_devices - 1) / self.num_devices

    def cells(self, rows: Sequence[Result]) -> list[str]:
        """Return a line of the table; ``rows`` are the results of this size."""
        time, seconds = self.samples.median, {row.name: row.samples.median for row in rows}
        ratios = [f"{time / seconds[to]:.2f}" if to in seconds else "-" for to in (PEER, NUMPY)]
        times = (f"{1e6 * time:.1f}", f"{1e6 * self.samples.spread:.1f}")
        wrong = "-" if self.wrong is None else str(self.wrong)
        return [self.name, *times, f"{self.algbw:.3f}", f"{self.busbw:.3f}", *ratios, wrong]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        fields = {**vars(self), "algbw": self.algbw, "busbw": self.busbw}
        del fields["samples"]
        return {**fields, **self.samples.as_dict()}


def candidate_names(options: argparse.Namespace, ctx: Sequence[mx.Context]) -> list[str]:
    """Return the names of gluonpar's candidates, MXNet's key-value stores and, on CPUs, NumPy."""
    kinds, names = {context.device_type for context in ctx}, ["gluonpar"]
    if options.collective == "allreduce":
        names = [*(options.algorithms or collectives.usable(ctx)), "mxnet device", "mxnet local"]
        names += ["mxnet nccl"] if kinds == {"gpu"} else []
    return [*names, NUMPY] if kinds == {"cpu"} else names


def candidate(name: str, arrays: Sequence[mx.nd.NDArray], options: argparse.Namespace) -> Candidate:
    """Return the candidate ``name`` on one array per device; ValueError if it lacks the op."""
    if name == NUMPY:
        return _of_numpy(arrays, options)
    if name.startswith("mxnet "):
        if options.op != "sum":
            raise ValueError(f"op must be 'sum' for MXNet's kvstore, got {options.op!r}")
        store = mx.kv.create(name.partition(" ")[2])
        store.init(0, arrays[0])
        run = functools.partial(store.pushpull, 0, arrays, out=arrays)
    else:
        more = {"op": options.op} if options.collective in ADDING else {}
        if options.collective == "allreduce":
            more["algorithm"] = name
        run = functools.partial(getattr(collectives, options.collective), arrays, **more)

    def wait() -> None:
        for array in arrays:
            array.wait_to_read()

    return Candidate(name, run, wait, mx.nd.waitall, options.calls)


def zeros(options: argparse.Namespace, ctx: Sequence[mx.Context], size: int) -> list[mx.nd.NDArray]:
    """Return one array of zeros per device."""
    return [mx.nd.zeros((size,), ctx=context, dtype=options.dtype) for context in ctx]


def sizes(min_bytes: int, max_bytes: int, factor: int, dtype: str) -> list[int]:
    """Return the arrays' sizes in elements: each is ``factor`` times the one before.

    >>> sizes(4096, 1 << 20, 8, "float32")
    [1024, 8192, 65536]
    """
    itemsize = np.dtype(dtype).itemsize
    if not itemsize <= min_bytes <= max_bytes:
        must = f"min_bytes must be at least {itemsize}, one {dtype}, and at most max_bytes"
        raise ValueError(f"{must}={max_bytes}, got {min_bytes}")
    if max_bytes // itemsize >= 1 << 31:
        must = f"max_bytes must be less than {itemsize << 31}, got {max_bytes}"
        raise ValueError(f"{must}: MXNet counts the elements of an array in 32 bits")
    counts = []
    while min_bytes <= max_bytes:
        counts.append(min_bytes // itemsize)
        min_bytes *= factor
    return counts


def measure_size(
    names: Sequence[str], options: argparse.Namespace, ctx: Sequence[mx.Context], size: int
) -> list[Result]:
    """Return a result for each candidate, all on the same arrays of ``size`` elements."""
    arrays = zeros(options, ctx, size)
    candidates = [candidate(name, arrays, options) for name in names]
    wrong = count_wrong(candidates, arrays, options) if options.check else {}
    # Zeros stay zeros however often they are summed in place; other numbers would grow to inf.
    for array in arrays:
        array[:] = 0
    bar = harness.progress_bar(f"{size} elements")
    samples = harness.interleaved(candidates, options.rounds, options.warmup, bar)
    shape = (memory.num_bytes(arrays[0]), size, len(arrays))
    return [
        Result(name, *shape, each, wrong.get(name), options.collective)
        for name, each in samples.items()
    ]


def count_wrong(
    candidates: Sequence[Candidate], arrays: Sequence[mx.nd.NDArray], options: argparse.Namespace
) -> dict[str, int]:
    """Run each candidate once on :func:`payload`; return its wrong elements over all devices."""
    values = payload(len(arrays), arrays[0].size, np.dtype(arrays[0].dtype))
    right, wrong = [value.copy() for value in values], {}
    (task,) = numpy_tasks(options.collective, right)
    _sum_blocks(task, options.op)
    for each in candidates:
        for array, value in zip(arrays, values):
            array[:] = value
        each.prepare()
        each.run()
        each.wait()
        pairs = zip(arrays, right)
        wrong[each.name] = sum(int((array.asnumpy() != want).sum()) for array, want in pairs)
    return wrong


def payload(num_devices: int, size: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return one array of random integers per device, which are so small that sums are exact."""
    exact = {2: 1 << 11, 4: 1 << 24, 8: 1 << 24}  # by itemsize; int32 and int64 could take more
    limit = exact.get(dtype.itemsize) or np.iinfo(dtype).max
    rng, end = np.random.RandomState(0), max(2, limit // num_devices)
    return [rng.randint(end, size=size).astype(dtype) for _ in range(num_devices)]


def _of_numpy(arrays: Sequence[mx.nd.NDArray], options: argparse.Namespace) -> Candidate:
    """NumPy on the arrays' memory; one half of a large array on a second thread."""
    num_threads = 1 if memory.num_bytes(arrays[0]) < NUMPY_MIN_BYTES else NUMPY_THREADS
    tasks: list[Task] = []
    others = ThreadPoolExecutor(max(1, num_threads - 1))  # starts threads when it gets tasks

    def prepare() -> None:
        mx.nd.waitall()
        tasks[:] = numpy_tasks(options.collective, memory.views(arrays), num_threads)

    def run() -> None:
        running = [others.submit(_sum_blocks, task, options.op) for task in tasks[1:]]
        _sum_blocks(tasks[0], options.op)
        for future in running:
            future.result()

    return Candidate(NUMPY, run, prepare=prepare, calls=options.calls)


def numpy_tasks(collective: str, arrays: Sequence[np.ndarray], num_threads: int = 1) -> list[Task]:
    """Return a collective as a task per thread: slices to add up in the first, slices to copy to.

    The sum replaces the elements of the first slice; the others get copies of these.
    """
    k, size = len(arrays), arrays[0].size
    tasks: list[Task] = [[] for _ in range(num_threads)]
    for i, part in enumerate(partition.slices(size, k) if collective in BY_PART else [slice(size)]):
        own, *others = [array[part] for array in (*arrays[i:], *arrays[:i])]
        for task, share in zip(tasks, partition.slices(own.size, num_threads)):
            rest = [other[share] for other in others]
            added = [own[share], *(rest if collective in ADDING else [])]
            task.append((added, rest if collective in COPYING else []))
    return tasks


def _sum_blocks(task: Task, op: str) -> None:
    for added, copies in task:
        for start in range(0, added[0].size, NUMPY_BLOCK):
            block = slice(start, start + NUMPY_BLOCK)
            total = added[0][block]
            for view in added[1:]:
                COMBINE["sum" if op == "mean" else op](total, view[block], out=total)
            if op == "mean":
                total /= len(added)
            for view in copies:
                np.copyto(view[block], total)
