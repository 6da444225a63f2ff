"""checkpoint: a file is there whole or not at all."""

import os
import re

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.checkpoint import archive, params_file


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
    params_file.save_params(path, params())
    assert_holds(path, params())


def test_ten_and_more_parameters_keep_their_order(tmp_path):
    many = [mx.nd.array([i]) for i in range(12)]
    params_file.save_params(tmp_path / "a.params", many)
    assert_holds(tmp_path / "a.params", many)


def test_a_later_save_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.params"
    for offset in (0, 100):
        params_file.save_params(path, params(offset))
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
    params_file.save_params(path, params())
    monkeypatch.setattr(where, *what)
    with pytest.raises(OSError, match=words):
        params_file.save_params(path, params(100))
    assert_holds(path, params())
    assert os.listdir(tmp_path) == ["a.params"]


def test_an_interruption_keeps_the_earlier_file(tmp_path, monkeypatch):
    def interrupted(path, arrays):
        raise KeyboardInterrupt

    path = tmp_path / "a.params"
    params_file.save_params(path, params())
    monkeypatch.setattr(mx.nd, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        params_file.save_params(path, params(100))
    assert_holds(path, params())
    assert os.listdir(tmp_path) == ["a.params"]


def test_a_folder_that_is_gone_is_an_oserror_with_the_path(tmp_path):
    with pytest.raises(OSError, match="absent"):
        params_file.save_params(tmp_path / "absent" / "a.params", params())


@pytest.mark.parametrize("name", ["new", "new/and/deep", "."])
def test_prepare_makes_the_folder_and_leaves_it_empty(tmp_path, name):
    folder = params_file.prepare(tmp_path / name)
    assert folder == tmp_path / name
    assert os.listdir(folder) == []


def test_prepare_leaves_the_files_of_an_earlier_run(tmp_path):
    (tmp_path / "a.params").write_bytes(b"earlier")
    params_file.prepare(str(tmp_path))
    assert (tmp_path / "a.params").read_bytes() == b"earlier"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_prepare_refuses_a_place_that_is_no_folder(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=f"nothing can be saved in .*{name}: "):
        params_file.prepare(tmp_path / name)


def test_prepare_refuses_a_name_that_mxnet_cannot_be_told(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ValueError, match=r"nothing can be saved in .*\udcff: MXNet takes names in"):
        params_file.prepare(folder)
    assert not folder.exists()


# save_checkpoint and load_checkpoint


def network(k, rate=0.1, optimizer="adam", seed=0, names="ab"):
    """Dense, BatchNorm, Dense on k devices, and its Trainer with a schedule."""
    mx.random.seed(seed)
    net = mx.gluon.nn.HybridSequential()
    first, last = (mx.gluon.nn.Dense(4, in_units=n, prefix=p) for n, p in zip((3, 4), names))
    net.add(first, mx.gluon.nn.BatchNorm(in_channels=4), last)
    net.initialize(ctx=[mx.cpu(i) for i in range(k)])
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=rate)
    options = {"learning_rate": rate, "lr_scheduler": schedule}
    return net, gluonpar.Trainer(net.collect_params(), optimizer, options)


def train_steps(net, trainer, rng, steps):
    ctx = net[0].weight.list_ctx()
    for _ in range(steps):
        shards = gluonpar.split_and_load(rng.uniform(size=(12, 3)).astype("float32"), ctx)
        with mx.autograd.record():
            losses = [(net(shard) ** 2).sum() for shard in shards]
        mx.autograd.backward(losses)
        trainer.step(12)


def values(net):
    return [copy.asnumpy() for p in net.collect_params().values() for copy in p.list_data()]


@pytest.fixture
def saved(tmp_path):
    """A file after five steps on two devices; what it was made of."""
    (net, trainer), rng = network(2), np.random.RandomState(3)
    train_steps(net, trainer, rng, 5)
    path = tmp_path / "a.npz"
    gluonpar.save_checkpoint(path, net, trainer, rng, {"epoch": 4})
    return path, net, trainer, rng


def test_everything_goes_on_bit_for_bit_from_a_checkpoint(saved):
    path, net, trainer, rng = saved
    other, other_trainer = network(2, rate=0.7, seed=1, names="ba")  # Gluon sorts by name
    other_rng = np.random.RandomState(9)
    assert gluonpar.load_checkpoint(path, other, other_trainer, other_rng) == {"epoch": 4}
    assert other_trainer.learning_rate == trainer.learning_rate < 0.1
    for which in ((net, trainer, rng), (other, other_trainer, other_rng)):
        train_steps(*which, 3)
    for one, two in zip(values(net), values(other)):
        assert one.tobytes() == two.tobytes()


def test_on_another_number_of_devices_running_statistics_are_the_mean(saved):
    path, net, _, _ = saved
    other, _ = network(3)
    gluonpar.load_checkpoint(path, other)
    first, second = (copy.asnumpy() for copy in net[1].running_mean.list_data())
    assert not np.array_equal(first, second)
    for copy in other[1].running_mean.list_data():
        np.testing.assert_allclose(copy.asnumpy(), (first + second) / 2, rtol=1e-6)
    for copy in other[0].weight.list_data():
        assert copy.asnumpy().tobytes() == net[0].weight.list_data()[0].asnumpy().tobytes()


