"""gluonpar.Trainer: K devices give what stock gluon.Trainer gives on one, with every optimizer."""

import functools
import inspect

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from contexts import device
from gluon_runs import assert_as_one, contexts
from processes import run_python

from gluonpar.gluon.trainer import Trainer

OPTIMIZERS = sorted(mx.optimizer.Optimizer.opt_registry)
KNOWN = {
    *("adadelta", "adagrad", "adam", "adamax", "ccsgd", "dcasgd", "ftml", "ftrl", "groupadagrad"),
    *("lamb", "lars", "lbsgd", "nadam", "nag", "rmsprop", "sgd", "sgld", "signum", "test"),
}
# Under momentum MXNet's DCASGD takes the truth of an array: it fails on one device too.
NO_MOMENTUM = {"dcasgd"}


def make_for(optimizer, **options):
    return functools.partial(runs.mlp, bias=optimizer != "groupadagrad", **options)


def options_of(optimizer, which):
    """The options to be tried: weight decay, or with it clipping, and momentum where it exists."""
    options = {"learning_rate": 0.05, "wd": 0.01}
    if optimizer == "groupadagrad":
        options["wd"] = 0.0  # all it supports; and only matrices, so no biases
    if which == "more":
        options["clip_gradient"] = 0.02
        known = inspect.signature(mx.optimizer.Optimizer.opt_registry[optimizer]).parameters
        if "momentum" in known and optimizer not in NO_MOMENTUM or optimizer == "ccsgd":
            options["momentum"] = 0.9
    return options


@functools.lru_cache(None)
def stock_of(optimizer, which):
    return runs.stock(optimizer, options_of(optimizer, which), make_for(optimizer))


def test_every_optimizer_of_mxnet_is_covered():
    assert set(OPTIMIZERS) == KNOWN


@pytest.mark.parametrize(
    ("which", "k"), [("wd", 3), ("more", 1), ("more", 2), ("more", 3), ("more", 4)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_k_devices_train_as_one_with_every_optimizer(optimizer, which, k, small_buckets):
    net, _ = runs.run(k, optimizer, options_of(optimizer, which), make_for(optimizer))
    # sgld adds random numbers, and each GPU has a generator of its own: its replicas must be equal.
    noisy = optimizer == "sgld" and device().device_type == "gpu"
    want = runs.values(net) if noisy else stock_of(optimizer, which)
    assert_as_one(net, want)
    start = runs.start_values(bias=optimizer != "groupadagrad")
    assert all((a != b).any() for a, b in zip(want, start))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_deferred_initialisation_trains_the_same(optimizer, k):
    make = make_for(optimizer, deferred=True)
    net, _ = runs.run(k, optimizer, options_of(optimizer, "more"), make)
    assert_as_one(net, stock_of(optimizer, "more"))


@pytest.mark.parametrize("clip", [0, -1.0])
def test_a_clip_gradient_of_zero_or_less_clips_nothing_as_in_mxnet(clip):
    options = {"learning_rate": 0.05, "clip_gradient": clip}
    net, _ = runs.run(2, "sgd", options)
    assert_as_one(net, runs.stock("sgd", options))


SCHEDULES = {
    "factor": lambda: mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1),
    "multifactor": lambda: mx.lr_scheduler.MultiFactorScheduler([1, 3], 0.3, base_lr=0.1),
    "poly": lambda: mx.lr_scheduler.PolyScheduler(6, 0.1),
    "cosine": lambda: mx.lr_scheduler.CosineScheduler(6, 0.1, warmup_steps=2),
}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lars", "lbsgd"])
def test_rates_follow_their_schedule(optimizer, schedule, k, small_buckets):
    def options():
        more = {} if optimizer in ("adam", "nadam") else {"momentum": 0.9}
        return {"lr_scheduler": SCHEDULES[schedule](), "learning_rate": 0.1, **more}

    want = runs.stock(optimizer, options())
    net, trainer = runs.run(k, optimizer, options())
    assert_as_one(net, want)
    assert trainer.learning_rate == options()["lr_scheduler"](5)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
@pytest.mark.parametrize("optimizer", ["sgd", "nag"])
def test_each_parameter_has_its_multipliers(optimizer, options, k):
    def make(ctx):
        net = runs.mlp(ctx)
        net[0].weight.lr_mult, net[1].weight.wd_mult, net[2].bias.lr_mult = 0.1, 10.0, 0.0
        return net

    options = {"learning_rate": 0.1, "wd": 0.1, **options}
    net, _ = runs.run(k, optimizer, options, make)
    assert_as_one(net, runs.stock(optimizer, options, make))
    np.testing.assert_array_equal(net[2].bias.list_data()[0].asnumpy(), runs.start_values()[5])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_rate_can_be_set_between_steps(momentum):
    results = []
    for k, kind in ((1, runs.stock_trainer), (3, Trainer)):
        net = runs.mlp(contexts(k))
        trainer = kind(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": momentum})
        for rate, batch in zip((0.1, 0.7, 0.02), runs.batches()):
            trainer.set_learning_rate(rate)
            assert trainer.learning_rate == rate
            runs.train(net, trainer, [batch], contexts(k))
        results.append(net)
    assert_as_one(results[1], runs.values(results[0]))


MANY_WEIGHTS = """
import gluonpar, mxnet as mx
import sys

net = mx.gluon.nn.Sequential()
for _ in range(100):
    net.add(mx.gluon.nn.Dense(2, in_units=2))
net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
options = {"learning_rate": 0.5, "momentum": 0.9}
trainer = gluonpar.Trainer(net.collect_params(), sys.argv[1], options)
for param in net.collect_params().values():
    for value, grad in zip(param.list_data(), param.list_grad()):
        grad[:] = 1
        value._fresh_grad = True
trainer.allreduce_grads()
trainer.update(1)
params = net.collect_params().values()
print({float(value) for param in params for value in param.data(mx.cpu(1)).asnumpy().ravel()})
"""


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_any_number_of_weights_may_be_updated_together(optimizer):
    """MXNet's operators on several weights write beyond their memory if there are more than 60."""
    few, many = (
        run_python(
            MANY_WEIGHTS, optimizer, MXNET_OPTIMIZER_AGGREGATION_SIZE=number, MALLOC_PERTURB_="165"
        )
        for number in ("4", "200")
    )
    assert many == few != ""
