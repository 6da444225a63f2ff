"""Proof that what gluonpar does on this machine's devices is right: python -m gluonpar verify.

Every check computes on the devices themselves and compares by value, with what NumPy or MXNet alone
computes: copies between devices, all-reduce by every algorithm, training on K devices against one
device. A device that says it can copy to its peer and then copies rubbish is found, for nothing
is taken from what devices say of themselves. Waits: it is no part of training.
"""

from __future__ import annotations

import itertools
from typing import Callable, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import collectives
from gluonpar.diagnostics.verification import Wrong, check_replicas, near
from gluonpar.gluon.trainer import Trainer
from gluonpar.models import lenet as models
from gluonpar.models import resnet
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.replicas import get_params
from gluonpar.runtime import memory, threads
from gluonpar.sharding import split_and_load
from gluonpar.step import train_batch
from gluonpar.training.data import dataset

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
SHAPES = ((1,), (7,), (3, 5), (1009,), (257, 33), (1 << 18,))
BATCH_SIZE, STEPS, LR, SEED = 66, 5, 0.1, 7

Say = Callable[[str], object]


def prove(ctx: Sequence[mx.Context], say: Say = print) -> list[str]:
    """Do all checks on the devices ``ctx``, a line to ``say`` for each; the findings, if any.

    A check that fails with an error, such as CUDA's, has that for its finding, and the others are
    done all the same. Seeds MXNet's random generators.
    """
    ctx = list(ctx)
    threads.share(ctx)
    findings = []
    for name, check in _checks(ctx):
        try:
            say(f"ok     {name}: {check(ctx)}")
        except Exception as error:  # whatever it is, it is what the user asked to be told
            lines = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
            findings.append(f"{name}: {kind}{lines[0]}")
            say(f"WRONG  {findings[-1]}")
    return findings


def _checks(ctx: Sequence[mx.Context]) -> Iterator[tuple[str, Callable]]:
    yield "copies between devices", copies
    for name in list(collectives.ALGORITHMS):
        yield f"all-reduce {name}", lambda ctx, name=name: sums(ctx, name)
    yield "all-reduce as chosen for training", lambda ctx: sums(ctx, None)
    yield "LeNet by train_batch", lambda ctx: training(ctx, lenet, lenet_alone)
    yield "a Gluon network by Trainer", lambda ctx: training(ctx, network, network_alone)


def copies(ctx: Sequence[mx.Context]) -> str:
    """Arrays from every device to every other, through ``copyto``, compared by value."""
    count = 0
    for i, j in itertools.permutations(range(len(ctx)), 2):
        source, target = ctx[i], ctx[j]
        for dtype, shape in itertools.product(DTYPES, SHAPES):
            want = _payload(i, shape, dtype)
            there = mx.nd.full(shape, 99, ctx=target, dtype=dtype)
            memory.from_numpy(want, source).copyto(there)
            _exact(there, want, f"{dtype} array of shape {shape} copied from {source} to {target}")
            count += 1
    return f"{count} arrays of {len(DTYPES)} dtypes, every value arrived"


def sums(ctx: Sequence[mx.Context], algorithm: str | None) -> str:
    """Whole numbers of every dtype must add exactly; fractions nearly, alike, and repeatably."""
    count = 0
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        parts = [_payload(i, shape, dtype) for i in range(len(ctx))]
        want = sum(part.astype("int64") for part in parts).astype(dtype)
        for array in _summed(parts, ctx, algorithm):
            _exact(array, want, f"sum of {dtype} arrays of shape {shape} on {array.context}")
            count += 1
    rng = np.random.RandomState(SEED)
    for shape in SHAPES:
        parts = [rng.normal(size=shape).astype("float32") for _ in ctx]
        first, again = (_summed(parts, ctx, algorithm) for _ in range(2))
        what = f"sum of float32 fractions of shape {shape}"
        for array in (*first, *again):
            check_replicas([first[0], array], what)
        want = sum(part.astype("float64") for part in parts)
        furthest = np.abs(first[0].asnumpy() - want).max()
        if not furthest <= 1e-6 * sum(np.abs(part).max() for part in parts):
            raise Wrong(f"{what} is off by {furthest:.3g}")
    return f"{count} arrays of {len(DTYPES)} dtypes exact; fractions the same bits twice"


def training(ctx: Sequence[mx.Context], on_all: Callable, on_one: Callable) -> str:
    """K devices against MXNet alone on the first, replicas bit by bit, and all of it twice."""
    before, want = on_one(ctx[0])
    names = [name for name in want if not (want[name] == before[name]).all()]
    if len(names) < len(want):
        still = ", ".join(sorted(set(want) - set(names)))
        raise Wrong(f"training on {ctx[0]} alone did not move {still}")
    replicas = on_all(ctx)
    for name, arrays in replicas.items():
        check_replicas(arrays, name)
    got = {name: arrays[0].asnumpy() for name, arrays in replicas.items()}
    again = {name: arrays[0].asnumpy() for name, arrays in on_all(ctx).items()}
    for name, array in got.items():
        if array.tobytes() != again[name].tobytes():
            raise Wrong(
                f"{name} was different when trained again from the same start, by up to "
                f"{np.abs(array - again[name]).max():.3g}"
            )
    moved = {name: want[name] - before[name] for name in want}
    line = near(moved, {name: got[name] - before[name] for name in want}, "updates")
    return "\n".join(
        [
            f"{len(ctx)} devices as one after {STEPS} steps, replicas identical, same bits twice",
            *(f"         {name:<14} {_relative(want[name], got[name])}" for name in want),
            f"         {line}",
        ]
    )


