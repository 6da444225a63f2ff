"""save_states and load_states: training goes on as if it had never stopped, or a clear error."""

import copy
import functools
import io
import json
import os
import pickle
import re
import subprocess
import sys

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from gluon_runs import assert_as_one, contexts, give_grads, weights

from gluonpar import replicas
from gluonpar.checkpoint import archive, files, optimizer_states
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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_bit(name, schedule, tmp_path, monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 300)
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


@pytest.mark.parametrize("ks", [(2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("name", ["sgd", "adam", "nadam"])
def test_another_number_of_devices_goes_on(name, ks, tmp_path):
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


def test_states_are_known_before_shapes_are(tmp_path):
    """Resuming: a network whose shapes come with its first batch, in a new process."""
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
    again[0].set_data(params[0].data(mx.cpu(0)))
    other.load_states(tmp_path / "s")
    step(params, trainer, 5)
    step(again, other, 5)
    assert runs.bits(params)[:2] == runs.bits(again)[:2]


@pytest.mark.parametrize("rate", [np.float32(0.25), np.float64(0.1), 0.3, 1])
def test_a_rate_of_numpys_kind_is_saved_too(tmp_path, rate):
    params = weights([[1.0]], 1)
    trainer = Trainer(params, "sgd")
    trainer.set_learning_rate(rate)
    trainer.save_states(tmp_path / "s")
    other = Trainer(params, "sgd")
    other.load_states(tmp_path / "s")
    assert other.learning_rate == rate


# what cannot be loaded


def saved(tmp_path, name="adam"):
    net, trainer = start(2, name)
    runs.train(net, trainer, runs.batches()[:2], contexts(2))
    trainer.save_states(tmp_path / "states")
    return net, trainer, tmp_path / "states"


def everything(trainer):
    """All that loading may change: states, counters, numbers, rates."""
    optimizer, arrays = trainer.optimizer, []
    code = {i: optimizer_states._encode(s, arrays) for i, s in trainer._updater.states.items()}
    numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float))}
    return code, [a.tobytes() for a in arrays], numbers, dict(optimizer._index_update_count)


def assert_refused(trainer, path, words=""):
    before = everything(trainer)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + words):
        trainer.load_states(path)
    assert everything(trainer) == before


def test_states_of_another_optimizer(tmp_path):
    _, _, path = saved(tmp_path, "nadam")
    _, trainer = start(2, "adam")
    assert_refused(trainer, path, "holds the states of Nadam, but the optimizer is Adam")


def test_states_of_other_parameters(tmp_path):
    _, _, path = saved(tmp_path)
    for params, words in (
        (weights([[1.0]], 2), "is for 6 parameters, but there are 1"),
        (weights([[1.0]] * 6, 2), r"number 0 is mlp_dense0_bias \(10,\) there, but w0 \(1,\) here"),
    ):
        assert_refused(Trainer(params, "adam"), path, words)


def test_a_file_that_is_not_there(tmp_path):
    _, trainer = start(1, "adam")
    assert_refused(trainer, tmp_path / "none", "")
    assert_refused(trainer, tmp_path, "")


def as_npy():
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


