"""allreduce_many: many small arrays, summed in few large messages."""

from __future__ import annotations

import contextlib
import itertools
from typing import Iterator, Sequence

import mxnet as mx

from gluonpar.collectives import checks, executor, registry
from gluonpar.collectives.operations import allreduce_checked, choose
from gluonpar.runtime import threads

# The size of all buckets in the package: large enough that the bandwidth counts and not the cost of
# a message, small enough that the first sums start while backward still computes the other layers.
BUCKET_BYTES = 4 << 20


def allreduce_many(
    lists: Sequence[Sequence[mx.nd.NDArray]],
    algorithm: str | None = None,
    op: str = "sum",
    accumulate: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """:func:`allreduce` of every list of ``lists``, in place, in buckets of about ``bucket_bytes``.

    ``lists[j]`` holds variable j's arrays, one a device, in the same order of contexts for every j.
    Neighbours of one dtype share a bucket until its bytes on one device would exceed
    ``bucket_bytes``; one larger than that has a bucket of its own. 'host' sums a bucket in one
    operator without moving anything; for the other algorithms a bucket is copied into one array a
    device and back.

    The results are those of one by one: to the bit for 'host', 'star', 'tree' and 'kvstore', and
    for integers, max and min always; to rounding for the algorithms that cut arrays into chunks,
    where an element's place decides in which order its K values are added. Raises as
    :func:`allreduce`, before anything has changed; ValueError also for lists on different contexts
    and ``bucket_bytes`` below 1.

    >>> import mxnet as mx
    >>> grads = [[mx.nd.ones((n,), ctx=mx.cpu(i)) for i in range(2)] for n in (3, 1)]
    >>> allreduce_many(grads)
    >>> grads[0][1].asnumpy().tolist(), grads[1][0].asnumpy().tolist()
    ([2.0, 2.0, 2.0], [2.0])
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} holds nothing; give 1 or more")
    kinds = [checks.check_list(data, f"lists[{j}]") for j, data in enumerate(lists)]
    for j, kind in enumerate(kinds):
        checks.check_op(op, accumulate, kind.dtype)
        if kind.ctx != kinds[0].ctx:
            raise ValueError(
                f"lists[{j}] is on {kind.ctx}, but lists[0] on {kinds[0].ctx}; all must be alike"
            )
    if algorithm is not None:
        registry.named(algorithm)
    if not kinds or len(kinds[0].ctx) == 1:
        return
    threads.share(kinds[0].ctx)
    todo = [(data, kind) for data, kind in zip(lists, kinds) if 0 not in kind.shape]
    for bucket, kind in _buckets(todo, bucket_bytes):
        chosen = registry.named(algorithm or choose(kind).algorithm)
        _reduce_bucket(bucket, chosen, op, accumulate)


def _buckets(lists, bucket_bytes: int) -> Iterator[tuple[list, checks.Kind]]:
    """Consecutive lists that go together, and their kind as one array."""
    bucket, held = [], 0
    for i, (data, kind) in enumerate(lists):
        bucket.append(data)
        held += kind.num_bytes
        after = lists[i + 1][1] if i + 1 < len(lists) else None
        if after is None or after.dtype != kind.dtype or held + after.num_bytes > bucket_bytes:
            yield bucket, kind._replace(shape=(held // kind.dtype.itemsize,))
            bucket, held = [], 0


def _reduce_bucket(bucket, chosen: registry.Algorithm, op: str, accumulate: str | None) -> None:
    if len(bucket) == 1 or chosen.name == "host":
        allreduce_checked(bucket, chosen, op, accumulate)
        return
    with contextlib.ExitStack() as stack:
        flat = [stack.enter_context(executor.flattened(data)) for data in bucket]
        joined = [mx.nd.concat(*arrays, dim=0) for arrays in zip(*flat)]
        allreduce_checked([joined], chosen, op, accumulate)
        cuts = itertools.accumulate([0] + [data[0].size for data in flat])
        for start, data in zip(cuts, flat):
            for array, whole in zip(data, joined):
                whole[start : start + array.size].copyto(array)


def allreduce_as_float16(
    lists: Sequence[Sequence[mx.nd.NDArray]], algorithm: str | None = None
) -> None:
    """:func:`allreduce_many` in place, with what is exchanged in float16 and added in float32.

    Each value and each sum is rounded to 11 binary digits; beyond 65504 it becomes infinite. Holds
    copies of half the size while it runs.
    """
    halves = [[array.astype("float16") for array in data] for data in lists]
    allreduce_many(halves, algorithm, accumulate="float32")
    for data, sums in zip(lists, halves):
        for array, total in zip(data, sums):
            total.astype(array.dtype).copyto(array)
