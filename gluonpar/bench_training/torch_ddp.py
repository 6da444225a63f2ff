"""PyTorch's DistributedDataParallel with gloo: a process a device, each on its own shard."""

from __future__ import annotations

import datetime
import os
import tempfile

from . import process
from .training import Training
from .workloads import Task

try:
    import torch
    from torch import distributed
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    torch = None

_PATIENCE = datetime.timedelta(seconds=60)


class Rank(Training):
    """One process's part; ``followers`` are the other ranks' processes, for rank 0 to lead."""

    def __init__(self, task: Task, rank: int, followers: list[process.Child]) -> None:
        self.followers, size, n = followers, len(task.devices), len(task.X)
        mine = slice(rank * n // size, (rank + 1) * n // size)
        self.X, self.y = task.X[mine], task.y[mine].astype("int64")
        self.mean, self.size = 1 / n, size
        net = MODELS[task.workload]()
        with torch.no_grad():
            for param, value in zip(net.parameters(), task.params):
                param.copy_(torch.from_numpy(value.T if value.ndim == 2 else value))
        self.net = DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=task.lr)

    def run(self, steps: int) -> None:
        """All ranks' steps: rank 0 is done when the last one is."""
        for follower in self.followers:
            follower.tell({"steps": steps})
        super().run(steps)
        for follower in self.followers:
            follower.hear()

    def step(self) -> None:
        """DDP divides the summed gradients by the ranks, so the loss is multiplied by them."""
        self.optimizer.zero_grad()
        (self._loss(self.net) * self.size).backward()
        self.optimizer.step()

    def wait(self) -> None:
        """Nothing: on CPUs PyTorch's calls return when they are done."""

    def loss(self) -> float:
        """This rank's part of the mean; rank 0 adds the others'."""
        with torch.no_grad():
            loss = float(self._loss(self.net.module))
        others = [follower.ask({"report": True}) for follower in self.followers]
        self.other_bytes = sum(other["peak_bytes"] for other in others)
        return loss + sum(other["loss"] for other in others)

    def _loss(self, net):
        scores = net(torch.from_numpy(self.X))
        return functional.cross_entropy(scores, torch.from_numpy(self.y), reduction="sum") * (
            self.mean
        )


def lenet():
    """The book's LeNet as modules."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2, 2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2, 2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp():
    """The wide perceptron as modules."""
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


MODELS = {"lenet": lenet, "mlp": mlp}


def make(task: Task, rank: int = 0, meeting_place: str = "") -> Training:
    """The training of ``task``; rank 0 starts the other ranks and names them a file to meet at."""
    if torch is None:
        raise process.Unable(
            "torch cannot be imported; --torch-python may name an interpreter that has it"
        )
    if any(kind != "cpu" for kind, _ in task.devices):
        raise process.Unable("it is measured on CPU devices only")
    if rank:
        return _join(task, rank, meeting_place, [])
    with tempfile.TemporaryDirectory(prefix="bench_training_") as folder:
        meeting_place = os.path.join(folder, "ranks")
        followers = [_follower(task, r, meeting_place) for r in range(1, len(task.devices))]
        led = _join(task, 0, meeting_place, followers)
        for follower in followers:
            follower.hear()
    return led


def _join(task: Task, rank: int, meeting_place: str, followers: list[process.Child]) -> Rank:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", f"file://{meeting_place}", _PATIENCE, world_size=len(task.devices), rank=rank
    )
    return Rank(task, rank, followers)


def _follower(task: Task, rank: int, meeting_place: str) -> process.Child:
    request = process.request(
        "torch_ddp",
        [task.workload, len(task.X), task.devices],
        {"rank": rank, "meeting_place": meeting_place},
    )
    return process.Child(process.command(request), dict(os.environ), leads=False)


VERSION = f"torch {torch.__version__}" if torch else ""
