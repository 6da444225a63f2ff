"""SyncBatchNorm: batch normalisation over the whole batch, however it is split over devices."""

from __future__ import annotations

import functools
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar.gluon import rendezvous
from gluonpar.gluon.rendezvous import Rendezvous, RendezvousTimeout
from gluonpar.runtime import engine, memory


class SyncBatchNorm(gluon.nn.BatchNorm):
    """``gluon.nn.BatchNorm`` with mean and variance over the samples of all devices.

    Each device's input is (n_i, channels, ...), float16, float32 or float64; the n_i may differ.
    Samples weigh the same, so K devices compute what one device computes with ``BatchNorm`` on the
    whole batch: outputs, gradients and running statistics, up to rounding. The running variance
    of n numbers is BatchNorm's, too: divided by n on CPU contexts, and by n - 1 on GPUs, as in
    cuDNN. float16 is normalised in float32. Arguments and parameters are those of ``BatchNorm``,
    except that ``axis`` must be 1; parameter files fit both. The block may be hybridized. On CPU
    contexts, hybridize networks with more than about 250 operators that use a workspace
    (convolutions, sums, gradients of broadcasts; counted over all devices) with
    ``static_alloc=True, static_shape=True``: otherwise operators of two devices may draw the same
    entry of MXNet's workspace pool (MXNET_CPU_TEMP_COPY, 256 here), one queued behind the other,
    while the other waits for the first.

    All devices that hold the parameters must run forward before any result is read, because reading
    waits for all of them, and likewise backward. If a device does not arrive within
    ``timeout_seconds``, the others fail with an MXNetError where a result is read. For a step on
    fewer devices call :func:`set_num_devices`. In prediction nothing waits.

    Mean and variance are two all-reduces of one number per channel through the host, and so are
    their gradients; on CPU contexts it takes several times as long as BatchNorm. MXNet's own
    ``gluon.contrib.nn.SyncBatchNorm`` weighs devices the same, waits forever for a missing device,
    and was seen to crash the process (a double free) in a loop of small steps.

    Raises ValueError if ``timeout_seconds`` is not positive, or ``axis`` is not 1. Zhang et al.,
    "Context Encoding for Semantic Segmentation", CVPR 2018.
    """

    def __init__(self, timeout_seconds: float = 300, **batch_norm: Any) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")
        if batch_norm.setdefault("axis", 1) != 1:
            raise ValueError(f"axis must be 1, got {batch_norm['axis']}")
        super().__init__(**batch_norm)
        self.num_devices: int | None = None
        self._half = False
        names = (f"mean of {self.name}", f"variance of {self.name}")
        self._rendezvous = [Rendezvous(name, self._num_devices, timeout_seconds) for name in names]

    def _num_devices(self) -> int:
        return self.num_devices or len(self.gamma.list_ctx())

    def cast(self, dtype: Any) -> None:
        """Cast inputs and outputs to ``dtype``; for float16 the parameters stay float32."""
        super().cast(dtype)
        self._half = np.dtype(dtype) == np.float16

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any, **running: Any) -> Any:
        """Compute what BatchNorm does, for ``x`` (n, channels, ...) on this device."""
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
        """Per channel, the mean of ``flat`` over all devices; in prediction, ``running``."""
        return F.Custom(
            F.sum(flat, axis=1, exclude=True),
            # size_array would do, but its GPU kernel writes four of its eight bytes.
            F.cast(F.shape_array(flat), dtype=np.dtype(self.gamma.dtype).name),
            running,
            op_type="gluonpar_mean_over_devices",
            key=self._rendezvous[which].key,
            momentum=self._kwargs["momentum"],
            frozen=int(self._kwargs["use_global_stats"]),
            variance=which,
        )


