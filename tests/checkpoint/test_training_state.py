"""save_checkpoint and load_checkpoint: training continues bit for bit, or nothing is changed."""

import os
import re

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from tests.support import gluon_runs as runs
from tests.support.checkpoint_files import read, set_in_header, write
from tests.support.contexts import device


def network(k, rate=0.1, optimizer="adam", seed=0, names="ab"):
    """Dense, BatchNorm, Dense on k devices, and its Trainer with a schedule."""
    mx.random.seed(seed)
    net = mx.gluon.nn.HybridSequential()
    first, last = (mx.gluon.nn.Dense(4, in_units=n, prefix=p) for n, p in zip((3, 4), names))
    net.add(first, mx.gluon.nn.BatchNorm(in_channels=4), last)
    net.initialize(ctx=[device(i) for i in range(k)])
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
    """A checkpoint after five steps on two devices, and what was saved in it."""
    (net, trainer), rng = network(2), np.random.RandomState(3)
    train_steps(net, trainer, rng, 5)
    path = tmp_path / "a.npz"
    gluonpar.save_checkpoint(path, net, trainer, rng, {"epoch": 4})
    return path, net, trainer, rng


def test_training_continues_bit_for_bit(saved):
    path, net, trainer, rng = saved
    other, other_trainer = network(2, rate=0.7, seed=1, names="ba")  # Gluon sorts by name
    other_rng = np.random.RandomState(9)
    with pytest.warns(UserWarning, match="schedule goes on.*base_lr is 0.025, here 0.175"):
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


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")  # of MXNet's import
def test_the_parameters_of_an_imported_network(tmp_path):
    """Gluon does not know their shapes, even when they have values."""
    net, data = runs.mlp([device(0)], hybridize={}), runs.batches()
    net(mx.nd.array(data[0][0], ctx=device(0)))
    net.export(str(tmp_path / "net"))
    graph, params = (str(tmp_path / f"net-{end}") for end in ("symbol.json", "0000.params"))
    ctx = [device(i) for i in range(2)]
    trained = []
    for _ in range(2):
        net = mx.gluon.SymbolBlock.imports(graph, ["data"], params, ctx)
        trained.append((net, gluonpar.Trainer(net.collect_params(), "adam")))
    runs.train(*trained[0], data[:3], ctx)
    gluonpar.save_checkpoint(tmp_path / "a", *trained[0])
    gluonpar.load_checkpoint(tmp_path / "a", *trained[1])
    for pair in trained:
        runs.train(*pair, data[3:], ctx)
    one, other = ([value.tobytes() for value in values(net)] for net, _ in trained)
    assert one == other


@pytest.mark.parametrize(("k", "statistics"), [(2, [1, 2]), (3, [1.5] * 3)])
def test_lists_from_a_generator_on_as_many_devices_and_on_another_number(k, statistics, tmp_path):
    """The last array is not trained, such as the running statistics of a plain function."""
    start = [mx.nd.array([1 / 3, 2 / 3]), mx.nd.array([[4], [5]]), mx.nd.zeros((3,))]
    saved, other = (
        [gluonpar.get_params(start, device(i), frozen=[2]) for i in range(n)] for n in (2, k)
    )
    for i, arrays in enumerate(saved):
        arrays[2][:] = i + 1
    for array in sum(other, []):
        array[:] = 7
    gluonpar.save_checkpoint(tmp_path / "a", (arrays for arrays in saved))
    assert gluonpar.load_checkpoint(tmp_path / "a", (arrays for arrays in other)) == {}
    for arrays, statistic in zip(other, statistics):
        for array, want in zip(arrays, [*start[:2], mx.nd.full((3,), statistic)]):
            assert array.asnumpy().tobytes() == want.asnumpy().tobytes()


@pytest.mark.parametrize("notes", ["text", "", 0, 2.5, [1, "a"], [["a", 1]], {"a": [None, True]}])
def test_notes_of_any_kind_come_back(notes, tmp_path):
    params = [gluonpar.init_lenet()]
    gluonpar.save_checkpoint(tmp_path / "a", params, notes=notes)
    assert gluonpar.load_checkpoint(tmp_path / "a", params) == notes


def test_notes_with_an_array_are_refused(tmp_path):
    with pytest.raises(TypeError):
        gluonpar.save_checkpoint(tmp_path / "a", [gluonpar.init_lenet()], notes=[np.ones(2)])
    assert [*tmp_path.iterdir()] == []


def test_the_format_is_npz_with_a_json_header(saved):
    """What other programs may read, and later versions have to: keys, numbers and order."""
    path, net, _, _ = saved
    with np.load(path, allow_pickle=False) as file:
        assert file["0"].tobytes() == net[0].weight.list_data()[0].asnumpy().tobytes()
    header, arrays = read(path)
    assert [*header] == ["format", "gluonpar", "params", "optimizer", "rng", "notes"]
    assert [*header["optimizer"]] == [*("format", "params", "counts", "optimizer", "states")]
    assert header["params"][0] == ["0.weight", [0]]
    assert dict(header["params"])["1.running_mean"] == [4, 5]  # one per device
    assert (header["format"], header["optimizer"]["format"]) == (1, 2)
    assert header["rng"][:1] == ["MT19937"] and len(arrays[header["rng"][1]]) == 624


