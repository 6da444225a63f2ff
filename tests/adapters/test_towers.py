"""Towers: K of them train as one device on all their samples. Means over towers' gradients."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from gluonpar.adapters.towers import Towers, average_gradients
from tests.support import waits
from tests.support.contexts import contexts, device
from tests.support.gluon_runs import evaluate

SIZES = [5, 2, 7, 1, 4, 4, 3, 6, 2, 1]  # of successive batches
LR = 0.05


def batches(sizes=SIZES):
    rng = np.random.RandomState(0)
    for n in sizes:
        X = rng.normal(size=(n, 3)).astype("float32")
        yield {"X": X, "y": (X @ [1, -2, 3] + 1).astype("float32")}


def start(world):
    rng = np.random.RandomState(1)
    shapes = ((3, 4), (4,), (4, 1))
    return [world.array(rng.normal(size=shape).astype("float32")) for shape in shapes]


def forward(batch, params):
    """A net of one hidden layer, and squared errors."""
    W1, b1, w2 = params
    F = mx.np if isinstance(W1, mx.np.ndarray) else mx.nd
    predicted = F.dot(F.tanh(F.dot(batch["X"], W1) + b1), w2).reshape((-1,))
    return {"loss": (predicted - batch["y"]) ** 2, "predicted": predicted}


def numpy_of(arrays):
    return [array.asnumpy() for array in arrays]


def by_one_device(world, step_sizes):
    """Plain MXNet: SGD on one device, each step on the samples of several batches."""
    params, source = start(world), batches()
    for param in params:
        param.attach_grad()
    losses = []
    for num_batches in step_sizes:
        drawn = [next(source) for _ in range(num_batches)]
        whole = {key: world.array(np.concatenate([b[key] for b in drawn])) for key in ("X", "y")}
        with autograd.record():
            loss = forward(whole, params)["loss"]
        loss.backward()
        for param in params:
            param[:] = param - LR / len(whole["y"].asnumpy()) * param.grad
        losses.append(loss.asnumpy())
    return numpy_of(params), np.concatenate(losses)


def take_steps(towers, drawn):
    """Give each tower a batch in turn; return the losses of all samples."""
    drawn, k = list(drawn), len(towers.ctx)
    steps = [towers.step(drawn[i : i + k], LR)["loss"] for i in range(0, len(drawn), k)]
    return np.concatenate([loss.asnumpy() for losses in steps for loss in losses])


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_k_towers_on_uneven_batches_train_as_one_device(world, k):
    """With 3, 4 and 8 towers, the last step does not have a batch for each."""
    towers = Towers(forward, start(world), contexts(k))
    losses = take_steps(towers, batches())
    want, want_losses = by_one_device(world, [len(SIZES[i : i + k]) for i in range(0, 10, k)])
    for variables in towers.variables:
        for got, expected in zip(numpy_of(variables), want):
            assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-4, atol=1e-5)


def test_outputs_come_by_name_in_tower_order_where_they_were_computed(world):
    original = start(world)
    towers = Towers(forward, original, contexts(3))
    outputs = towers.step(list(batches())[:2], LR)
    for array, value in zip(original, numpy_of(start(world))):
        np.testing.assert_array_equal(array.asnumpy(), value)  # the variables are copies
    assert [[v.context for v in vs] for vs in towers.variables] == [[c] * 3 for c in contexts(3)]
    assert set(outputs) == {"loss", "predicted"}
    for arrays in outputs.values():
        assert [array.context for array in arrays] == contexts(2)
        assert [array.shape for array in arrays] == [(5,), (2,)]
    for i, batch in enumerate(batches(SIZES[:2])):
        loaded = {key: world.array(value) for key, value in batch.items()}
        want = forward(loaded, start(world))["loss"].asnumpy()
        np.testing.assert_allclose(outputs["loss"][i].asnumpy(), want, rtol=1e-5)


def test_each_tower_computes_its_batch_on_its_device():
    seen = []

    def noting(batch, params):
        seen.append((batch["X"].context, mx.context.current_context(), len(batch["X"])))
        return forward(batch, params)["loss"]

    take_steps(Towers(noting, start(mx.nd), contexts(3)), batches(SIZES[:5]))
    order = [0, 1, 2, 0, 1]
    assert seen == [(device(i), device(i), n) for i, n in zip(order, SIZES)]


def test_the_update_runs_once_when_all_gradients_are_summed():
    """The gradient of a linear loss is the sum of the samples."""
    calls = []

    def update(params, lr, batch_size):
        calls.append((params[0].context, params[0].grad.asscalar(), lr, batch_size))
        params[0][:] = 7

    def linear(x, params):
        return x * params[0]

    towers = Towers(linear, [mx.nd.zeros((1,))], contexts(3), update)
    towers.step([mx.nd.array([1, 2]), mx.nd.array([10]), mx.nd.array([100, 200, 300])], lr=0.5)
    towers.step([mx.nd.array([5])], lr=0.25)  # the sums of the step before are gone
    assert calls == [(device(0), 613, 0.5, 6), (device(0), 5, 0.25, 1)]
    assert [variables[0].asscalar() for variables in towers.variables] == [7, 7, 7]


OPTIMIZERS = {
    "adam": lambda: mx.optimizer.Adam(learning_rate=0.1),
    "momentum": lambda: mx.optimizer.SGD(learning_rate=0.05, momentum=0.9, wd=0.01),
    # It counts its updates in one number, which an update on every device would ruin.
    "nadam": lambda: mx.optimizer.Nadam(learning_rate=0.1),
}


def assert_trains_as(one, towers, lr=None):
    """All towers end as ``one``, each step of which takes the samples of all of them at once."""
    drawn, k = list(batches()), len(towers.ctx)
    for first in range(0, len(drawn), k):
        step = drawn[first : first + k]
        towers.step(step, lr)
        one.step([{key: np.concatenate([batch[key] for batch in step]) for key in ("X", "y")}], lr)
    for variables in towers.variables:
        for got, expected in zip(numpy_of(variables), numpy_of(one.variables[0])):
            assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_updates_as_on_one_device(world, make, k):
    one, towers = (Towers(forward, start(world), contexts(n), make()) for n in (1, k))
    assert_trains_as(one, towers)
    nets = ((net_on(n, norm=False), contexts(n), make()) for n in (1, k))
    assert_trains_as(*(Towers(block_forward, *each) for each in nets))


def test_an_optimizer_keeps_its_scale_and_its_learning_rate_unless_the_step_has_one():
    """Also if it goes on in other towers."""
    optimizer, lr = mx.optimizer.SGD(learning_rate=0.5, rescale_grad=0.25), 0.5
    for k in (2, 1, 3):
        towers = Towers(lambda x, p: x * p[0], [mx.nd.zeros((1,))], contexts(k), optimizer)
        towers.step([mx.nd.array([1, 3])] * k)
        towers.step([mx.nd.array([1, 3])] * k, lr=2)
        assert towers.variables[-1][0].asscalar() == (-lr * 2 - 2 * 2) * 0.25
        lr = 2


def net_on(k, hybrid=False, deferred=False, norm=True):
    """A Block, the same numbers every time; batch normalisation sees each tower's batch alone."""
    net = nn.HybridSequential()
    inputs = (0, 0, 0) if deferred else (3, 4, 4)
    net.add(nn.Dense(4, activation="tanh", in_units=inputs[0]))
    net.add(*[nn.BatchNorm(in_channels=inputs[1])] * norm, nn.Dense(1, in_units=inputs[2]))
    mx.random.seed(3)
    net.initialize(mx.init.Normal(0.5), ctx=contexts(k), force_reinit=True)
    if hybrid:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def block_forward(batch, net):
    predicted = net(batch["X"]).reshape((-1,))
    return {"loss": (predicted - batch["y"]) ** 2, "predicted": predicted}