def lenet(ctx: Sequence[mx.Context]) -> dict[str, list[mx.nd.NDArray]]:
    """The book's LeNet after some steps of ``train_batch``: by name, its copies on all devices."""
    device_params = [get_params(_lenet_params(c), c) for c in ctx]
    for X, y in _batches():
        train_batch(X, y, device_params, ctx, LR)
    return {f"parameter {i}": list(copies) for i, copies in enumerate(zip(*device_params))}


def lenet_alone(ctx: mx.Context) -> tuple[dict, dict]:
    """The same steps with MXNet's operators only, on one device: values before and after."""
    params = _lenet_params(ctx)
    before = _values(params)
    for param in params:
        param.attach_grad()
    for X, y in _batches():
        with autograd.record():
            scores = models.lenet(memory.from_numpy(X, ctx), params)
            loss = softmax_cross_entropy(scores, memory.from_numpy(y, ctx))
        loss.backward()
        for param in params:
            param[:] = param - param.grad * (LR / len(X))
    return before, _values(params)


def network(ctx: Sequence[mx.Context]) -> dict[str, list[mx.nd.NDArray]]:
    """A small convolutional network after some steps of ``gluonpar.Trainer`` with momentum."""
    net = _network(ctx)
    _train(net, Trainer(net.collect_params(), "sgd", _sgd()), ctx)
    return {f"parameter {i}": p.list_data() for i, p in enumerate(net.collect_params().values())}


def network_alone(ctx: mx.Context) -> tuple[dict, dict]:
    """The same steps by MXNet's own ``gluon.Trainer`` on one device: values before and after."""
    net = _network([ctx])
    params = net.collect_params()
    before = _values([p.data() for p in params.values()])
    _train(net, gluon.Trainer(params, "sgd", _sgd(), kvstore=None), [ctx])
    return before, _values([p.data() for p in params.values()])


def _payload(device: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Whole numbers, none of them zero, that differ from cell to cell and device to device."""
    period = 61 if np.dtype(dtype).itemsize < 4 else 65521  # float16 is exact up to 2048
    cells = np.arange(np.prod(shape), dtype="int64").reshape(shape)
    return ((cells * 37 + device * 17) % period + 1).astype(dtype)


def _summed(parts: Sequence[np.ndarray], ctx: Sequence[mx.Context], algorithm: str | None) -> list:
    arrays = [memory.from_numpy(part, c) for part, c in zip(parts, ctx)]
    collectives.allreduce(arrays, algorithm)
    return arrays


def _exact(array: mx.nd.NDArray, want: np.ndarray, what: str) -> None:
    got = array.asnumpy()
    wrong = np.flatnonzero(got.ravel() != want.ravel())
    if wrong.size:
        at = wrong[0]
        raise Wrong(
            f"{what}: {wrong.size} of {want.size} values are wrong; at {at} it is "
            f"{got.ravel()[at]}, not {want.ravel()[at]}"
        )


def _batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    made = dataset.synthetic(SEED, num_train=BATCH_SIZE * STEPS, num_test=1)
    for X, y in dataset.batches(made.train_images, made.train_labels, BATCH_SIZE):
        yield X.astype("float32") / 255, y.astype("float32")


def _lenet_params(ctx: mx.Context) -> list[mx.nd.NDArray]:
    rng = np.random.RandomState(SEED)
    drawn = (rng.normal(scale=0.1, size=shape) for shape in models.LENET_SHAPES)
    return [memory.from_numpy(values.astype("float32"), ctx) for values in drawn]


def _network(ctx: Sequence[mx.Context]) -> gluon.Block:
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


def _sgd() -> dict[str, float]:
    return {"learning_rate": LR, "momentum": 0.9}


def _train(net: gluon.Block, trainer: gluon.Trainer, ctx: Sequence[mx.Context]) -> None:
    for X, y in _batches():
        with autograd.record():
            shards = split_and_load((X, y), list(ctx))
            losses = [softmax_cross_entropy(net(X_shard), y_shard) for X_shard, y_shard in shards]
        autograd.backward(losses)
        trainer.step(len(X))


def _values(arrays: Sequence[mx.nd.NDArray]) -> dict[str, np.ndarray]:
    return {f"parameter {i}": array.asnumpy() for i, array in enumerate(arrays)}


def _relative(want: np.ndarray, got: np.ndarray) -> str:
    far = np.abs(want - got).max() / np.abs(want).max()
    return f"max relative difference {far:.1e}, shape {want.shape}"
