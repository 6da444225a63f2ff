"""The optimizer's section of a checkpoint, and files of this section alone (``save_states``).

The section has the optimizer's attributes, which include its learning-rate schedule, and each
parameter's states. If all of them are plain values (:mod:`~gluonpar.checkpoint.npz_file`), as in
MXNet's optimizers, they are saved as such. Otherwise the section has a pickle of optimizer and
states.

**Security**: loading a pickle can run any code that is in it. :func:`_prepared_from_pickle` is the
only place where gluonpar does so, and only if the caller says that the file is ``trusted``. Files
that MXNet's Trainer wrote for its own optimizers are pickles, too, and read without running
anything (:mod:`~gluonpar.checkpoint.stock_states`).

As when ``gluon.Trainer`` loads states, the saved attributes replace those of the optimizer that is
there. Before anything changes, the optimizer's class and the names and shapes of the parameters are
checked.
"""

from __future__ import annotations

import copy
import functools
import json
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
from gluonpar.checkpoint.npz_file import Encoder, NotPlainError, decode
from gluonpar.runtime import private_fields

PLAIN_FORMAT, PICKLE_FORMAT = 2, 3
_PICKLE = b"\x80"  # how every pickle of protocol 2 or later starts
# Attributes that are never loaded: the parameters; how many of them MXNet updates in one operator,
# which reads past the end of its arrays if the number is too large; the numbers of updates, which
# all devices share.
_OWN = ("param_dict", "aggregate_num", "_all_index_update_counts", "_index_update_count")

# Name, index in the updater, and parameter, in the order in which the parameters were given.
NamedParams = List[Tuple[str, int, gluon.Parameter]]


