"""train: a whole run, from a configuration to a history."""

from __future__ import annotations

import contextlib
import io
import time
from collections import deque
from dataclasses import dataclass
from typing import Iterator

import mxnet as mx
import numpy as np

from gluonpar import cluster, collectives, metrics
from gluonpar.checkpoint import files
from gluonpar.collectives import partition
from gluonpar.runtime import devices, memory, threads
from gluonpar.runtime.version import __version__
from gluonpar.step import check_lr
from gluonpar.training import checkpointing as resume
from gluonpar.training import console as report
from gluonpar.training import ranks as rank_run
from gluonpar.training.data import dataset as data
from gluonpar.training.profiler import profile
from gluonpar.training.workloads import LEARNERS, Learner, check_room

DEFAULT_LOG_INTERVAL = 50

# Steps that Python may be ahead of the devices: enough for the next batch to be prepared while this
# one trains, few enough that no more than these batches are in memory.
STEPS_IN_FLIGHT = 4


@dataclass(frozen=True)
class Configuration:
    """What a run is asked to do. Raises ValueError, with value and remedy, for what cannot be."""

    num_gpus: int | None = None
    batch_size: int = 256
    lr: float = 0.2
    num_epochs: int = 4
    gpus: tuple[int, ...] | None = None
    device: str = "auto"
    seed: int = 0
    dataset: str = "fashion-mnist"
    data_dir: str | None = None
    limit: int | None = None
    algorithm: str | None = None
    log_interval: int | None = None
    save_dir: str | None = None
    plot: str | None = None
    profile: bool = False
    trace: str | None = None
    dry_run: bool = False
    model: str = "lenet"
    weights: tuple[float, ...] | None = None
    save_every: int | None = None
    keep: int = 3
    resume: str | None = None
    onnx: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_epochs", "limit", "log_interval", "save_every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is too small; give 1 or more")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed} is out of range; give 0 to {2**31 - 1}")
        check_lr(self.lr)
        resume.check(self)
        if self.algorithm is not None:
            collectives.named(self.algorithm)
        if self.model not in LEARNERS:
            raise ValueError(f"model={self.model!r} is none of {', '.join(LEARNERS)}")


