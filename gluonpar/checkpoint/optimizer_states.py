"""The states of an optimizer in a sealed file (:mod:`gluonpar.checkpoint.archive`).

The header (JSON) names the optimizer's class, the parameters' shapes, its numbers (rates, counters)
and those of its learning-rate schedule; then come the arrays of each parameter's state. Nothing of
it is believed: a number replaces only a number, and a state only one of the same shapes and dtypes.
"""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.checkpoint import archive, files

FORMAT = 1
_NUMBERS = (bool, int, float, np.number)
# A number to MXNet, but none that training changes: how many parameters it updates at once. It goes
# past the end of its own arrays if that is too many, and does not check.
_NO_STATE = ("aggregate_num",)


class Param(NamedTuple):
    """What there is to know of a parameter; lengths that are not known yet are 0, or -1."""

    name: str
    shape: Sequence[int]
    dtype: Any


class Saved(NamedTuple):
    """What a file holds: see :func:`save`. States are NumPy's."""

    optimizer: str
    params: list[tuple[str, list[int]]]
    numbers: dict[str, Any]
    schedule: dict[str, Any]
    counts: dict[int, int]
    states: dict[int, Any]


def save(path: str | os.PathLike, updater: mx.optimizer.Updater, params: Sequence[Param]) -> None:
    """Write the states of ``updater``, for ``params`` in order of number.

    Waits for the arrays. The file is there whole or not at all; OSError where the disk refuses.
    """
    arrays: list[np.ndarray] = []
    content = archive.sealed(describe(updater, params, arrays), arrays)
    with files.replacing(pathlib.Path(path)) as file:
        file.write(content)


def load(path: str | os.PathLike, updater: mx.optimizer.Updater, params: Sequence[Param]) -> None:
    """Give ``updater`` the states that :func:`save` wrote for the same parameters.

    ValueError, and nothing changed, for another optimizer or other parameters, or a file that is
    not there, cut short, damaged or something else.
    """
    saved = _read(pathlib.Path(path))
    check(path, saved, updater, params)
    put(saved, updater)


def describe(
    updater: mx.optimizer.Updater, params: Sequence[Param], arrays: list[np.ndarray]
) -> dict[str, Any]:
    """What JSON takes of the states of ``updater``; their arrays are appended to ``arrays``."""
    optimizer = updater.optimizer
    return {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "params": [[param.name, list(param.shape)] for param in params],
        "numbers": _numbers(optimizer),
        "schedule": _numbers(optimizer.lr_scheduler),
        "counts": list(_counts(optimizer).items()),
        "states": [[i, _encode(state, arrays)] for i, state in updater.states.items()],
    }


def parse(header: dict, arrays: dict[int, np.ndarray]) -> Saved:
    """What :func:`describe` made, its arrays taken out of ``arrays`` (by place).

    About any Exception if it is something else.
    """
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, but this version reads {FORMAT}")
    params = [(_a(str, name), [_a(int, n) for n in shape]) for name, shape in header["params"]]
    counts = {_number(i, params): _a(int, count) for i, count in header["counts"]}
    for i, count in counts.items():
        if count < 0:
            raise ValueError(f"parameter {i} was updated {count} times")
    states = {_number(i, params): _decode(code, arrays) for i, code in header["states"]}
    return Saved(
        _a(str, header["optimizer"]),
        params,
        {name: _a(_NUMBERS, value) for name, value in header["numbers"].items()},
        {name: _a(_NUMBERS, value) for name, value in header["schedule"].items()},
        counts,
        states,
    )


def check(
    path: str | os.PathLike, saved: Saved, updater: mx.optimizer.Updater, params: Sequence[Param]
) -> None:
    """Raise ValueError unless ``saved``, from the file ``path``, is of this optimizer."""
    optimizer = updater.optimizer
    if saved.optimizer != type(optimizer).__name__:
        raise ValueError(
            f"{path} holds the states of {saved.optimizer}, but the optimizer is "
            f"{type(optimizer).__name__}"
        )
    _check_params(path, saved.params, params)
    _check_numbers(path, saved.numbers, optimizer)
    if optimizer.lr_scheduler is not None:
        _check_numbers(path, saved.schedule, optimizer.lr_scheduler)
    for i, state in saved.states.items():
        if min(params[i].shape, default=1) <= 0:  # nobody knows yet what it will be
            continue
        there, here = _kind(state), _kind(_new_state(optimizer, i, params[i]))
        if there != here:
            raise ValueError(
                f"{path} has another state of parameter {params[i].name}: {there}, but "
                f"{saved.optimizer} has {here}"
            )