def save(path: str | os.PathLike, updater: Updater, params: NamedParams) -> None:
    """Write the states of ``updater``, which updates ``params``, whole or not at all.

    Waits for the arrays. Raises OSError if the file system refuses, ValueError for an optimizer
    that is not plain and cannot be pickled.
    """
    encoder = Encoder()
    npz_file.write(path, describe(updater, params, encoder), encoder.arrays)


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

    Raises ValueError, and changes nothing, if the file is missing or damaged, or has a pickle of
    something else than MXNet's own optimizers and schedules and is not ``trusted``.
    """
    content = files.read(path)
    if not content.startswith(_PICKLE):
        parse = functools.partial(prepare_restore, updater, params, trusted)
        npz_file.parsed(content, parse, path)(keep_schedule)
        return
    try:
        restore = _prepared_from_pickle(updater, params, trusted, content)
    except Exception as error:  # of pickle, or of a class in the file
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be loaded: {reason}") from error
    restore(keep_schedule)


def _prepared_from_pickle(
    updater: Updater, params: NamedParams, trusted: bool, content: bytes
) -> Callable[[bool], None]:
    """Load states and optimizer from a pickle, which can run any code; see :func:`_prepared`."""
    if trusted:
        states, optimizer = pickle.loads(content)  # noqa: S301
        kind, saved = type(optimizer).__name__, vars(optimizer)
    else:
        kind, saved, states = stock_states.read(content)
    return _prepared(updater, params, kind, saved, dict(saved["_index_update_count"]), states)


def describe(updater: Updater, params: NamedParams, encoder: Encoder) -> dict[str, Any]:
    """Return the section for ``updater``, and add its arrays to those of ``encoder``."""
    optimizer, names = updater.optimizer, {i: name for name, i, _ in params}
    section = {
        "params": [[name, _shape(param), i] for name, i, param in params],
        "counts": list(private_fields.update_counts(optimizer).items()),
    }
    number = len(encoder.arrays)
    try:
        described = _encode_object(encoder, optimizer, "optimizer")
        states = [
            [i, encoder.encode(state, f"state of {names.get(i, i)}")]
            for i, state in updater.states.items()
        ]
        return {"format": PLAIN_FORMAT, **section, "optimizer": described, "states": states}
    except NotPlainError as error:
        reason = str(error)
    try:
        content = pickle.dumps((updater.states, optimizer))
    except Exception as error:  # of a class of the user's
        raise ValueError(
            f"{reason}, which cannot be saved ({error}); leave it out in __getstate__, and make it "
            "again in __setstate__"
        ) from error
    warnings.warn(
        f"{reason}: the optimizer is saved as a pickle, and loaded only with trusted=True",
        stacklevel=4,
    )
    del encoder.arrays[number:]
    pickled = encoder.add(np.frombuffer(content, "uint8"))
    return {"format": PICKLE_FORMAT, **section, "pickle": pickled}


def _encode_object(encoder: Encoder, value: Any, place: str) -> dict[str, Any]:
    """Return class and attributes of an optimizer or a schedule, which must be plain."""
    encoded = {}
    for name, part in sorted(vars(value).items()):
        if name == "lr_scheduler" and isinstance(part, LRScheduler):
            encoded[name] = _encode_object(encoder, part, f"{place}.{name}")
        elif name not in _OWN:
            encoded[name] = encoder.encode(part, f"{place}.{name}")
    return {"object": [type(value).__name__, encoded]}


def prepare_restore(
    updater: Updater, params: NamedParams, trusted: bool, section: dict, arrays: dict
) -> Callable[[bool], None]:
    """Check a section that :func:`describe` made; return the function that restores ``updater``.

    Its argument is ``keep_schedule``, as in :func:`load`. Removes the section's arrays from
    ``arrays``. May raise any exception for a section made by hand.
    """
    optimizer, of_mxnet = updater.optimizer, is_of_mxnet(updater.optimizer)
    plain = section["format"] == PLAIN_FORMAT
    index = _indices(section["params"], params)
    moved = any(old != new for old, new in index.items())
    if moved and not (plain and of_mxnet):
        raise ValueError(
            f"its parameters were in another order, and which values of {type(optimizer).__name__} "
            "belong to which parameter is not known; give the parameters names that sort in the "
            "same order, by a name scope"
        )
    if not plain:
        content = arrays.pop(section["pickle"]).tobytes()
        return _prepared_from_pickle(updater, params, trusted, content)
    ctx = params[0][2].list_ctx()[0] if params else mx.cpu()
    described = section["optimizer"]
    saved = _decode_attributes(described, arrays, ctx, type(optimizer.lr_scheduler))
    if moved:  # MXNet's dicts by number are by the parameter's index
        for name, value in saved.items():
            if isinstance(value, dict):
                saved[name] = {index.get(key, key): part for key, part in value.items()}
    if of_mxnet:
        ctx = mx.cpu()  # each state goes to the device that updates the parameter
    states = {index[i]: decode(state, arrays, ctx) for i, state in section["states"]}
    counts = {index[i]: count for i, count in section["counts"]}
    return _prepared(updater, params, described["object"][0], saved, counts, states)


def _decode_attributes(
    described: dict[str, Any], arrays: dict[int, np.ndarray], ctx: mx.Context, here: type
) -> dict[str, Any]:
    """Return an object's attributes; a schedule is of MXNet, or of the class ``here``."""
    saved: dict[str, Any] = {}
    for name, value in described["object"][1].items():
        if name == "lr_scheduler" and value is not None:
            kind = value["object"][0]
            schedule = here if here.__name__ == kind else getattr(mx.lr_scheduler, kind)
            saved[name] = object.__new__(schedule)
            vars(saved[name]).update(_decode_attributes(value, arrays, ctx, here))
        else:
            saved[name] = decode(value, arrays, ctx)
    return saved


