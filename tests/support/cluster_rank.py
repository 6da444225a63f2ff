"""A rank of test_cluster.py's jobs: ``cluster_rank.py TASK FOLDER``, or ``FAULT RANK``."""

import concurrent.futures
import contextlib
import ctypes
import functools
import importlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import gluonpar
from gluonpar import cluster, sharding
from gluonpar.batch_norm import running_statistics
from gluonpar.cluster import mpi_sums, process_collectives, world
from gluonpar.metrics import LossMeter
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.plans import partition
from gluonpar.runtime import engine

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip
from mxnet.gluon.contrib import estimator  # isort: skip
import any_program  # isort: skip
import batch_programs  # isort: skip
import checkpoint_files  # isort: skip
import contexts as devices  # isort: skip
import gluon_runs as runs  # isort: skip
from contexts import contexts, device  # isort: skip
from sync_batch_norm_stress import Branches  # isort: skip

SAMPLES, BATCH, STEPS = 23, 11, 2  # the last of three batches has one sample
MODULE_BATCH = 36
DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
RUN = {"device": "cpu", "dataset": "synthetic", "limit": 27, "batch_size": 8, "num_epochs": 1}


def batches(num_devices):
    """This rank's parts of batches of 11, 11 and 1 samples, cut over all ranks' devices."""
    rng = np.random.RandomState(3)
    X = rng.randn(SAMPLES, 1, 28, 28).astype("float32")
    y = rng.randint(0, 10, SAMPLES).astype("float32")
    part = sharding.share_of_batch(num_devices)
    for start in range(0, SAMPLES, BATCH):
        whole = slice(start, start + BATCH)
        X_all, y_all = X[whole], y[whole]
        mine = part(len(y_all)) if part else slice(None)
        yield X_all[mine], y_all[mine], len(y_all)


def run_backward(X, y, ctx, loss_of):
    """Run backward from ``loss_of(i, x, labels)`` of each device i that has samples."""
    shards = gluonpar.split_and_load((X, y), ctx) if len(y) else []
    with autograd.record():
        losses = [loss_of(i, *shard) for i, shard in enumerate(shards)]
    if losses:
        autograd.backward(losses)


def by_train_batch(num_devices):
    """LeNet as a plain function, without batch_size=; initial values differ between ranks."""
    mx.random.seed(cluster.rank())
    params = gluonpar.init_lenet(0.1)
    ctx = contexts(num_devices)
    device_params = [gluonpar.get_params(params, c) for c in ctx]
    for X, y, _ in batches(num_devices):
        gluonpar.train_batch(X, y, device_params, ctx, lr=0.1)
    return [param.asnumpy() for param in device_params[-1]]


def by_hand(num_devices):
    """The same step in its parts."""
    params = gluonpar.init_lenet(0.1)
    ctx = contexts(num_devices)
    device_params = [gluonpar.get_params(params, c) for c in ctx]

    def loss_of(i, X, y):
        return softmax_cross_entropy(gluonpar.lenet(X, device_params[i]), y)

    for X, y, num_samples in batches(num_devices):
        run_backward(X, y, ctx, loss_of)
        gluonpar.allreduce_grads(device_params)
        for params in device_params:
            gluonpar.sgd(params, 0.1, num_samples)
    return [param.asnumpy() for param in device_params[-1]]


def by_towers(num_devices):
    """A Block of unknown shapes, one batch per tower; in the last step only the first has one."""
    mx.random.seed(6 + cluster.rank())
    ctx, loss = contexts(num_devices), gluon.loss.SoftmaxCELoss()
    net = network(norm=True)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    towers = gluonpar.Towers(lambda batch, net: loss(net(batch[0]), batch[1]), net, ctx)
    own = (
        (X[part], y[part])
        for X, y, _ in batches(num_devices)
        for part in partition.slices(len(y), num_devices)
        if part.start < part.stop
    )
    meter = LossMeter()
    drawn = list(itertools.islice(own, num_devices))
    while cluster.total(len(drawn)):
        meter.add(towers.step(drawn, lr=0.1).get("loss", []))
        drawn = list(itertools.islice(own, num_devices))
    params = net.collect_params("^(?!.*running_var)")  # which GPUs define in another way
    loss = np.array([meter.read(), meter.num_batches])
    return [loss, *(param.data(ctx[-1]).asnumpy() for param in params.values())]


MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}


def by_module(num_devices, kvstore="gluonpar", states=None, optimizer="sgd", options=MOMENTUM):
    """Module.fit, with the initial values of rank 0, and the mean over the batches of all ranks."""
    rng = np.random.RandomState(8 + cluster.rank())
    start = {"fc_weight": mx.nd.array(rng.randn(3, 5)), "fc_bias": mx.nd.array(rng.randn(3))}
    size, own = MODULE_BATCH // cluster.size(), cluster.rank()
    X = np.random.RandomState(1).randn(2, cluster.size(), size, 5).astype("float32")
    y = np.arange(X[..., 0].size).reshape(X.shape[:-1]) % 3
    X, y = X[:, own].reshape(-1, 5), y[:, own].reshape(-1)
    found = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    module = mx.mod.Module(
        mx.sym.SoftmaxOutput(found, name="softmax"), context=contexts(num_devices)
    )
    module.fit(
        mx.io.NDArrayIter(X, y, size, label_name="softmax_label"),
        arg_params=start,
        kvstore=kvstore,
        optimizer=optimizer,
        optimizer_params=options,
        num_epoch=2,
    )
    if states:
        module.save_optimizer_states(str(states))
        module.load_optimizer_states(str(states))
    return [value.asnumpy() for _, value in sorted(module.get_params()[0].items())]


