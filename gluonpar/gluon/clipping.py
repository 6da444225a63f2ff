"""Clipping by the global norm: the square root of the sum of squares of all elements.

Squares are added in a wider type, in which they neither overflow nor vanish: float64, or
``long double`` for float64. On CPU contexts NumPy does this in one pass over the memory; otherwise
MXNet's ``norm`` does it for float64 copies, one array at a time.
"""

from __future__ import annotations

import functools
from typing import Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives import host
from gluonpar.runtime import memory, threads


def clip_global_norm(arrays: Sequence[mx.nd.NDArray], max_norm: float) -> mx.nd.NDArray:
    """Scale ``arrays``, in place, so that their global norm is at most ``max_norm``.

    They are any number of arrays on the current context, dense or row_sparse, ``mx.nd`` or
    ``mx.np``, of any float dtypes, and have elements, as Parameters do. Elements are multiplied in
    float64, and then rounded. Returns the norm before, without waiting: a float64 array of shape
    (1,) on that context, right to seven digits where the elements are finite; infinite or NaN if
    one is not. Call it where autograd records nothing and arrays may have 0 dimensions.
    """
    by_numpy: list[mx.nd.NDArray] = []
    others: list[mx.nd.NDArray] = []
    for array in arrays:
        takes_numpy = array.stype == "default" and host.on_host([array.context])
        (by_numpy if takes_numpy else others).append(array.as_nd_ndarray())
    norms = []
    for array in others:
        in_float64 = array.dtype == np.float64
        wide = array.tostype("default") if in_float64 else array.astype("float64")
        norms.append(wide.norm().reshape((1,)))  # MXNet scales dense arrays: no overflow
    if by_numpy:
        name = "gluonpar.global_norm"
        norms.append(host.reduced(by_numpy, _sum_of_squares, _root, "float64", name))
    if not norms:
        return mx.nd.zeros((1,), dtype="float64")
    norm = norms[0] if len(norms) == 1 else mx.nd.concat(*norms, dim=0).norm().reshape((1,))
    factor = max_norm / mx.nd.maximum(norm, max_norm)
    if by_numpy:
        _scale_on_host(by_numpy, factor)
    for array in others:
        wide = array.astype("float64")
        if array.stype == "default":
            wide = mx.nd.broadcast_mul(wide.reshape((-1,)), factor).reshape(array.shape)
        else:  # no operator multiplies row_sparse arrays by one element
            by = factor.reshape((1,) * array.ndim).broadcast_to(array.shape)
            wide = mx.nd.elemwise_mul(wide, by)
        wide.astype(array.dtype, copy=False).copyto(array)
    return norm


def _sum_of_squares(block: np.ndarray) -> np.floating:
    wide: np.ndarray = block.astype(np.longdouble if block.dtype == np.float64 else np.float64)
    np.multiply(wide, wide, out=wide)
    return np.sum(wide)


def _root(sums: list[np.floating]) -> np.floating:
    return np.sqrt(np.sum(np.sort(sums)))  # sorted: always the same bits


def _scale_on_host(arrays: Sequence[mx.nd.NDArray], factor: mx.nd.NDArray) -> None:
    num_bytes = sum(map(memory.num_bytes, arrays))

    def work() -> None:
        by = memory.view(factor)[0]
        if by != 1:
            tasks = [(functools.partial(_scale, by), [memory.view(array)]) for array in arrays]
            threads.run(tasks, num_bytes)

    name = "gluonpar.clip_global_norm"
    threads.push(work, factor.context, [*arrays, factor], num_bytes, name=name)


def _scale(by: np.float64, block: np.ndarray) -> None:
    np.copyto(block, block.astype(np.float64) * by, casting="same_kind")
