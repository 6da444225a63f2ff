"""A run's checkpoints: when they are written, which are kept, and how a run goes on from one."""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections import deque
from dataclasses import asdict
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np

from gluonpar import cluster, metrics
from gluonpar.checkpoint import load_checkpoint, onnx_export, save_checkpoint
from gluonpar.runtime import memory
from gluonpar.training import console as report
from gluonpar.training import ranks
from gluonpar.training.data.dataset import Dataset
from gluonpar.training.workloads import Learner

# What must be as it was. Devices, learning rate, number of epochs and output may be others.
_FIXED = ("model", "batch_size", "seed", "dataset", "limit")

# Fewer take longer to read, for the devices have yet to come there; more let a launcher's patience
# run out, and mpirun's is a quarter of a second.
_STEPS_TO_AGREE = 2


class CannotResume(ValueError):
    """What was asked about checkpoints cannot be; the message says why and what to do."""


class Terminated(Exception):
    """The run was asked to end (SIGTERM), and has written what it could."""


def check(configuration: Any) -> None:
    """Raise ValueError for a configuration whose wishes about checkpoints do not fit together."""
    if configuration.save_dir == "":
        raise ValueError("save_dir='' is no folder's name; give save_dir=DIR, or leave it out")
    if configuration.save_dir is None:
        if configuration.save_every is not None:
            raise ValueError(
                f"save_every={configuration.save_every} without a folder; give save_dir=DIR too"
            )
        if configuration.onnx:
            raise ValueError("onnx=True needs a folder for its files; give save_dir=DIR too")
        if configuration.resume == "":
            raise ValueError("resume= needs to know what from; give a FILE or DIR, or save_dir=DIR")
    if configuration.onnx:
        try:
            onnx_export.check_onnx()
        except ImportError as error:
            raise ValueError(f"onnx=True cannot be: {error}") from error


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
        self.ending, self._asked, self._asking = False, False, deque()
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
            "checksum of the data": ranks.checksums(data) if self._in_use else None,
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
        self._agree_to_end(_STEPS_TO_AGREE)
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
        self._agree_to_end(0)
        self.epoch, self.batch, self.loss_sum, self.seconds = self.epoch + 1, 0, 0.0, 0.0
        self._order.set_state(self.shuffle.get_state())
        self._write()

    def export(self, epoch: int) -> list[str]:
        """The epoch's parameters in files for other programs; the paths of those written."""
        if self.folder is None:
            return []
        kinds = {".params": self.learner.save}
        if self.config.onnx:
            kinds[".onnx"] = self.learner.save_onnx
        stem = f"{self.config.model}-epoch-{epoch:04d}"
        paths = {self.folder / f"{stem}{suffix}": write for suffix, write in kinds.items()}
        return [str(path) for path, write in paths.items() if self.tried(write, path)]

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
        """Let the run end, with Terminated, after a checkpoint. May be called by a signal.

        One process does after the next step; several, of which one is enough to be asked, a few
        steps later, all after the same one.
        """
        self._asked = True

    def _agree_to_end(self, steps: int) -> None:
        """Set ``ending`` as soon as all processes know that one was asked, which takes a message.

        What they told each other is read when it is so many ``steps`` old: they have it by then.
        """
        if cluster.size() == 1:
            self.ending = self._asked
        elif self._saves:
            asked = memory.from_numpy(np.array([self._asked], "float32"), mx.cpu(0))
            cluster.allreduce([asked])
            self._asking.append(asked)
            while len(self._asking) > steps:
                self.ending |= self._asking.popleft().asscalar() > 0

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
        if not os.path.isdir(path):
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
            run, before = dict(notes["run"]), _number(notes["configuration"]["lr"])
            progress = _progress(notes)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a checkpoint, but of no training run ({error})") from error
        differences = [
            f"{name}={self._run[name]}, but it was {name}={run.get(name)}"
            for name in self._run
            if self._run[name] != run.get(name)
        ]
        if differences:
            raise ValueError(f"{path} is of another run: {'; '.join(differences)}")
        self.epoch, self.batch, self.loss_sum, self.seconds, self.history.epochs[:] = progress
        if self.batch > self.num_batches:
            raise ValueError(
                f"{path} is a checkpoint, but of no training run (it is at batch {self.batch} of "
                f"{self.num_batches})"
            )
        if learner.trainer is not None:
            learner.trainer.set_learning_rate(self.config.lr)
        if before != self.config.lr:
            self.console.notice(f"lr {self.config.lr:g} from here on; it was {before:g}")
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


def _progress(notes: dict[str, Any]) -> tuple[int, int, float, float, list[report.Epoch]]:
    """Epoch, batch, sum of losses, seconds and history; KeyError, TypeError, ValueError if none."""
    epoch, batch = notes["epoch"], notes["batch"]
    history = [report.Epoch(**figures) for figures in notes["history"]]
    for figures in history:
        for value in vars(figures).values():
            _number(value)
    if not isinstance(epoch, int) or not isinstance(batch, int) or batch < 0:
        raise ValueError(f"it is at batch {batch!r} of epoch {epoch!r}")
    if len(history) != epoch - 1:
        raise ValueError(f"it is in epoch {epoch} and tells of {len(history)} before")
    return epoch, batch, _number(notes["loss_sum"]), _number(notes["seconds"]), history


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return value


def _place(path: pathlib.Path) -> tuple[int, ...]:
    """Epoch and batch in a checkpoint's name; empty if there are none."""
    numbers = re.fullmatch(r".*-at-(\d+)-(\d+)\.npz", path.name)
    return tuple(map(int, numbers.groups())) if numbers else ()
