"""gluonpar selftest: test on this machine's devices that gluonpar computes correctly.

Every check computes on the devices and compares values with those of NumPy or of MXNet alone, so a
device that supports peer-to-peer copies, but corrupts the data, is found.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Callable, Iterator, List, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import collectives
from gluonpar.collectives import operations
from gluonpar.diagnostics import bench, harness
from gluonpar.diagnostics.doctor import describe
from gluonpar.diagnostics.verification import (
    VerificationError,
    check_close,
    check_replicas,
    check_same_bits,
)
from gluonpar.gluon import Trainer
from gluonpar.install import entry
from gluonpar.models import lenet, resnet, softmax_cross_entropy
from gluonpar.replicas import get_params
from gluonpar.runtime import devices, memory, threads
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch
from gluonpar.training.data import dataset

EXAMPLES = """
gluonpar selftest                # all GPUs, or two CPU devices
gluonpar selftest --num-gpus 4   # four GPUs, or four CPU devices
"""
EXIT_CODES = {0: "nothing is wrong", 1: "something is wrong, and printed"}
SIZES = (1, 7, 15, 1009, 8481, 1 << 18)
NET_SHAPES = ((8, 1, 5, 5), (8,), (16, 8 * 12 * 12), (16,), (10, 16), (10,))
BATCH_SIZE, STEPS, LR, SEED = 66, 5, 0.1, 7

Replicas = List[Sequence[mx.nd.NDArray]]  # for each parameter its copies, one per device
Training = Callable[[Sequence[np.ndarray], Sequence[mx.Context]], Replicas]  # from these values


def main(argv: Sequence[str] | None = None, prog: str = "gluonpar selftest") -> int:
    """Run the command line ``argv`` (default: the process's arguments); return the exit code."""
    parser = entry.Parser(EXAMPLES, EXIT_CODES, prog=prog, description=__doc__)
    help_ = "K GPUs; K CPU devices if there is no GPU at all"
    parser.add_argument("--num-gpus", type=int, metavar="K", help=help_)
    help_ = "only GPUs, or only CPU devices"
    parser.add_argument("--device", choices=devices.KINDS, default="auto", help=help_)
    options = parser.parse_args(argv)
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
                line = f"ok     {name}: {check(ctx)}"
            except Exception as error:
                line = f"WRONG  {name}: {describe(error)}"
                num_wrong += 1
            print(line, flush=True)
    return num_wrong


def _checks(ctx: Sequence[mx.Context]) -> Iterator[tuple[str, Callable]]:
    if len(ctx) > 1:
        for name in collectives.usable(ctx):
            yield f"all-reduce {name}", functools.partial(check_sums, name)
        yield "all-reduce as chosen for training", functools.partial(check_sums, None)
    mxnets = functools.partial(gluon.Trainer, kvstore=None)
    alone = functools.partial(by_trainer, lenet.LeNet, mxnets, 0.0)
    of_lenet = train_lenet, alone, lenet.LENET_SHAPES
    yield "LeNet by train_batch", functools.partial(check_training, *of_lenet)
    ours, alone = (functools.partial(by_trainer, small_net, t, 0.9) for t in (Trainer, mxnets))
    yield "a Gluon network by Trainer", functools.partial(check_training, ours, alone, NET_SHAPES)


def check_sums(algorithm: str | None, ctx: Sequence[mx.Context]) -> str:
    """Check that sums of integers, which have no rounding error, are exact on every device."""
    for dtype, size in itertools.product(operations.DTYPES, SIZES):
        arrays = [mx.nd.zeros((size,), ctx=context, dtype=dtype) for context in ctx]
        run = functools.partial(collectives.allreduce, arrays, algorithm)
        (wrong,) = bench.count_wrong([harness.Candidate("", run)], arrays).values()
        if wrong:
            total = size * len(ctx)
            raise VerificationError(f"{dtype} arrays of {size}: {wrong} of {total} sums are wrong")
    return f"sums of {len(SIZES)} sizes and {len(operations.DTYPES)} dtypes are exact"


def check_training(
    on_all: Training, on_one: Training, shapes: Sequence[tuple[int, ...]], ctx: Sequence[mx.Context]
) -> str:
    """Compare training on K devices with MXNet alone on one, all replicas, and two runs."""
    rng = np.random.RandomState(SEED)
    start = [rng.normal(scale=0.1, size=shape).astype("float32") for shape in shapes]

    def updates(replicas: Replicas) -> dict[str, np.ndarray]:
        for i, copies in enumerate(replicas):
            check_replicas(copies, f"parameter {i}")
        after = [copies[0].asnumpy() for copies in replicas]
        return {f"parameter {i}": after[i] - before for i, before in enumerate(start)}

    want, got = updates(on_one(start, ctx[:1])), updates(on_all(start, ctx))
    if not all(update.any() for update in want.values()):
        raise VerificationError(f"training by MXNet alone on {ctx[0]} did not change a parameter")
    check_same_bits(got, updates(on_all(start, ctx)), f"training on {len(ctx)} devices")
    close = check_close(want, got, "updates")
    return f"as MXNet alone on {ctx[0]} after {STEPS} steps, the same bits twice; {close}"


def train_lenet(start: Sequence[np.ndarray], ctx: Sequence[mx.Context]) -> Replicas:
    """Train the book's LeNet by ``train_batch``."""
    device_params = [get_params([memory.from_numpy(v, c) for v in start], c) for c in ctx]
    for X, y in _batches():
        train_batch(X, y, device_params, ctx, LR)
    return list(zip(*device_params))


def small_net() -> gluon.HybridBlock:
    """Return a network without relu, which can turn a rounding error into another update."""
    return resnet.chain(
        gluon.nn.Conv2D(8, 5, 2, in_channels=1, activation="tanh"),
        gluon.nn.Dense(16, in_units=8 * 12 * 12, activation="tanh"),
        gluon.nn.Dense(10, in_units=16),
    )


def by_trainer(
    make_net: Callable[[], gluon.HybridBlock],
    make_trainer: Callable,
    momentum: float,
    start: Sequence[np.ndarray],
    ctx: Sequence[mx.Context],
) -> Replicas:
    """Train a Gluon network by a trainer, gluonpar's or MXNet's."""
    net = make_net()
    net.initialize(ctx=list(ctx))
    params = net.collect_params()
    for param, values in zip(params.values(), start):
        param.set_data(mx.nd.array(values))
    net.hybridize()
    trainer = make_trainer(params, "sgd", {"learning_rate": LR, "momentum": momentum})
    for X, y in _batches():
        with autograd.record():
            shards = split_and_load((X, y), list(ctx))
            losses = [softmax_cross_entropy(net(X_shard), y_shard) for X_shard, y_shard in shards]
        autograd.backward(losses)
        trainer.step(len(X))
    return [param.list_data() for param in params.values()]


def _batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    images = dataset.synthetic(SEED, num_train=BATCH_SIZE * STEPS, num_test=1)
    for X, y in dataset.batches(images.train_images, images.train_labels, BATCH_SIZE):
        yield X.astype("float32") / 255, y.astype("float32")
