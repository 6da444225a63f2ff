"""The public collectives: arguments are checked here, once, and arrays then exchanged."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster
from gluonpar.collectives import exchange
from gluonpar.collectives.choice import Choice, choose
from gluonpar.collectives.exchange import Exchange, in_buckets
from gluonpar.options import DTYPES
from gluonpar.runtime import devices, interrupts, memory

OPS = ("sum", "mean", "max", "min")

# Functions that push the sum of a list that has been checked before: checking takes longer than a
# small sum. The arrays are not kept alive (memory.fingerprint).
_prepared: dict[tuple, Callable] = {}
_MOST_PREPARED = 128
after_sums: list[Callable] = []  # called with lists whose arrays a program has replaced by sums


def allreduce(data: Sequence[mx.nd.NDArray], algorithm: str | None = None, op: str = "sum") -> None:
    """Replace every array of ``data`` by the sum of all of them, in place.

    In a job of several processes the sum is over the devices of all of them, and all must call this
    with arrays of one shape and dtype, and the same ``op``; inside ``gluonpar.cluster.local()`` it
    is over this process's devices only. So are all collectives.

    For the gradients of a step use :func:`gluonpar.allreduce_grads`. It sums the gradients of all
    parameters, and leaves out gradients of an earlier batch, which devices without samples still
    have; this function adds what the arrays hold.

    ``data`` holds one array per device: any number of dense arrays, ``mx.nd`` or ``mx.np``, of one
    shape (size 0 and 0-d included) and dtype (float16, float32, float64, int8, int32, int64 or
    uint8), on CPUs, GPUs or both; a context may occur more than once. Or all are row_sparse: the
    sum has the rows that any of them has, ``op`` is 'sum' or 'mean', and nothing else can be given
    (:data:`gluonpar.collectives.executor.ROW_SPARSE`). ``algorithm`` is a name in
    :data:`ALGORITHMS`; None chooses one (see :func:`explain`). ``op`` is 'sum', 'mean' (floats
    only), 'max' or 'min'. float16 is added in float16, for the mean in float32. A mean never
    overflows. Integers wrap around.

    All arrays end with the same bits, and with one algorithm the same values always give the same
    bits. Asynchronous, as all MXNet operators. An error during execution is raised at the next wait
    for one of the arrays. Several threads may call it; on the same arrays their calls take place
    one after another. Autograd records nothing: inside ``autograd.record()`` the values change, but
    not the graph.

    Raises ValueError for an empty list, different shapes, dtypes or storage types, csr arrays, the
    same array twice, an unknown algorithm or op, 'host' with arrays on GPUs, and 'nccl' with
    arrays on CPUs, with two on one GPU, or without NCCL; TypeError if ``data`` is not a list of
    MXNet arrays. From ``allreduce`` in Dive into Deep Learning, 13.5.4.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1)) * 2]
    >>> allreduce(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[3.0, 3.0], [3.0, 3.0]]
    >>> allreduce(data, algorithm="ring", op="mean")
    >>> data[1].asnumpy().tolist()
    [3.0, 3.0]
    """
    key = _key(data, algorithm, op, cluster.size())
    prepared = _prepared.get(key)
    if prepared is not None:
        with interrupts.held(), exchange.pushing:
            prepared([data])
    else:
        over = checked_exchange({"data": data}, algorithm, op, row_sparse=True)
        over.allreduce(in_buckets([data]))
        prepare = over.chosen([data]).prepare
        one_sum = op != "mean" and len(data) > 1 and memory.num_bytes(data[0]) > 0
        if prepare is not None and one_sum and over.num_processes == 1:
            if len(_prepared) == _MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = prepare([data], op)
    for function in after_sums:
        function([data])


def _key(data: Any, *how: Any) -> tuple:
    """Return a key that identifies the live arrays of a list; () if it holds anything else."""
    try:
        return (*map(memory.fingerprint, data), *how) if isinstance(data, (list, tuple)) else ()
    except TypeError:
        return ()


def allreduce_many(
    lists: Iterable[Sequence[mx.nd.NDArray]], algorithm: str | None = None, op: str = "sum"
) -> None:
    """:func:`allreduce` every list of ``lists`` in place, in buckets of up to 4 MiB per device.

    ``lists[j]`` holds variable j's arrays, one per device, on the same contexts for every j. A
    bucket holds consecutive variables of one dtype; a variable above 4 MiB has one to itself.
    'host' and 'nccl' sum a bucket in one operator, without copies; for the other algorithms a
    bucket is copied into one array per device and back.

    The results have the bits of separate calls, except for floats added by algorithms that cut
    arrays into chunks: an element's position determines the order of its additions. Raises as
    :func:`allreduce` does, before anything has changed; also ValueError for lists on different
    contexts, and for an array in two lists.

    >>> import mxnet as mx
    >>> grads = [[mx.nd.ones((n,), ctx=mx.cpu(i)) for i in range(2)] for n in (3, 1)]
    >>> allreduce_many(grads)
    >>> grads[0][1].asnumpy().tolist(), grads[1][0].asnumpy().tolist()
    ([2.0, 2.0, 2.0], [2.0])
    """
    lists = [*lists]  # it may be a generator
    if lists:
        exchange_of(lists, algorithm, op).allreduce(in_buckets(lists))
        for function in after_sums:
            function(lists)


def exchange_of(
    lists: Sequence[Sequence[mx.nd.NDArray]], algorithm: str | None = None, op: str = "sum"
) -> Exchange:
    """Check ``lists``, at least one, as :func:`allreduce_many` does; return their exchange."""
    named = {f"lists[{j}]": data for j, data in enumerate(lists)}
    return checked_exchange(named, algorithm, op, row_sparse=True)


def explain(data: Sequence[mx.nd.NDArray]) -> Choice:
    """Return the algorithm that :func:`allreduce` chooses for ``data``, and the reason.

    The rule is in :mod:`gluonpar.collectives.choice`. It is about one process; between processes
    arrays are summed by MPI or NCCL (docs/cluster.md). Raises as :func:`allreduce` does.

    >>> import mxnet as mx
    >>> print(explain([mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(4)]))
    host: all arrays are in the host's memory, so it can sum them in place
    """
    dtype, stype = check_list(data, row_sparse=True)
    check_op("sum", dtype)
    ctx = [*map(memory.context, data)]
    if stype == "row_sparse":
        choice = Choice("row_sparse", "rows are sent to the first device, added, and sent back")
    else:
        choice = choose(ctx, memory.num_bytes(data[0]))
    staged = devices.staged(ctx)
    return choice._replace(why=f"{choice.why}; {staged}") if staged else choice


def broadcast(data: Sequence[mx.nd.NDArray], root: int = 0) -> None:
    """Replace every array of ``data`` by ``data[root]``, in place; otherwise as :func:`allreduce`.

    In a job of several processes ``root``, as everywhere, counts the arrays of all of them in the
    order of the ranks, which must then have equally many arrays.

    >>> import mxnet as mx
    >>> data = [mx.nd.zeros((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1))]
    >>> broadcast(data, root=1)
    >>> data[0].asnumpy().tolist()
    [1.0, 1.0]
    """
    over = checked_exchange({"data": data}, op=None)
    rank, device = divmod(_checked_root(root, over), len(data))
    name = f"broadcast of array {device} of rank {rank}"
    over.broadcast(in_buckets([data], root=device), rank, name)


def reduce(data: Sequence[mx.nd.NDArray], root: int = 0, op: str = "sum") -> None:
    """Replace ``data[root]``, but no other array, by the sum; otherwise as :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(3)]
    >>> reduce(data, root=2)
    >>> [array.asnumpy().tolist() for array in data]
    [[1.0, 1.0], [1.0, 1.0], [3.0, 3.0]]
    """
    over = checked_exchange({"data": data}, op=op)
    rank, device = divmod(_checked_root(root, over), len(data))
    if over.num_processes > 1 and rank != cluster.rank():
        with autograd.pause(), memory.any_shape():
            data, device = [data[0].copy(), *data[1:]], 0
    name = f"reduce to array {root} of {over.num_arrays}"
    over.reduce(in_buckets([data], root=device), name)


def reduce_scatter(data: Sequence[mx.nd.NDArray], op: str = "sum") -> None:
    """Replace part i of ``data[i]`` by the sum of part i of all arrays; other parts are unchanged.

    Part i is ``partition.slices(size, len(data))[i]`` of the flattened array: sizes differ by at
    most one element, larger first. Followed by :func:`all_gather` it is :func:`allreduce`. In a job
    of several processes ``data`` are the arrays of all of them, as in :func:`broadcast`.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((4,), ctx=mx.cpu(i)) for i in range(2)]
    >>> reduce_scatter(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[2.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0]]
    """
    checked_exchange({"data": data}, op=op).reduce_scatter(data)


def all_gather(data: Sequence[mx.nd.NDArray]) -> None:
    """Replace part i of every array by part i of ``data[i]``; parts as in :func:`reduce_scatter`.

    >>> import mxnet as mx
    >>> data = [mx.nd.full((3,), i, ctx=mx.cpu(i)) for i in range(2)]
    >>> all_gather(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    """
    checked_exchange({"data": data}, op=None).all_gather(data)


def _checked_root(root: int, over: Exchange) -> int:
    if not 0 <= root < over.num_arrays:
        raise ValueError(f"root must be from 0 to {over.num_arrays - 1}, got {root}")
    return root


def check_list(
    data: Sequence[mx.nd.NDArray], name: str = "data", row_sparse: bool = False
) -> tuple[np.dtype, str]:
    """Return the dtype and storage type of ``data``; ValueError unless all have them and one shape.

    The arrays must be distinct, and dense, or with ``row_sparse`` all dense or all row_sparse.
    """
    if not isinstance(data, (list, tuple)):
        kind = type(data).__name__
        raise TypeError(f"{name} must be a list of arrays, one per device, got {kind}")
    if not data:
        raise ValueError(f"{name} must hold at least one array, got an empty list")
    for i, array in enumerate(data):
        if not isinstance(array, mx.nd.NDArray):
            raise TypeError(f"{name}[{i}] must be an MXNet array, got {type(array).__name__}")
    check_apart(data, name)
    kinds = [*map(memory.kind, data)]
    for i in range(len(data)):
        if kinds[i] != kinds[0]:
            described = "{}[{}] on {} with shape {}, dtype {} and {} storage"
            got, first = (described.format(name, j, data[j].context, *kinds[j]) for j in (i, 0))
            must = "must have one shape, dtype and storage type"
            raise ValueError(f"{name} {must}, got {got}, but {first}")
    _, dtype, stype = kinds[0]
    if stype != "default" and not (row_sparse and stype == "row_sparse"):
        raise ValueError(
            f"{name} must hold dense arrays, got {stype} storage; call tostype('default') on each"
        )
    return dtype, stype


def checked_exchange(
    lists: dict[str, Sequence[mx.nd.NDArray]],
    algorithm: str | None = None,
    op: str | None = "sum",
    row_sparse: bool = False,
) -> Exchange:
    """Return the exchange for lists of arrays, by name; ValueError unless they can be summed by it.

    Raises as :func:`allreduce_many` does. Only with ``row_sparse`` may arrays be row_sparse.
    """
    kinds = {name: check_list(data, name, row_sparse) for name, data in lists.items()}
    check_apart([array for data in lists.values() for array in data], "lists")
    contexts = {name: [*map(memory.context, data)] for name, data in lists.items()}
    first, ctx = next(iter(contexts.items()))
    for name, (dtype, stype) in kinds.items():
        if contexts[name] != ctx:
            got = f"{name} on {contexts[name]}, but {first} on {ctx}"
            raise ValueError(f"lists must be on the same contexts, got {got}")
        if op is not None:
            check_op(op, dtype)
        if stype == "row_sparse" and (algorithm or op in ("max", "min")):
            raise ValueError(
                "row_sparse arrays must be given op 'sum' or 'mean' and no algorithm, got "
                f"op={op!r} and algorithm={algorithm!r}; or call tostype('default') on each"
            )
    return Exchange(ctx, algorithm, op=op)


def check_apart(arrays: Sequence[mx.nd.NDArray], name: str) -> None:
    """Raise ValueError if two of ``arrays`` are the same, or share memory."""
    if len({*map(memory.chunk, arrays)}) == len(arrays):
        return
    extents = sorted(map(memory.extent, arrays))
    for (chunk, _, end), (next_chunk, next_begin, _) in zip(extents, extents[1:]):
        if chunk == next_chunk and next_begin < end:
            raise ValueError(
                f"{name} must hold different arrays, got the same one, or one and its view, more "
                "than once"
            )


def check_copies(arrays: Sequence[mx.nd.NDArray], ctx: Sequence[mx.Context], name: str) -> None:
    """Raise ValueError unless ``arrays[i]`` is on ``ctx[i]``, and all have one shape."""
    for array, c in zip(arrays, ctx):
        if memory.context(array) != c:
            raise ValueError(f"{name} must be on {c}, but is on {array.context}")
        shape, first = memory.kind(array)[0], memory.kind(arrays[0])[0]
        if shape != first:
            raise ValueError(f"{name} must have one shape, got {shape} on {c}, {first} on {ctx[0]}")


def check_op(op: str, dtype: np.dtype) -> None:
    """Raise ValueError unless ``op`` is known, and arrays of ``dtype`` can be combined by it."""
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if dtype not in DTYPES:
        got = (dtype.names or [dtype.name])[0]  # bfloat16 is a structure to NumPy
        raise ValueError(
            f"arrays must be of one of {', '.join(DTYPES)}, got {got}; convert them with astype"
        )
    if op == "mean" and dtype.kind != "f":
        raise ValueError(f"op='mean' must be given float arrays, got {dtype}; use 'sum'")