def test_numpy_reads_a_checkpoint_without_pickles(saved):
    path, net, _, _ = saved
    with np.load(path, allow_pickle=False) as found:
        assert found["0"].tobytes() == net[0].weight.list_data()[0].asnumpy().tobytes()


def refused_unchanged(path, words, net=None, trainer=None, rng=None):
    before = None if net is None else [value.tobytes() for value in values(net)]
    net = net or network(1)[0]
    with pytest.raises(ValueError, match=words):
        gluonpar.load_checkpoint(path, net, trainer, rng)
    assert before is None or [value.tobytes() for value in values(net)] == before


def test_any_flipped_bit_and_any_cut_is_refused(saved):
    path, net, trainer, rng = saved
    good, chance = path.read_bytes(), np.random.RandomState(0)
    places = [*chance.randint(len(good), size=100), *range(len(good) - 90, len(good))]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randint(8)
        path.write_bytes(bad)
        refused_unchanged(path, "is no checkpoint to go on from", net, trainer, rng)
        path.write_bytes(good[:place])
        refused_unchanged(path, "cut short", net, trainer, rng)


def test_a_later_format_and_foreign_contents_are_refused(saved):
    path, net, trainer, rng = saved
    header, arrays = archive.read(path.read_bytes())
    bad = [
        ({**header, "format": 2}, "its format is 2, but this version reads 1"),
        ({"format": 1}, "is no checkpoint"),
        ([1], "is no checkpoint"),
        ({**header, "params": [["0.weight", [99]]]}, "is no checkpoint"),
        ({**header, "rng": ["MT19937", 0, 1, 2, 3]}, "is no checkpoint"),
        ({**header, "params": header["params"] * 2}, "is no checkpoint to go on from: KeyError"),
        ({**header, "notes": 5}, "is no checkpoint to go on from: TypeError"),
        ({**header, "optimizer": None}, "was written without optimizer states"),
        ({**header, "rng": None}, "was written without generator's state"),
        ({**header, "params": header["params"][1:]}, "lacks, of this one, parameter 0.weight"),
    ]
    for content, words in bad:
        path.write_bytes(archive.sealed(content, arrays))
        refused_unchanged(path, words, net, trainer, rng)
    path.unlink()
    refused_unchanged(path, "there is no checkpoint", net)


def test_another_optimizer_is_refused(saved):
    net, trainer = network(2, optimizer="sgd")
    refused_unchanged(saved[0], "states of Adam, but the optimizer is SGD", net, trainer)


def test_plain_lists_of_parameters_travel_between_device_counts(tmp_path):
    params = gluonpar.init_lenet()
    two, three = ([gluonpar.get_params(params, mx.cpu(i)) for i in range(k)] for k in (2, 3))
    gluonpar.save_checkpoint(tmp_path / "a", two)
    for replica in three:
        for array in replica:
            array[:] = 7
    assert gluonpar.load_checkpoint(tmp_path / "a", three) == {}
    for replica in three:
        for array, original in zip(replica, params):
            assert array.asnumpy().tobytes() == original.asnumpy().tobytes()


@pytest.mark.parametrize(
    "state",
    [
        ["MT19937", 625, 0, 0.0],
        ["MT19937", 10**9, 0, 0.0],
        ["MT19937", -(10**9), 0, 0.0],
        ["MT19937", 1.5, 0, 0.0],
        ["MT19937", True, 0, 0.0],
        ["MT19937", 1, 2, 0.0],
        ["MT19937", 1, 0, "0"],
        ["Philox", 1, 0, 0.0],
    ],
)
def test_a_generator_in_no_state_there_is_is_refused(saved, state):
    """NumPy takes any place among its 624 keys, and ends the process when it reads there."""
    path, net, trainer, rng = saved
    header, arrays = archive.read(path.read_bytes())
    kind, *numbers = state
    header["rng"] = [kind, header["rng"][1], *numbers]
    path.write_bytes(archive.sealed(header, arrays))
    refused_unchanged(path, "its generator is", net, trainer, rng)


@pytest.mark.parametrize("keys", [np.zeros(624, "u4"), np.ones(623, "u4"), np.ones(624, "i8")])
def test_other_keys_of_a_generator_are_refused(saved, keys):
    """Nothing but zeros would give zeros for ever, and some distributions never end."""
    path, net, trainer, rng = saved
    header, arrays = archive.read(path.read_bytes())
    arrays[header["rng"][1]] = keys
    path.write_bytes(archive.sealed(header, arrays))
    refused_unchanged(path, "its generator is", net, trainer, rng)


def test_two_parameters_of_one_name_are_refused(saved):
    path, net, _, _ = saved
    header, arrays = archive.read(path.read_bytes())
    header["params"].append(["0.weight", [len(arrays)]])
    path.write_bytes(archive.sealed(header, [*arrays, np.zeros((4, 3), "f4")]))
    refused_unchanged(path, "two parameters of one name", net)


@pytest.mark.parametrize("name", ["", "a" * 300, "a.npz/below", "/proc/self/mem"])
def test_what_cannot_be_read_is_refused_by_name(saved, monkeypatch, name):
    monkeypatch.chdir(saved[0].parent)
    refused_unchanged(name, re.escape(name) + "( cannot be read|$)", saved[1])
