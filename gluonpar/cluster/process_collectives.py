"""Collectives over the processes of the job, and checks that all ranks do the same.

All ranks must call the same collectives in the same order, on arrays of equal shapes and dtypes.
Each is an operator of MXNet's engine. All these operators write one array, the *marker*, so the
engine runs them one at a time, in the order of the calls.
"""

from __future__ import annotations

import contextlib
import functools
from types import MappingProxyType
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar.cluster import mpi_sums
from gluonpar.cluster.facts import Facts, compare
from gluonpar.cluster.world import World, rank, world
from gluonpar.runtime import device_threads, engine, memory, nccl

PIECE_BYTES = 1 << 30  # a message has at most so many


def allreduce(
    arrays: Sequence[mx.nd.NDArray],
    compression: str | None = None,
    by_nccl: bool = True,
    op: str = "sum",
    name: str = "allreduce",
) -> None:
    """Replace each of ``arrays`` by its sum over all processes, in place, in one message per dtype.

    Arrays are dense, on any contexts. float16 is added in float32, integers wrap around, and a sum
    of bools is whether any is true. With ``compression='fp16'`` floats are sent as float16: half
    the bytes, with 11 significant bits. The result has the same bits on all processes. Nothing
    waits. ``op`` is 'sum', 'max' or 'min'; errors call the collective ``name``.

    Arrays on a GPU are copied through pinned memory. But if each process sees one GPU, and no two
    processes see the same, NCCL sums them directly, unless they are float16 or compressed, or
    ``by_nccl`` is False. Then all processes must give arrays on GPUs, or all on CPUs.
    """

    def combine(job: World, flat: np.ndarray) -> None:
        for piece in _pieces(flat):
            mpi_sums.allreduce(job, piece, op, as_float16=compression == "fp16")

    name = f"{op} by {name}" if op != "sum" else name
    name = name if compression is None else f"{name} in {compression}"
    _push(name, combine, arrays, by_nccl and compression is None and op == "sum")


def allreduce_rows(
    array: mx.nd.NDArray,
    compression: str | None = None,
    num_devices: int | None = None,
    name: str = "allreduce",
) -> None:
    """Replace a row_sparse ``array`` by its sum over all processes, as :func:`allreduce` does.

    The sum has the rows of all processes, which are added in the order of the ranks. With
    ``num_devices`` the array is a mean over that many devices of this process, and becomes the mean
    over the devices of all processes.
    """
    job = world()
    if job is None:
        return
    shape, dtype, _ = memory.kind(array)
    meet = job.meeting(f"{name} of rows of {shape} {dtype}")
    on_host = array if array.context.device_type == "cpu" else array.as_in_context(mx.cpu())

    def run() -> None:
        indices, rows = memory.read_rows(on_host)
        if num_devices is not None:
            rows = rows.astype("float32" if dtype == np.float16 else "float64") * num_devices
        how = indices, rows, compression == "fp16", num_devices or 1
        union, total, number = meet(lambda: mpi_sums.allreduce_rows(job, *how))
        total = total if num_devices is None else total / number
        memory.write_rows(on_host, union, total.astype(dtype, copy=False))

    _push_operator(name, run, [on_host])
    if on_host is not array:
        on_host.copyto(array)


def broadcast(
    arrays: Sequence[mx.nd.NDArray],
    root: int = 0,
    name: str = "broadcast",
    of: Sequence[str] | None = None,
) -> None:
    """Replace each of ``arrays`` by the array of rank ``root``, in place, by MPI. Nothing waits.

    Errors call the arrays by the names ``of``, which are the same on all ranks.
    """

    def run(job: World, flat: np.ndarray) -> None:
        for piece in _pieces(flat):
            job.comm.Bcast(piece.view("u1"), root)

    _push(name, run, arrays, of=of)


def all_gather(array: mx.nd.NDArray, sizes: Sequence[int], name: str = "all-gather") -> None:
    """Replace part i of ``array``, of ``sizes[i]`` elements, by the same part of rank i's array."""

    def run(job: World, flat: np.ndarray) -> None:
        bits = flat.view(f"u{flat.itemsize}")  # MPI has no float16
        job.comm.Allgatherv(job.mpi.IN_PLACE, [bits, [*sizes]])

    _push(name, run, [array])


def gather(value: Any, name: str = "gather") -> list:
    """Return every process's ``value``, a picklable object, by rank. Waits for all processes.

    >>> gather({"size": 3})
    [{'size': 3}]
    """
    return _wait(name, [value], lambda job: job.comm.allgather(value))


