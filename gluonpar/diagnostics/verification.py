"""The check that a user's network computes the same on several devices as on one."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import cluster, collectives, replicas, sharding
from gluonpar.batch_norm import running_statistics, sync_batch_norm
from gluonpar.runtime import devices, memory, private_fields, threads

# The largest relative difference that counts as rounding. A device left out, or counted twice,
# changes a sum by about 1 / K; another order of addition by a few units in the last place, and by
# about 1e-5 where that moves a relu's input across zero.
TOLERANCE = {"float16": 3e-2, "float32": 1e-3, "float64": 1e-9}

_LOSSES = "losses (per sample)"  # cannot be the name of a parameter

Arrays = Dict[str, np.ndarray]  # by name


class VerificationError(AssertionError):
    """A result differs from the expected one; the message says where and by how much."""


Wrong = VerificationError
"""The name of :class:`VerificationError` in ``gluonpar``."""


def verify(
    net: gluon.Block, loss: Callable, batch: Any, ctx: mx.Context | Sequence[mx.Context]
) -> list[str]:
    """Check that ``net`` computes on the devices ``ctx`` what it computes on ``ctx[0]`` alone.

    ``net`` is a Gluon block, initialized on all of ``ctx``; ``batch`` is a pair (X, y) of arrays or
    nested arrays, as for ``split_and_load``; ``loss(net(X), y)`` gives one loss per sample. The
    losses and summed gradients of the whole batch on ``ctx[0]`` are compared with those of its
    shards on all devices. Replicas must have the same bits, and each computation, done twice, must
    give the same bits. Returns a line of text per comparison. Parameters and running statistics end
    unchanged; gradients are overwritten, and MXNet's random generators seeded. Waits.

    Networks that several devices compute differently are compared in other ways, and a line says
    so. ``BatchNorm`` normalizes each device's shard by itself: the shards on all devices are
    compared with the same shards, one after another, on ``ctx[0]``. Networks with random numbers
    (dropout), and with :class:`SyncBatchNorm`, which one device cannot train, are compared in
    prediction mode.

    On GPUs cuDNN's deterministic algorithms are used, for shapes that were not computed before.
    With compute capability 8.0 and up, start Python with ``NVIDIA_TF32_OVERRIDE=0``: products in
    TF32 may differ by more than rounding of float32.

    Raises :class:`VerificationError`, which is ``gluonpar.Wrong``, for a difference; ValueError for
    an empty batch, a loss that is not per sample, a context listed twice, and a network that
    accumulates gradients (``grad_req='add'``); Gluon's RuntimeError for a network that is not on
    all of ``ctx``.

    >>> import mxnet as mx, numpy as np
    >>> net, ctx = mx.gluon.nn.Dense(3, in_units=4), [mx.cpu(0), mx.cpu(1)]
    >>> net.initialize(ctx=ctx)
    >>> batch = np.ones((5, 4), "float32"), np.arange(5) % 3
    >>> print(verify(net, mx.gluon.loss.SoftmaxCELoss(), batch, ctx)[0])
    replicas: 2 parameters identical on 2 devices
    """
    contexts = devices.as_list(ctx)
    threads.share(contexts)
    _check_request(net, contexts)
    with devices.deterministic():
        if any(map(private_fields.awaits_shape, net.collect_params().values())):
            X, _ = sharding.split_and_load(batch, contexts[:1])[0]
            net(X)  # infers the shapes that are not known yet
        trial = _Trial(net, loss, batch)
        try:
            return _compare(trial, contexts)
        finally:
            trial.restore()


def _compare(trial: _Trial, ctx: list[mx.Context]) -> list[str]:
    k = len(ctx)
    check_replicas({param.name: param.list_data() for param in trial.trained})
    one, note = _on_one_device(trial, ctx)
    several = repeated(functools.partial(trial.run, ctx), f"a pass on {k} devices")
    want, got = ({"losses": result.pop(_LOSSES)} for result in (one, several))
    return [
        f"replicas: {len(trial.trained)} parameters identical on {k} devices",
        *filter(None, [note]),
        "repeatability: the same bits twice, on one device and on all",
        check_close(want, got, "losses"),
        check_close(one, several, f"gradients, {k} devices against one"),
    ]


def _on_one_device(trial: _Trial, ctx: list[mx.Context]) -> tuple[Arrays, str]:
    """Return what all of ``ctx`` should compute, by ``ctx[0]``, and a note on how it was computed.

    Sets ``trial.training`` to False if the devices can be compared in prediction mode only.
    """
    first = ctx[:1]
    one = repeated(functools.partial(trial.run, first), f"the whole batch on {ctx[0]}")
    if not trial.training:
        return one, "SyncBatchNorm: one device alone cannot train; compared in prediction mode"
    if one[_LOSSES].tobytes() != trial.run(first, seed=2)[_LOSSES].tobytes():
        trial.training = False
        one = trial.run(first)
        return one, "random numbers: drawn per device (dropout); compared in prediction mode"
    if not trial.net.collect_params(running_statistics.NAMES).keys():
        return one, ""
    shards = sharding.split_and_load(trial.batch, first * len(ctx))
    parts = [trial.run(first, shard) for shard in shards]
    one = {name: np.sum([part[name] for part in parts], axis=0) for name in one if name != _LOSSES}
    one[_LOSSES] = np.concatenate([part[_LOSSES] for part in parts])
    return one, (
        "BatchNorm: each device normalizes its shard by itself; compared with the same shards, one "
        f"after another, on {ctx[0]} (gluonpar.SyncBatchNorm normalizes the whole batch)"
    )


class _Trial:
    """A network, its loss and a batch, run on one device or on all, in training mode or not."""

    def __init__(self, net: gluon.Block, loss: Callable, batch: Any) -> None:
        self.net, self.loss, self.batch = net, loss, batch
        self.training = not _contains(net, sync_batch_norm.SyncBatchNorm)
        params = net.collect_params().values()
        self.trained = [p for p in params if p.grad_req != "null"]
        self.start = [(a, a.copy()) for p in params for a in p.list_data()]

    def run(self, ctx: list[mx.Context], batch: Any = None, seed: int = 1) -> Arrays:
        """Return losses and summed gradients of ``batch`` (default: all), sharded over ``ctx``."""
        self.restore()
        mx.random.seed(seed)
        shards = sharding.split_and_load(batch or self.batch, ctx)
        with autograd.record(train_mode=self.training):
            losses = [self.loss(self.net(X), y) for X, y in shards]
        for (_, y), array in zip(shards, losses):
            num_samples = sharding.num_samples(y)
            if array.shape[:1] != (num_samples,):
                raise ValueError(
                    f"loss must give one loss per sample, got an array of shape {array.shape} for "
                    f"{num_samples} samples; do not take the mean: the update divides"
                )
        autograd.backward(losses, train_mode=self.training)
        results = {_LOSSES: np.concatenate([array.asnumpy() for array in losses])}
        for p in self.trained:
            copies = [p.grad(c).as_nd_ndarray().tostype("default") for c in ctx[: len(shards)]]
            with cluster.local():
                collectives.allreduce(copies)
            results[p.name] = copies[-1].asnumpy()
        return results

    def restore(self) -> None:
        """Restore all values, since batch normalization changes its averages; zero gradients."""
        for array, before in self.start:
            before.copyto(array)
        # Parameter.zero_grad knows mx.nd only.
        memory.zero([grad for param in self.trained for grad in param.list_grad()])


def check_replicas(of_params: dict[str, Sequence[mx.nd.NDArray]]) -> None:
    """Raise VerificationError, with the difference, unless all copies have the same bits. Waits."""
    try:
        for name, copies in of_params.items():
            replicas.check_identical(copies, name)
    except replicas.ReplicasDifferError as error:
        raise VerificationError(f"replicas: {error}") from error


def repeated(compute: Callable[[], Arrays], subject: str) -> Arrays:
    """Return ``compute()``; raise VerificationError, naming arrays, if two calls give others."""
    first, second = compute(), compute()
    different = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    if different:
        raise VerificationError(
            f"repeatability: {subject}, done twice, gave different {', '.join(different[:3])}; on "
            "GPUs cuDNN may, if these convolutions were computed before verify: call it first"
        )
    return first


def check_close(want: Arrays, got: Arrays, subject: str) -> str:
    """Return a line with the largest relative difference; raise VerificationError if it is large.

    Differences are relative to the largest magnitude in the array, or to a hundredth of the largest
    magnitude in all arrays: an array that is zero but for rounding (the gradient of a bias before a
    batch normalization) may differ by the others' rounding.
    """
    largest = max(map(_magnitude, want.values()), default=0.0)
    worst, where = 0.0, ""
    for name, array in want.items():
        scale = max(_magnitude(array), 1e-2 * largest, 1e-30)
        difference = _magnitude(array.astype("float64") - got[name]) / scale
        tolerance = TOLERANCE.get(array.dtype.name, TOLERANCE["float32"])
        if not difference <= tolerance:  # also NaN
            raise VerificationError(
                f"{subject}: {name} differs by {difference:.3g} of its largest magnitude "
                f"{scale:.3g}; rounding makes at most {tolerance:g}"
            )
        if difference > worst:
            worst, where = difference, f" ({name})" if len(want) > 1 else ""
    return f"{subject}: largest relative difference {worst:.1e}{where}"


def _magnitude(array: np.ndarray) -> float:
    return float(np.abs(array).max()) if array.size else 0.0


def _contains(block: gluon.Block, kind: type) -> bool:
    children = private_fields.children(block).values()
    return isinstance(block, kind) or any(_contains(child, kind) for child in children)


def _check_request(net: gluon.Block, ctx: list[mx.Context]) -> None:
    if _contains(net, gluon.contrib.nn.SyncBatchNorm):
        raise ValueError(
            "net must not contain gluon.contrib.nn.SyncBatchNorm, which cannot compute on one "
            "device alone; use gluonpar.SyncBatchNorm, which has the same parameters"
        )
    devices.check_distinct(ctx)
    for param in net.collect_params().values():
        if param.grad_req == "add":
            raise ValueError(
                f"parameter {param.name} must have grad_req='write', got 'add': verify compares "
                "the gradients of single passes"
            )
