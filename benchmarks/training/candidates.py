"""The candidates of the training benchmark, and the measurement of one or several settings."""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx

from benchmarks.jobs import (
    Comparison,
    Program,
    expected_loss,
    horovodrun,
    is_wrong,
    process_per_device,
)
from benchmarks.training.workloads import WORKLOADS
from gluonpar.diagnostics.harness import Progress, Samples, turns

OURS, TRAINER, REFERENCE = "gluonpar", "trainer device", "one context"
ALONE, PROCESSES, HOROVOD = "no exchange", "processes", "horovod"

_OURS = Program("training.train_batch", "train_batch with a plain function", "gluonpar")
_GLUON = functools.partial(Program, "training.gluon")
_OUR_TRAINER = _GLUON(
    "gluonpar.Trainer, hybridized static", "gluonpar", options={"trainer": "gluonpar"}
)
_OUR_STORE = _GLUON(
    "gluon.Trainer(kvstore='gluonpar'), hybridized static",
    "gluonpar",
    options={"kvstore": "gluonpar"},
)
_REFERENCE = _GLUON(
    "gluon.Trainer, hybridized static, whole batch on device 0 with every core (OMP_NUM_THREADS), "
    "without gluonpar",
    "mxnet",
    options={"one_context": True},
    team="all",
    splits=False,
)
_PREPARED = "with OMP_NUM_THREADS=cores/K in the environment"
_TENSORFLOW = Program(
    "training.tensorflow_mirrored", "TensorFlow's MirroredStrategy, one process, as it comes"
)
_JAX = Program("training.jax_shard_map", "JAX's shard_map, one process, as it comes")
_ONE_DEVICE = {"options": {"one_device": True}, "splits": False}
CANDIDATES = {
    OURS: _OURS,
    "book": Program("training.book", "Dive into Deep Learning 13.5, MXNet as it comes", "mxnet"),
    TRAINER: _GLUON(
        "gluon.Trainer(kvstore='device'), hybridized static, MXNet as it comes", "mxnet"
    ),
    "trainer device imported": _GLUON(
        "gluon.Trainer(kvstore='device'), hybridized static, after import gluonpar", "gluonpar"
    ),
    "gluonpar trainer": _OUR_TRAINER,
    "gluonpar trainer prepared": dataclasses.replace(
        _OUR_TRAINER, about=f"gluonpar.Trainer {_PREPARED}", team="share"
    ),
    "trainer gluonpar": _OUR_STORE,
    "trainer gluonpar prepared": dataclasses.replace(
        _OUR_STORE, about=f"gluon.Trainer(kvstore='gluonpar') {_PREPARED}", team="share"
    ),
    REFERENCE: _REFERENCE,
    "one context as it comes": dataclasses.replace(
        _REFERENCE, about="whole batch on device 0, MXNet as it comes", team=""
    ),
    "one context imported": dataclasses.replace(
        _REFERENCE,
        about="whole batch on device 0 with every core, after import gluonpar",
        runtime="gluonpar",
        team="",
    ),
    "torch ddp": Program(
        "training.torch_ddp",
        "PyTorch DistributedDataParallel, gloo, a process per device",
        launch=process_per_device,
        team="share",
        ranks=True,
    ),
    HOROVOD: Program(
        "training.horovod_gluon",
        "Horovod DistributedTrainer, gloo, a process per device, hybridized static, MXNet as it "
        "comes",
        "mxnet",
        launch=horovodrun,
        team="share",
        ranks=True,
    ),
    "tensorflow mirrored": _TENSORFLOW,
    "tensorflow one device": dataclasses.replace(
        _TENSORFLOW, about="TensorFlow, whole batch on one device", **_ONE_DEVICE
    ),
    "jax shard_map": _JAX,
    "jax one device": dataclasses.replace(
        _JAX, about="JAX, whole batch on one device", **_ONE_DEVICE
    ),
    PROCESSES: dataclasses.replace(
        _OUR_TRAINER,
        about="gluonpar.Trainer in a process per device, each alone on its shard: no exchange",
        launch=process_per_device,
        team="share",
        ranks=True,
        exchanges=False,
    ),
    ALONE: dataclasses.replace(
        _OURS,
        about="gluonpar's functions, every device alone on its shard: no exchange",
        options={"exchange": False},
        exchanges=False,
    ),
}
# Libraries that are installed apart: the option --NAME-python, and the package.
LIBRARIES = {"torch": "PyTorch", HOROVOD: "Horovod", "tensorflow": "TensorFlow", "jax": "JAX"}


