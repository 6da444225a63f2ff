"""Split a batch over contexts: arrays along an axis, and lists sample by sample."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.plans import partition
from gluonpar.runtime import devices, memory, threads

_DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")
_ARRAYS = (np.ndarray, mx.nd.NDArray)
NESTS = (dict, tuple, list)


def split_and_load(
    data: Any,
    ctx: mx.Context | Sequence[mx.Context],
    batch_axis: int = 0,
    weights: Sequence[float] | None = None,
) -> list[Any]:
    """Split ``data`` along ``batch_axis`` into consecutive shards and load shard i onto ``ctx[i]``.

    ``data`` is an array (NumPy, ``mx.nd`` or ``mx.np``) or any nesting of tuples, lists and dicts
    of arrays with the same number of samples; every shard has the same nesting. Dtypes are kept.
    NumPy arrays are split on the host and each shard is copied to its own device; they become
    ``mx.np`` arrays under ``npx.set_np()`` and ``mx.nd`` arrays otherwise. A shard may share memory
    with an MXNet array that is already on its context.

    Shard sizes differ by at most one, larger shards first, and no sample is dropped. With fewer
    samples than contexts there is one shard per sample, and the remaining contexts get none. In a
    job of several processes a batch may have no samples; then there are no shards.
    ``weights`` are the relative speeds of the devices, one positive finite number per context: then
    shard sizes are proportional to them (:func:`gluonpar.plans.partition.sizes`), but at least one,
    so shard i is still on ``ctx[i]``.

    Raises ValueError for an empty batch, for arrays whose lengths along ``batch_axis`` differ, for
    an axis that an array does not have, and for bad weights; TypeError for a leaf that is not a
    dense array, and for dtypes that MXNet does not support.

    Compare ``gluon.utils.split_and_load``, and ``split_batch`` in Dive into Deep Learning, 13.5.

    >>> import mxnet as mx, numpy as np
    >>> [shard.shape for shard in split_and_load(np.zeros((5, 3)), [mx.cpu(0), mx.cpu(1)])]
    [(3, 3), (2, 3)]
    """
    return split(data, devices.as_list(ctx), batch_axis, weights)[0]


def split(
    batch: Any,
    contexts: list[mx.Context],
    batch_axis: int = 0,
    weights: Sequence[float] | None = None,
    nests: tuple[type, ...] = NESTS,
) -> tuple[list[Any], int]:
    """Return the shards of :func:`split_and_load` and the number of samples in them.

    Lists in ``batch`` have one entry per sample (:func:`split_samples`), unless ``nests`` has list.
    """
    threads.share(contexts)
    n = num_samples(batch, batch_axis, nests)
    if n == 0 and cluster.size() == 1:
        raise ValueError(f"a batch must have at least 1 sample, got 0 along axis {batch_axis}")
    parts = partition.slices(n, len(contexts), weights)[:n]
    return [_map(batch, nests, _take, part, batch_axis, c) for part, c in zip(parts, contexts)], n


def num_samples(batch: Any, batch_axis: int = 0, nests: tuple[type, ...] = NESTS) -> int:
    """Return the length along ``batch_axis`` that all arrays in ``batch`` have in common."""
    lengths: dict[int, str] = {}
    for path, leaf in _leaves(batch, "batch", nests):
        if isinstance(leaf, list):
            for inner, value in _leaves(leaf, path, NESTS):
                if isinstance(value, _ARRAYS):
                    _check_array(value, inner, may_be_empty=mx.util.is_np_shape())
            lengths.setdefault(len(leaf), f"{path} of length {len(leaf)}")
            continue
        _check_array(leaf, path)
        stype = getattr(leaf, "stype", "default")
        if stype != "default":
            raise TypeError(f"{path} must be dense, got a {stype} array; call tostype('default')")
        if not -leaf.ndim <= batch_axis < leaf.ndim:
            raise ValueError(f"{path} must have axis {batch_axis} to split, got shape {leaf.shape}")
        lengths.setdefault(leaf.shape[batch_axis], f"{path} of shape {tuple(leaf.shape)}")
    if not lengths:
        raise ValueError(f"the batch must contain an array to split, got {batch!r}")
    if len(lengths) > 1:
        raise ValueError(
            f"all parts of a batch must have the same length along axis {batch_axis}, got "
            f"{'; '.join(lengths.values())}"
        )
    return next(iter(lengths))


def split_samples(
    batch: Any, ctx: mx.Context | Sequence[mx.Context], weights: Sequence[float] | None = None
) -> list[Any]:
    """Split a ``batch`` whose samples differ in shape into shards, shard i on ``ctx[i]``.

    In ``batch``, tuples and dicts are nests, an array has its samples along axis 0, and a **list**
    has one entry per sample: an array of any shape (the boxes of an image), a nest of arrays, or
    anything else (a number, a file name), which is passed through unchanged. All parts have the
    same number of samples; shards have the same nesting. Shard sizes, ``weights`` and dtypes are
    as in :func:`split_and_load`, where lists, however, are nests.

    Raises ValueError for parts with different numbers of samples, for an empty batch (but see
    :func:`split_and_load`), and for an array without elements, which MXNet supports only under
    ``npx.set_np()``; TypeError for a part that is not an array, a list or a nest, and for dtypes
    that MXNet does not support.

    >>> import mxnet as mx, numpy as np
    >>> boxes = [np.zeros((count, 4)) for count in (1, 5, 2)]
    >>> shards = split_samples((np.zeros((3, 8, 8)), boxes), [mx.cpu(0), mx.cpu(1)])
    >>> [(images.shape, [box.shape for box in boxes]) for images, boxes in shards]
    [((2, 8, 8), [(1, 4), (5, 4)]), ((1, 8, 8), [(2, 4)])]
    """
    return split(batch, devices.as_list(ctx), weights=weights, nests=(dict, tuple))[0]


def share_of_batch(
    num_devices: int = 1, weights: Sequence[float] | None = None
) -> Callable[[int], slice]:
    """Return a function from a batch's size to the slice of its samples that this rank takes.

    The batch is split over all ranks' devices, ``num_devices`` each.
    """
    ranks, rank = cluster.size(), cluster.rank()
    all_weights = None if weights is None else [*weights] * ranks

    def share(n: int) -> slice:
        slices = partition.slices(n, ranks * num_devices, all_weights)
        mine = slices[rank * num_devices : (rank + 1) * num_devices]
        return slice(mine[0].start, mine[-1].stop)

    return share


def items(nest: Any) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a dict, list or tuple, each with its key or index."""
    return nest.items() if isinstance(nest, dict) else enumerate(nest)


