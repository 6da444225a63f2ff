"""Collectives over the devices of this process, for other modules; arguments have been checked.

They are called with lists of arrays, one per device, and are asynchronous.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from typing import Any, Callable, Container, Iterator, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.collectives import arguments, executor, host, row_sparse
from gluonpar.collectives.choice import check_algorithm, choose, on_host
from gluonpar.plans import partition, registry
from gluonpar.plans.algorithms import balanced, tree
from gluonpar.plans.plan import relabel, reverse
from gluonpar.runtime import interrupts, threads

Lists = Sequence[Sequence[mx.nd.NDArray]]

# Large enough for an all-reduce to be bandwidth-bound, small enough for the first buckets of a
# model's gradients to be summed while backward still computes the others.
BUCKET_BYTES = 4 << 20

pushing = threading.RLock()
os.register_at_fork(
    before=pushing.acquire, after_in_parent=pushing.release, after_in_child=pushing.release
)


def as_one(function: Callable) -> Callable:
    """Push the operators of a call without those of other threads' calls, or Ctrl-C, in between."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        with interrupts.held(), pushing:
            function(*args, **kwargs)

    return called


def allreduce_many(
    lists: Lists,
    algorithm: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    kinds: Sequence[arguments.Kind] | None = None,
) -> None:
    """:func:`gluonpar.allreduce_many`; ``kinds`` are those of ``lists``, if they are known."""
    kinds = check(lists, algorithm, op, accumulate, kinds)
    if kinds and len(kinds[0].ctx) > 1:
        _allreduce(lists, kinds, algorithm, op, accumulate, bucket_bytes)


@as_one
def _allreduce(lists, kinds, algorithm, op, accumulate, bucket_bytes: int) -> None:
    threads.share(kinds[0].ctx)
    dense = []
    for data, kind in zip(lists, kinds):
        if kind.stype == "row_sparse":
            row_sparse.allreduce(data, op)
        elif 0 not in kind.shape:
            dense.append((data, kind))
    for bucket, kind in _buckets(dense, bucket_bytes):
        chosen = registry.named(algorithm or choose(kind).algorithm)
        if len(bucket) == 1 or chosen.whole_buckets:
            _allreduce_separately(bucket, chosen, op, accumulate)
            continue
        with _joined(bucket) as joined:
            _allreduce_separately([joined], chosen, op, accumulate)


def check(
    lists: Lists,
    algorithm: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
    kinds: Sequence[arguments.Kind] | None = None,
) -> Sequence[arguments.Kind]:
    """Raise ValueError unless an all-reduce can be given this; return the kinds of the lists."""
    if kinds is None:
        kinds = [arguments.check_list(data, f"lists[{j}]", True) for j, data in enumerate(lists)]
    arguments.check_same_contexts(kinds)
    for kind in kinds:
        arguments.check_op(op, accumulate, kind.dtype)
        if kind.stype == "row_sparse":
            row_sparse.check(algorithm, op, accumulate)
    if kinds:
        check_algorithm(algorithm, kinds[0].ctx)
    return kinds


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
def _joined(
    bucket, reads: Container[int] | None = None, writes: Container[int] | None = None
) -> Iterator[list[mx.nd.NDArray]]:
    """Give one array per device, the lists end to end, which are written back on exit.

    ``reads`` are the devices whose values matter, and ``writes`` those that have others afterwards;
    by default all.
    """
    k = len(bucket[0])
    with executor.flattened([array for data in bucket for array in data]) as flat:
        of_devices = [flat[i::k] for i in range(k)]
        size = sum(array.size for array in of_devices[0])
        joined = [
            mx.nd.concat(*own, dim=0)
            if reads is None or i in reads
            else mx.nd.empty((size,), own[0].context, own[0].dtype)
            for i, own in enumerate(of_devices)
        ]
        yield joined
        for i, (own, whole) in enumerate(zip(of_devices, joined)):
            if writes is not None and i not in writes:
                continue
            end = 0
            with mx.engine.bulk(len(own)):  # one operator: a copyto of each would be one each
                for array in own:
                    start, end = end, end + array.size
                    mx.nd.slice_axis(whole, axis=0, begin=start, end=end, out=array)


