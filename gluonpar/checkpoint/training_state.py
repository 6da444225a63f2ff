"""Checkpoints: everything that a training run needs to continue, in one file.

A checkpoint is a file of :mod:`gluonpar.checkpoint.npz_file`. Its header, in which a number stands
for an array, has the keys

- ``format`` and ``gluonpar``: the format's number and the version that wrote it;
- ``params``: each parameter's name and its arrays: one, or one per device if they differ;
- ``optimizer``: the section of :mod:`gluonpar.checkpoint.optimizer_states`, or null;
- ``rng``: the state of a ``numpy.random.RandomState``, or null;
- ``rng_of_ranks``: the states on all ranks, only if they differ;
- ``notes``: the caller's notes.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluonpar import cluster
from gluonpar.checkpoint import files, npz_file, optimizer_states
from gluonpar.install import __version__
from gluonpar.runtime import memory, private_fields

FORMAT = 1
_SAVES = "save_checkpoint, which all ranks must call"
_LOADS = "load_checkpoint, which all ranks must call"


def save_checkpoint(
    path: str | os.PathLike,
    params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]],
    trainer: gluon.Trainer | None = None,
    rng: np.random.RandomState | None = None,
    notes: Any = None,
) -> None:
    """Write everything that is needed to continue training to the file ``path``.

    ``params`` is an initialized block, or one list of parameters per device (:func:`get_params`).
    ``trainer`` contributes the optimizer with all its attributes, states and schedule. ``rng``
    contributes the state of the generator that shuffles, on every rank if the states differ.
    ``notes`` is anything that JSON can express.

    Parameters without gradients, such as the running statistics of batch normalization, are written
    for each device if they differ. Waits for the arrays. The file, an ``.npz``, is written whole or
    not at all and flushed to the disk. It has no pickle, unless an optimizer or schedule that is
    not MXNet's has attributes other than numbers, strings, arrays, and lists, tuples and dicts of
    these: then the optimizer is pickled, with a UserWarning. With several processes rank 0 writes;
    all must call this, unless all parameters have gradients and there is no ``rng``.

    Raises OSError if the file system refuses, ValueError if an attribute cannot be pickled.
    """
    named = _named(params)
    values = _values(named)
    generators = cluster.gather(rng.get_state(), f"{_SAVES} (rng)") if rng is not None else []
    if not cluster.is_main():
        return
    differ = len({repr((kind, keys.tobytes(), *more)) for kind, keys, *more in generators}) > 1
    json.dumps(notes, default=np.number.item)  # raises for an array, which a header may hold
    header = {
        "format": FORMAT,
        "gluonpar": __version__,
        "params": [*values.items()],
        "optimizer": trainer and _optimizer(trainer, params).describe(),
        "rng": generators[0] if generators else None,
        **({"rng_of_ranks": generators} if differ else {}),
        "notes": {} if notes is None else notes,
    }
    npz_file.write(path, header)


def load_checkpoint(
    path: str | os.PathLike,
    params: gluon.Block | Sequence[Sequence[mx.nd.NDArray]],
    trainer: gluon.Trainer | None = None,
    rng: np.random.RandomState | None = None,
    keep_schedule: bool = False,
    trusted: bool = False,
) -> Any:
    """Restore ``params``, ``trainer`` and ``rng`` from a checkpoint in place; return its notes.

    On as many devices as before, each device gets its own running statistics, and training
    continues bit for bit if its operators give the same bits each time. On another number of
    devices, all get the mean. On as many ranks as before, each gets its own ``rng``; on another
    number, all get rank 0's. The optimizer's saved attributes, which include its learning-rate
    schedule, replace the present ones of ``trainer``. A schedule that differs is a UserWarning;
    with ``keep_schedule`` the Trainer's own goes on. ``trainer`` and ``rng`` may be omitted even if
    the file has them. With several processes rank 0 reads; all must call this.

    Security: no code in the file is run, unless the file is ``trusted``. Only then is an optimizer
    loaded that was saved as a pickle: a pickle can run any code.

    Raises ValueError, and changes nothing, if the file is missing, damaged, not a checkpoint, of a
    later format, of another model or optimizer, or lacks a part that is to be restored.
    """
    named = _named(params)
    optimizer = None if trainer is None else _optimizer(trainer, params)
    own = cluster.together(lambda: _read(path) if cluster.is_main() else None, _LOADS)
    header, arrays = cluster.broadcast_object(own)
    with files.loading(path):
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']}, but this version reads {FORMAT}")
        for name, argument, section in (("trainer", trainer, "optimizer"), ("rng", rng, "rng")):
            if argument is not None and header[section] is None:
                raise ValueError(f"it was saved without {name}=; load it without {name}= as well")
        values = _checked_values(header["params"], arrays, named)
        if optimizer is not None:
            optimizer.check(header["optimizer"], arrays, trusted)
        if rng is not None:
            generator = _own_generator(header, arrays)
        notes = header["notes"]
    if optimizer is not None:
        optimizer.apply(keep_schedule)
    if rng is not None:
        rng.set_state(generator)
    if isinstance(params, gluon.Block):
        # As in Parameter.set_data, a Trainer's kvstore or states may have copies of the weights.
        private_fields.note_set(params.collect_params().values())
        for owner in {*map(private_fields.trainer, params.collect_params().values())} - {None}:
            private_fields.forget_kvstore_values(owner)
    of_all: list[int] = []  # how many devices each rank has
    if any(len(of_devices) > 1 for of_devices in values.values()):
        of_all = cluster.gather(max(len(copies) for copies, _ in named.values()), _LOADS)
    for name, (copies, _) in named.items():
        for copy, value in zip(copies, _local(values[name], of_all, len(copies))):
            new = memory.from_numpy(value, copy.context)
            new.as_nd_ndarray().copyto(copy.as_nd_ndarray())
    return notes


def _read(path: str | os.PathLike) -> tuple[dict, dict[int, np.ndarray]]:
    content = files.read(path)
    with files.loading(path):
        return npz_file.read(content)


def _own_generator(header: dict, arrays: dict[int, np.ndarray]) -> tuple:
    """Return the state of this rank's generator, or rank 0's if the number of ranks has changed."""
    of_ranks = header.get("rng_of_ranks", [])
    is_own = len(of_ranks) == cluster.size()
    kind, number, *more = of_ranks[cluster.rank()] if is_own else header["rng"]
    state = kind, arrays[number], *more
    np.random.RandomState().set_state(state)  # refuses another kind, or other keys
    return state


def _named(params: Any) -> dict[str, tuple[Sequence[mx.nd.NDArray], bool]]:
    """Return each parameter's copies on this process's devices, and whether they may differ."""
    if not isinstance(params, gluon.Block):
        params = [*params]  # it may be a generator
        if not params:
            raise ValueError("params must hold one list of parameters per device, got no device")
        counts = [len(copies) for copies in params]
        if len({*counts}) > 1:
            raise ValueError(f"params must hold one list of equal length per device, got {counts}")
        return {str(i): (of, of[0].grad is None) for i, of in enumerate(zip(*params))}
    by_place = private_fields.params_by_place(params)  # the names that save_parameters uses
    return {name: (p.list_data(), p.grad_req == "null") for name, p in by_place.items()}


def _optimizer(trainer: gluon.Trainer, params: Any) -> optimizer_states.Section:
    """Return the section of the trainer's optimizer, with the parameters' places in the block.

    Gluon's own names depend on how many blocks were made before, and a Trainer sorts by them.
    """
    if not hasattr(trainer, "check_replicas"):  # MXNet's Trainer has as many states as devices
        raise TypeError(f"trainer must be a gluonpar.Trainer or None, got {trainer!r}")
    named = private_fields.params_by_place(params) if isinstance(params, gluon.Block) else {}
    names = {param: name for name, param in named.items()}
    listed = enumerate(private_fields.params(trainer))
    by_name = [(names.get(param, param.name), i, param) for i, param in listed]
    return optimizer_states.Section(private_fields.updaters(trainer)[0], by_name)


def _values(named: dict[str, tuple]) -> dict[str, list[np.ndarray]]:
    """Return on rank 0 each parameter's value, or, if they differ, its values on all devices."""
    digests = {
        name: {hashlib.sha256(copy.asnumpy()).hexdigest() for copy in copies}
        for name, (copies, may_differ) in named.items()
        if may_differ
    }
    ranks, values = cluster.gather(digests, _SAVES) if digests else [], {}
    for name, (copies, _) in named.items():
        if len({digest for rank in ranks for digest in rank.get(name, ())}) > 1:
            own = np.stack([copy.asnumpy() for copy in copies])
            every = cluster.gather_to_first(own, f"{_SAVES} ({name})")
            values[name] = [value for rank in every for value in rank]
        elif cluster.is_main():
            values[name] = [copies[0].asnumpy()]
    return values