def variable_bits(towers):
    return [a.asnumpy().tobytes() for variables in towers.variables for a in variables]


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_blocks_towers_hold_the_same_bits_with_their_running_statistics(world, k, hybrid):
    towers = Towers(block_forward, net_on(k, hybrid), contexts(k))
    before = numpy_of(towers.variables[0])
    take_steps(towers, batches([4] * 2 * k + [3]))
    first = numpy_of(towers.variables[0])
    assert len(first) == 8
    assert all((a != b).any() for a, b in zip(first, before))
    for variables in towers.variables:
        assert [a.tobytes() for a in numpy_of(variables)] == [a.tobytes() for a in first]


def test_a_blocks_constants_are_no_variables():
    class Scaled(nn.Dense):
        def __init__(self):
            super().__init__(1, use_bias=False, in_units=3)
            with self.name_scope():
                self.scale = self.params.get_constant("scale", mx.nd.array([2]))

    net = Scaled()
    net.initialize(ctx=contexts(2))
    towers = Towers(block_forward, net, contexts(2))
    assert [[v.shape for v in variables] for variables in towers.variables] == [[(1, 3)]] * 2


def test_a_step_within_the_callers_recording_is_the_same_step():
    def by_hand(params, lr, batch_size):
        for param in params:
            if param.grad is not None:
                param[:] = param - lr / batch_size * param.grad

    def trained(scope):
        towers = Towers(block_forward, net_on(2), contexts(2), by_hand)
        with scope():
            towers.step(list(batches([4, 4])), LR)
        return variable_bits(towers)

    assert trained(autograd.record) == trained(autograd.pause)


