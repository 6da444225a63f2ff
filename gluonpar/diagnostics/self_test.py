"""The self test: python -m gluonpar verify.

Every check computes on the devices themselves and compares values with those of NumPy or of MXNet
alone: copies between devices, all-reduce by every algorithm, training on K devices and on one.
Nothing that the devices report about themselves is trusted: a device that supports peer-to-peer
copies, but corrupts the data, is found.
"""

from __future__ import annotations

import itertools
from typing import Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import collectives
from gluonpar.diagnostics.verification import Wrong, check_close, check_replicas, check_same_bits
from gluonpar.gluon.trainer import Trainer
from gluonpar.models import lenet, resnet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.replicas import get_params
from gluonpar.runtime import memory, threads
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch
from gluonpar.training.data import dataset

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
SHAPES = ((1,), (7,), (3, 5), (1009,), (257, 33), (1 << 18,))
BATCH_SIZE, STEPS, LR, SEED = 66, 5, 0.1, 7
SGD = {"learning_rate": LR, "momentum": 0.9}


def run(ctx: Sequence[mx.Context], report: Callable[[str], object] = print) -> list[str]:
    """Run all checks on the devices ``ctx``, one line each to ``report``; return the failures.

    An exception in a check, such as CUDA's, is its failure, and the other checks are still run.
    Seeds MXNet's random generators. Waits.
    """
    ctx = list(ctx)
    threads.share(ctx)
    failures = []
    for name, check in _checks():
        try:
            report(f"ok     {name}: {check(ctx)}")
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
            failures.append(f"{name}: {kind}{lines[0]}")
            report(f"WRONG  {failures[-1]}")
    return failures


def _checks() -> Iterator[tuple[str, Callable]]:
    yield "copies between devices", check_copies
    for name in list(collectives.ALGORITHMS):
        yield f"all-reduce {name}", lambda ctx, name=name: check_sums(ctx, name)
    yield "all-reduce as chosen for training", lambda ctx: check_sums(ctx, None)
    yield "LeNet by train_batch", lambda ctx: check_training(ctx, train_lenet, train_lenet_alone)
    yield "a Gluon network by Trainer", lambda ctx: check_training(ctx, train_net, train_net_alone)


def check_copies(ctx: Sequence[mx.Context]) -> str:
    """Copy arrays from every device to every other with ``copyto``, and compare the values."""
    count = 0
    for i, j in itertools.permutations(range(len(ctx)), 2):
        for dtype, shape in itertools.product(DTYPES, SHAPES):
            want = _payload(i, shape, dtype)
            target = mx.nd.full(shape, 99, ctx=ctx[j], dtype=dtype)
            memory.from_numpy(want, ctx[i]).copyto(target)
            what = f"{dtype} array of shape {shape} copied from {ctx[i]} to {ctx[j]}"
            _check_equal(target, want, what)
            count += 1
    return f"{count} arrays of {len(DTYPES)} dtypes, every value arrived"


def check_sums(ctx: Sequence[mx.Context], algorithm: str | None) -> str:
    """Sums of integers must be exact, of fractions close; the same on all devices, and twice."""
    count = 0
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        parts = [_payload(i, shape, dtype) for i in range(len(ctx))]
        want = sum(part.astype("int64") for part in parts).astype(dtype)
        for array in _allreduced(parts, ctx, algorithm):
            _check_equal(array, want, f"sum of {dtype} arrays of shape {shape} on {array.context}")
            count += 1
    rng = np.random.RandomState(SEED)
    for shape in SHAPES:
        parts = [rng.normal(size=shape).astype("float32") for _ in ctx]
        first, again = (_allreduced(parts, ctx, algorithm) for _ in range(2))
        what = f"sum of float32 fractions of shape {shape}"
        check_replicas([*first, *again], what)
        difference = np.abs(first[0].asnumpy() - sum(part.astype("float64") for part in parts))
        if not difference.max() <= 1e-6 * sum(np.abs(part).max() for part in parts):
            raise Wrong(f"{what} differs by {difference.max():.3g}")
    return f"{count} arrays of {len(DTYPES)} dtypes exact; fractions the same bits twice"


def check_training(ctx: Sequence[mx.Context], on_all: Callable, on_one: Callable) -> str:
    """Compare K devices with MXNet alone on the first, replicas bit by bit, and two trainings."""
    before, want = on_one(ctx[0])
    unchanged = [name for name in want if (want[name] == before[name]).all()]
    if unchanged:
        raise Wrong(f"training on {ctx[0]} alone did not change {', '.join(unchanged)}")
    replicas = on_all(ctx)
    for name, copies in replicas.items():
        check_replicas(copies, name)
    got, again = (_first_copies(trained) for trained in (replicas, on_all(ctx)))
    check_same_bits(got, again, f"training on {len(ctx)} devices")
    updates = [{name: after[name] - before[name] for name in want} for after in (want, got)]
    differences = [np.abs(want[name] - got[name]).max() / np.abs(want[name]).max() for name in want]
    return "\n         ".join(
        [
            f"{len(ctx)} devices as one after {STEPS} steps, replicas identical, same bits twice",
            *(
                f"{name:<14} max relative difference {difference:.1e}, shape {want[name].shape}"
                for name, difference in zip(want, differences)
            ),
            check_close(*updates, "updates"),
        ]
    )