def broadcast_object(value: Any) -> Any:
    """Return rank 0's ``value``, a picklable object, on all ranks. Waits for all processes."""
    return _wait("broadcast of an object", value, lambda job: job.large_comm.bcast(value))


def gather_to_first(array: np.ndarray, name: str = "gather") -> list[np.ndarray]:
    """Return every process's ``array``, by rank, on rank 0, and [] on the others; see `gather`."""
    return _wait(name, [array], lambda job: job.large_comm.gather(array) or [])


def total(values: Any) -> np.ndarray:
    """Return the sum of ``values``, an array-like, over all processes. Waits for all processes.

    Values are added in float64 in the order of ranks, so the sum has the same bits on all of them.
    Raises ValueError on all ranks for different shapes.

    >>> total([1, 2]).tolist()
    [1.0, 2.0]
    """
    arrays = [np.asarray(value, dtype=np.float64) for value in gather(values)]
    shapes = [array.shape for array in arrays]
    if len({*shapes}) > 1:
        raise ValueError(f"values must be of one shape on all ranks, got {shapes}, by rank")
    return np.sum(arrays, axis=0)


class PendingGather:
    """Gathers every process's ``value``, a picklable object, while the program goes on.

    Then ``check(values)`` is called with the values by rank. ``compared`` are arguments of
    :func:`check_equal_async`. Errors of both are raised at the next wait for an array that was
    computed from a later collective. They call this one ``name``.
    """

    def __init__(
        self,
        value: Any,
        name: str,
        check: Callable[[list], None] | None = None,
        **compared: Any,
    ) -> None:
        self.values, job = [value], world()
        self._known: mx.nd.NDArray | None = None
        if job is None:
            return
        self._known, meet = mx.nd.empty((1,), ctx=mx.cpu(0)), job.meeting(name, **compared)

        def run() -> None:
            self.values = meet(lambda: job.comm.allgather(value))
            if check is not None:
                check(self.values)

        _push_operator("gather", run, [self._known], compared.get("arrays", {}).values())

    def wait(self) -> list:
        """Return the values by rank, when this collective has run.

        An operator that is pushed after a later collective may read ``values`` without waiting.
        """
        if self._known is not None:
            self._known.wait_to_read()
        return self.values


def check_equal(facts: Facts) -> None:
    """Raise ValueError on all ranks, naming the differences, if ``facts`` differ between ranks.

    Waits for all ranks. The values of ``facts`` are numbers, texts, None, and lists, tuples and
    dicts of these. Numbers of different types are equal if Python says so.
    """
    compare(gather(facts), "check")


def check_equal_async(
    facts: Facts,
    name: str = "check",
    arrays: Mapping[str, mx.nd.NDArray] = MappingProxyType({}),
    has_changed: bool = False,
) -> None:
    """Do what :func:`check_equal` does in an operator, which compares checksums. Nothing waits.

    If any rank ``has_changed`` some of ``arrays``, given by name, the operator also compares their
    bits. The error is raised at the next wait for an array that was computed from a later
    collective.
    """
    job = world()
    if job is not None:
        meet = functools.partial(job.meeting(name, facts, arrays, has_changed), lambda: None)
        _push_operator("check", meet, [], arrays.values())