@dataclass(frozen=True)
class Setting:
    """What all candidates train, and how often.

    ``pythons`` are the interpreters of candidates that do not run in this one, by name. Raises
    ValueError for a batch size that does not fit the devices.
    """

    workload: str
    ctx: Sequence[mx.Context]
    batch_size: int | None = None
    steps: int = 5
    rounds: int = 12
    warmup: int = 5
    pythons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.samples < len(self.ctx):
            raise ValueError(
                f"batch_size must be at least {len(self.ctx)}, the number of devices, "
                f"got {self.samples}"
            )
        if self.shards_matter and self.samples % len(self.ctx):
            raise ValueError(
                f"batch_size must be a multiple of {len(self.ctx)} for {self.workload}, got "
                f"{self.samples}: batch normalisation uses each shard's own statistics, and the "
                "candidates split the remainder differently"
            )

    @property
    def samples(self) -> int:
        """Samples per step, over all devices."""
        return self.batch_size or WORKLOADS[self.workload].batch_size

    @property
    def shards_matter(self) -> bool:
        """Whether the trained function depends on the split, as with batch normalisation."""
        return bool(WORKLOADS[self.workload].norms) and len(self.ctx) > 1

    @property
    def title(self) -> str:
        """Workload, batch and devices."""
        return f"{self.workload}, batch {self.samples} on {list(self.ctx)}"

    @property
    def task(self) -> list:
        """The arguments of :func:`workloads.task`."""
        devices = [(context.device_type, context.device_id) for context in self.ctx]
        return [self.workload, self.samples, devices]


def comparable(name: str, setting: Setting) -> bool:
    """Return whether this candidate trains the same function as the others.

    The whole batch on one device does not where the split matters.
    """
    program = CANDIDATES[name]
    return program.exchanges and (program.splits or not setting.shards_matter)


@dataclass(frozen=True)
class StepResult:
    """One candidate in one setting; seconds are of one step.

    ``deviation`` is that of its loss from the expected one (None: not comparable). ``memory`` is
    that of its arrays (:meth:`training.Training.memory`).
    """

    name: str
    setting: Setting
    samples: Samples
    first_loss: float
    last_loss: float
    deviation: float | None
    peak_bytes: int
    imports_gluonpar: bool = False
    version: str = ""
    memory: list[dict[str, int]] = field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        """At the median step."""
        return self.setting.samples / self.samples.median

    @property
    def wrong(self) -> bool:
        """Whether the loss is not the expected one."""
        return is_wrong(self.deviation)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        fields = dict(vars(self))
        setting, samples = fields.pop("setting"), fields.pop("samples")
        return {
            **fields,
            "workload": setting.workload,
            "num_devices": len(setting.ctx),
            "batch_size": setting.samples,
            "images_per_second": self.images_per_second,
            "wrong": self.wrong,
            **samples.as_dict(),
        }


def measure(
    settings: Sequence[Setting],
    comparisons: Sequence[Comparison],
    names: Sequence[str],
    progress: Callable[[str], Progress] = lambda title: iter,
) -> list[list[StepResult]]:
    """Start the candidates of all settings, let them train in turns, and return results by setting.

    A round has one sample of every candidate in every setting; all are in memory at once.
    """
    pairs = list(zip(settings, comparisons))
    for setting, comparison in pairs:
        for name in progress("starting")(names):
            python = setting.pythons.get(name, sys.executable)
            comparison.start(name, CANDIDATES[name], setting.task, python)
            if setting.warmup:
                comparison.ask(name, steps=setting.warmup)
    running = [(i, name) for i, (_, comparison) in enumerate(pairs) for name in comparison.jobs]
    seconds = {at: [] for at in running}
    title = progress("; ".join(setting.title for setting in settings))
    for (i, name), _ in turns(running, settings[0].rounds, progress=title):
        answers = comparisons[i].ask(name, steps=settings[i].steps)
        if answers:
            seconds[i, name].append(max(a["seconds"] for a in answers) / settings[i].steps)
    return [
        _results(setting, comparison, {name: s for (at, name), s in seconds.items() if at == i})
        for i, (setting, comparison) in enumerate(pairs)
    ]


def _results(
    setting: Setting, comparison: Comparison, seconds: Mapping[str, list[float]]
) -> list[StepResult]:
    """Ask the candidates of a setting for their losses and memory."""
    ready = {name: job.ready for name, job in comparison.jobs.items()}
    reports = {name: comparison.ask(name) for name in ready}
    losses = {name: _total(answers, "loss") for name, answers in reports.items() if answers}
    agreeing = {name: loss for name, loss in losses.items() if comparable(name, setting)}
    right = expected_loss(agreeing, (REFERENCE, TRAINER))
    return [
        StepResult(
            name,
            setting,
            Samples(seconds[name]),
            _total(ready[name], "loss"),
            loss,
            loss - right if name in agreeing else None,
            _total(reports[name], "peak_bytes"),
            ready[name][0]["imports_gluonpar"],
            ready[name][0]["version"],
            reports[name][0]["memory"],
        )
        for name, loss in losses.items()
    ]


def _total(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    """Add what the ranks answer, such as their shares of the loss."""
    return sum(answer[key] for answer in answers)
