"""Ending and resuming a run: its checkpoints, and the signals that end it after a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from gluonpar import cluster
from gluonpar.checkpoint import files, load_checkpoint, npz_file, save_checkpoint
from gluonpar.options import Configuration
from gluonpar.training.data.dataset import Dataset
from gluonpar.training.history import Epoch
from gluonpar.training.workloads import Workload

# Options that must have the same values in a resumed run as in the run that it continues. A
# checkpoint has the second ones only if they are not the defaults.
_FIXED = ("model", "batch_size", "seed", "dataset", "limit")
_RULE = ("optimizer", "momentum", "wd")
# The numbers of a Progress, with their types.
_NUMBERS = {"epoch": int, "batch": int, "loss_sum": float, "seconds": float, "lr": float}


@dataclass
class Progress:
    """How far a run has come, as a checkpoint stores it.

    ``batch`` batches of epoch ``epoch`` (from 1) have taken ``seconds`` of training time, and the
    sum of their samples' losses is ``loss_sum``. ``history`` has the earlier epochs. ``lr`` is the
    learning rate of the next step.
    """

    epoch: int = 1
    batch: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    history: list[Epoch] = field(default_factory=list)
    lr: float = 0.0


class ResumeError(ValueError):
    """A checkpoint cannot be resumed, or the folder has checkpoints of another run."""


class Checkpointer:
    """Finds the checkpoint that a run resumes, loads it, and saves new ones into ``folder``.

    All processes must make a Checkpointer and call its methods; rank 0 reads and writes. ``saves``
    says whether any rank has a folder. ``resumed`` is the path of the checkpoint to resume, or
    None; ``progress`` is the progress that it stores. Raises ResumeError if the checkpoint is
    missing, damaged or of another run, or if the folder has later checkpoints.
    """

    def __init__(self, configuration: Configuration, folder: Path | None, data: Dataset) -> None:
        self._configuration, self._folder = configuration, folder
        self.saves = any(cluster.gather(folder is not None))
        self._identity = {
            name: value
            for name, value in vars(configuration).items()
            if name in _FIXED or name in _RULE and value != getattr(Configuration, name)
        }
        if configuration.early_stop:  # holds images out
            self._identity["early_stop"] = True
        self._identity["checksum of the data"] = data.checksums()
        try:
            found = cluster.together(self._find)
        except ValueError as error:
            raise ResumeError(str(error)) from error
        self.resumed, self.progress = cluster.gather(found)[0]

    def _find(self) -> tuple[Path | None, Progress]:
        """Return, on rank 0, the checkpoint to resume and its progress, after checking both."""
        path, progress = self._path_to_resume() if cluster.is_main() else None, Progress()
        if path:
            content = files.read(path)
            with files.loading(path):
                notes = npz_file.read(content)[0]["notes"]
                if not isinstance(notes, dict) or "run" not in notes:
                    raise ValueError("it is not a checkpoint of a training run")
                progress = Progress(**{name: kind(notes[name]) for name, kind in _NUMBERS.items()})
                progress.history = [Epoch(**results) for results in notes["history"]]
                identity = dict(notes["run"])
            now = self._identity
            names = [n for n in {**now, **identity} if identity.get(n) != now.get(n)]
            if names:
                what = "; ".join(
                    f"{n} was {identity.get(n)} and is now {now.get(n)}" for n in names
                )
                raise ValueError(f"{path} is a checkpoint of another run: {what}")
        paths = self.paths()
        if paths and _order(paths[-1]) > _order(self.path(progress)):
            raise ValueError(
                f"{paths[-1]} is a later checkpoint of an earlier run: resume it, or give "
                "another save_dir"
            )
        return path, progress

    def _path_to_resume(self) -> Path | None:
        """Return the checkpoint that ``resume`` names; None to start from the beginning.

        Raises ValueError for a folder without a checkpoint, unless it is ``save_dir``.
        """
        resume, model = self._configuration.resume, self._configuration.model
        if not resume:
            return self.paths()[-1] if resume == "" and self.paths() else None
        if os.path.isdir(resume):
            paths = self.paths(Path(resume))
            if not paths:
                raise ValueError(f"resume={resume!r} is a folder that has no checkpoint of {model}")
            return paths[-1]
        if not (os.path.isfile(resume) and resume.endswith(".npz")):
            what = "is another file" if os.path.exists(resume) else "does not exist"
            raise ValueError(
                "resume must be a checkpoint, NAME.npz, of a run with save_dir, or a folder that "
                f"has one; {resume} {what}"
            )
        return Path(resume)

    def load(self, workload: Workload, shuffle: np.random.RandomState) -> None:
        """Load the checkpoint to resume, if any, into ``workload`` and ``shuffle``.

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
        self, path: str, workload: Workload, shuffle: np.random.RandomState, progress: Progress
    ) -> None:
        """Write a checkpoint to ``path``, and remove all but the last ``keep``.

        ``shuffle`` is the generator as it was before the epoch was shuffled. Raises OSError, with
        earlier checkpoints unchanged, if the file cannot be written.
        """
        notes = {"run": self._identity, **asdict(progress)}
        save_checkpoint(path, workload.trained, workload.trainer, shuffle, notes)
        for old in self.paths()[: -self._configuration.keep]:
            old.unlink()

    def path(self, progress: Progress) -> Path:
        """Return the file for a checkpoint at ``progress``."""
        done = progress.epoch if progress.batch else progress.epoch - 1
        batch = f"-batch-{progress.batch:06d}" if progress.batch else ""
        name = f"{self._configuration.model}-epoch-{done:04d}{batch}.npz"
        return (self._folder or Path()) / name  # other ranks than 0 write nothing

    def paths(self, folder: Path | None = None) -> list[Path]:
        """Return the model's checkpoints in ``folder`` (default: the run's), oldest first."""
        folder, name = folder or self._folder, f"{self._configuration.model}-epoch-[0-9]*.npz"
        return sorted(folder.glob(name), key=_order) if folder else []


