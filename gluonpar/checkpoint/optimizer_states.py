"""The optimizer's section of a checkpoint, and files that hold nothing else (``save_states``).

The header has the optimizer's class, the parameters' names and shapes, and the numbers of the
optimizer and its learning-rate schedule (rates, update counts); the arrays are the states of each
parameter. Everything is checked before anything changes: a number replaces only a number, and a
state only one of the same shapes and dtypes.
"""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar.checkpoint import files, sealed_npz

FORMAT = 1
_NUMBERS = (bool, int, float, np.number)
# How many parameters MXNet updates in one operator: a setting, not a state. MXNet does not check it
# and reads past the end of its arrays if it is too large.
_SETTINGS = ("aggregate_num",)


class OptimizerState(NamedTuple):
    """The states of an optimizer as a file holds them, in NumPy arrays."""

    optimizer: str  # the class
    params: list[tuple[str, list[int]]]  # name and shape, by the updater's index
    numbers: dict[str, Any]
    schedule: dict[str, Any]
    counts: dict[int, int]  # updates of each parameter
    states: dict[int, Any]


def save(
    path: str | os.PathLike, updater: mx.optimizer.Updater, params: Sequence[gluon.Parameter]
) -> None:
    """Write the states of ``updater``, which updates ``params`` in this order.

    Waits for the arrays. The file is written whole or not at all; raises OSError if the file system
    refuses.
    """
    arrays: list[np.ndarray] = []
    header = describe(updater, [(param.name, param) for param in params], arrays)
    with files.atomic_write(pathlib.Path(path)) as file:
        file.write(sealed_npz.pack(header, arrays))


def load(
    path: str | os.PathLike, updater: mx.optimizer.Updater, params: Sequence[gluon.Parameter]
) -> None:
    """Restore the states that :func:`save` wrote for the same parameters.

    Raises ValueError, and changes nothing, if the file is missing, damaged or not one of
    optimizer states, or belongs to another optimizer or other parameters.
    """
    content = files.read(pathlib.Path(path))
    try:
        state = sealed_npz.unpack(content, parse)
    except ValueError as error:
        raise ValueError(f"{path} is not a valid file of optimizer states: {error}") from error
    restore(path, state, updater, [(param.name, param) for param in params])


def describe(
    updater: mx.optimizer.Updater,
    params: Sequence[tuple[str, gluon.Parameter]],
    arrays: list[np.ndarray],
) -> dict[str, Any]:
    """Return the header's section, and append the states to ``arrays``.

    ``params`` are the updater's, by index, with the names that the file shall have.
    """

    def append(array: mx.nd.NDArray) -> int:
        arrays.append(array.asnumpy())
        return len(arrays) - 1

    optimizer = updater.optimizer
    return {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "params": [[name, list(param.shape)] for name, param in params],
        "numbers": _numbers(optimizer),
        "schedule": _numbers(optimizer.lr_scheduler),
        "counts": list(optimizer._index_update_count.items()),
        "states": [[i, _map(append, state)] for i, state in updater.states.items()],
    }


def parse(header: dict, arrays: dict[int, np.ndarray]) -> OptimizerState:
    """Return what :func:`describe` described, and take its arrays out of ``arrays``.

    Raises nearly any exception for another header.
    """
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, but this version reads {FORMAT}")
    params = [
        (_typed(str, name), [_typed(int, n) for n in dims]) for name, dims in header["params"]
    ]
    state = OptimizerState(
        _typed(str, header["optimizer"]),
        params,
        {name: _typed(_NUMBERS, value) for name, value in header["numbers"].items()},
        {name: _typed(_NUMBERS, value) for name, value in header["schedule"].items()},
        {_typed(int, i): _typed(int, count) for i, count in header["counts"]},
        {_typed(int, i): _map(arrays.pop, numbers) for i, numbers in header["states"]},
    )
    for i in (*state.counts, *state.states):
        if not 0 <= i < len(params):
            raise ValueError(f"parameter number {i} is not one of 0 to {len(params) - 1}")
    if min(state.counts.values(), default=0) < 0:
        raise ValueError(f"update counts must not be negative, got {state.counts}")
    return state


