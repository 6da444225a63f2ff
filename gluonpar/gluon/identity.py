"""What must be the same of a Trainer on all ranks of a job; they compare it in each step.

Ranks find each other's gradients by the order of their calls alone. So each Trainer of a job has a
number, in the order in which they are made, and a name, that of its first parameters; its sums have
this name, and a rank that is at those of another Trainer gets an error that names both. With each
step the ranks also compare what the update depends on, and whose values the program has set.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar.runtime import private_fields

_numbers = itertools.count(1)
# Whose values set_data or load_parameters has changed since the last step of their Trainer.
_were_set: weakref.WeakSet[gluon.Parameter] = weakref.WeakSet()


class Identity:
    """Of ``trainer``, with ``params`` in the order in which the program gave them."""

    def __init__(self, trainer: gluon.Trainer, params: Sequence[gluon.Parameter]) -> None:
        self._trainer, names = weakref.ref(trainer), [*_names(params)]
        self._named = [*zip(map(weakref.ref, params), names)]
        more = f" and {len(params) - 3} more" if len(params) > 3 else ""
        self.name = f"Trainer {next(_numbers)} ({', '.join(names[:3])}{more})"
        self._has_compared = False
        are_alike(params)

    def kinds(self) -> dict[str, Any]:
        """Return names, shapes and dtypes of the parameters, in their order."""
        return {
            f"parameter {i}": (name, param.shape, np.dtype(param.dtype).name)
            for i, (param, name) in enumerate(self._params())
        }

    def update(self) -> dict[str, Any]:
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

    def facts(self, **facts: Any) -> dict[str, Any]:
        """Return these and all facts above, to be compared in a step before the sum."""
        if not self._has_compared:
            self._has_compared, facts = True, {**self.kinds(), **facts}
        were_set = [name for param, name in self._params() if param in _were_set]
        are_alike(param for param, _ in self._params())
        since = "values set by set_data or load_parameters since the last step"
        return {**self.update(), **facts, since: were_set}

    def _params(self) -> list[tuple[gluon.Parameter, str]]:
        return [(param(), name) for param, name in self._named]


def are_alike(params: Iterable[gluon.Parameter]) -> None:
    """Note that the values of ``params`` are the same on all ranks, or about to be compared."""
    _were_set.difference_update(params)


def _names(params: Sequence[gluon.Parameter]) -> Iterator[str]:
    """Return the parameters' names; those of blocks without a parent are numbered from 0.

    MXNet numbers such blocks, by class, in the order in which a process makes them, and ranks may
    have made others before.
    """
    classes = {kind.__name__.lower() for kind in _subclasses(gluon.Block)}
    parsed = [re.fullmatch("([a-z]+)([0-9]+)(_.*)", param.name) for param in params]
    first: dict[str, int] = {}
    for each in parsed:
        if each and each[1] in classes:
            first[each[1]] = min(int(each[2]), first.get(each[1], int(each[2])))
    for param, each in zip(params, parsed):
        is_counted = each and each[1] in first
        yield f"{each[1]}{int(each[2]) - first[each[1]]}{each[3]}" if is_counted else param.name


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _noting(set_data: Callable) -> Callable:
    """Note that a program has set the values of a parameter that had some."""

    @functools.wraps(set_data)
    def noted(param: gluon.Parameter, data: mx.nd.NDArray) -> None:
        if private_fields.values(param) is not None:
            _were_set.add(param)
        set_data(param, data)

    return noted


private_fields.wrap(private_fields.SETS_VALUES, _noting)
