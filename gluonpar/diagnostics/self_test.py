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

from gluonpar import cluster, collectives
from gluonpar.collectives import arguments
from gluonpar.diagnostics.bench import payload
from gluonpar.diagnostics.doctor import describe, summary
from gluonpar.diagnostics.verification import (
    VerificationError,
    check_close,
    check_replicas,
    check_same_bits,
)
from gluonpar.gluon import Trainer
from gluonpar.install import entry, parsing
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
EXIT_CODES = {0: "nothing is wrong", 1: "something is wrong, and printed", **entry.EXIT_CODES}
SHAPES = ((1,), (7,), (3, 5), (1009,), (257, 33), (1 << 18,))
NET_SHAPES = ((8, 1, 5, 5), (8,), (16, 8 * 12 * 12), (16,), (10, 16), (10,))
BATCH_SIZE, STEPS, LR, SEED = 66, 5, 0.1, 7

Replicas = List[Sequence[mx.nd.NDArray]]  # for each parameter its copies, one per device
Training = Callable[[Sequence[np.ndarray], Sequence[mx.Context]], Replicas]


def main(argv: Sequence[str] | None = None, prog: str = "gluonpar selftest") -> int:
    """Run the command line ``argv`` (default: the process's arguments); return the exit code."""
    parser = parsing.Parser(
        prog=prog,
        description=entry.about(__doc__),
        epilog=entry.epilog(EXAMPLES, EXIT_CODES),
    )
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
    right = "all is right on these devices"
    if len(chosen.ctx) == 1:
        print("note   one device: copies and all-reduces are not checked; they need two")
        right = "all that one device can check is right"
    failures = run(chosen.ctx)
    print(f"{len(failures)} wrong. See `gluonpar doctor`." if failures else right)
    return 1 if failures else 0


def run(ctx: Sequence[mx.Context]) -> list[str]:
    """Run all checks on the devices ``ctx`` and print a line for each; return the failures.

    An exception in a check, such as CUDA's, is its failure, and the other checks are still run.
    Seeds MXNet's random generators. Waits.
    """
    ctx = list(ctx)
    threads.share(ctx)
    failures = []
    with devices.deterministic():
        for name, check in _checks(ctx):
            try:
                line = f"ok     {name}: {check(ctx)}"
            except Exception as error:
                how = summary(error) if isinstance(error, VerificationError) else describe(error)
                failures.append(f"{name}: {how}")
                line = f"WRONG  {failures[-1]}"
            print(line, flush=True)
    return failures


def _checks(ctx: Sequence[mx.Context]) -> Iterator[tuple[str, Callable]]:
    if len(ctx) > 1:
        yield "copies between devices", check_copies
        for name in collectives.usable(ctx):
            yield f"all-reduce {name}", functools.partial(check_sums, algorithm=name)
        yield "all-reduce as chosen for training", check_sums
    mxnets = functools.partial(gluon.Trainer, kvstore=None)
    alone = functools.partial(by_trainer, lenet.LeNet, mxnets, 0.0)
    of_lenet = train_lenet, alone, lenet.LENET_SHAPES
    yield "LeNet by train_batch", functools.partial(check_training, *of_lenet)
    ours, alone = (functools.partial(by_trainer, small_net, t, 0.9) for t in (Trainer, mxnets))
    yield "a Gluon network by Trainer", functools.partial(check_training, ours, alone, NET_SHAPES)


def check_copies(ctx: Sequence[mx.Context]) -> str:
    """Copy arrays from every device to every other with ``copyto``, and compare the values."""
    count = 0
    for i, j in itertools.permutations(range(len(ctx)), 2):
        for dtype, shape in itertools.product(arguments.DTYPES, SHAPES):
            want = _payload(ctx, shape, dtype)[i]
            target = mx.nd.full(shape, 99, ctx=ctx[j], dtype=dtype)
            memory.from_numpy(want, ctx[i]).copyto(target)
            subject = f"{dtype} array of shape {shape} copied from {ctx[i]} to {ctx[j]}"
            _check_equal(target, want, subject)
            count += 1
    return f"{count} arrays of {len(arguments.DTYPES)} dtypes, every value arrived"


