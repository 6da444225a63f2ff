"""kvstore='gluonpar': the stock gluon.Trainer, and Module, on gluonpar's collectives.

Importing this module registers the name for ``mx.kv.create``, and so for
``gluon.Trainer(params, optimizer, kvstore='gluonpar')`` and ``Module.fit(kvstore='gluonpar')``.
"""

from __future__ import annotations

import itertools
from numbers import Number
from typing import Any, Callable, Sequence
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import cluster, collectives, gradients
from gluonpar.cluster import world
from gluonpar.gluon import check_draws_nothing, consistency
from gluonpar.runtime import devices, heap, interrupts, memory, private_fields, threads

Arrays = Sequence[mx.nd.NDArray]  # of a key, one per device


@mx.kvstore.KVStoreBase.register  # under the class's name in lower case
class GluonPar(mx.kvstore.KVStore):  # MXNet takes no other class for sparse gradients
    """The store that a Trainer or Module uses: copies parameters, sums gradients, both in place.

    It takes the arrays that :func:`gluonpar.allreduce` takes, and nothing waits. A key is an int, a
    string or a list of these; only :meth:`push` stores a value under it. ``priority`` is not used.

    The store runs no optimizer, so ``update_on_kvstore`` is False: every device updates its own
    copy of the parameters, and the Trainer or the Module holds the optimizer states. On several
    devices each update begins with the numbers that the optimizer and its schedule had before the
    step, as on one device. SGLD, which draws random numbers, is refused there, and in a Trainer
    LBSGD; an optimizer of your own must not keep arrays or containers besides the states. A
    Module's states must be loaded on as many devices as saved them: their numbers depend on it.

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
            collectives.broadcast(data)

    @cluster.in_scope
    @interrupts.held()
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Replace every array of ``value``, one per device, by the sum of all of them.

        With ``out``, an array or a list, ``value`` is left as it is and every array of ``out``
        becomes the sum. With a list of keys, ``value`` and ``out`` hold one list of arrays per key,
        all on the same contexts. With several processes the sum is over the devices of all. Where
        the arrays that become the sum are a Parameter's gradients, a device that had no sample adds
        nothing, and gets the sum, too.

        Raises ValueError for arrays of different shapes or dtypes, and for an array under two keys.
        A Trainer or Module gives row_sparse arrays to :meth:`push`.
        """
        lists = _lists(key, value, "value")
        if not lists:
            return
        if out is not None:
            targets = _lists(key, out, "out")
            sums, added = _summed(lists, targets)
            with autograd.pause():
                for total, arrays in itertools.compress(zip(sums, targets), added):
                    for array in arrays:  # it may be in value, too
                        total.copyto(array)
            return
        exchange, added = collectives.exchange_of(lists), _begin_sums(lists, lists)
        summands = [*itertools.compress(lists, added)]
        heap.return_free(summands)
        exchange.allreduce(collectives.in_buckets(summands))

    @cluster.in_scope
    @interrupts.held()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Store the sum of the arrays ``value``, one per device, under ``key``.

        With a list of keys, one list of arrays per key, all on the same contexts. With several
        processes the sum is over the devices of all. For gradients that are row_sparse; sum dense
        ones with :meth:`pushpull`, which copies nothing.
        """
        lists = _lists(key, value, "value")
        if lists:
            self._pushed.update(zip(_keys(key), _summed(lists, lists)[0]))

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
_identities: WeakKeyDictionary[gluon.Trainer, consistency.Identity] = WeakKeyDictionary()


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
    gradients.adopt(params)
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
    if sparse:
        store.push([*sparse], [*sparse.values()])
        store.pull([*sparse], [*sparse.values()])


@private_fields.around(private_fields.UPDATES_BY_SUMS)
def _update_by_sums(update: Callable, trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    """Refuse an update by gradients that have not been summed: the devices would differ."""
    if trainer in _identities:
        gradients.check_summed(private_fields.params(trainer))
    update(trainer, *args, **kwargs)


@private_fields.around(private_fields.UPDATES_DEVICES)
@private_fields.around(private_fields.UPDATES_MODULE)
@interrupts.held()
def _update_devices(update: Callable, *args: Any, **kwargs: Any) -> None:
    update(*args, **kwargs)


@private_fields.around(private_fields.PREPARES_MODULE)
def _prepare_module(
    prepare: Callable, module: Any, kvstore: Any = "local", *args: Any, **kwargs: Any
) -> None:
    """Start with rank 0's parameters, and update the copies on all devices alike."""
    if isinstance(kvstore, str) and _is_ours(kvstore) and world.launched():
        kvstore = GluonPar()  # by its name Module makes none for a single device
    before = private_fields.updater(module)
    prepare(module, kvstore, *args, **kwargs)
    store, updater = private_fields.kvstore(module), private_fields.updater(module)
    if _is_ours(store):
        if store.num_workers > 1 and updater is not before:
            module.set_params(*module.get_params())  # on the devices; init() has made them rank 0's
        _update_alike(updater.optimizer, private_fields.module_contexts(module))


@private_fields.around(private_fields.CREATES_KVSTORE)
def _refuse(create: Callable, kvstore: Any, *args: Any) -> tuple:
    if _is_ours(kvstore):
        raise ValueError("kvstore 'gluonpar' trains no mx.model.FeedForward; use mx.mod.Module")
    return create(kvstore, *args)


