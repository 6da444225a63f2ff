"""A rank of a job in which rank 1 does something else, again and again: each time both are told.

python unlike_ranks.py NUM_DEVICES FOLDER. Every difference is an error on all ranks that names it.
After it has been caught, the ranks go on together.
"""

import sys

import gluonpar
from gluonpar import cluster, collectives

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip
from contexts import contexts  # isort: skip

HYPER = {"learning_rate": 0.1, "momentum": 0.9}


class Training:
    """Layers with these names, made in their order, and a Trainer of all of them."""

    def __init__(self, names="ab", optimizer="sgd", in_units=1, **options):
        self.layers, self.in_units = {}, in_units
        for name in names:
            layer = gluon.nn.Dense(1, in_units=in_units, prefix=f"{name}_")
            layer.initialize(mx.init.One(), ctx=contexts(K))
            self.layers[name] = layer
        given = [p for layer in self.layers.values() for p in layer.collect_params().values()]
        self.trainer = gluonpar.Trainer(given, optimizer, dict(HYPER), **options)

    def step(self, batch_size=1):
        with autograd.record():
            inputs = [mx.nd.ones((1, self.in_units), c) for c in contexts(K)]
            losses = [sum((i + 1) * layer(X) for i, layer in self.in_order()) for X in inputs]
        autograd.backward(losses)
        self.trainer.step(batch_size)

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


def changed(change):
    """A difference that comes after two steps."""

    def run(there):
        training = Training()
        for _ in range(2):
            training.step()
        if there:
            change(training)
        training.step()

    return run


def load(training):
    training.weight.set_data(mx.nd.ones((1, 1)) * 3)


def of_weight(name, value):
    return changed(lambda training: setattr(training.weight, name, value))


def of_optimizer(name, value):
    return changed(lambda training: setattr(training.trainer.optimizer, name, value))


def load_file(training):
    layer = training.layers["a"]
    layer.save_parameters(PATH)
    layer.load_parameters(PATH, ctx=contexts(K))


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
    "set_data": (changed(load), "values set by set_data or load_parameters"),
    "load_parameters": (changed(load_file), "['a_weight', 'a_bias'] on rank 1"),
    "freeze": (of_weight("grad_req", "null"), "grad_req is {'a_weight': 'null'} on rank 1"),
    "rate": (of_optimizer("lr", 0.5), "lr is 0.5 on rank 1 and 0.1 on rank 0"),
    "lr_mult": (of_weight("lr_mult", 0.1), "lr_mult is {'a_weight': 0.1} on rank 1"),
    "wd_mult": (of_weight("wd_mult", 7), "wd_mult is {'a_weight': 7} on rank 1"),
    "momentum": (of_optimizer("momentum", 0.5), "momentum is 0.5 on rank 1 and"),
    "batch size": (batch_size, "batch_size is 2 on rank 1 and 1 on rank 0"),
    "min and max": (ops("min", "max"), "rank 1: max by allreduce"),
    "sum and mean": (ops("sum", "mean"), "rank 1: mean by allreduce"),
    "shape": (transposed(gluonpar.allreduce), "shape of each array is [(3, 2)]"),
    "shape of a mean": (transposed(gluonpar.allreduce, op="mean"), "of shapes (3, 2)"),
    "shape in a broadcast": (transposed(collectives.broadcast), "is [(3, 2)] on rank 1"),
    "shape in a gather": (transposed(collectives.all_gather), "is [(3, 2)] on rank 1"),
    "order of lists": (many, "is [(3, 2), (2, 3)] on rank 1"),
}


def check_other_blocks():
    """MXNet numbers a block without a prefix by those that the process has made before."""
    if cluster.rank() == 1:
        gluon.nn.Dense(1)
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=contexts(K))
    trainer = gluonpar.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        losses = [net(mx.nd.ones((1, 1), c)) for c in contexts(K)]
    autograd.backward(losses)
    trainer.step(1)
    mx.nd.waitall()


def check(name, function, words):
    """All ranks alike is no error; rank 1 alone is one on all ranks; what comes then is right."""
    function(False)
    function(True)
    mx.nd.waitall()
    try:
        function(cluster.rank() == 1)
        mx.nd.waitall()
        failure = "nothing"
    except (mx.MXNetError, ValueError, gluonpar.metrics.ReplicasDifferError) as error:
        failure = str(error)
    if words not in failure:
        print(f"{name}: rank {cluster.rank()} got {failure}", flush=True)
    ones = [mx.nd.ones((2,), c) for c in contexts(K)]
    gluonpar.allreduce(ones)
    assert ones[-1].asnumpy().tolist() == [K * cluster.size()] * 2, name


if __name__ == "__main__":
    K, PATH = int(sys.argv[1]), f"{sys.argv[2]}/{cluster.rank()}.params"
    for name, (function, words) in DIFFERENCES.items():
        check(name, function, words)
    check_other_blocks()
    print(f"{len(DIFFERENCES)} differences", flush=True)
