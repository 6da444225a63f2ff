"""The optimizer's section of a checkpoint, and files that hold nothing else (``save_states``).

The section has the optimizer with all its attributes, its learning-rate schedule too, and each
parameter's states (:mod:`gluonpar.checkpoint.objects`). As when ``gluon.Trainer`` loads states, the
saved optimizer's attributes replace those of the one that is there. Before anything changes, the
optimizer's class and the names and shapes of the parameters are checked.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle  # noqa: TID251 - what gluon.Trainer writes, if its user says that it is trusted
import warnings
from typing import Any, Callable, List, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.optimizer import Updater

from gluonpar.checkpoint import files, objects, sealed_npz
from gluonpar.runtime import private_fields

FORMAT = 2
_PICKLE = b"\x80"  # how every pickle of protocol 2 or later starts
# Of the optimizer here: the counts are in a key of their own, and shared by all devices.
_COUNTS = ("_all_index_update_counts", "_index_update_count")
_OWN = (*objects.SETTINGS, *_COUNTS)

# Name, index in the updater, and parameter, in the order in which the parameters were given.
NamedParams = List[Tuple[str, int, gluon.Parameter]]


def save(
    path: str | os.PathLike, updater: Updater, params: NamedParams, format: str = "gluonpar"
) -> None:
    """Write the states of ``updater``, which updates ``params``, whole or not at all.

    With ``format="gluon"`` as ``gluon.Trainer.save_states`` does. Waits for the arrays. Raises
    OSError if the file system refuses, ValueError for another format, and for an optimizer with an
    attribute that could not be restored.
    """
    if format not in ("gluonpar", "gluon"):
        raise ValueError(f"format must be 'gluonpar' or 'gluon', got {format!r}")
    if format == "gluon":
        optimizer = copy.copy(updater.optimizer)
        # gluon.Trainer counts updates per device; gluonpar's devices share their counts.
        private_fields.separate_update_counts(optimizer)
        with files.atomic_write(path) as file:
            pickle.dump((updater.states, optimizer), file)
        return
    encoder = objects.Encoder()
    sealed_npz.write(path, describe(updater, params, encoder), encoder.arrays)


def load(
    path: str | os.PathLike,
    updater: Updater,
    params: NamedParams,
    trusted: bool = False,
    keep_schedule: bool = False,
) -> None:
    """Restore a file of :func:`save` for the same optimizer and parameters.

    With ``keep_schedule`` the schedule of ``updater`` goes on, or its learning rate without one.
    If not, and the saved one is another, that is a UserWarning.

    A file of ``gluon.Trainer`` is a pickle, which can run any code, and is read only if it is
    ``trusted``. Otherwise, or if the file is missing or damaged, raises ValueError and changes
    nothing.
    """
    content = files.read(path)
    if not content.startswith(_PICKLE):
        parse = functools.partial(prepare_restore, updater, params)
        sealed_npz.unpack(content, parse, path)(keep_schedule)
        return
    if not trusted:
        raise ValueError(
            f"{path} is a pickle, as gluon.Trainer writes states; reading it can run any code "
            "that is in it. If you trust the file, pass trusted=True"
        )
    try:
        states, saved = pickle.loads(content)  # noqa: S301
        _check_kind(type(saved).__name__, updater.optimizer)
        counts = dict(private_fields.update_counts(saved))
        restore = _prepared(updater, params, saved, counts, states)
    except Exception as error:  # of pickle, or of a class in the file
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no file of gluon.Trainer.save_states: {reason}") from error
    restore(keep_schedule)


def describe(updater: Updater, params: NamedParams, encoder: objects.Encoder) -> dict[str, Any]:
    """Return the section for ``updater``, and add its arrays to those of ``encoder``."""
    optimizer, names = updater.optimizer, {i: name for name, i, _ in params}
    encode = encoder.encode
    return {
        "format": FORMAT,
        "params": [[name, _shape(param), i] for name, i, param in params],
        "counts": list(private_fields.update_counts(optimizer).items()),
        "optimizer": encode(optimizer, "optimizer", without=_COUNTS),
        "states": [
            [i, encode(state, f"state of {names.get(i, i)}")] for i, state in updater.states.items()
        ],
    }


def prepare_restore(
    updater: Updater, params: NamedParams, section: dict, arrays: dict[int, np.ndarray]
) -> Callable[[bool], None]:
    """Check a section that :func:`describe` made; return the function that restores ``updater``.

    Its argument is ``keep_schedule``, as in :func:`load`. Takes the arrays out of ``arrays``. May
    raise any exception for a section made by hand.
    """
    optimizer = updater.optimizer
    if section["format"] != FORMAT:
        raise ValueError(f"format {section['format']}, but this version reads {FORMAT}")
    _check_kind(section["optimizer"]["object"][0], optimizer)
    index = _indices(section["params"], params)
    counts = dict(section["counts"])
    ctx = params[0][2].list_ctx()[0] if params else mx.cpu()
    decoder = objects.Decoder(arrays, ctx, index, counts)
    saved = decoder.decode(section["optimizer"], optimizer, type(optimizer).__name__)
    decoder.moved = False
    if is_of_mxnet(optimizer):
        decoder.ctx = mx.cpu()  # each goes to the device that updates the parameter
    states = {
        index[i]: decoder.decode(state, updater.states.get(index[i]), f"state {i}")
        for i, state in section["states"]
    }
    return _prepared(updater, params, saved, {index[i]: n for i, n in counts.items()}, states)


def _prepared(
    updater: Updater,
    params: NamedParams,
    saved: mx.optimizer.Optimizer,
    counts: dict[int, int],
    states: dict[int, Any],
) -> Callable[[bool], None]:
    """Check the counts; return the function that gives ``updater`` all of it."""
    optimizer = updater.optimizer
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        raise ValueError(f"update counts must be integers and at least 0, got {counts}")
    unknown = {*counts, *states} - {i for _, i, _ in params}
    if unknown:
        raise ValueError(f"it has states of parameters that are not there: {sorted(unknown)}")
    schedule = optimizer.lr_scheduler
    has_schedule = type(schedule) is type(saved.lr_scheduler) and hasattr(schedule, "__dict__")
    difference = _difference(optimizer, saved)

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
            _call(schedule, optimizer.num_update, saved.num_update)
        elif has_schedule:
            schedule.__dict__ = vars(saved.lr_scheduler)  # others may have this object, too
            saved.lr_scheduler = schedule
        optimizer.__dict__ = vars(saved)
        vars(optimizer).update(here)
        private_fields.update_counts(optimizer).clear()
        private_fields.update_counts(optimizer).update(counts)
        updater.states = states
        updater.states_synced = dict.fromkeys(states, False)  # copied to their devices when used

    return restore


def _difference(optimizer: mx.optimizer.Optimizer, saved: mx.optimizer.Optimizer) -> str:
    """Return how two optimizers' schedules differ, or "" if they do not.

    Calls change a schedule, so copies are compared, of which the one that is behind has been called
    for all updates that the other one has seen.
    """
    here, there = optimizer.lr_scheduler, saved.lr_scheduler
    if here is None or type(here) is not type(there):
        names = [type(each).__name__ if each else "none" for each in (there, here)]
        return "" if here is there else "{}, here {}".format(*names)
    last = max(optimizer.num_update, saved.num_update)
    try:
        here = _attributes_after(here, optimizer.num_update, last)
        there = _attributes_after(there, saved.num_update, last)
    except Exception as error:  # of a class of the user's
        return f"it cannot be compared ({type(error).__name__}: {error})"
    different = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return ", ".join(f"{name} is {there.get(name)}, here {here.get(name)}" for name in different)


def _attributes_after(schedule: Callable, first: int, last: int) -> dict[str, Any]:
    schedule, encoder = copy.deepcopy(schedule), objects.Encoder()
    _call(schedule, first, last)
    return {name: encoder.encode(value, name) for name, value in vars(schedule).items()}


def _call(schedule: Callable, first: int, last: int) -> None:
    """Call a schedule for updates, as training does: each call may change it."""
    for number in range(first, last + 1):
        schedule(number)


def is_of_mxnet(optimizer: mx.optimizer.Optimizer) -> bool:
    """Return whether it is one of MXNet's own, whose states we know."""
    return type(optimizer).__module__.startswith("mxnet.")


def _check_kind(saved: str, optimizer: mx.optimizer.Optimizer) -> None:
    if saved != type(optimizer).__name__:
        raise ValueError(f"it is of optimizer {saved}, but this one is {type(optimizer).__name__}")


def kind_of(array: Any) -> str:
    """Return the shape and dtype of an array of NumPy's or MXNet's, such as '(2, 3) float32'."""
    return f"{tuple(array.shape)} {np.dtype(array.dtype).name}"


def _indices(saved: list, params: NamedParams) -> dict[int, int]:
    """Return the new index of each saved one: by name if all names are the same, else in order."""
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
                f"it is for other parameters: number {number} is {saved_name} {tuple(saved_shape)} "
                f"in the file, but {name} {tuple(shape)} here"
            )
    if len(index) != len(params):
        raise ValueError("two of its parameters have the same index")
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
