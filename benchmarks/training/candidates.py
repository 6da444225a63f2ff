"""Who is measured, at what, and in what processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import mxnet as mx

from benchmarks.training import process
from benchmarks.training.workloads import WORKLOADS
from gluonpar.runtime import threads

OURS, TRAINER, REFERENCE = "gluonpar", "trainer device", "one context"
TORCH, HOROVOD, FLOOR = "torch ddp", "horovod", "floor"
# What decides how fast MXNet and OpenMP run: no candidate inherits it.
SETTINGS = ("MXNET_", "OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "HOROVOD_")


@dataclass(frozen=True)
class Candidate:
    """A module of this package, and in what process it trains.

    ``team``: OMP_NUM_THREADS is every core for "all", an even share for "share", unset for "".
    ``exchanges``: it trains the same function as the others, so its loss must be theirs.
    ``cuts``: it cuts the batch, a shard a device.
    """

    module: str
    about: str
    runtime: str = ""
    team: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    exchanges: bool = True
    cuts: bool = True


CANDIDATES = {
    OURS: Candidate("ours", "train_batch with a plain function", "gluonpar"),
    "book": Candidate("book", "Dive into Deep Learning 13.5, MXNet as it comes", "mxnet"),
    TRAINER: Candidate(
        "gluon", "gluon.Trainer(kvstore='device'), hybridized static, MXNet as it comes", "mxnet"
    ),
    "trainer device + our runtime": Candidate(
        "gluon",
        "the same after import gluonpar and threads.share",
        "gluonpar",
        options={"share_threads": True},
    ),
    "trainer gluonpar": Candidate(
        "gluon",
        "gluon.Trainer(kvstore='gluonpar'), the rest as above",
        "gluonpar",
        options={"share_threads": True, "kvstore": "gluonpar", "imports": "gluonpar.gluon.kvstore"},
    ),
    "gluonpar trainer": Candidate(
        "gluon",
        "gluonpar's Trainer and split_and_load, the rest as above",
        "gluonpar",
        options={
            "share_threads": True,
            "kvstore": "",
            "trainer": "gluonpar.gluon.trainer.Trainer",
            "split": "gluonpar.sharding.split_and_load",
        },
    ),
    REFERENCE: Candidate(
        "gluon",
        "gluon.Trainer, hybridized static, whole batch on device 0 with every core, MXNet as it "
        "comes",
        "mxnet",
        "all",
        {"one_context": True},
        cuts=False,
    ),
    TORCH: Candidate(
        "torch_ddp", "PyTorch DistributedDataParallel, gloo, a process a device", team="share"
    ),
    HOROVOD: Candidate(
        "horovod_gluon",
        "Horovod DistributedTrainer, gloo, a process a device, hybridized static, MXNet as it "
        "comes",
        "mxnet",
        "share",
    ),
    FLOOR: Candidate(
        "ours",
        "gluonpar's functions, every device alone on its shard: no exchange",
        "gluonpar",
        options={"exchange": False},
        exchanges=False,
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all candidates are asked for, and how often; ValueError for what cannot be asked.

    ``pythons`` are the interpreters of candidates that do not run in this one, by name.
    """

    workload: str
    ctx: Sequence[mx.Context]
    batch_size: int | None = None
    steps: int = 5
    rounds: int = 12
    warmup: int = 5
    pythons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rounds < 1 or self.warmup < 0:
            raise ValueError(
                f"steps={self.steps}, rounds={self.rounds}, warmup={self.warmup}; need at least "
                "1 step a sample, 1 round to be measured and 0 steps before"
            )
        if self.samples < len(self.ctx):
            raise ValueError(
                f"batch_size={self.samples} leaves some of {len(self.ctx)} devices without a "
                "sample; give at least one each"
            )
        if self.shards_matter and self.samples % len(self.ctx):
            raise ValueError(
                f"batch_size={self.samples} cannot be cut evenly over {len(self.ctx)} devices: "
                f"{self.workload} normalises each shard by its own statistics, and the candidates "
                "cut off the rest in different places; give a multiple"
            )

    @property
    def samples(self) -> int:
        """Samples a step, over all devices."""
        if self.batch_size is None:
            return WORKLOADS[self.workload].batch_size
        return self.batch_size

    @property
    def shards_matter(self) -> bool:
        """Whether the function that is trained depends on how the batch is cut.

        Batch normalisation makes it so: each device takes the mean and variance of its own shard.
        """
        return bool(WORKLOADS[self.workload].norms) and len(self.ctx) > 1

    @property
    def title(self) -> str:
        """Workload, batch and devices."""
        return f"{self.workload}, batch {self.samples} on {list(self.ctx)}"


def comparable(name: str, setting: Setting) -> bool:
    """Whether this candidate's loss must be the others': it trains the same function as they.

    That with the whole batch on one device does not where shards matter.
    """
    candidate = CANDIDATES[name]
    return candidate.exchanges and (candidate.cuts or not setting.shards_matter)


def launch(name: str, setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a candidate's process."""
    candidate = CANDIDATES[name]
    env = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    teams = {"all": threads.cores(), "share": max(1, threads.cores() // len(setting.ctx))}
    if candidate.team:
        env["OMP_NUM_THREADS"] = str(teams[candidate.team])
    devices = [(c.device_type, c.device_id) for c in setting.ctx]
    task = [setting.workload, setting.samples, devices]
    request = process.request(candidate.module, task, candidate.options, candidate.runtime)
    return process.command(request, setting.pythons.get(name, sys.executable)), env