def renumbered(saved: Saved, names: Sequence[str]) -> Saved:
    """The same states for parameters in the order of ``names``; unchanged if those are others."""
    here = {name: i for i, name in enumerate(names)}
    if here.keys() != {name for name, _ in saved.params}:
        return saved
    places = [here[name] for name, _ in saved.params]
    return saved._replace(
        params=sorted(saved.params, key=lambda param: here[param[0]]),
        counts={places[i]: count for i, count in saved.counts.items()},
        states={places[i]: state for i, state in saved.states.items()},
    )


def put(saved: Saved, updater: mx.optimizer.Updater) -> None:
    """Give ``updater`` what was saved, and has passed :func:`check`."""
    optimizer, states = updater.optimizer, {i: _loaded(s) for i, s in saved.states.items()}
    vars(optimizer).update(saved.numbers)
    if optimizer.lr_scheduler is not None:
        vars(optimizer.lr_scheduler).update(saved.schedule)
    counts = _counts(optimizer)
    counts.clear()
    counts.update(saved.counts)
    updater.states = states
    updater.states_synced = dict.fromkeys(states, False)  # to their devices when next used


def _read(path: pathlib.Path) -> Saved:
    try:
        header, arrays = archive.read(files.content(path))
        return parse(header, dict(enumerate(arrays)))
    except files.Unreadable:
        raise
    except Exception as error:  # whoever makes such a file by hand leads this to about any
        raise ValueError(
            f"{path} holds no optimizer states, or is damaged ({type(error).__name__}: {error})"
        ) from error


def _a(kind: Any, value: Any) -> Any:
    """The value; TypeError unless it is of that kind, a boolean only where those are asked for."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not what belongs there")
    return value


def _number(i: Any, params: Sequence) -> int:
    if not 0 <= _a(int, i) < len(params):
        raise ValueError(f"there is no parameter number {i}")
    return i


def _check_params(path: Any, saved: Sequence, params: Sequence[Param]) -> None:
    if len(saved) != len(params):
        raise ValueError(f"{path} is for {len(saved)} parameters, but there are {len(params)}")
    for i, ((old_name, old_shape), (name, shape, _)) in enumerate(zip(saved, params)):
        if not _alike(old_shape, shape):
            raise ValueError(
                f"{path} is for other parameters: number {i} is {old_name} {tuple(old_shape)} "
                f"there, but {name} {tuple(shape)} here"
            )


def _check_numbers(path: Any, numbers: dict[str, Any], of: Any) -> None:
    """Numbers may be replaced by such, None by any; methods, properties and schedules may not."""
    for name, value in numbers.items():
        now = vars(of).get(name, getattr(type(of), name, None))
        fits = isinstance(now, (*_NUMBERS, type(None))) and name != "lr_scheduler"
        if not fits or name in _NO_STATE or (isinstance(now, bool) and value not in (0, 1)):
            raise ValueError(f"{path} has {name} = {value}, which is none of {type(of).__name__}")


def _new_state(optimizer: mx.optimizer.Optimizer, i: int, param: Param) -> Any:
    weight = mx.nd.empty(tuple(param.shape), dtype=param.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about float16; the first update says so too
        return optimizer.create_state_multi_precision(i, weight)


def _alike(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the shapes can be one; a length that is not yet known is 0, or -1 in ``mx.np``."""
    return len(shape) == len(other) and all(a == b or min(a, b) <= 0 for a, b in zip(shape, other))


def _numbers(of: Any) -> dict:
    found = vars(of).items() if of else ()
    return {k: v for k, v in found if isinstance(v, _NUMBERS) and k not in _NO_STATE}


def _counts(optimizer: mx.optimizer.Optimizer) -> dict:
    return optimizer._index_update_count


def _encode(state: Any, arrays: list[np.ndarray]) -> Any:
    """None, a number's place among ``arrays``, or a list of those."""
    if state is None:
        return None
    if isinstance(state, (tuple, list)):
        return [_encode(part, arrays) for part in state]
    arrays.append(state.asnumpy())
    return len(arrays) - 1


def _decode(code: Any, arrays: dict[int, np.ndarray]) -> Any:
    if code is None:
        return None
    if isinstance(code, list):
        return tuple(_decode(part, arrays) for part in code)
    return arrays.pop(code)  # each is used once, so that a small file makes no large states


def _loaded(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_loaded, state))
    return None if state is None else mx.nd.array(state, dtype=state.dtype)


def _kind(state: Any) -> Any:
    """Nested as the state is: None, or the shape and the dtype of an array, in words."""
    if state is None:
        return None
    if isinstance(state, (tuple, list)):
        return [*map(_kind, state)]
    return f"{tuple(state.shape)} {np.dtype(state.dtype).name}"
