"""Keeps alike on all ranks of a job: a Trainer's parameters, options and initial values.

Only the order of calls says which gradients of the ranks belong together. So the Trainers of a job
are numbered in the order in which they are made, and named by the number and their first
parameters. A Trainer's sums have its name, and if two ranks' next sums are of different Trainers,
an error names both. Ranks also compare what an update used, and values that programs have set.

A parameter whose shape is not known yet is initialised in the first forward pass, and any parameter
again with ``force_reinit``. It then gets rank 0's values at once, before they are used.
"""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from types import MappingProxyType
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
from mxnet import gluon

from gluonpar import cluster
from gluonpar.runtime import private_fields, used_numbers

_numbers = itertools.count(1)
# The parameters whose initial values come from rank 0, and their names in errors.
_alike: weakref.WeakKeyDictionary[gluon.Parameter, str] = weakref.WeakKeyDictionary()


class Identity:
    """Identifies a Trainer on all ranks, by its ``params``, in the order as given, and options.

    In one process it has no name, and nothing is compared.
    """

    name = ""
    names: Mapping[gluon.Parameter, str] = MappingProxyType({})

    def __init__(self, params: Sequence[gluon.Parameter], **options: Any) -> None:
        if cluster.size() == 1:
            return
        self.names = names(params)
        more = f" and {len(params) - 3} more" if len(params) > 3 else ""
        self.name = f"Trainer {next(_numbers)} ({', '.join([*self.names.values()][:3])}{more})"
        alike = filter(private_fields.differentiable, params)
        self._alike = [(f"value of {self.names[param]}", param) for param in alike]
        self._options, self._has_compared = options, False
        self._num_set = [*map(private_fields.times_set, params)]

    def check(self) -> None:
        """Raise ValueError on all ranks if Trainers differ; the first call waits for all ranks."""
        if self.name and not self._has_compared:
            kinds = [(name, p.shape, np.dtype(p.dtype).name) for p, name in self.names.items()]
            of_params = {f"parameter {i}": kind for i, kind in enumerate(kinds)}
            cluster.check_equal({**self._options, **of_params})
            self._has_compared = True

    def compared(self, **facts: Any) -> dict[str, Any]:
        """Return what ranks compare before a sum, for :func:`gluonpar.cluster.check_equal_async`.

        They compare these facts and which parameters are frozen; if the program has set some since
        the last call, also values. Each rank has running statistics of its own.
        """
        if not self.name:
            return {}
        before, self._num_set = self._num_set, [*map(private_fields.times_set, self.names)]
        named = self.names.items()
        reqs = {name: param.grad_req for param, name in named if param.grad_req != "write"}
        arrays = {name: private_fields.values(param)[0] for name, param in self._alike}
        has_changed = self._num_set != before
        return {"facts": {"grad_req": reqs, **facts}, "arrays": arrays, "has_changed": has_changed}

    def note(self, updated: Iterable[gluon.Parameter], used: used_numbers.Calls) -> None:
        """Have ranks compare, when they meet next, the numbers by which parameters were updated."""
        named = [*map(self.names.__getitem__, updated)]
        cluster.note(zip(named, used_numbers.by_array(used, len(named))))


def names(params: Sequence[gluon.Parameter]) -> dict[gluon.Parameter, str]:
    """Return the parameters' names, with a number of ours for each block that MXNet has numbered.

    MXNet numbers a block without a prefix of its own, and without a parent, by the blocks that this
    process has made before, which may differ between ranks. Here a block's number is its position
    among the numbered blocks of the network, the smallest block that has all of ``params``.
    """
    blocks = [one for one in gc.get_objects() if issubclass(type(one), gluon.Block)]
    all_of = [{*private_fields.params_by_place(block).values()} for block in blocks]
    network = min(filter({*params}.issubset, all_of), key=len, default={*params})
    numbered = set()
    for block in blocks:
        alias, prefix = private_fields.alias(block), block.prefix
        match = re.fullmatch(rf"{re.escape(alias)}([0-9]+)_", prefix)
        if match and any(param.name.startswith(prefix) for param in network):
            numbered.add((alias, int(match[1]), prefix))
    new = {"": ""}
    for alias, entries in itertools.groupby(sorted(numbered), lambda entry: entry[0]):
        new.update((prefix, f"{alias}{i}_") for i, (*_, prefix) in enumerate(entries))
    prefixes = {param: max(filter(param.name.startswith, new), key=len) for param in params}
    return {param: new[old] + param.name[len(old) :] for param, old in prefixes.items()}


def start_alike(
    params: Sequence[gluon.Parameter], named: Mapping[gluon.Parameter, str] | None = None
) -> None:
    """Give ``params`` rank 0's values, now and whenever they are initialised, on all devices.

    From then on random operators draw other numbers on each rank. All ranks must call this, and
    initialise, with the same parameters in the same order. Errors name them by ``named``, a result
    of :func:`names`.
    """
    if cluster.size() == 1:
        return
    named = named or names(params)
    dense = [param for param in params if private_fields.stype(param) == "default"]
    _alike.update((param, named[param]) for param in dense)
    _broadcast([param for param in dense if private_fields.values(param) is not None])
    cluster.draw_apart(params[0].list_ctx() if params else ())


def _broadcast(params: Sequence[gluon.Parameter]) -> None:
    for param in params:
        first, *others = private_fields.values(param)
        cluster.broadcast([first], of=[_alike[param]])
        for copy in others:
            first.copyto(copy)


@private_fields.around(private_fields.INITIALISES)
def _initialise(initialise: Callable, param: gluon.Parameter, *args: Any, **kwargs: Any) -> None:
    initialise(param, *args, **kwargs)
    if param in _alike:
        _broadcast([param])