def network(norm=False):
    """A network whose shapes are not known before the first forward."""
    net = gluon.nn.HybridSequential(prefix="")
    with net.name_scope():
        net.add(gluon.nn.Dense(16, activation="tanh"))
        net.add(*[gluon.nn.BatchNorm()] * norm, gluon.nn.Dense(10))
    return net


def by_gluon(num_devices, make_trainer, deferred=False):
    """A network whose initial parameters differ between ranks; initialised again half way."""
    mx.random.seed(7 + cluster.rank())
    ctx, net = contexts(num_devices), network()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    if not deferred:
        net(mx.nd.zeros((1, 784), ctx[0]))
    params = net.collect_params()
    trainer = make_trainer(params)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for i, (X, y, number) in enumerate(batches(num_devices)):
        if i == 1:
            net.initialize(mx.init.Xavier(), ctx=ctx, force_reinit=True)
        run_backward(X, y, ctx, lambda _, x, labels: loss(net(x), labels))
        trainer.step(number)
    return [p.list_data()[-1].asnumpy() for p in params.values()]


def by_estimator(num_devices, make_trainer, **loads):
    """MXNet's Estimator; the last of three batches has one sample. Ranks have their own seeds."""
    mx.random.seed(5 + cluster.rank())
    np.random.seed(5 + cluster.rank())
    rng = np.random.RandomState(2)
    X, y = rng.randn(SAMPLES, 784).astype("float32"), rng.randint(0, 10, SAMPLES)
    ctx, net = contexts(num_devices), network()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net(mx.nd.zeros((1, 784), ctx[0]))
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    how = {"trainer": make_trainer(net.collect_params()), "context": ctx}
    fits = estimator.Estimator(net, loss, batch_processor=gluonpar.BatchProcessor(), **how)
    fits.logger.setLevel("ERROR")
    loader = gluonpar.DataLoader(gluon.data.ArrayDataset(X, y), BATCH, shuffle=True, **loads)
    fits.fit(loader, epochs=2)
    return [p.list_data()[-1].asnumpy() for p in net.collect_params().values()]


def by_sync_batch_norm(num_devices, updates=True):
    """Outputs, gradients and running statistics of every batch, of all devices of all ranks.

    Each device, on its thread, has dropout masks of its own: MXNet's, not cuDNN's.
    """
    mx.random.seed(9)
    ctx, net = contexts(num_devices), gluon.nn.HybridSequential(prefix="residual_")
    with net.name_scope():
        # A rank without samples would wait as long as this, if nothing ended its wait.
        norm = gluonpar.SyncBatchNorm(in_channels=4, timeout_seconds=1e6)
        net.add(gluon.nn.Conv2D(4, 3, 2, in_channels=1), norm)
        net.add(Branches(4, 1, 2), gluon.nn.GlobalAvgPool2D())
        net.add(gluon.nn.HybridLambda(lambda F, x: F.Dropout(x, p=0.5, cudnn_off=True)))
        net.add(gluon.nn.Dense(10, in_units=4))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(active=updates)
    params, loss = net.collect_params(), gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluonpar.Trainer(params, "sgd", {"learning_rate": 0.1})

    def forward_backward(shard):
        with autograd.record():
            out = net(shard[0])
            value = loss(out, shard[1])
        value.backward()
        return out

    found = []
    for X, y, number in batches(num_devices):
        shards = gluonpar.split_and_load((X, y), ctx)
        outs = gluonpar.run_tasks(forward_backward, shards, ctx)
        found += of_all_devices(outs)
        normed = [p.list_grad() for p in net.collect_params(".*(gamma|beta)").values()]
        if updates:
            trainer.step(number)
        else:
            found += [array for grads in normed for array in of_all_devices(grads)]
        for param in net.collect_params(running_statistics.NAMES).values():
            copies = of_all_devices(param.list_data())
            assert len({copy.tobytes() for copy in copies}) == 1, param.name
            found.append(copies[0])
    return [*found, *(param.list_data()[-1].asnumpy() for param in params.values())]


def of_all_devices(arrays):
    of_ranks = cluster.gather([*map(mx.nd.NDArray.asnumpy, arrays)])
    return [array for of_rank in of_ranks for array in of_rank]


def by_embedding(num_devices, make_trainer):
    """Words whose vectors have row_sparse gradients, of other words on each device."""
    mx.random.seed(12)
    ctx, net = contexts(num_devices), gluon.nn.HybridSequential(prefix="words_")
    with net.name_scope():
        net.add(gluon.nn.Embedding(50, 3, sparse_grad=True), gluon.nn.Dense(10, in_units=6))
    net.initialize(mx.init.Normal(1), ctx=ctx)
    trainer, loss = make_trainer(net.collect_params()), gluon.loss.SoftmaxCrossEntropyLoss()
    for X, y, number in batches(num_devices):
        words = np.abs(X[:, 0, 0, :2] * 20).astype("int32")
        run_backward(words, y, ctx, lambda _, word, labels: loss(net(word), labels))
        trainer.step(number)
    return [p.list_data()[-1].asnumpy() for p in net.collect_params().values()]


def by_run(num_devices):
    """A whole run: loss, accuracy and parameters."""
    history = gluonpar.train(num_gpus=num_devices, verbose=False, **RUN)
    reached = history.epochs[-1]
    return [np.array([reached.loss, reached.test_accuracy])] + [
        param.asnumpy() for param in history.params
    ]


