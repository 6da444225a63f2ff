"""verify: whether one's own network, on one's own devices, trains on K as it would on one."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import metrics, sharding
from gluonpar.collectives import allreduce
from gluonpar.gluon import sync_batch_norm
from gluonpar.runtime import threads
from gluonpar.runtime.devices import as_list

# Largest relative difference that is put down to rounding. A device left out, or counted twice,
# changes a sum by about 1 / K; adding in another order by a few units of the last place, and by
# some 1e-5 where that takes a relu to the other side of zero.
TOLERANCE = {"float16": 3e-2, "float32": 1e-3, "float64": 1e-9}

_STATISTICS = ".*(running|moving)_(mean|var)$"
_SEEDS = (1, 2)


class Wrong(AssertionError):
    """What was computed is not what it must be; the message says what, where and by how much."""


class _Pass(NamedTuple):
    """Losses of a batch, one a sample, and the gradient of their sum by parameter's name."""

    losses: np.ndarray
    grads: dict[str, np.ndarray]


def verify(
    net: gluon.Block, loss: Callable, batch: Any, ctx: mx.Context | Sequence[mx.Context]
) -> list[str]:
    """Show that ``net`` computes on the devices ``ctx`` what it computes on the first; what it saw.

    ``net`` is a Gluon block, initialised on all of ``ctx``; ``batch`` a pair (X, y) of arrays or
    nestings of them, as ``split_and_load`` takes; ``loss(net(X), y)`` gives one loss a sample. Of
    the whole batch on ``ctx[0]``, and of its shards on all devices, the losses and the summed
    gradients of every parameter are compared, replicas are looked at bit by bit, and all is done
    twice, which must give the same bits. Parameters and running statistics end as they were;
    gradients are overwritten, and MXNet's random generators seeded.

    Some layers would differ rightly, so with them something else is compared, and the lines
    returned say so. ``BatchNorm`` normalises each device's shard by itself: the shards on all
    devices are compared with the same shards one after another on ``ctx[0]``. What draws random
    numbers (dropout) draws others on each device: it is compared as in prediction, and so is a
    network with :class:`SyncBatchNorm`, which one device cannot train alone. Waits.

    Raises :class:`Wrong` with the finding; ValueError for an empty batch, a loss that is not one a
    sample, a network that is not on ``ctx`` or adds up its gradients (``grad_req='add'``).

    >>> import mxnet as mx, numpy as np
    >>> net, ctx = mx.gluon.nn.Dense(3, in_units=4), [mx.cpu(0), mx.cpu(1)]
    >>> net.initialize(ctx=ctx)
    >>> batch = np.ones((5, 4), "float32"), np.arange(5) % 3
    >>> print(verify(net, mx.gluon.loss.SoftmaxCELoss(), batch, ctx)[0])
    replicas: 2 parameters identical on 2 devices
    """
    contexts = as_list(ctx)
    threads.share(contexts)
    _check_request(net, contexts)
    _settle_shapes(net, batch, contexts)
    trial = _Trial(net, loss, batch, contexts)
    try:
        return _compare(trial)
    finally:
        trial.rewind()