def set_num_devices(net: gluon.Block, num_devices: int | None) -> None:
    """Set the number of devices that take part in every SyncBatchNorm of ``net``; None is all.

    For batches with fewer samples than devices. Waits for all operators. Raises ValueError below 1.
    """
    if num_devices is not None and num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, or None, got {num_devices}")
    mx.nd.waitall()

    def change(block: gluon.Block) -> None:
        if isinstance(block, SyncBatchNorm):
            block.num_devices = num_devices
            for own in block._rendezvous:
                own.restart()  # devices may have taken part in different numbers of rounds

    net.apply(change)


@mx.operator.register("gluonpar_mean_over_devices")
class _MeanOverDevicesProp(mx.operator.CustomOpProp):
    def __init__(self, key: str, momentum: str, frozen: str, variance: str) -> None:
        super().__init__(need_top_grad=True)
        self._key, self._momentum, self._frozen = key, float(momentum), frozen == "1"
        self._variance = variance == "1"

    def list_arguments(self):
        return ["sums", "shape"]

    def list_auxiliary_states(self):
        return ["running"]

    def infer_shape(self, in_shape):
        return [in_shape[0], [3]], [in_shape[0]], [in_shape[0]]

    def create_operator(self, ctx, shapes, dtypes):
        own = rendezvous.by_key[self._key]
        unbiased = self._variance and str(ctx).startswith("gpu")
        return _MeanOverDevices(own, str(ctx), self._momentum, self._frozen, unbiased)


class _MeanOverDevices(mx.operator.CustomOp):
    """mean = (sum of sums) / (sum of counts) over devices, and the running mean of it.

    MXNet runs each custom operator on a thread of its own, so waiting here blocks no other. Calls
    for one device are ordered, because they all change ``running``. With ``unbiased`` the running
    mean is of n / (n - 1) times the mean.
    """

    def __init__(
        self, rendezvous: Rendezvous, device: str, momentum: float, frozen: bool, unbiased: bool
    ) -> None:
        super().__init__()
        # in_data is on cpu(0) on every CPU context, so the device is passed
        self._rendezvous, self._device = rendezvous, device
        self._momentum, self._frozen, self._unbiased = momentum, frozen, unbiased
        self._round = self._total = None

    def forward(self, is_train, req, in_data, out_data, aux):
        running, self._round = aux[0].asnumpy(), None
        if not is_train or self._frozen:
            _write(out_data[0], req[0], running)
            return
        sums = in_data[0].asnumpy()
        samples, _, others = in_data[1].asnumpy().astype("float64")
        count = samples * others
        self._round = self._rendezvous.begin(self._device)
        total = self._sum(self._round, np.append(sums, count), out_data[0])
        if total is not None:
            self._total = total[-1]
            mean = total[:-1] / self._total
            _write(out_data[0], req[0], mean)
            if self._unbiased:
                mean *= self._total / max(1, self._total - 1)
            _write(aux[0], "write", self._momentum * running + (1 - self._momentum) * mean)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        gradient = np.zeros(in_grad[0].shape)
        if self._round is not None:
            total = self._sum(("backward", self._round), out_grad[0].asnumpy(), in_grad[0])
            if total is None:
                return
            gradient = total / self._total
        _write(in_grad[0], req[0], gradient)
        _write(in_grad[1], req[1], np.zeros(3))

    def _sum(self, tag: Any, values: np.ndarray, result: mx.nd.NDArray) -> np.ndarray | None:
        """The sum over devices; None after a timeout, which waiting for ``result`` then raises."""
        try:
            return self._rendezvous.sum(tag, self._device, values)
        except RendezvousTimeout as error:

            def throw(error: Exception = error) -> None:
                raise error

            engine.push(throw, result.context, writes=[result], name="gluonpar.SyncBatchNorm")
            return None


def _write(array: mx.nd.NDArray, req: str, values: np.ndarray) -> None:
    """Write into an array of the operator that is running."""
    if req == "null":
        return
    if array.context.device_type == "cpu":
        target = memory.view(array)
    else:
        target, values = array, mx.nd.array(values, ctx=array.context, dtype=array.dtype)
    target[:] = target + values if req == "add" else values
