"""The optimizer's section of a checkpoint, and files that hold nothing else (``save_states``).

The section has the optimizer's class, the parameters' names and shapes, and the numbers of the
optimizer and its learning-rate schedule; the arrays are the states of each parameter. Before
anything changes, it is checked that a number replaces only a number, and a state only one of the
same shapes and dtypes.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle  # noqa: TID251 - what gluon.Trainer writes, if its user says that it is trusted
import warnings
from typing import Any, Callable, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.optimizer import Updater

from gluonpar.checkpoint import files, sealed_npz

FORMAT = 1
_PICKLE = b"\x80"  # how every pickle of protocol 2 or later starts
_NUMBERS = (bool, int, float, np.number)
# How many parameters MXNet updates in one operator: a setting, not a state. MXNet does not check it
# and reads past the end of its arrays if it is too large.
_SETTINGS = ("aggregate_num",)

NamedParams = List[Tuple[str, gluon.Parameter]]  # in the order of the updater's indices


def save(
    path: str | os.PathLike,
    updater: Updater,
    params: Sequence[gluon.Parameter],
    format: str = "gluonpar",
) -> None:
    """Write the states of ``updater``, which updates ``params`` in this order, whole or not at all.

    With ``format="gluon"`` as ``gluon.Trainer.save_states`` does. Waits for the arrays. Raises
    OSError if the file system refuses, ValueError for another format.
    """
    if format not in ("gluonpar", "gluon"):
        raise ValueError(f"format must be 'gluonpar' or 'gluon', got {format!r}")
    if format == "gluon":
        optimizer = copy.copy(updater.optimizer)
        # gluon.Trainer counts updates per device; gluonpar's devices share their counts.
        counts = optimizer._all_index_update_counts
        optimizer._all_index_update_counts = {k: dict(own) for k, own in counts.items()}
        optimizer._index_update_count = optimizer._all_index_update_counts[0]
        with files.atomic_write(path) as file:
            pickle.dump((updater.states, optimizer), file)
        return
    arrays = sealed_npz.NumberedArrays()
    section = describe(updater, [(param.name, param) for param in params], arrays)
    sealed_npz.write(path, section, arrays)


def load(
    path: str | os.PathLike,
    updater: Updater,
    params: Sequence[gluon.Parameter],
    trusted: bool = False,
) -> None:
    """Restore what :func:`save` wrote for the same optimizer and parameters.

    A file of ``gluon.Trainer`` is a pickle, which can run any code, and is read only if it is
    ``trusted``. Otherwise, or if the file is missing or damaged, raises ValueError and changes
    nothing.
    """
    named = [(param.name, param) for param in params]
    content = files.read(path)
    if content.startswith(_PICKLE):
        if not trusted:
            raise ValueError(
                f"{path} is a pickle, as gluon.Trainer writes states; reading it can run any code "
                "that is in it. If you trust the file, pass trusted=True"
            )
        content = _converted(path, content, named)
    parse = functools.partial(prepare_restore, updater, named)
    sealed_npz.unpack(content, parse, path)()


def _converted(path: str | os.PathLike, content: bytes, params: NamedParams) -> memoryview:
    """Unpickle what ``gluon.Trainer`` saved; return what :func:`save` would have written."""
    try:
        states, optimizer = pickle.loads(content)  # noqa: S301
        saved = mx.optimizer.get_updater(optimizer)
        saved.states = states
        arrays = sealed_npz.NumberedArrays()
        return sealed_npz.pack(describe(saved, params, arrays), arrays)
    except Exception as error:  # as of pickle, or of what is in it
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no file of gluon.Trainer.save_states: {what}") from error


def describe(
    updater: Updater, params: NamedParams, arrays: sealed_npz.NumberedArrays
) -> dict[str, Any]:
    """Return the section for ``updater``, and add the states to ``arrays``."""
    optimizer, states = updater.optimizer, updater.states.items()
    return {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "params": [[name, list(param.shape)] for name, param in params],
        "numbers": _numbers(optimizer),
        "schedule": _numbers(optimizer.lr_scheduler),
        "counts": list(optimizer._index_update_count.items()),
        "states": [[i, _map(lambda a: arrays.add(a.asnumpy()), state)] for i, state in states],
    }


def prepare_restore(
    updater: Updater, params: NamedParams, section: dict, arrays: dict[int, np.ndarray]
) -> Callable[[], None]:
    """Check a section that :func:`describe` made; return the function that restores ``updater``.

    Takes the states out of ``arrays``. May raise any exception for a section made by hand.
    """
    optimizer, kind = updater.optimizer, type(updater.optimizer).__name__
    if section["format"] != FORMAT:
        raise ValueError(f"format {section['format']}, but this version reads {FORMAT}")
    if section["optimizer"] != kind:
        raise ValueError(f"it is of optimizer {section['optimizer']}, but this one is {kind}")
    index = _indices(section["params"], params)
    _check_numbers(section["numbers"], optimizer)
    if optimizer.lr_scheduler is not None:
        _check_numbers(section["schedule"], optimizer.lr_scheduler)
    counts = {index[i]: count for i, count in section["counts"]}
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        raise ValueError(f"update counts must be integers and at least 0, got {counts}")
    states = {index[i]: _map(arrays.pop, numbers) for i, numbers in section["states"]}
    for i, state in states.items():
        name, param = params[i]
        if min(param.shape, default=1) <= 0:  # the shape is not known before the first batch
            continue
        with warnings.catch_warnings():  # float16 without multi_precision; the first update warns
            warnings.simplefilter("ignore")
            weight = mx.nd.empty(tuple(param.shape), dtype=param.dtype)
            expected = _map(kind_of, optimizer.create_state_multi_precision(i, weight))
        found = _map(kind_of, state)
        if found != expected:
            raise ValueError(f"the state of parameter {name} must be {expected}, got {found}")
    loaded = {i: _map(lambda a: mx.nd.array(a, dtype=a.dtype), s) for i, s in states.items()}

    def restore() -> None:
        vars(optimizer).update(section["numbers"])
        if optimizer.lr_scheduler is not None:
            vars(optimizer.lr_scheduler).update(section["schedule"])
        optimizer._index_update_count.clear()
        optimizer._index_update_count.update(counts)
        updater.states = loaded
        updater.states_synced = dict.fromkeys(loaded, False)  # copied to their devices when used

    return restore


def kind_of(array: Any) -> str:
    """Return the shape and dtype of an array of NumPy's or MXNet's, such as '(2, 3) float32'."""
    return f"{tuple(array.shape)} {np.dtype(array.dtype).name}"


def _indices(saved: list, params: NamedParams) -> dict[int, int]:
    """Return the index in ``params`` of each saved one: by name if all names are the same."""
    if len(saved) != len(params):
        raise ValueError(f"it is for {len(saved)} parameters, but there are {len(params)}")
    by_name = {name: i for i, (name, _) in enumerate(params)}
    same_names = by_name.keys() == {name for name, _ in saved} and len(by_name) == len(params)
    index = {i: by_name[name] if same_names else i for i, (name, _) in enumerate(saved)}
    for i, (saved_name, saved_shape) in enumerate(saved):
        (name, param), shape = params[index[i]], tuple(saved_shape)
        # A length that is not known yet is 0, or -1 in mx.np.
        fits = (a == b or min(a, b) <= 0 for a, b in zip(shape, param.shape))
        if len(shape) != len(param.shape) or not all(fits):
            raise ValueError(
                f"it is for other parameters: number {i} is {saved_name} {shape} in the file, but "
                f"{name} {tuple(param.shape)} here"
            )
    return index


def _numbers(of: Any) -> dict[str, Any]:
    found = vars(of).items() if of else ()
    return {k: v for k, v in found if isinstance(v, _NUMBERS) and k not in _SETTINGS}


def _check_numbers(numbers: dict[str, Any], of: Any) -> None:
    """Check that each number replaces a number or None: not a method, property or schedule."""
    for name, value in numbers.items():
        now = vars(of).get(name, getattr(type(of), name, None))
        fits = isinstance(value, _NUMBERS) and isinstance(now, (*_NUMBERS, type(None)))
        if isinstance(now, bool):
            fits = value in (0, 1)
        if not fits or name in (*_SETTINGS, "lr_scheduler"):
            raise ValueError(f"{type(of).__name__} cannot have {name} = {value!r}")


def _map(function: Callable[[Any], Any], state: Any) -> Any:
    """Apply ``function`` to every leaf of nested tuples or lists; None stays None."""
    if isinstance(state, (tuple, list)):
        return tuple(_map(function, part) for part in state)
    return None if state is None else function(state)
