"""A copy of the parameters per device, checks of the copies, and their gradients in buckets.

A bucket holds the gradients of neighbouring parameters. One operator or message sums them over
devices, or updates by them. Buckets are filled from the last parameter to the first, because
backward reaches the last layers first: their sum can start while backward computes the other
gradients (Li et al., "PyTorch Distributed", VLDB 2020).

Every gradient is an array of its own, as anywhere in MXNet. Views of one flat array per bucket
would make sums simpler; but not every operator of MXNet can write a gradient into a view (the
backward of Deconvolution ends the process), and a graph with static memory keeps writing to the
arrays that it found first. An algorithm that needs one flat array makes a copy.
"""

from __future__ import annotations

import hashlib
from typing import Callable, Iterable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster, gradients
from gluonpar.collectives import BUCKET_BYTES, exchange, grouped, host, operations
from gluonpar.runtime import memory


class ReplicasDifferError(AssertionError):
    """The copies of a parameter on several devices differ; the message says where."""


class Copies(NamedTuple):
    """One parameter, by index, on all devices: its copies, and their gradients.

    ``counts[k]`` says whether the gradient on device k counts (:mod:`gluonpar.gradients`); other
    gradients must not be added. An empty list means that all count.
    """

    index: int  # type: ignore[assignment]  # it hides tuple.index, which has no use here
    params: Sequence[mx.nd.NDArray]
    grads: Sequence[mx.nd.NDArray]
    counts: Sequence[bool] = ()

    @property
    def counting(self) -> Sequence[mx.nd.NDArray]:
        """The gradients that count."""
        if all(self.counts):
            return self.grads
        return [grad for grad, counts in zip(self.grads, self.counts) if counts]


class ParamBucket(NamedTuple):
    """Neighbouring parameters, and their root: the device that updates them, or None for each."""

    copies: Sequence[Copies]
    root: int | None = 0

    @property
    def grads(self) -> exchange.Bucket:
        """The gradients, for sums over devices."""
        counts = [each.counts for each in self.copies]
        return exchange.Bucket([each.grads for each in self.copies], self.root, counts)

    @property
    def params(self) -> exchange.Bucket:
        """The copies of the parameters, for a broadcast."""
        return exchange.Bucket([each.params for each in self.copies], self.root)


class Replica(list):
    """One device's parameters: a list of arrays, which also has the graphs traced for them."""

    def __init__(self, params: Iterable[mx.nd.NDArray]) -> None:
        super().__init__(params)
        self.graphs: dict = {}  # by gluonpar.runtime.cached_op
        self._grads: dict[int, mx.nd.NDArray | None] = {}

    def grads(self) -> list[mx.nd.NDArray | None]:
        """Return each parameter's gradient, the same array each time, unlike ``param.grad``."""
        for i, param in enumerate(self):
            chunk, kept = memory.grad_chunk(param), self._grads.get(i)
            if chunk is None or kept is None or memory.chunk(kept) != chunk:
                self._grads[i] = param.grad
        return [self._grads[i] for i in range(len(self))]


def get_params(
    params: Sequence[mx.nd.NDArray], ctx: mx.Context, frozen: Iterable[int] = ()
) -> Replica:
    """Return copies of ``params`` on ``ctx``, each with a gradient; they never alias the originals.

    In a job of several processes the copies have rank 0's values, and all ranks must call this
    equally often; inside ``gluonpar.cluster.local()`` each rank's copies have its own values.
    Gradients start at zero and are overwritten by every backward (``grad_req='write'``). Parameters
    whose indices are in ``frozen``, such as the running statistics of batch normalisation, have no
    gradient and are not updated. Raises TypeError unless ``ctx`` is a context. From ``get_params``
    in Dive into Deep Learning, 13.5.3.
    """
    if not isinstance(ctx, mx.Context):
        raise TypeError(f"ctx must be an mx.Context, such as mx.cpu(0), got {ctx!r}")
    with autograd.pause():  # as_in_context would alias on the same context
        replica, without = Replica(param.copyto(ctx) for param in params), frozenset(frozen)
    trained = [param for i, param in enumerate(replica) if i not in without]
    for param in trained:
        param.attach_grad()
    gradients.follow_copies(trained)
    if cluster.size() > 1:
        of = [f"params[{i}]" for i in range(len(replica))]
        cluster.broadcast(list(replica), name="broadcast by get_params", of=of)
        cluster.draw_apart()
    return replica


