"""A rank of a job in which one rank does something else, again and again: each time all are told.

python -m tests.support.ranks.unlike NUM_DEVICES FOLDER NUMBER. Every difference is an error on
all ranks that names it. After it has been caught, the ranks go on together. What is equal, or
different only in how it came about, is no error. NUMBER programs are drawn in which a number
differs, or only its type does.
"""

import functools
import logging
import random
import sys

import numpy as np

import gluonpar
from gluonpar import cluster, collectives

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip
from tests.support.contexts import contexts  # isort: skip

DOORS = [None, "gluonpar"]  # how Trainers are made; the first counts
HYPER = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}


@mx.optimizer.register
class Own(mx.optimizer.Optimizer):
    """Its numbers are neither attributes of its own nor parameters of an operator of MXNet's."""

    def __init__(self, **options):
        super().__init__()
        self.inner = {"sgd": [mx.optimizer.SGD(**options)]}

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        [sgd] = self.inner["sgd"]
        weight[:] = weight - (grad * self.rescale_grad + weight * sgd.wd) * sgd.lr


class Training:
    """Layers with these names, made in their order, and a Trainer of all of them."""

    def __init__(self, names="ab", optimizer="sgd", in_units=1, door=None, hyper=HYPER, **options):
        door = None if options else door or DOORS[0]
        self.layers, self.in_units = {}, in_units
        for name in names:
            layer = gluon.nn.Dense(1, in_units=in_units, prefix=f"{name}_")
            layer.initialize(mx.init.One(), ctx=contexts(K))
            self.layers[name] = layer
        given = [p for layer in self.layers.values() for p in layer.collect_params().values()]
        if door:
            self.trainer = gluon.Trainer(given, optimizer, dict(hyper), kvstore=door)
        else:
            self.trainer = gluonpar.Trainer(given, optimizer, dict(hyper), **options)

    def step(self, batch_size=1):
        self.backward()
        self.trainer.step(batch_size)

    def backward(self):
        with autograd.record():
            inputs = [mx.nd.ones((1, self.in_units), c) for c in contexts(K)]
            losses = [sum((i + 1) * layer(X) for i, layer in self.in_order()) for X in inputs]
        autograd.backward(losses)

    def in_order(self):
        return enumerate(self.layers[name] for name in sorted(self.layers))

    @property
    def weight(self):
        return self.layers["a"].weight


def made(**options):
    """Each option is a pair: what the Training is made with here, and on rank 1."""

    def run(there):
        Training(**{name: values[there] for name, values in options.items()}).step()

    return run


def values(there):
    training = Training()
    for copy in training.layers["b"].weight.list_data():
        copy[:] += int(there)  # nothing else compares what a program writes
    training.trainer.check_replicas()


def two_trainers(there):
    both = [Training(names=("actor",)), Training(names=("critic",))]
    for training in both[::-1] if there else both:
        training.step()
    return both


def two_sums(there):
    both = two_trainers(False)
    with autograd.record():
        losses = [x * 1 for t in both for p in t.layers.values() for x in p.weight.list_data()]
    autograd.backward(losses)
    for training in both[::-1] if there else both:
        training.trainer.allreduce_grads()


def changed(change, **options):
    """A difference that comes after two steps."""

    def run(there):
        training = Training(**options)
        for _ in range(2):
            training.step()
        if there:
            change(training)
        training.step()

    return run


def load(training):
    training.weight.set_data(mx.nd.ones((1, 1)) * 3)


def own_rate(training):
    training.trainer.optimizer.inner["sgd"][0].lr = 0.5


def schedule(training):
    training.trainer.optimizer.lr_scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)


def of_weight(name, value):
    return changed(lambda training: setattr(training.weight, name, value))


def of_optimizer(name, value):
    return changed(lambda training: setattr(training.trainer.optimizer, name, value))


def load_file(training):
    layer = training.layers["a"]
    values = layer.weight.data().copy()
    load(training)
    layer.save_parameters(PATH)
    layer.weight.set_data(values)
    layer.load_parameters(PATH, ctx=contexts(K))


