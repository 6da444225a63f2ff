"""Checkpoints: everything that a training run needs to continue, in one file.

A checkpoint is a file of :mod:`gluonpar.checkpoint.sealed_npz`. Its header has the keys

- ``format`` and ``gluonpar``: the format's number and the version that wrote it;
- ``params``: name and arrays of each parameter, one value, or one per device if those differ;
- ``optimizer``: see :mod:`gluonpar.checkpoint.optimizer_states`, or null;
- ``rng``: a ``numpy.random.RandomState``, or null;
- ``notes``: the caller's own.

Arrays are given by their number in the file. Nothing in it depends on the number of devices.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import cluster
from gluonpar.checkpoint import files, optimizer_states, params_file, sealed_npz
from gluonpar.runtime import memory
from gluonpar.runtime.version import __version__

FORMAT = 1
_MT19937_KEYS = 624


class _ParamCopies(NamedTuple):
    """A parameter on each of this process's devices, and whether the values may differ."""

    arrays: Sequence[mx.nd.NDArray]
    may_differ: bool


def save_checkpoint(
    path: str | os.PathLike,
    params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]],
    trainer: gluon.Trainer | None = None,
    rng: np.random.RandomState | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write parameters, and what else is needed to continue training, to the file ``path``.

    ``params`` is an initialized block, or one list of parameters per device (:func:`get_params`).
    ``trainer`` contributes the optimizer's states, update counts and learning-rate schedule, and
    ``rng`` the state of the generator that shuffles. ``notes`` is anything that JSON can express:
    epoch, batch, configuration.

    Parameters with gradients are equal on all devices and are written once. Those without, such as
    the running statistics of batch normalization, are written for each device if they differ.
    Waits for the arrays. The file is written whole or not at all and flushed to the disk; it is an
    ``.npz`` without pickles and ends with its SHA-256. Raises OSError if the file system refuses.
    With several processes all must call this; rank 0 writes.
    """
    named = _named(params)
    values = _values(named)
    if not cluster.is_main():
        return
    arrays: list[np.ndarray] = []
    header = {
        "format": FORMAT,
        "gluonpar": __version__,
        "params": [[name, _append(found, arrays)] for name, found in values.items()],
        "optimizer": trainer and optimizer_states.describe(*_optimizer(trainer, params), arrays),
        "rng": rng and _describe_generator(rng, arrays),
        "notes": notes or {},
    }
    content = sealed_npz.pack(header, arrays)
    with files.atomic_write(pathlib.Path(path)) as file:
        file.write(content)


def load_checkpoint(
    path: str | os.PathLike,
    params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]],
    trainer: gluon.Trainer | None = None,
    rng: np.random.RandomState | None = None,
) -> dict[str, Any]:
    """Restore ``params``, ``trainer`` and ``rng`` from a checkpoint in place; return its notes.

    The devices may be others than those it was written with. If there are as many, each gets its
    own running statistics, and training continues bit for bit; otherwise all get their mean. The
    optimizer and the generator in the file may be left out. With several processes rank 0 reads.

    Raises ValueError, and changes nothing, if the file is missing, truncated, damaged, not a
    checkpoint, of a later format, of another model or optimizer, or lacks what is to be restored.
    """
    path, named = pathlib.Path(path), _named(params)
    values, optimizer, generator, notes = _read(path)
    _check_params(path, values, named)
    for name, wanted, found in (("trainer", trainer, optimizer), ("rng", rng, generator)):
        if wanted is not None and found is None:
            raise ValueError(f"{path} was saved without {name}=; load it without {name}=, too")
    if trainer is not None:
        optimizer_states.restore(path, optimizer, *_optimizer(trainer, params))
    if rng is not None:
        rng.set_state(generator)
    for name, param in named.items():
        for array, value in zip(param.arrays, _local(values[name], len(param.arrays))):
            new = memory.from_numpy(value, array.context)
            new.as_nd_ndarray().copyto(array.as_nd_ndarray())
    return notes


def _named(params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]]) -> dict[str, _ParamCopies]:
    if not isinstance(params, gluon.Block):
        return {str(i): _ParamCopies(arrays, False) for i, arrays in enumerate(zip(*params))}
    found = params._collect_params_with_prefix()  # named by place in the block: save_parameters
    params_file.check_initialized(found.values())
    return {
        name: _ParamCopies(param.list_data(), param.grad_req == "null")
        for name, param in found.items()
    }


def _optimizer(
    trainer: gluon.Trainer, params: Any
) -> tuple[mx.optimizer.Updater, list[tuple[str, gluon.Parameter]]]:
    """Return the trainer's updater, and its parameters with their names in the block.

    Gluon's own names depend on how many blocks were made before, and a Trainer sorts by them.
    """
    if not hasattr(trainer, "_updater"):  # gluon.Trainer has one per device
        raise TypeError(f"trainer must be a gluonpar.Trainer or None, got {trainer!r}")
    named = params._collect_params_with_prefix() if isinstance(params, gluon.Block) else {}
    names = {param: name for name, param in named.items()}
    return trainer._updater, [(names.get(param, param.name), param) for param in trainer._params]


def _values(named: dict[str, _ParamCopies]) -> dict[str, list[np.ndarray]]:
    """Return each parameter's value, or its values on the devices of all processes if they differ."""
    values = {
        name: [array.asnumpy() for array in param.arrays[: None if param.may_differ else 1]]
        for name, param in named.items()
    }
    ranks = cluster.gather({n: found for n, found in values.items() if named[n].may_differ})
    for name in ranks[0]:
        everywhere = [value for rank in ranks for value in rank[name]]
        all_equal = len({value.tobytes() for value in everywhere}) == 1
        values[name] = everywhere[:1] if all_equal else everywhere
    return values