def train_lenet(ctx: Sequence[mx.Context]) -> dict[str, list[mx.nd.NDArray]]:
    """Train the book's LeNet by ``train_batch``; return its copies on all devices by name."""
    device_params = [get_params(_lenet_params(c), c) for c in ctx]
    for X, y in _batches():
        train_batch(X, y, device_params, ctx, LR)
    return _by_name(zip(*device_params))


def train_lenet_alone(ctx: mx.Context) -> tuple[dict, dict]:
    """Train it by MXNet's operators only, on one device; return the values before and after."""
    params = _lenet_params(ctx)
    before = _by_name(param.asnumpy() for param in params)
    for param in params:
        param.attach_grad()
    for X, y in _batches():
        with autograd.record():
            scores = lenet.lenet(memory.from_numpy(X, ctx), params)
            loss = softmax_cross_entropy(scores, memory.from_numpy(y, ctx))
        loss.backward()
        for param in params:
            param[:] = param - param.grad * (LR / len(X))
    return before, _by_name(param.asnumpy() for param in params)


def train_net(ctx: Sequence[mx.Context]) -> dict[str, list[mx.nd.NDArray]]:
    """Train a small convolutional network by ``gluonpar.Trainer`` with momentum."""
    net = _net(ctx)
    params = net.collect_params()
    _train(net, Trainer(params, "sgd", SGD), ctx)
    return _by_name(param.list_data() for param in params.values())


def train_net_alone(ctx: mx.Context) -> tuple[dict, dict]:
    """Train it by MXNet's own ``gluon.Trainer`` on one device."""
    net = _net([ctx])
    params = net.collect_params()
    before = _by_name(param.data().asnumpy() for param in params.values())
    _train(net, gluon.Trainer(params, "sgd", SGD, kvstore=None), [ctx])
    return before, _by_name(param.data().asnumpy() for param in params.values())


def _payload(device: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return integers other than zero that differ from cell to cell and from device to device."""
    period = 61 if np.dtype(dtype).itemsize < 4 else 65521  # float16 is exact up to 2048
    cells = np.arange(np.prod(shape), dtype="int64").reshape(shape)
    return ((cells * 37 + device * 17) % period + 1).astype(dtype)


def _allreduced(parts: Sequence[np.ndarray], ctx: Sequence[mx.Context], algorithm: str | None):
    arrays = [memory.from_numpy(part, c) for part, c in zip(parts, ctx)]
    collectives.allreduce(arrays, algorithm)
    return arrays


def _check_equal(array: mx.nd.NDArray, want: np.ndarray, what: str) -> None:
    got = array.asnumpy()
    wrong = np.flatnonzero(got.ravel() != want.ravel())
    if wrong.size:
        i = wrong[0]
        raise Wrong(
            f"{what}: {wrong.size} of {want.size} values are wrong; at {i} it is "
            f"{got.ravel()[i]}, not {want.ravel()[i]}"
        )


def _batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    images = dataset.synthetic(SEED, num_train=BATCH_SIZE * STEPS, num_test=1)
    for X, y in dataset.batches(images.train_images, images.train_labels, BATCH_SIZE):
        yield X.astype("float32") / 255, y.astype("float32")


def _lenet_params(ctx: mx.Context) -> list[mx.nd.NDArray]:
    rng = np.random.RandomState(SEED)
    drawn = (rng.normal(scale=0.1, size=shape) for shape in lenet.LENET_SHAPES)
    return [memory.from_numpy(values.astype("float32"), ctx) for values in drawn]


def _net(ctx: Sequence[mx.Context]) -> gluon.Block:
    net = resnet.chain(
        gluon.nn.Conv2D(8, 5, 2, in_channels=1, activation="tanh"),
        gluon.nn.Dense(16, in_units=8 * 12 * 12, activation="tanh"),
        gluon.nn.Dense(10, in_units=16),
    )
    net.initialize(ctx=list(ctx))
    rng = np.random.RandomState(SEED)
    for param in net.collect_params().values():
        param.set_data(mx.nd.array(rng.normal(scale=0.1, size=param.shape)))
    net.hybridize()
    return net


def _train(net: gluon.Block, trainer: gluon.Trainer, ctx: Sequence[mx.Context]) -> None:
    for X, y in _batches():
        with autograd.record():
            shards = split_and_load((X, y), list(ctx))
            losses = [softmax_cross_entropy(net(X_shard), y_shard) for X_shard, y_shard in shards]
        autograd.backward(losses)
        trainer.step(len(X))


def _by_name(values: Iterable) -> dict:
    return {f"parameter {i}": value for i, value in enumerate(values)}


def _first_copies(replicas: dict[str, Sequence[mx.nd.NDArray]]) -> dict[str, np.ndarray]:
    return {name: copies[0].asnumpy() for name, copies in replicas.items()}
