"""kvstore='gluonpar': the stock gluon.Trainer, and Module, on gluonpar's collectives.

Importing this module makes the name known to ``mx.kv.create``, and so to
``gluon.Trainer(params, optimizer, kvstore='gluonpar')`` and ``Module.fit(kvstore='gluonpar')``.
The store keeps nothing: gradients are summed where they lie, and every device updates its own copy
of the parameters with its own optimizer state. (The reverse, MXNet's store as an all-reduce
algorithm, is ``gluonpar.collectives.algorithms.mxnet_kvstore``.)
"""

from __future__ import annotations

import sys
import types
from typing import Any, NoReturn, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import cluster, collectives
from gluonpar.collectives.host import reduction

# MXNet is retired, so this loop over all gradients stays as it is. Another's (a subclass with its
# own, a patched Trainer) is not recognised, and its calls are then taken one by one.
_STOCK_LOOP = gluon.Trainer._allreduce_grads.__code__


@mx.kvstore.KVStoreBase.register  # under the class's name in lower case
class GluonPar(mx.kvstore.KVStoreBase):
    """What a Trainer or Module asks of a store: copy parameters, sum gradients, both in place.

    For ``mx.nd`` and ``mx.np``, any number of contexts, dense arrays of any dtype that
    :func:`gluonpar.allreduce` takes. Everything is as asynchronous as any operator. A key is an
    int, a string or a list of those; it names nothing, because nothing is kept under it.
    ``priority`` is accepted and not used.

    It runs no optimizer, so ``update_on_kvstore`` is False, on purpose: gradients can be looked at
    between ``trainer.allreduce_grads()`` and ``trainer.update()``, and the optimizer's state is the
    Trainer's (``save_states``, ``load_states``) or the Module's.

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
        self._summed: dict[Any, tuple[list, list]] = {}  # what has passed the checks, by key

    @property
    def type(self) -> str:
        """'gluonpar'."""
        return "gluonpar"

    @property
    def rank(self) -> int:
        """This process's number among those that train together; 0 without MPI."""
        return cluster.rank()

    @property
    def num_workers(self) -> int:
        """Number of processes that train together; 1 without MPI."""
        return cluster.size()

    @staticmethod
    def is_capable(capability: str) -> bool:
        """False for 'optimizer'; ValueError for all else, as MXNet 1.9.1 asks for nothing else."""
        if capability.lower() != mx.kvstore.KVStoreBase.OPTIMIZER:
            raise ValueError(f"capability={capability!r} is unknown; MXNet has only 'optimizer'")
        return False

    def init(self, key: Any, value: Any) -> None:
        """Nothing: Module calls it to have its parameters kept, after it has copied them itself."""

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy array ``value`` to every array of ``out``; for a list of keys, one of each a key.

        With several processes it is rank 0's, to those of all of them, and ``value`` becomes it.
        ``value`` may be one of ``out``. Raises ValueError for arrays of different shapes, dtypes or
        storage types.
        """
        for (root,), arrays in zip(_lists(key, value, "value"), _lists(key, out, "out")):
            cluster.broadcast([root])
            places = [i for i, array in enumerate(arrays) if array is root]
            if places:
                collectives.broadcast(arrays, places[0])
            else:
                collectives.broadcast([root, *arrays])

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Replace every array of ``value``, one a device, by the sum of all of them.

        With ``out``, an array or a list, ``value`` stays and every array of ``out`` becomes the
        sum. For a list of keys ``value`` holds a list of arrays a key, and so does ``out``. With
        several processes the sum is over the devices of all.

        The stock Trainer calls this for one parameter after the other. The call for the first
        sums the gradients of all of them, in one operator on the host or in few messages between
        GPUs, and the other calls find theirs summed: for the eight parameters of a small network
        eight operators would cost as much as the sums. Any other caller gets what it asks for.

        Raises ValueError for arrays of different shapes or dtypes, and for sparse ones.
        """
        params = _looped_over(sys._getframe(1))
        if params is not None:
            in_use = (i for i, param in enumerate(params) if param.grad_req != "null")
            if key == next(in_use):
                self._sum(key, [p.list_grad() for p in params if p.grad_req != "null"])
        elif out is None:
            self._sum(_hashable(key), _lists(key, value, "value"))
        else:
            for data, targets in zip(_lists(key, value, "value"), _lists(key, out, "out")):
                _sum_into(data, targets)

    def _sum(self, key: Any, lists: Sequence[Sequence[mx.nd.NDArray]]) -> None:
        """In place. Checking the arrays costs as much as a small sum, so it is done once."""
        ids = [[id(array) for array in data] for data in lists]
        checked, kept = self._summed.get(key, (None, None))
        if ids == checked:
            reduction.allreduce(kept)
            _sum_over_processes(kept)
            return
        collectives.allreduce_many(lists)
        _sum_over_processes(lists)
        self._summed.pop(key, None)
        if len(lists[0]) > 1 and all(data[0].size for data in lists):
            if collectives.explain(lists[0]).algorithm == "host":
                kept = [list(data) for data in lists]  # so nothing else can get one of the ids
                self._summed[key] = ids, kept

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> NoReturn:
        """ValueError: every device updates its own copy."""
        name = type(optimizer).__name__
        raise ValueError(
            f"kvstore 'gluonpar' runs no optimizer ({name}): every device updates its own copy of "
            "the parameters; pass update_on_kvstore=False, or kvstore='device'"
        )

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> NoReturn:
        """ValueError: the state is not here."""
        raise _no_states(fname, "save")

    def load_optimizer_states(self, fname: str) -> NoReturn:
        """ValueError: the state is not here."""
        raise _no_states(fname, "load")

    def set_gradient_compression(self, compression_params: dict) -> NoReturn:
        """ValueError: the sums are exact."""
        raise ValueError(
            f"kvstore 'gluonpar' does not compress gradients ({compression_params}); leave "
            "compression_params out, or use kvstore='device', which does on GPUs"
        )

    def push(self, key: Any, value: Any, priority: int = 0) -> NoReturn:
        """ValueError: MXNet pushes and pulls only what is sparse."""
        raise _no_store(key)

    def pull(self, key: Any, out: Any = None, priority: int = 0, **_: Any) -> NoReturn:
        """ValueError: MXNet pushes and pulls only what is sparse."""
        raise _no_store(key)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, **_: Any) -> NoReturn:
        """ValueError: MXNet pulls rows only of sparse parameters."""
        raise _no_store(key)


