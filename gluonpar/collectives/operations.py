"""allreduce and related collectives on lists of arrays."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.collectives import (
    arguments,
    executor,
    host,
    partition,
    registry,
    row_sparse,
)
from gluonpar.collectives.algorithms import balanced, tree
from gluonpar.collectives.choice import Choice, check_algorithm, choose, on_host
from gluonpar.collectives.plan import relabel, reverse
from gluonpar.runtime import interrupts, memory, peers, threads

# Large enough for an all-reduce to be bandwidth-bound, small enough for the first buckets of a
# model's gradients to be summed while backward still computes the others.
BUCKET_BYTES = 4 << 20


# What pushes a sum of arrays that have been checked, which would take longer than a small sum. The
# arrays are not kept alive: see memory.fingerprint.
_prepared: dict[tuple, Callable] = {}
_MOST_PREPARED = 256

_pushing = threading.RLock()
os.register_at_fork(
    before=_pushing.acquire, after_in_parent=_pushing.release, after_in_child=_pushing.release
)


def _as_one(function: Callable) -> Callable:
    """Push the operators of a call without those of other threads' calls, or Ctrl-C, in between."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        with interrupts.held(), _pushing:
            function(*args, **kwargs)

    return called


def allreduce(
    data: Sequence[mx.nd.NDArray],
    algorithm: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
) -> None:
    """Replace every array of ``data`` by the sum of all of them, in place.

    ``data`` holds one array per device: any number of dense arrays, ``mx.nd`` or ``mx.np``, of one
    shape (size 0 and 0-d included) and dtype (float16, float32, float64, int8, int32, int64 or
    uint8), on CPUs, GPUs or both; a context may occur more than once. Or all are row_sparse: the
    sum has the rows that any of them has, ``op`` is 'sum' or 'mean', and nothing else can be given
    (:mod:`gluonpar.collectives.row_sparse`). ``algorithm`` is a name in
    :data:`ALGORITHMS`; None chooses one (see :func:`explain`). ``op`` is 'sum', 'mean' (floats
    only), 'max' or 'min'. float16 is added in float16, or in float32 with ``accumulate='float32'``
    and for the mean, which never overflows. Integers wrap around.

    All arrays end with the same bits, and with one algorithm the same values always give the same
    bits. Asynchronous, as all MXNet operators, but on GPUs the first choice of an algorithm waits:
    :func:`explain`. An error during execution is raised at the next wait for one of the arrays.
    Several threads may call it; on the same arrays their calls take place one after another.
    Autograd records nothing: inside ``autograd.record()`` the values change, but not the graph.

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
    key = _key(data, algorithm, op, accumulate)
    prepared = _prepared.get(key)
    if prepared is not None:
        with interrupts.held(), _pushing:
            prepared([data])
        return
    kind = arguments.check_list(data, row_sparse=True)
    _allreduce([data], [kind], algorithm, op, accumulate)
    if kind.stype != "default" or len(data) == 1 or 0 in kind.shape:
        return
    if registry.named(algorithm or choose(kind).algorithm).run is host.allreduce:
        if len(_prepared) == _MOST_PREPARED:
            _prepared.clear()
        _prepared[key] = host.prepare([data], op, accumulate)


def _key(data, *how) -> tuple | None:
    """Return by what a list of arrays is known again, although others may have been freed."""
    if not isinstance(data, (list, tuple)):
        return None
    try:
        return (*map(memory.fingerprint, data), *how)
    except TypeError:
        return None


def allreduce_many(
    lists: Sequence[Sequence[mx.nd.NDArray]],
    algorithm: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """:func:`allreduce` every list of ``lists`` in place, in buckets of up to ``bucket_bytes``.

    ``lists[j]`` holds variable j's arrays, one per device, on the same contexts for every j. A
    bucket holds consecutive variables of one dtype, at most ``bucket_bytes`` per device; a larger
    variable has a bucket to itself. 'host' and 'nccl' sum a bucket in one operator, without copies;
    for the other algorithms a bucket is copied into one array per device and back.

    The results have the bits of separate calls, except for floats added by algorithms that cut
    arrays into chunks: an element's position determines the order of its additions. Raises as
    :func:`allreduce` does, before anything has changed; also ValueError for lists on different
    contexts and for ``bucket_bytes`` below 1.

    >>> import mxnet as mx
    >>> grads = [[mx.nd.ones((n,), ctx=mx.cpu(i)) for i in range(2)] for n in (3, 1)]
    >>> allreduce_many(grads)
    >>> grads[0][1].asnumpy().tolist(), grads[1][0].asnumpy().tolist()
    ([2.0, 2.0, 2.0], [2.0])
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    kinds = [arguments.check_list(data, f"lists[{j}]", True) for j, data in enumerate(lists)]
    _allreduce(lists, kinds, algorithm, op, accumulate, bucket_bytes)


