"""split_and_load: a batch, any nesting of arrays, cut along one axis over contexts."""

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


def split_and_load(
    data: Any,
    ctx: mx.Context | Sequence[mx.Context],
    batch_axis: int = 0,
    weights: Sequence[float] | None = None,
) -> list[Any]:
    """Cut ``data`` along ``batch_axis`` into consecutive shards, shard i on ``ctx[i]``.

    ``data`` is an array (NumPy, ``mx.nd`` or ``mx.np``) or any nesting of tuples, lists and dicts
    of arrays with equally many samples; every shard has the same nesting. Dtypes are kept. NumPy
    arrays are cut on the host and each shard goes to its own device, so that device 0 never holds
    the whole batch; they become ``mx.np`` arrays under ``npx.set_np()`` and ``mx.nd`` arrays
    otherwise. A shard may share memory with an MXNet array that is on its context already.

    Shard sizes differ by at most one, the larger first, and no sample is lost. With fewer samples
    than contexts the list is shorter: one shard a sample, and the other contexts get none.

    ``weights`` are the devices' relative speeds, one positive finite number a context. Shard sizes
    are then proportional to them, by largest remainder (:func:`gluonpar.collectives.partition.sizes`), and at
    least one, so that shard i is on ``ctx[i]`` all the same.

    Raises ValueError for an empty batch, arrays of different lengths along ``batch_axis`` or an
    axis that an array does not have, and weights that are not one positive finite number a context;
    TypeError for a leaf that is no array, or of a dtype that MXNet lacks.

    Compare ``gluon.utils.split_and_load``, and ``split_batch`` in Dive into Deep Learning, 13.5.

    >>> import mxnet as mx, numpy as np
    >>> [shard.shape for shard in split_and_load(np.zeros((5, 3)), [mx.cpu(0), mx.cpu(1)])]
    [(3, 3), (2, 3)]
    """
    contexts = as_list(ctx)
    if weights is not None:
        partition.check_weights(weights, len(contexts))
    threads.share(contexts)
    n = num_samples(data, batch_axis)
    if n == 0:
        raise ValueError(f"the batch holds 0 samples along axis {batch_axis}: nothing to split")
    parts = partition.slices(n, len(contexts), weights)[:n]
    return [_take(data, part, batch_axis, c) for part, c in zip(parts, contexts)]


def num_samples(data: Any, batch_axis: int = 0) -> int:
    """Number of samples: the length along ``batch_axis`` that all arrays of ``data`` share."""
    lengths = {}
    for path, array in _leaves(data, "data"):
        if not -array.ndim <= batch_axis < array.ndim:
            raise ValueError(
                f"{path} has shape {array.shape}: there is no axis {batch_axis} to split"
            )
        lengths.setdefault(array.shape[batch_axis], f"{path} of shape {tuple(array.shape)}")
    if not lengths:
        raise ValueError(f"there is no array in {data!r} to split")
    if len(lengths) > 1:
        raise ValueError(
            f"different numbers of samples along axis {batch_axis}: {'; '.join(lengths.values())}. "
            "Every array of a batch must have one entry a sample"
        )
    return next(iter(lengths))


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(data, (tuple, list)):
        for i, value in enumerate(data):
            yield from _leaves(value, f"{path}[{i}]")
    elif isinstance(data, (np.ndarray, mx.nd.NDArray)):
        check_dtype(data, path)
        yield path, data
    else:
        raise TypeError(
            f"{path} is a {type(data).__name__}, which is neither an array nor a nest of arrays"
        )


def check_dtype(array: Any, path: str) -> None:
    """Raise TypeError, naming ``path``, for a dtype that MXNet lacks."""
    if np.dtype(array.dtype) not in _DTYPES:
        raise TypeError(f"{path} is of dtype {array.dtype}, which MXNet does not have; convert it")


def rebuilt(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The same dict, list, tuple or namedtuple, its values changed."""
    if isinstance(nest, dict):
        same = copy.copy(nest)  # whatever kind of dict it is
        same.update((key, change(value)) for key, value in nest.items())
        return same
    items = [change(value) for value in nest]
    return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)  # namedtuple


def load(array: Any, ctx: mx.Context) -> mx.nd.NDArray:
    """``array`` on ``ctx``; it may be the same one if it is an MXNet array and there already."""
    if isinstance(array, mx.nd.NDArray):
        return array.as_in_context(ctx)
    return memory.from_numpy(array, ctx)


def _take(data: Any, part: slice, axis: int, ctx: mx.Context) -> Any:
    """The same nesting, every array cut to ``part`` along ``axis`` and put on ``ctx``."""
    if isinstance(data, (dict, tuple, list)):
        return rebuilt(data, lambda value: _take(value, part, axis, ctx))
    if isinstance(data, mx.nd.NDArray) and data.stype != "default":
        raise TypeError(f"cannot split a {data.stype} array; call tostype('default') on it first")
    return load(data[(slice(None),) * (axis % data.ndim) + (part,)], ctx)
