"""files: a path holds a whole file, old or new, or none; MXNet and Gluon read ``.params`` files."""

import os
import stat

import mxnet as mx
import pytest

from gluonpar.checkpoint import files
from gluonpar.models import lenet, resnet
from gluonpar.training import command_line, workloads
from gluonpar.training.data import dataset
from tests.support.contexts import device
from tests.support.processes import run_python


def write(path, *parts):
    with files.atomic_write(path) as file:
        for part in parts:
            file.write(part)


def test_of_two_that_write_a_path_at_the_same_time_one_is_whole_and_there(tmp_path):
    path = tmp_path / "a"
    with files.atomic_write(path) as first:
        first.write(b"the first, ")
        write(path, b"the second")
        first.write(b"whole")
        first.flush()
        assert path.read_bytes() == b"the second"
    assert path.read_bytes() == b"the first, whole"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("old", [None, b"old"])
def test_an_error_at_any_place_keeps_the_old_file(tmp_path, monkeypatch, place, error, old):
    def refuse(*_):
        raise error

    if old:
        write(tmp_path / "a", old)
    monkeypatch.setattr(os, place, refuse)
    with pytest.raises(type(error)):
        with files.atomic_write(tmp_path / "a") as file:
            file.write(b"half")
            os.write(file.fileno(), b"fails here, if it does")
    monkeypatch.undo()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([old] if old else [])


def test_the_file_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    path, order = tmp_path / "a", []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda n: order.append(os.fstat(n).st_size) or sync(n))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("renamed") or replace(*paths))
    write(path, b"12345")
    assert order == [5, "renamed"]


def test_only_a_regular_file_is_replaced(tmp_path):
    """A rename would put a file in the place of a device, for all programs of the machine."""
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            files.check_replaceable(path)
    write(tmp_path / "a", b"old")
    files.check_replaceable(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"old" and len(os.listdir(tmp_path)) == 2
    with pytest.raises(OSError, match="not a regular file"):
        write(tmp_path / "pipe", b"new")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


FULL = """
import pathlib, resource, signal, sys
import gluonpar, mxnet as mx
from gluonpar.checkpoint import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for size in (500, 100_000):
    try:
        files.save_params(pathlib.Path(sys.argv[1]), [mx.nd.zeros((size,))])
    except OSError as error:
        print(error)
"""


def test_a_full_disk_is_an_oserror_and_keeps_the_earlier_file(tmp_path):
    """MXNet buffers small files, and does not notice when flushing the buffer fails."""
    path = tmp_path / "a.params"
    files.save_params(path, [mx.nd.zeros((3,))])
    odd = mx.nd.array([[float("nan"), float("inf"), -0.0], [1, 2, 3]], ctx=device(1))
    params = [odd, mx.nd.array([1 / 3], dtype="float64"), *(mx.nd.array([i]) for i in range(12))]
    files.save_params(path, params)
    assert run_python(FULL, path).count(str(path)) == 2
    loaded = mx.nd.load(str(path))
    assert list(loaded) == [str(i) for i in range(len(params))]
    for array, value in zip(loaded.values(), params):
        assert (array.dtype, array.shape) == (value.dtype, value.shape)
        assert array.context == mx.cpu(0)  # wherever it was: other machines have fewer devices
        assert array.asnumpy().tobytes() == value.asnumpy().tobytes()
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