def test_multipliers_and_frozen_layers_of_a_block_are_heeded():
    net = net_on(2, norm=False)
    net[0].bias.grad_req = "null"
    net[1].bias.lr_mult = 0
    towers = Towers(block_forward, net, contexts(2), mx.optimizer.SGD(learning_rate=0.1))
    before = numpy_of(towers.variables[1])
    towers.step(list(batches([4, 4])))
    moved = [(a != b).any() for a, b in zip(numpy_of(towers.variables[1]), before)]
    assert moved == [True, False, True, False]


def failing(where, error):
    def fail(batch, model):
        if batch["X"].context == where:
            raise error
        return block_forward(batch, model)

    return fail


@pytest.mark.parametrize("deferred", [False, True])
def test_an_exception_in_one_tower_names_its_device_and_changes_no_variable(deferred):
    net = net_on(3, deferred=deferred, norm=False)
    towers = Towers(block_forward, net, contexts(3))
    if not deferred:
        towers.step(list(batches([4, 4, 4])), LR)
        before = variable_bits(towers)
    towers._forward = failing(device(1), KeyError("layer"))
    words = r"tower 1 failed on [cg]pu\(1\): KeyError: 'layer'"
    with pytest.raises(RuntimeError, match=words) as e:
        towers.step(list(batches([4, 4, 4])), LR)
    assert type(e.value.__cause__) is KeyError
    assert "fail" in str(e.getrepr(style="native"))
    if not deferred:
        assert variable_bits(towers) == before
    towers._forward = block_forward
    towers.step(list(batches([4, 4, 4])), LR)  # and it can go on
    assert [variable.context for variable in towers.variables[1]] == [device(1)] * 4


def test_a_gradient_that_a_tower_has_not_written_counts_as_zero():
    """The first tower's loss depends on the second variable only."""

    def forward(x, params):
        return x * params[1] + (x * params[0] if x.context == device(1) else 0)

    towers = Towers(forward, [mx.nd.zeros((1,)), mx.nd.zeros((1,))], contexts(2))
    for step in (1, 2):
        towers.step([mx.nd.array([1]), mx.nd.array([10])], lr=2)
        for variables in towers.variables:
            assert [variable.asscalar() for variable in variables] == [-10 * step, -11 * step]


@pytest.mark.parametrize(
    ("function", "num_batches", "lr", "words"),
    [
        (lambda b, p: b["X"].mean(), 2, LR, r"\(5,\), got.* on [cg]pu\(0\)"),
        (lambda b, p: {"cost": b["y"]}, 2, LR, r"'loss'.* got.*cost.* on [cg]pu\(0\)"),
        (forward, 0, LR, "at least 1 batch, got none"),
        (forward, 3, LR, "at most 2 batches, got 3"),
        (forward, 2, None, "lr must be .*None"),
        (forward, 2, -1, "lr must be .*-1"),
    ],
)
def test_steps_that_cannot_be_made_change_nothing(function, num_batches, lr, words):
    towers = Towers(function, start(mx.nd), contexts(2))
    before = variable_bits(towers)
    with pytest.raises(ValueError, match=words):
        towers.step(list(batches())[:num_batches], lr)
    assert variable_bits(towers) == before


def test_a_block_that_accumulates_gradients_is_refused():
    net = net_on(2, norm=False)
    towers = Towers(block_forward, net, contexts(2))
    net[0].weight.grad_req = "add"
    with pytest.raises(ValueError, match="weight .*grad_req='write', got 'add'"):
        take_steps(towers, batches())


def test_a_step_waits_for_nothing():
    towers = Towers(forward, start(mx.nd), contexts(3))
    with waits.refused():
        outputs = towers.step(list(batches())[:3], LR)
    assert [len(array.asnumpy()) for array in outputs["loss"]] == SIZES[:3]


SHAPES = ((2, 3), (4,), (1,))


