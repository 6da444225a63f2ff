"""The optimizer's section of a checkpoint, and files of this section alone (``save_states``).

The section has the optimizer's attributes, which include its learning-rate schedule, and each
parameter's states. If all are plain values (:mod:`~gluonpar.checkpoint.npz_file`), as in MXNet's
optimizers, they are saved as such. Otherwise the section has a pickle of optimizer and states.

**Security**: loading a pickle can run any code that is in it. gluonpar loads one only in this
module, and only if the caller says that the file is ``trusted``. Pickles that MXNet's Trainer wrote
for its own optimizers are read without running anything (:mod:`~gluonpar.checkpoint.stock_states`).

As when ``gluon.Trainer`` loads states, the saved attributes replace the optimizer's present ones.
Before anything changes, the optimizer's class and the names and shapes of the parameters are
checked.
"""

from __future__ import annotations

import copy
import json
import operator
import os
import pickle  # noqa: TID251 - see the docstring
import warnings
from typing import Any, Callable, List, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.lr_scheduler import LRScheduler
from mxnet.optimizer import Updater

from gluonpar.checkpoint import files, npz_file, stock_states
from gluonpar.checkpoint.npz_file import NotPlainError, decode, encode
from gluonpar.runtime import private_fields

PLAIN_FORMAT, PICKLE_FORMAT = 2, 3
_PICKLE = b"\x80"  # every pickle of protocol 2 or later starts with it
# Attributes that keep their present values: the parameters; how many of them MXNet updates in one
# operator, which reads past the end of its arrays if the number is too large; and the dicts of the
# numbers of updates, which all devices share.
_COUNTS = "_index_update_count"
_OWN = ("param_dict", "aggregate_num", "_all_index_update_counts", _COUNTS)

# The name, index in the updater, and Parameter of each, in the order in which they were given.
NamedParams = List[Tuple[str, int, gluon.Parameter]]


def save(path: str | os.PathLike, updater: Updater, params: NamedParams) -> None:
    """Write the states of ``updater``, which updates ``params``, whole or not at all.

    Waits for the arrays. Raises OSError if the file system refuses, ValueError for an optimizer
    that is not plain and cannot be pickled.
    """
    npz_file.write(path, Section(updater, params).describe())


def load(
    path: str | os.PathLike,
    updater: Updater,
    params: NamedParams,
    trusted: bool = False,
    keep_schedule: bool = False,
) -> None:
    """Restore a file of :func:`save` for the same optimizer and parameters.

    With ``keep_schedule`` the schedule of ``updater`` goes on, or its learning rate if it has no
    schedule. Otherwise the saved one goes on, with a UserWarning if the two differ.

    Raises ValueError, and changes nothing, if the file is missing or damaged, or is not ``trusted``
    and has a pickle of anything but MXNet's own optimizers and schedules.
    """
    content, section = files.read(path), Section(updater, params)
    with files.loading(path):
        if content.startswith(_PICKLE):  # MXNet's Trainer wrote it, without names and shapes
            header = {"format": PICKLE_FORMAT, "params": section.params, "pickle": 0}
            section.check(header, {0: content}, trusted)
        else:
            section.check(*npz_file.read(content), trusted)
    section.apply(keep_schedule)


