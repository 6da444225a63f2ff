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

import collections
import gc
import itertools
import re
import weakref
from typing import Any, Callable, Iterator, Sequence

import numpy as np
from mxnet import gluon

from gluonpar import cluster
from gluonpar.cluster import Facts
from gluonpar.collectives import Exchange, in_buckets
from gluonpar.runtime import private_fields, set_values, used_numbers

_numbers = itertools.count(1)
# Parameters whose initial values are rank 0's, and their names in errors.
_alike: weakref.WeakKeyDictionary[gluon.Parameter, str] = weakref.WeakKeyDictionary()


class Identity:
    """What tells ``trainer`` from others; ``params`` are in the order in which they were given.

    In one process it has no name, and nothing is compared.
    """

    name = ""

    def __init__(self, trainer: gluon.Trainer, params: Sequence[gluon.Parameter]) -> None:
        if cluster.size() == 1:
            return
        self._trainer = weakref.ref(trainer)
        self._names = dict(zip(params, _names(params)))
        more = f" and {len(params) - 3} more" if len(params) > 3 else ""
        self.name = f"Trainer {next(_numbers)} ({', '.join([*self._names.values()][:3])}{more})"
        self._has_compared, self._num_set = False, [*map(set_values.count, params)]

    def check(self, **options: Any) -> None:
        """Raise ValueError on all ranks if Trainers differ; the first call waits for all ranks."""
        if self.name and not self._has_compared:
            cluster.check_equal({**self.facts(), **options, **self._shapes()})
            self._has_compared = True

    def _shapes(self) -> Facts:
        """Return names, shapes and dtypes of the parameters, in their order."""
        named = enumerate(self._names.items())
        return {
            f"parameter {i}": (name, param.shape, np.dtype(param.dtype).name)
            for i, (param, name) in named
        }

    def facts(self, **facts: Any) -> Facts:
        """Return these facts, and others that ranks compare in a step before the sum."""
        if not self.name:
            return {}
        named = self._names.items()
        reqs = {name: param.grad_req for param, name in named if param.grad_req != "write"}
        optimizer = type(private_fields.optimizer(self._trainer())).__name__
        return {"optimizer": optimizer, "grad_req": reqs, **facts}

    def arrays(self) -> dict[str, Any]:
        """Return what ranks must hold alike, and whether the program has set some since last time.

        These are arguments of :func:`gluonpar.cluster.check_equal_async`. Running statistics are
        not among them, as each rank has its own.
        """
        if not self.name:
            return {}
        before, self._num_set = self._num_set, [*map(set_values.count, self._names)]
        named = self._names.items()
        alike = [(name, param) for param, name in named if private_fields.differentiable(param)]
        arrays = {f"value of {name}": private_fields.values(param)[0] for name, param in alike}
        return {"arrays": arrays, "has_changed": self._num_set != before}

    def note(self, params: Sequence[gluon.Parameter], used: used_numbers.Numbers) -> None:
        """Have ranks compare, when they meet next, the numbers by which ``params`` were updated."""
        by_name: dict[str, list] = {}
        for name, value in used:
            is_list = isinstance(value, (list, tuple))
            values = by_name.setdefault(name.rstrip("s") if is_list else name, [])
            values.extend(value if is_list else [value])
        facts: Facts = {}
        for name, values in by_name.items():
            if len(values) != len(params):  # they are of all of these parameters
                different = [*dict.fromkeys(values)]
                values = [different[0] if len(different) == 1 else different] * len(params)
            pairs = zip(params, values)
            facts.update((f"{name} of {self._names[param]}", value) for param, value in pairs)
        cluster.note(facts)


def _names(params: Sequence[gluon.Parameter]) -> Iterator[str]:
    """Return the parameters' names; blocks that MXNet has numbered have other numbers in them.

    MXNet numbers a block without a prefix of its own, and without a parent, by the blocks that this
    process has made before, which may be others on each rank. Here a block's number is its position
    among the numbered blocks of the network, the smallest block that has all of ``params``.
    """
    blocks = [one for one in gc.get_objects() if issubclass(type(one), gluon.Block)]
    numbered: dict[str, tuple[str, int]] = {}  # by prefix
    for block in blocks:
        alias = private_fields.alias(block)
        match = re.fullmatch(rf"{re.escape(alias)}([0-9]+)_", block.prefix)
        if match:
            numbered[block.prefix] = alias, int(match[1])

    def prefix_of(name: str) -> str:
        parts = name.split("_")
        prefixes = ("_".join(parts[:i]) + "_" for i in range(1, len(parts)))
        return next(filter(numbered.__contains__, prefixes), "")

    all_of = [{*private_fields.params_by_place(block).values()} for block in blocks]
    networks = [network for network in all_of if network.issuperset(params)]
    network = min(networks, key=len, default={*params})
    prefixes = {prefix_of(param.name) for param in network} - {""}
    positions: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    new = {}
    for prefix in sorted(prefixes, key=numbered.__getitem__):
        alias, _ = numbered[prefix]
        new[prefix] = f"{alias}{next(positions[alias])}_"
    for param in params:
        prefix = prefix_of(param.name)
        yield new.get(prefix, "") + param.name[len(prefix) :]


def start_alike(params: Sequence[gluon.Parameter]) -> None:
    """Give ``params`` rank 0's values, now and whenever they are initialised, on all devices.

    Random operators then draw other numbers on each rank. All ranks must call this, and initialise,
    with the same parameters in the same order.
    """
    if cluster.size() == 1:
        return
    dense = [param for param in params if private_fields.stype(param) == "default"]
    _alike.update(zip(dense, _names(dense)))
    _broadcast([param for param in dense if private_fields.values(param) is not None])
    cluster.draw_apart(params[0].list_ctx() if params else ())


def _broadcast(params: Sequence[gluon.Parameter]) -> None:
    if params:
        lists, of = [*map(private_fields.values, params)], [*map(_alike.__getitem__, params)]
        Exchange([array.context for array in lists[0]]).broadcast(in_buckets(lists), of=of)


@private_fields.around(private_fields.INITIALISES)
def _initialise(initialise: Callable, param: gluon.Parameter, *args: Any, **kwargs: Any) -> None:
    initialise(param, *args, **kwargs)
    if param in _alike:
        _broadcast([param])
