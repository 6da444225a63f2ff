"""save_states and load_states: training continues bit for bit, or nothing is changed."""

import functools
import io
import json
import os
import pickle
import re

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from contexts import device
from gluon_runs import assert_as_one, contexts, give_grads, weights

from gluonpar.checkpoint import sealed_npz
from gluonpar.gluon.trainer import Trainer

OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "wd": 0.01},
    "plain": {},
    "adam": {},
    "nadam": {},
    "lamb": {},
    "lars": {"momentum": 0.9},
    "rmsprop": {"centered": True},
    "ftml": {},
    "dcasgd": {},
    "signum": {"momentum": 0.9},
}
SCHEDULES = {
    "none": lambda: {},
    "factor": lambda: {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5)},
    "multifactor": lambda: {"lr_scheduler": mx.lr_scheduler.MultiFactorScheduler([1, 4], 0.5)},
    "cosine": lambda: {"lr_scheduler": mx.lr_scheduler.CosineScheduler(8, warmup_steps=3)},
}


def start(k, name, schedule="none", make=runs.mlp):
    net = make(contexts(k))
    options = {"learning_rate": 0.05, **OPTIMIZERS[name], **SCHEDULES[schedule]()}
    return net, Trainer(net.collect_params(), "sgd" if name == "plain" else name, options)


def copy_params(source, target):
    runs.fill(target, runs.values(source))


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_bit_for_bit(name, schedule, tmp_path):
    data, ctx, path = runs.batches(), contexts(2), tmp_path / "states"
    net, trainer = start(2, name, schedule)
    runs.train(net, trainer, data[:3], ctx)
    trainer.save_states(path)
    again, other = start(2, name, schedule)
    copy_params(net, again)
    other.load_states(str(path))
    assert other.learning_rate == trainer.learning_rate
    if other.optimizer.lr_scheduler is not None:
        assert vars(other.optimizer.lr_scheduler) == vars(trainer.optimizer.lr_scheduler)
    for one, two in ((net, trainer), (again, other)):
        runs.train(one, two, data[3:], ctx)
    for a, b in zip(runs.values(net), runs.values(again)):
        assert a.tobytes() == b.tobytes()
    assert vars(trainer.optimizer).keys() == vars(other.optimizer).keys()
    for key, value in vars(trainer.optimizer).items():
        if isinstance(value, (int, float)):
            assert getattr(other.optimizer, key) == value, key


