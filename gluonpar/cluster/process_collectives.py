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

PIECE_BYTES = 1 << 30  # the most in one message


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
    the bytes, with 11 significant bits. The result has the same bits on all processes.
    Asynchronous. ``op`` may be 'max' or 'min' instead; errors call the collective ``name``.

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
    """Replace a row_sparse ``array`` by its sum over all processes, which has the rows of all.

    With ``num_devices`` the array is a mean over that many devices, and becomes the mean over the
    devices of all processes. Rows are added in the order of the ranks; else as :func:`allreduce`.
    """
    job = world()
    if job is None:
        return
    shape, dtype, _ = memory.kind(array)
    meet = functools.partial(
        _run, job, f"{name} of rows of {shape} {dtype}", facts=job.with_noted({})
    )
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
    """Replace each of ``arrays`` by that of rank ``root``, in place, by MPI, asynchronously.

    Errors call them by the names ``of``, which are the same on all ranks.
    """
    _push(name, lambda job, flat: _broadcast(job, flat, root), arrays, of=of)


def all_gather(array: mx.nd.NDArray, sizes: Sequence[int], name: str = "all-gather") -> None:
    """Replace part i of ``array``, of ``sizes[i]`` elements, by that part of rank i's array."""

    def run(job: World, flat: np.ndarray) -> None:
        for root, part in enumerate(np.split(flat, np.cumsum(sizes)[:-1])):
            _broadcast(job, part, root)

    _push(name, run, [array])


def gather(value: Any, name: str = "gather") -> list:
    """Return every process's ``value``, a picklable object, by rank. Waits for all processes.

    >>> gather({"size": 3})
    [{'size': 3}]
    """
    return _wait(name, [value], lambda job: job.comm.allgather(value))


def broadcast_bytes(data: bytes | None) -> Any:
    """Return rank 0's ``data`` on all ranks, as bytes or another buffer; waits for all processes.

    Other ranks' ``data`` is ignored. No rank makes a copy of it.
    """
    own: Any = data or b""

    def send(job: World) -> Any:
        size = job.comm.bcast(len(own))
        received = own if job.rank == 0 else bytearray(size)
        if size:
            _broadcast(job, np.frombuffer(received, "u1"), 0)
        return received

    return _wait("broadcast of bytes", own, send)


def gather_to_first(array: np.ndarray, name: str = "gather") -> list[np.ndarray]:
    """Return on rank 0 every process's ``array``, by rank, and [] on the others; as `gather`."""
    return _wait(name, [array], lambda job: job.large_comm.gather(array) or [])


def total(values: Any) -> np.ndarray:
    """Return the sum of ``values``, an array-like, over all processes. Waits for all processes.

    It is added in float64 in the order of ranks, so it has the same bits on all processes. Raises
    ValueError on all ranks for different shapes.

    >>> total([1, 2]).tolist()
    [1.0, 2.0]
    """
    arrays = [np.asarray(value, dtype=np.float64) for value in gather(values)]
    shapes = [array.shape for array in arrays]
    if len({*shapes}) > 1:
        raise ValueError(f"values must be of one shape on all ranks, got {shapes}, by rank")
    return np.sum(arrays, axis=0)


class PendingGather:
    """Every process's value, a picklable object, gathered while the program goes on.

    Then ``check(values)`` is called with the values by rank. Its error, and that of what is
    ``compared`` as by :func:`check_equal_async`, is raised at the next wait for an array that was
    computed from a later collective. Errors call this one ``name``.
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
        self._known = mx.nd.empty((1,), ctx=mx.cpu(0))
        compared["facts"] = job.with_noted(compared.get("facts", {}))

        def run() -> None:
            self.values = _run(job, name, lambda: job.comm.allgather(value), **compared)
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
    dicts of these; numbers of any types are compared as Python does.
    """
    compare(gather(facts), "check")


def check_equal_async(
    facts: Facts,
    name: str = "check",
    arrays: Mapping[str, mx.nd.NDArray] = MappingProxyType({}),
    has_changed: bool = False,
) -> None:
    """Do as :func:`check_equal`, without waiting: an operator compares checksums.

    The bits of ``arrays``, by name, are compared, too, if any rank ``has_changed`` some. The error
    is raised at the next wait for an array that was computed from a later collective.
    """
    job = world()
    if job is not None:
        how = job, name, lambda: None, job.with_noted(facts), arrays, has_changed
        _push_operator("check", functools.partial(_run, *how), [], arrays.values())


