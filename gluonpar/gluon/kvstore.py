"""kvstore='gluonpar': the stock gluon.Trainer, and Module, on gluonpar's collectives.

Importing this module registers the name for ``mx.kv.create``, and so for
``gluon.Trainer(params, optimizer, kvstore='gluonpar')`` and ``Module.fit(kvstore='gluonpar')``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from numbers import Number
from typing import Any, Callable, NoReturn, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import cluster
from gluonpar.cluster import world
from gluonpar.collectives import Exchange, arguments, exchange_over, in_buckets, row_sparse
from gluonpar.gluon import ages, batches, initial_values
from gluonpar.gluon.update import check_draws_nothing
from gluonpar.runtime import devices, heap, memory, private_fields

# Optimizers that would give each copy of a parameter another value, as MXNet calls one optimizer
# for each device in turn: SGLD draws random numbers, LBSGD has one array for a Trainer's copies.
_NOT_BY_MODULE = (mx.optimizer.SGLD,)
_NOT_BY_TRAINER = (mx.optimizer.SGLD, mx.optimizer.LBSGD)
_VALUES = "stores sums of row_sparse arrays only; sum dense ones with pushpull"


@mx.kvstore.KVStoreBase.register  # under the class's name in lower case
class GluonPar(mx.kvstore.KVStore):  # of which sparse gradients need an instance
    """The store that a Trainer or Module uses: copies parameters, sums gradients, both in place.

    For arrays that :func:`gluonpar.allreduce` takes; as asynchronous as any operator. A key is an
    int, a string or a list of those; no dense value is stored under it. ``priority`` is not used.
    The store runs no optimizer, so ``update_on_kvstore`` is False: every device updates its own
    copy of the parameters, and the Trainer or the Module holds the optimizer states. On several
    devices each update begins with the numbers that the optimizer and its schedule had before the
    step, as on one device. SGLD, which draws random numbers, is refused there, and in a Trainer
    LBSGD; an optimizer of your own must not keep arrays or containers besides the states. A
    Module's states must be loaded on as many devices as saved them, because it numbers them so.

    >>> import mxnet as mx
    >>> ctx = [mx.cpu(0), mx.cpu(1)]
    >>> net = mx.gluon.nn.Dense(1, in_units=2)
    >>> net.initialize(mx.init.One(), ctx=ctx)
    >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="gluonpar")
    >>> with mx.autograd.record():
    ...     losses = [net(mx.nd.ones((n, 2), ctx=c)) for n, c in zip((3, 1), ctx)]
    >>> mx.autograd.backward(losses)
    >>> trainer.allreduce_grads()
    >>> [grad.asnumpy().tolist() for grad in net.weight.list_grad()]
    [[[4.0, 4.0]], [[4.0, 4.0]]]
    """

    def __init__(self) -> None:
        self._row_sparse: dict[Any, mx.nd.NDArray] = {}  # by key: the sum pushed last

    def __del__(self) -> None:
        """Free nothing: there is no store of MXNet's behind this one."""

    @property
    def type(self) -> str:
        """'gluonpar', or 'dist_sync_gluonpar' with several processes.

        By 'dist' and '_sync' Module knows that a batch has the samples of all processes.
        """
        return "gluonpar" if self.num_workers == 1 else "dist_sync_gluonpar"

    rank = property(lambda self: cluster.rank(), doc="The rank of this process; 0 without MPI.")
    num_workers = property(lambda self: cluster.size(), doc="The number of processes.")

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False for 'optimizer'; raise ValueError for others, which MXNet 1.9.1 lacks."""
        if capability.lower() != mx.kvstore.KVStoreBase.OPTIMIZER:
            raise ValueError(f"capability must be 'optimizer', got {capability!r}")
        return False

    def init(self, key: Any, value: Any) -> None:
        """Copy rank 0's array ``value`` to that of all ranks; with a list of keys, key by key.

        Module calls this when it has copied its parameters to the devices: to these, too.
        """
        if self.num_workers == 1:
            return
        caller = sys._getframe(1)
        from_module = caller.f_code is private_fields.MODULE_INIT
        self.broadcast(key, value, caller.f_locals["param_on_devs"] if from_module else value)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy the array ``value`` to every array of ``out``; with a list of keys, key by key.

        With several processes, rank 0's ``value`` is copied to ``value`` and ``out`` of all.
        ``value`` may be one of ``out``. Raises ValueError for arrays of different kinds.
        """
        for (root,), arrays in zip(_lists(key, value, "value"), _lists(key, out, "out")):
            data = [root, *(array for array in arrays if array is not root)]
            _exchange([data], op=None).broadcast(in_buckets([data]))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Replace every array of ``value``, one per device, by the sum of all of them.

        With ``out``, an array or a list, ``value`` is left as it is and every array of ``out``
        becomes the sum. With a list of keys, ``value`` and ``out`` hold one list of arrays per key,
        all on the same contexts.
        With several processes the sum is over the devices of all processes.

        The stock Trainer calls this for one parameter after another. The first call sums the
        gradients of all parameters together, and the others do nothing: for a small network one
        operator per parameter would cost as much as the sums. A device that had no sample adds
        nothing, and is updated as the others. For other callers every call sums.

        Raises ValueError for arrays of different shapes or dtypes, and for row_sparse ones with
        several processes; a Trainer or Module gives those to :meth:`push`.
        """
        caller = sys._getframe(1)
        # A subclass with a loop of its own is not recognised: its calls are executed one by one.
        if caller.f_code is private_fields.TRAINER_LOOP:
            trainer = caller.f_locals["self"]
            params = private_fields.params(trainer)
            if key == next(i for i, param in enumerate(params) if _is_summed_here(param)):
                summed = _with_gradients(trainer, [*filter(_is_summed_here, params)])
                lists = [param.list_grad() for param in summed]
                heap.return_free(lists)
                _allreduce(lists)
        elif out is None:
            if caller.f_code is private_fields.MODULE_LOOP:
                optimizer = caller.f_locals["updater"].optimizer
                _update_alike(optimizer, [array.context for array in value], _NOT_BY_MODULE)
            _allreduce(_lists(key, value, "value"))
        else:
            for data, targets in zip(_lists(key, value, "value"), _lists(key, out, "out")):
                with autograd.pause():
                    total = _sum(data)
                    for target in targets:  # it may be in data, too
                        total.copyto(target)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Store the sum of the row_sparse arrays ``value``, one per device, under ``key``.

        With a list of keys, one list of arrays per key. Raises ValueError for dense arrays, and
        with several processes: row_sparse arrays are not exchanged between them.
        """
        caller = sys._getframe(1)
        if caller.f_code is private_fields.TRAINER_LOOP:
            trainer = caller.f_locals["self"]
            _with_gradients(trainer, [private_fields.params(trainer)[key]])
        for name, data in zip(_keys(key), _lists(key, value, "value")):
            if data[0].stype != "row_sparse":
                raise ValueError(f"kvstore 'gluonpar' cannot push({key!r}): it {_VALUES}")
            self._row_sparse[name] = _sum(data)

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Copy the sum that :meth:`push` stored under ``key`` to every array of ``out``.

        ``ignore_sparse`` is not used: all sums are row_sparse. Raises ValueError if there is none.
        """
        for name, targets in zip(_keys(key), _lists(key, out, "out")):
            if name not in self._row_sparse:
                raise ValueError(f"kvstore 'gluonpar' cannot pull({key!r}): it {_VALUES}")
            for target in targets:
                self._row_sparse[name].copyto(target)


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(self: GluonPar, *args: Any, **kwargs: Any) -> NoReturn:
        given = [*args, *kwargs.values()]
        raise ValueError(f"kvstore 'gluonpar' cannot {name}({given[0]!r}): it {reason}")

    refuse.__doc__ = f"Raise ValueError: the store {reason}."
    return refuse


for _name, _reason in {
    "set_optimizer": "runs no optimizer; pass update_on_kvstore=False, or kvstore='device'",
    "set_gradient_compression": "does not compress gradients; leave compression_params out, or use "
    "kvstore='device', which does on GPUs",
    "save_optimizer_states": "holds no optimizer states; call trainer.save_states",
    "load_optimizer_states": "holds no optimizer states; call trainer.load_states",
    "row_sparse_pull": _VALUES,
}.items():
    setattr(GluonPar, _name, _refusing(_name, _reason))


def _is_ours(kvstore: Any) -> bool:
    named = isinstance(kvstore, str) and kvstore.lower() == "gluonpar"
    return named or isinstance(kvstore, GluonPar)


def _join_job() -> None:
    """In a job of several processes, have MXNet use this store where it would use none.

    By name, MXNet makes no store for a single device: ranks with one each would train apart. And
    gluon.Trainer makes it in the first step only, after forward and backward with the values that
    each rank has initialised itself.
    """
    start = gluon.Trainer.__init__

    def always(create: Callable) -> Callable:
        def create_always(kvstore: Any, num_device: int, arg_params: Any) -> tuple:
            if isinstance(kvstore, str) and _is_ours(kvstore):
                kvstore = mx.kv.create(kvstore)
            return create(kvstore, num_device, arg_params)

        return create_always

    @functools.wraps(start)
    def start_alike(self: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if _is_ours(private_fields.kvstore_params(self)["kvstore"]):
            params = private_fields.params(self)
            for param in params:
                if private_fields.grad_stype(param) != "default":
                    raise ValueError(f"parameter {param.name}: {row_sparse.NOT_BETWEEN_PROCESSES}")
            initial_values.start_alike(params)

    private_fields.wrap(private_fields.CREATES_KVSTORE, always)
    gluon.Trainer.__init__ = start_alike


if world.launched():
    _join_job()


def _is_summed_here(param: gluon.Parameter) -> bool:
    return param.grad_req != "null" and private_fields.grad_stype(param) == "default"


class _Step:
    """A step of an optimizer, which MXNet calls for each device's copies of the parameters."""

    def __init__(self) -> None:
        self._devices: set[mx.Context] = set()  # that it has been called for
        self._before: list[dict[str, Any]] = []  # its numbers when it had been called for none

    def begin(self, optimizer: mx.optimizer.Optimizer, device: mx.Context) -> None:
        """Give the optimizer the numbers from before the step."""
        if not self._devices or device in self._devices:
            self._devices, self._before = set(), [*map(_numbers, _attributes(optimizer))]
        self._devices.add(device)
        for attributes, before in zip(_attributes(optimizer), self._before):
            for name in _numbers(attributes).keys() - before.keys():
                del attributes[name]
            attributes.update(before)


