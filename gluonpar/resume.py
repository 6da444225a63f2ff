"""A run's checkpoints: when they are written, which are kept, and how a run goes on from one."""

from __future__ import annotations

import pathlib
import re
from dataclasses import asdict
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar import cluster, metrics, rank_run, report
from gluonpar.data import Dataset
from gluonpar.learners import Learner
from gluonpar.training_state import load_checkpoint, save_checkpoint

# What must be as it was. Devices, learning rate, number of epochs and output may be others.
_FIXED = ("model", "batch_size", "seed", "dataset", "limit")


class CannotResume(ValueError):
    """What was asked about checkpoints cannot be; the message says why and what to do."""


class Terminated(Exception):
    """The run was asked to end (SIGTERM), and has written what it could."""


def check(configuration: Any) -> None:
    """Raise ValueError for a configuration whose wishes about checkpoints do not fit together."""
    if configuration.save_dir is None:
        if configuration.save_every is not None:
            raise ValueError(
                f"save_every={configuration.save_every} without a folder; give save_dir=DIR too"
            )
        if configuration.resume == "":
            raise ValueError("resume= needs to know what from; give a FILE or DIR, or save_dir=DIR")


class Keeper:
    """Writes a run's checkpoints into its ``folder`` (None: nowhere), and restores it from one.

    The run is at batch ``batch`` of epoch ``epoch``, ``loss_sum`` and ``seconds`` into that epoch.
    ``kept`` lists the checkpoints there are. With several processes all do as rank 0 does.
    """

    def __init__(
        self, configuration: Any, folder: pathlib.Path | None, console: report.Console
    ) -> None:
        self.config, self.folder, self.console = configuration, folder, console
        self.epoch, self.batch, self.loss_sum, self.seconds = 1, 0, 0.0, 0.0
        self.ending = False
        self._order = np.random.RandomState()

    def start(
        self, learner: Learner, shuffle: np.random.RandomState, data: Dataset, history
    ) -> None:
        """Go on from the checkpoint that was asked for, if one was.

        CannotResume if it cannot be loaded, is of another run, or the folder holds later ones.
        """
        self.learner, self.shuffle, self.history = learner, shuffle, history
        self.num_samples = len(data.train_labels)
        self.num_batches = -(-self.num_samples // self.config.batch_size)
        self._saves = any(cluster.gather(self.folder is not None))
        self._run = {
            **{name: getattr(self.config, name) for name in _FIXED},
            "checksum of the data": rank_run.checksums(data) if self._in_use else None,
        }
        try:
            path = cluster.gather(cluster.together(self._asked_for))[0]
            if path is not None:
                self._load(path)
            cluster.together(self._tidy)
        except ValueError as error:
            raise CannotResume(str(error)) from error

    def begin(self) -> metrics.LossMeter:
        """The epoch ``epoch``: what has been counted in it so far."""
        self._order.set_state(self.shuffle.get_state())
        self._reseed()
        done = min(self.batch * self.config.batch_size, self.num_samples)
        return metrics.LossMeter(self.loss_sum, done if cluster.is_main() else 0, self.batch)

    def due(self, number: int) -> bool:
        """Whether to call :meth:`save` after batch ``number`` of the epoch, counted from 1."""
        every, step = self.config.save_every, (self.epoch - 1) * self.num_batches + number
        periodic = self._saves and every and step % every == 0 and number < self.num_batches
        return self.ending or bool(periodic)

    def save(self, number: int, meter: metrics.LossMeter, seconds: float) -> None:
        """A checkpoint within the epoch. metrics.Diverged instead of one with NaN in it."""
        meter.read()
        metrics.check_finite(self.learner.params)
        self.batch, self.loss_sum, self.seconds = number, meter.total, seconds
        self._write()

    def end_epoch(self) -> None:
        """A checkpoint between epochs."""
        self.epoch, self.batch, self.loss_sum, self.seconds = self.epoch + 1, 0, 0.0, 0.0
        self._order.set_state(self.shuffle.get_state())
        self._write()

    def tried(self, write: Callable[..., None], path: pathlib.Path, *more: Any) -> bool:
        """``write(path, ...)``, and whether it went well; if the disk refuses, a line says so."""
        try:
            write(path, *more)
        except OSError as error:
            self.console.notice(
                f"error: {path} was not written ({error.strerror or error}); training goes on, and "
                "earlier files are as they were"
            )
            return False
        return True

    def ask_to_end(self) -> None:
        """Let the run end, with Terminated, after the next step. May be called by a signal."""
        self.ending = True

    @property
    def kept(self) -> list[str]:
        """The checkpoints in the folder, oldest first."""
        return [str(path) for path in self._found(self.folder)] if self.folder else []

    @property
    def _in_use(self) -> bool:
        return self._saves or self.config.resume is not None

    def _asked_for(self) -> pathlib.Path | None:
        """The checkpoint to go on from. Rank 0 looks."""
        resume = self.config.resume
        if resume is None or not cluster.is_main():
            return None
        path = pathlib.Path(resume) if resume else self.folder
        if not path.is_dir():
            return path
        found = self._found(path)
        if not found and resume:
            raise ValueError(
                f"there is no checkpoint of {self.config.model} in {path}; without resume the run "
                "starts at its beginning"
            )
        return found[-1] if found else None

    def _load(self, path: pathlib.Path) -> None:
        # Nothing has been trained yet, so it does no harm that this comes before the check.
        learner = self.learner
        notes = load_checkpoint(path, learner.trained, learner.trainer, self.shuffle)
        try:
            run, before = notes["run"], notes["configuration"]
            self.epoch, self.batch = notes["epoch"], notes["batch"]
            self.loss_sum, self.seconds = notes["loss_sum"], notes["seconds"]
            self.history.epochs[:] = [report.Epoch(**figures) for figures in notes["history"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is a checkpoint, but of no training run ({error})") from error
        differences = [
            f"{name}={self._run[name]}, but it was {name}={run.get(name)}"
            for name in self._run
            if self._run[name] != run.get(name)
        ]
        if differences:
            raise ValueError(f"{path} is of another run: {'; '.join(differences)}")
        if learner.trainer is not None:
            learner.trainer.set_learning_rate(self.config.lr)
        if before["lr"] != self.config.lr:
            self.console.notice(f"lr {self.config.lr:g} from here on; it was {before['lr']:g}")
        self.console.line(
            f"resumed: {path}, epoch {self.epoch}, {self.batch} of {self.num_batches} batches done"
        )

    def _tidy(self) -> None:
        """Remove what a killed run left half written; refuse to mix two runs in one folder."""
        if self.folder is None:
            return
        later = [path for path in self._found(self.folder) if _place(path) > self._here]
        if later:
            raise ValueError(
                f"{later[-1]} is of an earlier run and further on than this one; give resume= to "
                "go on from it, or another save_dir=DIR"
            )
        for path in self.folder.glob(f".{self.config.model}-at-*.tmp"):
            path.unlink()

    @property
    def _here(self) -> tuple[int, int]:
        return self.epoch, self.batch

    def _write(self) -> None:
        if self._saves:
            folder = self.folder or pathlib.Path()  # of rank 0; others write nothing
            path = folder / f"{self.config.model}-at-{self.epoch:04d}-{self.batch:06d}.npz"
            learner = self.learner
            what = learner.trained, learner.trainer, self._order, self._notes()
            if self.tried(save_checkpoint, path, *what) and self.folder:
                for old in self._found(self.folder)[: -self.config.keep]:
                    old.unlink()
            self._reseed()
        if self.ending:
            raise Terminated

    def _notes(self) -> dict[str, Any]:
        return {
            "run": self._run,
            "configuration": asdict(self.config),
            "epoch": self.epoch,
            "batch": self.batch,
            "loss_sum": self.loss_sum,
            "seconds": self.seconds,
            "history": [asdict(figures) for figures in self.history.epochs],
        }

    def _reseed(self) -> None:
        """MXNet's generator, whose state cannot be read, starts anew here and when resumed here."""
        seeds = np.random.RandomState([self.config.seed, *self._here])
        mx.random.seed(int(seeds.randint(2**31)))

    def _found(self, folder: pathlib.Path) -> Sequence[pathlib.Path]:
        found = [path for path in folder.glob(f"{self.config.model}-at-*.npz") if _place(path)]
        return sorted(found, key=_place)


def _place(path: pathlib.Path) -> tuple[int, ...]:
    """Epoch and batch in a checkpoint's name; empty if there are none."""
    numbers = re.fullmatch(r".*-at-(\d+)-(\d+)\.npz", path.name)
    return tuple(map(int, numbers.groups())) if numbers else ()