def _looped_over(frame: types.FrameType) -> list[gluon.Parameter] | None:
    """The parameters of the stock Trainer whose loop the frame is, or None for another frame."""
    return frame.f_locals["self"]._params if frame.f_code is _STOCK_LOOP else None


def _lists(key: Any, arrays: Any, name: str) -> list[Sequence[mx.nd.NDArray]]:
    """One list of arrays a key."""
    of_keys = arrays if isinstance(key, (list, tuple)) else [arrays]
    if isinstance(key, (list, tuple)) and len(key) != len(arrays):
        raise ValueError(f"{len(key)} keys {key}, but {name} holds {len(arrays)}; give one a key")
    return [[data] if isinstance(data, mx.nd.NDArray) else data for data in of_keys]


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _sum_over_processes(lists: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """What is the sum over this process's devices becomes that over all, in one message."""
    if cluster.size() > 1:
        cluster.allreduce([data[0] for data in lists])
        collectives.broadcast_many(lists)


def _sum_into(data: Sequence[mx.nd.NDArray], targets: Sequence[mx.nd.NDArray]) -> None:
    """Every target becomes the sum of ``data``, which may be some of them; ``data`` else stays."""
    with autograd.pause():
        copies = [array.copy() for array in data]
        collectives.reduce(copies)
        cluster.allreduce(copies[:1])
        for target in targets:
            copies[0].copyto(target)


def _no_states(fname: str, verb: str) -> ValueError:
    return ValueError(
        f"kvstore 'gluonpar' has no optimizer state for {fname!r}, the Trainer or Module has it: "
        f"trainer.{verb}_states, or module.{verb}_optimizer_states"
    )


def _no_store(key: Any) -> ValueError:
    return ValueError(
        f"kvstore 'gluonpar' keeps no value of key {key!r} to push to or pull from; sum with "
        "pushpull, and train row_sparse parameters or gradients with kvstore='device'"
    )