def by_hand(there, send=False):
    """A network that is made after a Trainer, and trained without one."""
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(mx.init.Constant(1 + there), ctx=contexts(K))
    device_params = [
        [param.data(c) for param in net.collect_params().values()] for c in contexts(K)
    ]
    if send:
        gluonpar.broadcast([params[0] for params in device_params])
    for _ in range(2):
        with autograd.record():
            losses = [net(mx.nd.ones((1, 1), c)) for c in contexts(K)]
        autograd.backward(losses)
        gluonpar.allreduce_grads(device_params)
        for params in device_params:
            gluonpar.sgd(params, 0.1, 1)


def overwritten(there):
    """A pass in local() after the step's own."""
    training = Training()
    training.backward()
    if there:
        with cluster.local():
            training.backward()
    training.trainer.step(1)


def sampler(there):
    indices = range(4 * there, 4 * there + 4)
    [*gluonpar.DataLoader(np.arange(8), 2, sampler=Part(indices))]


class Part(gluon.data.Sampler):
    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


def deferred(there):
    """The first forward gives the weight another shape."""
    net = gluon.nn.Dense(1)
    net.initialize(ctx=contexts(K))
    gluonpar.Trainer(net.collect_params(), "sgd")
    for c in contexts(K):
        net(mx.nd.ones((1, 2 + there), c))


def drawn_anew(there):
    training = Training()
    training.step()
    training.weight.set_data(mx.nd.full((1, 1), 1 + there))  # on all ranks
    training.step()


def batch_size(there):
    Training().step(2 if there else 1)


def rows(n, shape=(2, 3)):
    return [mx.nd.full(shape, n, c) for c in contexts(K)]


def ops(one, other):
    return lambda there: gluonpar.allreduce(rows(1), op=other if there else one)


def transposed(function, **options):
    return lambda there: function(rows(1, (3, 2) if there else (2, 3)), **options)


def many(there):
    lists = [rows(1), rows(2, (3, 2))]
    gluonpar.allreduce_many(lists[::-1] if there else lists)


# What is different, and what the error says.
SCALES = {**HYPER, "rescale_grad": 1.0}, {**HYPER, "rescale_grad": 0.5}
EXPERTS = [("a", "b", f"expert{i}") for i in (1, 2)]
DIFFERENCES = {
    "order of parameters": (made(names=("ab", "ba")), "parameter 0 is ('b_weight'"),
    "digits in names": (made(names=EXPERTS), "expert2"),
    "number of parameters": (made(names=("ab", "abc")), "c_weight"),
    "shape of a parameter": (made(in_units=(1, 2)), "a_weight"),
    "algorithm": (made(algorithm=(None, "ring")), "algorithm is 'ring' on rank 1"),
    "values": (values, "b_weight differ between rank 0 and rank 1"),
    "optimizer": (made(optimizer=("sgd", "nag")), "optimizer is 'NAG' on rank 1"),
    "order of Trainers": (two_trainers, "(critic_"),
    "order of sums": (two_sums, "(critic_"),
    "set_data": (changed(load), "value of a_weight (checksum) is"),
    "load_parameters": (changed(load_file), "value of a_weight (checksum) is"),
    "set to others": (drawn_anew, "value of a_weight (checksum) is"),
    "freeze": (of_weight("grad_req", "null"), "grad_req is {'a_weight': 'null'} on rank 1"),
    "rate": (of_optimizer("lr", 0.5), "lr of b_bias is 0.5 on rank 1 and 0.1 on rank 0"),
    "float32": (of_optimizer("lr", np.float32(0.5)), "lr of b_bias is 0.5 on rank 1"),
    "schedule": (changed(schedule), "lr of b_bias is 0.05 on rank 1 and 0.1 on rank 0"),
    "rate inside": (changed(own_rate, optimizer="own"), "scalar of a_weight is"),
    "lr_mult": (of_weight("lr_mult", 0.5), "lr of a_weight is 0.05 on rank 1"),
    "wd_mult": (of_weight("wd_mult", 3), "wd of a_weight is 0.03 on rank 1"),
    "momentum": (of_optimizer("momentum", 0.5), "momentum of b_bias is 0.5 on rank 1 and"),
    "clipping": (of_optimizer("clip_gradient", 9), "clip_gradient of b_bias is 9.0 on rank 1 and"),
    "rescale_grad": (made(hyper=SCALES), "rescale_grad of b_bias is 0.5 on rank 1 and 1.0"),
    "batch size": (batch_size, "batch_size is 2 on rank 1 and 1 on rank 0"),
    "a network by hand": (by_hand, "value of parameter 0 (checksum) is"),
    "sampler": (sampler, "sampler Part draws other samples on rank 1"),
    "deferred": (deferred, "shape of dense0_weight is (1, 3) on rank 1 and (1, 2) on rank 0"),
    "min and max": (ops("min", "max"), "next collective is 'max by allreduce"),
    "sum and mean": (ops("sum", "mean"), "next collective is 'mean by allreduce"),
    "shape": (transposed(gluonpar.allreduce), "shape of each array is [(3, 2)]"),
    "shape of a mean": (transposed(gluonpar.allreduce, op="mean"), "of shapes (3, 2)"),
    "shape in a broadcast": (transposed(collectives.broadcast), "is [(3, 2)] on rank 1"),
    "shape in a gather": (transposed(collectives.all_gather), "is [(3, 2)] on rank 1"),
    "order of lists": (many, "is [(3, 2), (2, 3)] on rank 1"),
}