def _order(path: Path) -> tuple[int, str]:
    """Return a key that sorts checkpoints by the epoch and the batch in their names.

    >>> names = ["a-epoch-10000.npz", "a-epoch-9999.npz", "a-epoch-9999-batch-000120.npz"]
    >>> [path.stem for path in sorted(map(Path, names), key=_order)]
    ['a-epoch-9999-batch-000120', 'a-epoch-9999', 'a-epoch-10000']
    """
    return len(path.stem.partition("-batch-")[0]), path.name


class Terminated(Exception):
    """The run has ended before its last epoch because SIGTERM requested it."""


class Termination:
    """A request to end the run; all processes end it at the same step.

    In a job there are requests only if a rank ``saves``. Otherwise SIGTERM kills the rank that it
    is sent to, and so ends the job.
    """

    # A request in step n ends the run after step n + 2, since ranks learn of it while they compute.
    # mpirun kills the ranks a quarter of a second after SIGTERM.
    _DELAY = 2

    def __init__(self, saves: bool) -> None:
        self._requested = False
        self._signals = [signal.SIGTERM]
        if cluster.size() > 1:  # mpirun passes SIGUSR1 on to all ranks and waits for them
            self._signals = [signal.SIGTERM, signal.SIGUSR1] if saves else []
        self._of_ranks: deque[cluster.PendingGather] = deque()

    @contextlib.contextmanager
    def by_signal(self) -> Iterator[None]:
        """In this context the first signal requests the end; a second one has its usual effect."""

        def request(number: int, _: Any) -> None:
            signal.signal(number, before[number])
            self._requested = True

        before: dict[int, Any] = {n: signal.signal(n, request) for n in self._signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def is_due(self) -> bool:
        """Return whether the run is to end now: the same on all processes, which must call this."""
        if self._signals:
            self._of_ranks.append(cluster.PendingGather(self._requested, "requests to end the run"))
        return len(self._of_ranks) > self._DELAY and any(self._of_ranks.popleft().wait())
