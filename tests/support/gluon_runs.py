"""Small Gluon networks trained on some devices, for tests: the same numbers whatever K is."""

import functools

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluonpar
from gluonpar.gluon.trainer import Trainer
from tests.support.contexts import contexts

SIZES = (7, 8, 5, 8, 9)  # of batches: uneven, on most numbers of devices
WIDTHS = (6, 10, 8, 3)  # features, hidden, hidden, classes
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
STATIC = {"static_alloc": True, "static_shape": True}
OF_MXNET = [  # all of its optimizers
    name
    for name, kind in sorted(mx.optimizer.Optimizer.opt_registry.items())
    if kind.__module__.startswith("mxnet.")
]
stock_trainer = functools.partial(gluon.Trainer, kvstore=None)  # the Trainer to be compared with


def batches(sizes=SIZES, seed=1, dtype="float32"):
    rng = np.random.RandomState(seed)
    return [
        (rng.normal(size=(n, WIDTHS[0])).astype(dtype), rng.randint(0, WIDTHS[-1], n).astype(dtype))
        for n in sizes
    ]


def start_values(bias=True, seed=0, dtype="float32"):
    rng = np.random.RandomState(seed)
    start = []
    for inputs, outputs in zip(WIDTHS, WIDTHS[1:]):
        start.append(rng.normal(0, 0.5, (outputs, inputs)).astype(dtype))
        if bias:
            start.append(rng.normal(0, 0.5, outputs).astype(dtype))
    return start


def fill(net, values):
    """Give the parameters these values; those that wait for their shape get them then."""
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    for param, value in zip(net.collect_params().values(), values):
        param.set_data(array(value, dtype=value.dtype))


def mlp(ctx, deferred=False, bias=True, hybridize=None, dtype="float32"):
    net = nn.HybridSequential(prefix="mlp_")
    with net.name_scope():
        for inputs, outputs in zip(WIDTHS, WIDTHS[1:]):
            activation = None if outputs == WIDTHS[-1] else "tanh"
            net.add(nn.Dense(outputs, activation, bias, in_units=0 if deferred else inputs))
    net.cast(dtype)
    net.initialize(ctx=ctx)
    fill(net, start_values(bias, dtype=dtype))
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


def backward(net, batch, ctx):
    shards = gluonpar.split_and_load(batch, ctx)
    with autograd.record():
        losses = [LOSS(net(X), y) for X, y in shards]
    autograd.backward(losses)


def train(net, trainer, data, ctx, **how):
    for batch in data:
        backward(net, batch, ctx)
        trainer.step(len(batch[0]), **how)


def run(k, optimizer="sgd", options=None, make=mlp, data=None, **how):
    """A network, and its gluonpar.Trainer, after a step on each batch, on ``k`` devices."""
    ctx = contexts(k)
    net = make(ctx)
    mx.random.seed(3)
    trainer = Trainer(net.collect_params(), optimizer, dict(options or {}), **how)
    train(net, trainer, data or batches(), ctx)
    return net, trainer


def stock(optimizer="sgd", options=None, make=mlp, data=None):
    """The values of all parameters after MXNet's own Trainer has trained on one device."""
    ctx = contexts(1)
    net = make(ctx)
    mx.random.seed(3)
    trainer = stock_trainer(net.collect_params(), optimizer, dict(options or {}))
    train(net, trainer, data or batches(), ctx)
    return values(net)


def values(net, device=0):
    """NumPy copies of all parameters on one device."""
    return [param.list_data()[device].asnumpy() for param in net.collect_params().values()]


def bits(params):
    """Everything that training may change about parameters, to the bit."""
    arrays = [(*param.list_data(), *(param._grad or ())) for param in params]
    return [array.asnumpy().tobytes() for group in arrays for array in group]


def training_state(trainer):
    """All that loading states may change: states, numbers, update counts and schedule."""
    optimizer, states = trainer.optimizer, trainer._updaters[0].states
    arrays = {}
    for i, state in states.items():
        parts = state if isinstance(state, (tuple, list)) else [state]
        arrays[i] = [part.asnumpy().tobytes() for part in parts if part is not None]
    numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
    schedule = {**vars(optimizer.lr_scheduler)} if optimizer.lr_scheduler else None
    return arrays, numbers, dict(optimizer._index_update_count), schedule


def assert_as_one(net, want, rtol=1e-5):
    """Replicas have the same bits, and are what ``want`` says to ``rtol`` of its largest value."""
    for param, value in zip(net.collect_params().values(), want):
        first, *rest = (copy.asnumpy() for copy in param.list_data())
        for other in rest:
            assert first.tobytes() == other.tobytes(), f"{param.name} differs between devices"
        error = np.abs(first.astype("float64") - value).max()
        assert error <= rtol * np.abs(value).max(), f"{param.name} is off by {error}"


def weights(start, k, **options):
    """Parameters of these values on ``k`` devices."""
    params = []
    for i, value in enumerate(start):
        value = np.asarray(value, options.get("dtype", "float32"))
        param = gluon.Parameter(f"w{i}", shape=value.shape, **options)
        param.initialize(ctx=contexts(k))
        param.set_data(mx.nd.array(value, dtype=value.dtype))
        params.append(param)
    return params


def evaluate(weight):
    """As a convolution's forward without gradients: leaves ``weight`` in a layout of oneDNN's.

    It is of shape (16, 16, 3, 3) and on a CPU context.
    """
    X = mx.nd.ones((2, 16, 8, 8), ctx=weight.context)
    mx.nd.Convolution(X, weight, None, (3, 3), num_filter=16, no_bias=True)
    mx.nd.waitall()


def kernels_trained(make, optimizer, k=1, evaluated=False):
    """A convolution's weight after two steps, each after an evaluation or not."""
    rng = np.random.RandomState(0)
    params = weights([rng.uniform(size=(16, 16, 3, 3))], k)
    made = mx.optimizer.create(optimizer, learning_rate=0.1, wd=0.05)
    if hasattr(made, "momentum") and optimizer != "dcasgd":
        made.momentum = 0.9
    mx.random.seed(1)
    trainer = make(params, made)
    for _ in range(2):
        give_grads(params, [rng.uniform(size=(k, 16, 16, 3, 3))])
        for value in params[0].list_data():
            if evaluated:
                evaluate(value)
        trainer.step(k)
    return [value.asnumpy().tobytes() for value in params[0].list_data()]


def give_grads(params, grads):
    """Have backward compute ``grads[i][k]`` for parameter i on device k; None: it does not."""
    heads = []
    for param, on_devices in zip(params, grads):
        for value, grad in zip(param.list_data(), on_devices):
            if grad is not None:
                factor = mx.nd.array(
                    np.broadcast_to(grad, value.shape), ctx=value.context, dtype=value.dtype
                )
                with autograd.record():
                    heads.append(value * factor)
    autograd.backward(heads)
