"""The global norm of gradients, and clipping by it.

Squares are added in a wider type, in which they neither overflow nor vanish: float64, or
``long double`` for float64. On CPU contexts that is one pass over the memory, by NumPy; otherwise
MXNet's ``norm`` of float64 copies, one array at a time.
"""

from __future__ import annotations

import functools
from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar.optim import on_host
from gluonpar.runtime import memory, threads


def global_norm(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return the square root of the sum of squares of all elements, without waiting.

    ``arrays`` are any number on one context, dense or row_sparse, ``mx.nd`` or ``mx.np``, of any
    float dtypes. The result is a float64 array of shape (1,) on that context, right to seven digits
    where the elements are finite; infinite or NaN if one is not.
    """
    with autograd.pause(), mx.util.np_shape(True):  # np_shape: for arrays of 0 dimensions
        dense, sparse = _by_storage(arrays)
        if dense and on_host(dense):
            norms, others = [_norm_on_host(dense)], sparse
        else:
            norms, others = [], [*dense, *sparse]
        norms += [_as_float64(array).norm().reshape((1,)) for array in others]
        if not norms:
            ctx = arrays[0].context if arrays else mx.current_context()
            return mx.nd.zeros((1,), ctx, "float64")
        return norms[0] if len(norms) == 1 else mx.nd.concat(*norms, dim=0).norm().reshape((1,))


def clip_global_norm(arrays: Sequence[mx.nd.NDArray], max_norm: float) -> mx.nd.NDArray:
    """Scale ``arrays``, in place, so that their :func:`global_norm` is at most ``max_norm``.

    Returns the norm before. Elements are multiplied in float64, and then rounded.
    """
    norm = global_norm(arrays)
    with autograd.pause(), mx.util.np_shape(True):
        dense, sparse = _by_storage(arrays)
        factor = max_norm / mx.nd.maximum(norm, max_norm)
        if dense and on_host(dense):
            _scale_on_host(dense, factor)
            dense = []
        for array in [*dense, *sparse]:
            wide = array.astype("float64")
            if array.stype == "default":
                wide = mx.nd.broadcast_mul(wide.reshape((-1,)), factor).reshape(array.shape)
            else:  # no operator multiplies row_sparse arrays by one element
                by = factor.reshape((1,) * array.ndim).broadcast_to(array.shape)
                wide = mx.nd.elemwise_mul(wide, by)
            wide.astype(array.dtype, copy=False).copyto(array)
    return norm


def _by_storage(arrays: Sequence[mx.nd.NDArray]) -> tuple[list, list]:
    """Return the dense arrays that have elements, as ``mx.nd`` arrays, and the others."""
    dense = [array for array in arrays if array.stype == "default"]
    sparse = [array for array in arrays if array.stype != "default"]
    return [array.as_nd_ndarray() for array in dense if array.size], sparse


def _as_float64(array: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return the array in float64; of dense ones MXNet scales the norm, so it does not overflow."""
    if array.dtype == np.float64:
        return array.tostype("default")
    return array.astype("float64")


def _norm_on_host(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    result = mx.nd.empty((1,), arrays[0].context, "float64")
    num_bytes = sum(map(memory.num_bytes, arrays))

    def work() -> None:
        sums: list[np.floating] = []  # of blocks, in any order
        tasks = [(functools.partial(_add_squares, sums), [memory.view(a)]) for a in arrays]
        threads.run(tasks, num_bytes)
        memory.view(result)[0] = np.sqrt(np.sum(np.sort(sums)))  # sorted: always the same bits

    threads.push(work, [*arrays, result], num_bytes, name="gluonpar.global_norm")
    return result


def _add_squares(sums: list, block: np.ndarray) -> None:
    wide = block.astype(np.longdouble if block.dtype == np.float64 else np.float64)
    np.multiply(wide, wide, out=wide)
    sums.append(np.sum(wide))


def _scale_on_host(arrays: Sequence[mx.nd.NDArray], factor: mx.nd.NDArray) -> None:
    num_bytes = sum(map(memory.num_bytes, arrays))

    def work() -> None:
        by = memory.view(factor)[0]
        if by != 1:
            tasks = [(functools.partial(_scale, by), [memory.view(array)]) for array in arrays]
            threads.run(tasks, num_bytes)

    threads.push(work, [*arrays, factor], num_bytes, name="gluonpar.clip_global_norm")


def _scale(by: np.float64, block: np.ndarray) -> None:
    np.copyto(block, block.astype(np.float64) * by, casting="same_kind")