class _Trial:
    """A network, its loss and a batch, to be run on one device or on all."""

    def __init__(self, net: gluon.Block, loss: Callable, batch: Any, ctx: list) -> None:
        self.net, self.loss, self.batch, self.ctx = net, loss, batch, ctx
        self.synced = layers(net, sync_batch_norm.SyncBatchNorm)
        self.num_samples = sharding.num_samples(batch)
        params = net.collect_params()
        self.trained = [p for p in params.values() if p.grad_req != "null"]
        statistics = len(net.collect_params(_STATISTICS).values())
        self.normalises = statistics > 0
        self.start = [(a, a.copy()) for p in params.values() for a in p.list_data()]

    def alone(self, training: bool, num_shards: int = 1, seed: int = _SEEDS[0]) -> _Pass:
        """On the first device only; the batch in one piece, or shard after shard."""
        return self._run([self.ctx[0]] * num_shards, training, seed)

    def everywhere(self, training: bool) -> _Pass:
        """Every shard on its own device, the gradients summed by :func:`gluonpar.allreduce`."""
        return self._run(self.ctx, training, _SEEDS[0])

    def rewind(self) -> None:
        """Values as at first, for batch normalisation moves its averages; gradients zero."""
        for array, before in self.start:
            before.copyto(array)
        for param in self.trained:
            param.zero_grad()

    def _run(self, ctx: Sequence[mx.Context], training: bool, seed: int) -> _Pass:
        self.rewind()
        mx.random.seed(seed)
        shards = sharding.split_and_load(self.batch, list(ctx))
        used = ctx[: len(shards)]
        if len(set(used)) == len(used):  # all at once, as one trains
            losses = self._losses(shards, training)
            autograd.backward(losses, train_mode=training)
            grads = {p.name: [_dense(p.grad(c)) for c in used] for p in self.trained}
        else:
            losses, grads = [], {p.name: [] for p in self.trained}
            for shard in shards:
                losses += self._losses([shard], training)
                losses[-1].backward(train_mode=training)
                for p in self.trained:
                    grads[p.name].append(_dense(p.grad(used[0])))
        for copies in grads.values():
            allreduce(copies)
        sums = {name: copies[-1].asnumpy() for name, copies in grads.items()}
        return _Pass(np.concatenate([of_shard.asnumpy() for of_shard in losses]), sums)

    def _losses(self, shards: Sequence[Any], training: bool) -> list[mx.nd.NDArray]:
        with autograd.record(train_mode=training):
            losses = [self.loss(self.net(X), y) for X, y in shards]
        for (_, y), of_shard in zip(shards, losses):
            if of_shard.shape[:1] != (sharding.num_samples(y),):
                raise ValueError(
                    f"loss gives an array of shape {of_shard.shape} for "
                    f"{sharding.num_samples(y)} samples; it must give one loss a sample, for only "
                    "the update divides by their number"
                )
        return losses


def _compare(trial: _Trial) -> list[str]:
    """The comparisons in their order; a line for each, or Wrong."""
    k, n = len(trial.ctx), trial.num_samples
    for param in trial.trained:
        check_replicas(param.list_data(), param.name)
    lines = [f"replicas: {len(trial.trained)} parameters identical on {k} devices"]
    training = not trial.synced
    one, again = trial.alone(training), trial.alone(training)
    same_bits(one, again, f"the whole batch on {trial.ctx[0]}")
    other = trial.alone(training, seed=_SEEDS[1])
    if trial.synced:
        lines.append(
            "SyncBatchNorm: devices meet in it while training, and one alone would not, so the "
            "network is compared as in prediction, with its running statistics"
        )
    elif one.losses.tobytes() != other.losses.tobytes():
        training = False
        one = trial.alone(training)
        lines.append(
            "random numbers: the network draws some (dropout), other ones on each device, so it "
            "is compared as in prediction, without them"
        )
    elif trial.normalises:
        one = trial.alone(True, min(k, n))
        lines.append(
            "BatchNorm: each device normalises its shard by itself, so K devices give other "
            "gradients than one device's whole batch would; compared with the same shards one "
            f"after another on {trial.ctx[0]} (gluonpar.SyncBatchNorm normalises the whole batch)"
        )
    everywhere = trial.everywhere(training)
    same_bits(everywhere, trial.everywhere(training), f"a pass on {k} devices")
    lines.append("repeatability: the same bits twice, on one device and on all")
    lines.append(near({"losses": one.losses}, {"losses": everywhere.losses}, "losses"))
    return [*lines, near(one.grads, everywhere.grads, f"gradients, {k} devices against one")]