def note(updates: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Have the next collective, or the end of the program, compare the numbers that updates used.

    ``updates`` are pairs: the name of what was updated, and the numbers by their names.
    """
    job = world()
    if job is not None:
        job.noted += updates


def together(function: Callable[[], Any], name: str = "gather") -> Any:
    """Return ``function()``. Raise a ValueError or FileNotFoundError of any rank on all ranks.

    The message names the rank, unless all ranks have the same error. Waits for all ranks.
    """
    result, failure = None, None
    try:
        result = function()
    except (ValueError, FileNotFoundError) as error:
        failure = error
    failures = gather(failure and (type(failure), str(failure)), name)
    if not any(failures):
        return result
    if failure and len({*failures}) == 1:
        raise failure
    kind, message = first = next(filter(None, failures))
    raise kind(f"rank {failures.index(first)}: {message}") from failure


def _push(
    name: str,
    run: Callable,
    arrays: Sequence[mx.nd.NDArray],
    by_nccl: bool = False,
    of: Sequence[str] | None = None,
) -> None:
    job = world()
    if job is None:
        return
    arrays = [*arrays]
    shapes = [memory.kind(array)[0] for array in arrays]
    named = [(f"shape of {each}", shape) for each, shape in zip(of or (), shapes)]
    facts: Facts = dict(named) or {"shape of each array": shapes}
    arrays = [array for array in arrays if array.size]
    for dtype in sorted({str(np.dtype(array.dtype)) for array in arrays}):
        some = [array for array in arrays if np.dtype(array.dtype) == dtype]
        call = f"{name} of {sum(array.size for array in some):,} {dtype}"
        on_gpus = [array.context.device_type == "gpu" for array in some]
        if by_nccl and job.nccl and all(on_gpus) and dtype in set(nccl.DTYPES) - {"float16"}:
            sum_up = functools.partial(nccl.sum_over_ranks, some, job.comm)
            meet = job.meeting(f"{call} by NCCL", facts)
            _push_operator(name, functools.partial(meet, sum_up), some)
            continue
        with _staged(some, dtype) if any(on_gpus) else contextlib.nullcontext(some) as on_host:
            how = job.meeting(call, facts), functools.partial(run, job), on_host
            _push_operator(name, functools.partial(_run_flat, *how), on_host)


@contextlib.contextmanager
def _staged(arrays: Sequence[mx.nd.NDArray], dtype: str) -> Iterator[list[mx.nd.NDArray]]:
    """Yield an array in pinned memory that holds copies of ``arrays``; on exit copy them back."""
    ctx = next(array.context for array in arrays if array.context.device_type == "gpu")
    ends = np.cumsum([array.size for array in arrays]).tolist()
    with memory.pinned(ctx, ends[-1], dtype) as whole, autograd.pause(), memory.any_shape():
        flat = [array.as_nd_ndarray().reshape((-1,)) for array in arrays]
        parts = [whole[end - array.size : end] for array, end in zip(flat, ends)]
        for array, part in zip(flat, parts):
            array.copyto(part)
        yield [whole]
        for array, part in zip(flat, parts):
            part.copyto(array)


def _push_operator(
    name: str,
    function: Callable[[], None],
    writes: Sequence[mx.nd.NDArray],
    reads: Iterable[mx.nd.NDArray] = (),
) -> None:
    how: dict[str, Any] = {"name": f"gluonpar.cluster.{name}", "prioritized": True}
    engine.push(function, mx.cpu(0), reads=[*reads], writes=[*writes, _marker()], **how)


def _pieces(flat: np.ndarray) -> list[np.ndarray]:
    """Cut a one-dimensional array into messages, because MPI counts elements in 32 bits."""
    size = PIECE_BYTES // flat.itemsize
    return np.split(flat, range(size, flat.size, size))


def _run_flat(meet: Callable, run: Callable, arrays: Sequence[mx.nd.NDArray]) -> None:
    views = [memory.view(array) for array in arrays]
    flat = views[0] if len(views) == 1 else np.concatenate(views)
    meet(lambda: run(flat))
    if len(views) > 1:
        for view, part in zip(views, np.split(flat, np.cumsum([view.size for view in views]))):
            np.copyto(view, part)


def _wait(call: str, alone: Any, function: Callable[[World], Any]) -> Any:
    """Return ``function(job)`` when all earlier collectives have run; in one process ``alone``."""
    job = world()
    if job is None:
        return alone
    _marker().wait_to_read()
    return job.meeting(call)(lambda: function(job))


_numbers: list[tuple[int, int]] = []  # by rank, for device_threads.number_from; empty at first


def draw_apart(ctx: Sequence[mx.Context] = ()) -> None:
    """From now on draw other random numbers, as for dropout, than the other ranks do.

    All ranks call this when their parameters are alike; until then, ranks with one seed draw the
    same initial values. ``ctx`` are this rank's devices, by default the devices of an earlier call,
    or else one. Waits for all ranks.
    """
    job = world()
    if job is None or (not ctx and _numbers):
        return
    lowest = min((each.device_id for each in ctx), default=0)
    counts, lowests = zip(*gather((len(ctx) or 1, lowest), "numbers of devices"))
    before = _numbers[job.rank] if _numbers else (0, 0)
    firsts = [sum(counts[:i]) for i in range(job.size)]
    _numbers[:] = [(first, first - lowest) for first, lowest in zip(firsts, lowests)]
    if _numbers[job.rank] != before:
        device_threads.number_from(lambda: _numbers[rank()])  # inside local(), rank() is 0


@functools.lru_cache(None)
def _marker() -> mx.nd.NDArray:
    return mx.nd.empty((1,), ctx=mx.cpu(0))
