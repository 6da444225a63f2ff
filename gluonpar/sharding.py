"""Split a batch over contexts: arrays along an axis, and lists sample by sample."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives import partition
from gluonpar.runtime import memory, threads
from gluonpar.runtime.devices import as_list

_DTYPES = [
    np.dtype(name)
    for name in ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")
]
_ARRAYS = (np.ndarray, mx.nd.NDArray)


def split_and_load(
    data: Any,
    ctx: mx.Context | Sequence[mx.Context],
    batch_axis: int = 0,
    weights: Sequence[float] | None = None,
) -> list[Any]:
    """Split ``data`` along ``batch_axis`` into consecutive shards and load shard i onto ``ctx[i]``.

    ``data`` is an array (NumPy, ``mx.nd`` or ``mx.np``) or any nesting of tuples, lists and dicts
    of arrays with the same number of samples; every shard has the same nesting. Dtypes are kept.
    NumPy arrays are split on the host and each shard is copied to its own device, so device 0 never
    holds the whole batch; they become ``mx.np`` arrays under ``npx.set_np()`` and ``mx.nd`` arrays
    otherwise. A shard may share memory with an MXNet array that is already on its context.

    Shard sizes differ by at most one, larger shards first, and no sample is dropped. With fewer
    samples than contexts the list is shorter: one shard per sample, and the remaining contexts get
    no shard.

    ``weights`` are the relative speeds of the devices, one positive finite number per context.
    Shard sizes are then proportional to the weights, by the largest remainder method
    (:func:`gluonpar.collectives.partition.sizes`), but at least one, so shard i is still on
    ``ctx[i]``.

    Raises ValueError for an empty batch, for arrays whose lengths along ``batch_axis`` differ, for
    an axis that an array does not have, and for weights that are not one positive finite number per
    context; TypeError for a leaf that is not an array, and for dtypes that MXNet does not support.

    Compare ``gluon.utils.split_and_load``, and ``split_batch`` in Dive into Deep Learning, 13.5.

    >>> import mxnet as mx, numpy as np
    >>> [shard.shape for shard in split_and_load(np.zeros((5, 3)), [mx.cpu(0), mx.cpu(1)])]
    [(3, 3), (2, 3)]
    """
    shards, n = split(data, as_list(ctx), batch_axis, weights)
    if n == 0:
        raise ValueError(f"a batch must have at least 1 sample, got 0 along axis {batch_axis}")
    return shards


def split(
    data: Any,
    contexts: list[mx.Context],
    batch_axis: int = 0,
    weights: Sequence[float] | None = None,
) -> tuple[list[Any], int]:
    """Return the shards of :func:`split_and_load` and the number of samples in them.

    An empty batch has no shards: in a job of several processes a rank may have no sample.
    """
    if weights is not None:
        partition.check_weights(weights, len(contexts))
    threads.share(contexts)
    n = num_samples(data, batch_axis)
    parts = partition.slices(n, len(contexts), weights)[:n]
    return [_take(data, part, batch_axis, c) for part, c in zip(parts, contexts)], n


def num_samples(data: Any, batch_axis: int = 0) -> int:
    """Return the length along ``batch_axis`` that all arrays in ``data`` have in common."""
    lengths = {}
    for path, array in _leaves(data, "data"):
        if not -array.ndim <= batch_axis < array.ndim:
            raise ValueError(f"{path} must have an axis {batch_axis} to split, got {array.shape}")
        lengths.setdefault(array.shape[batch_axis], f"{path} of shape {tuple(array.shape)}")
    if not lengths:
        raise ValueError(f"the batch must contain an array to split, got {data!r}")
    if len(lengths) > 1:
        raise ValueError(
            f"all arrays of a batch must have the same number of samples along axis {batch_axis}, "
            f"got {'; '.join(lengths.values())}"
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
    those of :func:`split_and_load`, where lists are nests too.

    Raises ValueError for parts with different numbers of samples, for an empty batch, and for an
    array without elements, which MXNet supports only under ``npx.set_np()``; TypeError for a part
    that is not an array, a list or a nest, and for dtypes that MXNet does not support.

    >>> import mxnet as mx, numpy as np
    >>> boxes = [np.zeros((count, 4)) for count in (1, 5, 2)]
    >>> shards = split_samples((np.zeros((3, 8, 8)), boxes), [mx.cpu(0), mx.cpu(1)])
    >>> [(images.shape, [box.shape for box in boxes]) for images, boxes in shards]
    [((2, 8, 8), [(1, 4), (5, 4)]), ((1, 8, 8), [(2, 4)])]
    """
    contexts = as_list(ctx)
    if weights is not None:
        partition.check_weights(weights, len(contexts))
    n = _num_list_samples(batch)
    parts = partition.slices(n, len(contexts), weights)[:n]
    threads.share(contexts)
    return [_take_samples(batch, part, c) for part, c in zip(parts, contexts)]


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, _ARRAYS):
        _check_dtype(data, path)
        yield path, data
    elif isinstance(data, (dict, tuple, list)):
        for name, value in _items(data):
            yield from _leaves(value, f"{path}[{name}]")
    else:
        raise TypeError(f"{path} must be an array or a nest of arrays, got {type(data).__name__}")