class Section:
    """The optimizer's section of a file: written from ``updater``, or checked and restored to it.

    ``updater`` updates ``params``. The section has the name, shape and index of each.
    """

    def __init__(self, updater: Updater, params: NamedParams) -> None:
        self.params = [[name, _shape(param), i] for name, i, param in params]
        self._updater, self._optimizer = updater, updater.optimizer
        self._ctx = params[0][2].list_ctx()[0] if params else mx.cpu()

    def describe(self) -> dict[str, Any]:
        """Return the section as :func:`npz_file.write` takes it."""
        optimizer, names = self._optimizer, {i: name for name, _, i in self.params}
        counts = [*private_fields.update_counts(optimizer).items()]
        section: dict[str, Any] = {"params": self.params, "counts": counts}
        seen: set[int] = set()
        try:
            section["optimizer"] = _encode_object(optimizer, "optimizer", seen)
            section["states"] = [
                [i, encode(state, f"state of {names.get(i, i)}", seen)]
                for i, state in self._updater.states.items()
            ]
            return {"format": PLAIN_FORMAT, **section}
        except NotPlainError as error:
            reason = str(error)
        try:
            content = pickle.dumps((self._updater.states, optimizer))
        except Exception as error:  # any, from a class of the program
            raise ValueError(
                f"{reason}, which cannot be saved ({error}); leave it out in __getstate__, and "
                "make it again in __setstate__"
            ) from error
        warnings.warn(
            f"{reason}: the optimizer is saved as a pickle, and loaded only with trusted=True",
            stacklevel=4,
        )
        pickled = np.frombuffer(content, "uint8")
        return {"format": PICKLE_FORMAT, "params": self.params, "pickle": pickled}

    def check(self, section: dict, arrays: dict, trusted: bool) -> None:
        """Read what :meth:`describe` returned, for :meth:`apply`.

        Removes its arrays from ``arrays``. Raises ValueError unless it fits the optimizer and the
        parameters, and any exception for a section that :meth:`describe` has not made.
        """
        index = _indices(section["params"], self.params)
        kind, saved, states = self._read(section, arrays, trusted)
        optimizer, here = self._optimizer, type(self._optimizer).__name__
        if kind != here:
            raise ValueError(f"it is of optimizer {kind}, but this one is {here}")
        unknown = {*saved[_COUNTS], *states} - index.keys()
        if unknown:
            raise ValueError(f"it has states of parameters that are not there: {sorted(unknown)}")
        if any(old != new for old, new in index.items()):
            if not is_of_mxnet(optimizer):
                raise ValueError(
                    f"its parameters were in another order, and which values of {here} belong to "
                    "which parameter is not known; give the parameters names that sort in the same "
                    "order, by a name scope"
                )
            for name, value in saved.items():
                if isinstance(value, dict):  # in MXNet's optimizers integer keys are indices
                    saved[name] = {index.get(key, key): part for key, part in value.items()}
        self._saved, self._states = saved, {index[i]: state for i, state in states.items()}
        there = saved["lr_scheduler"], saved["num_update"]
        self._difference = _difference(optimizer.lr_scheduler, optimizer.num_update, *there)

    def _read(self, section: dict, arrays: dict, trusted: bool) -> tuple[str, dict, dict]:
        """Return the optimizer's class, its attributes, and the states by the file's index."""
        if section["format"] != PLAIN_FORMAT:
            content = arrays.pop(section["pickle"])
            if not trusted:
                return stock_states.read(content)
            states, optimizer = pickle.loads(content)  # noqa: S301
            return type(optimizer).__name__, vars(optimizer), states
        kind, parts = section["optimizer"]["object"]
        saved = _decode_parts(parts, arrays, self._ctx, type(self._optimizer.lr_scheduler))
        saved[_COUNTS] = dict(section["counts"])
        # MXNet's Updater moves MXNet's states to the device that updates the parameter.
        ctx = mx.cpu() if is_of_mxnet(self._optimizer) else self._ctx
        return kind, saved, {i: decode(state, arrays, ctx) for i, state in section["states"]}

    def apply(self, keep_schedule: bool) -> None:
        """Restore what :meth:`check` has read; ``keep_schedule`` is that of :func:`load`."""
        optimizer, saved, own = self._optimizer, self._saved, {*_OWN}
        schedule = optimizer.lr_scheduler
        if self._difference and not keep_schedule:
            warnings.warn(
                "the saved learning-rate schedule goes on, which differs from the Trainer's own: "
                f"{self._difference}. To go on with the Trainer's own, pass keep_schedule=True",
                stacklevel=3,
            )
        if keep_schedule:
            own |= {"lr_scheduler", "lr"}
            if schedule is not None:
                _call(schedule, optimizer.num_update, saved["num_update"])
        elif type(schedule) is type(saved["lr_scheduler"]) and hasattr(schedule, "__dict__"):
            schedule.__dict__ = vars(saved["lr_scheduler"])  # other Trainers may have this object
            own.add("lr_scheduler")
        counts = private_fields.update_counts(optimizer)
        counts.clear()
        counts.update(saved[_COUNTS])
        optimizer.__dict__ = {**saved, **{name: vars(optimizer)[name] for name in own}}
        self._updater.states = self._states
        self._updater.states_synced = dict.fromkeys(self._states, False)


