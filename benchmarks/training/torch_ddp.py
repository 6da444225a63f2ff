"""PyTorch's DistributedDataParallel with gloo: a process per device, each on its own shard."""

from __future__ import annotations

import datetime
import os

from benchmarks.training.training import Rank, Training, UnavailableError, shard
from benchmarks.training.workloads import NUM_CLASSES, Task, residual_blocks

try:
    import torch
    from torch import distributed, nn
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    torch = None

_TIMEOUT = datetime.timedelta(seconds=60)


class Shard(Training):
    """A rank's shard, ``task``, of ``num_samples`` over ``num_ranks``."""

    def __init__(self, task: Task, num_samples: int, num_ranks: int) -> None:
        self.X, self.y = torch.from_numpy(task.X), torch.from_numpy(task.y.astype("int64"))
        self.scale = num_ranks / num_samples
        net = MODELS[task.workload](task.width)
        with torch.no_grad():
            for param, value in zip(net.parameters(), task.params):
                param.copy_(torch.from_numpy(value.T if value.ndim == 2 else value))
        self.net = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=task.lr)

    def step(self) -> None:
        """Multiply the loss by the ranks, because DDP divides the summed gradients by them."""
        self.optimizer.zero_grad()
        (self._loss(self.net) * self.scale).backward()
        self.optimizer.step()

    def wait(self) -> None:
        """Do nothing: on CPUs PyTorch's calls return when they are done."""

    def loss(self) -> float:
        """Return the shard's mean; restore the moving statistics, which PyTorch updates here."""
        buffers = list(self.net.buffers())
        with torch.no_grad():
            kept = [buffer.clone() for buffer in buffers]
            loss = float(self._loss(self.net.module))
            for buffer, value in zip(buffers, kept):
                buffer.copy_(value)
        return loss / len(self.X)

    def _loss(self, net):
        return functional.cross_entropy(net(self.X), self.y, reduction="sum")


def lenet(width: int):
    """Return the book's LeNet."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.AvgPool2d(2, 2),
        nn.Conv2d(width, 50, 5), nn.ReLU(), nn.AvgPool2d(2, 2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES),
    )  # fmt: skip


def mlp(width: int):
    """Return the wide perceptron."""
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, NUM_CLASSES),
    )  # fmt: skip


def resnet18(width: int):
    """Return the book's ResNet-18."""
    blocks, inputs = [], width
    for channels, stride in residual_blocks(width):
        blocks.append(_residual(inputs, channels, stride))
        inputs = channels
    return nn.Sequential(
        *_conv_norm(1, width, 1), nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, NUM_CLASSES),
    )  # fmt: skip


def _residual(inputs: int, channels: int, stride: int):
    """Two convolutions beside a shortcut; a class needs torch, so it is made here."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Sequential(
                *_conv_norm(inputs, channels, stride), nn.ReLU(), *_conv_norm(channels, channels, 1)
            )
            self.shortcut = nn.Conv2d(inputs, channels, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, X):
            return functional.relu(self.inside(X) + self.shortcut(X))

    return Residual()


def _conv_norm(inputs: int, channels: int, stride: int):
    return nn.Conv2d(inputs, channels, 3, stride, padding=1), nn.BatchNorm2d(channels)


MODELS = {"lenet": lenet, "mlp": mlp, "resnet18": resnet18}


class TorchRank(Rank):
    """One of the processes."""

    version = f"torch {torch.__version__}" if torch else ""

    def barrier(self) -> None:
        """Wait for all ranks."""
        distributed.barrier()


def make(task: Task, rank: int, rendezvous: str) -> Training:
    """Return this rank's training; ``rendezvous`` is a file by which the ranks find each other."""
    if torch is None:
        raise UnavailableError(
            "torch cannot be imported; give --torch-python an interpreter that has it"
        )
    size = len(task.devices)
    mine = shard(task, rank, size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = f"file://{rendezvous}"
    distributed.init_process_group("gloo", where, _TIMEOUT, world_size=size, rank=rank)
    return TorchRank(rank, size, len(task.X), Shard(mine, len(task.X), size))