class Run:
    """One run of training. Making it checks and loads everything; :meth:`train` trains.

    ``kept`` holds the paths of the files saved so far, and ``history`` what has been reached, also
    after an exception has ended the training. With several processes (:mod:`gluonpar.cluster`) each
    has its part of every batch; rank 0 prints, plots and saves for all.
    """

    def __init__(self, configuration: Configuration, console: report.Console) -> None:
        self.configuration = rank_run.without_output(configuration)
        self.console = rank_run.console(console)
        cluster.together(self._prepare)
        rank_run.agree(configuration, self.ctx, self.data)
        self.keeper = resume.Keeper(self.configuration, self.save_dir, self.console)

    def _prepare(self) -> None:
        """Check and load everything."""
        configuration = self.configuration
        choice = devices.choose(configuration.num_gpus, configuration.gpus, configuration.device)
        self.ctx = list(choice.ctx)
        if configuration.weights is not None:
            partition.check_weights(configuration.weights, len(self.ctx))
        if configuration.plot:
            report.check_plot(configuration.plot)
        if configuration.trace is not None:
            report.check_trace(configuration.trace)
        self.profiled = profile.Profiler(self.ctx, num_steps=0)
        if self._profiles:
            profile.check(self.ctx)
        self.save_dir = (
            files.make_writable_folder(configuration.save_dir) if configuration.save_dir else None
        )
        self.data = data.load(configuration.dataset, configuration.data_dir, configuration.limit)
        batch_size = min(configuration.batch_size, len(self.data.train_labels)) // cluster.size()
        check_room(configuration.model, self.ctx, batch_size)  # before threads start
        threads.share(self.ctx)
        self.kept: list[str] = []
        self.history = report.History(self.ctx, model=configuration.model)
        self.num_batches = -(-len(self.data.train_labels) // configuration.batch_size)
        if choice.notice:
            self.console.notice(choice.notice)

    def train(self) -> report.History:
        """Train to the end; the history. Raises metrics.Diverged if the loss is not finite."""
        config = self.configuration
        mx.random.seed(config.seed)
        shuffle = np.random.RandomState(config.seed)
        learner = LEARNERS[config.model](self.ctx, config.lr, config.algorithm)
        learner.weights = config.weights
        rank_run.agree_on_parameters(learner.name, learner.copies)
        self.console.header(__version__, self._header(learner))
        if config.dry_run:
            return self._dry_run(learner, shuffle)
        self.keeper.start(learner, shuffle, self.data, self.history)
        for epoch in range(self.keeper.epoch, config.num_epochs + 1):
            seconds, loss = self._train_epoch(epoch, learner, shuffle)
            self._finish_epoch(epoch, seconds, loss, learner)
            self.keeper.end_epoch()
        self.history.params = learner.params
        self.console.result(self.history)
        if config.profile:
            self.console.profile(self.profiled)
        return self.history

    def _train_epoch(self, epoch: int, learner: Learner, shuffle) -> tuple[float, float]:
        """Seconds it took and the mean loss of its samples."""
        config, images, labels = self.configuration, self.data.train_images, self.data.train_labels
        meter, in_flight = self.keeper.begin(), deque()
        part, done = rank_run.own_part(len(self.ctx), config.weights), self.keeper.batch
        batches = data.batches(images, labels, config.batch_size, shuffle, part, done)
        start = time.perf_counter() - self.keeper.seconds
        with self._watch(epoch, learner) as watched:
            batches = self.console.batches(watched.loading(batches), self.num_batches, epoch, done)
            for number, (X, y) in enumerate(batches, done + 1):
                in_flight.append(learner.step(X, y, self._num_samples(number)))
                meter.add(in_flight[-1])
                if len(in_flight) > STEPS_IN_FLIGHT:  # the only wait here: it bounds the memory
                    _wait_for(in_flight.popleft())
                watched.step()
                if number % (config.log_interval or DEFAULT_LOG_INTERVAL) == 0:
                    self._log(epoch, number, self._read(meter, epoch))
                if self.keeper.due(number):
                    with self._explain_divergence(epoch):
                        self.keeper.save(number, meter, time.perf_counter() - start)
        loss = self._read(meter, epoch)
        with self._explain_divergence(epoch):  # waits: the last update belongs to the epoch's time
            metrics.check_finite(learner.params)
        return time.perf_counter() - start, loss

    def _num_samples(self, number: int) -> int:
        """Of batch ``number``, counted from 1, on all ranks together."""
        batch_size = self.configuration.batch_size
        return min(batch_size, len(self.data.train_labels) - (number - 1) * batch_size)

    @property
    def _profiles(self) -> bool:
        return self.configuration.profile or self.configuration.trace is not None

    def _watch(self, epoch: int, learner: Learner) -> profile.Profiler:
        """What profiles some steps of the first epoch, if asked to; else, what does nothing."""
        if not self._profiles or epoch > 1:
            return profile.Profiler(self.ctx, num_steps=0)
        warm_up = min(profile.WARM_UP, (self.num_batches - 1) // 2)
        num_bytes = sum(map(memory.num_bytes, learner.params))
        self.profiled = profile.Profiler(self.ctx, num_bytes, warm_up)
        return self.profiled

    def _read(self, meter: metrics.LossMeter, epoch: int) -> float:
        with self._explain_divergence(epoch):
            return meter.read()

    @contextlib.contextmanager
    def _explain_divergence(self, epoch: int) -> Iterator[None]:
        config = self.configuration
        try:
            yield
        except metrics.Diverged as error:
            raise metrics.Diverged(
                f"{error} of {self.num_batches}, epoch {epoch}, with lr={config.lr:g} and batch "
                f"size {config.batch_size}; try a smaller learning rate, such as {config.lr / 10:g}"
            ) from None

    def _log(self, epoch: int, number: int, loss: float) -> None:
        self.console.progress(loss)
        if self.configuration.log_interval is not None:
            self.console.line(f"epoch {epoch}, batch {number}/{self.num_batches}, loss {loss:.3f}")

    def _finish_epoch(self, epoch: int, seconds: float, loss: float, learner: Learner) -> None:
        """Evaluate, report and save what the epoch has reached."""
        reached = learner.accuracy(self.data.test_images, self.data.test_labels)
        rate = len(self.data.train_labels) / seconds
        self.history.epochs.append(report.Epoch(epoch, seconds, loss, reached, rate))
        self.kept += self.keeper.export(epoch)
        self.console.epoch(self.history.epochs[-1])
        if self.configuration.plot:
            self.keeper.tried(lambda path: report.plot(self.history, path), self.configuration.plot)
        trace = self.configuration.trace if epoch == 1 else None
        if trace is not None and self.keeper.tried(self.profiled.save, trace):
            self.kept.append(trace)
            self.console.trace(trace, self.profiled)

    def _dry_run(self, learner: Learner, shuffle) -> report.History:
        """One step on the first batch, to show that everything is in place."""
        meter = metrics.LossMeter()
        config = self.configuration
        images, labels = self.data.train_images, self.data.train_labels
        part = rank_run.own_part(len(self.ctx), config.weights)
        first = next(data.batches(images, labels, config.batch_size, shuffle, part))
        meter.add(learner.step(*first, self._num_samples(1)))
        loss = self._read(meter, 1)
        self.console.line(
            f"dry run: 1 of {self.num_batches} batches of epoch 1 done, loss {loss:.3f}; "
            "nothing trained, nothing kept"
        )
        return self.history

    def _header(self, learner: Learner) -> dict[str, str]:
        config, found = self.configuration, self.data
        largest = max(learner.copies, key=lambda copies: copies[0].size)
        epochs = _count(config.num_epochs, "epoch", "epochs")
        batches = _count(self.num_batches, "batch", "batches")
        images = f"{len(found.train_labels)} training and {len(found.test_labels)} test images"
        ranks = cluster.size()
        weights = config.weights and config.weights * ranks
        several = {"processes": f"{ranks}, each with the devices of this one, rank 0"}
        return {
            **(several if ranks > 1 else {}),
            "devices": ", ".join(filter(None, [str(self.ctx), threads.describe(self.ctx)])),
            "batch size": _shares(config.batch_size, len(self.ctx) * ranks, weights),
            "all-reduce": config.algorithm or str(collectives.explain(largest)),
            "data": f"{found.name}, {images}, {found.source}",
            "training": f"{epochs} of {batches}, lr {config.lr:g}, seed {config.seed}",
        }


def _shares(batch_size: int, num_devices: int, weights: tuple[float, ...] | None) -> str:
    """How a batch is cut over the devices, in words."""
    sizes = partition.sizes(batch_size, num_devices, weights)
    shares = [size for size in sizes if size]
    idle = num_devices - len(shares)
    if weights is not None and not idle:
        return f"{batch_size} in all, {', '.join(map(str, shares))} on the devices by weight"
    each = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} or {shares[0]}"
    none = f", none on {idle} of them" if idle else ""
    return f"{batch_size} in all, {each} on each device{none}"


def _wait_for(losses: list[mx.nd.NDArray]) -> None:
    for loss in losses[:1]:  # none, if this rank had no sample
        loss.wait_to_read()


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def train(
    num_gpus: int | None = None,
    batch_size: int = 256,
    lr: float = 0.2,
    num_epochs: int = 4,
    verbose: bool = True,
    **more,
) -> report.History:
    """Train LeNet on ``num_gpus`` devices by hand-written data parallelism; the run's history.

    ``batch_size`` is global: it is cut over the devices. ``more`` are the other fields of
    :class:`Configuration`; ``model='resnet18'`` trains that, with a :class:`Trainer`. With one seed
    and one number of devices, runs end with the same bits. Prints what ``scripts/train_lenet.py``
    prints unless ``verbose`` is False. Raises ValueError for a request that cannot be met,
    FileNotFoundError if the data is nowhere, metrics.Diverged if the loss becomes NaN. ``train`` in
    Dive into Deep Learning, 13.5.7.
    """
    console = report.Console() if verbose else report.Console(io.StringIO(), io.StringIO())
    return Run(Configuration(num_gpus, batch_size, lr, num_epochs, **more), console).train()
