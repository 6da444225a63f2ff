"""The state of an optimizer in a file: NumPy's .npz without pickles, so safe to load.

The header (JSON) names the optimizer's class, the parameters' shapes, its numbers (rates, counters)
and those of its learning-rate schedule; then come the arrays of each parameter's state.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar import archive, files

FORMAT = 1
_NUMBERS = (bool, int, float, np.number)


class Saved(NamedTuple):
    """What a file holds: see :func:`save`."""

    optimizer: str
    params: list[tuple[str, list[int]]]
    numbers: dict[str, Any]
    schedule: dict[str, Any]
    counts: dict[int, int]
    states: dict[int, Any]


def save(path: str | os.PathLike, updater: mx.optimizer.Updater, params: Sequence) -> None:
    """Write the states of ``updater``, for ``params``: (name, shape) of each, in order of number.

    Waits for the arrays. The file is there whole or not at all; OSError where the disk refuses.
    """
    arrays: list[np.ndarray] = []
    header = describe(updater, params, arrays)
    with files.replacing(pathlib.Path(path)) as file:
        archive.write(file, header, arrays)


def load(path: str | os.PathLike, updater: mx.optimizer.Updater, params: Sequence) -> None:
    """Give ``updater`` the states that :func:`save` wrote for the same parameters.

    ValueError, and nothing changed, for another optimizer or other parameters, or a file that is
    damaged or something else.
    """
    saved = _read(pathlib.Path(path))
    check(path, saved, updater, params)
    put(saved, updater)


def describe(
    updater: mx.optimizer.Updater, params: Sequence, arrays: list[np.ndarray]
) -> dict[str, Any]:
    """What JSON takes of the states of ``updater``; their arrays are appended to ``arrays``."""
    optimizer = updater.optimizer
    return {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "params": [[name, list(shape)] for name, shape in params],
        "numbers": _numbers(optimizer),
        "schedule": _numbers(optimizer.lr_scheduler),
        "counts": list(_counts(optimizer).items()),
        "states": [[i, _encode(state, arrays)] for i, state in updater.states.items()],
    }


def parse(header: dict, arrays: Sequence[np.ndarray]) -> Saved:
    """What :func:`describe` made; about any Exception if it is something else."""
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, but this version reads {FORMAT}")
    return Saved(
        header["optimizer"],
        [(name, list(shape)) for name, shape in header["params"]],
        dict(header["numbers"]),
        dict(header["schedule"]),
        dict(header["counts"]),
        {i: _decode(code, arrays) for i, code in header["states"]},
    )


def check(
    path: str | os.PathLike, saved: Saved, updater: mx.optimizer.Updater, params: Sequence
) -> None:
    """Raise ValueError unless ``saved``, from the file ``path``, is of this optimizer."""
    if saved.optimizer != type(updater.optimizer).__name__:
        raise ValueError(
            f"{path} holds the states of {saved.optimizer}, but the optimizer is "
            f"{type(updater.optimizer).__name__}"
        )
    _check_params(path, saved.params, params)


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
    """Give ``updater`` what was saved."""
    optimizer = updater.optimizer
    vars(optimizer).update(saved.numbers)
    if optimizer.lr_scheduler is not None:
        vars(optimizer.lr_scheduler).update(saved.schedule)
    counts = _counts(optimizer)
    counts.clear()
    counts.update(saved.counts)
    updater.states = saved.states
    updater.states_synced = dict.fromkeys(saved.states, False)  # to their devices when next used


def _read(path: pathlib.Path) -> Saved:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with open(path, "rb") as file:
            return parse(*archive.read(file))
    except Exception as error:  # a damaged file leads zipfile and NumPy to about any
        raise ValueError(
            f"{path} holds no optimizer states, or is damaged ({type(error).__name__}: {error})"
        ) from error


def _check_params(path, saved: Sequence, params: Sequence) -> None:
    if len(saved) != len(params):
        raise ValueError(f"{path} is for {len(saved)} parameters, but there are {len(params)}")
    for i, ((old_name, old_shape), (name, shape)) in enumerate(zip(saved, params)):
        if not _alike(old_shape, shape):
            raise ValueError(
                f"{path} is for other parameters: number {i} is {old_name} {tuple(old_shape)} "
                f"there, but {name} {tuple(shape)} here"
            )


def _alike(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the shapes can be one; a length that is not yet known is 0, or -1 in ``mx.np``."""
    return len(shape) == len(other) and all(a == b or min(a, b) <= 0 for a, b in zip(shape, other))


def _numbers(of: Any) -> dict:
    return {k: value for k, value in vars(of).items() if isinstance(value, _NUMBERS)} if of else {}


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


def _decode(code: Any, arrays: Sequence[np.ndarray]) -> Any:
    if code is None:
        return None
    if isinstance(code, list):
        return tuple(_decode(part, arrays) for part in code)
    return mx.nd.array(arrays[code], dtype=arrays[code].dtype)
