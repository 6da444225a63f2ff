"""A rank of test_cluster.py's jobs: ``cluster_rank.py TASK FOLDER``, or ``FAULT RANK``."""

import os
import pathlib
import signal
import sys
import time

import numpy as np

import gluonpar
from gluonpar import cluster
from gluonpar.cluster import mpi_sums
from gluonpar.gluon import running_statistics
from gluonpar.training import ranks

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip

SAMPLES, BATCH, STEPS = 23, 11, 2  # the last of three batches has one sample
RUN = {"device": "cpu", "dataset": "synthetic", "limit": 27, "batch_size": 8, "num_epochs": 1}
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
}


kind = mx.cpu


def contexts(num_devices):
    return [kind(i) for i in range(num_devices)]


def batches(num_devices):
    """This rank's parts of batches of 11, 11 and 1 samples, cut over all ranks' devices."""
    rng = np.random.RandomState(3)
    X = rng.randn(SAMPLES, 1, 28, 28).astype("float32")
    y = rng.randint(0, 10, SAMPLES).astype("float32")
    part = ranks.share_of_batch(num_devices, None)
    for start in range(0, SAMPLES, BATCH):
        whole = slice(start, start + BATCH)
        X_all, y_all = X[whole], y[whole]
        mine = part(len(y_all)) if part else slice(None)
        yield X_all[mine], y_all[mine], len(y_all)


def by_train_batch(num_devices):
    """LeNet as a plain function, without batch_size=; all ranks start with rank 0's parameters."""
    mx.random.seed(cluster.rank())
    params = gluonpar.init_lenet(0.1)
    cluster.broadcast(params)
    ctx = contexts(num_devices)
    device_params = [gluonpar.get_params(params, c) for c in ctx]
    for X, y, _ in batches(num_devices):
        gluonpar.train_batch(X, y, device_params, ctx, lr=0.1)
    return [param.asnumpy() for param in device_params[-1]]


def by_gluon(num_devices, make_trainer):
    """A network whose initial parameters differ between ranks, which the Trainer must correct."""
    mx.random.seed(7 + cluster.rank())
    ctx = contexts(num_devices)
    net = gluon.nn.HybridSequential(prefix="")
    with net.name_scope():
        net.add(
            gluon.nn.Dense(16, activation="tanh", in_units=784), gluon.nn.Dense(10, in_units=16)
        )
    net.initialize(mx.init.Xavier(), ctx=ctx)
    params = net.collect_params()
    trainer = make_trainer(params)
    if not isinstance(trainer, gluonpar.Trainer):
        trainer._init_kvstore()
        trainer._init_params()
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for X, y, number in batches(num_devices):
        if not len(y) and not isinstance(trainer, gluonpar.Trainer):
            X, y = np.zeros((1, 1, 28, 28), "float32"), None  # the stock one wants gradients
        shards = gluonpar.split_and_load(X, ctx) if len(X) else []
        labels = gluonpar.split_and_load(y, ctx) if y is not None and len(X) else [None] * len(X)
        with autograd.record():
            losses = [
                loss(net(x), label) if label is not None else net(x).sum() * 0
                for x, label in zip(shards, labels)
            ]
        if losses:
            autograd.backward(losses)
        trainer.step(number, ignore_stale_grad=not isinstance(trainer, gluonpar.Trainer))
    return [p.list_data()[-1].asnumpy() for p in params.values()]


def by_run(num_devices):
    """A whole run: loss, accuracy and parameters."""
    history = gluonpar.train(num_gpus=num_devices, verbose=False, **RUN)
    reached = history.epochs[-1]
    return [np.array([reached.loss, reached.test_accuracy])] + [
        param.asnumpy() for param in history.params
    ]


def trained(num_devices):
    """Everything that is trained in one job, by name."""
    found = {"train_batch": by_train_batch(num_devices), "run": by_run(num_devices)}
    for name, options in OPTIMIZERS.items():
        found[name] = by_gluon(num_devices, lambda p: gluonpar.Trainer(p, name, dict(options)))  # noqa: B023
    return found