def check_sums(ctx: Sequence[mx.Context], algorithm: str | None = None) -> str:
    """Check that sums of integers are exact, and sums of fractions close and repeatable."""

    def allreduced(parts: Sequence[np.ndarray]) -> list[mx.nd.NDArray]:
        arrays = [memory.from_numpy(part, c) for part, c in zip(parts, ctx)]
        with cluster.local():
            collectives.allreduce(arrays, algorithm)
        return arrays

    count = 0
    for dtype, shape in itertools.product(arguments.DTYPES, SHAPES):
        parts = _payload(ctx, shape, dtype)
        want = np.sum(parts, axis=0, dtype="int64").astype(dtype)
        for array in allreduced(parts):
            _check_equal(array, want, f"sum of {dtype} arrays of shape {shape} on {array.context}")
            count += 1
    for shape in SHAPES:
        parts = _drawn([shape] * len(ctx), 1.0)
        first, again = allreduced(parts), allreduced(parts)
        subject = f"sum of float32 fractions of shape {shape}"
        check_replicas([*first, *again], subject)
        difference = np.abs(first[0].asnumpy() - np.sum(parts, axis=0, dtype="float64"))
        if not difference.max() <= 1e-6 * sum(np.abs(part).max() for part in parts):
            raise VerificationError(f"{subject} differs by {difference.max():.3g}")
    return f"{count} arrays of {len(arguments.DTYPES)} dtypes exact; fractions the same bits twice"


def check_training(
    on_all: Training, on_one: Training, shapes: Sequence[tuple[int, ...]], ctx: Sequence[mx.Context]
) -> str:
    """Compare training on K devices with MXNet alone on one, all replicas, and two runs."""
    start, names = _drawn(shapes, 0.1), [f"parameter {i}" for i in range(len(shapes))]

    def values(replicas: Replicas) -> dict[str, np.ndarray]:
        return {name: copies[0].asnumpy() for name, copies in zip(names, replicas)}

    def updates(after: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: after[name] - before for name, before in zip(names, start)}

    want = updates(values(on_one(start, ctx[:1])))
    unchanged = [name for name in names if not want[name].any()]
    if unchanged:
        raise VerificationError(f"training on {ctx[0]} alone did not change {', '.join(unchanged)}")
    replicas = on_all(start, ctx)
    for name, copies in zip(names, replicas):
        check_replicas(copies, name)
    got = values(replicas)
    check_same_bits(got, values(on_all(start, ctx)), f"training on {len(ctx)} devices")
    close = check_close(want, updates(got), "updates")
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


def _drawn(shapes: Sequence[tuple[int, ...]], scale: float) -> list[np.ndarray]:
    rng = np.random.RandomState(SEED)
    return [rng.normal(scale=scale, size=shape).astype("float32") for shape in shapes]


def _payload(ctx: Sequence[mx.Context], shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    arrays = payload(len(ctx), int(np.prod(shape)), np.dtype(dtype))
    return [array.reshape(shape) for array in arrays]


def _check_equal(array: mx.nd.NDArray, want: np.ndarray, subject: str) -> None:
    got = array.asnumpy()
    wrong = np.flatnonzero(got.ravel() != want.ravel())
    if wrong.size:
        i = wrong[0]
        raise VerificationError(
            f"{subject}: {wrong.size} of {want.size} values are wrong; at {i} it is "
            f"{got.ravel()[i]}, not {want.ravel()[i]}"
        )


def _batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    images = dataset.synthetic(SEED, num_train=BATCH_SIZE * STEPS, num_test=1)
    for X, y in dataset.batches(images.train_images, images.train_labels, BATCH_SIZE):
        yield X.astype("float32") / 255, y.astype("float32")