def _allreduce_separately(lists, chosen, op: str, accumulate: str | None) -> None:
    if chosen.run is not None:
        with autograd.pause():
            chosen.run(lists, op, accumulate)
        return
    hops = chosen.plan(len(lists[0]))
    for data in lists:
        with executor.flattened(data, accumulate) as flat:
            executor.run(hops, flat, op)


@as_one
def allreduce_as_float16(lists: Lists, algorithm: str | None = None) -> None:
    """:func:`allreduce_many` of float16 copies, added in float32, and written back.

    Every value and every sum is rounded to 11 binary digits; above 65504 it becomes infinite.
    """
    halves = [[array.astype("float16") for array in data] for data in lists]
    # Half as many bytes: the buckets that a caller has made are not joined to larger ones.
    allreduce_many(halves, algorithm, accumulate="float32", bucket_bytes=BUCKET_BYTES // 2)
    for data, sums in zip(lists, halves):
        for array, total in zip(data, sums):
            total.astype(array.dtype).copyto(array)


def broadcast_many(
    lists: Lists, root: int = 0, kinds: Sequence[arguments.Kind] | None = None
) -> None:
    """:func:`gluonpar.collectives.broadcast_many` inside this process."""
    if lists:
        k = len(lists[0])
        _, *others = _beginning_with(root, k)
        hops, copy = relabel(reverse(tree.reduce(k)), root, k), (slice(None), [root], others)
        _run(lists, kinds, hops, [copy], reads=[root], writes=others)


def reduce_many(
    lists: Lists,
    root: int = 0,
    op: str = "sum",
    kinds: Sequence[arguments.Kind] | None = None,
) -> None:
    """:func:`gluonpar.reduce` every list inside this process, all with the same ``root``."""
    if lists:
        k = len(lists[0])
        whole = (slice(None), _beginning_with(root, k), [])
        hops = relabel(tree.reduce(k), root, k)
        _run(lists, kinds, hops, [whole], op, [(root, 0)], writes=[root])


def reduce_scatter(data: Sequence[mx.nd.NDArray], kind: arguments.Kind, op: str = "sum") -> None:
    """:func:`gluonpar.reduce_scatter` inside this process."""
    k = len(data)
    parts = partition.slices(math.prod(kind.shape), k)
    sums = [(part, _beginning_with(i, k), []) for i, part in enumerate(parts)]
    _run([data], [kind], balanced.reduce_scatter(k), sums, op, [(i, i) for i in range(k)])


def all_gather(data: Sequence[mx.nd.NDArray], kind: arguments.Kind) -> None:
    """:func:`gluonpar.all_gather` inside this process."""
    k = len(data)
    parts = partition.slices(math.prod(kind.shape), k)
    copies = [(part, [i], _beginning_with(i, k)[1:]) for i, part in enumerate(parts)]
    _run([data], [kind], balanced.all_gather(k), copies)


@as_one
def _run(lists, kinds, hops, reductions, op="sum", results=(), reads=None, writes=None) -> None:
    """Do ``reductions`` in the host's memory if all arrays are there, otherwise run ``hops``.

    ``reads`` and ``writes`` are as in :func:`_joined`.
    """
    if kinds is None:
        kinds = [arguments.check_list(data, f"lists[{j}]") for j, data in enumerate(lists)]
    arguments.check_same_contexts(kinds)
    todo = [(data, kind) for data, kind in zip(lists, kinds) if 0 not in kind.shape]
    if not todo or len(kinds[0].ctx) == 1:
        return
    threads.share(kinds[0].ctx)
    if on_host(kinds[0].ctx):
        host.run([data for data, _ in todo], reductions, op)
        return
    for bucket, _ in _buckets(todo, BUCKET_BYTES):
        alone = len(bucket) == 1
        with executor.flattened(bucket[0]) if alone else _joined(bucket, reads, writes) as flat:
            executor.run(hops, flat, op, results)


def _beginning_with(i: int, k: int) -> list[int]:
    return [(i + j) % k for j in range(k)]
