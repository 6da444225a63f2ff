"""Trainer: train a Gluon network's parameters on several devices with any MXNet optimizer."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import cluster, gradients, metrics, optim, replicas
from gluonpar.checkpoint import optimizer_states
from gluonpar.collectives import Exchange, in_buckets
from gluonpar.gluon import clipping, consistency, update
from gluonpar.gluon.update import Layout, ShardedUpdate
from gluonpar.replicas import ParamBucket
from gluonpar.runtime import heap, interrupts, memory, private_fields

# MXNet's kvstores of one process, which all sum over its devices.
_KVSTORES = (
    *(None, "local", "device", "nccl", "gluonpar"),
    *("local_allreduce_cpu", "local_allreduce_device", "local_update_cpu", "dist_sync_gluonpar"),
)


def _not_recorded(method: Callable) -> Callable:
    """Decorate a method: in its Trainer's scope, not recorded, on arrays of any dimensions."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with autograd.pause(train_mode=autograd.is_training()), mx.util.np_shape(True):
            return method(*args, **kwargs)

    return cluster.in_scope(called)


class Trainer(gluon.Trainer):
    """``gluon.Trainer`` on gluonpar's collectives: K devices train as one device does.

    ``params`` is a list or dict of Parameters (``net.collect_params()``), all dense and on the same
    contexts; hybridized or not, initialised or deferred, shared, frozen (``grad_req='null'``).
    Gradients may be row_sparse (:mod:`gluonpar.gluon.update`). The other positional arguments are
    those of ``gluon.Trainer``. With any ``kvstore`` of one process (None, 'local', 'device',
    'nccl', 'gluonpar') gluonpar's all-reduce sums gradients, also with None, where
    ``gluon.Trainer`` sums nothing. ``algorithm`` names the all-reduce (None: chosen, see
    :func:`gluonpar.allreduce`). ``compression='fp16'`` exchanges gradients in float16 and adds them
    in float32; their sums must stay below 65504.

    Neighbouring parameters form *buckets*. In a step each bucket is summed onto one device, which
    updates its parameters and broadcasts them (:mod:`gluonpar.gluon.update`). The other devices
    keep their own gradients. :meth:`allreduce_grads` replaces them by the sums; :meth:`update`,
    which may follow it, updates by the first device's sums. The first step begins with a broadcast
    of the first device's parameters and running statistics, as in ``gluon.Trainer``.

    With several processes (:mod:`gluonpar.cluster`) the sum is over all devices of all processes,
    and ``batch_size`` is the number of samples in it. All processes must pass the same parameters,
    which get the values of rank 0, now and whenever they are initialised.

    A device that had no sample in a step adds nothing, whatever other backward passes have left
    there (:mod:`gluonpar.gradients`). A parameter must have a new gradient on at least one device;
    otherwise a step raises, as MXNet's does on one device. With ``ignore_stale_grad`` it is not
    updated then. Where it has none it adds nothing. Under a schedule SGD,
    LARS and LAMB give all parameters of a step the same learning rate; ``gluon.Trainer`` may give
    parameters that were frozen for some steps the rate of the step before.

    With ``skip_nonfinite`` a step whose summed gradients have an infinite or NaN element changes
    nothing, on all devices of all processes, and ``num_skipped`` counts it. Such a step waits for
    the sums. Otherwise nothing waits.

    Raises ValueError for no parameters, sparse parameters, an unknown algorithm or compression, and
    for what this Trainer does not support: ``update_on_kvstore=True``, kvstores of several
    processes, ``compression_params``, and SGLD in a job of several processes; AssertionError, as
    MXNet, for parameters on different contexts. See Dive into Deep Learning, 13.6.
    """

    def __init__(
        self,
        params: gluon.ParameterDict | dict | Sequence[gluon.Parameter],
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: dict | None = None,
        kvstore: str | mx.kvstore.KVStoreBase | None = "device",
        compression_params: dict | None = None,
        update_on_kvstore: bool | None = None,
        *,
        algorithm: str | None = None,
        compression: str | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        _check_stock_arguments(kvstore, compression_params, update_on_kvstore)
        if compression not in (None, "fp16"):
            raise ValueError(f"compression must be None or 'fp16', got {compression!r}")
        update.check(params)
        self._contexts: list[mx.Context]
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._scope, self._in_order = cluster.scope(), update.listed(params)
        self._skip_nonfinite, self.num_skipped = skip_nonfinite, 0
        self._layout: Layout | None = None
        self._inside_no_sync = self._broadcast = self._has_summed = False
        self._updaters = [update.Updater(self._optimizer)]
        [self._updater] = self._updaters
        self._options: dict[str, Any] = {"algorithm": algorithm, "compression": compression}
        # Before the first forward: it shares out threads.
        self._exchange = Exchange(self._contexts, **self._options)
        update.check_draws_nothing(self._optimizer, self._exchange.num_processes)
        self._identity = consistency.Identity(self, self._in_order)
        self._grads = gradients.adopt(self._params)
        if None not in map(private_fields.values, self._params):
            self._laid_out()  # before the first forward, so that ranks that differ are refused
        consistency.start_alike(self._in_order)

    @_not_recorded
    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over devices and update; ``batch_size`` samples are in that sum.

        It may be an array of one element, such as a count of tokens, which is then waited for.
        Raises UserWarning for a stale gradient (see above), and ValueError for a batch size that is
        not positive and finite, and inside :meth:`no_sync`.
        """
        facts = self._rescale(batch_size)
        names = "_allreduce_grads", "_update"  # which a subclass may override
        if any(getattr(type(self), name) is not getattr(Trainer, name) for name in names):
            self._laid_out()
            cluster.check_equal_async(facts, self._identity.name)
            self._allreduce_grads()
            self._update(ignore_stale_grad)
            return
        buckets = self._fresh_buckets(ignore_stale_grad, facts=facts)
        amp = hasattr(self, "_amp_loss_scaler")  # it inspects all sums before the update
        sums_are_read = amp or self._skip_nonfinite
        fused = not sums_are_read and self._sharded_update.may_fuse(buckets)
        sums_here = fused and self._exchange.num_processes == 1
        self._sum([b for b in buckets if b.root is None or not sums_here], on_all=amp)
        self._apply(buckets, fused)

    @_not_recorded
    def allreduce_grads(self) -> None:
        """Replace every device's gradients by the sum, for instance to clip before the update.

        Sums are not summed again: a second call, or :meth:`step`, before backward adds nothing.
        """
        self._allreduce_grads()

    @_not_recorded
    def update(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Update by the gradients that :meth:`allreduce_grads` summed; raises as :meth:`step`.

        All devices' parameters are updated by the first device's gradients, so it is enough to clip
        or scale those. Raises ValueError, too, if backward has written a gradient since the sum,
        by :meth:`allreduce_grads` or by :func:`gluonpar.allreduce` and ``allreduce_many``.
        """
        cluster.check_equal_async(self._rescale(batch_size), self._identity.name)
        self._check_outside_no_sync()
        gradients.check_summed(self._params)
        self._update(ignore_stale_grad)

    @_not_recorded
    def _allreduce_grads(self) -> None:
        """The method that programs override or call in ``gluon.Trainer``."""
        self._sum(self._fresh_buckets(ignore_stale_grad=True), on_all=True)

    @_not_recorded
    def _update(self, ignore_stale_grad: bool = False) -> None:
        """As in ``gluon.Trainer``, for programs that call it; ``rescale_grad`` is set already."""
        buckets = self._fresh_buckets(ignore_stale_grad, summed=True)
        self._mark_summed(buckets, on_all=True)  # the program may have summed
        for bucket in buckets:
            if bucket.root is None:  # every device updates by its own
                for first, *copies in bucket.grads.lists:
                    for copy in copies:
                        first.copyto(copy)
        self._apply([b if b.root is None else b._replace(root=0) for b in buckets])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients over micro-batches: inside, and until the next update, they add up.

        Run forward and backward of all micro-batches inside; of the last one also after it, if you
        like. Then call :meth:`step` with the number of samples of all micro-batches. Compare
        ``no_sync`` of PyTorch's DistributedDataParallel.
        """
        with self._scope():
            layout = self._laid_out()
        if "row_sparse" in map(private_fields.grad_stype, layout.params):
            raise ValueError("MXNet cannot add up row_sparse gradients; use sparse_grad=False")
        before = self._inside_no_sync
        if not any(grads.accumulates for grads in self._grads):
            gradients.mark_used(self._grads)
            adding = [param for param in layout.params if param.grad_req == "add"]
            memory.zero([grad for param in adding for grad in private_fields.grads(param)])
            for grads in self._grads:
                grads.accumulates = True
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = before

    @_not_recorded
    def clip_global_norm(self, max_norm: float) -> mx.nd.NDArray:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Call it before :meth:`update` or :meth:`step`. It sums the gradients if they are not sums
        yet, and takes the norm of the sums that will be used; pass ``max_norm * batch_size`` to
        clip their mean. Returns the norm before, a float32 array of shape (1,) on the first
        context, without waiting. Raises ValueError unless ``max_norm`` is positive. Compare
        ``gluon.utils.clip_global_norm``; Pascanu et al. 2013.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        if not gradients.are_sums(self._grads):
            self._allreduce_grads()
        layout = self._laid_out()
        new = [param for param, grads in layout.trained if any(grads.counting())]
        norms = []
        for k, c in enumerate(self._contexts):
            with mx.Context(c):  # the norm's, if there is no gradient
                grads = [private_fields.grads(param)[k] for param in new]
                norms.append(clipping.clip_global_norm(grads, max_norm))
        return norms[0].astype("float32")

    @cluster.in_scope
    def check_replicas(self) -> None:
        """Wait for all parameters; raise ReplicasDifferError unless replicas are bit-identical.

        With several processes, all must call it, and their parameters are compared. Parameters
        without a gradient, such as running statistics, are not compared.
        """
        trained = [param for param in self._params if private_fields.grads(param) is not None]
        for param in trained:
            metrics.check_identical(private_fields.values(param), param.name)
        first = [private_fields.values(param)[0] for param in trained]
        metrics.check_ranks(first, [param.name for param in trained])

    def save_states(self, fname: str | os.PathLike) -> None:
        """Write the optimizer with its states and all attributes, whole or not at all.

        The learning-rate schedule is one of the attributes. The file, a NumPy ``.npz``, does not
        depend on the number of devices. An optimizer of your own with attributes other than
        numbers, strings, arrays, and lists, tuples and dicts of these is pickled, with a
        UserWarning; ValueError if that fails, as for a lock. OSError if the file system refuses.
        """
        optimizer_states.save(fname, self._updater, self._named_params())

    def load_states(
        self, fname: str | os.PathLike, trusted: bool = False, keep_schedule: bool = False
    ) -> None:
        """Load a file of :meth:`save_states`; the optimizer continues from there.

        As in ``gluon.Trainer`` the saved attributes replace the arguments of this Trainer: learning
        rate, schedule, momentum, clipping. A schedule that differs from the Trainer's own is a
        UserWarning; with ``keep_schedule`` the Trainer's own goes on, or its learning rate if it
        has none. Parameters are told apart by name, or by their order if the names are others.

        Files of ``gluon.Trainer``, and an optimizer that was pickled, can run any code, and are
        read only if ``trusted``. Raises ValueError, with nothing changed, if the file is for
        another optimizer or other parameters, or is missing or damaged.
        """
        optimizer_states.load(fname, self._updater, self._named_params(), trusted, keep_schedule)

    def _named_params(self) -> optimizer_states.NamedParams:
        """In the order of their definition: gluon.Trainer sorts by name, dense10 before dense9."""
        index = {param: i for i, param in enumerate(self._params)}
        return [(param.name, index[param], param) for param in self._in_order]

    def _reset_kvstore(self) -> None:
        """Called by ``Parameter.set_data``: the optimizer's states may have copies of weights."""
        super()._reset_kvstore()
        self._kv_initialized = self._update_on_kvstore = True  # the conditions for that call
        self._params_to_init: list = []
        if hasattr(self, "_sharded_update"):
            self._sharded_update.weights_were_set()

    def _rescale(self, batch_size: Any) -> dict[str, Any]:
        """Set ``rescale_grad``; return what must be the same on all ranks in this step."""
        batch_size = optim.check_batch_size(batch_size)
        self._check_and_rescale_grad(self._scale / batch_size)
        if self._identity.name and self._layout is None:  # a rank without samples, maybe
            for param in self._params:
                param.list_data()  # raises if it is not initialised
        return self._identity.facts(batch_size=batch_size)

    def _laid_out(self) -> Layout:
        """The parameters in buckets, made the first time and after they have changed in kind."""
        if self._layout is not None and self._layout.is_current():
            return self._layout
        update.check(self._params)
        for param in self._params:
            param.list_data()  # raises, naming the parameter, if it is not initialised
        if self._layout is None:
            self._identity.check(**self._options)
        self._contexts = self._check_contexts()
        self._exchange = Exchange(self._contexts, **self._options)
        self._sharded_update = ShardedUpdate(self._updater, self._exchange)
        how = self._exchange, update.needs_one_root(self._optimizer), self._identity.name
        self._layout = Layout(self._params, self._in_order, *how)
        return self._layout

    def _check_outside_no_sync(self) -> None:
        if self._inside_no_sync:
            raise ValueError("step() was called inside no_sync(); leave it first")

    def _fresh_buckets(
        self, ignore_stale_grad: bool, summed: bool = False, facts: dict[str, Any] | None = None
    ) -> list[ParamBucket]:
        """Return :meth:`Layout.buckets`; before the first step, start all devices alike."""
        self._check_outside_no_sync()
        layout = self._laid_out()
        if not self._broadcast:  # as gluon.Trainer: running statistics, too
            self._broadcast = True
            if self._optimizer.num_update == self._optimizer.begin_num_update:  # not after resuming
                first = in_buckets([param.list_data() for param in self._params])
                self._exchange.inside.broadcast(first)
        buckets = layout.buckets(ignore_stale_grad, summed, not self._has_summed, facts)
        heap.return_free([copies.grads for bucket in buckets for copies in bucket.copies])
        return buckets

    def _sum(self, buckets: Sequence[ParamBucket], on_all: bool) -> None:
        """Sum the gradients on each bucket's root, or on all devices."""
        with interrupts.held():
            self._has_summed = True
            exchange = self._exchange.allreduce if on_all else self._exchange.reduce
            exchange(replicas.zero_stale(buckets))
            self._mark_summed(buckets, on_all)

    def _mark_summed(self, buckets: Sequence[ParamBucket], on_all: bool) -> None:
        """Note that gradients are sums; passes that add, add to one device's."""
        for bucket in buckets:
            summed = [self._grads[copies.index] for copies in bucket.copies]
            gradients.mark_summed(summed, 0 if on_all else bucket.root or 0)

    def _apply(self, buckets: Sequence[ParamBucket], fused: bool = False) -> None:
        scaler = getattr(self, "_amp_loss_scaler", None)
        skip = scaler is not None and scaler.has_overflow(self._params)
        if self._skip_nonfinite and not _are_finite(buckets):
            skip, self.num_skipped = True, self.num_skipped + 1
        with interrupts.held():
            if not skip:
                self._sharded_update.apply(buckets, fused)
            gradients.mark_used(self._grads)
            self._has_summed = False


def _check_stock_arguments(kvstore: Any, compression_params: Any, update_on_kvstore: Any) -> None:
    """Check the arguments of ``gluon.Trainer`` that gluonpar's has no use for."""
    for name, given, allowed in (
        ("kvstore", getattr(kvstore, "type", kvstore), _KVSTORES),
        ("compression_params", compression_params, (None, {})),
        ("update_on_kvstore", update_on_kvstore, (None, False)),
    ):
        if given not in allowed:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, allowed))}, got {given!r}; this Trainer "
                "updates on the devices, has compression='fp16', and trains in several processes "
                "if mpirun starts them (docs/cluster.md); for others use gluon.Trainer"
            )


def _are_finite(buckets: Sequence[ParamBucket]) -> bool:
    """Wait for the sums of all gradients, and return whether all their elements are finite."""
    each_finite = []
    for bucket in buckets:
        sums = [each.grads[bucket.root or 0] for each in bucket.copies]
        sums = [total.data if total.stype == "row_sparse" else total for total in sums]
        each_finite.append(metrics.all_finite(sums))
    return all(bool(finite.asscalar()) for finite in each_finite)
