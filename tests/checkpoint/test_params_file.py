"""params_file: MXNet and Gluon read the .params files, which are written whole or not at all."""

import os

import mxnet as mx
import pytest
from contexts import device
from processes import run_python

from gluonpar.checkpoint import params_file
from gluonpar.models import lenet, resnet
from gluonpar.training import command_line, workloads
from gluonpar.training.data import dataset


def params():
    """More than ten, with unique values, on two contexts; with a NaN, an infinity and a -0."""
    odd = mx.nd.array([[float("nan"), float("inf"), -0.0], [1, 2, 3]], ctx=device(1))
    many = [mx.nd.array([i]) for i in range(12)]
    return [odd, mx.nd.array([1 / 3, 2 / 3], dtype="float64"), *many]


def assert_holds(path, expected):
    loaded = mx.nd.load(str(path))
    assert list(loaded) == [str(i) for i in range(len(expected))]
    for array, value in zip(loaded.values(), expected):
        assert (array.dtype, array.shape) == (value.dtype, value.shape)
        assert array.context == mx.cpu(0)  # wherever it was: other machines have fewer devices
        assert array.asnumpy().tobytes() == value.asnumpy().tobytes()


def test_mxnet_loads_what_was_saved_bit_for_bit(tmp_path):
    path = tmp_path / "a.params"
    params_file.save_params(path, [mx.nd.zeros((3,))])
    params_file.save_params(path, params())
    assert_holds(path, params())
    assert os.listdir(tmp_path) == ["a.params"]


FULL = """
import pathlib, resource, signal, sys
import gluonpar, mxnet as mx
from gluonpar.checkpoint import params_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for size in (500, 100_000):
    try:
        params_file.save_params(pathlib.Path(sys.argv[1]), [mx.nd.zeros((size,))])
    except OSError as error:
        print(error)
"""


def test_a_full_disk_is_an_oserror_and_keeps_the_earlier_file(tmp_path):
    """MXNet buffers small files, and does not notice when flushing the buffer fails."""
    path = tmp_path / "a.params"
    params_file.save_params(path, params())
    assert run_python(FULL, path).count(str(path)) == 2
    assert_holds(path, params())
    assert os.listdir(tmp_path) == ["a.params"]


NETWORKS = {"lenet": lenet.LeNet, "resnet18": lambda: resnet.resnet18(width=2)}


@pytest.mark.slow
@pytest.mark.parametrize("model", NETWORKS)
def test_gluon_loads_what_the_scripts_save_with_the_accuracy_that_they_printed(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(workloads.ResNet18Workload, "width", 2)
    options = "--dataset synthetic --device cpu --num-gpus 2 --limit 512 --batch-size 8 --epochs 1"
    options = [*options.split(), "--lr", "0.1", "--save-dir", str(tmp_path)]
    assert command_line.main([*options, "--model", model]) == 0
    path = str(tmp_path / f"{model}-epoch-0001.params")
    net, made = NETWORKS[model](), dataset.load("synthetic", limit=512)
    net.load_parameters(path)
    scores = net(lenet.standardize(mx.nd.array(made.test_images, dtype="uint8"))).asnumpy()
    right = (scores.argmax(axis=1) == made.test_labels).mean()
    assert f"test acc {right:.2f}" in capsys.readouterr().out and right > 0.15
    read = mx.nd.load(path)
    for name, param in net._collect_params_with_prefix().items():
        assert read[name].asnumpy().tobytes() == param.data().asnumpy().tobytes()