def check(
    device_params: Sequence[Sequence[mx.nd.NDArray]],
    ctx: Sequence[mx.Context],
    row_sparse: bool = False,
) -> list[Copies]:
    """Return the result of :func:`trained`, after a check of the parameters themselves.

    Raises ValueError unless ``device_params[i]`` are on ``ctx[i]`` and their shapes agree.
    """
    if len(device_params) != len(ctx):
        raise ValueError(
            f"device_params must have one copy per context, got {len(device_params)} for "
            f"{len(ctx)} contexts {ctx}; make them with [get_params(params, c) for c in ctx]"
        )
    numbers = [*map(len, device_params)]
    if len({*numbers}) > 1:
        raise ValueError(f"device_params must have equally many parameters each, got {numbers}")
    for i, copies in enumerate(zip(*device_params)):
        operations.check_copies(copies, ctx, f"parameter {i}")
    return trained(device_params, row_sparse)


def trained(
    device_params: Sequence[Sequence[mx.nd.NDArray]], row_sparse: bool = False
) -> list[Copies]:
    """Return the parameters that have a gradient.

    Raises ValueError if one has a gradient on some devices only, for gradients that differ in shape
    or dtype, and for sparse ones unless ``row_sparse``.
    """
    of_devices = [
        params.grads() if isinstance(params, Replica) else [param.grad for param in params]
        for params in device_params
    ]
    with_gradient = []
    for i, (copies, grads) in enumerate(zip(zip(*device_params), zip(*of_devices))):
        without = [grad is None for grad in grads]
        if any(without) and not all(without):
            raise ValueError(
                f"parameter {i} has a gradient on some devices only; freeze the same parameters "
                "on all devices"
            )
        if not any(without):
            operations.check_list(grads, "gradients", row_sparse)
            with_gradient.append(Copies(i, copies, grads))
    return with_gradient


def buckets(
    trained: Sequence[Copies], counting: Iterable[Sequence[bool]] | None = None
) -> list[ParamBucket]:
    """Return the parameters in buckets, the last layers' parameters first.

    ``counting`` says for each parameter which devices' gradients count; None means that all do.
    """
    if counting is not None:
        trained = [each._replace(counts=counts) for each, counts in zip(trained, counting)]
    return [ParamBucket(copies) for copies in neighbours(trained)]


def neighbours(copies: Sequence[Copies], bucket_bytes: int | None = None) -> list[list[Copies]]:
    """Return lists of the parameters that share a bucket, the last parameters first.

    A bucket has gradients of one dtype, and at most ``bucket_bytes`` per device (None:
    BUCKET_BYTES), or one larger gradient. A row_sparse gradient has a bucket to itself. A parameter
    without elements is in none.
    """
    return grouped(copies[::-1], lambda each: each.grads[0], bucket_bytes or BUCKET_BYTES)


def reduce_update(
    over: exchange.Exchange,
    buckets: Sequence[ParamBucket],
    rule_of: Callable[[Copies], tuple[Callable, Sequence[mx.nd.NDArray]]],
) -> None:
    """Sum the gradients in ``buckets`` over all devices, and update all copies of the parameters.

    The exchange must be one that ``may_fuse``. In one process the sum and the update are one pass
    over memory. With several processes the sums must be on each bucket's root already.
    ``rule_of(copies)`` returns the rule that updates a parameter, and the states that are passed to
    the rule (:class:`gluonpar.collectives.host.Update`).
    """
    alone = over.num_processes == 1
    for bucket in buckets:
        root = bucket.root or 0
        pairs = [(each, each.counting if alone else [each.grads[root]]) for each in bucket.copies]
        host.update([host.Update(g, each.params, *rule_of(each)) for each, g in pairs if g])


def check_identical(copies: Sequence[mx.nd.NDArray], name: str) -> None:
    """Wait for the parameter's ``copies``; raise ReplicasDifferError unless bit-identical."""
    first = copies[0].asnumpy()
    for copy in copies[1:]:
        other = copy.asnumpy()
        if first.tobytes() != other.tobytes():
            furthest = np.abs(first.astype("float64") - other.astype("float64")).max()
            between = f"{copies[0].context} and {copy.context}"
            raise ReplicasDifferError(f"{name} differs between {between}, by up to {furthest:.3g}")


def check_ranks(arrays: Sequence[mx.nd.NDArray], names: Sequence[str]) -> None:
    """Wait for ``arrays``; raise ReplicasDifferError unless all processes have the same bits.

    All processes must call it, each with one name per array.
    """
    if cluster.size() == 1:
        return
    hashes = (hashlib.sha256(array.asnumpy().tobytes()).hexdigest() for array in arrays)
    first, *rest = cluster.gather([*zip(names, hashes)])
    for rank, theirs in enumerate(rest, 1):
        different = ", ".join(sorted({name for name, _ in {*first} ^ {*theirs}}))
        if different:
            raise ReplicasDifferError(f"{different} differ between rank 0 and rank {rank}")