def restore(
    path: str | os.PathLike,
    state: OptimizerState,
    updater: mx.optimizer.Updater,
    params: Sequence[tuple[str, gluon.Parameter]],
) -> None:
    """Give ``updater``, which updates ``params``, the ``state`` that was read from ``path``.

    Parameters are matched by name if all names are the same, otherwise by index. Raises ValueError,
    and changes nothing, if the state is of another optimizer or other parameters.
    """
    optimizer, saved_names = updater.optimizer, [name for name, _ in state.params]
    index = {name: i for i, (name, _) in enumerate(params)}
    by_name = len(index) == len(params) and index.keys() == {*saved_names}
    order = [index[name] for name in saved_names] if by_name else range(len(params))
    _check(path, state, optimizer, params, order)
    vars(optimizer).update(state.numbers)
    if optimizer.lr_scheduler is not None:
        vars(optimizer.lr_scheduler).update(state.schedule)
    optimizer._index_update_count.clear()
    optimizer._index_update_count.update({order[i]: n for i, n in state.counts.items()})
    updater.states = {order[i]: _map(_on_a_device, found) for i, found in state.states.items()}
    updater.states_synced = dict.fromkeys(updater.states, False)  # copied to its device when used


def _check(
    path: Any, state: OptimizerState, optimizer: Any, params: Sequence, order: Sequence[int]
) -> None:
    kind = type(optimizer).__name__
    if state.optimizer != kind:
        raise ValueError(f"{path} has the states of {state.optimizer}, but the optimizer is {kind}")
    if len(state.params) != len(params):
        raise ValueError(
            f"{path} is for {len(state.params)} parameters, but there are {len(params)}"
        )
    for i, (saved_name, saved_shape) in zip(order, state.params):
        name, param = params[i]
        if not _compatible(saved_shape, param.shape):
            raise ValueError(
                f"{path} is for other parameters: number {i} is {saved_name} {tuple(saved_shape)} "
                f"in the file, but {name} {tuple(param.shape)} here"
            )
    _check_numbers(path, state.numbers, optimizer)
    if optimizer.lr_scheduler is not None:
        _check_numbers(path, state.schedule, optimizer.lr_scheduler)
    for i, arrays in state.states.items():
        name, param = params[order[i]]
        if min(param.shape, default=1) <= 0:  # the shape is not known before the first batch
            continue
        found = _map(kind_of, arrays)
        expected = _map(kind_of, _new_state(optimizer, order[i], param))
        if found != expected:
            raise ValueError(
                f"{path} has a state of parameter {name} of {found}, but {kind} has {expected}"
            )


def kind_of(array: Any) -> str:
    """Return the shape and dtype of an array of NumPy's or MXNet's, such as '(2, 3) float32'."""
    return f"{tuple(array.shape)} {np.dtype(array.dtype).name}"


def _on_a_device(array: np.ndarray) -> mx.nd.NDArray:
    return mx.nd.array(array, dtype=array.dtype)


def _map(function: Callable[[Any], Any], state: Any) -> Any:
    """Apply ``function`` to every leaf of nested tuples or lists; None stays None."""
    if isinstance(state, (tuple, list)):
        return tuple(_map(function, part) for part in state)
    return None if state is None else function(state)


def _typed(kind: Any, value: Any) -> Any:
    """Return ``value``; TypeError if it is of another type, or a boolean where an int must be."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"got {value!r} where {kind} is expected")
    return value


def _numbers(of: Any) -> dict:
    found = vars(of).items() if of else ()
    return {k: v for k, v in found if isinstance(v, _NUMBERS) and k not in _SETTINGS}


def _check_numbers(path: Any, numbers: dict[str, Any], of: Any) -> None:
    """Check that each number replaces a number or None: not a method, property or schedule."""
    for name, value in numbers.items():
        now = vars(of).get(name, getattr(type(of), name, None))
        fits = isinstance(now, (*_NUMBERS, type(None))) and name != "lr_scheduler"
        if not fits or name in _SETTINGS or (isinstance(now, bool) and value not in (0, 1)):
            raise ValueError(f"{path} has {name} = {value}, which {type(of).__name__} cannot have")


def _new_state(optimizer: mx.optimizer.Optimizer, i: int, param: gluon.Parameter) -> Any:
    weight = mx.nd.empty(tuple(param.shape), dtype=param.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # float16 without multi_precision; the first update warns too
        return optimizer.create_state_multi_precision(i, weight)


def _compatible(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the shapes can be equal; a length not known yet is 0, or -1 in ``mx.np``."""
    return len(shape) == len(other) and all(a == b or min(a, b) <= 0 for a, b in zip(shape, other))
