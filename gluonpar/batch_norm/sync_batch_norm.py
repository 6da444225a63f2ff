"""SyncBatchNorm: batch normalisation over the whole batch, however it is split over devices."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
import weakref
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import cluster, tasks
from gluonpar.batch_norm import device_sums
from gluonpar.batch_norm.device_sums import RoundSums, SumKey
from gluonpar.runtime import device_threads, devices, engine, memory, private_fields


class SyncBatchNorm(gluon.nn.BatchNorm):
    """``gluon.nn.BatchNorm`` with mean and variance over the samples of all devices.

    Each device's input is (n_i, channels, ...), float16, float32 or float64; the n_i may differ.
    Samples weigh the same, so K devices compute what one device computes with ``BatchNorm`` on the
    whole batch: outputs, gradients and running statistics, up to rounding. The running variance
    is divided by n on CPU contexts, and by n - 1 on GPUs, as BatchNorm's. Running statistics change
    in forward; on CPU contexts BatchNorm's change in backward. float16 is normalised in float32.
    Arguments are those of ``gluon.contrib.nn.SyncBatchNorm``; parameter files fit that and
    ``BatchNorm``. The block may be hybridized, exported and imported; ``static_shape`` has no
    effect on a network with it.

    On CPU contexts train in :func:`run_tasks`, forward and backward, in one call or in two. Only
    devices with a task count, so a batch may have fewer samples than there are devices; the other
    devices also get the running statistics, except for an imported symbol::

        def forward_backward(shard):
            X, y = shard
            with autograd.record():
                losses = loss(net(X), y)
            losses.backward()
            return losses

        losses = gluonpar.run_tasks(forward_backward, shards, ctx)

    A plain loop, ``[net(X) for X, y in shards]``, could wait for ever there (docs/design-notes.md).
    It is refused: at once, with a RuntimeError; in a hybridized network whose shapes are not known
    yet with a ValueError, and if it has been called before with an MXNetError where a result is
    read. On GPUs, and in prediction, plain loops work. Their number of devices is ``num_devices``
    (:func:`set_num_devices`) or, if that is None, the number of contexts that hold the parameters;
    an imported symbol trains in them on as many devices as when it was traced.

    In a job of several processes the devices of all ranks count: P ranks with K devices each have
    the bits of one process with P x K (docs/cluster.md says what ranks must do alike). A layer that
    was made or is called inside ``gluonpar.cluster.local()`` has the mean and variance of this
    process.

    Reading a result waits for all devices. If a device or a rank does not arrive within
    ``timeout_seconds``, the others fail with an MXNetError where a result is read. Mean and
    variance are two all-reduces of one number per channel through the host, and so are their
    gradients; on CPU contexts it takes several times as long as BatchNorm.

    Raises ValueError if ``timeout_seconds`` is not positive, ``num_devices`` less than 1, or
    ``axis`` not 1, and when called if its parameters are on one context twice; RuntimeError also in
    training on several devices under NaiveEngine.

    Zhang et al., "Context Encoding for Semantic Segmentation", CVPR 2018.
    """

    def __init__(
        self,
        in_channels: int = 0,
        num_devices: int | None = None,
        *args: Any,
        timeout_seconds: float = 300,
        **kwargs: Any,
    ) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
        axis = kwargs.pop("axis", 1)
        if axis != 1:
            raise ValueError(f"axis must be 1, got {axis}")
        _check_num_devices(num_devices)
        super().__init__(axis, *args, in_channels=in_channels, **kwargs)
        self.num_devices, self.timeout_seconds = num_devices, timeout_seconds
        self.momentum, self._half = self._kwargs["momentum"], False
        self.is_local, self._key = cluster.is_local(), uuid.uuid4().hex
        # A layer that is not local exists on all ranks.
        self.name_in_job = self._key if self.is_local else device_sums.name_in_job(self.name)
        self._plain_sums: RoundSums | None = None
        _layers[self._key] = self

    def _contexts(self) -> list[mx.Context]:
        """Return the parameters' contexts; none if they have not been initialised."""
        known = private_fields.values(self.gamma) or private_fields.awaits_shape(self.gamma)
        return self.gamma.list_ctx() if known else []

    def _num_devices(self) -> int:
        """Return ``num_devices``, or if it is None, the number of contexts of the parameters."""
        return self.num_devices or len(self._contexts()) or 1

    def cast(self, dtype: Any) -> None:
        """Cast inputs and outputs to ``dtype``; for float16 the parameters stay float32."""
        super().cast(dtype)
        self._half = np.dtype(dtype) == np.float16

    def forward(self, x: Any, *more: Any) -> Any:
        """Normalise ``x``, unless the call might never end: then raise RuntimeError."""
        if not self._kwargs["use_global_stats"]:
            devices.check_distinct(self._contexts())
            symbolic = isinstance(x, mx.sym.Symbol)
            refusal = self._refusal(self._contexts() if symbolic else [x.context])
            if refusal:
                raise RuntimeError(refusal)
        out = super().forward(x, *more)
        # A graph with static_alloc keeps its operators, which keep this layer: if that kept the
        # network, which keeps the graph, none would be freed.
        private_fields.forget_parent(self)
        return out

    def _refusal(self, ctx: Sequence[mx.Context]) -> str:
        """Return why a call for one of ``ctx`` on this thread may never end; "" if it ends."""
        if not autograd.is_training() or self._sums().round.num_devices == 1:
            return ""
        if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
            return _NAIVE_ENGINE.format(self.name)
        if device_threads.current() in ctx or all(c.device_type == "gpu" for c in ctx):
            return ""
        return _PLAIN_LOOP.format(self.name)

    def _sums(self) -> RoundSums:
        """Return the sums of the round of this thread's task; in a plain loop the layer's own."""
        current, plain = tasks.current_round(), self._plain_sums
        if current:
            return current.sums
        how = self._num_devices(), cluster.size() > 1, ""
        if not plain or (plain.round.num_devices, bool(plain.messages), plain.round.failed) != how:
            place = f"a plain loop with {self.name_in_job}"
            plain = self._plain_sums = RoundSums(tasks.Round(how[0]), place)
        return plain

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any, **running: Any) -> Any:
        """Compute batch normalisation of ``x`` (n, channels, ...) on this device."""
        if mx.util.is_np_array():
            x, gamma, beta = (array.as_nd_ndarray() for array in (x, gamma, beta))
            running = {name: array.as_nd_ndarray() for name, array in running.items()}
        if self._half:
            x = F.cast(x, "float32")
        flat = F.reshape(x, shape=(0, 0, -1))  # (n, channels, other axes)
        column = functools.partial(F.reshape, shape=(1, -1, 1))
        mean = self._mean(F, flat, running["running_mean"], 0)
        centred = F.broadcast_sub(flat, column(mean))
        variance = self._mean(F, F.square(centred), running["running_var"], 1)
        if self._kwargs["fix_gamma"]:
            gamma = F.BlockGrad(F.elemwise_add(F.zeros_like(gamma), F.ones_like(variance)))
        scale = F.elemwise_div(gamma, F.sqrt(variance + self._kwargs["eps"]))
        beta = F.elemwise_add(beta, F.zeros_like(scale))  # infers the shape of beta
        out = F.broadcast_add(F.broadcast_mul(centred, column(scale)), column(beta))
        out = F.reshape_like(out, x)
        if self._half:
            out = F.cast(out, "float16")
        return out.as_np_ndarray() if mx.util.is_np_array() else out

    def _mean(self, F: Any, flat: Any, running: Any, which: int) -> Any:
        """Return per channel the mean of ``flat`` over all devices; in prediction, ``running``."""
        return F.Custom(
            F.sum(flat, axis=1, exclude=True),
            # size_array would do, but its GPU kernel writes four of its eight bytes.
            F.cast(F.shape_array(flat), dtype=np.dtype(self.gamma.dtype).name),
            running,
            op_type=_OPERATOR,
            key=self._key,
            name_of_layer=self.name,
            num_devices=self._num_devices(),
            momentum=self.momentum,
            frozen=int(self._kwargs["use_global_stats"]),
            variance=which,
        )


