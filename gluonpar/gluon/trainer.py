"""Trainer: a Gluon network's parameters trained on several devices, by any optimizer of MXNet."""

from __future__ import annotations

import contextlib
import os
from typing import Iterator, Sequence

import mxnet as mx
from mxnet import gluon

from gluonpar import cluster, metrics
from gluonpar.checkpoint import optimizer_states
from gluonpar.cluster import hierarchical
from gluonpar.collectives import allreduce_many, broadcast_many, reduce, registry
from gluonpar.collectives.bucketing import allreduce_as_float16
from gluonpar.gluon import parameter_buckets
from gluonpar.gluon.parameter_buckets import Bucket, Layout
from gluonpar.gluon.sharded_update import OwnedUpdates
from gluonpar.runtime import memory

COMPRESSIONS = (None, "fp16")


class Trainer(gluon.Trainer):
    """``gluon.Trainer`` on gluonpar's collectives: K devices give what one device gives.

    ``params`` are Parameters, a list or dict of them (``net.collect_params()``), all on the same
    contexts, dense; hybridized or not, initialised or deferred, shared, frozen
    (``grad_req='null'``). ``optimizer`` and ``optimizer_params`` as in ``gluon.Trainer``.
    ``algorithm`` names the all-reduce (default: by where the arrays are and how large).
    ``compression='fp16'`` exchanges gradients in float16, adding them in float32; keep their sums
    below 65504.

    Gradients become views of a few flat arrays, the *buckets*, now if all parameters are
    initialised, else in the first :meth:`step`. In a step each bucket is summed onto one device,
    which updates its parameters and sends them to the others; so each is updated once, not K times,
    and there is one state of the optimizer whatever K is (Xu et al., "Automatic Cross-Replica
    Sharding of Weight Update", 2020). On CPU contexts SGD, with or without momentum, is one pass
    over the memory (:mod:`gluonpar.collectives.host.fused_update`). Gradients stay each device's own, but for
    the one that updates; :meth:`allreduce_grads` makes them sums.

    With several processes (:mod:`gluonpar.cluster`) the sum is over all devices of all of them, and
    ``batch_size`` the samples in it. All start with rank 0's parameters, and bring the same ones.

    A device that had no sample in this step adds nothing. A parameter without a new gradient on a
    device that had samples is an error that names it, unless ``ignore_stale_grad``; then it adds
    nothing there, and is not updated if it has none anywhere.

    Raises ValueError for parameters on different contexts, sparse ones, an unknown algorithm or
    compression. Nothing waits, as in ``gluon.Trainer``, whose chapter is Dive into Deep Learning,
    13.6.
    """

    def __init__(
        self,
        params: gluon.ParameterDict | dict | Sequence[gluon.Parameter],
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict | None = None,
        algorithm: str | None = None,
        compression: str | None = None,
    ) -> None:
        if algorithm is not None:
            registry.named(algorithm)
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression={compression!r}; it is None or 'fp16'")
        parameter_buckets.check(params)
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._given = params
        self._algorithm, self._compression = algorithm, compression
        self._layout: Layout | None = None
        self._pinned: set[gluon.Parameter] = set()
        self._accumulating = False
        self._updater = self._updaters[0]
        self._updaters = [self._updater]
        self._updates = OwnedUpdates(self._updater, self._params)
        self._updates.settle_on(self._contexts)
        if all(param._data is not None for param in self._params):
            self._laid_out()  # before a hybridized network gets to know the gradients' arrays

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over devices and update: ``batch_size`` samples are in that sum.

        Raises UserWarning, as ``gluon.Trainer`` does, for a stale gradient (see above), and
        ValueError for a batch size that is not positive, and inside :meth:`no_sync`.
        """
        self._rescale(batch_size)
        buckets = self._fresh_buckets(ignore_stale_grad)
        self._layout.zero_stale()
        if hasattr(self, "_amp_loss_scaler"):  # it looks at the sums before the update
            self._sum(buckets, everywhere=True)
            self._update(ignore_stale_grad)
            return
        by_host = self._algorithm in (None, "host") and self._compression is None
        if by_host and self._updates.fusable(buckets):
            self._updates.sum_and_apply(buckets)
        else:
            self._sum(buckets, everywhere=False)
            self._updates.apply(buckets)
        self._finish()

    def allreduce_grads(self) -> None:
        """Make every device's gradients the sum over all devices, in place.

        For what has to be done between the sum and the update: :meth:`clip_global_norm`, or a look.
        """
        buckets = self._fresh_buckets(ignore_stale_grad=True)
        self._layout.zero_stale()
        self._sum(buckets, everywhere=True)

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update by the gradients as they are, which :meth:`allreduce_grads` has made sums.

        Raises as :meth:`step`.
        """
        self._rescale(batch_size)
        before = set(self._pinned)
        self._laid_out()
        moved = [param.name for param in self._params if param in self._pinned - before]
        if moved and len(self._contexts) > 1:
            raise UserWarning(
                f"list_grad() of {', '.join(moved)} did not hold what backward computed (it does "
                "now): sum with Trainer.allreduce_grads(), or initialize before making the Trainer"
            )
        self._update(ignore_stale_grad)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, and until the next update, backward adds to the gradients: micro-batches.

        Forward and backward of all micro-batches but the last go inside, of the last inside or
        after it; then ``step(samples of all of them)``. The first starts from zero. Nothing is
        exchanged inside; :meth:`step` there is an error. ``no_sync`` of PyTorch's
        DistributedDataParallel.
        """
        layout = self._laid_out()
        before = self._accumulating
        if not before:
            for bucket in layout.buckets:
                for grad in bucket.grads:
                    memory.zero(grad)
            layout.mark_used()
            layout.set_grad_req("add")
        self._accumulating = "inside"
        try:
            yield
        finally:
            self._accumulating = before or True

    def clip_global_norm(self, max_norm: float) -> mx.nd.NDArray:
        """Scale all gradients so that their norm is at most ``max_norm``; the norm before.

        Between :meth:`allreduce_grads` and :meth:`update`: the norm is that of the summed
        gradients, each parameter counted once; give ``max_norm * batch_size`` to clip their mean.
        Each device scales its own copy. Returns a float32 array of shape (1,) on the first context,
        without waiting. Raises ValueError unless ``max_norm`` is positive. Compare
        ``gluon.utils.clip_global_norm``; Pascanu et al. 2013.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} leaves no gradient; give a positive number")
        norms = []
        for grads in zip(*(bucket.grads for bucket in self._laid_out().buckets)):
            flat = [grad.as_nd_ndarray().reshape((-1,)) for grad in grads]
            kinds = {grad.dtype: [g for g in flat if g.dtype == grad.dtype] for grad in flat}
            squares = [mx.nd.multi_sum_sq(*kind, num_arrays=len(kind)) for kind in kinds.values()]
            norms.append(mx.nd.concat(*squares, dim=0).sum().sqrt())
            scale = mx.nd.minimum(max_norm / (norms[-1] + 1e-8), 1.0)
            for grad in flat:
                grad *= scale.astype(grad.dtype)
        return norms[0]

    def check_replicas(self) -> None:
        """Wait for all parameters; raise metrics.ReplicasDiffer unless all devices have one's bits.

        The message names the first parameter and device that differ, and by how much. What has no
        gradient is left out: running statistics of batch normalisation are each device's own.
        """
        for param in self._params:
            if param._grad is not None:
                metrics.check_identical(param._data, param.name)

    def save_states(self, fname: str | os.PathLike) -> None:
        """Write the optimizer's states, its counters and rates; whole or not at all.

        The file says nothing of devices: any number of them can go on from it. NumPy's ``.npz``
        without pickles, so that it can be loaded from anywhere; it ends with its SHA-256.
        """
        optimizer_states.save(fname, self._updater, self._described())

    def load_states(self, fname: str | os.PathLike) -> None:
        """Read what :meth:`save_states` wrote; the optimizer goes on from there.

        ValueError, and nothing is changed, if it is of another optimizer or other parameters, or
        the file is not there, cut short, damaged or something else.
        """
        optimizer_states.load(fname, self._updater, self._described())

    def _described(self) -> list[optimizer_states.Param]:
        return [optimizer_states.Param(p.name, p.shape, p.dtype) for p in self._params]

    def _rescale(self, batch_size: int) -> None:
        if not batch_size > 0:
            raise ValueError(f"batch_size={batch_size} cannot be divided by; give 1 or more")
        self._optimizer.rescale_grad = self._scale / batch_size

    def _laid_out(self) -> Layout:
        """The parameters in buckets; made at first, and again where somebody moved them."""
        if {*parameter_buckets.listed(self._given)} != {*self._params}:
            raise ValueError(
                "the set of parameters has changed since this Trainer was made; make a new Trainer"
            )
        if self._layout is not None and self._layout.holds(self._params):
            moved = self._layout.moved()
            if not moved:
                return self._layout
            self._pinned.update(moved)
        parameter_buckets.check(self._params)
        for param in self._params:
            param.list_data()  # says which parameter is not initialised
        if self._layout is None:
            self._start_alike()
        self._layout = Layout(self._params, self._pinned)
        self._contexts = self._layout.ctx or self._contexts
        self._updates.settle_on(self._contexts)
        if self._accumulating:
            self._layout.set_grad_req("add")
        return self._layout

    def _start_alike(self) -> None:
        """All processes' parameters become rank 0's."""
        if cluster.size() > 1:
            kinds = [(param.shape, str(param.dtype)) for param in self._params]
            cluster.agree({"shapes and dtypes of the parameters": kinds})
            cluster.broadcast([param._data[0] for param in self._params])
            for param in self._params:
                broadcast_many([param._data])

    def _fresh_buckets(self, ignore_stale_grad: bool) -> list[Bucket]:
        """The buckets to be summed; what backward did not reach is zero, or left out."""
        if self._accumulating == "inside":
            raise ValueError("no exchange inside no_sync(): leave it before step()")
        layout, absent = self._laid_out(), set()
        fresh = layout.fresh()
        idle = [not any(on_device) for on_device in zip(*fresh)]
        alone = cluster.size() == 1
        if fresh and all(idle) and alone and not ignore_stale_grad:
            raise UserWarning(
                "no gradient has been computed since the last update; call backward before step"
            )
        for i, on_devices in zip(layout.numbers, fresh):
            stale = [k for k, (new, no) in enumerate(zip(on_devices, idle)) if not (new or no)]
            if stale and not ignore_stale_grad:
                self._raise_stale(self._params[i], stale)
            if alone and not any(on_devices):
                absent.add(i)
        if ignore_stale_grad and not alone:  # what one rank leaves out, all must; it waits for them
            used = cluster.total([any(on_devices) for on_devices in fresh])
            absent = {i for i, times in zip(layout.numbers, used) if not times}
        return self._updates.owned(layout.without(absent))

    @staticmethod
    def _raise_stale(param: gluon.Parameter, stale: Sequence[int]) -> None:
        where = ", ".join(str(param.list_ctx()[k]) for k in stale)
        raise UserWarning(
            f"backward has not computed a gradient of parameter {param.name} on {where} since the "
            "last update: the model did not use it there. If that is intended, call "
            "step(batch_size, ignore_stale_grad=True)"
        )

    def _sum(self, buckets: Sequence[Bucket], everywhere: bool) -> None:
        """Sum gradients, onto all devices or each bucket's owner only."""
        lists = [list(bucket.grads) for bucket in buckets]
        if self._compression:
            allreduce_as_float16(lists, self._algorithm)
        elif everywhere or self._algorithm:
            allreduce_many(lists, self._algorithm)
        else:
            for grads, bucket in zip(lists, buckets):
                reduce(grads, bucket.owner)
        owners = [bucket.owner for bucket in buckets]
        hierarchical.complete(lists, owners, everywhere, self._compression)

    def _update(self, ignore_stale_grad: bool = False) -> None:
        scaler = getattr(self, "_amp_loss_scaler", None)
        if scaler is None or not scaler.has_overflow(self._params):
            self._updates.apply(self._fresh_buckets(ignore_stale_grad))
        self._finish()

    def _finish(self) -> None:
        """Every gradient has been used."""
        self._layout.mark_used()
        if self._accumulating:
            self._accumulating = False
            self._layout.set_grad_req(None)
