"""allreduce and its relatives on one list of arrays; which algorithm is taken if none is named."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.collectives import checks, executor, partition, registry
from gluonpar.collectives.algorithms import balanced, tree
from gluonpar.collectives.host import reduction
from gluonpar.collectives.plan import Hop, relabel
from gluonpar.runtime import threads

SMALL_BYTES = 1 << 16


class Choice(NamedTuple):
    """An algorithm's name and the reason in words; printed, it is a sentence."""

    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


def choose(kind: checks.Kind) -> Choice:
    """By where the arrays are and by their bytes. Only the first rule has been measured.

    The rules for GPUs follow from the algorithms' cards (docs/algorithms.md) and wait for a
    measurement.
    """
    if not any("gpu" in context.device_type for context in kind.ctx):
        return ON_THE_HOST
    if len(kind.ctx) == 2:
        return Choice("star", "with two devices there is nothing to share out")
    if kind.num_bytes <= SMALL_BYTES:
        return Choice("tree", f"{kind.num_bytes} bytes a device: the fewest steps win, not bytes")
    return Choice("balanced", f"{kind.num_bytes} bytes a device: every device sends and sums alike")


ON_THE_HOST = Choice("host", "all arrays are in the host's memory, so it can sum them in place")


def allreduce(
    data: Sequence[mx.nd.NDArray],
    algorithm: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
) -> None:
    """Replace every array of ``data`` by the sum of all of them, in place.

    ``data`` holds one array a device: any number, of one shape (size 0 and 0-d too), one dtype
    (float16, float32, float64, int8, int32, int64, uint8) and dense storage, ``mx.nd`` or
    ``mx.np``, each on its own context or several on one, CPU and GPU mixed. ``algorithm`` is a name
    of :data:`ALGORITHMS`; None picks one (:func:`explain` says which). ``op`` is 'sum', 'mean'
    (floats only), 'max' or 'min'. float16 is added in float16, or in float32 with
    ``accumulate='float32'``. Integers wrap around.

    All arrays end with the same bits, and the same call with the same values gives them again.
    Returns None at once, as any operator does; MXNet's engine orders it against all other operators
    on these arrays. It may be called from several threads. An error while it runs is raised where
    one of the arrays is next waited for. Nothing is recorded for autograd: under
    ``autograd.record()`` it changes values, not the graph.

    Raises ValueError for an empty list, different shapes, dtypes or storage types, sparse arrays,
    one array given twice, an unknown algorithm or op; TypeError for what is no MXNet array.

    From ``allreduce`` in Dive into Deep Learning, 13.5.4.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1)) * 2]
    >>> allreduce(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[3.0, 3.0], [3.0, 3.0]]
    >>> allreduce(data, algorithm="ring", op="mean")
    >>> data[1].asnumpy().tolist()
    [3.0, 3.0]
    """
    kind = checks.check_list(data)
    checks.check_op(op, accumulate, kind.dtype)
    chosen = registry.named(algorithm or choose(kind).algorithm)
    if len(data) > 1 and 0 not in kind.shape:
        threads.share(kind.ctx)
        allreduce_checked([data], chosen, op, accumulate)


def allreduce_checked(
    lists: Sequence[Sequence[mx.nd.NDArray]],
    chosen: registry.Algorithm,
    op: str,
    accumulate: str | None,
) -> None:
    """The all-reduce of several lists that have been checked and are worth the trouble."""
    if chosen.run is not None:
        with autograd.pause():
            chosen.run(lists, op, accumulate)
        return
    hops = chosen.plan(len(lists[0]))
    for data in lists:
        with executor.flattened(data, accumulate) as flat:
            executor.run(hops, flat, op)


def explain(data: Sequence[mx.nd.NDArray]) -> Choice:
    """Which algorithm :func:`allreduce` picks for ``data``, and why.

    Only the arrays' contexts, shapes and dtypes count; nothing is changed and nothing waits. Raises
    ValueError and TypeError for what :func:`allreduce` does not take.

    >>> import mxnet as mx
    >>> print(explain([mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(4)]))
    host: all arrays are in the host's memory, so it can sum them in place
    """
    return choose(checks.check_list(data))


def broadcast(data: Sequence[mx.nd.NDArray], root: int = 0) -> None:
    """Replace every array of ``data`` by ``data[root]``, in place; otherwise as :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.zeros((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1))]
    >>> broadcast(data, root=1)
    >>> data[0].asnumpy().tolist()
    [1.0, 1.0]
    """
    kind = checks.check_list(data)
    checks.check_root(root, len(data))
    others = [i for i in range(len(data)) if i != root]
    jobs = [reduction.Job(slice(0, None), [root], others)]
    _relative(data, kind, relabel(tree.broadcast(len(data)), root, len(data)), jobs, None, "sum")