def send(there):
    """One rank sets values, as load_parameters does, and sends them."""
    training = Training()
    if there:
        load(training)
    values = [x for layer in training.layers.values() for x in layer.weight.list_data()]
    for value in values:
        cluster.broadcast([value], root=SENDER)
    training.step()


def other_types(there):
    training = Training(hyper={**HYPER, "momentum": np.float64(0.9)} if there else HYPER)
    training.step(np.int64(8) if there else 8.0)
    training.trainer.set_learning_rate(np.float32(0.5) if there else 0.5)
    training.step(mx.nd.array([8]) if there else 8)


def set_again(there):
    training = Training()
    for _ in range(1 + there):
        training.weight.set_data(mx.nd.ones((1, 1)) * 3)
    training.step()


def made_before(there):
    """MXNet numbers a block without a prefix by those that the process has made before."""
    for make in BLOCKS:
        if there:
            make()
        net = make()
        if there:
            gluon.nn.HybridSequential().add(net)
        params = [*net.collect_params().values()][-3:]
        for param in params:
            param.shape = [n or 1 for n in param.shape]
            param.initialize(ctx=contexts(K))
        gluonpar.Trainer(params, "sgd")


def sequential(*layers):
    net = gluon.nn.HybridSequential()
    net.add(*layers)
    return net


def made_between(there):
    """What a rank makes between two layers of a network."""
    first = gluon.nn.Conv2D(2, 3, in_channels=3)
    if there:
        gluon.nn.Conv2D(2, 3)
    net = sequential(first, gluon.nn.Conv2D(2, 3, in_channels=2))
    net.initialize(ctx=contexts(K))
    gluonpar.Trainer(net.collect_params(), "sgd")


def evaluate(there):
    """Gradients of inputs and an evaluation, on one rank, inside local()."""
    training = Training()
    for _ in range(2):
        with cluster.local():
            for c in contexts(K)[::-1] if there else []:
                x = mx.nd.ones((1, 1), c)
                x.attach_grad()
                with autograd.record():
                    out = sum(layer(x) for layer in training.layers.values())
                out.backward()
        training.step()


def calls(there):
    """A schedule of which each call matters."""
    training, seen = Training(), []
    training.trainer.optimizer.lr_scheduler = lambda num_update: seen.append(num_update) or 0.1
    training.step()
    training.step()
    assert seen == [1, 2], seen


MODELS = ("alexnet", "densenet121", "inceptionv3", "mobilenet0.25", "mobilenetv2_0.25")
MODELS += ("resnet18_v1", "resnet18_v2", "squeezenet1.0", "vgg11")
BLOCKS = (
    *[functools.partial(gluon.model_zoo.vision.get_model, name) for name in MODELS],
    lambda: sequential(gluon.nn.Conv2D(2, 3), gluon.nn.BatchNorm(), gluon.nn.Dense(2)),
    lambda: sequential(gluon.rnn.LSTM(2), gluon.rnn.RNN(2), gluon.rnn.GRUCell(2)),
)


def by_hand_sent(there):
    by_hand(there, send=True)


def shuffled(there):
    """A sampler of its own order on each rank; rank 0's is what counts."""
    [*gluonpar.DataLoader(np.arange(8), 2, sampler=Part(range(8)[:: -1 if there else 1]))]


