"""kvstore='gluonpar': the stock gluon.Trainer, and Module, on gluonpar's collectives.

Importing this module registers the name for ``mx.kv.create``, and so for
``gluon.Trainer(params, optimizer, kvstore='gluonpar')`` and ``Module.fit(kvstore='gluonpar')``.
"""

from __future__ import annotations

import weakref
from numbers import Number
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import cluster
from gluonpar.cluster import world
from gluonpar.collectives import Exchange, in_buckets, operations
from gluonpar.gluon import batches, check_draws_nothing, consistency
from gluonpar.runtime import devices, heap, interrupts, memory, private_fields, threads

# MXNet calls one optimizer for each device in turn. These would give each copy of a parameter
# another value: SGLD draws random numbers, LBSGD has one array for all of a Trainer's copies.
_NOT_BY_MODULE = (mx.optimizer.SGLD,)
_NOT_BY_TRAINER = (mx.optimizer.SGLD, mx.optimizer.LBSGD)


@mx.kvstore.KVStoreBase.register  # under the class's name in lower case
class GluonPar(mx.kvstore.KVStore):  # MXNet takes no other class for sparse gradients
    """The store that a Trainer or Module uses: copies parameters, sums gradients, both in place.

    For arrays that :func:`gluonpar.allreduce` takes; as asynchronous as any operator. A key is an
    int, a string or a list of these; only :meth:`push` stores a value under it. ``priority`` is not
    used.
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
        self._pushed: dict[Any, mx.nd.NDArray] = {}  # by key: the sum pushed last
        self._scope = cluster.scope()
        self.sums_sparse_gradients = False  # of a Trainer

    def __del__(self) -> None:
        """Free nothing: there is no store of MXNet's behind this one."""

    @property
    def type(self) -> str:
        """'gluonpar', or 'dist_sync_gluonpar' with several processes.

        From 'dist' and '_sync' Module concludes that a batch has the samples of all processes. For
        a Trainer of row_sparse gradients the type is 'gluonpar': with 'dist' MXNet would require
        the store to update.
        """
        alone = self.num_workers == 1 or self.sums_sparse_gradients
        return "gluonpar" if alone else "dist_sync_gluonpar"

    @property
    @cluster.in_scope
    def rank(self) -> int:
        """The rank of this process; 0 alone."""
        return cluster.rank()

    @property
    @cluster.in_scope
    def num_workers(self) -> int:
        """The number of processes."""
        return cluster.size()

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False: there is no optimizer in the store."""
        return False

    def init(self, key: Any, value: Any) -> None:
        """Copy rank 0's ``value`` to every rank's ``value``; with a list of keys, key by key."""
        if self.num_workers > 1:
            self.broadcast(key, value, value)

    @cluster.in_scope
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy the array ``value`` to every array of ``out``; with a list of keys, key by key.

        With several processes, rank 0's ``value`` is copied to ``value`` and ``out`` of all.
        ``value`` may be one of ``out``. Raises ValueError for arrays of different kinds.
        """
        for (root,), arrays in zip(_lists(key, value, "value"), _lists(key, out, "out")):
            data = [root, *(array for array in arrays if array is not root)]
            _exchange([data], op=None).broadcast(in_buckets([data]))

    @cluster.in_scope
    @interrupts.held()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Replace every array of ``value``, one per device, by the sum of all of them.

        With ``out``, an array or a list, ``value`` is left as it is and every array of ``out``
        becomes the sum. With a list of keys, ``value`` and ``out`` hold one list of arrays per key,
        all on the same contexts, and are summed together.
        With several processes the sum is over the devices of all processes.

        Where the arrays that become the sum are a Parameter's gradients, a device that had no
        sample adds nothing, and gets the sum, too.

        Raises ValueError for arrays of different shapes or dtypes, and for an array under two keys.
        A Trainer or Module gives row_sparse arrays to :meth:`push`.
        """
        lists = _lists(key, value, "value")
        targets = lists if out is None else _lists(key, out, "out")
        if not lists:
            return
        exchange, summands, sums, stale = _exchange(lists), [], [], []
        with autograd.pause():
            for data, arrays, added in zip(lists, targets, _begin_sums(targets)):
                if added is None:
                    continue
                summands.append(data if out is None else [array.copy() for array in data])
                sums.append(arrays)
                if len(data) == len(arrays):
                    stale += [array for array, is_added in zip(summands[-1], added) if not is_added]
            memory.zero(stale)
            buckets = in_buckets(summands)
            if out is None:
                heap.return_free(summands)
                exchange.allreduce(buckets)
                return
            exchange.reduce(buckets)
            for (total, *_), arrays in zip(summands, sums):
                for array in arrays:  # it may be in value, too
                    total.copyto(array)

    @cluster.in_scope
    @interrupts.held()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Store the sum of the arrays ``value``, one per device, under ``key``.

        With a list of keys, one list of arrays per key. With several processes the sum is over the
        devices of all processes. For gradients that are row_sparse; sum dense ones with
        :meth:`pushpull`, which copies nothing.
        """
        for name, data in zip(_keys(key), _lists(key, value, "value")):
            [added] = _begin_sums([data])
            memory.zero([array for array, is_added in zip(data, added or ()) if not is_added])
            copies = [array.copy() for array in data]
            _exchange([copies]).reduce(in_buckets([copies]))
            self._pushed[name] = copies[0]

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Copy the sum that :meth:`push` stored under ``key`` to every array of ``out``.

        ``ignore_sparse`` is not used. Raises KeyError if nothing has been pushed.
        """
        for name, targets in zip(_keys(key), _lists(key, out, "out")):
            for target in targets:
                self._pushed[name].copyto(target)

    def __getattr__(self, name: str) -> Any:
        """Refuse MXNet's other methods: they use attributes of a store that is not there."""
        raise AttributeError(
            f"kvstore 'gluonpar' has no {name}: it adds and copies arrays, and has no optimizer, "
            "no optimizer states and no compression; pass update_on_kvstore=False"
        )


