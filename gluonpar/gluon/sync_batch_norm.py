"""SyncBatchNorm: batch normalisation over the whole batch, however it is cut over devices."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar.gluon.rendezvous import Late, Meeting
from gluonpar.runtime import engine, memory

_meetings: weakref.WeakValueDictionary[str, Meeting] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class SyncBatchNorm(gluon.nn.BatchNorm):
    """``gluon.nn.BatchNorm`` with mean and variance over the samples of all devices.

    Each device's input is (n_i, channels, ...), float16, float32 or float64, the n_i alike or not:
    samples weigh alike, so that K devices give what one gives with ``BatchNorm`` on the whole
    batch, outputs, gradients and running statistics, up to rounding. float16 is normalised in
    float32. Arguments and parameters are those of ``BatchNorm``, but for ``axis``, which is 1; a
    file of parameters fits both. It may be hybridized, and networks called on one device after the
    other. On CPU contexts hybridize networks with more than some 250 operators that take a
    workspace (convolutions, sums, gradients of broadcasts; counted over all devices) with
    ``static_alloc=True, static_shape=True``: otherwise operators of two devices may draw the same
    entry of MXNet's pool of workspaces (MXNET_CPU_TEMP_COPY, 256 here), one behind the other, while
    the other waits for the one.

    All devices that hold the parameters must run forward before any result is read (reading waits
    for it, and the others are waited for), and likewise backward. A device that does not come
    within ``timeout_seconds`` makes the others fail with an MXNetError that says so, where a result
    is read. For a step on fewer devices call :func:`set_num_devices`. On one device, or when
    predicting, nobody is waited for.

    Mean and variance are two all-reduces of one number a channel, through the host, and so are
    their gradients; the rest is elementwise operators, several passes over the input where
    BatchNorm has one, and on CPU contexts several times its time.
    Zhang et al., "Context Encoding for Semantic Segmentation", CVPR 2018. MXNet's own
    ``gluon.contrib.nn.SyncBatchNorm`` weighs devices alike, waits for ever for one that does not
    come, and was seen to end the process (a double free) in a loop of small steps.

    Raises ValueError for ``timeout_seconds`` that is not positive.
    """

    def __init__(self, timeout_seconds: float = 300, **batch_norm: Any) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds} lets no device come; give some")
        if batch_norm.setdefault("axis", 1) != 1:
            raise ValueError(
                f"axis={batch_norm['axis']}: SyncBatchNorm has channels on axis 1 only"
            )
        super().__init__(**batch_norm)
        self.num_devices: int | None = None
        self._half = False
        self._meetings = {}
        for what in ("mean", "variance"):
            key = f"{next(_numbers)}"
            self._meetings[key] = _meetings[key] = Meeting(
                f"{what} of {self.name}", self._num_devices, timeout_seconds
            )

    def _num_devices(self) -> int:
        return self.num_devices or len(self.gamma.list_ctx())

    def cast(self, dtype: Any) -> None:
        """As BatchNorm: inputs and outputs of ``dtype``; parameters stay float32 for float16."""
        super().cast(dtype)
        self._half = np.dtype(dtype) == np.float16

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any, **running: Any) -> Any:
        """What BatchNorm computes, of ``x`` (n, channels, ...) on this device."""
        if mx.util.is_np_array():
            x, gamma, beta = (array.as_nd_ndarray() for array in (x, gamma, beta))
            running = {name: array.as_nd_ndarray() for name, array in running.items()}
        if self._half:
            x = F.cast(x, "float32")
        mean_key, variance_key = self._meetings
        flat = F.reshape(x, shape=(0, 0, -1))  # (n, channels, all the rest)
        mean = self._mean(F, flat, running["running_mean"], mean_key)
        centred = F.broadcast_sub(flat, _as_column(F, mean))
        variance = self._mean(F, F.square(centred), running["running_var"], variance_key)
        if not self._kwargs["fix_gamma"]:
            scale = F.elemwise_div(gamma, F.sqrt(variance + self._kwargs["eps"]))
        else:
            gamma = F.BlockGrad(F.elemwise_add(F.zeros_like(gamma), F.ones_like(variance)))
            scale = F.elemwise_div(gamma, F.sqrt(variance + self._kwargs["eps"]))
        beta = F.elemwise_add(beta, F.zeros_like(scale))  # which infers the shape of beta
        out = F.broadcast_add(F.broadcast_mul(centred, _as_column(F, scale)), _as_column(F, beta))
        out = F.reshape_like(out, x)
        if self._half:
            out = F.cast(out, "float16")
        return out.as_np_ndarray() if mx.util.is_np_array() else out

    def _mean(self, F: Any, flat: Any, running: Any, key: str) -> Any:
        """Per channel, the mean of ``flat`` over all devices; when predicting, ``running``."""
        return F.Custom(
            F.sum(flat, axis=1, exclude=True),
            F.cast(F.size_array(flat), dtype=np.dtype(self.gamma.dtype).name),
            running,
            op_type="gluonpar_mean_over_devices",
            key=key,
            momentum=self._kwargs["momentum"],
            frozen=int(self._kwargs["use_global_stats"]),
        )


def set_num_devices(net: gluon.Block, num_devices: int | None) -> None:
    """How many devices meet in each SyncBatchNorm of ``net``; None: all that hold its parameters.

    For batches with fewer samples than devices. Waits until everything under way has been computed.
    Raises ValueError for a number below 1.
    """
    if num_devices is not None and num_devices < 1:
        raise ValueError(f"num_devices={num_devices} is too small; give 1 or more, or None")
    mx.nd.waitall()

    def change(block: gluon.Block) -> None:
        if isinstance(block, SyncBatchNorm):
            block.num_devices = num_devices
            for meeting in block._meetings.values():
                meeting.restart()  # those who sat out have been to fewer rounds

    net.apply(change)


def _as_column(F: Any, per_channel: Any) -> Any:
    return F.reshape(per_channel, shape=(1, -1, 1))


@mx.operator.register("gluonpar_mean_over_devices")
class _MeanOverDevicesProp(mx.operator.CustomOpProp):
    def __init__(self, key: str, momentum: str, frozen: str) -> None:
        super().__init__(need_top_grad=True)
        self._key, self._momentum, self._frozen = key, float(momentum), frozen == "1"

    def list_arguments(self):
        return ["sums", "size"]

    def list_auxiliary_states(self):
        return ["running"]

    def infer_shape(self, in_shape):
        return [in_shape[0], [1]], [in_shape[0]], [in_shape[0]]

    def create_operator(self, ctx, shapes, dtypes):
        return _MeanOverDevices(_meetings[self._key], str(ctx), self._momentum, self._frozen)


class _MeanOverDevices(mx.operator.CustomOp):
    """mean = (sum of sums) / (sum of counts), over devices, and the running mean of that.

    MXNet calls it on threads that it keeps for such operators, one for each that is under way, so
    that waiting here holds no other operator up. Calls of one device come in order, for they all
    change ``running``.
    """

    def __init__(self, meeting: Meeting, device: str, momentum: float, frozen: bool) -> None:
        super().__init__()
        self._meeting, self._device = meeting, device  # in_data says cpu(0) on every CPU context
        self._momentum, self._frozen = momentum, frozen
        self._round = self._total = None

    def forward(self, is_train, req, in_data, out_data, aux):
        running = aux[0].asnumpy()
        self._round = None
        if not is_train or self._frozen:
            _write(out_data[0], req[0], running)
            return
        sums = in_data[0].asnumpy()
        count = in_data[1].asnumpy() / len(sums)
        self._round = self._meeting.begin(self._device)
        try:
            total = self._meeting.sum(self._round, self._device, np.append(sums, count))
        except Late as error:
            _fail(out_data[0], error)
            return
        self._total = total[-1]
        mean = total[:-1] / self._total
        _write(out_data[0], req[0], mean)
        _write(aux[0], "write", self._momentum * running + (1 - self._momentum) * mean)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        if self._round is None:
            gradient = np.zeros(in_grad[0].shape)
        else:
            tag, brought = ("backward", self._round), out_grad[0].asnumpy()
            try:
                gradient = self._meeting.sum(tag, self._device, brought) / self._total
            except Late as error:
                _fail(in_grad[0], error)
                return
        _write(in_grad[0], req[0], gradient)
        _write(in_grad[1], req[1], np.zeros(1))


def _write(array: mx.nd.NDArray, req: str, values: np.ndarray) -> None:
    """Into an array that is the running operator's own."""
    if req == "null":
        return
    if array.context.device_type != "cpu":
        values = mx.nd.array(values, ctx=array.context, dtype=array.dtype)
        array[:] = array + values if req == "add" else values
        return
    seen = memory.view(array)
    seen[:] = seen + values if req == "add" else values


def _fail(array: mx.nd.NDArray, error: Exception) -> None:
    """Raise ``error`` where somebody waits for ``array``, or what is computed from it."""

    def throw() -> None:
        raise error

    engine.push(throw, array.context, writes=[array], name="gluonpar.SyncBatchNorm")