ALIKE = (
    send,
    by_hand_sent,
    shuffled,
    other_types,
    set_again,
    made_before,
    made_between,
    evaluate,
    calls,
)

# By optimizer, numbers that it goes by.
NUMBERS = {
    "sgd": ("lr", "wd", "momentum", "clip_gradient", "lr_mult", "scale"),
    "nag": ("lr", "wd", "momentum", "clip_gradient", "wd_mult", "scale"),
    "adam": ("lr", "wd", "beta1", "epsilon", "clip_gradient", "scale"),
    "lamb": ("lr", "wd", "beta2", "epsilon", "scale"),
    "lars": ("lr", "wd", "momentum", "eta", "scale"),
    "rmsprop": ("lr", "wd", "gamma1", "epsilon", "clip_gradient"),
    "own": ("inner", "scale"),
}
TYPES = (float, np.float64, np.float32)


def drawn(seed):
    """On one rank a number that the optimizer goes by is another, or only of another type."""
    rng = random.Random(seed)
    optimizer = rng.choice([*NUMBERS])
    name = rng.choice(NUMBERS[optimizer])
    value, is_other = rng.choice((0.5, 0.25, 0.125)), rng.random() < 0.5
    # Some are computed with before they are used, with NumPy 2 in float32 if one is of that type.
    types = TYPES[:2] if optimizer == "adam" or name.endswith("_mult") else TYPES
    rank, kinds = rng.randrange(cluster.size()), rng.sample(types, 2)
    training = Training(optimizer=optimizer, door=rng.choice((None, "gluonpar")), hyper={"wd": 0.1})
    for _ in range(rng.randrange(3)):
        training.step()
    mine = cluster.rank() == rank
    given = kinds[mine](value * 1.5 if mine and is_other else value)
    of = training.trainer.optimizer
    if name in ("lr_mult", "wd_mult"):
        setattr(training.weight, name, given)
    elif name == "inner":
        of.inner["sgd"][0].lr = given
    elif name == "scale":
        training.trainer._scale = given
    else:
        setattr(of, name, given)
    failure = caught(training.step)
    if ("cannot train with" in failure) != is_other or bool(failure) != is_other:
        print(f"program {seed}: {optimizer} {name} {kinds} {is_other}: {failure}", flush=True)
        cluster.abort("has found a fault")


def caught(function):
    """The errors of a function, of what it has begun, and of what its updates used, as a text."""
    failures = []
    for call in (function, mx.nd.waitall, lambda: cluster.gather(None)):
        try:
            call()
        except (mx.MXNetError, ValueError, gluonpar.metrics.ReplicasDifferError) as error:
            failures.append(str(error))
    return "; ".join(failures)


def check(name, function, words):
    """All ranks alike is no error; rank 1 alone is one on all ranks; what comes then is right."""
    failure = caught(lambda: function(True))
    assert not failure, (name, failure)
    failure = caught(lambda: function(cluster.rank() == 1))
    if words not in failure or not failure:
        print(f"{name}: rank {cluster.rank()} got {failure or 'no error'}", flush=True)
    ones = [mx.nd.ones((2,), c) for c in contexts(K)]
    gluonpar.allreduce(ones)
    assert ones[-1].asnumpy().tolist() == [K * cluster.size()] * 2, name


if __name__ == "__main__":
    logged, handler = [], logging.Handler()
    handler.emit = logged.append
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    K, PATH, number = int(sys.argv[1]), f"{sys.argv[2]}/{cluster.rank()}.params", int(sys.argv[3])
    SENDER = 1
    for _ in range(len(DOORS)):
        for name, (function, words) in DIFFERENCES.items():
            check(name, function, words)
        DOORS.append(DOORS.pop(0))
    for function in ALIKE:
        failure = caught(lambda function=function: function(cluster.rank() == 1))
        assert not failure, (function.__name__, failure)
    failure = caught(lambda: overwritten(cluster.rank() == 1))
    assert "overwritten gradients of the job on rank 1" in failure, failure
    for seed in range(number):
        drawn(seed)
    lines = [record.getMessage() for record in logged]
    assert all(line.startswith("Update[") for line in lines), lines  # those of MXNet's schedules
    print(f"{len(DIFFERENCES)} differences", flush=True)
