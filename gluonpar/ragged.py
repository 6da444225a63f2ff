"""split_samples: a batch whose samples differ in shape, cut over contexts."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np

from gluonpar import sharding
from gluonpar.collectives import partition
from gluonpar.runtime import threads
from gluonpar.runtime.devices import as_list


def split_samples(
    batch: Any, ctx: mx.Context | Sequence[mx.Context], weights: Sequence[float] | None = None
) -> list[Any]:
    """Cut ``batch`` into consecutive shards, shard i on ``ctx[i]``; lists are cut sample by sample.

    In ``batch``, tuples and dicts are nests, an array has the samples along axis 0, and a **list**
    has one entry a sample: an array of any shape (an image's boxes), a nest of arrays, or anything
    else (a number, a file's name), which is passed on as it is. All parts have equally many
    samples; shards have the same nesting. Sizes, ``weights`` and dtypes are those of
    :func:`split_and_load`, which is for batches where lists are nests too.

    Raises ValueError for parts with different numbers of samples, an empty batch, and an array
    without elements, which MXNet has only under ``npx.set_np()``; TypeError for a part that is
    neither an array, a list nor a nest, and for dtypes that MXNet lacks.

    >>> import mxnet as mx, numpy as np
    >>> boxes = [np.zeros((count, 4)) for count in (1, 5, 2)]
    >>> shards = split_samples((np.zeros((3, 8, 8)), boxes), [mx.cpu(0), mx.cpu(1)])
    >>> [(images.shape, [box.shape for box in boxes]) for images, boxes in shards]
    [((2, 8, 8), [(1, 4), (5, 4)]), ((1, 8, 8), [(2, 4)])]
    """
    contexts = as_list(ctx)
    if weights is not None:
        partition.check_weights(weights, len(contexts))
    n = _num_samples(batch)
    parts = partition.slices(n, len(contexts), weights)[:n]
    threads.share(contexts)
    return [_cut(batch, part, c) for part, c in zip(parts, contexts)]


def _num_samples(batch: Any) -> int:
    lengths: dict[int, str] = {}
    for path, length in _lengths(batch, "batch"):
        lengths.setdefault(length, f"{path} has {length}")
    if not lengths:
        raise ValueError(f"there is no array and no list in {batch!r} to split")
    if len(lengths) > 1:
        raise ValueError(
            f"different numbers of samples: {', '.join(lengths.values())}. Every array of a batch "
            "must have one row a sample, and every list one entry a sample"
        )
    n = next(iter(lengths))
    if n == 0:
        raise ValueError("the batch holds 0 samples: nothing to split")
    return n


def _lengths(part: Any, path: str) -> Iterator[tuple[str, int]]:
    """The path of every array and list that is to be cut, and its number of samples."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from _lengths(value, f"{path}[{key!r}]")
    elif isinstance(part, tuple):
        for i, value in enumerate(part):
            yield from _lengths(value, f"{path}[{i}]")
    elif isinstance(part, list):
        for i, entry in enumerate(part):
            _check(entry, f"{path}[{i}]")
        yield path, len(part)
    elif isinstance(part, (np.ndarray, mx.nd.NDArray)):
        if part.ndim == 0:
            raise ValueError(f"{path} has shape (): there is no axis 0 to split")
        sharding.check_dtype(part, path)
        yield path, part.shape[0]
    else:
        raise TypeError(
            f"{path} is a {type(part).__name__}, and not an array, a list of samples or a nest"
        )


def _check(entry: Any, path: str) -> None:
    """One sample's entry in a list."""
    if isinstance(entry, dict):
        for key, value in entry.items():
            _check(value, f"{path}[{key!r}]")
    elif isinstance(entry, (tuple, list)):
        for i, value in enumerate(entry):
            _check(value, f"{path}[{i}]")
    elif isinstance(entry, (np.ndarray, mx.nd.NDArray)):
        sharding.check_dtype(entry, path)
        if 0 in entry.shape and not mx.util.is_np_shape():
            raise ValueError(
                f"{path} has shape {tuple(entry.shape)}, and mx.nd has no array without elements: "
                "pad it, for example with a row of -1, or call npx.set_np()"
            )


def _cut(part: Any, where: slice, ctx: mx.Context) -> Any:
    """The samples ``where``, in the same nesting, on ``ctx``."""
    if isinstance(part, list):
        return [_move(entry, ctx) for entry in part[where]]
    if isinstance(part, (dict, tuple)):
        return sharding.rebuilt(part, lambda value: _cut(value, where, ctx))
    return sharding.load(part[where], ctx)


def _move(entry: Any, ctx: mx.Context) -> Any:
    """One sample, every array of it on ``ctx``."""
    if isinstance(entry, (dict, tuple, list)):
        return sharding.rebuilt(entry, lambda value: _move(value, ctx))
    if isinstance(entry, (np.ndarray, mx.nd.NDArray)):
        return sharding.load(entry, ctx)
    return entry
