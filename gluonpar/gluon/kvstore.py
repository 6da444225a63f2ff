"""kvstore='gluonpar': gluonpar's collectives for loops of one's own, and for MXNet's other code.

Importing this module registers the name for ``mx.kv.create``. A ``gluon.Trainer`` of this store is
a :class:`gluonpar.Trainer`; for ``Module.fit(kvstore='gluonpar')`` see
:mod:`gluonpar.adapters.module`.
"""

from __future__ import annotations

import itertools
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar import cluster, collectives, gradients
from gluonpar.runtime import heap, interrupts, memory

Arrays = Sequence[mx.nd.NDArray]  # a key's arrays, one per device


@mx.kvstore.KVStoreBase.register  # under the class's name in lower case
class GluonPar(mx.kvstore.KVStore):  # MXNet takes no other class for sparse gradients
    """The store: copies parameters and sums gradients over devices, both in place.

    It takes the arrays that :func:`gluonpar.allreduce` takes, and nothing waits. A key is an int, a
    string or a list of these. :meth:`init` and :meth:`push` store a value under it, which
    :meth:`pull` copies. ``priority`` is not used.

    The store runs no optimizer: ``update_on_kvstore`` is False. A ``gluon.Trainer`` of this store
    is a :class:`gluonpar.Trainer`, also in a subclass.

    >>> import mxnet as mx
    >>> store = mx.kv.create("gluonpar")
    >>> grads = [mx.nd.array([1, 2], ctx=mx.cpu(0)), mx.nd.array([10, 20], ctx=mx.cpu(1))]
    >>> store.pushpull("weight", grads)
    >>> [grad.asnumpy().tolist() for grad in grads]
    [[11.0, 22.0], [11.0, 22.0]]
    """

    def __init__(self) -> None:
        self._values: dict[Any, mx.nd.NDArray] = {}  # by key
        self._cluster_scope = cluster.scope()

    def __del__(self) -> None:
        """Free nothing: no store of MXNet is behind this one."""

    @property
    def type(self) -> str:
        """The name 'gluonpar', or 'dist_sync_gluonpar' with several processes.

        From 'dist' and '_sync' Module concludes that a batch has the samples of all processes.
        """
        return "gluonpar" if self.num_workers == 1 else "dist_sync_gluonpar"

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
        """Store the array ``value`` under ``key``; with a list of keys, one array per key.

        With several processes, rank 0's value is first copied to ``value`` of all processes.
        """
        for name, (array,) in zip(_keys(key), _lists(key, value, "value")):
            if self.num_workers > 1:
                self.broadcast(name, array, array)
            self._values[name] = array.copy()

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
        nothing, and also gets the sum.

        Raises ValueError for arrays of different shapes or dtypes, and for an array under two keys.
        Give row_sparse arrays to :meth:`push`.
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
        heap.end_step(summands)
        exchange.allreduce(collectives.in_buckets(summands))

    @cluster.in_scope
    @interrupts.held()
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Store the sum of the arrays ``value``, one per device, under ``key``.

        With a list of keys, ``value`` has one list of arrays per key, all on the same contexts.
        With several processes the sum is over the devices of all. This is for row_sparse gradients;
        sum dense ones with :meth:`pushpull`, which copies nothing.
        """
        lists = _lists(key, value, "value")
        if lists:
            self._values.update(zip(_keys(key), _summed(lists, lists)[0]))

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Copy the value that was last stored under ``key`` to every array of ``out``.

        ``ignore_sparse`` is not used. Raises KeyError if nothing has been stored.
        """
        for name, targets in zip(_keys(key), _lists(key, out, "out")):
            for target in targets:
                self._values[name].copyto(target)

    def __getattr__(self, name: str) -> Any:
        """Refuse MXNet's other methods: they use attributes of a store that is not there."""
        raise AttributeError(
            f"kvstore 'gluonpar' has no {name}: it adds and copies arrays, and has no optimizer, "
            "no optimizer states and no compression of MXNet's. Pass update_on_kvstore=False; for "
            "gradients in float16, gluonpar.Trainer has compression='fp16'"
        )


def _refuse(name: str) -> property:
    return property(lambda store: store.__getattr__(name))


for _name in {*vars(mx.kvstore.KVStore)} - {*vars(GluonPar), *vars(object), "__dict__"}:
    if callable(vars(mx.kvstore.KVStore)[_name]):
        setattr(GluonPar, _name, _refuse(_name))


def is_ours(kvstore: Any) -> bool:
    """Return whether it is this store, or its name."""
    named = isinstance(kvstore, str) and kvstore.lower() == "gluonpar"
    return named or isinstance(kvstore, GluonPar)


def _begin_sums(targets: Sequence[Arrays], lists: Sequence[Arrays]) -> list[bool]:
    """Prepare ``lists``, whose sums become ``targets``; return for each if any rank adds an array.

    Where a target is a Parameter's gradients, the arrays of devices whose gradients do not count
    are set to zero, and the gradients are marked as sums, by which a Trainer updates all devices.
    """
    of_targets = [*map(gradients.of_grads, targets)]
    known = [grads for grads in of_targets if grads is not None]
    summands = gradients.summands(known, cluster.size(), "a kvstore")
    counting: dict[Any, tuple] = dict(zip(known, zip(*summands)))
    gradients.mark_summed(known, on_some_rank=summands[1])
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
    """Return each list's sum, as a new array, and the result of ``_begin_sums``."""
    exchange = collectives.exchange_of(lists)
    with autograd.pause():
        copies = [[array.copy() for array in data] for data in lists]
        added = _begin_sums(targets, copies)
        exchange.reduce(collectives.in_buckets(copies))
    return [total for total, *_ in copies], added


def _keys(key: Any) -> Sequence[Any]:
    return key if isinstance(key, (list, tuple)) else [key]


def _lists(key: Any, arrays: Any, name: str) -> list[Arrays]:
    """Return one list of arrays per key."""
    several = isinstance(key, (list, tuple))
    if several and len(key) != len(arrays):
        raise ValueError(f"{name} must hold one entry per key, got {len(arrays)} for keys {key}")
    of_keys = arrays if several else [arrays]
    return [[data] if isinstance(data, mx.nd.NDArray) else data for data in of_keys]