def _attributes(optimizer: mx.optimizer.Optimizer) -> list[dict[str, Any]]:
    """Return those of the optimizer and of its schedule."""
    both = (optimizer, optimizer.lr_scheduler)
    return [vars(each) for each in both if hasattr(each, "__dict__")]


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return those that an update may make or replace: numbers, strings and None."""
    kinds = (Number, str, type(None))
    return {name: value for name, value in attributes.items() if isinstance(value, kinds)}


# The present or last step of each optimizer that a Trainer or Module uses with this store.
_steps: weakref.WeakKeyDictionary[mx.optimizer.Optimizer, _Step] = weakref.WeakKeyDictionary()


@functools.lru_cache(None)
def _wrap_updates() -> None:
    """From now on, have each device's update in a step begin as the first one's.

    MXNet's optimizers, and others, change numbers of their own in an update (counts, the last
    learning rate), which the next device's update must not see.
    """

    def beginning_alike(update: Callable) -> Callable:
        @functools.wraps(update)
        def begin_and_update(
            self: mx.optimizer.Updater, index: Any, grad: Any, weight: Any
        ) -> None:
            if self.optimizer in _steps:
                [first, *_] = weight if isinstance(weight, (list, tuple)) else [weight]
                _steps[self.optimizer].begin(self.optimizer, first.context)
            update(self, index, grad, weight)

        return begin_and_update

    private_fields.wrap(private_fields.UPDATES, beginning_alike)


def _update_alike(
    optimizer: mx.optimizer.Optimizer, ctx: Sequence[mx.Context], refused: tuple[type, ...]
) -> None:
    """Have MXNet update the copies on all devices alike; raise ValueError if it cannot."""
    devices.check_distinct(ctx)
    check_draws_nothing(optimizer, cluster.size())
    if len(ctx) == 1:
        return
    if isinstance(optimizer, refused):
        raise ValueError(
            f"MXNet updates each device's copy by itself, and {type(optimizer).__name__} would "
            f"update the copies on {ctx} differently; use gluonpar.Trainer"
        )
    if optimizer not in _steps:
        _wrap_updates()
        _steps[optimizer] = _Step()
        private_fields.level_update_counts(optimizer, ctx)


def _with_gradients(
    trainer: gluon.Trainer, params: Sequence[gluon.Parameter]
) -> list[gluon.Parameter]:
    """Return those of ``params`` of which some device of some rank has a gradient that counts.

    Gradients that are not to be added are set to zero. All are marked as sums: the Trainer updates
    by them on all devices.
    """
    _update_alike(private_fields.optimizer(trainer), params[0].list_ctx(), _NOT_BY_TRAINER)
    batches.track(params)
    summed, stale = [], []
    for param, is_added, on_some_rank in zip(params, *ages.summands(params, cluster.size())):
        if on_some_rank:
            summed.append(param)
            grads = private_fields.grads(param)
            stale += [grad for grad, counts in zip(grads, is_added) if not counts]
    memory.zero(stale)
    batches.mark_summed(summed, [0] if cluster.rank() == 0 else [])
    return summed


def _exchange(lists: Sequence[Sequence[mx.nd.NDArray]], op: str | None = "sum") -> Exchange:
    """Return the exchange for lists that are added, or with ``op`` None only copied."""
    kinds = [
        arguments.check_list(data, f"lists[{j}]", row_sparse=op is not None)
        for j, data in enumerate(lists)
    ]
    exchange = exchange_over(tuple(kinds[0].ctx), op=op, num_processes=cluster.size())
    arguments.check_exchange(kinds, exchange)
    return exchange


def _sum(data: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return the sum of the arrays, one per device, as a new array on the first device."""
    copies = [array.copy() for array in data]
    _exchange([copies]).reduce(in_buckets([copies]))
    return copies[0]


def _allreduce(lists: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    if lists:
        _exchange(lists).allreduce(in_buckets(lists))


def _keys(key: Any) -> Sequence[Any]:
    return key if isinstance(key, (list, tuple)) else [key]


def _lists(key: Any, arrays: Any, name: str) -> list[Sequence[mx.nd.NDArray]]:
    """One list of arrays per key."""
    several = isinstance(key, (list, tuple))
    if several and len(key) != len(arrays):
        raise ValueError(f"{name} must hold one entry per key, got {len(arrays)} for keys {key}")
    of_keys = arrays if several else [arrays]
    return [[data] if isinstance(data, mx.nd.NDArray) else data for data in of_keys]
