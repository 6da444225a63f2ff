"""A whole training run, from a configuration to a history."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections import Counter
from typing import Any, Callable, Iterator, Optional, Sequence

import mxnet as mx
import numpy as np

from gluonpar import cluster, collectives, metrics
from gluonpar.checkpoint import files, onnx_export
from gluonpar.install import __version__, memory_limits, processors
from gluonpar.options import LEARNING_RATES, Configuration, check_names
from gluonpar.plans import partition
from gluonpar.runtime import devices, threads
from gluonpar.sharding import share_of_batch
from gluonpar.training import history, profiler, workloads
from gluonpar.training.checkpointing import Checkpointer, Progress, Terminated, Termination
from gluonpar.training.data import dataset
from gluonpar.training.history import Console, Epoch, History
from gluonpar.training.profiler import Profiler

_MOST_UNREAD = 50  # batches between two reads of the loss, which are a tenth of an epoch if less
_LEAST_MEMORY = 500 * memory_limits.MB  # with less MXNet crashes instead of raising an error
# A run has diverged if an epoch's mean loss (chance level is 2.3) or a parameter is larger.
MOST_LOSS, MOST_PARAMETER = 1e3, 1e5

OnEpoch = Optional[Callable[[Epoch], Any]]

# Only rank 0 writes output. The values that these options have on the other ranks:
_RANK_ZERO_ONLY = {"save_dir": None, "plot": None, "history": None, "profile": False}
# Fields that may differ between ranks: machines have different devices and folders.
_MAY_DIFFER = {*_RANK_ZERO_ONLY, "gpus", "num_gpus", "device", "data_dir"}


class Run:
    """One training run. The constructor checks and loads everything; :meth:`train` trains.

    ``history`` has the finished epochs, and ``lost`` the paths of files that could not be written,
    also after an exception. With several processes (:mod:`gluonpar.cluster`) each trains on its
    share of every batch; rank 0 prints, plots and saves. ``on_epoch``: see :func:`train`.
    """

    def __init__(
        self, configuration: Configuration, console: Console, on_epoch: OnEpoch = None
    ) -> None:
        self.configuration, self.console = copy.copy(configuration), console
        self.num_ranks = cluster.size()
        if not cluster.is_main():
            vars(self.configuration).update(_RANK_ZERO_ONLY)  # frozen, and checked as a whole
            self.console = Console(io.StringIO(), io.StringIO())
        cluster.together(self._prepare)
        if self.num_ranks > 1:
            facts = {k: v for k, v in vars(configuration).items() if k not in _MAY_DIFFER}
            facts.update(gluonpar=__version__, mxnet=mx.__version__, numpy=np.__version__)
            facts["number of devices"] = len(self.ctx)
            cluster.check_equal({**facts, "checksum of the data": self.data.checksums()})
        self.checkpointer = Checkpointer(self.configuration, self.save_dir, self.data)
        self.termination = Termination(self.checkpointer.saves)
        self.lr = float(configuration.lr or 0.0)
        self.progress = Progress(lr=self.lr)
        self.history = History(self.ctx, self.progress.history, model=configuration.model)
        self.on_epoch = on_epoch
        self.semantics = mx.util.is_np_shape(), mx.util.is_np_array()
        self.lost: list[str] = []

    def _prepare(self) -> None:
        config = self.configuration
        ctx, notice = devices.choose(config.num_gpus, config.gpus, config.device)
        self.ctx = list(ctx)
        collectives.check_algorithm(config.algorithm, self.ctx)
        if config.weights is not None:
            partition.check_weights(config.weights, len(self.ctx))
        try:  # first, because the other files may be in this folder
            self.save_dir = files.make_writable_folder(config.save_dir) if config.save_dir else None
        except ValueError as error:
            raise ValueError(f"save_dir must be a folder for files: {error}") from error
        for path in self.save_dir.glob(f"{config.model}-epoch-*") if self.save_dir else ():
            if not path.is_file():
                raise ValueError(f"{path} is in the way of this run's files; give another save_dir")
        if config.onnx:
            onnx_export.check_onnx()
        if config.plot:
            history.check_plot(config.plot)
        if config.history:
            history.check_file("history", config.history)
        self.data = dataset.load(config.dataset, config.data_dir, config.limit)
        self.validation: Sequence[np.ndarray] = ()  # images and labels
        if config.early_stop:
            self.data, *self.validation = self.data.hold_out(config.seed)
        self.num_samples = len(self.data.train_labels)
        self.num_batches = -(-self.num_samples // config.batch_size)
        warm_up = min(profiler.WARM_UP, (self.num_batches - 1) // 2)
        self.profiler = Profiler(self.ctx, warm_up) if config.profile else None
        batch_size = min(config.batch_size, self.num_samples) // self.num_ranks
        if self.ctx[0].device_type == "cpu":
            num_bytes = _LEAST_MEMORY + batch_size * workloads.WORKLOADS[config.model].sample_bytes
            memory_limits.require(f"a step of {batch_size} samples", num_bytes)
        threads.share(self.ctx)
        if notice:
            self.console.notice(notice)

    def train(self) -> History:
        """Train to the last epoch; return the history.

        Raises metrics.DivergedError if the loss or a parameter is not finite, the mean loss of an
        epoch exceeds 1000, or a parameter exceeds 1e5; ResumeError; Terminated.
        """
        repeatable = self.configuration.deterministic
        with devices.deterministic() if repeatable else contextlib.nullcontext():
            with mx.util.np_array(False), mx.util.np_shape(False):  # the models are of mx.nd
                return self._train()

    def _train(self) -> History:
        config = self.configuration
        mx.random.seed(config.seed)
        self.shuffle = np.random.RandomState(config.seed)
        self.workload = workloads.WORKLOADS[config.model](self.ctx, config)
        self.console.header(self._header())
        if config.dry_run:
            meter = metrics.LossMeter()
            meter.add(self._step(1, *next(self._batches(self.shuffle))))
            done = f"1 of {self.num_batches} batches of epoch 1 done, loss {self._read(meter):.3f}"
            self.console.line(f"dry run: {done}; nothing was saved")
            return self.history
        self._resume()
        while self.progress.epoch <= config.num_epochs and not self._stops_early():
            self._train_epoch()
            if self._callback_stops():
                break
        self.history.params = [arrays[0] for arrays in self.workload.copies]
        self.console.result(self.history)
        saved = [path for path in (config.save_dir, config.plot, config.history) if path]
        if saved:
            self.console.line(f"saved: {', '.join(saved)}")
        # There is no profile if the run was resumed after the steps to profile.
        if self.profiler and self.profiler.steps[0] <= self.profiler.steps[1]:
            self.console.line(f"profile of epoch 1: {self.profiler.table()}")
        return self.history

    def _resume(self) -> None:
        self.checkpointer.load(self.workload, self.shuffle)
        if not self.checkpointer.resumed:
            return
        self.progress = progress = self.checkpointer.progress
        self.history.epochs = progress.history
        if progress.lr != self.lr:
            self.console.notice(f"lr is {self.lr:g} from here on; it was {progress.lr:g}")
            progress.lr = self.lr
        place = f"epoch {progress.epoch}, {progress.batch} of {self.num_batches} batches done"
        self.console.line(f"resumed: {self.checkpointer.resumed}, {place}")

    def _train_epoch(self) -> None:
        # self.shuffle keeps its state from before this epoch until the epoch is complete: a
        # checkpoint within the epoch stores that state, so that a resumed run shuffles alike.
        shuffle = copy.deepcopy(self.shuffle)
        self._reseed()
        self._finish_epoch(*self._train_batches(shuffle))
        ends = self.termination.is_due()
        self.shuffle = shuffle
        self.progress = Progress(self.progress.epoch + 1, history=self.history.epochs, lr=self.lr)
        self._save_checkpoint(ends)

    def _train_batches(self, shuffle: np.random.RandomState) -> tuple[float, float]:
        """Train on the rest of the epoch; return the epoch's seconds and its mean loss."""
        config, progress, done = self.configuration, self.progress, self.progress.batch
        start = time.perf_counter() - progress.seconds
        samples_done = min(done * config.batch_size, self.num_samples) if cluster.is_main() else 0
        meter = metrics.LossMeter(progress.loss_sum, samples_done, done)
        interval = config.log_interval or min(_MOST_UNREAD, max(1, self.num_batches // 10))
        batches = self.console.batches(
            self._batches(shuffle, done), self.num_batches, config.batch_size, progress.epoch, done
        )
        watched = self.profiler if progress.epoch == 1 else None
        with watched or contextlib.nullcontext():
            for number, (X, y) in enumerate(batches, done + 1):
                meter.add(self._step(number, X, y), [copies[0] for copies in self.workload.copies])
                if watched:
                    watched.step()
                if number % interval == 0:
                    loss, place = self._read(meter), f"batch {number}/{self.num_batches}"
                    self.console.progress(loss)
                    if config.log_interval:
                        self.console.line(f"epoch {progress.epoch}, {place}, loss {loss:.3f}")
                ends = self.termination.is_due()
                if ends or self._checkpoint_is_due(number):
                    progress.batch, progress.seconds = number, time.perf_counter() - start
                    self._read(meter)
                    progress.loss_sum = meter.total
                    self._save_checkpoint(ends)
        loss = self._read(meter)  # waits: the last update belongs to the epoch's time
        return time.perf_counter() - start, loss

    def _batches(self, shuffle: np.random.RandomState, first: int = 0) -> Iterator[tuple]:
        share = share_of_batch(len(self.ctx), self.configuration.weights)
        images, labels = self.data.train_images, self.data.train_labels
        return dataset.batches(images, labels, self.configuration.batch_size, shuffle, share, first)

    def _step(self, number: int, X: np.ndarray, y: np.ndarray) -> Sequence[mx.nd.NDArray]:
        """Train on this rank's share of batch ``number``, from 1; return the losses."""
        size = self.configuration.batch_size
        batch_size = min(size, self.num_samples - (number - 1) * size)
        return self.workload.step(X, y, batch_size, self.lr)

    def _reseed(self) -> None:
        """Seed MXNet's generator by epoch and batch: a checkpoint cannot hold its state."""
        place = [self.configuration.seed, self.progress.epoch, self.progress.batch]
        mx.random.seed(int(np.random.RandomState(place).randint(2**31)))

    def _stops_early(self) -> bool:
        """Return whether ``early_stop`` epochs have passed without a better accuracy."""
        wait, epochs = self.configuration.early_stop, self.history.epochs
        if wait is None or not epochs:
            return False
        best = max(epochs, key=lambda epoch: epoch.validation_accuracy or 0.0)  # the first of them
        if epochs[-1].epoch - best.epoch < wait:
            return False
        reached = f"validation acc {best.validation_accuracy:.4f} of epoch {best.epoch}"
        self.console.line(f"early stop: {reached} was not exceeded in {wait} epochs")
        return True

    def _callback_stops(self) -> bool:
        """Call ``on_epoch`` with the last epoch; return whether it ends the run, on some rank."""
        (np_shape, np_array), epoch = self.semantics, self.history.epochs[-1]
        with mx.util.np_shape(np_shape), mx.util.np_array(np_array):
            stops = self.on_epoch is not None and bool(self.on_epoch(epoch))
        if not any(cluster.gather(stops)):
            return False
        self.console.line(f"on_epoch ended the run after epoch {epoch.epoch}")
        return True

    def _checkpoint_is_due(self, number: int) -> bool:
        """Return whether ``save_every`` calls for a checkpoint within the epoch, at this batch."""
        every, done = self.configuration.save_every, (self.progress.epoch - 1) * self.num_batches
        within = self.checkpointer.saves and number < self.num_batches
        return within and every is not None and (done + number) % every == 0

    def _save_checkpoint(self, ends: bool) -> None:
        """Save a checkpoint if there is a folder for it; raise Terminated if the run ends here."""
        if self.checkpointer.saves:
            state = self.workload, self.shuffle, self.progress
            path = str(self.checkpointer.path(self.progress))
            self._write(path, lambda path: self.checkpointer.save(path, *state))
            self._reseed()
        if ends:
            raise Terminated

    def _write(self, path: str, write: Callable[[str], Any]) -> None:
        """Call ``write(path)``; print a notice if that fails."""
        try:
            write(path)
        except OSError as error:
            self.console.notice(f"error: {path} was not written ({error}); training goes on")
            self.lost.append(path)

    def _read(self, meter: metrics.LossMeter) -> float:
        """Wait for the mean loss; DivergedError names epoch, learning rate and batch size."""
        try:
            loss = meter.read()
        except metrics.DivergedError as error:
            raise self._diverged(str(error)) from error
        if not loss <= MOST_LOSS:
            raise self._diverged(f"the mean loss rose to {loss:.3g} by batch {meter.num_batches}")
        return loss

    def _diverged(self, reason: str) -> metrics.DivergedError:
        smaller = min(self.lr / 10, LEARNING_RATES[self.configuration.model])
        return metrics.DivergedError(
            f"{reason} of {self.num_batches}, epoch {self.progress.epoch}, with lr={self.lr:g} and "
            f"batch size {self.configuration.batch_size}; try a smaller learning rate, such as "
            f"{smaller:g}, or look at that batch's images and labels"
        )

    def _finish_epoch(self, seconds: float, loss: float) -> None:
        """Evaluate; save, plot and print the epoch's results."""
        config, epoch = self.configuration, self.progress.epoch
        largest = max(float(arrays[0].abs().max().asscalar()) for arrays in self.workload.copies)
        if largest > MOST_PARAMETER:  # the losses are from before the last update
            raise self._diverged(f"a parameter rose to {largest:.3g} by batch {self.num_batches}")
        accuracy = self.workload.accuracy(self.data.test_images, self.data.test_labels)
        validation = self.workload.accuracy(*self.validation) if self.validation else None
        speed = self.num_samples / seconds
        results = Epoch(epoch, seconds, loss, accuracy, speed, self.lr, validation)
        self.history.epochs.append(results)
        if self.save_dir:
            file = self.save_dir / f"{config.model}-epoch-{epoch:04d}"
            self._write(f"{file}.params", self.workload.save)
            if config.onnx:
                self._write(f"{file}.onnx", self.workload.save_onnx)
        if config.plot:
            self._write(config.plot, self.history.plot)
        if config.history:
            self._write(config.history, self.history.write)
        self.console.epoch(results)

    def _header(self) -> dict[str, str]:
        """Return the header's rows; every process must call this."""
        config, data, num_ranks = self.configuration, self.data, self.num_ranks
        # In a job other ranks would count as other programs.
        alone = num_ranks == 1 and self.ctx[0].device_type == "cpu"
        largest = max(self.workload.copies, key=lambda copies: copies[0].size)
        largest_batch = min(config.batch_size, self.num_samples)
        weights = config.weights and config.weights * num_ranks
        sizes = partition.sizes(largest_batch, len(self.ctx) * num_ranks, weights)
        shards = f"{' or '.join(map(str, sorted({*sizes})))} on each device"
        if 0 in sizes:  # then no device has more than one
            those = f"each of {largest_batch} device{'s' * (largest_batch > 1)}"
            shards = f"1 on {those}, none on {sizes.count(0)}"
        elif weights:
            shards = f"{', '.join(map(str, sizes))} on the devices by weight"
        held_out = f", {len(self.validation[1])} validation" if self.validation else ""
        epochs = f"{config.num_epochs} epoch{'s' * (config.num_epochs > 1)}"
        rule = [f"{epochs} of {self.num_batches} batch{'es' * (self.num_batches > 1)}"]
        rule += [config.optimizer] * (config.optimizer != "sgd") + [f"lr {self.lr}"]
        rule += [f"{n} {getattr(config, n):g}" for n in ("momentum", "wd") if getattr(config, n)]
        return {
            "processes": str(num_ranks) if num_ranks > 1 else "",
            "devices": _describe_devices(self.ctx, num_ranks),
            "processors": processors.shared() if alone else "",
            "batch size": f"{largest_batch} in all, {shards}",
            "all-reduce": config.algorithm or str(collectives.explain(largest)),
            "data": f"{data.name}, {self.num_samples} training{held_out} and "
            f"{len(data.test_labels)} test images, {data.source}",
            "training": f"{', '.join(rule)}, seed {config.seed}",
        }


def _describe_devices(ctx: Sequence[mx.Context], num_ranks: int) -> str:
    """Return the devices of all processes; every process must call this."""
    described = str(ctx), threads.describe(ctx), devices.staged(ctx)
    processes = Counter(cluster.gather(", ".join(filter(None, described))))
    if num_ranks == 1:
        return next(iter(processes))
    kinds = (f"in {n} process{'es' * (n > 1)} with {each}" for each, n in processes.items())
    return f"{num_ranks * len(ctx)}, {'; '.join(kinds)}"


def train(
    num_gpus: int | None = None,
    batch_size: int = 256,
    lr: float | None = None,
    num_epochs: int = 4,
    verbose: bool = True,
    on_epoch: OnEpoch = None,
    **options: Any,
) -> History:
    """Train LeNet on ``num_gpus`` devices by hand-written data parallelism; return the history.

    Each batch of ``batch_size`` samples is split over the devices. ``options`` are the other fields
    of :class:`Configuration`; ``model='resnet18'`` trains ResNet-18 with a :class:`Trainer`. Runs
    with the same seed and number of CPU devices end with the same bits; on GPUs they do with
    ``deterministic=True``, if no convolution of the same shape was computed before without it.
    Prints what ``gluonpar train`` prints unless ``verbose`` is False.

    ``on_epoch(epoch)`` is called on every rank after each epoch, when its files and checkpoint have
    been written, with its :class:`~gluonpar.training.Epoch`. If it returns a true value on a rank,
    the run ends as after its last epoch. An exception that it raises reaches the caller.

    Raises ValueError for values that are not allowed or cannot be met, TypeError for options that
    do not exist or values of another type, FileNotFoundError if the data are not found, and
    metrics.DivergedError if the loss or a parameter is not finite, or the mean loss of an epoch
    exceeds 1000. After ``train`` in Dive into Deep Learning, 13.5.7.
    """
    console = Console() if verbose else Console(io.StringIO(), io.StringIO())
    check_names(Configuration, options)
    configuration = Configuration(num_gpus, batch_size, lr, num_epochs, **options)
    return Run(configuration, console, on_epoch).train()
