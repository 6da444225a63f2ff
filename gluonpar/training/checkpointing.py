"""The checkpoints of a run: saved into a folder, and loaded to resume the run."""

from __future__ import annotations

import os
import pathlib
import re
from dataclasses import asdict

import numpy as np

from gluonpar import cluster
from gluonpar.checkpoint import load_checkpoint, save_checkpoint
from gluonpar.training import ranks
from gluonpar.training.configuration import Configuration
from gluonpar.training.data.dataset import Dataset
from gluonpar.training.history import Epoch, Progress
from gluonpar.training.workloads import Workload

# Fields that a resumed run must share with its checkpoint; the others may change.
_FIXED = ("model", "batch_size", "seed", "dataset", "limit")


class CannotResume(ValueError):
    """A checkpoint that cannot be resumed, or a folder that has the checkpoints of another run."""


class Checkpointer:
    """Saves a run's progress into ``folder`` (None: nowhere), and loads it.

    All processes must call its methods; rank 0 reads and writes. ``saves`` is whether any saves.
    """

    def __init__(
        self, configuration: Configuration, folder: pathlib.Path | None, data: Dataset
    ) -> None:
        self._configuration, self._folder = configuration, folder
        self.saves = any(cluster.gather(folder is not None))
        in_use = self.saves or configuration.resume is not None
        self._identity = {
            **{name: getattr(configuration, name) for name in _FIXED},
            "checksum of the data": ranks.checksums(data) if in_use else None,
        }

    def load(
        self, workload: Workload, shuffle: np.random.RandomState
    ) -> tuple[pathlib.Path, Progress, float] | None:
        """Load the checkpoint that the configuration names, if any, into the arguments.

        Returns its file, progress and learning rate. Raises CannotResume if it cannot be loaded or
        is of another run, or if the folder has later checkpoints.
        """
        try:
            path = cluster.gather(cluster.together(self._path_to_resume))[0]
            progress, lr = self._load(path, workload, shuffle) if path else (Progress(), 0.0)
            cluster.together(lambda: self._prepare_folder(progress))
        except ValueError as error:
            raise CannotResume(str(error)) from error
        return (path, progress, lr) if path else None

    def save(self, workload: Workload, shuffle: np.random.RandomState, progress: Progress) -> None:
        """Write a checkpoint, and remove the oldest if there are more than ``keep``.

        ``shuffle`` is the generator's state from before the epoch was shuffled. Raises OSError,
        with earlier checkpoints unchanged, if the file cannot be written.
        """
        notes = {"run": self._identity, "configuration": asdict(self._configuration)}
        notes.update(asdict(progress))
        save_checkpoint(self.path(progress), workload.trained, workload.trainer, shuffle, notes)
        for old in self.paths()[: -self._configuration.keep]:
            old.unlink()

    def path(self, progress: Progress) -> pathlib.Path:
        """Return the file for a checkpoint at ``progress``."""
        name = f"{self._configuration.model}-at-{progress.epoch:04d}-{progress.batch:06d}.npz"
        return (self._folder or pathlib.Path()) / name  # other ranks than 0 write nothing

    def paths(self, folder: pathlib.Path | None = None) -> list[pathlib.Path]:
        """Return the checkpoints in ``folder`` (default: the run's), oldest first."""
        folder = folder or self._folder
        found = folder.glob(f"{self._configuration.model}-at-*.npz") if folder else ()
        return sorted(filter(_place, found), key=_place)

    def _path_to_resume(self) -> pathlib.Path | None:
        resume = self._configuration.resume
        if resume is None or not cluster.is_main():
            return None
        path = pathlib.Path(resume) if resume else self._folder
        if not os.path.isdir(path):
            return path
        found, model = self.paths(path), self._configuration.model
        if not found and resume:
            raise ValueError(f"{path} has no checkpoint of {model}: to start anew, omit resume")
        return found[-1] if found else None

    def _load(
        self, path: pathlib.Path, workload: Workload, shuffle: np.random.RandomState
    ) -> tuple[Progress, float]:
        # The parameters change before the notes are checked: the run ends if these are wrong.
        notes = load_checkpoint(path, workload.trained, workload.trainer, shuffle)
        try:
            identity, lr = dict(notes["run"]), float(notes["configuration"]["lr"])
            history = [Epoch(**results) for results in notes["history"]]
            place = [int(notes["epoch"]), int(notes["batch"])]
            progress = Progress(*place, float(notes["loss_sum"]), float(notes["seconds"]), history)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a checkpoint of a training run: {error}") from error
        differences = [
            f"{name} was {identity.get(name)} and is now {value}"
            for name, value in self._identity.items()
            if value != identity.get(name)
        ]
        if differences:
            raise ValueError(f"{path} is a checkpoint of another run: {'; '.join(differences)}")
        return progress, lr

    def _prepare_folder(self, progress: Progress) -> None:
        """Remove incomplete files of a killed run; refuse to mix two runs in one folder."""
        paths = self.paths()
        if paths and _place(paths[-1]) > (progress.epoch, progress.batch):
            raise ValueError(
                f"{paths[-1]} is a later checkpoint of an earlier run: give resume to continue "
                "that run, or another save_dir"
            )
        if self._folder:
            for path in self._folder.glob(f".{self._configuration.model}-at-*.tmp"):
                path.unlink()


def _place(path: pathlib.Path) -> tuple[int, ...]:
    """Return epoch and batch from a checkpoint's name; () if the name has none."""
    numbers = re.fullmatch(r".*-at-(\d+)-(\d+)\.npz", path.name)
    return tuple(map(int, numbers.groups())) if numbers else ()