def everything(net, trainer, rng):
    """All that loading may change, as bytes."""
    kind, keys, *more = rng.get_state()
    bits = [value.tobytes() for value in values(net)]
    return bits, runs.training_state(trainer), keys.tobytes(), more


def assert_refused(path, words, net, trainer, rng):
    train_steps(net, trainer, rng, 1)  # so that they are not what the file holds
    before = everything(net, trainer, rng)
    with pytest.raises(ValueError, match=words):
        gluonpar.load_checkpoint(path, net, trainer, rng)
    assert everything(net, trainer, rng) == before


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (["format"], 2, "format is 2.* reads 1"),
        (["params", 0, 1], [99], "cannot be loaded"),
        (["params", 0, 1], [], "0.weight"),
        (["params", 0], ["9.weight", [0]], "parameter 9.weight"),
        (["optimizer"], None, "trainer="),
        (["rng"], None, "rng="),
        (["rng"], ["MT19937", 0, 1, 2, 3], "cannot be loaded"),
        (["rng", 4], "x", "cannot be loaded"),
        (["rng", 0], "Philox", "cannot be loaded"),
        *(([], header, "cannot be loaded") for header in ([1], {"format": 1}, "text", None)),
    ],
)
def test_a_header_changed_by_hand_is_refused(saved, keys, value, words):
    path, *targets = saved
    set_in_header(path, keys, value)
    assert_refused(path, words, *targets)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("rng", np.ones(623, "u4")),
        ("0.weight", np.ones((3, 4), "f4")),
        ("0.weight", np.ones((4, 3), "f8")),
        ("0.weight", np.ones((4, 3), "S4")),
    ],
)
def test_an_array_of_another_shape_dtype_or_content_is_refused(saved, name, array):
    path, *targets = saved
    header, arrays = read(path)
    arrays[header["rng"][1] if name == "rng" else 0] = array
    write(path, header, arrays)
    assert_refused(path, "cannot be loaded" if name == "rng" else name, *targets)


def test_another_optimizer_or_model_is_refused(saved):
    path, _, _, rng = saved
    assert_refused(path, "Adam.*SGD", *network(2, optimizer="sgd"), rng)
    with pytest.raises(ValueError, match="0.weight"):
        gluonpar.load_checkpoint(path, [gluonpar.init_lenet()])


class Chosen:
    """A learning rate that only its class knows."""

    def __call__(self, num_update):
        return 0.25


def test_a_schedule_that_is_not_plain_is_loaded_only_if_trusted(saved):
    path, net, trainer, rng = saved
    trainer.optimizer.lr_scheduler = Chosen()
    with pytest.warns(UserWarning, match="lr_scheduler is of type Chosen.* trusted=True"):
        gluonpar.save_checkpoint(path, net, trainer, rng)
    assert_refused(path, "any code.*trusted=True", net, trainer, rng)
    other, other_trainer = network(2, rate=0.7)
    gluonpar.load_checkpoint(path, other, other_trainer, rng, keep_schedule=True, trusted=True)
    assert other_trainer.learning_rate == 0.7 / 4
    with pytest.warns(UserWarning, match="schedule goes on"):
        gluonpar.load_checkpoint(path, other, other_trainer, rng, trusted=True)
    assert other_trainer.learning_rate == 0.25


NOT_FILES = [".", "absent", "a" * 300, "a.npz/below", "pipe", "/proc/self/mem"]


@pytest.mark.parametrize("name", NOT_FILES)
def test_a_file_that_cannot_be_read_is_named(saved, monkeypatch, name):
    path, *targets = saved
    monkeypatch.chdir(path.parent)
    os.mkfifo("pipe")
    assert_refused(name, re.escape(name), *targets)


def test_a_network_without_values_and_a_stock_trainer_are_refused(tmp_path):
    net = mx.gluon.nn.Dense(3)
    with pytest.raises(RuntimeError, match="initialize"):
        gluonpar.save_checkpoint(tmp_path / "a", net)
    net, _ = network(1)
    stock = mx.gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(TypeError, match=r"gluonpar\.Trainer"):
        gluonpar.save_checkpoint(tmp_path / "a", net, stock)
    assert list(tmp_path.iterdir()) == []


def test_values_reach_the_weights_that_a_kvstore_has(tmp_path):
    """gluon.Trainer updates on its kvstore, which has copies of its own."""
    net, _ = network(2)
    gluonpar.save_checkpoint(tmp_path / "a", net)
    want = values(net)
    stock = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    for param in net.collect_params().values():
        param.set_data(param.data(device(0)) + 1)
    train_steps(net, stock, np.random.RandomState(0), 1)
    gluonpar.load_checkpoint(tmp_path / "a", net)
    train_steps(net, stock, np.random.RandomState(0), 1)
    for param, copy in zip(net.collect_params().values(), values(net)[::2]):
        if param.grad_req != "null":
            assert copy.tobytes() in [value.tobytes() for value in want]


@pytest.mark.parametrize(
    ("counts", "words"), [([], "no device"), ([2, 1], r"equal length per device, got \[2, 1\]")]
)
def test_lists_that_are_no_replicas_are_refused(tmp_path, counts, words):
    """A zip of them would leave parameters out."""
    params = [[mx.nd.ones((3,)) for _ in range(count)] for count in counts]
    with pytest.raises(ValueError, match=words):
        gluonpar.save_checkpoint(tmp_path / "a", params)
    assert [*tmp_path.iterdir()] == []