def as_npz(**arrays):
    """Sealed: what is wrong lies deeper."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    archive.seal(file)
    return file.getvalue()


def with_header(header, *arrays):
    return bytes(archive.sealed(header, arrays))


GOOD = {"format": 1, "optimizer": "Adam", "params": [["w0", [1]]], "numbers": {}}
GOOD.update(schedule={}, counts=[], states=[])
WRONG = {
    "empty": b"",
    "random": np.random.RandomState(0).bytes(3000),
    "zip magic": b"PK\x03\x04" + np.random.RandomState(1).bytes(300),
    "pickle": pickle.dumps({"states": [1, 2]}),
    "stock states": pickle.dumps(({}, mx.optimizer.Adam())),
    "text": b"format: 1\n",
    "array": as_npy(),
    "no header": as_npz(a=np.zeros(3)),
    "header no JSON": as_npz(header=np.zeros(5, "uint8")),
    "a list": with_header([1]),
    "another format": with_header({**GOOD, "format": 2}),
    "lacks states": with_header({k: v for k, v in GOOD.items() if k != "states"}),
    "lacks params": with_header({k: v for k, v in GOOD.items() if k != "params"}),
    "an array too few": with_header({**GOOD, "states": [[0, [0, 1]]]}),
    "numbers no dict": with_header({**GOOD, "numbers": 5}),
    "counts no pairs": with_header({**GOOD, "counts": [1]}),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_files_are_refused(what, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(WRONG[what])
    params = weights([[1.0]], 1)
    trainer = Trainer(params, "adam")
    give_grads(params, [[1.0]])
    trainer.step(1)
    assert_refused(trainer, path)


class Bomb:
    """Its unpickling leaves a trace."""

    def __reduce__(self):
        return os.mkdir, (os.environ["GLUONPAR_BOMB"],)


@pytest.mark.parametrize("how", ["object array", "object header", "pickle"])
def test_nothing_is_unpickled(how, tmp_path, monkeypatch):
    trace = tmp_path / "exploded"
    monkeypatch.setenv("GLUONPAR_BOMB", str(trace))
    bomb = np.array([Bomb()], dtype=object)
    header = {**GOOD, "states": [[0, 0]]}
    text = np.frombuffer(json.dumps(header).encode(), "uint8")
    path = tmp_path / "file"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        path.write_bytes(
            as_npz(header=text, **{"0": bomb}) if how == "object array" else as_npz(header=bomb)
        )
    trainer = Trainer(weights([[1.0]], 1), "adam")
    assert_refused(trainer, path)
    assert not trace.exists()


def small_file(tmp_path):
    params = weights([[1.0, 2.0]], 1)
    trainer = Trainer(params, "sgd", {"momentum": 0.5})
    give_grads(params, [[1.0]])
    trainer.step(1)
    path = tmp_path / "small"
    trainer.save_states(path)
    return trainer, path


def test_the_file_is_npz_without_pickles(tmp_path):
    _, path = small_file(tmp_path)
    with np.load(path, allow_pickle=False) as found:
        assert {*found.files} == {"header", "0"}
        header = json.loads(found["header"].tobytes())
    assert (header["optimizer"], header["params"]) == ("SGD", [["w0", [2]]])


@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_a_damaged_file_is_refused_wherever_the_damage_is(kind, tmp_path):
    """Every seventh byte, and all of the directory."""
    trainer, path = small_file(tmp_path)
    whole = path.read_bytes()
    places = sorted({*range(0, len(whole), 7), *range(len(whole) - 130, len(whole))})
    for place in places:
        damaged = bytearray(whole)
        if kind == "cut":
            del damaged[place:]
        else:
            damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert_refused(trainer, path, "damaged")


def change(header, path, value):
    """A copy of ``header`` with another value at ``path``."""
    changed = inner = copy.deepcopy(header)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["numbers", "update"], 5, "has update = 5, which is none of SGD"),
        (["numbers", "__class__"], 5, "has __class__ = 5"),
        (["numbers", "lr_scheduler"], 5, "has lr_scheduler = 5"),
        (["numbers", "learning_rate"], 5, "has learning_rate = 5"),
        (["numbers", "aggregate_num"], 1000, "has aggregate_num = 1000"),
        (["numbers", "lazy_update"], 1e300, r"has lazy_update = 1e\+300"),
        (["numbers", "lr"], "0.1", "'0.1' is not what belongs there"),
        (["numbers", "lr"], [0.1], "is not what belongs there"),
        (["counts"], [["0", 1]], "'0' is not what belongs there"),
        (["counts"], [[1, 1]], "there is no parameter number 1"),
        (["counts"], [[0, 1.5]], "1.5 is not what belongs there"),
        (["counts"], [[0, -3]], "parameter 0 was updated -3 times"),
        (["states"], [[-1, 0]], "there is no parameter number -1"),
        (["states"], [[0, [0, 0]]], "KeyError"),
        (
            ["states"],
            [[0, None]],
            r"another state of parameter w0: None, but SGD has \(2,\) float32",
        ),
        (["states"], [[0, [0]]], "another state of parameter w0"),
        (["optimizer"], ["SGD"], "is not what belongs there"),
        (["params", 0, 0], 7, "7 is not what belongs there"),
        (["params", 0, 1], "ab", "'a' is not what belongs there"),
    ],
)
def test_a_header_with_another_value_is_refused_by_name(place, value, words, tmp_path):
    trainer, path = small_file(tmp_path)
    header, arrays = archive.read(path.read_bytes())
    path.write_bytes(with_header(change(header, place, value), *arrays))
    assert_refused(trainer, path, words)


@pytest.mark.parametrize("other", [np.zeros(3, "f4"), np.zeros(2, "f8"), np.zeros((2, 1), "f4")])
def test_a_state_of_another_shape_or_dtype_is_refused(other, tmp_path):
    trainer, path = small_file(tmp_path)
    header, _ = archive.read(path.read_bytes())
    path.write_bytes(with_header(header, other))
    assert_refused(trainer, path, "another state of parameter w0")


def test_one_array_does_not_become_many_states(tmp_path):
    """A header of some kilobytes would be gigabytes of states."""
    trainer, path = small_file(tmp_path)
    header, _ = archive.read(path.read_bytes())
    header["states"] = [[0, [0] * 10_000]]
    path.write_bytes(with_header(header, np.zeros(1 << 20, "f4")))
    assert_refused(trainer, path, "KeyError")


def test_how_many_are_updated_at_once_is_no_state(tmp_path):
    _, path = small_file(tmp_path)
    header, _ = archive.read(path.read_bytes())
    assert "aggregate_num" not in header["numbers"] and header["numbers"]["momentum"] == 0.5


# what cannot be saved


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_old_file(call, tmp_path, monkeypatch):
    net, trainer, path = saved(tmp_path)
    old = path.read_bytes()
    runs.train(net, trainer, runs.batches(), contexts(2))

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, refuse)
        with pytest.raises(OSError, match="No space left"):
            trainer.save_states(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["states"]
    trainer.load_states(path)


def test_a_folder_that_is_not_there(tmp_path):
    _, trainer = start(1, "adam")
    with pytest.raises(FileNotFoundError):
        trainer.save_states(tmp_path / "none" / "states")


FULL = """
import resource, signal, sys
import gluonpar, mxnet as mx
from gluonpar.gluon.trainer import Trainer
w = mx.gluon.Parameter("w", shape=(1000,))
w.initialize()
trainer = Trainer([w], "sgd", {"momentum": 0.5})
with mx.autograd.record():
    loss = w.data().sum()
loss.backward()
trainer.step(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    trainer.save_states(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error.strerror)
"""


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "states"
    path.write_bytes(b"old")
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=600
    )
    assert (process.stdout, process.returncode) == ("OSError File too large\n", 0), process.stderr
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["states"]