def note(of_names: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Have the next collective, or the end of the program, compare the numbers that updates used.

    ``of_names`` are names of what was updated, and for each the numbers by their names.
    """
    job = world()
    if job is not None:
        job.note(of_names)


def together(function: Callable[[], Any], name: str = "gather") -> Any:
    """Return ``function()``; a ValueError or FileNotFoundError on any rank is raised on all ranks.

    Its message names the rank, unless all ranks have the same error. Waits for all ranks.
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
    facts: Facts = {"shape of each array": shapes}
    if of is not None:
        facts = {f"shape of {each}": shape for each, shape in zip(of, shapes)}
    arrays = [array for array in arrays if array.size]
    for dtype in sorted({str(np.dtype(array.dtype)) for array in arrays}):
        some = [array for array in arrays if np.dtype(array.dtype) == dtype]
        call = f"{name} of {sum(array.size for array in some):,} {dtype}"
        meet = functools.partial(_run, job, facts=job.with_noted(facts))
        on_gpus = [array.context.device_type == "gpu" for array in some]
        if by_nccl and job.nccl and all(on_gpus) and dtype in set(nccl.DTYPES) - {"float16"}:
            sum_up = functools.partial(nccl.sum_over_ranks, some, job.comm)
            sum_now = functools.partial(meet, f"{call} by NCCL", sum_up)
            _push_operator(name, sum_now, some)
            continue
        with _staged(some, dtype) if any(on_gpus) else contextlib.nullcontext(some) as on_host:
            how = functools.partial(meet, call), functools.partial(run, job)
            _push_operator(name, functools.partial(_run_flat, *how, on_host), on_host)


@contextlib.contextmanager
def _staged(arrays: Sequence[mx.nd.NDArray], dtype: str) -> Iterator[list[mx.nd.NDArray]]:
    """Yield one array in pinned memory with copies of ``arrays``; on exit copy its parts back."""
    ctx = next(array.context for array in arrays if array.context.device_type == "gpu")
    size = sum(array.size for array in arrays)
    with memory.pinned(ctx, size, dtype) as whole, autograd.pause(), memory.any_shape():
        flat = [array.as_nd_ndarray().reshape((-1,)) for array in arrays]
        ends = np.cumsum([array.size for array in flat]).tolist()
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
    """Cut a one-dimensional array into messages: MPI counts elements in 32 bits."""
    size = PIECE_BYTES // flat.itemsize
    return np.split(flat, range(size, flat.size, size))


def _broadcast(job: World, flat: np.ndarray, root: int) -> None:
    for piece in _pieces(flat):
        job.comm.Bcast(piece.view("u1"), root)


def _run_flat(meet: Callable, run: Callable, arrays: Sequence[mx.nd.NDArray]) -> None:
    views = [memory.view(array) for array in arrays]
    flat = views[0] if len(views) == 1 else np.concatenate(views)
    meet(lambda: run(flat))
    if len(views) > 1:
        for view, part in zip(views, np.split(flat, np.cumsum([view.size for view in views]))):
            np.copyto(view, part)


def _wait(call: str, alone: Any, function: Callable[[World], Any]) -> Any:
    """Return ``function(job)``, after all collectives before it; ``alone`` in one process."""
    job = world()
    if job is None:
        return alone
    _marker().wait_to_read()
    return _run(job, call, lambda: function(job), job.with_noted({}))


def _run(
    job: World,
    call: str,
    function: Callable[[], Any],
    facts: Facts,
    arrays: Mapping[str, mx.nd.NDArray] = MappingProxyType({}),
    has_changed: bool = False,
) -> Any:
    """Return ``function()``, which calls MPI, when all ranks are here with this call and facts.

    If a rank ``has_changed`` arrays, all compare their bits.
    """

    def bits() -> Facts:
        return {f"{name} (checksum)": memory.checksum(array) for name, array in arrays.items()}

    with job.detector.operation(call) as number:
        job.meet(number, call, facts, bits, has_changed)
        with job.mpi_lock:
            return function()


_numbers: list[tuple[int, int]] = []  # by rank, once known: see device_threads.number_from


def draw_apart(ctx: Sequence[mx.Context] = ()) -> None:
    """From now on draw random numbers, as for dropout, that differ from other ranks'.

    All ranks call this when their parameters are alike; until then, ranks with one seed draw the
    same initial values. ``ctx`` are this rank's devices; by default those of an earlier call, or
    else one per rank. Waits for all ranks.
    """
    job = world()
    if job is None or (not ctx and _numbers):
        return
    lowest = min((each.device_id for each in ctx), default=0)
    ranks = gather((len(ctx) or 1, lowest), "numbers of devices")
    before = _numbers[job.rank] if _numbers else (0, 0)
    firsts = [sum(count for count, _ in ranks[:i]) for i in range(len(ranks))]
    _numbers[:] = [(first, first - lowest) for first, (_, lowest) in zip(firsts, ranks)]
    if _numbers[job.rank] != before:
        device_threads.number_from(lambda: _numbers[rank()])  # inside local(), rank 0's


@functools.lru_cache(None)
def _marker() -> mx.nd.NDArray:
    return mx.nd.empty((1,), ctx=mx.cpu(0))
