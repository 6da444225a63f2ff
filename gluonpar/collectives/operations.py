"""allreduce and related collectives on lists of arrays, and the choice of the algorithm."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.collectives import arguments, executor, host, partition, registry
from gluonpar.collectives.algorithms import balanced, tree
from gluonpar.collectives.plan import relabel, reverse
from gluonpar.runtime import threads

SMALL_BYTES = 1 << 16


class Choice(NamedTuple):
    """An algorithm's name and the reason for choosing it; printed as one sentence."""

    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


def choose(kind: arguments.Kind) -> Choice:
    """Choose an algorithm by the arrays' contexts, their number and their bytes."""
    # Measured on CPU contexts. The rules for GPUs follow from the costs in docs/algorithms.md.
    if not any("gpu" in context.device_type for context in kind.ctx):
        return Choice("host", "all arrays are in the host's memory, so it can sum them in place")
    if len(kind.ctx) == 2:
        return Choice("star", "two devices: the fewest messages")
    if kind.num_bytes <= SMALL_BYTES:
        return Choice("tree", f"{kind.num_bytes} bytes per device: latency-bound, so fewest steps")
    return Choice("balanced", f"{kind.num_bytes} bytes per device: bandwidth-optimal")


def allreduce(
    data: Sequence[mx.nd.NDArray],
    algorithm: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
) -> None:
    """Replace every array of ``data`` by the sum of all of them, in place.

    ``data`` holds one array per device: any number of dense arrays, ``mx.nd`` or ``mx.np``, of one
    shape (size 0 and 0-d included) and dtype (float16, float32, float64, int8, int32, int64 or
    uint8), on CPUs, GPUs or both; a context may occur more than once. ``algorithm`` is a name in
    :data:`ALGORITHMS`; None chooses one (see :func:`explain`). ``op`` is 'sum', 'mean' (floats
    only), 'max' or 'min'. float16 is added in float16, or in float32 with ``accumulate='float32'``.
    Integers wrap around.

    All arrays end with the same bits, and the same values always give the same bits. Asynchronous,
    as all MXNet operators; an error during execution is raised at the next wait for one of the
    arrays. Several threads may call it. Autograd records nothing: inside ``autograd.record()`` the
    values change, but not the graph.

    Raises ValueError for an empty list, different shapes, dtypes or storage types, sparse arrays,
    the same array twice, and an unknown algorithm or op; TypeError if ``data`` is not a list of
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
    kind = arguments.check_list(data)
    arguments.check_op(op, accumulate, kind.dtype)
    chosen = registry.named(algorithm or choose(kind).algorithm)
    if len(data) > 1 and 0 not in kind.shape:
        threads.share(kind.ctx)
        allreduce_checked([data], chosen, op, accumulate)


def allreduce_checked(lists, chosen: registry.Algorithm, op: str, accumulate: str | None) -> None:
    """All-reduce lists that have been checked, of two or more arrays that are not empty."""
    if chosen.run is not None:
        with autograd.pause():
            chosen.run(lists, op, accumulate)
        return
    hops = chosen.plan(len(lists[0]))
    for data in lists:
        with executor.flattened(data, accumulate) as flat:
            executor.run(hops, flat, op)


def explain(data: Sequence[mx.nd.NDArray]) -> Choice:
    """Return the algorithm that :func:`allreduce` chooses for ``data``, and the reason.

    It depends on the arrays' contexts, shapes and dtypes. Raises as :func:`allreduce` does.

    >>> import mxnet as mx
    >>> print(explain([mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(4)]))
    host: all arrays are in the host's memory, so it can sum them in place
    """
    return choose(arguments.check_list(data))


def broadcast(data: Sequence[mx.nd.NDArray], root: int = 0) -> None:
    """Replace every array of ``data`` by ``data[root]``, in place; otherwise as :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.zeros((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1))]
    >>> broadcast(data, root=1)
    >>> data[0].asnumpy().tolist()
    [1.0, 1.0]
    """
    _broadcast([data], [arguments.check_list(data)], root)


def broadcast_many(lists: Sequence[Sequence[mx.nd.NDArray]], root: int = 0) -> None:
    """:func:`broadcast` every list of ``lists``, all on the same contexts, in place.

    On CPU contexts all lists together are one operator. Raises as :func:`allreduce` does.
    """
    kinds = [arguments.check_list(data, f"lists[{j}]") for j, data in enumerate(lists)]
    if kinds:
        _broadcast(lists, kinds, root)


def _broadcast(lists, kinds: list[arguments.Kind], root: int) -> None:
    k = len(kinds[0].ctx)
    arguments.check_root(root, k)
    copy = host.Reduction(slice(0, None), [root], _starting_with(root, k)[1:])
    _run(lists, kinds, relabel(reverse(tree.reduce(k)), root, k), [copy])


def reduce(data: Sequence[mx.nd.NDArray], root: int = 0, op: str = "sum") -> None:
    """Replace ``data[root]``, but no other array, by the sum; otherwise as :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(3)]
    >>> reduce(data, root=2)
    >>> [array.asnumpy().tolist() for array in data]
    [[1.0, 1.0], [1.0, 1.0], [3.0, 3.0]]
    """
    kind, k = arguments.check_list(data), len(data)
    arguments.check_op(op, None, kind.dtype)
    arguments.check_root(root, k)
    whole = host.Reduction(slice(0, None), _starting_with(root, k), [])
    _run([data], [kind], relabel(tree.reduce(k), root, k), [whole], op, [(root, 0)])


def reduce_scatter(data: Sequence[mx.nd.NDArray], op: str = "sum") -> None:
    """Replace part i of ``data[i]`` by the sum of part i of all arrays; other parts are unchanged.

    Part i is ``partition.slices(size, len(data))[i]`` of the flattened array: sizes differ by at
    most one element, larger first. Followed by :func:`all_gather` it is :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((4,), ctx=mx.cpu(i)) for i in range(2)]
    >>> reduce_scatter(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[2.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0]]
    """
    kind, k = arguments.check_list(data), len(data)
    arguments.check_op(op, None, kind.dtype)
    parts = partition.slices(math.prod(kind.shape), k)
    sums = [host.Reduction(part, _starting_with(i, k), []) for i, part in enumerate(parts)]
    _run([data], [kind], balanced.reduce_scatter(k), sums, op, [(i, i) for i in range(k)])


def all_gather(data: Sequence[mx.nd.NDArray]) -> None:
    """Replace part i of every array by part i of ``data[i]``; parts as in :func:`reduce_scatter`.

    >>> import mxnet as mx
    >>> data = [mx.nd.full((3,), i, ctx=mx.cpu(i)) for i in range(2)]
    >>> all_gather(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    """
    kind, k = arguments.check_list(data), len(data)
    parts = partition.slices(math.prod(kind.shape), k)
    copies = [host.Reduction(part, [i], _starting_with(i, k)[1:]) for i, part in enumerate(parts)]
    _run([data], [kind], balanced.all_gather(k), copies)


def _run(lists, kinds: list[arguments.Kind], hops, reductions, op="sum", results=()) -> None:
    """Do ``reductions`` in the host's memory if all arrays are there, otherwise run ``hops``."""
    lists = [data for data, kind in zip(lists, kinds) if 0 not in kind.shape]
    if not lists or len(lists[0]) == 1:
        return
    threads.share(kinds[0].ctx)
    if all(choose(kind).algorithm == "host" for kind in kinds):
        host.run(lists, reductions, op)
        return
    for data in lists:
        with executor.flattened(data) as flat:
            executor.run(hops, flat, op, results)


def _starting_with(i: int, k: int) -> list[int]:
    return [(i + j) % k for j in range(k)]