def trained(num_devices):
    """Everything that is trained in one job, by name."""
    ways = (by_train_batch, by_hand, by_run, by_towers, by_module)
    found = {way.__name__: way(num_devices) for way in ways}
    found["by_sync_batch_norm"] = by_sync_batch_norm(num_devices)
    found["bits"] = by_sync_batch_norm(num_devices, updates=False)
    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
    for deferred in (False, True):
        stock = functools.partial(gluon.Trainer, kvstore="gluonpar")
        kind = stock if deferred else gluonpar.Trainer
        make = functools.partial(kind, optimizer="sgd", optimizer_params={**options})
        found[f"Trainer, {deferred}"] = by_gluon(num_devices, make, deferred)
        loads = {"num_workers": int(deferred), "thread_pool": True}
        found[f"Estimator, {deferred}"] = by_estimator(num_devices, make, **loads)
        # adam with lazy updates, of the rows in a batch
        optimizer, how = ("adam", {"wd": 0.1}) if deferred else ("sgd", {**options})
        make = functools.partial(kind, optimizer=optimizer, optimizer_params=how)
        found[f"{optimizer}, row_sparse"] = by_embedding(num_devices, make)
    return found


def collective():
    """Check each collective, on arrays that differ in every cell, against NumPy on all of them."""
    rank, size = cluster.rank(), cluster.size()
    for k, dtype in itertools.product((1, 2), DTYPES):
        n = k * size
        # Small integers whose sums are exact in float16, and wrap around in int8 and uint8.
        values = (np.arange(n * 111).reshape(n, 111) * 37 % 250).astype(dtype)
        own = values[rank * k : (rank + 1) * k]
        parts = partition.slices(111, n)

        def after(function, *args, data=own, first=rank * k, **kwargs):
            arrays = [mx.nd.array(x, device(i), x.dtype) for i, x in enumerate(data)]
            with autograd.record():
                function(arrays, *args, **kwargs)
            return [(first + i, array.asnumpy().tolist()) for i, array in enumerate(arrays)]

        ops = {"sum": np.add, "max": np.maximum, "min": np.minimum}
        for op, combine in ops.items():
            want = combine.reduce(values, dtype=dtype)
            options = {"op": op, "algorithm": ["ring", None][k - 1]}
            for _, got in after(gluonpar.allreduce, **options):
                assert got == want.tolist(), (dtype, op)
            for i, got in after(gluonpar.reduce, n - 1, op):
                assert got == (want if i == n - 1 else values[i]).tolist(), (dtype, op, i)
            for i, got in after(gluonpar.reduce_scatter, op):
                expected = values[i].copy()
                expected[parts[i]] = want[parts[i]]
                assert got == expected.tolist(), (dtype, op, i)
        with mx.util.np_shape(True):
            numbers = [mx.np.array(x, dtype, device(i)) for i, x in enumerate(own[:, 0])]
            gluonpar.reduce(numbers, n - 1)
            gluonpar.reduce([mx.np.empty((0, 3), dtype=dtype, ctx=device(i)) for i in range(k)])
        want = np.add.reduce(values[:, 0], dtype=dtype) if rank == size - 1 else own[-1, 0]
        assert numbers[-1].asnumpy() == want
        for _, got in after(gluonpar.broadcast, n - 1):
            assert got == values[n - 1].tolist(), dtype
        gathered = np.concatenate([values[i][part] for i, part in enumerate(parts)])
        for _, got in after(gluonpar.all_gather):
            assert got == gathered.tolist(), dtype
        for _, got in after(lambda data: gluonpar.allreduce_many([data, [x + 1 for x in data]])):
            assert got == np.add.reduce(values, dtype=dtype).tolist(), dtype
        if dtype == "float32":
            towers = [[mx.nd.array(x, device(i))] for i, x in enumerate(own)]
            (mean,) = gluonpar.average_gradients(towers)
            np.testing.assert_allclose(mean.asnumpy(), values.mean(axis=0), rtol=1e-6)
        arrays = [mx.nd.array(x, device(i), dtype) for i, x in enumerate(own)]
        with cluster.local():
            gluonpar.allreduce(arrays, op="max")
        gluonpar.allreduce(arrays, op="max")  # the same arrays again, now of all ranks
        assert arrays[-1].asnumpy().tolist() == values.max(axis=0).tolist(), dtype
        with cluster.local():
            total = np.add.reduce(own, dtype=dtype)
            for _, got in after(gluonpar.allreduce):
                assert got == total.tolist(), dtype
            for i, got in after(gluonpar.reduce_scatter, first=0):
                expected, part = own[i].copy(), partition.slices(111, k)[i]
                expected[part] = total[part]
                assert got == expected.tolist(), (dtype, i)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                assert not pool.submit(cluster.is_local).result()  # another thread is not inside
    # Ranks may have different numbers of arrays; sums may not be representable, where means are.
    for op, numbers in (("sum", range(1, size + 1)), ("mean", range(2, size + 2))):
        data = [mx.nd.full((3,), i + 2.0, device(i)) for i in range(numbers[rank])]
        gluonpar.allreduce(data, op=op)
        every = [i + 2.0 for number in numbers for i in range(number)]
        want = np.float32(sum(every) / (len(every) if op == "mean" else 1))
        assert all((array.asnumpy() == want).all() for array in data), op
    variables, ctx = [mx.nd.full((1,), rank + 5.0)], contexts(rank + 1)
    towers = gluonpar.Towers(lambda batch, params: batch - params[0], variables, ctx)
    assert [own[0].asscalar() for own in towers.variables] == [5] * (rank + 1)  # rank 0's
    for dtype, large in (("float16", 60000), ("float32", 3e38)):
        with mx.util.np_shape(True):
            without_dimensions = mx.np.array(large, dtype=dtype, ctx=device(0))
        for array in (mx.nd.full((2,), large, device(0), dtype), without_dimensions):
            gluonpar.allreduce([array], op="mean")
            assert (array.asnumpy() == np.dtype(dtype).type(large)).all()