def _numbers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that an update may make or replace: numbers, strings and None."""
    kinds = (Number, str, type(None))
    return {name: value for name, value in attributes.items() if isinstance(value, kinds)}


# By optimizer that a Trainer or Module uses with this store on several devices: the devices that
# have been updated in the present or last step, and the optimizer's numbers before that step.
_steps: WeakKeyDictionary[Any, tuple[set[mx.Context], list[dict]]] = WeakKeyDictionary()


@private_fields.around(private_fields.UPDATES)
def _update_copies(
    update: Callable, updater: mx.optimizer.Updater, index: Any, grad: Any, weight: Any
) -> None:
    """Begin each device's update in a step with the same numbers as the first device's.

    MXNet's optimizers, and others, change numbers of their own in an update (counts, the last
    learning rate), which the next device's update must not see.
    """
    optimizer = updater.optimizer
    if optimizer in _steps:
        [first, *_] = weight if isinstance(weight, (list, tuple)) else [weight]
        both = (optimizer, optimizer.lr_scheduler)
        attributes = [vars(each) for each in both if hasattr(each, "__dict__")]
        updated, before = _steps[optimizer]
        if not updated or first.context in updated:  # a step begins
            updated.clear()
            before[:] = map(_numbers, attributes)
        updated.add(first.context)
        for each, numbers in zip(attributes, before):
            for name in _numbers(each).keys() - numbers.keys():
                del each[name]
            each.update(numbers)
    update(updater, index, grad, weight)


def _update_alike(optimizer: Any, ctx: Sequence[mx.Context], *refused: type) -> None:
    """Have MXNet update the copies on all devices alike; raise ValueError if it cannot.

    It calls the optimizer for each device in turn: SGLD would draw random numbers for each copy.
    """
    devices.check_distinct(ctx)
    check_draws_nothing(optimizer, cluster.size())
    if len(ctx) == 1:
        return
    if isinstance(optimizer, (mx.optimizer.SGLD, *refused)):
        raise ValueError(
            f"MXNet updates each device's copy by itself, and {type(optimizer).__name__} would "
            f"update the copies on {ctx} differently; use gluonpar.Trainer"
        )
    if optimizer not in _steps:
        _steps[optimizer] = set(), []
        private_fields.level_update_counts(optimizer, ctx)


def _begin_sums(targets: Sequence[Arrays], lists: Sequence[Arrays]) -> list[bool]:
    """Prepare ``lists``, whose sums become ``targets``; return for each whether any rank adds one.

    Where a target is the gradients of a Parameter, the arrays of devices whose gradients do not
    count are set to zero, and the gradients are marked as sums, by which a Trainer updates all
    devices.
    """
    of_targets = [*map(gradients.of_grads, targets)]
    known = [grads for grads in of_targets if grads is not None]
    names, facts = [], {}
    for trainer in dict.fromkeys(private_fields.trainer(grads.param()) for grads in known):
        if trainer is not None and _is_ours(private_fields.kvstore(trainer)):
            optimizer, ctx = private_fields.optimizer(trainer), private_fields.contexts(trainer)
            _update_alike(optimizer, ctx, mx.optimizer.LBSGD)  # it has one array for all copies
            if trainer in _identities:
                names.append(_identities[trainer].name)
                facts.update(_identities[trainer].facts(rescale_grad=optimizer.rescale_grad))
    summands = gradients.summands(known, cluster.size(), ", ".join(names), facts)
    counting: dict[Any, tuple] = dict(zip(known, zip(*summands)))
    gradients.mark_summed(grads for grads, (_, on_some_rank) in counting.items() if on_some_rank)
    gradients.mark_used(grads for grads, (_, on_some_rank) in counting.items() if not on_some_rank)
    added, old = [], []
    for grads, data in zip(of_targets, lists):
        counts, is_added = counting.get(grads, ([], True))
        added.append(is_added)
        if is_added and len(data) == len(counts):
            old += [array for array, is_new in zip(data, counts) if not is_new]
    memory.zero(old)
    return added


def _summed(
    lists: Sequence[Arrays], targets: Sequence[Arrays]
) -> tuple[list[mx.nd.NDArray], list[bool]]:
    """Return the sum of each of ``lists``, for its target, as a new array; and if any rank adds."""
    exchange = collectives.exchange_of(lists)
    with autograd.pause():
        copies = [[array.copy() for array in data] for data in lists]
        added = _begin_sums(targets, copies)
        exchange.reduce(collectives.in_buckets(copies))
    return [total for total, *_ in copies], added


def _keys(key: Any) -> Sequence[Any]:
    return key if isinstance(key, (list, tuple)) else [key]


def _lists(key: Any, arrays: Any, name: str) -> list[Arrays]:
    """One list of arrays per key."""
    several = isinstance(key, (list, tuple))
    if several and len(key) != len(arrays):
        raise ValueError(f"{name} must hold one entry per key, got {len(arrays)} for keys {key}")
    of_keys = arrays if several else [arrays]
    return [[data] if isinstance(data, mx.nd.NDArray) else data for data in of_keys]
