"""What must be the same on all ranks of a job: a Trainer's parameters, options and initial values.

Only the order of calls says which gradients of the ranks belong together. So the Trainers of a job
are numbered in the order in which they are made, and each has a name of that number and its first
parameters' names. Its sums have this name, and if two ranks' next sums are of different Trainers,
an error names both. In each step the ranks also compare the values that the update depends on, and
which parameters the program has set.

A parameter whose shape is not known yet is initialised in the first forward pass, and any parameter
again with ``force_reinit``. It then gets rank 0's values at once, before they are used.
"""

from __future__ import annotations

import itertools
import re
import weakref
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import cluster
from gluonpar.collectives import Exchange, in_buckets
from gluonpar.runtime import private_fields, set_values

_numbers = itertools.count(1)
# Parameters whose initial values are rank 0's.
_alike: weakref.WeakSet[gluon.Parameter] = weakref.WeakSet()


class Identity:
    """What tells ``trainer`` from others; ``params`` are in the order in which they were given.

    In one process it has no name, and nothing is compared.
    """

    name = ""

    def __init__(self, trainer: gluon.Trainer, params: Sequence[gluon.Parameter]) -> None:
        self._named: list[tuple[weakref.ref, str]] = []
        if cluster.size() == 1:
            return
        self._trainer, names = weakref.ref(trainer), [*_names(params)]
        self._named = [*zip(map(weakref.ref, params), names)]
        more = f" and {len(params) - 3} more" if len(params) > 3 else ""
        self.name = f"Trainer {next(_numbers)} ({', '.join(names[:3])}{more})"
        self._has_compared = False
        self._num_set = [set_values.count(param) for param in params]

    def check(self, **options: Any) -> None:
        """Raise ValueError on all ranks if Trainers differ; the first call waits for all ranks."""
        if self.name and not self._has_compared:
            cluster.check_equal({**self._update(), **options, **self._shapes()})
            self._has_compared = True

    def facts(self, **facts: Any) -> dict[str, Any]:
        """Return these facts, and all others that ranks compare in a step before the sum."""
        if not self.name:
            return {}
        before, named = self._num_set, self._params()
        self._num_set = [set_values.count(param) for param, _ in named]
        pairs = zip(named, before, self._num_set)
        were_set = [name for (_, name), old, new in pairs if old != new]
        since = "values set by set_data or load_parameters since the last step"
        return {**self._update(), **facts, since: were_set}

    def _params(self) -> list[tuple[gluon.Parameter, str]]:
        return [(param(), name) for param, name in self._named]

    def _shapes(self) -> dict[str, Any]:
        """Return names, shapes and dtypes of the parameters, in their order."""
        return {
            f"parameter {i}": (name, param.shape, np.dtype(param.dtype).name)
            for i, (param, name) in enumerate(self._params())
        }

    def _update(self) -> dict[str, Any]:
        """Return the values that an update depends on."""
        optimizer = private_fields.optimizer(self._trainer())
        options = {
            name: value
            for name, value in {**vars(optimizer), "lr": optimizer.learning_rate}.items()
            if isinstance(value, (bool, int, float, str, type(None))) and name != "rescale_grad"
        }
        named = self._params()
        return {
            **{"optimizer": type(optimizer).__name__, **options},
            "grad_req": {name: p.grad_req for p, name in named if p.grad_req != "write"},
            "lr_mult": {name: p.lr_mult for p, name in named if p.lr_mult != 1},
            "wd_mult": {name: p.wd_mult for p, name in named if p.wd_mult != 1},
        }


def _names(params: Sequence[gluon.Parameter]) -> Iterator[str]:
    """Return the parameters' names; blocks without a parent are numbered from 0 in them.

    MXNet numbers such blocks, by class, in the order in which a process makes them, and ranks may
    have made others before.
    """
    parsed = [re.fullmatch("([a-z]+)([0-9]+)(_.*)", param.name) for param in params]
    first: dict[str, int] = {}
    classes = {kind.__name__.lower() for kind in _subclasses(gluon.Block)}
    for each in parsed:
        if each and each[1] in classes:
            first[each[1]] = min(int(each[2]), first.get(each[1], int(each[2])))
    for param, each in zip(params, parsed):
        if each and each[1] in first:
            yield f"{each[1]}{int(each[2]) - first[each[1]]}{each[3]}"
        else:
            yield param.name


def _subclasses(kind: type[Any]) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def start_alike(params: Sequence[gluon.Parameter]) -> None:
    """Give ``params`` rank 0's values, now and whenever they are initialised, on all devices.

    Random operators then draw other numbers on each rank. All ranks must call this, and initialise,
    with the same parameters in the same order.
    """
    if cluster.size() == 1:
        return
    dense = [param for param in params if private_fields.stype(param) == "default"]
    _alike.update(dense)
    lists = map(private_fields.values, dense)
    _broadcast([arrays for arrays in lists if arrays is not None])
    cluster.draw_apart(params[0].list_ctx() if params else ())


def _broadcast(lists: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    if lists:
        Exchange([array.context for array in lists[0]]).broadcast(in_buckets(lists))


@private_fields.around(private_fields.INITIALISES)
def _initialise(initialise: Callable, param: gluon.Parameter, *args: Any, **kwargs: Any) -> None:
    initialise(param, *args, **kwargs)
    if param in _alike:
        _broadcast([private_fields.values(param)])