def _append(values: list[np.ndarray], arrays: list[np.ndarray]) -> list[int]:
    """Append ``values`` to ``arrays``; return their numbers."""
    arrays += values
    return [*range(len(arrays) - len(values), len(arrays))]


def _describe_generator(rng: np.random.RandomState, arrays: list[np.ndarray]) -> list:
    kind, keys, *numbers = rng.get_state()
    return [kind, *_append([keys], arrays), *numbers]


def _read(path: pathlib.Path) -> tuple:
    content = cluster.together(
        lambda: files.read(path, "checkpoint") if cluster.is_main() else None
    )
    try:
        return sealed_npz.unpack(cluster.gather(content)[0], _parse)
    except ValueError as error:
        raise ValueError(f"{path} is not a valid checkpoint: {error}") from error


def _parse(header: dict, arrays: dict[int, np.ndarray]) -> tuple:
    """Return the parameters' values, the optimizer's state, the generator's state and the notes."""
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']}, but this version reads {FORMAT}")
    params = {name: [arrays.pop(i) for i in numbers] for name, numbers in header["params"]}
    if len(params) != len(header["params"]):
        raise ValueError("two of its parameters have the same name")
    for name, values in params.items():
        if len({optimizer_states.kind_of(value) for value in values}) != 1:
            raise ValueError(f"parameter {name} must have one shape and dtype on all devices")
    optimizer, rng = header["optimizer"], header["rng"]
    return (
        params,
        None if optimizer is None else optimizer_states.parse(optimizer, arrays),
        None if rng is None else _generator_state(arrays, *rng),
        dict(header["notes"]),
    )


def _generator_state(
    arrays: dict[int, np.ndarray], kind: str, number: int, pos: int, has_gauss: int, gauss: float
) -> tuple:
    """Return the arguments of ``RandomState.set_state``, which would crash later on a wrong ``pos``."""
    keys = arrays.pop(number)
    if (kind, keys.shape, keys.dtype) != ("MT19937", (_MT19937_KEYS,), np.dtype("uint32")):
        raise ValueError(f"rng must be MT19937 with 624 uint32, got {kind!r} with {keys!r}")
    numbers = type(pos) is int and 0 <= pos <= _MT19937_KEYS and has_gauss in (0, 1)
    if not numbers or not isinstance(gauss, (int, float)) or not keys[1:].any():
        raise ValueError(f"rng is in an impossible state: {pos}, {has_gauss}, {gauss}, {keys!r}")
    return kind, keys, pos, int(has_gauss), float(gauss)


def _check_params(
    path: pathlib.Path, saved: dict[str, list], named: dict[str, _ParamCopies]
) -> None:
    for name in {**saved, **named}:
        if name not in saved or name not in named:
            where = "only in the file" if name in saved else "not in the file"
            raise ValueError(f"{path} is of another model: parameter {name} is {where}")
        there = optimizer_states.kind_of(saved[name][0])
        here = optimizer_states.kind_of(named[name].arrays[0])
        if there != here:
            raise ValueError(
                f"{path} is of another model: parameter {name} is {there} in the file, but {here} here"
            )


def _local(values: list[np.ndarray], num_devices: int) -> list[np.ndarray]:
    """Return the values for this process's devices."""
    if len(values) == num_devices * cluster.size():
        first = cluster.rank() * num_devices
        return values[first : first + num_devices]
    mean = np.mean(values, axis=0, dtype="float64").astype(values[0].dtype)
    return [values[0] if len(values) == 1 else mean] * num_devices
