"""A rank of a job that trains: ``python -m tests.support.ranks.training TASK ARGUMENT...``.

Several tasks are separated by ``+``.
"""

import contextlib
import functools
import itertools
import pathlib
import sys
import threading

import numpy as np
import pytest

import gluonpar
from gluonpar import cluster, sharding
from gluonpar.batch_norm import running_statistics
from gluonpar.cluster import process_collectives
from gluonpar.metrics import LossMeter
from gluonpar.models.losses import softmax_cross_entropy
from gluonpar.plans import partition
from gluonpar.runtime import engine

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip
from mxnet.gluon.contrib import estimator  # isort: skip
from tests.support import any_program  # isort: skip
from tests.support import contexts as devices  # isort: skip
from tests.support import gluon_runs as runs  # isort: skip
from tests.support.contexts import contexts, device  # isort: skip
from tests.support.ranks import collectives  # isort: skip
from tests.support.sync_batch_norm_stress import Branches  # isort: skip

SAMPLES, BATCH, STEPS = 23, 11, 2  # the last of three batches has one sample
MODULE_BATCH = 36
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


def as_one(folder, *numbers):
    """Check what ranks do together, and train on these numbers of devices per rank."""
    collectives.draws()
    collectives.exchanged()
    process_collectives.PIECE_BYTES = 64  # messages in pieces, as those above 1 GiB are
    collectives.collective()
    process_collectives.PIECE_BYTES = 1 << 30
    collectives.collective()
    collectives.rows()
    collectives.summed_by_hand()
    collectives.normalised()
    collectives.measured()
    collectives.loaded(num_workers=0)
    collectives.loaded(num_workers=1)
    joined()
    queued()
    collectives.running_statistics_of_ranks(folder)
    for num_devices in numbers:
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


def batches_left_out(how):
    """Programs of one process, with a part of every batch on each rank; and numbers that differ."""
    ways = (
        "a loop",
        "the last device first",
        ("attack", "a loop", 0),
        ("two losses", "run_tasks", 1),
    )
    doors = [*itertools.product((None, "own loop"), (1, 2))]
    for program, name in enumerate(any_program.NAMED):
        for i, way in enumerate(ways):
            if how == "some" and (program + i) % len(ways):
                continue
            kvstore, k = doors[(i + program // 2) % len(doors)]  # they take turns
            any_program.check_named(name, kvstore, k, way)
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
    found = trained(int(num_devices))
    bits = [b"".join(array.tobytes() for array in arrays) for arrays in found.values()]
    assert all(theirs == bits for theirs in cluster.gather(bits))
    if cluster.is_main():
        flat = {f"{name}{i}": each for name in found for i, each in enumerate(found[name])}
        np.savez(pathlib.Path(folder) / f"{num_devices}.npz", **flat)


def on_gpus(folder):
    """The same on two GPUs per rank."""
    devices.kind, RUN["device"] = mx.gpu, "gpu"
    with device(0):  # the context of arrays that are made without one
        collectives.exchanged()
        save(folder, 2)


if __name__ == "__main__":
    for task in " ".join(sys.argv[1:]).split(" + "):
        name, *arguments = task.split()
        globals()[name](*arguments)