def exchanged():
    """Check the collectives on values that differ in every cell and on every rank."""
    rank, size = cluster.rank(), cluster.size()
    for dtype in ("float32", "float64", "int32", "uint8", "float16"):
        x = mx.nd.arange(5, dtype=dtype) + rank
        cluster.allreduce([x])
        want = np.arange(5) * size + size * (size - 1) // 2
        assert x.asnumpy().tolist() == want.tolist(), (dtype, x)
        y = mx.nd.arange(5, dtype=dtype) + rank
        cluster.broadcast([y])
        assert y.asnumpy().tolist() == list(range(5)), (dtype, y)
    several = [mx.nd.full((n,), rank + n, dtype=d) for n, d in ((3, "float32"), (2, "int32"))]
    several += [mx.nd.full((4,), rank + 4.0), mx.nd.full((2, 3), rank + 6.0, ctx=kind(1))]
    cluster.allreduce(several)
    for array in several:
        n = array.size
        assert (array.asnumpy() == sum(r + n for r in range(size))).all(), array
    for n in (1 << 21, 2_500_001):  # from 8 MiB on in blocks, the last of a part shorter
        for dtype in ("float32", "float64", "int32"):
            values = np.arange(n) % 1000
            x = mx.nd.array(values + rank, dtype=dtype)
            cluster.allreduce([x])
            assert (x.asnumpy() == values * size + size * (size - 1) // 2).all(), (n, dtype)
    rng = np.random.RandomState(0)
    values = rng.randn(size, 1001).astype("float32")
    x = mx.nd.array(values[rank])
    cluster.allreduce([x], compression="fp16")
    halves = values.astype("float16").astype("float32")
    want = sum(halves[1:], halves[0]).astype("float16").astype("float32")
    assert x.asnumpy().tobytes() == want.tobytes()
    later = cluster.Later(rank + 1)
    assert later.wait() == size * (size + 1) / 2
    assert cluster.gather(("a", rank)) == [("a", r) for r in range(size)]
    assert cluster.total([rank, 1.0]).tolist() == [size * (size - 1) / 2, size]


def by_stock_trainer():
    """Check kvstore='gluonpar': its rank, and sums over the devices of all processes."""
    store = mx.kv.create("gluonpar")
    assert (store.rank, store.num_workers) == (cluster.rank(), cluster.size())
    ctx, size = contexts(2), cluster.size()
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.Constant(cluster.rank() + 5), ctx=ctx)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, kvstore="gluonpar")
    for step in range(2):
        with autograd.record():
            losses = [
                net(mx.nd.full((1, 2), cluster.rank() + i + step, c)) for i, c in enumerate(ctx)
            ]
        autograd.backward(losses)
        trainer.step(1)
    want = 5 - sum(r + i + step for r in range(size) for i in range(2) for step in range(2))
    for data in net.weight.list_data():
        assert data.asnumpy().tolist() == [[want, want]], (data, want)
    out = [mx.nd.zeros((2,), c) for c in ctx]
    store.pushpull("a", [mx.nd.full((2,), cluster.rank() + i, c) for i, c in enumerate(ctx)], out)
    want = sum(r + i for r in range(size) for i in range(2))
    assert [array.asnumpy().tolist() for array in out] == [[want] * 2] * 2


def no_samples_left_out():
    """Check that a parameter is updated if any rank uses it, and only then."""
    a, b, c = (gluon.Parameter(name, shape=(1,)) for name in "abc")
    params = [a, b, c]
    for param in params:
        param.initialize(mx.init.One())
    trainer = gluonpar.Trainer(params, "sgd", {"learning_rate": 1, "wd": 0.5})
    with autograd.record():
        loss = (a if cluster.rank() == 0 else b).data() * 2
    loss.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert [param.data().asscalar() for param in params] == [
        -1.5,
        0.5 - 2 * (cluster.size() - 1),
        1.0,
    ]


def averaged_statistics():
    """Check that running statistics become the mean over the devices of all processes."""
    norm = gluon.nn.BatchNorm(in_channels=1)
    norm.initialize(ctx=contexts(2))
    means = norm.running_mean.list_data()
    for i, mean in enumerate(means):
        mean[:] = 2 * cluster.rank() + i
    running_statistics.average_statistics(norm)
    assert [mean.asscalar() for mean in means] == [cluster.size() - 0.5] * 2


def as_one(folder):
    exchanged()
    averaged_statistics()
    by_stock_trainer()
    no_samples_left_out()
    for num_devices in (1, 2, 3):
        save(folder, num_devices)


def save(folder, num_devices):
    """Train; the bits must be the same on all ranks."""
    found = trained(num_devices)
    bits = [b"".join(array.tobytes() for array in arrays) for arrays in found.values()]
    assert all(theirs == bits for theirs in cluster.gather(bits))
    if cluster.is_main():
        flat = {
            f"{name}{i}": array for name, arrays in found.items() for i, array in enumerate(arrays)
        }
        np.savez(pathlib.Path(folder) / f"{num_devices}.npz", **flat)


def on_gpus(folder):
    """The same on two GPUs per rank."""
    global kind
    kind, RUN["device"] = mx.gpu, "gpu"
    with kind(0):  # the context of arrays that are made without one
        exchanged()
        by_stock_trainer()
        no_samples_left_out()
        save(folder, 2)


def alone(folder):
    """One process under mpirun: it does not import MPI, and trains the same bits."""
    found = trained(2)
    assert "mpi4py" not in sys.modules
    bits = b"".join(array.tobytes() for arrays in found.values() for array in arrays)
    pathlib.Path(folder, "alone").write_bytes(bits)