def _items(nest: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a dict, list or tuple, with what stands between the brackets to get them."""
    if isinstance(nest, dict):
        return ((repr(key), value) for key, value in nest.items())
    return ((str(i), value) for i, value in enumerate(nest))


def _check_dtype(array: Any, path: str) -> None:
    if np.dtype(array.dtype) not in _DTYPES:
        raise TypeError(f"{path} has dtype {array.dtype}, which MXNet does not support; convert it")


def _rebuilt(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The same dict, list, tuple or namedtuple with every value changed."""
    if isinstance(nest, dict):
        same = copy.copy(nest)  # keeps the subclass of dict
        same.update((key, change(value)) for key, value in nest.items())
        return same
    values = [change(value) for value in nest]
    return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)  # namedtuple


def _load(array: Any, ctx: mx.Context) -> mx.nd.NDArray:
    """``array`` on ``ctx``: the same object if it is an MXNet array that is already there."""
    if isinstance(array, mx.nd.NDArray):
        return array.as_in_context(ctx)
    return memory.from_numpy(array, ctx)


def _take(data: Any, part: slice, axis: int, ctx: mx.Context) -> Any:
    """The same nesting with every array cut to ``part`` along ``axis`` and loaded onto ``ctx``."""
    if isinstance(data, (dict, tuple, list)):
        return _rebuilt(data, lambda value: _take(value, part, axis, ctx))
    if isinstance(data, mx.nd.NDArray) and data.stype != "default":
        raise TypeError(f"cannot split a {data.stype} array; call tostype('default') on it first")
    return _load(data[(slice(None),) * (axis % data.ndim) + (part,)], ctx)


def _num_list_samples(batch: Any) -> int:
    lengths: dict[int, str] = {}
    for path, length in _list_lengths(batch, "batch"):
        lengths.setdefault(length, f"{path} has {length}")
    if not lengths:
        raise ValueError(f"the batch must contain an array or a list to split, got {batch!r}")
    if len(lengths) > 1:
        raise ValueError(
            "all arrays and lists of a batch must have the same number of samples, got "
            f"{', '.join(lengths.values())}"
        )
    n = next(iter(lengths))
    if n == 0:
        raise ValueError("a batch must have at least 1 sample, got 0")
    return n


def _list_lengths(part: Any, path: str) -> Iterator[tuple[str, int]]:
    """The path and the number of samples of every array and list that is split."""
    if isinstance(part, (dict, tuple)):
        for name, value in _items(part):
            yield from _list_lengths(value, f"{path}[{name}]")
    elif isinstance(part, list):
        for i, entry in enumerate(part):
            _check_entry(entry, f"{path}[{i}]")
        yield path, len(part)
    elif isinstance(part, _ARRAYS):
        if part.ndim == 0:
            raise ValueError(f"{path} must have an axis 0 to split, got shape ()")
        _check_dtype(part, path)
        yield path, part.shape[0]
    else:
        raise TypeError(
            f"{path} must be an array, a list of samples or a nest, got {type(part).__name__}"
        )


def _check_entry(entry: Any, path: str) -> None:
    """Check what belongs to one sample in a list."""
    if isinstance(entry, (dict, tuple, list)):
        for name, value in _items(entry):
            _check_entry(value, f"{path}[{name}]")
    elif isinstance(entry, _ARRAYS):
        _check_dtype(entry, path)
        if 0 in entry.shape and not mx.util.is_np_shape():
            raise ValueError(
                f"{path} has shape {tuple(entry.shape)}, but mx.nd has no arrays without elements; "
                "pad it, for example with a row of -1, or call npx.set_np()"
            )


def _take_samples(part: Any, where: slice, ctx: mx.Context) -> Any:
    """The samples ``where``, in the same nesting, on ``ctx``."""
    if isinstance(part, list):
        return [_load_entry(entry, ctx) for entry in part[where]]
    if isinstance(part, (dict, tuple)):
        return _rebuilt(part, lambda value: _take_samples(value, where, ctx))
    return _load(part[where], ctx)


def _load_entry(entry: Any, ctx: mx.Context) -> Any:
    """What belongs to one sample, with every array in it on ``ctx``."""
    if isinstance(entry, (dict, tuple, list)):
        return _rebuilt(entry, lambda value: _load_entry(value, ctx))
    return _load(entry, ctx) if isinstance(entry, _ARRAYS) else entry
