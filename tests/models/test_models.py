"""models: the book's LeNet, its parameters and its input."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

import gluonpar
from gluonpar.models import lenet
from gluonpar.models.losses import softmax_cross_entropy
from tests.support import oracle
from tests.support.contexts import device


def seeded(seed, **more):
    mx.random.seed(seed)
    return [param.asnumpy() for param in lenet.init_lenet(**more)]


def test_parameters_have_the_books_shapes_in_float32_on_the_given_context():
    assert {param.context for param in lenet.init_lenet()} == {mx.context.current_context()}
    params = lenet.init_lenet(ctx=device(3))
    kinds = {(param.context, np.dtype(param.dtype).name) for param in params}
    assert kinds == {(device(3), "float32")}
    shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
    assert [param.shape for param in params] == shapes


@pytest.mark.parametrize(("options", "scale"), [({}, 0.01), ({"scale": 0.5}, 0.5)])
def test_biases_are_zero_and_weights_normal_with_the_scale_as_standard_deviation(options, scale):
    params = seeded(0, **options)
    weights, biases = params[0::2], params[1::2]
    assert not any(bias.any() for bias in biases)
    for weight in weights:
        # Four standard errors of the estimates.
        assert abs(weight.mean()) < 4 * scale / np.sqrt(weight.size)
        assert abs(weight.std() / scale - 1) < 4 / np.sqrt(2 * weight.size)
    share_within_one = np.mean(np.abs(weights[2]) < scale)
    assert share_within_one == pytest.approx(0.683, abs=0.01)


def test_bytes_are_standardized_as_float32_where_they_are():
    values = np.arange(256, dtype="uint8").reshape(1, 1, 16, 16)
    images = lenet.standardize(mx.nd.array(values, dtype="uint8", ctx=device(1)))
    assert np.dtype(images.dtype) == "float32"
    assert images.context == device(1)
    # 0.2860 and 0.3530 of the range 0 to 1 are Fashion-MNIST's mean and deviation, as published.
    expected = (values / 255 - 0.2860) / 0.3530
    np.testing.assert_allclose(images.asnumpy(), expected, atol=2e-3)


@pytest.mark.parametrize("hybridized", [False, True])
def test_lenet_as_a_block_computes_the_same_as_the_function(hybridized):
    net = lenet.LeNet(0.1)
    net.initialize()
    net.hybridize(hybridized)
    X = mx.nd.random.uniform(shape=(2, 1, 28, 28))
    params = [getattr(net, str(i)).data() for i in range(8)]
    assert [param.shape for param in params] == list(lenet.LENET_SHAPES)
    want = lenet.lenet(X, params).asnumpy()
    assert abs(want).max() > 0.01
    np.testing.assert_allclose(net(X).asnumpy(), want, rtol=1e-5, atol=1e-7)
    assert abs(params[4].asnumpy().std() - 0.1) < 0.002 and not params[5].asnumpy().any()


def test_lenet_and_its_loss_take_arrays_of_mx_np(world):
    images = np.random.RandomState(0).randint(0, 256, (4, 1, 28, 28)).astype("uint8")
    start, grads = seeded(0, scale=0.05), []
    for F in (mx.nd, world):
        params = [F.array(value, ctx=device()) for value in start]
        for param in params:
            param.attach_grad()
        X, y = (F.array(a, dtype=a.dtype, ctx=device()) for a in (images, np.arange(4)))
        with autograd.record():
            loss = softmax_cross_entropy(lenet.lenet(lenet.standardize(X), params), y)
        loss.backward()
        grads.append([param.grad.asnumpy().tobytes() for param in params])
    assert grads[0] == grads[1]


def images_and_labels(n):
    rng = np.random.RandomState(n)
    return rng.rand(n, 1, 28, 28).astype("float32"), rng.randint(0, 10, n)


@pytest.mark.parametrize("n", [1, 3, 128])
def test_losses_and_gradients_are_the_books_whatever_kernels_compute_them(n):
    """Every relu's input is off its kink, where float32 and float64 could take different sides."""
    X, y = images_and_labels(n)
    start = seeded(0, scale=0.05)
    for bias, distance in zip(start[1:6:2], (2, 4, 4)):
        bias += distance * np.where(np.arange(len(bias)) % 2, 1, -1)
    want = oracle.Step(X.astype("float64"), y, [param.astype("float64") for param in start])
    assert want.margins.min() > 0.01
    params = [mx.nd.array(value, ctx=device()) for value in start]
    for param in params:
        param.attach_grad()
    with autograd.record():
        scores = lenet.lenet(mx.nd.array(X, ctx=device()), params)
        losses = softmax_cross_entropy(scores, mx.nd.array(y, ctx=device()))
    losses.backward()
    np.testing.assert_allclose(losses.asnumpy(), want.losses, rtol=1e-5)
    for param, grad in zip(params, want.grads):
        error = np.linalg.norm(param.grad.asnumpy() - grad) / np.linalg.norm(grad)
        assert error < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite_changes_no_bit_of_the_others_scores(bad):
    X, _ = images_and_labels(4)
    params = lenet.init_lenet(0.05, ctx=device())
    ruined = X.copy()
    ruined[1, 0, 3:20] = bad
    scores = [lenet.lenet(mx.nd.array(x, ctx=device()), params).asnumpy() for x in (X, ruined)]
    assert (scores[0] != scores[1]).any(axis=1).tolist() == [False, True, False, False]


@pytest.fixture
def graphs(monkeypatch):
    """The numbers of channels of each graph's convolutions, as graphs are made."""
    made, make = [], mx.nd.CachedOp

    def noting(symbol, *flags):
        made.append(convolutions(symbol))
        return make(symbol, *flags)

    monkeypatch.setattr(mx.nd, "CachedOp", noting)
    return made


def convolutions(symbol):
    nodes = symbol.attr_dict().values()
    return sorted(int(node["num_filter"]) for node in nodes if "num_filter" in node)


def padded():
    """20 and 50 channels as they are on this device."""
    return [20, 50] if device().device_type == "gpu" else [24, 56]


def test_channels_are_padded_in_the_graphs_of_cpus_only(graphs):
    """The graphs of train_batch and of a hybridized block."""
    X, y = images_and_labels(2)
    params = gluonpar.get_params(lenet.init_lenet(), device())
    gluonpar.train_batch(X, y.astype("float32"), [params], [device()], 0.1)
    assert graphs == [padded()]
    net = lenet.LeNet()
    net.initialize(ctx=device())
    net.hybridize()
    net(mx.nd.array(X, ctx=device()))
    assert graphs[1:] == [padded()]


@pytest.mark.filterwarnings("ignore:Cannot decide type")  # MXNet, reading any such file
def test_graphs_that_are_written_are_the_books(tmp_path):
    X = mx.nd.array(images_and_labels(2)[0], ctx=device())
    net = lenet.LeNet(0.1)
    net.initialize(ctx=device())
    net.hybridize()
    want = net(X).asnumpy()
    assert convolutions(net(mx.sym.var("data"))) == [20, 50]
    net.export(str(tmp_path / "a"))
    path = str(tmp_path / "a-symbol.json")
    assert convolutions(mx.sym.load(path)) == [20, 50]
    assert len(mx.nd.load(str(tmp_path / "a-0000.params"))) == 8
    read = mx.gluon.SymbolBlock.imports(path, ["data"], str(tmp_path / "a-0000.params"), device())
    np.testing.assert_allclose(read(X).asnumpy(), want, rtol=1e-5, atol=1e-7)
    assert net(X).asnumpy().tobytes() == want.tobytes()  # as before
