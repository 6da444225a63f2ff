"""checkpoint: a file is there whole or not at all."""

import os

import mxnet as mx
import numpy as np
import pytest

from gluonpar import checkpoint


def params(offset=0):
    """Unique values, with a NaN, an infinity and a negative zero among them; two contexts."""
    weight = np.arange(12, dtype="float32").reshape(3, 4) + offset
    weight[0, :3] = np.nan, np.inf, -0.0
    bias = np.arange(5, dtype="float64") / 3 + offset
    return [mx.nd.array(weight, ctx=mx.cpu(1)), mx.nd.array(bias, dtype="float64")]


def assert_holds(path, expected):
    loaded = mx.nd.load(str(path))
    assert list(loaded) == [str(i) for i in range(len(expected))]
    for array, value in zip(loaded.values(), expected):
        assert array.dtype == value.dtype
        assert array.shape == value.shape
        assert array.asnumpy().tobytes() == value.asnumpy().tobytes()


def test_mxnet_loads_what_was_saved_bit_for_bit(tmp_path):
    path = tmp_path / "a.params"
    checkpoint.save_params(path, params())
    assert_holds(path, params())


def test_ten_and_more_parameters_keep_their_order(tmp_path):
    many = [mx.nd.array([i]) for i in range(12)]
    checkpoint.save_params(tmp_path / "a.params", many)
    assert_holds(tmp_path / "a.params", many)


def test_a_later_save_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.params"
    for offset in (0, 100):
        checkpoint.save_params(path, params(offset))
    assert_holds(path, params(100))
    assert os.listdir(tmp_path) == ["a.params"]


def half_a_file(path, arrays):
    with open(path, "wb") as file:
        file.write(b"half")
    raise mx.MXNetError("disk full")


def refused(*paths):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        (mx.nd, ("save", half_a_file), "cannot write .*a.params: disk full"),
        (os, ("fsync", refused), "No space left"),
        (os, ("replace", refused), "No space left"),
    ],
    ids=["write", "flush", "rename"],
)
def test_a_failure_keeps_the_earlier_file_and_leaves_no_other(
    tmp_path, monkeypatch, where, what, words
):
    path = tmp_path / "a.params"
    checkpoint.save_params(path, params())
    monkeypatch.setattr(where, *what)
    with pytest.raises(OSError, match=words):
        checkpoint.save_params(path, params(100))
    assert_holds(path, params())
    assert os.listdir(tmp_path) == ["a.params"]


def test_an_interruption_keeps_the_earlier_file(tmp_path, monkeypatch):
    def interrupted(path, arrays):
        raise KeyboardInterrupt

    path = tmp_path / "a.params"
    checkpoint.save_params(path, params())
    monkeypatch.setattr(mx.nd, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_params(path, params(100))
    assert_holds(path, params())
    assert os.listdir(tmp_path) == ["a.params"]


def test_a_folder_that_is_gone_is_an_oserror_with_the_path(tmp_path):
    with pytest.raises(OSError, match="absent"):
        checkpoint.save_params(tmp_path / "absent" / "a.params", params())


@pytest.mark.parametrize("name", ["new", "new/and/deep", "."])
def test_prepare_makes_the_folder_and_leaves_it_empty(tmp_path, name):
    folder = checkpoint.prepare(tmp_path / name)
    assert folder == tmp_path / name
    assert os.listdir(folder) == []


def test_prepare_leaves_the_files_of_an_earlier_run(tmp_path):
    (tmp_path / "a.params").write_bytes(b"earlier")
    checkpoint.prepare(str(tmp_path))
    assert (tmp_path / "a.params").read_bytes() == b"earlier"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_prepare_refuses_a_place_that_is_no_folder(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=f"nothing can be saved in .*{name}: "):
        checkpoint.prepare(tmp_path / name)
