"""gluonpar selftest: test on this machine's devices that gluonpar computes correctly."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import Any, Callable, Iterator, List, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import collectives
from gluonpar.diagnostics import bench, harness
from gluonpar.diagnostics.doctor import OK, WRONG, Finding, describe
from gluonpar.diagnostics.verification import (
    VerificationError,
    check_close,
    check_replicas,
    repeated,
    verify,
)
from gluonpar.gluon import Trainer
from gluonpar.models import lenet, resnet, softmax_cross_entropy
from gluonpar.options import DTYPES, SelfTest, parse
from gluonpar.runtime import devices, threads
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch
from gluonpar.training.data import dataset

SIZES = (1, 7, 15, 1009, 8481, 1 << 18)
BATCH_SIZE, STEPS, LR, MOMENTUM, SEED = 66, 5, 0.1, 0.9, 7

Step = Callable[[np.ndarray, np.ndarray], Any]  # on a batch (X, y)
MakeStep = Callable[[gluon.Block, List[mx.Context]], Step]


def main(argv: Sequence[str] | None = None, prog: str = "gluonpar selftest") -> int:
    """Run the command line ``argv`` (default: the process's arguments); return the exit code."""
    options, parser = parse(SelfTest, argv, prog)
    num_gpus = options.num_gpus
    if num_gpus is None and (options.device == "cpu" or not devices.gpus_present()):
        num_gpus = 2  # one device has nothing to be compared with
    try:
        chosen = devices.choose(num_gpus, device=options.device)
    except ValueError as error:
        parser.error(parser.in_options(error))
    if chosen.notice:
        print(chosen.notice, file=sys.stderr)
    print(f"devices: {', '.join(map(str, chosen.ctx))}", flush=True)
    if len(chosen.ctx) == 1:
        print("note   one device: all-reduces are not checked; they need two")
    num_wrong = run(chosen.ctx)
    print(f"{num_wrong} wrong. See `gluonpar doctor`." if num_wrong else "all checks are right")
    return 1 if num_wrong else 0


def run(ctx: Sequence[mx.Context]) -> int:
    """Run all checks on the devices ``ctx`` and print a line for each; return how many fail.

    An exception in a check, such as CUDA's, is its failure, and the other checks are still run.
    Seeds MXNet's random generators. Waits.
    """
    ctx = list(ctx)
    threads.share(ctx)
    num_wrong = 0
    with devices.deterministic():
        for name, check in _checks(ctx):
            try:
                finding = Finding(name, OK, check(ctx))
            except Exception as error:
                finding = Finding(name, WRONG, describe(error))
                num_wrong += 1
            print(finding, flush=True)
    return num_wrong


def _checks(ctx: list[mx.Context]) -> Iterator[tuple[str, Callable[[list[mx.Context]], str]]]:
    for name in [*collectives.usable(ctx), None] if len(ctx) > 1 else []:
        yield f"all-reduce {name or 'as chosen for training'}", partial(check_sums, name)
    yield "LeNet by verify", check_lenet
    yield "training by train_batch", partial(check_training, by_train_batch, 0.0)
    ours = partial(by_trainer, Trainer, MOMENTUM)
    yield "training by Trainer", partial(check_training, ours, MOMENTUM)


def check_sums(algorithm: str | None, ctx: Sequence[mx.Context]) -> str:
    """Check that sums of integers, which have no rounding error, are exact on every device."""
    for dtype, size in itertools.product(DTYPES, SIZES):
        arrays = [mx.nd.zeros((size,), ctx=context, dtype=dtype) for context in ctx]
        run = partial(collectives.allreduce, arrays, algorithm)
        (wrong,) = bench.count_wrong([harness.Candidate("", run)], arrays).values()
        if wrong:
            total = size * len(ctx)
            raise VerificationError(f"{dtype} arrays of {size}: {wrong} of {total} sums are wrong")
    return f"sums of {len(SIZES)} sizes and {len(DTYPES)} dtypes are exact"


def check_lenet(ctx: list[mx.Context]) -> str:
    """Compare LeNet's losses and gradients with those of one device, by ``gluonpar.verify``."""
    net = lenet.LeNet()
    net.initialize(ctx=ctx)
    net.hybridize()
    return verify(net, softmax_cross_entropy, next(_batches()), ctx)[-1]


def check_training(make_step: MakeStep, momentum: float, ctx: list[mx.Context]) -> str:
    """Check training three ways: against MXNet alone, between replicas, and between two runs."""

    def updates(make_step: MakeStep, ctx: list[mx.Context]) -> dict[str, np.ndarray]:
        # No relu, which can turn a rounding error of one step into another update in the next.
        net = resnet.chain(
            gluon.nn.Conv2D(8, 5, 2, in_channels=1, activation="tanh"),
            gluon.nn.Dense(16, in_units=8 * 12 * 12, activation="tanh"),
            gluon.nn.Dense(10, in_units=16),
        )
        mx.random.seed(SEED)
        net.initialize(mx.init.Normal(0.1), ctx=ctx)
        net.hybridize()
        params = net.collect_params().values()
        before = [param.data(ctx[0]).asnumpy() for param in params]
        step = make_step(net, ctx)
        for X, y in _batches():
            step(X, y)
        replicas = {f"parameter {i}": param.list_data() for i, param in enumerate(params)}
        check_replicas(replicas)
        after = [copies[0].asnumpy() for copies in replicas.values()]
        return dict(zip(replicas, map(np.subtract, after, before)))

    want = updates(partial(by_trainer, partial(gluon.Trainer, kvstore=None), momentum), ctx[:1])
    if not all(update.any() for update in want.values()):
        raise VerificationError(f"training by MXNet alone on {ctx[0]} did not change a parameter")
    got = repeated(lambda: updates(make_step, ctx), f"training on {len(ctx)} devices")
    close = check_close(want, got, "updates")
    return f"as MXNet alone on {ctx[0]} after {STEPS} steps, the same bits twice; {close}"


def by_train_batch(net: gluon.Block, ctx: list[mx.Context]) -> Step:
    """Return a step by ``train_batch``."""
    device_params = [[param.data(c) for param in net.collect_params().values()] for c in ctx]
    return lambda X, y: train_batch(X, y, device_params, ctx, LR, lambda X, _: net(X))


def by_trainer(make: Callable, momentum: float, net: gluon.Block, ctx: list[mx.Context]) -> Step:
    """Return a step by the trainer that ``make`` makes, gluonpar's or MXNet's."""
    options = {"learning_rate": LR, "momentum": momentum}
    trainer = make(net.collect_params(), "sgd", options)

    def step(X: np.ndarray, y: np.ndarray) -> None:
        with autograd.record():
            shards = split_and_load((X, y), ctx)
            losses = [softmax_cross_entropy(net(X_shard), y_shard) for X_shard, y_shard in shards]
        autograd.backward(losses)
        trainer.step(len(X))

    return step


def _batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    images = dataset.synthetic(SEED, num_train=BATCH_SIZE * STEPS, num_test=1)
    for X, y in dataset.batches(images.train_images, images.train_labels, BATCH_SIZE):
        yield X.astype("float32") / 255, y.astype("float32")