def _prepared(
    updater: Updater, params: NamedParams, kind: str, saved: dict, counts: dict, states: dict
) -> Callable[[bool], None]:
    """Check the optimizer's class, ``kind``; return the function that restores ``updater``.

    ``saved`` are the optimizer's attributes by name; the other two are by parameter's index.
    """
    optimizer = updater.optimizer
    if kind != type(optimizer).__name__:
        raise ValueError(f"it is of optimizer {kind}, but this one is {type(optimizer).__name__}")
    unknown = {*counts, *states} - {i for _, i, _ in params}
    if unknown:
        raise ValueError(f"it has states of parameters that are not there: {sorted(unknown)}")
    schedule, updates = optimizer.lr_scheduler, saved["num_update"]
    difference = _difference(schedule, optimizer.num_update, saved["lr_scheduler"], updates)

    def restore(keep_schedule: bool) -> None:
        kept = ("lr_scheduler", "lr") if keep_schedule else ()
        here = {name: vars(optimizer)[name] for name in (*_OWN, *kept)}
        if difference and not keep_schedule:
            warnings.warn(
                f"the saved learning-rate schedule goes on, which differs from the Trainer's own: "
                f"{difference}. To go on with the Trainer's own, pass keep_schedule=True",
                stacklevel=3,
            )
        if keep_schedule and schedule is not None:
            for number in range(optimizer.num_update, updates + 1):
                schedule(number)  # as training would have done: each call may change it
        elif type(schedule) is type(saved["lr_scheduler"]) and hasattr(schedule, "__dict__"):
            schedule.__dict__ = vars(saved["lr_scheduler"])  # others may have this object, too
            here["lr_scheduler"] = schedule
        optimizer.__dict__ = {**saved, **here}
        private_fields.update_counts(optimizer).clear()
        private_fields.update_counts(optimizer).update(counts)
        updater.states = states
        updater.states_synced = dict.fromkeys(states, False)  # copied to their devices when used

    return restore


def _difference(here: Any, num_here: int, there: Any, num_there: int) -> str:
    """Return how two schedules differ, or "" if they do not, after the same number of updates."""
    if here is None or type(here) is not type(there):
        names = [type(each).__name__ if each else "none" for each in (there, here)]
        return "" if here is there else "{}, here {}".format(*names)
    last = max(num_here, num_there)
    own = _attributes_after(here, num_here, last)
    saved = _attributes_after(there, num_there, last)
    different = [name for name in {**saved, **own} if saved.get(name) != own.get(name)]
    return ", ".join(f"{name} is {saved.get(name)}, here {own.get(name)}" for name in different)


def _attributes_after(schedule: Callable, first: int, last: int) -> dict[str, str]:
    """Return the attributes of a copy of ``schedule`` after its calls for these updates."""
    schedule = copy.deepcopy(schedule)
    for number in range(first, last + 1):
        schedule(number)
    encode = json.JSONEncoder(default=lambda part: getattr(part, "__dict__", repr(part))).encode
    return {name: encode(value) for name, value in vars(schedule).items()}


def is_of_mxnet(optimizer: mx.optimizer.Optimizer) -> bool:
    """Return whether it is one of MXNet's own, whose states we know."""
    return type(optimizer).__module__.startswith("mxnet.")


def _indices(saved: list, params: NamedParams) -> dict[int, int]:
    """Return the parameters' indices here by those in the file.

    Parameters belong together by name if all names are the same, otherwise by their order.
    """
    if len(saved) != len(params):
        raise ValueError(f"it is for {len(saved)} parameters, but there are {len(params)}")
    by_name = {param[0]: param for param in params}
    same_names = by_name.keys() == {name for name, *_ in saved} and len(by_name) == len(params)
    index = {}
    for number, (saved_name, saved_shape, i) in enumerate(saved):
        name, index[i], param = by_name[saved_name] if same_names else params[number]
        shape = _shape(param)
        if not _fits(saved_shape, shape):
            raise ValueError(
                f"it is for other parameters: number {number} is {saved_name} {saved_shape} in the "
                f"file, but {name} {shape} here"
            )
    return index


def _shape(param: gluon.Parameter) -> list[int] | None:
    """Return what is known of the shape; a SymbolBlock's parameter itself may know nothing of it.

    A length that is not known is 0, or -1 in mx.np.
    """
    copies = private_fields.values(param)
    shape = copies[0].shape if copies else param.shape
    return None if shape is None else list(shape)


def _fits(one: list[int] | None, other: list[int] | None) -> bool:
    """Return whether what is known of two shapes is the same."""
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(a == b or min(a, b) <= 0 for a, b in zip(one, other))
