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

from gluonpar import (
    checkpoint,
    collectives,
    data,
    devices,
    graph,
    metrics,
    models,
    partition,
    report,
    threads,
)
from gluonpar.replicas import get_params
from gluonpar.step import check_lr, train_batch
from gluonpar.version import __version__

DEFAULT_LOG_INTERVAL = 50

# Steps that Python may be ahead of the devices: enough for the next batch to be prepared while this
# one trains, few enough that no more than these batches are in memory.
STEPS_IN_FLIGHT = 4

# With the book's 0.01 the first epoch does not leave chance level, and four epochs end at 0.72 to
# 0.77.
INIT_SCALE = 0.05


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
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_epochs", "limit", "log_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is too small; give 1 or more")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed} is out of range; give 0 to {2**31 - 1}")
        check_lr(self.lr)
        if self.algorithm is not None:
            collectives.named(self.algorithm)


class Run:
    """One run of training. Making it checks and loads everything; :meth:`train` trains.

    ``kept`` holds the paths of the files saved so far, and ``history`` what has been reached, also
    after an exception has ended the training.
    """

    def __init__(self, configuration: Configuration, console: report.Console) -> None:
        self.configuration, self.console = configuration, console
        choice = devices.choose(configuration.num_gpus, configuration.gpus, configuration.device)
        self.ctx = list(choice.ctx)
        threads.share(self.ctx)
        if configuration.plot:
            report.check_plot(configuration.plot)
        self.save_dir = (
            checkpoint.prepare(configuration.save_dir) if configuration.save_dir else None
        )
        self.data = data.load(configuration.dataset, configuration.data_dir, configuration.limit)
        self.kept: list[str] = []
        self.history = report.History(self.ctx)
        self.num_batches = -(-len(self.data.train_labels) // configuration.batch_size)
        if choice.notice:
            console.notice(choice.notice)

    def train(self) -> report.History:
        """Train to the end; the history. Raises metrics.Diverged if the loss is not finite."""
        mx.random.seed(self.configuration.seed)
        shuffle = np.random.RandomState(self.configuration.seed)
        params = models.init_lenet(INIT_SCALE)
        device_params = [get_params(params, c) for c in self.ctx]
        self.console.header(__version__, self._header(device_params))
        if self.configuration.dry_run:
            return self._dry_run(device_params, shuffle)
        for epoch in range(1, self.configuration.num_epochs + 1):
            seconds, loss = self._train_epoch(epoch, device_params, shuffle)
            self._finish_epoch(epoch, seconds, loss, device_params)
        self.history.params = device_params[0]
        self.console.result(self.history)
        return self.history

    def _train_epoch(self, epoch, device_params, shuffle) -> tuple[float, float]:
        """Seconds it took and the mean loss of its samples."""
        config, images, labels = self.configuration, self.data.train_images, self.data.train_labels
        meter, in_flight = metrics.LossMeter(), deque()
        batches = data.batches(images, labels, config.batch_size, shuffle)
        start = time.perf_counter()
        for number, (X, y) in enumerate(self.console.batches(batches, self.num_batches, epoch), 1):
            in_flight.append(self._step(X, y, device_params))
            meter.add(in_flight[-1])
            if len(in_flight) > STEPS_IN_FLIGHT:  # the only wait here: it bounds the memory in use
                in_flight.popleft()[0].wait_to_read()
            if number % (config.log_interval or DEFAULT_LOG_INTERVAL) == 0:
                self._log(epoch, number, self._read(meter, epoch))
        loss = self._read(meter, epoch)
        with self._explain_divergence(epoch):  # waits: the last update belongs to the epoch's time
            metrics.check_finite(device_params[0])
        return time.perf_counter() - start, loss

    def _step(self, X, y, device_params) -> list[mx.nd.NDArray]:
        config = self.configuration
        return train_batch(
            X, y, device_params, self.ctx, config.lr, pixel_lenet, algorithm=config.algorithm
        )

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

    def _finish_epoch(self, epoch: int, seconds: float, loss: float, device_params) -> None:
        """Evaluate, report and save what the epoch has reached."""
        reached = metrics.accuracy(
            self.data.test_images, self.data.test_labels, device_params, self.ctx, pixel_lenet
        )
        rate = len(self.data.train_labels) / seconds
        self.history.epochs.append(report.Epoch(epoch, seconds, loss, reached, rate))
        if self.save_dir:
            path = self.save_dir / f"lenet-epoch-{epoch:04d}.params"
            checkpoint.save_params(path, device_params[0])
            self.kept.append(str(path))
        self.console.epoch(self.history.epochs[-1])
        if self.configuration.plot:
            report.plot(self.history, self.configuration.plot)

    def _dry_run(self, device_params, shuffle) -> report.History:
        """One step on the first batch, to show that everything is in place."""
        meter = metrics.LossMeter()
        config = self.configuration
        first = next(
            data.batches(self.data.train_images, self.data.train_labels, config.batch_size, shuffle)
        )
        meter.add(self._step(*first, device_params))
        loss = self._read(meter, 1)
        self.console.line(
            f"dry run: 1 of {self.num_batches} batches of epoch 1 done, loss {loss:.3f}; "
            "nothing trained, nothing kept"
        )
        return self.history

    def _header(self, device_params) -> dict[str, str]:
        config, found = self.configuration, self.data
        shares = [size for size in partition.sizes(config.batch_size, len(self.ctx)) if size]
        each = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} or {shares[0]}"
        idle = len(self.ctx) - len(shares)
        largest = max(zip(*device_params), key=lambda copies: copies[0].size)
        epochs = _count(config.num_epochs, "epoch", "epochs")
        batches = _count(self.num_batches, "batch", "batches")
        images = f"{len(found.train_labels)} training and {len(found.test_labels)} test images"
        return {
            "devices": ", ".join(filter(None, [str(self.ctx), threads.describe(self.ctx)])),
            "batch size": f"{config.batch_size} in all, {each} on each device"
            + (f", none on {idle} of them" if idle else ""),
            "all-reduce": config.algorithm or str(collectives.explain(largest)),
            "data": f"{found.name}, {images}, {found.source}",
            "training": f"{epochs} of {batches}, lr {config.lr:g}, seed {config.seed}",
        }


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


@graph.traceable
def pixel_lenet(X: mx.nd.NDArray, params: list[mx.nd.NDArray]) -> mx.nd.NDArray:
    """LeNet on uint8 images: they travel to the device as bytes and become float32 there."""
    return models.lenet(models.standardize(X), params)


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
    :class:`Configuration`. With one seed and one number of devices, runs end with the same bits.
    Prints what ``scripts/train_lenet.py`` prints unless ``verbose`` is False. Raises ValueError for
    a request that cannot be met, FileNotFoundError if the data is nowhere, metrics.Diverged if the
    loss becomes NaN. ``train`` in Dive into Deep Learning, 13.5.7.
    """
    console = report.Console() if verbose else report.Console(io.StringIO(), io.StringIO())
    return Run(Configuration(num_gpus, batch_size, lr, num_epochs, **more), console).train()