@_as_one
def _allreduce(lists, kinds, algorithm, op, accumulate, bucket_bytes: int = BUCKET_BYTES) -> None:
    if not kinds:
        return
    ctx = kinds[0].ctx
    for j, kind in enumerate(kinds):
        arguments.check_op(op, accumulate, kind.dtype)
        if kind.ctx != ctx:
            raise ValueError(
                f"lists must be on the same contexts, got lists[{j}] on {kind.ctx}, "
                f"but lists[0] on {ctx}"
            )
        if kind.stype == "row_sparse":
            row_sparse.check(algorithm, op, accumulate)
    check_algorithm(algorithm, ctx)
    if len(ctx) == 1:
        return
    threads.share(ctx)
    dense = []
    for data, kind in zip(lists, kinds):
        if kind.stype == "row_sparse":
            row_sparse.allreduce(data, op)
        elif 0 not in kind.shape:
            dense.append((data, kind))
    for bucket, kind in _buckets(dense, bucket_bytes):
        chosen = registry.named(algorithm or choose(kind).algorithm)
        if len(bucket) == 1 or chosen.name in ("host", "nccl"):
            _allreduce_separately(bucket, chosen, op, accumulate)
            continue
        with _joined(bucket) as joined:
            _allreduce_separately([joined], chosen, op, accumulate)