_OPERATOR = "gluonpar_mean_over_devices"
_Results = Callable[[np.ndarray], Iterable[np.ndarray]]  # computes from a sum what is written

_PLAIN_LOOP = """{} cannot train on CPU contexts in a plain loop, in which one device may be \
queued for ever behind another that waits for it. Run forward and backward in run_tasks:
    def forward_backward(shard): ...  # autograd.record(), net, loss, backward()
    losses = gluonpar.run_tasks(forward_backward, shards, ctx)"""

_NAIVE_ENGINE = (
    "{} cannot train on several devices with NaiveEngine, which ends each operator before the next "
    "device can start; unset MXNET_ENGINE_TYPE"
)


# A symbol names its layer by a key: the layer of a block, or one made for an imported symbol.
_layers: weakref.WeakValueDictionary[str, SyncBatchNorm] = weakref.WeakValueDictionary()
_imported: list[SyncBatchNorm] = []  # which nothing else keeps


@tasks.scopes.append
@contextlib.contextmanager
def _sums_of(round_: tasks.Round) -> Iterator[None]:
    """Have layers sum over the devices of a round; after it they share their running statistics."""
    round_.sums = sums = RoundSums(round_)
    sums.join_ranks()
    try:
        yield
        sums.check_begun()
        sums.send_tasks()
    except BaseException:
        sums.abandon()
        raise
    if round_.devices:
        _share_statistics(sums)
    else:
        _follow_statistics(sums)