def late(folder):
    """Rank 1 comes to a collective once there is a file ``go``; the others wait for it."""
    on_time = cluster.rank() != 1
    cluster.gather("the first takes longer")
    print(f"pid {os.getpid()}", flush=True)
    while not (on_time or pathlib.Path(folder, "go").exists()):
        time.sleep(0.01)
    cluster.gather(None)


def fork(_):
    """Each rank forks a process, which is no rank, and fails; the ranks go on."""
    before, x = (cluster.rank(), cluster.size()), mx.nd.ones((2,))
    child = os.fork()
    if not child:
        signal.alarm(60)
        assert (cluster.rank(), cluster.size()) == before
        for communicate in (cluster.allreduce, cluster.broadcast, cluster.gather, cluster.abort):
            try:
                communicate([x])
            except RuntimeError as refusal:
                assert str(os.getpid()) in str(refusal)
        raise KeyError("the cat")
    assert os.waitpid(child, 0)[1] == 1 << 8
    child = os.fork()
    if not child:
        signal.alarm(60)
        sys.exit(7)  # through what is done at the end of a process
    assert os.waitpid(child, 0)[1] == 7 << 8
    cluster.allreduce([x])
    print(x.asnumpy().tolist(), flush=True)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": stop,
    "stop inside": lambda: setattr(mpi_sums, "allreduce", lambda *_, **__: stop()),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "hang": lambda: time.sleep(1000),
    "leave": lambda: sys.exit(0),
    "leave, and the job ends slowly": lambda: sys.exit(0),
    "order": lambda: cluster.allreduce([mx.nd.ones((7,))]),
    "differ": lambda: cluster.gather("what the others do not call"),
    "differ, and the job ends slowly": lambda: cluster.gather("what the others do not call"),
    "go on": lambda: None,
}
AT_THE_END = {
    "stop at the end": stop,
    "end last": lambda: (time.sleep(15), print("the last", flush=True)),
}


def fault(kind, who):
    """Sum numbers on all ranks; after eleven sums rank ``who`` fails, the others go on."""
    print(f"pid {os.getpid()}", flush=True)
    if "slowly" in kind and cluster.rank() != who:  # as on a machine that computes other things
        spawn = os.posix_spawn  # between the line and MPI_Abort
        os.posix_spawn = lambda *args, **more: (time.sleep(50), spawn(*args, **more))
    x = mx.nd.ones((1000,))
    for i in range(11 if kind in AT_THE_END else 10**9):
        cluster.allreduce([x])
        x /= cluster.size()
        x.wait_to_read()
        if i == 10 and cluster.rank() == who:
            print("now", flush=True)
            if kind == "raise":
                raise KeyError("the cat")
            {**FAULTS, **AT_THE_END}[kind]()
        time.sleep(0.01)


UNLIKE = {
    "optimizer": lambda options: options.update(optimizer="adam"),
    "lr": lambda options: options.update(learning_rate=0.5),
    "momentum": lambda options: options.update(momentum=0.5),
    "wd": lambda options: options.update(wd=0.5),
    "clip_gradient": lambda options: options.update(clip_gradient=0.5),
    "algorithm": lambda options: options.update(algorithm="ring"),
    "parameter 0": lambda options: options.update(shape=(3,)),
    "parameter 1": lambda options: options.update(number=2),
    "lr later": lambda options: options.update(later=0.5),
    "batch_size": lambda options: options.update(batch_size=2),
    "values": lambda options: options.update(add=1.0),
}


def unlike(what):
    """Train a few steps by a Trainer that is different on rank 1 in one respect."""
    options = {"optimizer": "sgd", "algorithm": None, "shape": (2,), "number": 1, "batch_size": 1}
    options.update(learning_rate=0.1, momentum=0.9, wd=0.01, clip_gradient=1.0, later=0.1, add=0.0)
    if cluster.rank() == 1:
        UNLIKE[what](options)
    names = ("learning_rate", "wd", "clip_gradient")
    hyper = {name: options[name] for name in names}
    if options["optimizer"] == "sgd":
        hyper["momentum"] = options["momentum"]
    params = [gluon.Parameter(f"p{i}", shape=options["shape"]) for i in range(options["number"])]
    for param in params:
        param.initialize(mx.init.One())
    algorithm = options["algorithm"]
    trainer = gluonpar.Trainer(params, options["optimizer"], hyper, algorithm=algorithm)
    for step in range(6):
        if step == 3:
            trainer.set_learning_rate(options["later"])
        with autograd.record():
            loss = sum(param.data().sum() for param in params)
        loss.backward()
        trainer.step(options["batch_size"])
    mx.nd.waitall()
    for param in params:
        param.data()[:] += options["add"]
    trainer.check_replicas()
    print("alike", flush=True)


if __name__ == "__main__":
    task, argument = sys.argv[1:]
    if task in ("as_one", "on_gpus", "alone", "unlike", "late", "fork"):
        globals()[task](argument)
    else:
        fault(task, int(argument))