def _buckets(lists, bucket_bytes: int) -> Iterator[tuple[list, arguments.Kind]]:
    """Give the lists of each bucket, and their kind; of several lists as one flat array."""
    bucket, held = [], 0
    for i, (data, kind) in enumerate(lists):
        bucket.append(data)
        held += kind.num_bytes
        after = lists[i + 1][1] if i + 1 < len(lists) else None
        if after is None or after.dtype != kind.dtype or held + after.num_bytes > bucket_bytes:
            whole = len(bucket) > 1
            yield bucket, kind._replace(shape=(held // kind.dtype.itemsize,)) if whole else kind
            bucket, held = [], 0


@contextlib.contextmanager
def _joined(bucket, root: int | None = None) -> Iterator[list[mx.nd.NDArray]]:
    """Give one array per device, the lists end to end, which are written back on exit.

    With ``root``, only its values are in them, and only the other devices' are written back.
    """
    k = len(bucket[0])
    with executor.flattened([array for data in bucket for array in data]) as flat:
        of_devices = [flat[i::k] for i in range(k)]
        size = sum(array.size for array in of_devices[0])
        joined = [
            mx.nd.concat(*own, dim=0)
            if root in (None, i)
            else mx.nd.empty((size,), own[0].context, own[0].dtype)
            for i, own in enumerate(of_devices)
        ]
        yield joined
        for i, (own, whole) in enumerate(zip(of_devices, joined)):
            if i == root:
                continue
            end = 0
            with mx.engine.bulk(len(own)):  # one operator: a copyto of each would be one each
                for array in own:
                    start, end = end, end + array.size
                    mx.nd.slice_axis(whole, axis=0, begin=start, end=end, out=array)


def _allreduce_separately(lists, chosen, op: str, accumulate: str | None) -> None:
    if chosen.run is host.allreduce:  # one function, of which autograd records nothing
        host.allreduce(lists, op, accumulate)
        return
    if chosen.run is not None:
        with autograd.pause():
            chosen.run(lists, op, accumulate)
        return
    hops = chosen.plan(len(lists[0]))
    for data in lists:
        with executor.flattened(data, accumulate) as flat:
            executor.run(hops, flat, op)


@_as_one
def allreduce_as_float16(lists, algorithm: str | None = None) -> None:
    """:func:`allreduce_many` of float16 copies, added in float32, and written back.

    Every value and every sum is rounded to 11 binary digits; above 65504 it becomes infinite.
    """
    halves = [[array.astype("float16") for array in data] for data in lists]
    # Half as many bytes: the buckets that a caller has made are not joined to larger ones.
    allreduce_many(halves, algorithm, accumulate="float32", bucket_bytes=BUCKET_BYTES // 2)
    for data, sums in zip(lists, halves):
        for array, total in zip(data, sums):
            total.astype(array.dtype).copyto(array)


def explain(data: Sequence[mx.nd.NDArray]) -> Choice:
    """Return the algorithm that :func:`allreduce` chooses for ``data``, and the reason.

    It depends on the arrays' contexts, shapes and dtypes. On GPUs without NCCL or peer access it is
    the plan that is fastest by simulation on the links between them. They are measured once per
    process, or read from the file that GLUONPAR_LINKS names; with "off", and with
    MXNET_ENFORCE_DETERMINISM=1, the figures are always the same. Raises as :func:`allreduce` does.

    >>> import mxnet as mx
    >>> print(explain([mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(4)]))
    host: all arrays are in the host's memory, so it can sum them in place
    """
    kind = arguments.check_list(data, row_sparse=True)
    choice = choose(kind)
    staged = peers.staged(kind.ctx)
    return choice._replace(why=f"{choice.why}; {staged}") if staged else choice


def broadcast(data: Sequence[mx.nd.NDArray], root: int = 0) -> None:
    """Replace every array of ``data`` by ``data[root]``, in place; otherwise as :func:`allreduce`.

    >>> import mxnet as mx
    >>> data = [mx.nd.zeros((2,), ctx=mx.cpu(0)), mx.nd.ones((2,), ctx=mx.cpu(1))]
    >>> broadcast(data, root=1)
    >>> data[0].asnumpy().tolist()
    [1.0, 1.0]
    """
    arguments.check_list(data)
    broadcast_many([data], root)


def broadcast_many(lists: Sequence[Sequence[mx.nd.NDArray]], root: int = 0) -> None:
    """:func:`broadcast` every list of ``lists``, all on the same contexts, in place.

    On CPU contexts all lists together are one operator; elsewhere each bucket of lists is copied
    into one array per device, and is one message. Raises as :func:`allreduce` does.
    """
    if not lists:
        return
    kinds = [arguments.check_list(data, f"lists[{j}]") for j, data in enumerate(lists)]
    k = len(lists[0])
    copy = (slice(None), [root], _beginning_with(root, k)[1:])
    _run(lists, kinds, relabel(reverse(tree.reduce(k)), root, k), [copy], root=root)


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
    whole = (slice(None), _beginning_with(root, k), [])
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
    sums = [(part, _beginning_with(i, k), []) for i, part in enumerate(parts)]
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
    copies = [(part, [i], _beginning_with(i, k)[1:]) for i, part in enumerate(parts)]
    _run([data], [kind], balanced.all_gather(k), copies)


@_as_one
def _run(lists, kinds, hops, reductions, op="sum", results=(), root: int | None = None) -> None:
    """Do ``reductions`` in the host's memory if all arrays are there, otherwise run ``hops``.

    ``root`` is the only device whose values matter, if there is one.
    """
    todo = [(data, kind) for data, kind in zip(lists, kinds) if 0 not in kind.shape]
    if not todo or len(kinds[0].ctx) == 1:
        return
    threads.share(kinds[0].ctx)
    if on_host(kinds[0].ctx):
        host.run([data for data, _ in todo], reductions, op)
        return
    for bucket, _ in _buckets(todo, BUCKET_BYTES):
        alone = len(bucket) == 1
        with executor.flattened(bucket[0]) if alone else _joined(bucket, root) as flat:
            executor.run(hops, flat, op, results)


def _beginning_with(i: int, k: int) -> list[int]:
    if not 0 <= i < k:
        raise ValueError(f"root must be from 0 to {k - 1}, got {i}")
    return [(i + j) % k for j in range(k)]
