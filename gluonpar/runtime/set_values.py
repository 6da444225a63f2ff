"""How often a program has set a Parameter's values: what was made of the former ones is old then.

``set_data`` sets them, and so do ``load_parameters`` and ``load_checkpoint``.
"""

from __future__ import annotations

import weakref
from typing import Callable, Iterable

import mxnet as mx
from mxnet import gluon

from gluonpar.runtime import private_fields

_counts: weakref.WeakKeyDictionary[gluon.Parameter, int] = weakref.WeakKeyDictionary()


def count(param: gluon.Parameter | None) -> int:
    """Return how often the program has set the values, first ones excluded."""
    return 0 if param is None else _counts.get(param, 0)


def note(params: Iterable[gluon.Parameter]) -> None:
    """Note that the program has set the values of ``params``."""
    for param in params:
        _counts[param] = count(param) + 1


@private_fields.around(private_fields.SETS_VALUES)
def _set_data(set_data: Callable, param: gluon.Parameter, data: mx.nd.NDArray) -> None:
    if private_fields.values(param) is not None:
        note([param])
    set_data(param, data)
