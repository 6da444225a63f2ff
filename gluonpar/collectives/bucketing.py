"""allreduce_many: many small arrays all-reduced in a few large messages."""

from __future__ import annotations

from typing import Iterator, Sequence

import mxnet as mx

from gluonpar.collectives import arguments, executor, registry
from gluonpar.collectives.operations import allreduce_checked, choose
from gluonpar.runtime import threads

# Large enough for an all-reduce to be bandwidth-bound, small enough for the first buckets of a
# model's gradients to be summed while backward still computes the others.
BUCKET_BYTES = 4 << 20


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
    variable has a bucket to itself. 'host' sums a bucket in one operator and copies nothing; for
    the other algorithms a bucket is copied into one array per device and back.

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
    kinds = [arguments.check_list(data, f"lists[{j}]") for j, data in enumerate(lists)]
    for j, kind in enumerate(kinds):
        arguments.check_op(op, accumulate, kind.dtype)
        if kind.ctx != kinds[0].ctx:
            raise ValueError(
                f"lists must be on the same contexts, got lists[{j}] on {kind.ctx}, "
                f"but lists[0] on {kinds[0].ctx}"
            )
    if algorithm is not None:
        registry.named(algorithm)
    if not kinds or len(kinds[0].ctx) == 1:
        return
    threads.share(kinds[0].ctx)
    todo = [(data, kind) for data, kind in zip(lists, kinds) if 0 not in kind.shape]
    for bucket, kind in _buckets(todo, bucket_bytes):
        chosen = registry.named(algorithm or choose(kind).algorithm)
        as_it_is = len(bucket) == 1 or chosen.name == "host"
        run = allreduce_checked if as_it_is else _allreduce_joined
        run(bucket, chosen, op, accumulate)


def _buckets(lists, bucket_bytes: int) -> Iterator[tuple[list, arguments.Kind]]:
    """Give the lists of each bucket, and their kind as one flat array."""
    bucket, held = [], 0
    for i, (data, kind) in enumerate(lists):
        bucket.append(data)
        held += kind.num_bytes
        after = lists[i + 1][1] if i + 1 < len(lists) else None
        if after is None or after.dtype != kind.dtype or held + after.num_bytes > bucket_bytes:
            yield bucket, kind._replace(shape=(held // kind.dtype.itemsize,))
            bucket, held = [], 0


def _allreduce_joined(bucket, chosen: registry.Algorithm, op: str, accumulate: str | None) -> None:
    k = len(bucket[0])
    with executor.flattened([array for data in bucket for array in data]) as flat:
        joined = [mx.nd.concat(*flat[i::k], dim=0) for i in range(k)]
        allreduce_checked([joined], chosen, op, accumulate)
        for i, whole in enumerate(joined):
            start = 0
            for array in flat[i::k]:
                whole[start : start + array.size].copyto(array)
                start += array.size


def allreduce_as_float16(lists, algorithm: str | None = None) -> None:
    """:func:`allreduce_many` of float16 copies, added in float32, and written back.

    Every value and every sum is rounded to 11 binary digits; above 65504 it becomes infinite.
    """
    halves = [[array.astype("float16") for array in data] for data in lists]
    allreduce_many(halves, algorithm, accumulate="float32")
    for data, sums in zip(lists, halves):
        for array, total in zip(data, sums):
            total.astype(array.dtype).copyto(array)