def _checked_values(
    saved: list, arrays: dict[int, np.ndarray], named: dict[str, tuple]
) -> dict[str, list[np.ndarray]]:
    """Return the parameters' values in the file. Raises ValueError unless they fit the model."""
    values = {name: [arrays.pop(i) for i in numbers] for name, numbers in saved}
    for name in {**values, **named}:
        there = " and ".join(sorted({*map(_kind, values.get(name, []))})) or "missing"
        here = _kind(named[name][0][0]) if name in named else "unknown"
        if there != here:
            raise ValueError(
                f"it is of another model: parameter {name} is {there} in the file, but {here} here"
            )
    return values


def _kind(array: Any) -> str:
    """Return the shape and dtype of an array, such as '(2, 3) float32'."""
    return f"{tuple(array.shape)} {np.dtype(array.dtype).name}"


def _local(values: list[np.ndarray], of_all: list[int], num_devices: int) -> list[np.ndarray]:
    """Return the values for this process's devices, or their mean if the number has changed."""
    if len(values) == sum(of_all):
        first = sum(of_all[: cluster.rank()])
        return values[first : first + num_devices]
    mean = np.mean(values, axis=0, dtype="float64").astype(values[0].dtype)
    return [values[0] if len(values) == 1 else mean] * num_devices
