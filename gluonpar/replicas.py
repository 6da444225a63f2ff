"""Every device's own copy of the parameters, with its gradients in a few flat arrays.

The gradients of neighbouring parameters of one device are views of one array, a *bucket*, so what
is done to all of them alike, such as a sum over devices, is done to a few large arrays. Buckets are
filled from the last parameter to the first, because backward reaches the last layers first: their
sum can start while it computes the others. (Li et al., "PyTorch Distributed", VLDB 2020.)

Parameters are arrays of their own. Views they cannot be: in a forward pass without training, oneDNN
puts a weight into a layout of its own, in place, and MXNet 1.9.1 then writes to the begin of the
memory that the weight is a view of.
"""

from __future__ import annotations

import operator
from typing import Collection, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar.runtime import memory

BUCKET_BYTES = 4 << 20


class Part(NamedTuple):
    """Some of one device's parameters, by number, and their gradients end to end in one array."""

    numbers: tuple[int, ...]
    params: Sequence[mx.nd.NDArray]
    grad: mx.nd.NDArray


class Bucket(NamedTuple):
    """The same parts of all devices: what is summed and updated as one."""

    params: Sequence[Sequence[mx.nd.NDArray]]
    grads: Sequence[mx.nd.NDArray]


class Replica(list):
    """One device's parameters: a list of arrays whose gradients are views of a few flat ones.

    It may be used as any list. If an entry is replaced, or given another gradient, the flat arrays
    are no longer all there is to it; then each parameter stands for itself (:func:`parts`).
    ``frozen`` are the numbers of those without a gradient.
    """

    def __init__(self, params: Sequence[mx.nd.NDArray], frozen: Collection[int] = ()) -> None:
        super().__init__(params)
        self.graphs: dict = {}  # what gluonpar.runtime.cached_op has traced for these parameters
        self.members = _neighbours(params, frozen)  # the numbers of each bucket's parameters
        self.grads = [self._place(indices) for indices in self.members]
        self._made = tuple(self)
        self._grad_chunks = [_grad_chunk(param) for param in self]

    def _place(self, indices: Sequence[int]) -> mx.nd.NDArray:
        """Give the parameters of one bucket their gradients; the array that holds them all."""
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
        """A part a bucket, the last layers' first; None if these are not all of it any more."""
        whole = len(self) == len(self._made) and all(map(operator.is_, self, self._made))
        if not whole or self._grad_chunks != [_grad_chunk(param) for param in self]:
            return None
        return [
            Part(tuple(indices), [self[i] for i in indices], grad)
            for indices, grad in zip(self.members, self.grads)
        ]


def get_params(
    params: Sequence[mx.nd.NDArray], ctx: mx.Context, frozen: Iterable[int] = ()
) -> Replica:
    """Copies of ``params`` on ``ctx``, each with a gradient; they never alias the originals.

    A list of arrays; shapes and dtypes are kept. Gradients start at zero and are overwritten by
    each backward (``grad_req='write'``). Those whose numbers are in ``frozen`` have no gradient and
    are not updated: layers that are not to train, and the running statistics of batch
    normalisation. From ``get_params`` in Dive into Deep Learning, 13.5.3.
    """
    # as_in_context would alias on the same context
    return Replica([param.copyto(ctx) for param in params], frozenset(frozen))


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


def parts(params: Sequence[mx.nd.NDArray]) -> list[Part]:
    """One device's parameters that have a gradient, in few parts, the last layers' first.

    A part a bucket of a :class:`Replica`, else one a parameter.
    """
    found = params.parts if isinstance(params, Replica) else None
    return _one_by_one(params) if found is None else found


def buckets(device_params: Sequence[Sequence[mx.nd.NDArray]]) -> list[Bucket]:
    """What is summed and updated as one, over all devices, in the order of :func:`parts`."""
    each = [parts(params) for params in device_params]
    if any(_numbers(of_device) != _numbers(each[0]) for of_device in each[1:]):
        each = [_one_by_one(params) for params in device_params]  # only some are whole Replicas
    for of_device in each[1:]:
        some = {part.numbers for part in of_device} ^ {part.numbers for part in each[0]}
        if some:
            raise ValueError(
                f"parameter {min(some)[0]} has a gradient on some devices only; freeze the same "
                "parameters on all of them"
            )
    return [Bucket(*list(zip(*of_devices))[1:]) for of_devices in zip(*each)]


def zero_grads(params: Sequence[mx.nd.NDArray]) -> None:
    """Set one device's gradients to zero, in place: what a device without samples contributes."""
    for part in parts(params):
        memory.zero(part.grad)


def _one_by_one(params: Sequence[mx.nd.NDArray]) -> list[Part]:
    found = [Part((i,), [param], param.grad) for i, param in enumerate(params)]
    return [part for part in reversed(found) if part.grad is not None]


def _numbers(of_device: Sequence[Part]) -> list[tuple[int, ...]]:
    return [part.numbers for part in of_device]


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


def _grad_chunk(param: mx.nd.NDArray) -> int | None:
    grad = param.grad
    return None if grad is None else memory.chunk(grad)