def rows():
    """Check sums and means of row_sparse arrays, of which ranks have other rows, some none."""
    rank, size = cluster.rank(), cluster.size()
    for k, dtype in itertools.product((1, 2), ("float16", "float32", "float64")):
        rng = np.random.RandomState(k)
        values = rng.randint(1, 50, (k * size, 9, 2, 3)) * (rng.rand(k * size, 9, 1, 1) < 0.3)
        values[0] = 0
        values = values.astype(dtype)
        want = {"sum": values.sum(axis=0), "mean": values.astype("float64").mean(axis=0)}
        for op, expected in want.items():
            own = values[rank * k : (rank + 1) * k]
            dense = [mx.nd.array(x, device(i), dtype) for i, x in enumerate(own)]
            data = [array.tostype("row_sparse") for array in dense]
            gluonpar.allreduce_many([data, dense], op=op)
            for array in data:
                np.testing.assert_array_equal(array.asnumpy(), expected.astype(dtype))
                there = np.flatnonzero(expected.any((1, 2)))
                np.testing.assert_array_equal(array.indices.asnumpy(), there)
    own = mx.nd.full((4, 2), 2049).tostype("row_sparse")  # 2048 as float16
    cluster.allreduce_rows(own, compression="fp16")
    assert (own.asnumpy() == 2048 * size).all()
    with cluster.local():
        data = [mx.nd.full((2, 1), i + rank, device(i)).tostype("row_sparse") for i in range(2)]
        gluonpar.allreduce(data)
        assert data[1].asnumpy().tolist() == [[2 * rank + 1]] * 2


def summed_by_hand():
    """Check that make_parallel must stay in one process, and that a sum of gradients is enough."""
    x, w = np.arange(1.0, 4 * cluster.size(), dtype="float32"), mx.nd.ones((1,))
    mine = x[partition.slices(len(x), cluster.size())[cluster.rank()]]
    w.attach_grad()

    def squares(x):
        return (x * w.as_in_context(x.context)) ** 2

    with pytest.raises(ValueError, match=r"inside gluonpar.cluster.local\(\)"):
        gluonpar.make_parallel(squares, contexts(2), x=mine)
    with cluster.local(), autograd.record():
        loss = gluonpar.make_parallel(squares, contexts(2), x=mine).sum()
    loss.backward()
    gluonpar.allreduce([w.grad])
    assert w.grad.asscalar() == (2 * x**2).sum()


def normalised():
    """Check SyncBatchNorms in unlike parts of batches, inside local() and in a plain loop."""
    rank, size = cluster.rank(), cluster.size()
    ctx, every = contexts(2), np.arange(2.0 * size)
    first, second = [gluonpar.SyncBatchNorm(in_channels=1, prefix="norm_") for _ in range(2)]
    with cluster.local():
        inside = gluonpar.SyncBatchNorm(in_channels=1)
    for layer in (first, second, inside):
        layer.initialize(ctx=ctx)

    def running_mean(layer, num_tasks=2, failing=-1, numbers=every):
        """Train on one of ``numbers`` per device; a task of rank ``failing`` fails."""

        def task(c):
            number, dtype = numbers[2 * rank + c.device_id], layer.gamma.dtype
            with autograd.record():
                layer(mx.nd.full((1, 1), number, c, dtype))
            if failing == rank:
                raise KeyError("the cat")

        gluonpar.run_tasks(task, ctx[:num_tasks], ctx)
        return layer.running_mean.data(ctx[1]).asscalar()

    def close(got, want):
        np.testing.assert_allclose(got, want, rtol=1e-5)

    close(running_mean(first), 0.1 * every.mean())
    close(running_mean(inside), 0.1 * every[2 * rank :][:2].mean())
    for without in (0, size - 1):  # this rank has no task, and the next one a task less
        numbers = {without: 0, (without + 1) % size: 1}
        used = [2.0 * r + i for r in range(size) for i in range(numbers.get(r, 2))]
        want = 0.9 * second.running_mean.data(ctx[1]).asscalar() + 0.1 * np.mean(used)
        close(running_mean(second, numbers.get(rank, 2)), want)
    wide = gluonpar.SyncBatchNorm(in_channels=1)
    wide.initialize(ctx=ctx)
    wide.cast("float64")  # in which another order of adding gives 4 or 5
    close(running_mean(wide, 2 * (rank < 2), numbers=[1, 1e16, -1e16, 3]), 0.1 * 3 / 4)
    if not rank:
        with cluster.local():  # alone
            close(running_mean(first), 0.9 * 0.1 * every.mean() + 0.1 * every[:2].mean())
    one = gluonpar.SyncBatchNorm(in_channels=1)
    one.initialize(ctx=device(0))
    for _ in range(2):  # a plain loop
        with autograd.record():
            out = one(mx.nd.full((1, 1), rank, device(0)))
        out.backward()
    close(one.running_mean.data().asscalar(), 0.19 * np.arange(size).mean())
    late = gluonpar.SyncBatchNorm(in_channels=1, timeout_seconds=1)
    late.initialize(ctx=ctx)

    def after_the_others():
        if rank == 1:
            cluster.gather(None)
        try:
            running_mean(late)
        finally:
            if rank != 1:
                cluster.gather(None)

    for words, function in (
        ("1 has not come after 1 s", after_the_others),
        ("the ranks differ in call", lambda: running_mean(first if rank else second)),
        ("rank 1: a task failed", lambda: running_mean(first, failing=1)),
    ):
        try:
            function()
        except mx.MXNetError as error:
            assert words in str(error), error
        except gluonpar.TaskError:
            assert rank == 1
        else:  # rank 1 may have the others' values before it is told that they gave up
            assert rank == 1 and function is after_the_others
        with contextlib.suppress(mx.MXNetError):  # which clears the errors of other arrays
            mx.nd.waitall()
    assert np.isfinite(running_mean(first))