def tower_grads(k, dtype="float32", seed=0):
    """k towers' gradients, as NumPy: multiples of 12, whose sums and means are exact."""
    rng = np.random.RandomState(seed)
    return [[12 * rng.randint(-9, 9, size=s).astype(dtype) for s in SHAPES] for _ in range(k)]


def on_devices(world, grads):
    return [
        [world.array(grad, dtype=grad.dtype, ctx=device(i)) for grad in tower]
        for i, tower in enumerate(grads)
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_means_are_those_of_numpy_on_the_first_towers_device(world, k, dtype):
    """The gradients stay as they are, and the means are other arrays."""
    grads = tower_grads(k, dtype)
    arrays = on_devices(world, grads)
    means = average_gradients(arrays)
    assert type(means) is list
    for mean, of_variable in zip(means, zip(*grads)):
        assert type(mean) is type(world.ones((1,)))
        assert mean.context == device(0)
        assert np.dtype(mean.dtype) == dtype
        np.testing.assert_array_equal(mean.asnumpy(), np.mean(of_variable, axis=0))
        mean[:] = -1
    for tower, before in zip(arrays, grads):
        for array, value in zip(tower, before):
            np.testing.assert_array_equal(array.asnumpy(), value)


@pytest.mark.parametrize("k", [1, 3])
def test_pairs_give_pairs_with_the_first_towers_variables(world, k):
    grads = tower_grads(k)
    variables = on_devices(world, tower_grads(k, seed=1))
    pairs = [list(zip(*tower)) for tower in zip(on_devices(world, grads), variables)]
    averaged = average_gradients(pairs)
    assert [variable for _, variable in averaged] == variables[0]
    assert all(a is b for (_, a), b in zip(averaged, variables[0]))
    for (mean, _), of_variable in zip(averaged, zip(*grads)):
        np.testing.assert_array_equal(mean.asnumpy(), np.mean(of_variable, axis=0))


def test_arrays_of_0_dimensions_need_no_scope():
    with mx.util.np_shape(True):
        arrays = [[mx.nd.full((), 3 * i, ctx=device(i))] for i in range(2)]
    [mean] = average_gradients(arrays)
    with mx.util.np_shape(True):
        assert (mean.shape, mean.asnumpy()) == ((), 1.5)


def test_nothing_waits_and_nothing_is_recorded():
    arrays = on_devices(mx.nd, tower_grads(3))
    arrays[0][0].attach_grad()
    with waits.refused(), autograd.record():
        means = average_gradients(arrays)
    with pytest.raises(mx.MXNetError, match="not in a computational graph"):
        means[0].backward()


@pytest.mark.cpu("oneDNN computes on CPU contexts")
def test_an_evaluation_between_steps_changes_no_bit():
    """With MXNet's NAG, see test_updater.py."""
    start, found = mx.nd.random.uniform(shape=(16, 16, 3, 3)), set()
    for evaluated in (False, True):
        nag = mx.optimizer.NAG(learning_rate=0.1, momentum=0.9, wd=0.05)
        towers = Towers(lambda X, params: (params[0] * X).sum() * X, [start], contexts(2), nag)
        for _ in range(2):
            if evaluated:
                evaluate(towers.variables[0][0])
            towers.step([mx.nd.ones(1)] * 2)
        found |= {copies[0].asnumpy().tobytes() for copies in towers.variables}
    assert len(found) == 1


ONE, TWO = mx.nd.ones((1,)), mx.nd.ones((2,), ctx=device(1))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], ValueError, r"tower_grads .*got \[\]"),
        (ONE, ValueError, "one list per tower"),
        ([[ONE, ONE], [ONE]], ValueError, r"got \[2, 1\]"),
        ([[ONE], [TWO]], ValueError, r"variable 0.*\[1\] on [cg]pu\(1\) .*\(2,\).*\(1,\)"),
        ([[ONE], [ONE.astype("float64")]], ValueError, r"variable 0.*\[1\] .*float64.*float32"),
        ([[ONE], [(ONE, ONE)]], TypeError, "got tuple"),
        ([[(ONE,)]], TypeError, r"variable 0\[0\] .*got tuple"),
        ([[ONE], [None]], TypeError, r"variable 0\[1\] .*got NoneType"),
        ([[ONE.astype("int32")], [ONE.astype("int32")]], ValueError, "float arrays, got int32"),
    ],
)
def test_what_cannot_be_averaged_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        average_gradients(given)