@pytest.mark.parametrize("steps", [0, 3])
def test_a_trainer_that_was_used_forgets_its_counts_and_schedule(steps, tmp_path):
    data, ctx, path = runs.batches(), contexts(2), tmp_path / "states"
    net, trainer = start(2, "adam", "factor")
    runs.train(net, trainer, data[:steps], ctx)
    trainer.save_states(path)
    again, other = start(2, "adam", "factor")
    runs.train(again, other, data[:5], ctx)
    other.optimizer.lr_scheduler.base_lr = 0.3
    copy_params(net, again)
    other.load_states(path)
    for one, two in ((net, trainer), (again, other)):
        runs.train(one, two, data[steps:], ctx)
    for a, b in zip(runs.values(net), runs.values(again)):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("ks", [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("name", ["sgd", "adam", "nadam"])
def test_training_continues_on_another_number_of_devices(name, ks, tmp_path):
    data, path = runs.batches(), tmp_path / "states"
    net, trainer = start(ks[0], name)
    runs.train(net, trainer, data[:3], contexts(ks[0]))
    trainer.save_states(path)
    again, other = start(ks[1], name)
    copy_params(net, again)
    other.load_states(path)
    runs.train(again, other, data[3:], contexts(ks[1]))
    optimizer, options = ("sgd" if name == "plain" else name), OPTIMIZERS[name]
    assert_as_one(again, runs.stock(optimizer, {"learning_rate": 0.05, **options}))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_saving_changes_nothing(name, tmp_path):
    net, trainer = start(2, name)
    for batch in runs.batches():
        runs.train(net, trainer, [batch], contexts(2))
        trainer.save_states(tmp_path / "s")
    untouched, other = start(2, name)
    runs.train(untouched, other, runs.batches(), contexts(2))
    assert [a.tobytes() for a in runs.values(net)] == [a.tobytes() for a in runs.values(untouched)]


def test_states_can_be_loaded_before_shapes_are_known(tmp_path):
    """As when resuming a network whose shapes depend on its first batch, in a new process."""
    net, trainer = start(2, "adam")
    runs.train(net, trainer, runs.batches()[:3], contexts(2))
    trainer.save_states(tmp_path / "s")
    again, other = start(2, "adam", make=functools.partial(runs.mlp, deferred=True))
    for layer in again:
        layer.weight._shape = (layer.weight.shape[0], 0)  # it was known from the values
    other.load_states(tmp_path / "s")
    copy_params(net, again)
    for one, two in ((net, trainer), (again, other)):
        runs.train(one, two, runs.batches()[3:], contexts(2))
    assert [a.tobytes() for a in runs.values(net)] == [a.tobytes() for a in runs.values(again)]


def test_float16_states_with_their_float32_copies(tmp_path):
    def trained():
        params = weights([[1.0, 2.0, 3.0]], 2, dtype="float16")
        options = {"learning_rate": 1e-4, "momentum": 0.9, "multi_precision": True}
        return params, Trainer(params, "sgd", options)

    def step(params, trainer, count):
        for _ in range(count):
            give_grads(params, [[1.0, 2.0]])
            trainer.step(1)

    params, trainer = trained()
    step(params, trainer, 3)
    trainer.save_states(tmp_path / "s")
    again, other = trained()
    again[0].set_data(params[0].data(device(0)))
    other.load_states(tmp_path / "s")
    step(params, trainer, 5)
    step(again, other, 5)
    assert runs.bits(params)[:2] == runs.bits(again)[:2]


@pytest.mark.parametrize("rate", [np.float32(0.25), np.float64(0.1), 0.3, 1])
def test_a_learning_rate_of_any_kind_of_number_is_saved(tmp_path, rate):
    params = weights([[1.0]], 1)
    trainer = Trainer(params, "sgd")
    trainer.set_learning_rate(rate)
    trainer.save_states(tmp_path / "s")
    other = Trainer(params, "sgd")
    other.load_states(tmp_path / "s")
    assert other.learning_rate == rate


# What is refused, with nothing changed


def everything(trainer):
    """All that loading may change: states, update counts, numbers, rates."""
    optimizer, states = trainer.optimizer, trainer._updater.states
    arrays = {}
    for i, state in states.items():
        parts = state if isinstance(state, (tuple, list)) else [state]
        arrays[i] = [part.asnumpy().tobytes() for part in parts if part is not None]
    numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
    return arrays, numbers, dict(optimizer._index_update_count)


def assert_refused(trainer, path, words=""):
    before = everything(trainer)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + words):
        trainer.load_states(path)
    assert everything(trainer) == before


def test_states_of_another_optimizer_or_other_parameters_are_refused(tmp_path):
    net, trainer = start(2, "nadam")
    runs.train(net, trainer, runs.batches()[:2], contexts(2))
    trainer.save_states(tmp_path / "states")
    for params, optimizer, words in (
        (net.collect_params(), "adam", "Nadam.*Adam"),
        (weights([[1.0]], 2), "nadam", "6 parameters.* 1$"),
        (weights([[1.0]] * 6, 2), "nadam", r"mlp_dense0_bias \(10,\).* w0 \(1,\)"),
    ):
        assert_refused(Trainer(params, optimizer), tmp_path / "states", words)


@pytest.fixture
def small(tmp_path):
    """A Trainer of one parameter of two elements with momentum, and its file."""
    params = weights([[1.0, 2.0]], 1)
    trainer = Trainer(params, "sgd", {"momentum": 0.5})
    give_grads(params, [[1.0]])
    trainer.step(1)
    path = tmp_path / "small"
    trainer.save_states(path)
    return trainer, path


def as_npz(**arrays):
    """With a correct checksum: what is wrong is found after it."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    sealed_npz.seal(file)
    return file.getvalue()


OTHER_FILES = {
    "empty": b"",
    "text": b"format: 1\n",
    "a pickle": pickle.dumps({"states": [1, 2]}),
    "states of gluon.Trainer": pickle.dumps(({}, mx.optimizer.SGD())),
    "a header that is not JSON": as_npz(header=np.zeros(5, "uint8")),
    "a header that is a list": sealed_npz.pack([1], []),
    "a header that lacks everything": sealed_npz.pack({"format": 1}, []),
}


@pytest.mark.parametrize("what", OTHER_FILES)
def test_other_files_are_refused(what, small):
    trainer, path = small
    path.write_bytes(OTHER_FILES[what])
    assert_refused(trainer, path)


def test_damaged_files_are_refused(small):
    trainer, path = small
    whole = path.read_bytes()
    for place in range(0, len(whole), 64):
        for content in (whole[:place], whole[:place] + b"\x80" + whole[place + 1 :]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=re.escape(str(path))):
                trainer.load_states(path)
    assert_refused(trainer, path)


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_missing_file_is_refused(name, small):
    trainer, path = small
    assert_refused(trainer, path.parent / name)


class Bomb:
    """Unpickling it makes a folder."""

    def __reduce__(self):
        return os.mkdir, (os.environ["GLUONPAR_BOMB"],)


@pytest.mark.parametrize("how", ["object array", "object header", "pickle"])
def test_nothing_is_unpickled(how, small, tmp_path, monkeypatch):
    trainer, path = small
    monkeypatch.setenv("GLUONPAR_BOMB", str(tmp_path / "exploded"))
    bomb = np.array([Bomb()], dtype=object)
    text = np.frombuffer(json.dumps(sealed_npz.unpack(path.read_bytes())[0]).encode(), "uint8")
    content = {
        "object array": lambda: as_npz(header=text, **{"0": bomb}),
        "object header": lambda: as_npz(header=bomb),
        "pickle": lambda: pickle.dumps(Bomb()),
    }[how]()
    path.write_bytes(content)
    assert_refused(trainer, path)
    assert not (tmp_path / "exploded").exists()


def test_the_file_is_npz_without_pickles(small):
    _, path = small
    with np.load(path, allow_pickle=False) as found:
        assert {*found.files} == {"header", "0"}
        header = json.loads(found["header"].tobytes())
    assert (header["optimizer"], header["params"]) == ("SGD", [["w0", [2]]])
    assert header["states"] == [[0, 0]] and header["counts"] == [[0, 1]]
    assert header["numbers"]["momentum"] == 0.5
    assert "aggregate_num" not in header["numbers"]  # how many MXNet updates at once: no state


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["format"], 2, "format 2"),
        (["numbers"], 5, ""),
        (["numbers", "update"], 5, "update = 5"),
        (["numbers", "__class__"], 5, "__class__ = 5"),
        (["numbers", "lr_scheduler"], 5, "lr_scheduler = 5"),
        (["numbers", "learning_rate"], 5, "learning_rate = 5"),
        (["numbers", "aggregate_num"], 1000, "aggregate_num = 1000"),
        (["numbers", "lazy_update"], 1e300, r"lazy_update = 1e\+300"),
        (["numbers", "lr"], "0.1", "'0.1'"),
        (["numbers", "lr"], [0.1], r"\[0.1\]"),
        (["counts"], [1], ""),
        (["counts"], [["0", 1]], "'0'"),
        (["counts"], [[1, 1]], "KeyError: 1"),
        (["counts"], [[0, 1.5]], "1.5"),
        (["counts"], [[0, -3]], "-3"),
        (["states"], [[-1, 0]], "KeyError: -1"),
        (["states"], [[0, [0, 1]]], "KeyError"),
        (["states"], [[0, [0] * 10_000]], "KeyError"),  # few bytes, large states
        (["states"], [[0, None]], r"w0.*\(2,\) float32.*None"),
        (["states"], [[0, [0]]], "w0"),
        (["optimizer"], ["SGD"], "SGD"),
        (["params", 0, 1], "ab", "'a'"),
    ],
)
def test_a_header_with_another_value_is_refused_by_name(place, value, words, small):
    trainer, path = small
    header, arrays = sealed_npz.unpack(path.read_bytes())
    inner = header
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_bytes(sealed_npz.pack(header, arrays))
    assert_refused(trainer, path, words)


@pytest.mark.parametrize("other", [np.zeros(3, "f4"), np.zeros(2, "f8"), np.zeros((2, 1), "f4")])
def test_a_state_of_another_shape_or_dtype_is_refused(other, small):
    trainer, path = small
    header, _ = sealed_npz.unpack(path.read_bytes())
    path.write_bytes(sealed_npz.pack(header, [other]))
    assert_refused(trainer, path, "w0")