def local(folder):
    """Rank 0 alone does everything inside local(), and goes on outside with what it made there."""
    rank, size, path = cluster.rank(), cluster.size(), pathlib.Path(folder)
    outside = networks_and_trainers()
    if rank == 0:
        with cluster.local():
            assert (cluster.rank(), cluster.size(), cluster.gather(7)) == (0, 1, [7])
            assert cluster.local_rank() == 0
            save(path, 2)
            networks = networks_and_trainers()
            meter = LossMeter()
            images, one = np.array([[1, 0], [0, 1]], "float32"), contexts(1)
            accuracy = gluonpar.metrics.accuracy(images, np.zeros(2), [None], one, lambda X, _: X)
            assert accuracy == 0.5
            gluonpar.save_checkpoint(str(path / "of_one"), *networks[0])
            gluonpar.load_checkpoint(str(path / "of_one"), *networks[0])
            assert gluonpar.run_tasks(lambda _: cluster.size(), [0, 1], contexts(2)) == [1, 1]
            how = (lambda x, params: (x - params[0]) ** 2), [mx.nd.zeros((1,))], one
            towers = gluonpar.Towers(*how, mx.optimizer.SGLD())
        for net, trainer in networks:
            losses = step(net, trainer, 10, 1)
            assert net.weight.data().asscalar() == -9, trainer
        meter.add(losses)
        assert meter.read() == 10
        assert towers.step([mx.nd.ones((1,))])["loss"][0].asscalar() == 1
    for net, trainer in outside:
        with cluster.local(), pytest.raises(RuntimeError, match="made outside"):
            step(net, trainer, 1, 1)
        step(net, trainer, 1, size)
        assert net.weight.data().asscalar() == 0


def networks_and_trainers():
    """A network of one weight for each kind of Trainer."""
    found = []
    for make in (gluonpar.Trainer, any_program.OwnLoop):
        net = gluon.nn.Dense(1, in_units=1, use_bias=False)
        net.initialize(mx.init.One(), ctx=contexts(1))
        found.append((net, make(net.collect_params(), "sgd", {"learning_rate": 1.0})))
    return found


def step(net, trainer, x, batch_size):
    with autograd.record():
        loss = net(mx.nd.full((1, 1), x, device(0)))
    loss.backward()
    trainer.step(batch_size)
    return [loss]


