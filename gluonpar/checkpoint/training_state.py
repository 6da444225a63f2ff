"""Checkpoints: all that a training goes on from, in one file that knows nothing of devices."""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import cluster
from gluonpar.checkpoint import archive, files, optimizer_states
from gluonpar.runtime import memory
from gluonpar.runtime.version import __version__

FORMAT = 1


class _Param(NamedTuple):
    """A parameter's arrays on this process's devices, and whether each device has its own value."""

    copies: Sequence[mx.nd.NDArray]
    own: bool


class _Saved(NamedTuple):
    """What a file holds. Per parameter: one value, or one a device."""

    params: dict[str, list[np.ndarray]]
    optimizer: optimizer_states.Saved | None
    rng: tuple | None
    notes: dict[str, Any]


def save_checkpoint(
    path: str | os.PathLike,
    params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]],
    trainer: gluon.Trainer | None = None,
    rng: np.random.RandomState | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write parameters, and what else a training goes on from, to the file ``path``.

    ``params`` is an initialised block, or a list of parameters a device (:func:`get_params`).
    ``trainer`` gives the optimizer's states, counters and schedule, ``rng`` the generator of the
    shuffling; ``notes`` are the caller's own, anything JSON takes: epoch, batch, configuration.

    Parameters with a gradient are alike on all devices, and written once. What differs between
    devices (running statistics of batch normalisation) is written for each. Waits for the arrays.
    The file is there whole or not at all, flushed to the disk; it is a ``.npz`` without pickles and
    ends with its SHA-256. OSError where the disk refuses. With several processes all must call
    this; rank 0 writes.
    """
    arrays: list[np.ndarray] = []
    named = _named(params)
    statistics = _from_all_devices({n: param for n, param in named.items() if param.own})
    values = [
        [name, _stored(statistics.get(name) or [param.copies[0].asnumpy()], arrays)]
        for name, param in named.items()
    ]
    if not cluster.is_main():
        return
    header = {
        "format": FORMAT,
        "gluonpar": __version__,
        "params": values,
        "optimizer": trainer and optimizer_states.describe(*_optimizer(trainer, params), arrays),
        "rng": rng and _generator(rng, arrays),
        "notes": notes or {},
    }
    content = archive.sealed(header, arrays)
    with files.replacing(pathlib.Path(path)) as file:
        file.write(content)


def load_checkpoint(
    path: str | os.PathLike,
    params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]],
    trainer: gluon.Trainer | None = None,
    rng: np.random.RandomState | None = None,
) -> dict[str, Any]:
    """Give ``params``, ``trainer`` and ``rng`` what :func:`save_checkpoint` wrote; its notes.

    In place, on whatever devices they are. On as many devices as it was written with, each gets
    its own running statistics, so that training goes on bit for bit; on another number, their mean.
    Optimizer and generator in the file may be left alone. With several processes rank 0 reads.

    ValueError, with nothing changed, if the file is not there, cut short, damaged, something else,
    of a later format, of other parameters or another optimizer, or without what is asked of it.
    """
    path = pathlib.Path(path)
    named, saved = _named(params), _read(path)
    _check(path, saved.params, named)
    for what, wanted, found in (
        ("optimizer states", trainer, saved.optimizer),
        ("generator's state", rng, saved.rng),
    ):
        if wanted is not None and found is None:
            raise ValueError(f"{path} was written without {what}; leave that argument out")
    if trainer is not None:
        updater, trained = _optimizer(trainer, params)
        optimizer = optimizer_states.renumbered(saved.optimizer, [p.name for p in trained])
        optimizer_states.check(path, optimizer, updater, trained)
        optimizer_states.put(optimizer, updater)
    if rng is not None:
        rng.set_state(saved.rng)
    for name, param in named.items():
        for copy, value in zip(param.copies, _own(saved.params[name], len(param.copies))):
            new = memory.from_numpy(value, copy.context)
            new.as_nd_ndarray().copyto(copy.as_nd_ndarray())
    return saved.notes


def _named(params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]]) -> dict[str, _Param]:
    if not isinstance(params, gluon.Block):
        return {str(i): _Param(copies, False) for i, copies in enumerate(zip(*params))}
    found = params._collect_params_with_prefix()  # by place, as in save_parameters
    for param in found.values():
        if param._data is None:
            raise ValueError(
                f"parameter {param.name} has no values yet; initialize the network first, and let "
                "it see one batch if it learns its shapes from that"
            )
    return {n: _Param(param.list_data(), param.grad_req == "null") for n, param in found.items()}


def _optimizer(
    trainer: gluon.Trainer, params: Any
) -> tuple[mx.optimizer.Updater, list[optimizer_states.Param]]:
    """Its updater, and what there is to know of its parameters.

    The name is the place in the block: Gluon's own depends on how many blocks there were before,
    and a Trainer takes parameters in the order of those.
    """
    if not hasattr(trainer, "_updater"):  # gluon.Trainer has one per device
        raise TypeError(f"trainer must be a gluonpar.Trainer or None, got {trainer!r}")
    named = params._collect_params_with_prefix() if isinstance(params, gluon.Block) else {}
    places = {param: name for name, param in named.items()}
    trained = [
        optimizer_states.Param(places.get(p, p.name), p.shape, p.dtype) for p in trainer._params
    ]
    return trainer._updater, trained


def _from_all_devices(own: dict[str, _Param]) -> dict[str, list[np.ndarray]]:
    """Per parameter its value on every device of all processes, or one value if all are alike."""
    here = {name: [copy.asnumpy() for copy in param.copies] for name, param in own.items()}
    ranks = cluster.gather(here)
    found = {name: [value for rank in ranks for value in rank[name]] for name in own}
    for values in found.values():
        if len({value.tobytes() for value in values}) == 1:
            del values[1:]
    return found


def _stored(values: list[np.ndarray], arrays: list[np.ndarray]) -> list[int]:
    """Append the values; their places."""
    arrays += values
    return [*range(len(arrays) - len(values), len(arrays))]


def _generator(rng: np.random.RandomState, arrays: list[np.ndarray]) -> list:
    kind, keys, *numbers = rng.get_state()
    return [kind, *_stored([keys], arrays), *numbers]


def _read(path: pathlib.Path) -> _Saved:
    content = cluster.together(
        lambda: files.content(path, "checkpoint") if cluster.is_main() else None
    )
    content = cluster.gather(content)[0]
    try:
        header, arrays = archive.read(content)
        return _parse(header, dict(enumerate(arrays)))
    except Exception as error:  # whoever makes such a file by hand leads this to about any
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no checkpoint to go on from: {why}") from error


def _parse(header: dict, arrays: dict[int, np.ndarray]) -> _Saved:
    """What :func:`save_checkpoint` described; none of the ``arrays`` is used twice."""
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']}, but this version reads {FORMAT}")
    optimizer, rng = header["optimizer"], header["rng"]
    saved = _Saved(
        {name: _alike([arrays.pop(i) for i in places]) for name, places in header["params"]},
        None if optimizer is None else optimizer_states.parse(optimizer, arrays),
        None if rng is None else _generator_state(*rng, arrays=arrays),
        dict(header["notes"]),
    )
    if len(saved.params) != len(header["params"]):
        raise ValueError("it has two parameters of one name")
    return saved


def _generator_state(
    kind: str, place: int, at: int, has_gauss: int, gauss: float, arrays: dict[int, np.ndarray]
) -> tuple:
    """For ``RandomState.set_state``, which checks little: from a wrong ``at`` NumPy would crash."""
    keys, num_keys = arrays.pop(place), 624
    if (kind, keys.shape, keys.dtype) != ("MT19937", (num_keys,), np.dtype("uint32")):
        raise ValueError(f"its generator is no MT19937: {kind!r}, {keys.shape} {keys.dtype}")
    numbers = type(at) is int and 0 <= at <= num_keys and has_gauss in (0, 1)
    if not numbers or not isinstance(gauss, (int, float)) or not keys[1:].any():
        raise ValueError(f"its generator is in no state there is: {at}, {has_gauss}, {gauss}")
    return kind, keys, at, int(has_gauss), float(gauss)


def _alike(values: list[np.ndarray]) -> list[np.ndarray]:
    if len({(value.shape, value.dtype) for value in values}) != 1:
        raise ValueError("its parameters are not of one shape and dtype on all devices")
    return values


def _check(path: pathlib.Path, saved: dict[str, list], named: dict[str, _Param]) -> None:
    for name in {**saved, **named}:
        if name not in saved or name not in named:
            here = "this one lacks" if name in saved else "that lacks, of this one,"
            raise ValueError(f"{path} is of another model: {here} parameter {name}")
        there, here = _kind(saved[name][0]), _kind(named[name].copies[0])
        if there != here:
            raise ValueError(
                f"{path} is of another model: parameter {name} is {there} there, but {here} here"
            )


def _kind(array: Any) -> str:
    return f"{tuple(array.shape)} {np.dtype(array.dtype).name}"


def _own(values: list[np.ndarray], num_devices: int) -> list[np.ndarray]:
    """Each of this process's devices' value."""
    if len(values) == num_devices * cluster.size():
        first = cluster.rank() * num_devices
        return values[first : first + num_devices]
    mean = np.mean(values, axis=0, dtype="float64").astype(values[0].dtype)
    return [values[0] if len(values) == 1 else mean] * num_devices