def _encode_object(value: Any, place: str, seen: set[int]) -> dict[str, Any]:
    """Return class and attributes of an optimizer or a schedule, or raise NotPlainError."""
    encoded = {}
    for name, part in sorted(vars(value).items()):
        if name == "lr_scheduler" and isinstance(part, LRScheduler):
            encoded[name] = _encode_object(part, f"{place}.{name}", seen)
        elif name not in _OWN:
            encoded[name] = encode(part, f"{place}.{name}", seen)
    return {"object": [type(value).__name__, encoded]}


def _decode_parts(
    parts: dict[str, Any], arrays: dict[int, np.ndarray], ctx: mx.Context, here: type
) -> dict[str, Any]:
    """Return an object's attributes. A schedule's class is ``here``, or one of MXNet's."""
    saved: dict[str, Any] = {}
    for name, value in parts.items():
        if name == "lr_scheduler" and value is not None:
            kind, of_schedule = value["object"]
            schedule = here if here.__name__ == kind else getattr(mx.lr_scheduler, kind)
            saved[name] = object.__new__(schedule)
            vars(saved[name]).update(_decode_parts(of_schedule, arrays, ctx, here))
        else:
            saved[name] = decode(value, arrays, ctx)
    return saved


def _difference(here: Any, num_here: int, there: Any, num_there: int) -> str:
    """Return how two schedules differ, or "" if they do not, after the same number of updates."""
    if here is None or type(here) is not type(there):
        names = [type(each).__name__ if each else "none" for each in (there, here)]
        return "" if here is there else "{}, here {}".format(*names)
    encode = json.JSONEncoder(default=lambda part: getattr(part, "__dict__", repr(part))).encode
    attributes = []
    for schedule, number in ((here, num_here), (there, num_there)):
        schedule = copy.deepcopy(schedule)
        _call(schedule, number, max(num_here, num_there))
        attributes.append({name: encode(value) for name, value in vars(schedule).items()})
    own, saved = attributes
    different = [name for name in {**saved, **own} if saved.get(name) != own.get(name)]
    return ", ".join(f"{name} is {saved.get(name)}, here {own.get(name)}" for name in different)


def _call(schedule: Callable, first: int, last: int) -> None:
    """Call ``schedule`` for these updates, as training does, because each call may change it."""
    for number in range(first, last + 1):
        schedule(number)


def is_of_mxnet(optimizer: mx.optimizer.Optimizer) -> bool:
    """Return whether the optimizer's class is one of MXNet's, whose states are known."""
    return type(optimizer).__module__.startswith("mxnet.")


def _indices(saved: list, here: list) -> dict[int, int]:
    """Return the index here of each index in the file.

    Parameters are matched by name if all names are the same, otherwise by their order.
    """
    if len(saved) != len(here):
        raise ValueError(f"it is for {len(saved)} parameters, but there are {len(here)}")
    name = operator.itemgetter(0)
    if sorted(map(name, saved)) == sorted(map(name, here)):
        saved, here = sorted(saved, key=name), sorted(here, key=name)
    for (saved_name, saved_shape, _), (own_name, shape, _) in zip(saved, here):
        if not _fits(saved_shape, shape):
            raise ValueError(
                f"it is for other parameters: {saved_name} {saved_shape} in the file, but "
                f"{own_name} {shape} here"
            )
    return {old: new for (*_, old), (*_, new) in zip(saved, here)}


def _shape(param: gluon.Parameter) -> list[int] | None:
    """Return what is known of the shape: None, or a list with 0 or -1 for an unknown length."""
    copies = private_fields.values(param)  # a SymbolBlock's parameter may not know its own shape
    shape = copies[0].shape if copies else param.shape
    return None if shape is None else list(shape)


def _fits(one: list[int] | None, other: list[int] | None) -> bool:
    """Return whether the known lengths of two shapes are the same."""
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(a == b or min(a, b) <= 0 for a, b in zip(one, other))
