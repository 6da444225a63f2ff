"""The checkpoints of a run: saved into a folder, and loaded to resume the run."""

from __future__ import annotations

import os
import pathlib
import re
from dataclasses import asdict
from typing import Any

import numpy as np

from gluonpar import cluster
from gluonpar.checkpoint import files, load_checkpoint, npz_file, save_checkpoint
from gluonpar.training.configuration import Configuration
from gluonpar.training.data.dataset import Dataset
from gluonpar.training.history import Epoch, Progress
from gluonpar.training.workloads import Workload

# Fields that a resumed run must share with its checkpoint; the others may change.
_FIXED = ("model", "batch_size", "seed", "dataset", "limit", "optimizer", "momentum", "wd")

_NAME = re.compile(r".*-epoch-(\d+)(?:-batch-(\d+))?\.npz")


class ResumeError(ValueError):
    """A checkpoint cannot be resumed, or the folder has checkpoints of another run."""


class Checkpointer:
    """Finds the checkpoint that a run resumes, loads it, and saves new ones into ``folder``.

    All processes must make a Checkpointer and call its methods; rank 0 reads and writes. ``saves``
    is whether a rank has a folder. ``resumed`` is the path of the checkpoint to resume, or None,
    and ``progress`` how far that run had come. Raises ResumeError if the checkpoint is missing,
    damaged or of another run, and if the folder has later checkpoints.
    """

    def __init__(
        self, configuration: Configuration, folder: pathlib.Path | None, data: Dataset
    ) -> None:
        self._configuration, self._folder = configuration, folder
        self.saves = any(cluster.gather(folder is not None))
        self._identity = {
            **{name: getattr(configuration, name) for name in _FIXED},
            **({"early_stop": True} if configuration.early_stop else {}),  # which holds out images
            "checksum of the data": data.checksums(),
        }
        try:
            found = cluster.together(self._find)
        except ValueError as error:
            raise ResumeError(str(error)) from error
        self.resumed, self.progress = cluster.gather(found)[0]

    def _find(self) -> tuple[pathlib.Path | None, Progress]:
        """Return, on rank 0, the checkpoint to resume and its progress, after checking both."""
        path, progress = self._path_to_resume() if cluster.is_main() else None, Progress()
        if path:
            content = files.read(path, "checkpoint")
            notes = npz_file.parsed(content, lambda header, _: dict(header["notes"]), path)
            progress, identity = _parse(path, notes)
            differences = [
                f"{name} was {identity.get(name)} and is now {value}"
                for name, value in self._identity.items()
                if value != identity.get(name)
            ]
            if differences:
                raise ValueError(f"{path} is a checkpoint of another run: {'; '.join(differences)}")
        paths = self.paths()
        if paths and _place(paths[-1]) > (progress.epoch, progress.batch):
            raise ValueError(
                f"{paths[-1]} is a later checkpoint of an earlier run: resume='' continues it; or "
                "give another save_dir"
            )
        return path, progress

    def _path_to_resume(self) -> pathlib.Path | None:
        """Return the checkpoint that ``resume`` names; None to start from the beginning.

        Raises ValueError for a folder without a checkpoint, unless it is ``save_dir``.
        """
        resume, model = self._configuration.resume, self._configuration.model
        if resume and not os.path.isdir(resume):
            return pathlib.Path(resume)
        if resume is None:
            return None
        paths = _checkpoints(pathlib.Path(resume), model) if resume else self.paths()
        if not paths and resume:
            raise ValueError(
                f"resume={resume!r} is a folder that has no checkpoint of {model}; leave it out to "
                "start from the beginning"
            )
        return paths[-1] if paths else None

    def load(self, workload: Workload, shuffle: np.random.RandomState) -> None:
        """Load the checkpoint to resume, if any, into the workload and the generator.

        Raises ResumeError if that fails. Removes incomplete files of a killed run from the folder.
        """
        if self.resumed:
            try:
                load_checkpoint(self.resumed, workload.trained, workload.trainer, shuffle)
            except ValueError as error:
                raise ResumeError(str(error)) from error
        if self._folder:
            for path in self._folder.glob(f".{self._configuration.model}-*.tmp"):
                path.unlink()

    def save(
        self,
        path: str | os.PathLike,
        workload: Workload,
        shuffle: np.random.RandomState,
        progress: Progress,
    ) -> None:
        """Write a checkpoint to ``path``; OSError, with earlier ones unchanged, if that fails.

        ``shuffle`` is the generator as it was before the epoch was shuffled.
        """
        notes = {"run": self._identity, "configuration": asdict(self._configuration)}
        notes.update(asdict(progress))
        save_checkpoint(path, workload.trained, workload.trainer, shuffle, notes)

    def path(self, progress: Progress) -> pathlib.Path:
        """Return the file for a checkpoint at ``progress``."""
        done = progress.epoch if progress.batch else progress.epoch - 1
        batch = f"-batch-{progress.batch:06d}" if progress.batch else ""
        name = f"{self._configuration.model}-epoch-{done:04d}{batch}.npz"
        return (self._folder or pathlib.Path()) / name  # other ranks than 0 write nothing

    def paths(self) -> list[pathlib.Path]:
        """Return the checkpoints in the run's folder, oldest first."""
        return _checkpoints(self._folder, self._configuration.model) if self._folder else []


def _checkpoints(folder: pathlib.Path, model: str) -> list[pathlib.Path]:
    """Return the checkpoints of ``model`` in ``folder``, oldest first."""
    return sorted(filter(_place, folder.glob(f"{model}-*.npz")), key=_place)


def _place(path: pathlib.Path) -> tuple[int, ...]:
    """Return the epoch and the number of its batches that are done, from a checkpoint's name.

    >>> names = ("lenet-epoch-0001.npz", "lenet-epoch-0002-batch-000120.npz", "a.npz")
    >>> [_place(pathlib.Path(name)) for name in names]
    [(2, 0), (2, 120), ()]
    """
    match = _NAME.fullmatch(path.name)
    if not match:
        return ()
    epoch, batch = match.groups()
    return (int(epoch), int(batch)) if batch else (int(epoch) + 1, 0)


def _parse(path: pathlib.Path, notes: dict[str, Any]) -> tuple[Progress, dict[str, Any]]:
    """Return a run's progress, and what identifies it, from the notes of its checkpoint."""
    try:
        lr, history = float(notes["lr"]), [Epoch(**results) for results in notes["history"]]
        sums = float(notes["loss_sum"]), float(notes["seconds"])
        progress = Progress(int(notes["epoch"]), int(notes["batch"]), *sums, history, lr)
        return progress, dict(notes["run"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a checkpoint of a training run: {error}") from error