# How ranks recognise each Trainer that uses this store.
_identities: weakref.WeakKeyDictionary[gluon.Trainer, consistency.Identity]
_identities = weakref.WeakKeyDictionary()


def _is_ours(kvstore: Any) -> bool:
    named = isinstance(kvstore, str) and kvstore.lower() == "gluonpar"
    return named or isinstance(kvstore, GluonPar)


@private_fields.around(private_fields.MAKES_TRAINER)
def _make_trainer(make: Callable, trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    """Before the first forward, share out threads and give all ranks the same initial values."""
    make(trainer, *args, **kwargs)
    options, params = private_fields.kvstore_params(trainer), private_fields.params(trainer)
    if not _is_ours(options["kvstore"]):
        return
    check_draws_nothing(private_fields.optimizer(trainer), cluster.size())
    threads.share(private_fields.contexts(trainer))
    _identities[trainer] = consistency.Identity(trainer, params)
    if world.launched():
        if isinstance(options["kvstore"], str):  # by name, there is none for one device
            options["kvstore"] = GluonPar()
        sparse = "row_sparse" in map(private_fields.grad_stype, params)
        options["kvstore"].sums_sparse_gradients = sparse
        consistency.start_alike(params)


@private_fields.around(private_fields.FILLS_TRAINERS_KVSTORE)
def _fill_store(fill: Callable, trainer: gluon.Trainer) -> None:
    """Note that the store has given all ranks rank 0's values, before the first step."""
    fill(trainer)
    if trainer in _identities:
        consistency.are_alike(private_fields.params(trainer))


@private_fields.around(private_fields.SUMS_GRADIENTS)
def _sum_together(sum_gradients: Callable, trainer: gluon.Trainer) -> None:
    """Sum all parameters' gradients together: an operator for each would cost as much as a step."""
    store = private_fields.kvstore(trainer)
    if getattr(type(store), "pushpull", None) is not GluonPar.pushpull:
        sum_gradients(trainer)
        return
    dense: dict[int, list[mx.nd.NDArray]] = {}
    sparse: dict[int, list[mx.nd.NDArray]] = {}
    for i, param in enumerate(private_fields.params(trainer)):
        if param.grad_req != "null":
            kind = dense if private_fields.grad_stype(param) == "default" else sparse
            kind[i] = param.list_grad()
    store.pushpull([*dense], [*dense.values()])
    for i, grads in sparse.items():
        store.push(i, grads)
        store.pull(i, grads)


@private_fields.around(private_fields.UPDATES_BY_SUMS)
def _update_by_sums(update: Callable, trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    """Refuse an update by gradients that have not been summed: the devices would differ."""
    if trainer in _identities:
        batches.check_summed(private_fields.params(trainer))
    update(trainer, *args, **kwargs)


@private_fields.around(private_fields.UPDATES_DEVICES)
@interrupts.held()
def _update_devices(update: Callable, *args: Any, **kwargs: Any) -> None:
    update(*args, **kwargs)


@private_fields.around(private_fields.CREATES_KVSTORE)
def _create_store(create: Callable, kvstore: Any, num_device: int, arg_params: Any) -> tuple:
    """In a job, make a store for a single device, too: by its name Module makes none."""
    by_name = isinstance(kvstore, str) and _is_ours(kvstore) and world.launched()
    return create(GluonPar() if by_name else kvstore, num_device, arg_params)


@private_fields.around(private_fields.FILLS_KVSTORE)
def _fill_devices(
    fill: Callable,
    kvstore: Any,
    param_arrays: Any,
    arg_params: Any,
    param_names: Any,
    update_on_kvstore: Any,
) -> None:
    """Copy rank 0's parameters to all devices, to which Module has copied each rank's own."""
    fill(kvstore, param_arrays, arg_params, param_names, update_on_kvstore)
    if _is_ours(kvstore) and kvstore.num_workers > 1:
        for name, arrays in zip(param_names, param_arrays):
            kvstore.broadcast(name, arg_params[name], arrays)


@private_fields.around(private_fields.UPDATES_MODULE)
@interrupts.held()
def _update_module(
    update: Callable,
    param_arrays: Any,
    grads: Any,
    updater: Any,
    num_device: int,
    kvstore: Any = None,
    param_names: Any = None,
) -> None:
    """Have Module's optimizer update the copies on all devices alike."""
    if _is_ours(kvstore) and param_arrays:
        ctx = [array.context for array in param_arrays[0]]
        _update_alike(updater.optimizer, ctx, _NOT_BY_MODULE)
    update(param_arrays, grads, updater, num_device, kvstore, param_names)


class _Step:
    """A step of an optimizer, which MXNet calls for each device's copies of the parameters."""

    def __init__(self) -> None:
        self._devices: set[mx.Context] = set()  # which have been updated in this step
        self._before: list[dict[str, Any]] = []  # the optimizer's numbers before the step

    def begin(self, optimizer: mx.optimizer.Optimizer, device: mx.Context) -> None:
        """Give the optimizer the numbers from before the step."""
        both = (optimizer, optimizer.lr_scheduler)
        attributes = [vars(each) for each in both if hasattr(each, "__dict__")]
        if not self._devices or device in self._devices:
            self._devices, self._before = set(), [*map(_numbers, attributes)]
        self._devices.add(device)
        for each, before in zip(attributes, self._before):
            for name in _numbers(each).keys() - before.keys():
                del each[name]
            each.update(before)


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that an update may make or replace: numbers, strings and None."""
    kinds = (Number, str, type(None))
    return {name: value for name, value in attributes.items() if isinstance(value, kinds)}


# The present or last step of each optimizer that a Trainer or Module uses with this store.
_steps: weakref.WeakKeyDictionary[mx.optimizer.Optimizer, _Step] = weakref.WeakKeyDictionary()


@private_fields.around(private_fields.UPDATES)
def _update_copies(
    update: Callable, updater: mx.optimizer.Updater, index: Any, grad: Any, weight: Any
) -> None:
    """Begin each device's update in a step with the same numbers as the first device's.

    MXNet's optimizers, and others, change numbers of their own in an update (counts, the last
    learning rate), which the next device's update must not see.
    """
    if updater.optimizer in _steps:
        [first, *_] = weight if isinstance(weight, (list, tuple)) else [weight]
        _steps[updater.optimizer].begin(updater.optimizer, first.context)
    update(updater, index, grad, weight)


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
        _steps[optimizer] = _Step()
        private_fields.level_update_counts(optimizer, ctx)


def _begin_sums(lists: Sequence[Sequence[mx.nd.NDArray]]) -> list[list[bool] | None]:
    """Return per list, by device, whether its array is added; None if no rank adds one.

    Arrays are added unless they are gradients of a Parameter that do not count. The Parameters'
    gradients are marked as sums, by which their Trainer updates on all devices.
    """
    params = [*map(batches.param_of, lists)]
    known = [param for param in params if param is not None]
    names, facts = [], {}
    for trainer in dict.fromkeys(map(private_fields.trainer, known)):
        if trainer is not None and _is_ours(private_fields.kvstore(trainer)):
            optimizer, ctx = private_fields.optimizer(trainer), private_fields.contexts(trainer)
            _update_alike(optimizer, ctx, _NOT_BY_TRAINER)
            if trainer in _identities:
                names.append(_identities[trainer].name)
                facts.update(_identities[trainer].facts(rescale_grad=optimizer.rescale_grad))
    summands = batches.summands(known, cluster.size(), ", ".join(names), facts)
    counting = dict(zip(known, zip(*summands)))
    summed = [param for param, (_, on_some_rank) in counting.items() if on_some_rank]
    batches.mark_summed(summed)
    added = []
    for param, data in zip(params, lists):
        counts, on_some_rank = counting.get(param, ([True] * len(data), True))
        added.append(counts if on_some_rank else None)
    return added


def _exchange(lists: Sequence[Sequence[mx.nd.NDArray]], op: str | None = "sum") -> Exchange:
    """Return the exchange for lists that are added, or with ``op`` None only copied."""
    named = {f"lists[{j}]": data for j, data in enumerate(lists)}
    return operations.checked_exchange(named, op=op, row_sparse=op is not None)


def _keys(key: Any) -> Sequence[Any]:
    return key if isinstance(key, (list, tuple)) else [key]


def _lists(key: Any, arrays: Any, name: str) -> list[Sequence[mx.nd.NDArray]]:
    """One list of arrays per key."""
    several = isinstance(key, (list, tuple))
    if several and len(key) != len(arrays):
        raise ValueError(f"{name} must hold one entry per key, got {len(arrays)} for keys {key}")
    of_keys = arrays if several else [arrays]
    return [[data] if isinstance(data, mx.nd.NDArray) else data for data in of_keys]
