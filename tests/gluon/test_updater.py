"""Options that change, weights that are set and gradients that are kept, while a Trainer trains."""

import functools
import itertools

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import gluonpar
from gluonpar.gluon.trainer import Trainer
from tests.support.contexts import contexts, device
from tests.support.gluon_runs import OF_MXNET, give_grads, kernels_trained, stock_trainer, weights

LR = 0.125
HOW = [{}, {"algorithm": "ring"}, {"skip_nonfinite": True}]
PRECISIONS = [{}, {"dtype": "float16"}]


def by_formula(optimizer, moments, wd):
    """In NumPy; momentum that was 0 from the beginning is new when it first is not."""
    w, m = np.float64([1, 2]), 0.0
    for step, momentum in enumerate(moments):
        grad = (step + 1) * np.float64([1, -3]) + wd * w
        m = momentum * m - LR * grad
        w = w + (momentum * m - LR * grad if optimizer == "nag" else m)
        if not any(moments[: step + 1]):
            m = 0.0
    return w


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("moments", [[0.5, 0.5, 0, 0, 0.5, 0.5], [0, 0, 0.5, 0, 0.5]], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "ccsgd", "nag", "lbsgd"])
def test_momentum_can_change_while_training(optimizer, moments, precision, k, how):
    """NumPy's formula; MXNet's SGD lets the momentum stay in a step without, or fails."""
    params = weights([[1.0, 2.0]], k, **precision)
    wd = 0 if optimizer == "nag" else 0.5  # MXNet's NAG decays the momentum by the new weights
    options = {"learning_rate": LR, "momentum": moments[0], "wd": wd, "multi_precision": True}
    trainer = Trainer(params, optimizer, options, **how)
    for step, momentum in enumerate(moments):
        trainer.optimizer.momentum = momentum
        grads = [np.float64([1, -3]) * (step + 1), *np.zeros((k - 1, 2))]
        give_grads(params, [grads])
        trainer.step(1)
    want = by_formula(optimizer, moments, wd)
    for copy in params[0].list_data():
        np.testing.assert_allclose(copy.asnumpy(), want, rtol=1e-3 if precision else 1e-6)


def test_lars_with_momentum_that_changes_takes_the_steps_of_sgd():
    """Without weight decay LARS of a bias is SGD, which is right (see above)."""
    found = []
    for optimizer in ("lars", "sgd"):
        params = weights([[1.0, 2.0]], 2)
        trainer = Trainer(params, optimizer, {"learning_rate": LR, "momentum": 0.5})
        trainer.optimizer.idx2name = {0: "bias"}
        for step, momentum in enumerate([0.5, 0.5, 0, 0, 0.5]):
            trainer.optimizer.momentum = momentum
            give_grads(params, [[[1, step], [2, 3]]])
            trainer.step(1)
        found.append(params[0].data(device(0)).asnumpy())
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "nag"])
def test_training_goes_on_with_its_states_on_other_devices(optimizer):
    found = []
    for numbers in ([1, 2, 3, 1], [1, 1, 1, 1]):
        params = weights([[1.0, 2.0]], 1)
        trainer = Trainer(params, optimizer, {"learning_rate": LR})
        for k in numbers:
            params[0].reset_ctx(contexts(k))
            give_grads(params, [[[2, 4], *np.zeros((k - 1, 2))]])
            trainer.step(1)
            trainer.check_replicas()
        found.append([copy.asnumpy() for copy in params[0].list_data()])
    np.testing.assert_allclose(*found, rtol=1e-6)


class Scale(gluon.HybridBlock):
    """MXNet has no float16 layers on CPUs."""

    def __init__(self, k):
        super().__init__()
        self.weight = self.params.get("weight", shape=(3,), dtype="float16")
        self.fixed = self.params.get("fixed", shape=(3,), dtype="float16")
        self.initialize(mx.init.One(), ctx=[device(i) for i in range(k)])

    def hybrid_forward(self, F, x, weight, fixed):
        return x * weight * fixed


def set_data(net, value, path):
    net.weight.set_data(value)


def load_parameters(net, value, path):
    mx.nd.save(str(path), {"weight": value, "fixed": net.fixed.data(device(0))})
    net.load_parameters(str(path), ctx=net.weight.list_ctx())