def exchanged():
    """Check sums of several arrays, of large ones and of compressed ones, and of numbers."""
    rank, size = cluster.rank(), cluster.size()
    several = [mx.nd.full((n,), rank + n, dtype=d) for n, d in ((3, "float32"), (2, "int32"))]
    several += [mx.nd.full((4,), rank + 4.0), mx.nd.full((2, 3), rank + 6.0, ctx=device(1))]
    cluster.allreduce(array for array in several)
    for array in several:
        n = array.size
        assert (array.asnumpy() == sum(r + n for r in range(size))).all(), array
    for n in (1 << 21, 2_500_001):  # from 8 MiB on in blocks, the last of a part shorter
        for dtype in ("float32", "float64", "int32"):
            values = np.arange(n) % 1000
            x = mx.nd.array(values + rank, dtype=dtype)
            cluster.allreduce([x])
            assert (x.asnumpy() == values * size + size * (size - 1) // 2).all(), (n, dtype)
    with mx.util.np_shape(True):
        x = mx.np.array(np.arange(40) % size == rank, "bool")
    cluster.allreduce([x])
    assert x.asnumpy().all() and x.dtype == np.bool_
    rng = np.random.RandomState(0)
    values = rng.randn(size, 1001).astype("float32")
    x = mx.nd.array(values[rank])
    cluster.allreduce([x], compression="fp16")
    halves = values.astype("float16").astype("float32")
    want = sum(halves[1:], halves[0]).astype("float16").astype("float32")
    assert x.asnumpy().tobytes() == want.tobytes()
    later = cluster.PendingGather(rank + 1, "numbers")
    assert later.wait() == [*range(1, size + 1)]
    assert cluster.gather(("a", rank)) == [("a", r) for r in range(size)]
    assert cluster.total([rank, 1.0]).tolist() == [size * (size - 1) / 2, size]
    assert cluster.local_rank() == rank  # all are on one host
    data = bytes(range(200))
    assert cluster.broadcast_bytes(data if rank == 0 else None) == data
    numbers = [np.arange(20.0 * (r + 1)).reshape(r + 1, 20) + r for r in range(size)]
    gathered = cluster.gather_to_first(numbers[rank])
    assert len(gathered) == (0 if rank else size)
    assert all((got == want).all() for got, want in zip(gathered, numbers))
    store = mx.kv.create("gluonpar")
    assert (store.rank, store.num_workers) == (rank, size)


def in_nest(samples):
    labels, images, boxes = zip(*samples)
    images = {"image": mx.nd.array(np.stack(images, axis=1))}  # samples along axis 1
    return mx.nd.array(labels), images, [mx.nd.array(each) for each in boxes]


def loaded(num_workers):
    """Check each rank's parts, and those of ranks without samples, of what DataLoader loads."""
    rank, size = cluster.rank(), cluster.size()
    n, batch_size = 2 * size + 1, 2 * size
    boxes = [np.full((i + 1, 4), i, "float32") for i in range(n)]
    images = np.arange(n * 3, dtype="float32").reshape(n, 3)

    np.random.seed(20 + rank)  # rank 0's is what counts
    dataset = [*zip(range(n), images, boxes)]
    how = {"shuffle": True, "batchify_fn": in_nest, "num_workers": num_workers}
    loader, others = gluonpar.DataLoader(dataset, batch_size, **how), np.random.RandomState(20)
    for _ in range(2):
        order, found = [*range(n)], []
        others.shuffle(order)
        for whole in (order[:batch_size], order[batch_size:]):
            mine = whole[2 * rank : 2 * rank + 2]
            found.append((len(whole), mine))
        assert len(loader) == len(found)
        for (number, mine), (labels, images_of, boxes_of) in itertools.zip_longest(found, loader):
            assert (loader.num_samples, labels.asnumpy().tolist()) == (number, mine)
            assert images_of["image"].asnumpy().tolist() == images[mine].T.tolist()
            assert [each.shape for each in boxes_of] == [(i + 1, 4) for i in mine]
            if not mine:
                assert not gluonpar.split_and_load(labels, contexts(2))
                assert not gluonpar.split_samples((labels, boxes_of), contexts(2))
    unlike = gluonpar.DataLoader(dataset[: n - (rank == size - 1)], batch_size)
    refused_on_all(lambda: next(iter(unlike)), f"{n}, {n - 1}], by rank")
    endless = gluonpar.DataLoader(
        np.arange(1), 9999, sampler=itertools.repeat(0), last_batch="keep"
    )
    refused_on_all(lambda: next(iter(endless)), "a sampler must end")
    with cluster.local():
        alone = gluonpar.DataLoader(np.arange(3), 2)
        assert [batch.size for batch in alone] == [2, 1]


def joined():
    """Check a loop over iterators of ``mx.io``, of which rank 0's has a batch more."""
    rank, size = cluster.rank(), cluster.size()
    of_ranks = [np.arange(6 if r == 0 else 4, dtype="float32") + 7 * r for r in range(size)]
    iterator = mx.io.NDArrayIter(of_ranks[rank], batch_size=2)
    [weight] = runs.weights([[0.0]], 1)
    trainer, want, seen = gluonpar.Trainer([weight], "sgd", {"learning_rate": 0.1}), 0.0, []
    for step, (batch, num_samples) in enumerate(cluster.join(iterator)):
        if batch is not None:
            with autograd.record():
                loss = (weight.data() - batch.data[0]) ** 2
            loss.backward()
        trainer.step(num_samples)
        every = np.concatenate([data[2 * step : 2 * step + 2] for data in of_ranks])
        want -= 0.1 * 2 * (want - every.mean())
        seen.append((batch is None, num_samples))
    np.testing.assert_allclose(weight.data().asscalar(), want, rtol=1e-5)
    assert seen == [(False, 2 * size)] * 2 + [(rank > 0, 2)]


def measured():
    """Check losses and accuracy of what ranks have a part of, or all, or nothing of."""
    rank, size = cluster.rank(), cluster.size()
    meter = LossMeter()
    for i in range(rank + 1):
        meter.add([mx.nd.full((2,), i + 1.0, device(0))], [mx.nd.ones((1,), device(0))])
    added = [i + 1 for number in range(1, size + 1) for i in range(number)]
    assert meter.read() == np.mean(added) and meter.num_batches == size
    meter.add([mx.nd.ones((1,), device(0))])
    if rank == size - 1:
        meter.add([mx.nd.ones((1,), device(0))], [mx.nd.full((1,), np.nan, device(0))])
    refused_on_all(meter.read, f"NaN in the update after batch {size + 2}")
    refused_on_all(lambda: cluster.total([0] * rank), "(0,), (1,)")

    n = 4 * size - 3
    scores = np.eye(5, dtype="float32")[np.arange(n) % 5]
    labels = np.where(np.arange(n) < n // 2, np.arange(n) % 5, 4)  # in the first half all are right
    share = (scores.argmax(axis=1) == labels).mean()

    def accuracy(part, **options):
        how = [None] * 2, contexts(2), lambda X, _: X
        return gluonpar.metrics.accuracy(scores[part], labels[part], *how, **options)

    everything, none = slice(0, n), slice(0, 0)
    assert accuracy(everything) == share
    cuts = sorted(np.random.RandomState(1).randint(0, n, size - 1))
    for ends in ([0, *cuts, n], [0, *[0] * (size - 1), n], [0, *[n] * size]):  # some are empty
        assert accuracy(slice(ends[rank], ends[rank + 1]), own_part=True) == share, ends
    for part in (slice(4 * rank, 4 * rank + 1), slice(0, n - rank), none if rank else everything):
        refused_on_all(lambda part=part: accuracy(part), "own_part=True")
    refused_on_all(lambda: accuracy(everything, own_part=rank == 0), "own_part is ")
    for own_part in (False, True):
        refused_on_all(lambda: accuracy(none, own_part=own_part), "at least 1 image, got 0")  # noqa: B023
    labels = labels[: n - (rank == 1)]
    refused_on_all(lambda: accuracy(everything), "rank 1: labels must be one per image")


def refused_on_all(function, words):
    """Check that each rank gets an error with these words."""
    message = None
    try:
        function()
    except (ValueError, FloatingPointError) as error:
        message = str(error)
    messages = cluster.gather(message)
    assert all(words in str(message) for message in messages), (words, messages)


def queued():
    """Check that train_batch, not knowing the number of samples, does not wait for backward."""
    ctx, gate, in_time = contexts(2), threading.Event(), []
    X = mx.nd.ones((2, 1), device(2))
    engine.push(lambda: in_time.append(gate.wait(60)), mx.cpu(2), writes=[X])
    params = [gluonpar.get_params([mx.nd.ones((1, 1))], c) for c in ctx]
    options = {"model": lambda x, params: mx.nd.dot(x, params[0]), "loss": lambda z, y: z[:, 0]}
    gluonpar.train_batch(X, mx.nd.ones((2,)), params, ctx, 0.5, algorithm="ring", **options)
    gate.set()
    assert params[1][0].asscalar() == 0.5
    assert in_time == [True]


def running_statistics_of_ranks(folder):
    """Check that they become the mean over all devices, or one's; and each device's from a file."""
    first, size, path = 2 * cluster.rank(), cluster.size(), pathlib.Path(folder) / "norm.npz"
    norm = gluon.nn.BatchNorm(in_channels=1)
    norm.initialize(ctx=contexts(2))
    means = norm.running_mean.list_data()

    def set_to(*values):
        for mean, value in zip(means, values):
            mean[:] = value

    for change, options, want in (
        (running_statistics.average_statistics, {}, size - 0.5),
        (running_statistics.broadcast_statistics, {"root": 3}, 3),
    ):
        set_to(first, first + 1)
        change(norm, **options)
        assert [mean.asscalar() for mean in means] == [want] * 2
    set_to(first, first + 1)
    gluonpar.save_checkpoint(path, norm)
    set_to(-1, -1)
    gluonpar.load_checkpoint(path, norm)
    assert [mean.asscalar() for mean in means] == [first, first + 1]
    header, arrays = checkpoint_files.read(path)
    in_file = [arrays[i].item() for i in dict(header["params"])["running_mean"]]
    assert in_file == [*range(2 * size)]
    # Ranks with other numbers of devices than the others, and a generator of each rank.
    mine, before = size - cluster.rank(), sum(range(size, size - cluster.rank(), -1))
    norm.collect_params().reset_ctx(contexts(mine))
    means, rng = norm.running_mean.list_data(), np.random.RandomState(cluster.rank())
    set_to(*range(before, before + mine))
    gluonpar.save_checkpoint(path, norm, rng=rng)
    want = rng.rand()
    set_to(*[-1] * mine)
    gluonpar.load_checkpoint(path, norm, rng=rng)
    assert [mean.asscalar() for mean in means] == [*range(before, before + mine)]
    assert rng.rand() == want
    with cluster.local():  # one rank of as many devices has all of the values
        alone = gluon.nn.BatchNorm(in_channels=1)
        alone.initialize(ctx=contexts(1))
        gluonpar.load_checkpoint(path, alone, rng=rng)
        assert alone.running_mean.data().asscalar() == (size * (size + 1) / 2 - 1) / 2
        assert rng.rand() == np.random.RandomState(0).rand()


def draws():
    """Check that ranks draw the same initial values, then other numbers, the same for a seed."""

    def drawn(seed):
        if seed is not None:
            mx.random.seed(seed)
        dropped = mx.nd.Dropout(mx.nd.ones((64,)), mode="always")
        return cluster.gather((mx.nd.random.uniform().asscalar(), dropped.asnumpy().tobytes()))

    unseeded = drawn(None)
    assert unseeded[0] == unseeded[-1]
    mx.random.seed(2)
    start = gluonpar.init_lenet()
    gluonpar.get_params(start, device(0))
    assert len({*drawn(None)}) == len({*drawn(2)}) == cluster.size()
    assert drawn(2) == drawn(2) != drawn(3)
    with cluster.local():
        mx.random.seed(2)
        again = gluonpar.init_lenet()
    assert all((a.asnumpy() == b.asnumpy()).all() for a, b in zip(start, again))


def as_one(folder):
    draws()
    exchanged()
    process_collectives.PIECE_BYTES = 64  # messages in pieces, as those above 1 GiB are
    collective()
    process_collectives.PIECE_BYTES = 1 << 30
    collective()
    rows()
    summed_by_hand()
    normalised()
    measured()
    loaded(num_workers=0)
    loaded(num_workers=1)
    joined()
    queued()
    running_statistics_of_ranks(folder)
    for num_devices in (1, 2, 3):
        save(folder, num_devices)


def programs(number):
    """Programs in which all ranks have samples, and such in which some have none."""
    for kvstore, optimizer in itertools.product((None, "own loop"), any_program.OPTIMIZERS):
        for least_samples in (1, cluster.size()):
            any_program.law(kvstore, optimizer, False, int(number), least_samples)()
    size = cluster.size() + 1  # rank 0 has one sample more, and runs backward on one device more
    first, other = (size, 2, "a loop", 3), (size, 0, "the last device first", 2)

    def clipped(n):
        return "use", (0, "clip_and_step", n, 2, "a loop", 5)

    # On rank 0 a gradient of the first device is lost by a pass of the second one.
    lost = [("use", (0, "clip", size - 1, 2, "a loop", 1))]
    lost += [("backward", (size - 1, 2, "one backward", 5))]
    lost += [("sum_by_hand", (-1, size, 0, "one backward", 9)), ("train", (0, *other))]
    for kvstore, k, two, program in [
        (None, 3, False, [("backward", first), ("train", (0, *other))]),
        (None, 3, False, [("backward", other), ("sum", (0,)), ("step", (0, size))]),
        # Summed by the program, with samples on rank 0 alone.
        (None, 3, False, [("train", (0, *other)), ("sum_by_hand", (0, 1, 2, "a loop", 4))]),
        # The second Trainer's first step, after a batch that it has not used.
        ("own loop", 1, True, [("train", (0, *other)), ("train", (-1, 1, 0, "a loop", 4))]),
        (None, 3, True, lost),
        # Sums of an earlier step, on ranks that have no samples in this one.
        (None, 2, False, [("require", (0, "add")), clipped(size), ("zero_grad", (0,)), clipped(1)]),
    ]:
        any_program.check(kvstore, "sgd", False, k, program, two)


def unlike_programs(number):
    """Programs in which one rank does something else."""
    for kvstore, optimizer in itertools.product((None, "own loop"), any_program.OPTIMIZERS):
        any_program.law(kvstore, optimizer, False, int(number), cluster.size(), unlike=True)()


def batches_left_out(_):
    """Programs of one process, with a part of every batch on each rank; and numbers that differ."""
    ways = (
        "a loop",
        "the last device first",
        ("attack", "a loop", 0),
        ("two losses", "run_tasks", 1),
    )
    for kvstore, k in itertools.product((None, "own loop"), (1, 2)):
        for name, way in itertools.product(any_program.NAMED, ways):
            any_program.check_named(name, kvstore, k, way)
        for program, how in itertools.product(batch_programs.PROGRAMS, batch_programs.HOWS):
            batch_programs.check(program, k, kvstore, how)
    evaluated = runs.kernels_trained(gluonpar.Trainer, "nag", 2, cluster.is_main())
    assert {*evaluated} == {cluster.gather(evaluated)[0][0]}, "an evaluation on rank 0"
    for make in (gluonpar.Trainer, any_program.OwnLoop):
        [param] = params = runs.weights([[0.0]], 2)
        trainer = make(params, "sgd", {"learning_rate": 1.0})
        for refused, want in ((False, -1), (True, -1), (False, -2), (True, -2), (False, -3)):
            for _ in range(2 if refused and cluster.is_main() else 1):
                runs.give_grads(params, [[1.0, 1.0]])
            told = pytest.raises(mx.MXNetError, match="different numbers of batches")
            with told if refused else contextlib.nullcontext():
                trainer.step(2 * cluster.size())
                assert param.list_data()[1].asscalar() == want
        if not cluster.is_main():  # rank 0 has the sum that is added in the next one
            runs.give_grads(params, [[None, 4.0]])
        trainer.allreduce_grads()
        trainer.step(cluster.size() - 1)
        assert param.list_data()[0].asscalar() == -7


def save(folder, num_devices):
    """Train; the bits must be the same on all ranks."""
    found = trained(num_devices)
    bits = [b"".join(array.tobytes() for array in arrays) for arrays in found.values()]
    assert all(theirs == bits for theirs in cluster.gather(bits))
    if cluster.is_main():
        flat = {f"{name}{i}": each for name in found for i, each in enumerate(found[name])}
        np.savez(pathlib.Path(folder) / f"{num_devices}.npz", **flat)


def on_gpus(folder):
    """The same on two GPUs per rank."""
    devices.kind, RUN["device"] = mx.gpu, "gpu"
    with device(0):  # the context of arrays that are made without one
        exchanged()
        save(folder, 2)


def late(folder):
    """Rank 1 comes late to a collective, when there is a file ``go``; the others wait for it."""
    cluster.gather("the first takes longer")
    print(f"rank {cluster.rank()} (pid {os.getpid()}", flush=True)
    while cluster.rank() == 1 and not pathlib.Path(folder, "go").exists():
        time.sleep(0.01)
    cluster.gather(None)


def children(_):
    """A rank starts a program, before it joins the job, and forks; then it finalizes MPI."""
    program = "from gluonpar import cluster; print('started', cluster.rank(), cluster.size())"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
    before, x = (cluster.rank(), cluster.size()), mx.nd.ones((2,))
    for code in (1, 7):
        child = os.fork()
        if not child:
            signal.alarm(60)
            assert (cluster.rank(), cluster.size()) == before
            for name in ("allreduce", "broadcast", "gather", "abort"):
                with pytest.raises(RuntimeError, match=str(os.getpid())):
                    getattr(cluster, name)([x])
            if code == 1:
                raise KeyError("the cat")
            sys.exit(code)  # through what is done at the end of a process
        assert os.waitpid(child, 0)[1] == code << 8
    cluster.allreduce([x])
    mpi = importlib.import_module("mpi4py.MPI")
    mpi.Finalize()  # without waiting for the sum
    with pytest.raises(RuntimeError, match=r"MPI.Finalize\(\)"):
        cluster.gather(x)
    print(f"rank {before[0]} {x.asnumpy().tolist()}", flush=True)


def saves_alone(folder):
    """Rank 0 alone saves a network, without and with running statistics."""
    for layer in (gluon.nn.Dense(1, in_units=1), gluon.nn.BatchNorm(in_channels=1)):
        layer.initialize()
        if cluster.is_main():
            gluonpar.save_checkpoint(pathlib.Path(folder) / type(layer).__name__, layer)


def first_step_without_samples(_):
    """Rank 1 has none, and so does not know the shapes of the parameters."""
    net = gluon.nn.Dense(1)
    net.initialize()
    trainer = gluonpar.Trainer(net.collect_params(), "sgd")
    if cluster.is_main():
        with autograd.record():
            loss = net(mx.nd.ones((1, 1)))
        loss.backward()
    trainer.step(1)
    mx.nd.waitall()


def unlike_last_step(_):
    """Nothing is called after it."""
    params = runs.weights([[0.0]], 1)
    trainer = gluonpar.Trainer(params, "sgd", {"learning_rate": 0.5 + cluster.rank()})
    runs.give_grads(params, [[1.0]])
    trainer.step(cluster.size())


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {
    "raise": lambda: {}["the cat"],
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "stop": stop,
    "stop inside": lambda: setattr(mpi_sums, "allreduce", lambda *_, **__: stop()),
    "hang": lambda: time.sleep(1000),
    "leave": lambda: sys.exit(0),
    "leave and hang": lambda: sys.exit(0),
    "go on": lambda: None,
    "stop at the end": stop,
    "end last": lambda: (time.sleep(15), print("the last", flush=True)),
}
AT_THE_END = ("stop at the end", "end last")


def fault(kind, who):
    """Sum numbers on all ranks; after eleven sums rank ``who`` fails, the others go on.

    If ``kind`` is 'leave and hang', the next rank hangs.
    """
    print(f"pid {os.getpid()}", flush=True)
    x = mx.nd.ones((1000,))
    if cluster.size() > 1:  # so that no rank is late because it started later
        world.world().comm.Barrier()
    for i in range(11 if kind in AT_THE_END else 10**9):
        cluster.allreduce([x])
        x /= cluster.size()
        x.wait_to_read()
        if i == 10 and cluster.rank() == who:
            print("now", flush=True)
            FAULTS[kind]()
        if i == 10 and cluster.rank() == who + 1 and kind == "leave and hang":
            FAULTS["hang"]()
        time.sleep(0.01)


if __name__ == "__main__":
    task, argument = sys.argv[1:]
    if task in FAULTS:
        fault(task, int(argument))
    else:
        globals()[task](argument)
