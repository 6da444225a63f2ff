"""Loss and accuracy: accumulated on the devices, read by the host here and nowhere else."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from gluonpar import cluster
from gluonpar.collectives import host
from gluonpar.plans import partition
from gluonpar.replicas import (  # noqa: F401 - programs also import the checks from here
    ReplicasDifferError,
    check_identical,
    check_ranks,
)
from gluonpar.runtime import heap
from gluonpar.sharding import split_and_load

_MOST_ARRAYS = 200  # multi_all_finite copies so many pointers into an array, without checking it
_IMAGES_COMPARED = 16  # accuracy compares so many between ranks
BATCHES_IN_FLIGHT = 4  # the host may queue so many, all in memory, ahead of the devices


class DivergedError(FloatingPointError):
    """The loss or a parameter is not finite, or the loss is too large; the message says where."""


Diverged, ReplicasDiffer = DivergedError, ReplicasDifferError  # former names


class LossMeter:
    """Computes the mean per-sample loss of batches, and finds the first batch that is not finite.

    :meth:`add` waits only for the batch BATCHES_IN_FLIGHT before, so that no more are in memory;
    :meth:`read` waits for all. With several processes, each adds its part of the same batches, and
    all read together; a meter made inside ``cluster.local()`` is for this process only. Ranks may
    add different numbers of batches; batch i consists of the i-th batch of each rank. ``total`` is
    the sum of the losses of the ``num_batches`` read so far, ``num_samples`` the number added on
    this rank. A meter that is given all three continues from them; ranks other than 0 then give 0
    samples.
    """

    def __init__(self, total: float = 0.0, num_samples: int = 0, num_batches: int = 0) -> None:
        self._unread: list[tuple[list[nd.NDArray], nd.NDArray | None]] = []
        self.total, self.num_samples, self.num_batches = total, num_samples, num_batches
        self._cluster_scope = cluster.scope()

    def add(self, losses: Sequence[nd.NDArray], params: Sequence[nd.NDArray] = ()) -> None:
        """Add the per-sample losses of one batch, one array per device, as train_batch returns.

        Losses have any dtypes, and are added in float64. An array of shape (n, ...) has n samples;
        the loss of a sample is the mean of its values, as in Gluon's losses.

        ``params`` are one device's parameters after the batch's update: a gradient that is not
        finite ruins them, while the losses may stay finite (relu gives 0 for NaN).
        """
        checked = all_finite(params) if params else None
        sums = []
        with autograd.pause():
            for loss in losses:
                if loss.size:
                    num_samples = loss.shape[0] if loss.shape else 1
                    values = nd.cast(loss.as_nd_ndarray(), "float64")
                    each = loss.size // num_samples
                    sums.append(values.sum() if each == 1 else values.sum() / each)
                    self.num_samples += num_samples
        self._unread.append((sums, checked))
        if len(self._unread) > BATCHES_IN_FLIGHT:
            for array in self._unread[-BATCHES_IN_FLIGHT - 1][0]:  # there are none without samples
                array.wait_to_read()

    @cluster.in_scope
    def read(self) -> float:
        """Wait for all batches so far and return their mean loss.

        Raises DivergedError, which names the first batch whose loss, or after which a parameter,
        is not finite, and the device.
        """
        own = []  # for each batch: the device and sum of each array of losses, and whether ruined
        for sums, checked in self._unread:
            losses = [(str(array.context), float(array.asscalar())) for array in sums]
            own.append((losses, checked is not None and not checked.asscalar()))
        numbers, of_ranks = zip(*cluster.gather((self.num_samples, own)))
        for batch in itertools.zip_longest(*of_ranks, fillvalue=([], False)):
            self.num_batches += 1
            name, (own_losses, _) = f"batch {self.num_batches}", batch[cluster.rank()]
            batch_sum = sum(value for losses, _ in batch for _, value in losses)
            if not math.isfinite(batch_sum):
                bad = ", ".join(device for device, value in own_losses if not math.isfinite(value))
                raise DivergedError(f"the loss{bad and f' on {bad}'} became {batch_sum} in {name}")
            if any(is_ruined for _, is_ruined in batch):
                raise DivergedError(f"parameters became infinite or NaN in the update after {name}")
            self.total += batch_sum
        self._unread.clear()
        return self.total / max(1, sum(numbers))


def all_finite(arrays: Sequence[nd.NDArray]) -> nd.NDArray:
    """Return an array of shape (1,): 1.0 if all elements of one device's arrays are finite.

    ``arrays`` are any number of arrays, ``mx.nd`` or ``mx.np``, of any dtypes. Nothing waits. On a
    CPU context it is one pass by NumPy, in a thirtieth of the time of MXNet's operator.
    """
    floats = [array for array in arrays if np.dtype(array.dtype).kind not in "biu" and array.size]
    if not floats:
        return nd.ones((1,), ctx=arrays[0].context if arrays else None)
    if host.on_host([array.context for array in floats]):
        name = "gluonpar.all_finite"
        return host.reduced(floats, lambda block: np.isfinite(block).all(), all, "float32", name)
    result = None
    with autograd.pause():
        for dtype in dict.fromkeys(np.dtype(array.dtype) for array in floats):  # one at a time
            same = [array.as_nd_ndarray() for array in floats if array.dtype == dtype]
            for start in range(0, len(same), _MOST_ARRAYS):
                some = same[start : start + _MOST_ARRAYS]
                how = {"num_arrays": len(some), "init_output": result is None, "out": result}
                result = nd.multi_all_finite(*some, **how)
    return result


def accuracy(
    images: np.ndarray,
    labels: np.ndarray,
    device_params: Sequence[Sequence[nd.NDArray]],
    ctx: Sequence[mx.Context],
    model: Callable,
    batch_size: int = 256,
    own_part: bool = False,
) -> float:
    """Return the share of ``images`` (n, ...) whose highest score is at their label (n,) or (n, 1).

    ``model(X, device_params[i])`` returns scores (n, classes) of any float dtype, ``mx.nd`` or
    ``mx.np``; autograd records nothing. Every batch is split over ``ctx``. The host waits for the
    devices as :class:`LossMeter` does: at most BATCHES_IN_FLIGHT batches are in memory.

    With several processes all must call it, and all return the same. They give the same images, and
    each evaluates its part of them; or, with ``own_part``, each gives other images, in any number,
    and the result is the share of all. Inside ``cluster.local()`` only this process's images count.

    Raises ValueError for no images (with ``own_part``, for none on any rank), for labels or scores
    of other shapes, and, without ``own_part``, for ranks that give different images: their number,
    all labels and a few of the images are compared.
    """
    num_images = _checked_number(images, labels, own_part)
    if num_images == 0:
        raise ValueError("images must hold at least 1 image, got 0")
    if not own_part:
        part = partition.slices(num_images, cluster.size())[cluster.rank()]
        images, labels = images[part], labels[part]
    meter = LossMeter()
    with autograd.pause(train_mode=False):
        for start in range(0, len(images), batch_size):
            batch = slice(start, start + batch_size)
            shards = split_and_load((images[batch], labels[batch]), list(ctx))
            pairs = zip(shards, device_params)
            meter.add([_correct(model(X, params), y) for (X, y), params in pairs])
            heap.draw_from_first()
    return meter.read()


def _checked_number(images: np.ndarray, labels: np.ndarray, own_part: bool) -> int:
    """Return the number of images; raise ValueError on all ranks for what :func:`accuracy` says."""

    def check() -> None:
        if np.shape(labels) not in ((len(images),), (len(images), 1)):
            got = f"{np.shape(labels)} for {len(images)} images"
            raise ValueError(f"labels must be one per image, of shape (n,) or (n, 1), got {got}")

    cluster.together(check)
    facts: dict[str, Any] = {"own_part": own_part}
    if cluster.size() > 1 and not own_part:
        some = images[:: max(1, len(images) // _IMAGES_COMPARED)]
        arrays = [x.asnumpy() if isinstance(x, nd.NDArray) else x for x in (labels, some)]
        checksums = [zlib.crc32(np.ascontiguousarray(array).data) for array in arrays]
        facts["(number of images, checksums), without own_part=True"] = len(images), checksums
    cluster.check_equal(facts)
    return int(cluster.total(len(images))) if own_part else len(images)


def _correct(scores: nd.NDArray, labels: nd.NDArray) -> nd.NDArray:
    """Return 1 in float64 for each sample whose highest score is at its label, and 0 for others."""
    if scores.ndim != 2 or len(scores) != len(labels):
        got = f"{scores.shape} for {len(labels)} images"
        raise ValueError(f"model must return scores of shape (n, classes), got {got}")
    scores = scores.as_nd_ndarray()
    if scores.dtype == np.float16:  # argmax would also return float16, which rounds above 2048
        scores = scores.astype("float32")
    labels = labels.as_nd_ndarray().reshape((-1,)).astype("float64")
    return scores.argmax(axis=1).astype("float64") == labels
