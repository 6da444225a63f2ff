"""A copy of the parameters per device, with its gradients in a few flat arrays.

The gradients of neighbouring parameters of one device are views of one array, a *bucket*, so the
sum over devices works on a few large arrays. Buckets are filled from the last parameter to the
first, because backward reaches the last layers first: their sum can start while backward computes
the others (Li et al., "PyTorch Distributed", VLDB 2020).

Parameters cannot be views: in a forward pass without training, oneDNN converts a weight in place to
a layout of its own, and MXNet 1.9.1 writes that to the beginning of the memory it is a view of.
"""

from __future__ import annotations

from typing import Collection, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar import cluster
from gluonpar.collectives.local import BUCKET_BYTES
from gluonpar.runtime import memory


class Part(NamedTuple):
    """One device's share of a bucket: parameters, by index, and their gradients end to end."""

    indices: Sequence[int]
    params: Sequence[mx.nd.NDArray]
    grad: mx.nd.NDArray


class Bucket(NamedTuple):
    """Device k's parameters ``params[k]`` and, end to end, their gradients ``grads[k]``.

    ``owner`` is the device that updates the parameters, where only one does.
    """

    indices: Sequence[int]
    params: Sequence[Sequence[mx.nd.NDArray]]
    grads: Sequence[mx.nd.NDArray]
    owner: int = 0

    @property
    def row_sparse(self) -> bool:
        """Whether the gradients are row_sparse; the bucket then has one parameter."""
        return self.grads[0].stype == "row_sparse"

    @property
    def parts(self) -> list[Part]:
        """Every device's share."""
        return [Part(self.indices, *own) for own in zip(self.params, self.grads)]


class Replica(list):
    """One device's parameters: a list of arrays whose gradients are views of a few flat arrays.

    If an entry is replaced or given another gradient, each parameter is a bucket of its own
    (:func:`parts`). ``frozen`` are the indices of parameters without a gradient.
    """

    def __init__(self, params: Sequence[mx.nd.NDArray], frozen: Collection[int] = ()) -> None:
        super().__init__(params)
        self.graphs: dict = {}  # traced for these parameters by gluonpar.runtime.cached_op
        self.members = _neighbours(params, frozen)  # per bucket, the indices of its parameters
        self.grads = [self._attach_bucket(indices) for indices in self.members]
        self._made = tuple(self)
        self._grad_chunks = [*map(memory.grad_chunk, self)]

    def _attach_bucket(self, indices: Sequence[int]) -> mx.nd.NDArray:
        """Attach gradients to the parameters of one bucket; return the array that holds them."""
        params = [self[i] for i in indices]
        if len(params) == 1:
            params[0].attach_grad()
            return params[0].grad
        size = sum(param.size for param in params)
        flat = mx.nd.zeros((size,), ctx=params[0].context, dtype=params[0].dtype)
        start = 0
        for param in params:
            view = flat[start : start + param.size].reshape(param.shape)
            if isinstance(param, mx.np.ndarray):
                view = view.as_np_ndarray()
            autograd.mark_variables([param], [view])
            start += param.size
        return flat

    @property
    def parts(self) -> list[Part] | None:
        """One part per bucket, the last layers' first; None if parameters have been replaced."""
        if [*map(id, self)] != [*map(id, self._made)]:
            return None
        if [*map(memory.grad_chunk, self)] != self._grad_chunks:
            return None
        return [
            Part(tuple(indices), [self[i] for i in indices], grad)
            for indices, grad in zip(self.members, self.grads)
        ]


def get_params(
    params: Sequence[mx.nd.NDArray], ctx: mx.Context, frozen: Iterable[int] = ()
) -> Replica:
    """Return copies of ``params`` on ``ctx``, each with a gradient; they never alias the originals.

    In a job of several processes the copies have rank 0's values, and all ranks must call this
    equally often; inside ``gluonpar.cluster.local()`` each has its own.
    Gradients start at zero and are overwritten by every backward (``grad_req='write'``). Parameters
    whose indices are in ``frozen``, such as the running statistics of batch normalisation, have no
    gradient and are not updated. From ``get_params`` in Dive into Deep Learning, 13.5.3.
    """
    replica = copy(params, ctx, frozen)
    if cluster.spans():
        cluster.broadcast(list(replica), name="broadcast by get_params")
    return replica


def copy(params: Sequence[mx.nd.NDArray], ctx: mx.Context, frozen: Iterable[int] = ()) -> Replica:
    """:func:`get_params` with this process's values."""
    # as_in_context would alias on the same context
    return Replica([param.copyto(ctx) for param in params], frozenset(frozen))


def check(device_params: Sequence[Sequence[mx.nd.NDArray]], ctx: Sequence[mx.Context]) -> None:
    """Raise ValueError unless ``device_params[i]`` are on ``ctx[i]`` and their shapes agree."""
    if len(device_params) != len(ctx):
        raise ValueError(
            f"device_params must have one copy per context, got {len(device_params)} for "
            f"{len(ctx)} contexts {ctx}; make them with [get_params(params, c) for c in ctx]"
        )
    shapes = [[memory.kind(param)[0] for param in params] for params in device_params]
    for params, c, own in zip(device_params, ctx, shapes):
        for i, param in enumerate(params):
            if memory.context(param) != c:
                raise ValueError(f"parameter {i} must be on {c}, but is on {param.context}")
        if own != shapes[0]:
            raise ValueError(f"parameters on {c} have shapes {own}, on {ctx[0]} {shapes[0]}")


def parts(params: Sequence[mx.nd.NDArray]) -> list[Part]:
    """Return a :class:`Replica`'s parts, else one part per parameter that has a gradient.

    The last layers' come first.
    """
    found = params.parts if isinstance(params, Replica) else None
    return _one_by_one(params) if found is None else found


def buckets(device_params: Sequence[Sequence[mx.nd.NDArray]]) -> list[Bucket]:
    """Return the buckets of all devices, in the order of :func:`parts`.

    Raises ValueError if a parameter has a gradient on some devices only.
    """
    of_devices = [parts(params) for params in device_params]
    indices = [[part.indices for part in own] for own in of_devices]
    if any(own != indices[0] for own in indices):
        of_devices = [_one_by_one(params) for params in device_params]  # some are plain lists
    for own in of_devices[1:]:
        different = {part.indices for part in own} ^ {part.indices for part in of_devices[0]}
        if different:
            raise ValueError(
                f"parameter {min(different)[0]} has a gradient on some devices only; freeze the "
                "same parameters on all devices"
            )
    return [
        Bucket(same[0].indices, [part.params for part in same], [part.grad for part in same])
        for same in zip(*of_devices)
    ]


def zero_grads(params: Sequence[mx.nd.NDArray]) -> None:
    """Set one device's gradients to zero, in place: what a device without samples contributes."""
    for part in parts(params):
        memory.zero(part.grad)


def _one_by_one(params: Sequence[mx.nd.NDArray]) -> list[Part]:
    found = [Part((i,), [param], param.grad) for i, param in enumerate(params)]
    return [part for part in reversed(found) if part.grad is not None]


def _neighbours(params, frozen) -> list[list[int]]:
    """Per bucket, its parameters by index: at most BUCKET_BYTES of one dtype, or one parameter."""
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
