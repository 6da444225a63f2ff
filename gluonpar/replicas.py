"""Every device's own copy of the parameters, with its gradients, in a few flat arrays.

Neighbouring parameters of one device are views of one array, a *bucket*, and their gradients views
of another. So what is done to all parameters alike, a sum over devices or an update, is done to a
few large arrays. Buckets are filled from the last parameter to the first, because backward reaches
the last layers first: their sum can start while it computes the others. (Li et al., "PyTorch
Distributed", VLDB 2020.)
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar import memory

BUCKET_BYTES = 4 << 20


class Bucket(NamedTuple):
    """Arrays that are summed and updated as one: per device the values and their gradients."""

    values: Sequence[mx.nd.NDArray]
    grads: Sequence[mx.nd.NDArray]


class Replica(list):
    """One device's parameters: a list of arrays, which are views of a few flat ones.

    It may be used as any list. If an entry is replaced, or given another gradient, the flat arrays
    are no longer all there is to it; then each parameter stands for itself (:func:`buckets`).
    """

    def __init__(self, params: Sequence[mx.nd.NDArray], ctx: mx.Context, frozen=()) -> None:
        super().__init__([None] * len(params))
        self._flat: list[tuple[mx.nd.NDArray, mx.nd.NDArray]] = []
        for i in frozen:
            self[i] = params[i].copyto(ctx)
        for indices in _neighbours(params, frozen):
            self._place(params, indices, ctx)
        self._made = tuple(self)
        self._grad_chunks = [_grad_chunk(param) for param in self]

    def _place(self, params, indices: Sequence[int], ctx: mx.Context) -> None:
        """Copy the parameters of one bucket to ``ctx``."""
        if len(indices) == 1:
            [i] = indices
            self[i] = params[i].copyto(ctx)  # as_in_context would alias on the same context
            self[i].attach_grad()
            self._flat.append((self[i], self[i].grad))
            return
        size, dtype = sum(params[i].size for i in indices), params[indices[0]].dtype
        values, grads = (mx.nd.zeros((size,), ctx=ctx, dtype=dtype) for _ in range(2))
        self._flat.append((values, grads))
        start = 0
        for i in indices:
            stop = start + params[i].size
            self[i], grad = (_view(flat, start, stop, params[i]) for flat in (values, grads))
            params[i].copyto(self[i])
            autograd.mark_variables([self[i]], [grad])
            start = stop

    @property
    def flat(self) -> list[tuple[mx.nd.NDArray, mx.nd.NDArray]] | None:
        """(values, grads) of each bucket, the last layers' first; None if they are not all."""
        whole = len(self) == len(self._made) and all(map(_is, self, self._made))
        if whole and self._grad_chunks == [_grad_chunk(param) for param in self]:
            return self._flat
        return None


def get_params(
    params: Sequence[mx.nd.NDArray], ctx: mx.Context, frozen: Iterable[int] = ()
) -> Replica:
    """Copies of ``params`` on ``ctx``, each with a gradient; they never alias the originals.

    A list of arrays; shapes and dtypes are kept. Gradients start at zero and are overwritten by
    each backward (``grad_req='write'``). Those whose numbers are in ``frozen`` have no gradient and
    are not updated: layers that are not to train, and the running statistics of batch
    normalisation. From ``get_params`` in Dive into Deep Learning, 13.5.3.
    """
    return Replica(params, ctx, frozenset(frozen))


def check(device_params: Sequence[Sequence[mx.nd.NDArray]], ctx: Sequence[mx.Context]) -> None:
    """Raise ValueError unless ``device_params[i]`` are on ``ctx[i]`` and all of like shapes."""
    if len(device_params) != len(ctx):
        raise ValueError(
            f"{len(device_params)} copies of the parameters for {len(ctx)} contexts {ctx}; "
            "make one a context: [get_params(params, c) for c in ctx]"
        )
    first = [param.shape for param in device_params[0]]
    for params, c in zip(device_params, ctx):
        for i, param in enumerate(params):
            if param.context != c:
                raise ValueError(f"parameter {i} is on {param.context}, but its device is {c}")
        shapes = [param.shape for param in params]
        if shapes != first:
            raise ValueError(f"parameters on {c} have shapes {shapes}, on {ctx[0]} {first}")


def flat(params: Sequence[mx.nd.NDArray]) -> list[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
    """One device's (values, grads): a pair a bucket of a :class:`Replica`, else a parameter.

    The last layers' come first. Parameters without a gradient are left out.
    """
    found = params.flat if isinstance(params, Replica) else None
    return _one_by_one(params) if found is None else found


def buckets(device_params: Sequence[Sequence[mx.nd.NDArray]]) -> list[Bucket]:
    """What is summed and updated as one, over all devices, in the order of :func:`flat`."""
    each = [flat(params) for params in device_params]
    sizes = [[values.size for values, _ in pairs] for pairs in each]
    if any(others != sizes[0] for others in sizes[1:]):  # only some are whole Replicas
        each = [_one_by_one(params) for params in device_params]
    return [Bucket(*zip(*pairs)) for pairs in zip(*each)]


def zero_grads(params: Sequence[mx.nd.NDArray]) -> None:
    """Set one device's gradients to zero, in place: what a device without samples contributes."""
    for _, grads in flat(params):
        grads[:] = 0


def _one_by_one(params) -> list[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
    pairs = [(param, param.grad) for param in reversed(params)]
    return [(param, grad) for param, grad in pairs if grad is not None]


def _neighbours(params, frozen) -> list[list[int]]:
    """Numbers of the parameters of each bucket, from the last parameter's bucket to the first's.

    A bucket holds at most BUCKET_BYTES, or one parameter; one without elements or axes is alone.
    """
    found: list[list[int]] = []
    held, last = 0, None
    for i in reversed(range(len(params))):
        if i in frozen:
            continue
        size, kind = memory.num_bytes(params[i]), (params[i].dtype, type(params[i]))
        alone = 0 in params[i].shape or params[i].shape == ()
        if kind != last or alone or held + size > BUCKET_BYTES:
            found.append([])
            held, last = 0, None if alone else kind
        found[-1].insert(0, i)
        held += size
    return found


def _view(flat_array, start: int, stop: int, like: mx.nd.NDArray) -> mx.nd.NDArray:
    view = flat_array[start:stop].reshape(like.shape)
    return view.as_np_ndarray() if isinstance(like, mx.np.ndarray) else view


def _grad_chunk(param: mx.nd.NDArray) -> int | None:
    grad = param.grad
    return None if grad is None else memory.chunk(grad)


def _is(a, b) -> bool:
    return a is b