def _share_statistics(sums: RoundSums) -> None:
    """Copy the running statistics to the devices that had no task."""
    took_part = sums.round.devices
    for layer in sums.begun:
        for param in (layer.running_mean, layer.running_var):
            # A layer that was made for an imported symbol has no values.
            ctx = param.list_ctx() if private_fields.values(param) else []
            for c in {*ctx}.difference(took_part) if took_part[0] in ctx else ():
                param.data(took_part[0]).copyto(param.data(c))


def _follow_statistics(sums: RoundSums) -> None:
    """On a rank without tasks, compute the running statistics from the other ranks' sums."""
    layers = {layer.name_in_job: layer for layer in _layers.values() if not layer.is_local}
    seconds = [layer.timeout_seconds for layer in layers.values()]
    calls = sums.wait_for_tasks(max(seconds)) if sums.number and seconds else {}
    for name, num_calls in calls.items():
        layer = layers.get(name)
        if layer is None or private_fields.awaits_shape(layer.running_mean):
            known = "does not know it" if layer is None else "does not know its shape yet"
            raise RuntimeError(
                f"{name} trained on other ranks, and rank {cluster.rank()}, which had no task, "
                f"{known}; make the same layers on all ranks, and call the network there once, for "
                "instance on zeros, before a batch without samples"
            )
        for param in (layer.running_mean, layer.running_var):
            of_variance = param is layer.running_var
            for number in range(1, num_calls + 1) if private_fields.values(param) else ():
                _follow_sum(SumKey(sums, layer, of_variance, number), param)


def _follow_sum(key: SumKey, param: gluon.Parameter) -> None:
    first, *_ = copies = param.list_data()
    running, ctx = first.copyto(mx.cpu()), first.context
    _push(key, None, lambda total: [_running(memory.view(running), total, key, ctx)], [running])
    for copy in copies:
        running.copyto(copy)


def _running(before: np.ndarray, total: np.ndarray, key: SumKey, ctx: mx.Context) -> np.ndarray:
    """Return the running statistic after a call, whose sums and count are ``total``."""
    count, momentum = total[-1], key.layer.momentum
    new = total[:-1] / count
    if key.of_variance and ctx.device_type == "gpu":  # as cuDNN's
        new = new * count / max(1, count - 1)
    return momentum * before + (1 - momentum) * new


def _push(
    key: SumKey,
    values: np.ndarray | None,
    results: _Results,
    arrays: Sequence[mx.nd.NDArray],
    ctx: mx.Context | None = None,
    refusal: str = "",
    settles: Sequence[mx.nd.NDArray] = (),
) -> None:
    """Push an operator that adds the values of ``ctx`` to a sum, and writes ``results(sum)``.

    The results go into ``arrays``, which are in the host's memory. This happens in order:

    1. The engine calls ``begin``, which adds the values, and returns: no thread waits.
    2. Other devices' operators, and messages of other ranks, add the other values.
    3. The thread that adds the last ones calls ``end`` of every device with the sum.
    4. ``end`` writes the results.
    5. ``complete`` ends the operator, and the engine starts what reads ``arrays``.

    If the sum cannot become complete, the operator ends with an error; if there is a ``refusal``,
    with this one at once. For ``settles`` see :func:`gluonpar.runtime.engine.prepare`.
    """

    def begin(complete: Callable) -> None:
        def end(total: np.ndarray, message: str) -> None:
            for array, result in zip(arrays, () if message else results(total)):
                memory.view(array)[:] = result
            complete(message or None)

        if refusal:
            raise RuntimeError(refusal)
        device_sums.add(key, ctx, values, end)

    how = {"name": "gluonpar.SyncBatchNorm", "prioritized": True, "ends_by_call": True}
    engine.push(begin, mx.cpu(), writes=arrays, settles=settles, **how)


def set_num_devices(net: gluon.Block, num_devices: int | None) -> None:
    """Set the number of devices that every SyncBatchNorm of ``net`` has in a plain loop on GPUs.

    None means the number of contexts that hold its parameters. In :func:`run_tasks` the number of
    tasks counts, whatever is set. Raises ValueError below 1.
    """
    _check_num_devices(num_devices)

    def change(block: gluon.Block) -> None:
        if isinstance(block, SyncBatchNorm):
            block.num_devices, block._plain_sums = num_devices, None

    net.apply(change)


def _check_num_devices(num_devices: int | None) -> None:
    if num_devices is not None and num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, or None, got {num_devices}")


