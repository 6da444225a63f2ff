"""Count what GPUs do in one step of training: kernels, copies by kind, waits and allocations.

    python tools/cuda_sim --num-gpus 8 python tools/count_gpu_operations.py

prints the columns of the table in docs/performance.md: LeNet by train_batch and ResNet-18 by a
Trainer, on 2 and 8 simulated GPUs. The counts are those that a GPU's driver would see, except that
cuDNN's and cuBLAS's calls are counted instead of the kernels that they launch.
"""

# ruff: noqa: E402, I001
from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gluonpar  # before MXNet, which it prepares
import mxnet as mx
import numpy as np
from cuda_sim import counters, reset
from gluonpar.models import losses, resnet

STEPS = 5  # as many in turn must be alike: the first allocate
COUNTED = (
    "kernel",
    "cuBLAS and cuDNN",
    "peer direct",
    "peer staged",
    "ncclAllReduce",
    "ncclReduce",
    "ncclBroadcast",
    "D2D",
    "H2D pinned",
    "H2D pageable",
    "cudaStreamSynchronize",
    "cudaMalloc",
    "cudaHostAlloc",
)


def lenet(ctx: list[mx.Context], algorithm: str | None = None) -> Callable[[], None]:
    """Return a function that takes one step of LeNet by train_batch."""
    X, y = _batch(len(ctx))
    params = [gluonpar.get_params(gluonpar.init_lenet(), c) for c in ctx]
    return lambda: gluonpar.train_batch(X, y, params, ctx, lr=0.1, algorithm=algorithm)


def resnet18(ctx: list[mx.Context]) -> Callable[[], None]:
    """Return a function that takes one step of ResNet-18, hybridized, by a Trainer with SGD."""
    net = resnet.resnet18()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    X, y = _batch(len(ctx))

    def step() -> None:
        shards = gluonpar.split_and_load((X, y), ctx)
        with mx.autograd.record():
            of_devices = [losses.softmax_cross_entropy(net(X), y) for X, y in shards]
        mx.autograd.backward(of_devices)
        trainer.step(len(X))

    return step


def per_step(step: Callable[[], object]) -> dict[str, int]:
    """Return how often each of COUNTED happens in one ``step()``, once the steps are alike.

    Raises RuntimeError if that takes more than 40 steps.
    """
    seen: list[dict[str, int]] = []
    while len(seen) < STEPS or any(counts != seen[-1] for counts in seen[-STEPS:]):
        if len(seen) == 40:
            raise RuntimeError(f"steps differ: {seen[-STEPS:]}")
        reset()
        step()
        mx.nd.waitall()
        times = {name: count.times for name, count in counters().items()}
        calls = sum(n for name, n in times.items() if name.startswith(("cublas", "cudnn")))
        times["cuBLAS and cuDNN"] = calls
        seen.append({name: times.get(name, 0) for name in COUNTED})
    return seen[-1]


def _batch(num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    X = rng.uniform(size=(2 * num_devices, 1, 28, 28)).astype("float32")
    return X, rng.randint(0, 10, len(X))


def main() -> None:
    """Print one row per kind of operation, and one column per workload and number of GPUs."""
    summary, _, details = (__doc__ or "").partition("\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=form)
    parser.add_argument("--algorithm", help="all-reduce of LeNet (default: chosen)")
    algorithm = parser.parse_args().algorithm
    columns = {}
    for name, make in {"LeNet": lenet, "ResNet-18": resnet18}.items():
        for k in (2, 8):
            ctx = [mx.gpu(i) for i in range(k)]
            step = make(ctx, algorithm) if make is lenet else make(ctx)
            columns[f"{name}, {k} GPUs"] = per_step(step)
    print(f"| a step | {' | '.join(columns)} |")
    print("|---|" + "---|" * len(columns))
    for row in COUNTED:
        print(f"| {row} | {' | '.join(str(counts[row]) for counts in columns.values())} |")


if __name__ == "__main__":
    main()