def broadcast_many(lists: Sequence[Sequence[mx.nd.NDArray]], root: int = 0) -> None:
    """:func:`broadcast` of every list of ``lists``, all on the same contexts.

    In place, on CPU contexts by one operator. Takes and refuses what :func:`allreduce` does.

    >>> import mxnet as mx
    >>> lists = [[mx.nd.full((n,), i, ctx=mx.cpu(i)) for i in range(2)] for n in (1, 2)]
    >>> broadcast_many(lists, root=1)
    >>> lists[1][0].asnumpy().tolist()
    [1.0, 1.0]
    """
    kinds = [checks.check_list(data, f"lists[{j}]") for j, data in enumerate(lists)]
    if not kinds or any(choose(kind).algorithm != "host" for kind in kinds):
        for data in lists:
            broadcast(data, root)
        return
    k = len(kinds[0].ctx)
    checks.check_root(root, k)
    job = reduction.Job(slice(0, None), [root], [i for i in range(k) if i != root])
    jobs = [(data, [job]) for data, kind in zip(lists, kinds) if 0 not in kind.shape]
    if k > 1 and jobs:
        threads.share(kinds[0].ctx)
        reduction.run(jobs)


def reduce(data: Sequence[mx.nd.NDArray], root: int = 0, op: str = "sum") -> None:
    """Replace ``data[root]`` by the sum of all; the others stay. Otherwise as :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(3)]
    >>> reduce(data, root=2)
    >>> [array.asnumpy().tolist() for array in data]
    [[1.0, 1.0], [1.0, 1.0], [3.0, 3.0]]
    """
    kind = checks.check_list(data)
    checks.check_op(op, None, kind.dtype)
    checks.check_root(root, len(data))
    hops = relabel(tree.reduce(len(data)), root, len(data))
    jobs = [reduction.Job(slice(0, None), _starting_with(root, len(data)), [])]
    _relative(data, kind, hops, jobs, [(root, 0)], op)


def reduce_scatter(data: Sequence[mx.nd.NDArray], op: str = "sum") -> None:
    """Replace part i of ``data[i]`` by the sum of everybody's part i; all other parts stay.

    Part i is ``partition.slices(size, len(data))[i]`` of the flattened array: parts differ by at
    most one element, the larger first. Followed by :func:`all_gather` it is :func:`allreduce`.
    Otherwise as there.

    >>> import mxnet as mx
    >>> data = [mx.nd.ones((4,), ctx=mx.cpu(i)) for i in range(2)]
    >>> reduce_scatter(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[2.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0]]
    """
    kind = checks.check_list(data)
    checks.check_op(op, None, kind.dtype)
    k = len(data)
    parts = partition.slices(math.prod(kind.shape), k)
    jobs = [reduction.Job(part, _starting_with(i, k), []) for i, part in enumerate(parts)]
    _relative(data, kind, balanced.reduce_scatter(k), jobs, [(i, i) for i in range(k)], op)


def all_gather(data: Sequence[mx.nd.NDArray]) -> None:
    """Replace part i of every array by ``data[i]``'s; parts as in :func:`reduce_scatter`.

    In place and asynchronous; takes and refuses what :func:`allreduce` does.

    >>> import mxnet as mx
    >>> data = [mx.nd.full((3,), i, ctx=mx.cpu(i)) for i in range(2)]
    >>> all_gather(data)
    >>> [array.asnumpy().tolist() for array in data]
    [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    """
    kind = checks.check_list(data)
    k = len(data)
    parts = partition.slices(math.prod(kind.shape), k)
    jobs = [reduction.Job(part, [i], _starting_with(i, k)[1:]) for i, part in enumerate(parts)]
    _relative(data, kind, balanced.all_gather(k), jobs, None, "sum")


def _relative(
    data: Sequence[mx.nd.NDArray],
    kind: checks.Kind,
    hops: list[Hop],
    jobs: list[reduction.Job],
    results: list[tuple[int, int]] | None,
    op: str,
) -> None:
    """Do ``jobs`` on the host if all arrays are there, else carry out ``hops``."""
    if len(data) == 1 or 0 in kind.shape:
        return
    threads.share(kind.ctx)
    if choose(kind).algorithm == "host":
        reduction.run([(data, jobs)], op)
        return
    with executor.flattened(data) as flat:
        executor.run(hops, flat, op, results)


def _starting_with(i: int, k: int) -> list[int]:
    return [(i + j) % k for j in range(k)]