def load_checkpoint(net, value, path):
    saved = Scale(1)
    saved.weight.set_data(value)
    saved.fixed.set_data(net.fixed.data(device(0)))
    gluonpar.save_checkpoint(path, saved)
    gluonpar.load_checkpoint(path, net)


def force_reinit(net, value, path):
    net.weight.initialize(mx.init.Zero(), ctx=net.weight.list_ctx(), force_reinit=True)
    net.weight.set_data(value)


SETTERS = [set_data, load_parameters, load_checkpoint, force_reinit]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nag", "adam", "lamb", "lars", "lbsgd"])
@pytest.mark.parametrize("setter", SETTERS)
def test_float16_weights_that_are_set_stay_set(setter, optimizer, k, tmp_path):
    """The others keep the digits that only their float32 copies have."""
    nets = [Scale(k), Scale(k)]
    for net in nets:
        options = {"learning_rate": 1e-4, "multi_precision": True}
        more = {"momentum": 0.5} if optimizer in ("momentum", "nag") else {}
        name = "sgd" if optimizer == "momentum" else optimizer
        net.trainer = Trainer(net.collect_params(), name, {**options, **more})
    new = mx.nd.array([1, 0.25, -8], dtype="float16")  # the first is what it was

    def step(net):
        give_grads([net.weight, net.fixed], [[1] * k, [1] * k])
        net.trainer.step(k)

    for net in nets:
        step(net)
        step(net)
    setter(nets[0], new, tmp_path / "file")
    for _ in range(8):
        for net in nets:
            step(net)
        changed, fixed, want = (
            param.data(device(0)).asnumpy()
            for param in (nets[0].weight, nets[0].fixed, nets[1].fixed)
        )
        np.testing.assert_allclose(changed[1:], new.asnumpy()[1:], rtol=0.02)
        assert fixed.tobytes() == want.tobytes()
    for param in nets[0].collect_params().values():
        assert len({copy.asnumpy().tobytes() for copy in param.list_data()}) == 1


def test_float32_copies_that_are_loaded_do_not_replace_other_weights(tmp_path):
    params = weights([[1.0]], 2, dtype="float16")
    trainer = Trainer(params, "sgd", {"learning_rate": 2**-6, "multi_precision": True})

    def step():
        give_grads(params, [[1, 1]])
        trainer.step(2)

    step()
    trainer.save_states(tmp_path / "s")
    params[0].set_data(mx.nd.array([8], dtype="float16"))
    step()
    trainer.load_states(tmp_path / "s")
    step()
    assert params[0].data(device(0)).asscalar() == 8 - 2 * 2**-6


@pytest.mark.parametrize("k", [1, 2])
def test_lbsgd_adds_up_gradients(k):
    """MXNet keeps the first gradient without copying it: backward overwrites it."""
    params = weights([[0.0]], k)
    trainer = Trainer(params, "lbsgd", {"learning_rate": 1, "batch_scale": 2, "warmup_epochs": 0})
    for grad in (1, 2):
        give_grads(params, [[grad] + [0] * (k - 1)])
        trainer.step(1)
    assert params[0].data(device(0)).asscalar() == -2 * (1 + 2) / 2  # twice: the warm-up's factor


# Its operator takes no arrays of four dimensions, which convolutions have.
TRAIN_KERNELS = [name for name in OF_MXNET if name != "groupadagrad"]


@pytest.mark.cpu("oneDNN computes on CPU contexts")
@pytest.mark.parametrize("optimizer", TRAIN_KERNELS)
def test_an_evaluation_between_steps_changes_no_bit(optimizer):
    """MXNet's NAG reads weights that it has written, but not those in a layout of oneDNN's."""
    makes = Trainer, functools.partial(gluon.Trainer, kvstore="gluonpar")
    for make, k in itertools.product(makes, (1, 2)):
        before, after = (kernels_trained(make, optimizer, k, each) for each in (False, True))
        assert before == after == [before[0]] * k
    by_stock = [kernels_trained(stock_trainer, optimizer, 1, each) for each in (False, True)]
    assert (by_stock[0] == by_stock[1]) == (optimizer != "nag")