def rebuild(nest: Any, values: Iterable[Any]) -> Any:
    """Return a dict, list, tuple or namedtuple like ``nest`` with these values."""
    if isinstance(nest, dict):
        same = copy.copy(nest)  # keeps the subclass of dict
        same.update(zip(nest, values))
        return same
    return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)


def _leaves(data: Any, path: str, nests: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yield every value in ``data`` that is not one of ``nests``, and its path for messages."""
    if not isinstance(data, nests):
        yield path, data
        return
    for key, value in items(data):
        yield from _leaves(value, f"{path}[{key!r}]", nests)


def _map(data: Any, nests: tuple[type, ...], change: Callable, *args: Any) -> Any:
    """Return a nest like ``data`` with ``change(leaf, *args)`` in the place of every leaf."""
    if not isinstance(data, nests):
        return change(data, *args)
    return rebuild(data, [_map(value, nests, change, *args) for _, value in items(data)])


def _check_array(leaf: Any, path: str, may_be_empty: bool = True) -> None:
    if not isinstance(leaf, _ARRAYS):
        raise TypeError(f"{path} must be an array or a nest of arrays, got {type(leaf).__name__}")
    if np.dtype(leaf.dtype) not in _DTYPES:
        raise TypeError(f"{path} has dtype {leaf.dtype}, which MXNet does not support; convert it")
    if 0 in leaf.shape and not may_be_empty:
        raise ValueError(
            f"{path} has shape {tuple(leaf.shape)}, but mx.nd has no arrays without elements; "
            "pad it, for example with a row of -1, or call npx.set_np()"
        )


def _take(leaf: Any, part: slice, axis: int, ctx: mx.Context) -> Any:
    """Return ``part`` of an array along ``axis``, or of a list, on ``ctx``."""
    if isinstance(leaf, list):
        return _map(leaf[part], NESTS, _load, ctx)
    return _load(leaf[(slice(None),) * (axis % leaf.ndim) + (part,)], ctx)


def _load(value: Any, ctx: mx.Context) -> Any:
    """Return an array on ``ctx``, the same object if it is there already; other values as is."""
    if isinstance(value, mx.nd.NDArray):
        return value.as_in_context(ctx)
    return memory.from_numpy(value, ctx) if isinstance(value, np.ndarray) else value
