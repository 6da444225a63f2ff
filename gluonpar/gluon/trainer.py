"""Trainer: train a Gluon network's parameters on several devices with any MXNet optimizer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import numbers
import os
import types
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import cluster, gradients, optim, replicas
from gluonpar.checkpoint import optimizer_states
from gluonpar.collectives import Exchange, in_buckets
from gluonpar.gluon import clipping, consistency, update
from gluonpar.gluon.kvstore import GluonPar, is_ours
from gluonpar.gluon.sharded_step import Step, are_finite
from gluonpar.models import channels
from gluonpar.replicas import ParamBucket
from gluonpar.runtime import interrupts, memory, private_fields

# MXNet's kvstores of one process, which all sum over its devices.
_KVSTORES = (
    *(None, "local", "device", "nccl", "gluonpar"),
    *("local_allreduce_cpu", "local_allreduce_device", "local_update_cpu"),
)


def _not_recorded(method: Callable) -> Callable:
    """Run a Trainer's method in its cluster's scope, not recorded, on arrays of any shape."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with autograd.pause(train_mode=autograd.is_training()), memory.any_shape():
            return method(*args, **kwargs)

    return cluster.in_scope(called)


class Trainer(gluon.Trainer):
    """``gluon.Trainer`` on gluonpar's collectives: K devices train as one device does.

    ``params`` is a list or dict of Parameters (``net.collect_params()``), all dense and on the same
    contexts; hybridized or not, initialised or deferred, shared, frozen (``grad_req='null'``).
    Gradients may be row_sparse (:mod:`gluonpar.gluon.sharded_step`). ``gluon.Trainer`` has the same
    positional arguments, and makes a Trainer of this class if it is given the kvstore 'gluonpar'
    (:mod:`gluonpar.gluon.kvstore`). With any ``kvstore`` of one process (None, 'local',
    'device', 'nccl', 'gluonpar') gluonpar's all-reduce sums gradients, also with None, where
    MXNet's Trainer sums nothing. ``algorithm`` names the all-reduce (None: chosen, see
    :func:`gluonpar.allreduce`). ``compression='fp16'`` exchanges gradients in float16 and adds them
    in float32; their sums must stay below 65504. A subclass may have any attributes and methods:
    except for what ``gluon.Trainer`` has, this class's own are private.

    Neighbouring parameters form *buckets*. In a step each bucket is summed onto one device, which
    updates its parameters and broadcasts them (:mod:`gluonpar.gluon.sharded_step`). The other
    devices keep their own gradients. :meth:`allreduce_grads` replaces them by the sums;
    :meth:`update`, which may follow it, updates by the first device's sums. A bucket has at most
    ``bucket_bytes`` on a device (None: 4 MiB), or one larger parameter. The first step begins with
    a broadcast of the first device's parameters and running statistics, as in ``gluon.Trainer``.

    The first step logs, for ``logging.getLogger("gluonpar")`` at INFO, which convolutions have
    numbers of channels that are slow on CPU contexts (:mod:`gluonpar.models.channels`).

    With several processes (:mod:`gluonpar.cluster`) the sum is over all devices of all processes,
    and ``batch_size`` is the number of samples in it. All processes must pass the same parameters,
    which get the values of rank 0, now and whenever they are initialised.

    A device that had no sample in a step adds nothing, whatever other backward passes have left
    there (:mod:`gluonpar.gradients`). A parameter must have a new gradient on at least one device;
    otherwise a step raises, as MXNet's does on one device, or with ``ignore_stale_grad`` leaves the
    parameter as it is. Under a schedule SGD, LARS and LAMB give all parameters of a step the same
    learning rate; ``gluon.Trainer`` may give parameters that were frozen for some steps the rate of
    the step before.

    With ``skip_nonfinite`` a step whose summed gradients have an infinite or NaN element changes
    nothing, on all devices of all processes, and ``num_skipped`` counts it. Such a step waits for
    the sums. Otherwise nothing waits.

    Raises ValueError for no parameters, sparse parameters, a learning rate that is negative,
    infinite or NaN (a schedule is not called), an unknown algorithm or compression, and for what
    this Trainer does not support: ``update_on_kvstore=True``, kvstores of several processes,
    ``compression_params``, and SGLD in a job of several processes; AssertionError, as MXNet, for
    parameters on different contexts. See Dive into Deep Learning, 13.6.
    """

    _amp_loss_scaler: Any = None  # MXNet's AMP sets it

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
        bucket_bytes: int | None = None,
    ) -> None:
        _check_stock_arguments(kvstore, compression_params, update_on_kvstore)
        self.__store = kvstore if isinstance(kvstore, GluonPar) else GluonPar()
        if compression not in (None, "fp16"):
            raise ValueError(f"compression must be None or 'fp16', got {compression!r}")
        is_size = isinstance(bucket_bytes, numbers.Integral) and bucket_bytes > 0
        if bucket_bytes is not None and not is_size:
            raise ValueError(f"bucket_bytes must be a positive int or None, got {bucket_bytes!r}")
        update.check(params)
        self._contexts: list[mx.Context]
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if getattr(self._optimizer, "lr", None) is not None:  # else a schedule's first
            optim.check_lr(self._optimizer.lr, zero=True)
        self._cluster_scope, self.__in_order = cluster.scope(), update.listed(params)
        self.__skip_nonfinite, self.num_skipped = skip_nonfinite, 0
        self.__step: Step | None = None  # made in the first one
        self.__inside_no_sync, self.__bucket_bytes = False, bucket_bytes
        first = update.Updater(self._optimizer)
        self._updaters = [first, *update.followers(self._params, self._contexts)]
        self.__options: dict[str, Any] = {"algorithm": algorithm, "compression": compression}
        # Before the first forward: it shares out threads.
        Exchange(self._contexts, **self.__options)
        update.check_draws_nothing(self._optimizer, cluster.size())
        kinds = {"optimizer": type(self._optimizer).__name__, "bucket_bytes": bucket_bytes}
        self.__identity = consistency.Identity(self.__in_order, **kinds, **self.__options)
        if self.__identity.name:
            of, note = self._params.__getitem__, self.__identity.note
            first.note = lambda indices, used: note(map(of, indices), used)
            gradients.begin_to_count_samples()
        self.__grads = gradients.adopt(self._params)
        if None not in map(private_fields.values, self._params):
            self.__identity.check()  # before the first forward: ranks that differ are refused
        consistency.start_alike(self.__in_order, self.__identity.names)

    def set_learning_rate(self, lr: float) -> None:
        """As in ``gluon.Trainer``; raises ValueError if ``lr`` is negative, infinite or NaN."""
        optim.check_lr(lr, zero=True)
        super().set_learning_rate(lr)

    @_not_recorded
    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over devices and update; ``batch_size`` samples are in that sum.

        It may be an array of one element, such as a count of tokens, which is then waited for.
        Raises UserWarning for a stale gradient (see above), and ValueError for a batch size that is
        not positive and finite, and inside :meth:`no_sync`.
        """
        work = self.__begun()
        batch_size = self.__divide_by(optim.check_batch_size(batch_size))
        compared = self.__identity.compared(batch_size=batch_size)
        halves = (self._allreduce_grads, Trainer._allreduce_grads), (self._update, Trainer._update)
        if any(getattr(own, "__func__", None) is not ours for own, ours in halves):
            if compared:
                cluster.check_equal_async(name=self.__identity.name, **compared)
            self._allreduce_grads()
            self._update(ignore_stale_grad)
            return
        buckets = work.parts(ignore_stale_grad, **compared)
        scaler = self._amp_loss_scaler
        if scaler is None and not self.__skip_nonfinite:
            work.sum_and_update(buckets)
            return
        with interrupts.held():
            work.sum(buckets, on_all=scaler is not None)  # it inspects the sums of all devices
            self.__use(work, buckets)

    @_not_recorded
    def allreduce_grads(self) -> None:
        """Replace every device's gradients by the sum, for instance to clip before the update.

        Sums are not summed again: a second call, or :meth:`step`, before backward adds nothing.
        """
        self._allreduce_grads()

    @_not_recorded
    def update(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Update by the gradients that :meth:`allreduce_grads` summed; raises as :meth:`step`.

        After an overflow ``batch_size`` may be NaN or infinite, for an optimizer that then leaves
        the update out.

        All devices' parameters are updated by the first device's gradients, so it is enough to clip
        or scale these. Also raises ValueError if backward has written a gradient since the sum by
        :meth:`allreduce_grads`, or by :func:`gluonpar.allreduce` or ``allreduce_many``.
        """
        self.__begun()
        self.__divide_by(optim.check_batch_size(batch_size, may_overflow=True))
        gradients.check_summed(self.__grads)
        self._update(ignore_stale_grad)

    @_not_recorded
    def _allreduce_grads(self) -> None:
        """The method that programs override or call in ``gluon.Trainer``."""
        work = self.__begun()
        work.sum(work.parts(ignore_stale_grad=True, **self.__identity.compared()))

    @_not_recorded
    def _update(self, ignore_stale_grad: bool = False) -> None:
        """As in ``gluon.Trainer``, for programs that call it; ``rescale_grad`` is set already."""
        work = self.__begun()
        self.__use(work, work.sums(ignore_stale_grad))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients over micro-batches: inside, and until the next update, they add up.

        Run forward and backward of all micro-batches inside; of the last one also after it, if you
        like. Then call :meth:`step` with the number of samples of all micro-batches. Compare
        ``no_sync`` of PyTorch's DistributedDataParallel.
        """
        for param in self._params:
            param.list_data()  # raises, naming the parameter, if it is not initialised
        trained = [param for param in self._params if param.grad_req != "null"]
        if "row_sparse" in map(private_fields.grad_stype, trained):
            raise ValueError("MXNet cannot add up row_sparse gradients; use sparse_grad=False")
        before = self.__inside_no_sync
        if not any(grads.accumulates for grads in self.__grads):
            gradients.mark_used(self.__grads)
            adding = [param for param in trained if param.grad_req == "add"]
            memory.zero([grad for param in adding for grad in param.list_grad()])
            for grads in self.__grads:
                grads.accumulates = True
        self.__inside_no_sync = True
        try:
            yield
        finally:
            self.__inside_no_sync = before

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
        if not gradients.are_sums(self.__grads):
            self._allreduce_grads()
        of_params = zip(self._params, self.__grads)
        new = [param for param, grads in of_params if any(grads.counting())]
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
        copies, names = [*map(private_fields.values, trained)], [param.name for param in trained]
        for each, name in zip(copies, names):
            replicas.check_identical(each, name)
        replicas.check_ranks([first for first, *_ in copies], names)

    def save_states(self, fname: str | os.PathLike) -> None:
        """Write the optimizer with its states and all attributes, whole or not at all.

        The learning-rate schedule is one of the attributes. The file, a NumPy ``.npz``, does not
        depend on the number of devices. An optimizer of your own with attributes other than
        numbers, strings, arrays, and lists, tuples and dicts of these is pickled, with a
        UserWarning; ValueError if that fails, as for a lock. OSError if the file system refuses.
        """
        optimizer_states.save(fname, self._updaters[0], self.__named_params())

    def load_states(
        self, fname: str | os.PathLike, trusted: bool = False, keep_schedule: bool = False
    ) -> None:
        """Load a file of :meth:`save_states`; the optimizer continues from there.

        As in ``gluon.Trainer`` the saved attributes replace the arguments of this Trainer: learning
        rate, schedule, momentum, clipping. A schedule that differs from the Trainer's own is a
        UserWarning; with ``keep_schedule`` the Trainer's own goes on, or its learning rate if it
        has none. Parameters are told apart by name, or by their order if the names are others.

        Files that MXNet's Trainer wrote are also read. An optimizer or schedule that is not MXNet's
        and was pickled can run any code, and is read only if ``trusted``.
        Raises ValueError, with nothing changed, if the file is for another optimizer or other
        parameters, or is missing or damaged.
        """
        optimizer_states.load(
            fname, self._updaters[0], self.__named_params(), trusted, keep_schedule
        )

    def __named_params(self) -> optimizer_states.NamedParams:
        """Return the parameters as given: gluon.Trainer sorts by name, dense10 before dense9."""
        index = {param: i for i, param in enumerate(self._params)}
        return [(param.name, index[param], param) for param in self.__in_order]

    def _reset_kvstore(self) -> None:
        """Set the attributes that a program reads to sum by ``self._kvstore``."""
        self._kvstore, self._kv_initialized = self.__store, True
        self._params_to_init: list = []
        self._update_on_kvstore = self._distributed = False

    _init_kvstore = _reset_kvstore

    def __divide_by(self, batch_size: float) -> float:
        """Have the next update divide by ``batch_size``, and return it."""
        self._check_and_rescale_grad(self._scale / batch_size)
        if self.__identity.name:
            gradients.tell_samples(self.__grads, batch_size)
        return batch_size

    def __begun(self) -> Step:
        """Return what makes the steps, which is made anew after parameters have changed in kind.

        Before the first step all devices get the first device's parameters and running statistics,
        unless training is resumed, as in ``gluon.Trainer``.
        """
        if self.__inside_no_sync:
            raise ValueError("step() was called inside no_sync(); leave it first")
        if self.__step is not None and self.__step.is_current():
            return self.__step
        update.check(self._params)
        for param in self._params:
            param.list_data()  # raises, naming the parameter, if it is not initialised
        is_first, self._contexts = self.__step is None, self._check_contexts()
        if is_first:
            self.__identity.check()
            _log_slow_convolutions(self._params, self._contexts)
        first: Any = self._updaters[0]
        self._updaters = [first, *update.followers(self._params, self._contexts)]
        exchange = Exchange(self._contexts, **self.__options)
        how = first, exchange, self.__bucket_bytes, self.__identity.name
        self.__step = Step(self._params, self.__in_order, *how)
        if is_first and self._optimizer.num_update == self._optimizer.begin_num_update:
            exchange.inside.broadcast(in_buckets([param.list_data() for param in self._params]))
        return self.__step

    @interrupts.held()
    def __use(self, work: Step, buckets: Sequence[ParamBucket]) -> None:
        """Update by sums, unless they have an overflow that leaves the update out."""
        scaler = self._amp_loss_scaler
        has_overflow = scaler is not None and scaler.has_overflow(self._params)
        if self.__skip_nonfinite and not are_finite(buckets):
            has_overflow, self.num_skipped = True, self.num_skipped + 1
        if has_overflow:
            gradients.mark_used(self.__grads)
        else:
            work.update(buckets)


@private_fields.around(private_fields.MAKES_TRAINER)
def _make(make: Callable, trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    """Have a ``gluon.Trainer`` that is given gluonpar's kvstore become a :class:`Trainer`.

    An object of a subclass gets a class of both, in which the subclass's methods come first.
    """
    given = inspect.signature(gluon.Trainer).bind(*args, **kwargs).arguments
    if isinstance(trainer, Trainer) or not is_ours(given.get("kvstore")):
        make(trainer, *args, **kwargs)
        return
    of = type(trainer)
    both = of is not gluon.Trainer
    trainer.__class__ = types.new_class(of.__name__, (of, Trainer)) if both else Trainer
    Trainer.__init__(trainer, *args, **kwargs)


def _check_stock_arguments(kvstore: Any, compression_params: Any, update_on_kvstore: Any) -> None:
    """Raise ValueError for arguments of ``gluon.Trainer`` that gluonpar's does not support."""
    kind = "gluonpar" if is_ours(kvstore) else getattr(kvstore, "type", kvstore)
    for name, given, allowed in (
        ("kvstore", kind, _KVSTORES),
        ("compression_params", compression_params, (None, {})),
        ("update_on_kvstore", update_on_kvstore, (None, False)),
    ):
        if given not in allowed:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, allowed))}, got {given!r}; this Trainer "
                "updates on the devices, has compression='fp16', and trains in several processes "
                "if mpirun starts them (docs/cluster.md); for others use gluon.Trainer"
            )


def _log_slow_convolutions(params: Sequence[gluon.Parameter], ctx: Sequence[mx.Context]) -> None:
    slow = channels.slow({param.name: param.shape or () for param in params})
    if slow and any(c.device_type == "cpu" for c in ctx):
        logging.getLogger("gluonpar").info(
            "on CPUs no vector kernel computes these convolutions, whose channels are no multiples "
            "of 8; with AVX2 such make LeNet's step 1.2 times as long (docs/performance.md): %s",
            ", ".join(f"{name} ({numbers})" for name, numbers in slow.items()),
        )