def layers(net: gluon.Block, kind: type) -> list:
    """All blocks of ``kind`` in ``net``, itself included."""
    inside = [found for child in net._children.values() for found in layers(child, kind)]
    return [net, *inside] if isinstance(net, kind) else inside


def check_replicas(copies: Sequence[mx.nd.NDArray], name: str) -> None:
    """Raise Wrong, naming devices and difference, unless all copies have the same bits. Waits."""
    try:
        metrics.check_identical(copies, name)
    except metrics.ReplicasDiffer as error:
        raise Wrong(f"replicas: {error}") from error


def same_bits(first: _Pass, second: _Pass, what: str) -> None:
    """Raise Wrong, naming what differs, unless both passes have the same bits."""
    arrays = {"losses": (first.losses, second.losses)}
    arrays.update({name: (grad, second.grads[name]) for name, grad in first.grads.items()})
    different = [name for name, (a, b) in arrays.items() if a.tobytes() != b.tobytes()]
    if different:
        raise Wrong(
            f"repeatability: {what}, done twice, gave different {', '.join(different[:3])}; on "
            "GPUs cuDNN may, unless MXNET_ENFORCE_DETERMINISM=1 and "
            "MXNET_CUDNN_AUTOTUNE_DEFAULT=0 are set"
        )


def near(want: dict[str, np.ndarray], got: dict[str, np.ndarray], what: str) -> str:
    """A line with the largest relative difference of ``got``; Wrong if it is more than rounding.

    A difference is relative to the largest magnitude in its array. An array that is all but zero
    beside the others (the bias before a batch normalisation) is let off with what rounding of the
    others leaves in it: TOLERANCE times a hundredth of their largest magnitude.
    """
    largest = max((_magnitude(array) for array in want.values()), default=0.0)
    worst, where = 0.0, ""
    for name, array in want.items():
        scale = max(_magnitude(array), 1e-2 * largest, 1e-30)
        far = _magnitude(array.astype("float64") - got[name]) / scale
        limit = TOLERANCE.get(array.dtype.name, TOLERANCE["float32"])
        if not far <= limit:  # NaN too
            raise Wrong(
                f"{what}: {name} differs by {far:.3g} of its largest magnitude {scale:.3g}; "
                f"rounding makes at most {limit:g}"
            )
        if far > worst:
            worst, where = far, f" ({name})" if len(want) > 1 else ""
    return f"{what}: largest relative difference {worst:.1e}{where}"


def _magnitude(array: np.ndarray) -> float:
    return float(np.abs(array).max()) if array.size else 0.0


def _dense(grad: mx.nd.NDArray) -> mx.nd.NDArray:
    return grad.copy() if grad.stype == "default" else grad.tostype("default")


def _settle_shapes(net: gluon.Block, batch: Any, ctx: list[mx.Context]) -> None:
    """Let the network meet its input, where it waits for that to know its shapes."""
    if any(p._data is None and p._deferred_init for p in net.collect_params().values()):
        X, _ = sharding.split_and_load(batch, ctx[:1])[0]
        net(X)


def _check_request(net: gluon.Block, ctx: list[mx.Context]) -> None:
    if layers(net, gluon.contrib.nn.SyncBatchNorm):
        raise ValueError(
            "gluon.contrib.nn.SyncBatchNorm waits for ever for the other devices, where one is "
            "to compute alone; use gluonpar.SyncBatchNorm, which takes the same parameters"
        )
    for param in net.collect_params().values():
        absent = [str(c) for c in ctx if c not in param.list_ctx()]
        if absent:
            raise ValueError(
                f"parameter {param.name} is not on {', '.join(absent)}; initialize the network on "
                "all of ctx: net.initialize(ctx=ctx)"
            )
        if param.grad_req == "add":
            raise ValueError(
                f"parameter {param.name} adds up its gradients (grad_req='add'); verify needs "
                "'write', so that a pass leaves its own"
            )