@mx.operator.register(_OPERATOR)
class _MeanOverDevicesProp(mx.operator.CustomOpProp):
    """Has the operator's attributes, which a symbol keeps as strings."""

    def __init__(self, key: str, name_of_layer: str, momentum: str, **numbers: str) -> None:
        super().__init__(need_top_grad=True)
        self.key, self.name, self.momentum = key, name_of_layer, float(momentum)
        self.num_devices, self.frozen = int(numbers["num_devices"]), int(numbers["frozen"])
        self.variance = bool(int(numbers["variance"]))

    def list_arguments(self) -> list[str]:
        return ["sums", "shape"]

    def list_auxiliary_states(self) -> list[str]:
        return ["running"]

    def infer_shape(self, in_shape: list) -> tuple[list, list, list]:
        return [in_shape[0], [3]], [in_shape[0]], [in_shape[0]]

    def create_operator(self, ctx: str, shapes: list, dtypes: list) -> _MeanOverDevices:
        layer = _layers.get(self.key)
        if layer is None:  # the block is gone, or was in another process
            how: Any = {"num_devices": self.num_devices, "momentum": self.momentum}
            layer = SyncBatchNorm(prefix=self.name, **how)
            _layers[self.key] = layer
            _imported.append(layer)
        return _MeanOverDevices(self, layer, mx.Context(ctx))


class _MeanOverDevices(mx.operator.CustomOp):
    """Computes mean = (sum of sums) / (sum of counts) over devices, and its running mean.

    Nothing waits here: what depends on other devices is written by an operator of ``_push``.
    Calls for one device are ordered, because they all change ``running``.
    """

    def __init__(self, prop: _MeanOverDevicesProp, layer: SyncBatchNorm, ctx: mx.Context) -> None:
        super().__init__()
        # in_data is on cpu(0) on every CPU context, so the context is passed
        self._prop, self._ctx, self._layer = prop, ctx, layer
        # Forward raises it; the message of an error that is raised here would be lost.
        self._refusal = "" if prop.frozen else layer._refusal([ctx])
        self._next = self._begin() if autograd.is_training() and not prop.frozen else None
        self._key: SumKey | None = None  # the sum's, if forward was in training
        self._count = 0.0  # the number of values per channel, over all devices

    def _begin(self) -> SumKey:
        return self._layer._sums().begin(self._layer, self._ctx, self._prop.variance)

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        key, self._key, self._next = self._next, None, None
        if not is_train or self._prop.frozen:
            self.assign(out_data[0], req[0], aux[0])
            return
        sums, running = in_data[0].asnumpy(), aux[0].asnumpy()
        samples, _, places = in_data[1].asnumpy().astype("float64")
        self._key = key = key or self._begin()  # a Module's operator is made once for all calls

        def results(total: np.ndarray) -> list[np.ndarray]:
            self._count = total[-1]
            return [total[:-1] / self._count, _running(running, total, key, self._ctx)]

        values, targets = np.append(sums, samples * places), [out_data[0], aux[0]]
        self._write(key, values, results, targets, [req[0], "write"])

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[1], req[1], 0)
        if self._key is None:
            self.assign(in_grad[0], req[0], 0)
            return
        round_ = self._key.sums.round
        if self._ctx.device_type == "cpu" and round_.num_devices > 1:
            if not round_.has_begun_backward(self._ctx):  # it is another thread's
                self._refusal = _PLAIN_LOOP.format(self._layer.name)
        key, values = self._key._replace(of_gradients=True), out_grad[0].asnumpy()
        self._write(key, values, lambda total: [total / self._count], [in_grad[0]], [req[0]])

    def _write(
        self, key: SumKey, values: np.ndarray, results: _Results, targets: list, req: list
    ) -> None:
        """Write ``results(sum of values over devices)`` into ``targets``; returns at once."""
        writes = [self._ctx.device_type == "cpu" and kind == "write" for kind in req]
        arrays = [  # in the host's memory
            target if is_written else mx.nd.empty(target.shape, mx.cpu(), target.dtype)
            for target, is_written in zip(targets, writes)
        ]
        _push(key, values, results, arrays, self._ctx, self._refusal, [*arrays, *targets])
        for target, kind, array in zip(targets, req, arrays):
            if array is not target:
                self.assign(target, kind, array.as_in_context(target.context))


@private_fields.around(private_fields.MAKES_GRAPH)
def _without_static_shape(
    init: Callable, graph: Any, symbol: mx.sym.Symbol, flags: Sequence[tuple] = ()
) -> None:
    """Make graphs with the operator without ``static_shape``.

    So the operator is made in each forward, where its round is known. With ``static_shape`` it
    would be kept, and two forward passes would run it in any order.
    """
    # tojson() would take ten times as long, and MXNet never frees its text.
    if dict(flags).get("static_shape") and _OPERATOR in symbol.debug_str():
        flags = [flag for flag in flags if flag[0] != "static_shape"]
    init(graph, symbol, flags)
