"""The options of a run, and which values they may have."""

from __future__ import annotations

from dataclasses import dataclass

from gluonpar import collectives
from gluonpar.checkpoint import onnx_export
from gluonpar.step import check_lr
from gluonpar.training import optimization
from gluonpar.training.workloads import WORKLOADS


@dataclass(frozen=True)
class Configuration:
    """The options of a run; see the table above. Raises ValueError for a value that is not allowed.

    :class:`Run` checks values that depend on the machine or the data.
    """

    num_gpus: int | None = None
    batch_size: int = 256
    lr: float | None = None
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
    deterministic: bool = False
    check_finite: bool = True
    optimizer: str = "sgd"
    momentum: float | None = None
    wd: float = 0.0
    lr_schedule: str = "constant"
    lr_steps: tuple[int, ...] | None = None
    lr_factor: float = 0.1
    warmup_epochs: float = 0.0
    early_stop: int | None = None
    history: str | None = None
    tensorboard: str | None = None

    def __post_init__(self) -> None:
        counts = ("batch_size", "num_epochs", "limit", "log_interval", "save_every", "keep")
        for name in (*counts, "early_stop"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be between 0 and {2**31 - 1}, got {self.seed}")
        collectives.check_algorithm(self.algorithm, ())
        if self.model not in WORKLOADS:
            raise ValueError(f"model must be one of {', '.join(WORKLOADS)}, got {self.model!r}")
        if self.optimizer not in optimization.names():
            known = ", ".join(optimization.names())
            raise ValueError(f"optimizer must be one of {known}, got {self.optimizer!r}")
        if self.lr is None:
            plain, name = self.optimizer == "sgd", self.optimizer
            own = WORKLOADS[self.model].default_lr if plain else optimization.default_lr(name)
            object.__setattr__(self, "lr", own)
        check_lr(self.lr)
        if self.momentum is None:
            object.__setattr__(self, "momentum", optimization.default_momentum(self.optimizer))
        optimization.check(self)
        paths = {name: "a file" for name in ("plot", "history", "trace")}
        for name, what in {**paths, "save_dir": "a folder", "tensorboard": "a folder"}.items():
            if getattr(self, name) == "":
                raise ValueError(f"{name} must name {what}, got ''")
        if self.save_dir is None:
            if self.save_every is not None or self.onnx:
                option = "onnx" if self.onnx else "save_every"
                raise ValueError(f"{option} needs a folder for its files: give save_dir too")
            if self.resume == "":
                raise ValueError("resume without a value needs save_dir: give one, or a checkpoint")
        if self.onnx:
            try:
                onnx_export.check_onnx()
            except ImportError as error:
                raise ValueError(f"onnx files cannot be written: {error}") from error
