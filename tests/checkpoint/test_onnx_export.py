"""ONNX files compute what MXNet computes, as onnx's own reference evaluator runs them."""

import re
import sys

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.models import lenet, resnet
from gluonpar.training import command_line, workloads
from tests.support.contexts import device

onnx = pytest.importorskip(
    "onnx", reason="the package onnx is not installed: pip install 'onnx>=1.16'"
)
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of some hundred terms in another order


def assert_computes(path, X, *want):
    """Onnx's reference evaluator (NumPy) computes these arrays of MXNet, which are not near 0."""
    from onnx.reference import ReferenceEvaluator

    found = ReferenceEvaluator(str(path)).run(None, {"data": X})
    assert len(found) == len(want)
    for one, other in zip(found, want):
        assert one.shape == other.shape and abs(other.asnumpy()).max() > 0.1
        np.testing.assert_allclose(one, other.asnumpy(), **ROUNDING)


def images(n, seed=0, dtype="float32"):
    rng = np.random.RandomState(seed)
    return rng.randint(0, 256, (n, 1, 28, 28)).astype(dtype)


def trained_resnet():
    """Narrow, on two devices, with running statistics that two steps have changed."""
    mx.random.seed(0)
    net = resnet.resnet18(width=4)
    net.initialize(mx.init.Xavier(), ctx=[device(i) for i in range(2)])
    for step in range(2):
        for i in range(2):
            with mx.autograd.record():
                net(mx.nd.array(images(8, step) / 128 - 1, ctx=device(i)))
    return net


def test_a_function_computes_the_same_for_any_number_of_samples(tmp_path):
    mx.random.seed(0)
    params, path = lenet.init_lenet(0.1), tmp_path / "a.onnx"
    gluonpar.export_onnx(path, gluonpar.lenet, (1, 1, 28, 28), params)
    for n in (1, 5):
        X = images(n) / np.float32(128)
        assert_computes(path, X, gluonpar.lenet(mx.nd.array(X), params))


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_gluon_network_computes_the_same_with_its_running_statistics(tmp_path, hybridized):
    net, path = trained_resnet(), tmp_path / "a.onnx"
    net.hybridize(hybridized)
    X = images(3, 9) / np.float32(128) - 1
    want = net(mx.nd.array(X, ctx=device(0)))
    gluonpar.export_onnx(path, net, (1, 1, 28, 28))
    assert_computes(path, X, want)


def test_a_network_of_mx_np_computes_the_same(tmp_path):
    X = np.random.RandomState(0).randn(3, 4).astype("float32")
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = mx.gluon.nn.Dense(5, activation="tanh", in_units=4)
        net.initialize(mx.init.Normal(1))
        want = net(mx.np.array(X))
        gluonpar.export_onnx(tmp_path / "a.onnx", net, (1, 4))
    assert_computes(tmp_path / "a.onnx", X, want)


def test_operators_that_changed_after_set_13_compute_the_same(tmp_path):
    """Squeeze, mean, softmax, slice, pad, clip, dropout, and a second output."""

    class Net(mx.gluon.HybridBlock):
        def hybrid_forward(self, F, X):
            a = F.softmax(F.mean(X, axis=(2, 3)).expand_dims(1).squeeze(axis=1))
            padded = F.pad(X, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 2, 2))
            b = F.slice_axis(padded, axis=2, begin=1, end=4).clip(0, 0.5)
            return a, F.Dropout(b, p=0.5)

    X = np.random.RandomState(0).randn(2, 3, 4, 5).astype("float32")
    net = Net()
    gluonpar.export_onnx(tmp_path / "a.onnx", net, X.shape)
    first, second = net(mx.nd.array(X))
    assert (first.shape, second.shape) == ((2, 3), (2, 3, 3, 9))
    assert_computes(tmp_path / "a.onnx", X, first, second)


def test_the_file_has_its_version_and_named_inputs_and_outputs(tmp_path):
    before = vars(onnx).get("mapping")
    gluonpar.export_onnx(tmp_path / "a.onnx", gluonpar.lenet, (1, 1, 28, 28), lenet.init_lenet())
    assert vars(onnx).get("mapping") is before  # the package is left as it was
    made = onnx.load(str(tmp_path / "a.onnx"))
    assert [(entry.domain, entry.version) for entry in made.opset_import] == [("", 14)]
    assert made.ir_version == 7
    shapes = {tuple(each.dims) for each in made.graph.initializer if len(each.dims) == 4}
    assert shapes == {(20, 1, 3, 3), (50, 20, 5, 5)}
    kinds = [node.op_type for node in made.graph.node]
    assert kinds[:7] == [*["Conv", "Relu", "AveragePool"] * 2, "Flatten"]
    [data], [scores] = made.graph.input, made.graph.output  # parameters are not inputs
    assert (data.name, scores.name) == ("data", "scores")
    sizes = [d.dim_value for d in data.type.tensor_type.shape.dim]
    assert sizes == [0, 1, 28, 28]  # 0: any
    assert len(list(tmp_path.iterdir())) == 1


def test_without_onnx_the_error_names_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "onnx.helper", raising=False)
    with pytest.raises(ImportError, match=re.escape("pip install 'onnx>=1.16'")):
        gluonpar.export_onnx(tmp_path / "a.onnx", gluonpar.lenet, (1, 1, 28, 28), [])
    assert list(tmp_path.iterdir()) == []
    assert command_line.main(["--onnx", "--save-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install 'onnx>=1.16'" in err


class Exotic(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, X):
        return F.contrib.fft(X)


@pytest.mark.parametrize(
    ("model", "params", "error", "words"),
    [
        (Exotic(), None, ValueError, "_contrib_fft"),
        (resnet.resnet18(width=2), None, RuntimeError, "initialize"),
        (gluonpar.lenet, None, TypeError, "HybridBlock.*params="),
        ("lenet", [], TypeError, "HybridBlock.*'lenet'"),
    ],
)
def test_a_model_that_cannot_be_written_is_refused_and_leaves_no_file(
    tmp_path, model, params, error, words
):
    with pytest.raises(error, match=words):
        gluonpar.export_onnx(tmp_path / "a.onnx", model, (1, 1, 28, 28), params)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_the_scripts_write_what_they_trained(tmp_path, monkeypatch, model):
    """From raw pixels; the same scores as the .params file of the same epoch gives in MXNet."""
    monkeypatch.setattr(workloads.ResNet18Workload, "width", 4)
    options = ["--dataset", "synthetic", "--device", "cpu", "--num-gpus", "2", "--limit", "64"]
    options += ["--batch-size", "16", "--epochs", "2", "--save-dir", str(tmp_path), "--onnx"]
    assert command_line.main([*options, "--model", model]) == 0
    names = {path.name for path in tmp_path.glob("*.onnx")}
    assert names == {f"{model}-epoch-000{i}.onnx" for i in (1, 2)}
    X = images(4, 5, "uint8")
    for epoch in (1, 2):
        stem = tmp_path / f"{model}-epoch-000{epoch}"
        assert_computes(f"{stem}.onnx", X, scored(model, f"{stem}.params", X))


def scored(model, path, X):
    standard = lenet.standardize(mx.nd.array(X, dtype="uint8"))
    if model == "lenet":
        return lenet.lenet(standard, list(mx.nd.load(path).values()))
    net = resnet.resnet18(width=4)
    net.load_parameters(path)
    return net(standard)
