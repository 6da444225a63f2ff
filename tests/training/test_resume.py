"""A resumed run ends with the same bits as one that never stopped, whatever stopped it."""

import csv
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gluonpar.training import Configuration, Console, ResumeError, Run, command_line, workloads
from tests.support.checkpoint_files import set_in_header

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_lenet.py"
KILLS = int(os.environ.get("GLUONPAR_KILLS", "3"))
SMALL = {"dataset": "synthetic", "device": "cpu", "batch_size": 16, "limit": 90, "num_epochs": 2}


@pytest.fixture(autouse=True, scope="module")
def narrow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads.ResNet18Workload, "width", 2)
        yield


def run(**more):
    return Run(Configuration(**{**SMALL, "num_gpus": 2, **more}), Console())


def bits(history):
    return [param.asnumpy().tobytes() for param in history.params]


def figures(history):
    return [(epoch.epoch, epoch.loss, epoch.test_accuracy, epoch.lr) for epoch in history.epochs]


@pytest.fixture(scope="module", params=["lenet", "resnet18"])
def whole(request, tmp_path_factory):
    """A run that was never stopped: options, history, and the folder with all its checkpoints."""
    folder, options = tmp_path_factory.mktemp("whole"), {"model": request.param}
    history = run(**options, save_dir=str(folder), save_every=2, keep=99).train()
    return options, history, folder


def checkpoint(whole, place):
    options, _, folder = whole
    return str(folder / f"{options['model']}-epoch-{place}.npz")


RULES = [{"optimizer": "adam"}, {"momentum": 0.5, "wd": 0.125}, {"optimizer": "nag", "lr": 0.05}]


@pytest.mark.parametrize(
    "rule", [pytest.param(RULES[0], marks=pytest.mark.slow), *RULES[1:]], ids=str
)
def test_another_optimizer_trains_resumes_alike_and_is_another_run(rule, tmp_path):
    options, table, lines = {"model": "resnet18", **rule}, tmp_path / "a.csv", tmp_path / "b.jsonl"
    whole = run(**options, history=str(lines)).train()
    assert bits(whole) != bits(run(model="resnet18").train())
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert written == [dataclasses.asdict(epoch) for epoch in whole.epochs] and len(written) == 2
    options.update(save_dir=str(tmp_path), history=str(table))
    stopped = run(**options, num_epochs=1)
    stopped.train()
    ours = stopped.workload.trainer.optimizer
    assert type(ours).__name__.lower() == rule.get("optimizer", "sgd")
    assert (ours.wd, ours.lr) == (rule.get("wd", 0.0), stopped.lr)
    assert "momentum" not in rule or ours.momentum == rule["momentum"]
    with pytest.raises(ResumeError, match="is a checkpoint of another run"):
        run(model="resnet18", save_dir=str(tmp_path), resume="")
    assert bits(run(**options, resume="").train()) == bits(whole)
    with open(table, newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [(int(row["epoch"]), float(row["loss"])) for row in rows] == [
        (epoch.epoch, epoch.loss) for epoch in whole.epochs
    ]


def test_lenet_by_hand_has_the_books_sgd():
    for rule in RULES:
        with pytest.raises(ValueError, match="optimizer must be sgd.* for lenet"):
            run(**rule)


def test_checkpoints_are_saved_every_n_steps_and_after_each_epoch(whole):
    _, _, folder = whole
    batches = ("-batch-000002", "-batch-000004", "")  # of six
    paths = [checkpoint(whole, f"{epoch:04d}{batch}") for epoch in (1, 2) for batch in batches]
    assert sorted(paths) == sorted(map(str, folder.glob("*.npz")))


@pytest.mark.parametrize("place", ["0001-batch-000002", "0001", "0002-batch-000002", "0002"])
def test_on_as_many_devices_resuming_gives_the_same_bits(whole, place):
    options, history, _ = whole
    again = run(**options, resume=checkpoint(whole, place)).train()
    if place != "0002" or options["model"] == "lenet":
        assert figures(again) == figures(history)
    assert bits(again) == bits(history)


@pytest.mark.parametrize("place", ["0001-batch-000004", "0001"])
def test_a_run_resumed_after_the_steps_to_profile_has_no_profile(whole, capsys, place):
    options, history, _ = whole
    again = run(**options, resume=checkpoint(whole, place), profile=True).train()
    assert bits(again) == bits(history)
    assert "profile of" not in capsys.readouterr().out


@pytest.mark.parametrize("k", [1, 3])
def test_on_another_number_of_devices_resuming_is_equal_to_rounding(whole, k):
    options, history, _ = whole
    if options["model"] == "resnet18":
        pytest.skip("batch normalization uses each device's shard")
    again = run(**options, num_gpus=k, resume=checkpoint(whole, "0001-batch-000004")).train()
    for one, other in zip(again.params, history.params):
        one, other = one.asnumpy(), other.asnumpy()
        assert abs(one - other).max() <= 1e-4 * abs(other).max()


def test_more_epochs_go_on_from_the_newest_checkpoint_of_a_finished_run(whole, capsys):
    options, _, folder = whole
    more = run(**options, num_epochs=3, resume=str(folder)).train()
    assert f"resumed: {checkpoint(whole, '0002')}, " in capsys.readouterr().out
    never_stopped = run(**options, num_epochs=3).train()
    assert bits(more) == bits(never_stopped)
    assert figures(more) == figures(never_stopped)


def test_the_last_n_are_kept(tmp_path):
    run(save_dir=str(tmp_path), save_every=1, keep=2).train()
    names = sorted(path.name for path in tmp_path.glob("*.npz"))
    assert names == ["lenet-epoch-0002-batch-000005.npz", "lenet-epoch-0002.npz"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 32}, "batch_size was 16 and is now 32"),
        ({"seed": 7}, "seed was 0 and is now 7"),
        ({"limit": 80}, "limit was 90 and is now 80"),
        ({"early_stop": 2}, "early_stop was None and is now True"),  # other images are held out
    ],
)
def test_another_configuration_is_refused_by_name(whole, change, words):
    options, _, folder = whole
    with pytest.raises(ResumeError, match=f"another run: {words}"):
        run(**{**options, **change}, resume=str(folder)).train()


def test_another_learning_rate_is_used_and_printed(whole, capsys):
    options, history, _ = whole
    again = run(**options, lr=0.05, resume=checkpoint(whole, "0001")).train()
    now, was = again.epochs[-1].lr, history.epochs[-1].lr
    assert now == 0.05
    err = capsys.readouterr().err
    assert f"lr is {now:g} from here on" in err and f"it was {was:g}" in err
    assert bits(again) != bits(history)


def test_another_models_checkpoints_cannot_be_resumed(whole):
    options, _, folder = whole
    other = {"lenet": "resnet18", "resnet18": "lenet"}[options["model"]]
    with pytest.raises(ResumeError, match=f"no checkpoint of {other}"):
        run(model=other, resume=str(folder)).train()
    file = checkpoint(whole, "0002")
    with pytest.raises(ResumeError, match=Path(file).name):
        run(model=other, resume=file).train()


def test_two_runs_are_not_mixed_in_one_folder(tmp_path):
    run(save_dir=str(tmp_path)).train()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ResumeError, match="lenet-epoch-0002.npz .*resume it.*save_dir"):
        run(save_dir=str(tmp_path)).train()
    assert sorted(tmp_path.iterdir()) == before


def test_without_a_checkpoint_bare_resume_starts_at_the_beginning(tmp_path):
    assert bits(run(save_dir=str(tmp_path), resume="").train()) == bits(run().train())


def start(*arguments, wrapper=()):
    """Start the script; it is killed after four minutes."""
    common = ("--dataset", "synthetic", "--device", "cpu", "--num-gpus", "2")
    common += ("--batch-size", "8", "--log-interval", "1")
    command = [*wrapper, sys.executable, SCRIPT, *common, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    timer = threading.Timer(240, process.kill)
    timer.daemon = True
    timer.start()
    return process


def after_batches(process, number):
    """Read what the process prints until it has trained on ``number`` batches."""
    for line in process.stdout:
        number -= "batch " in line and "loss" in line
        if number == 0:
            return
    raise AssertionError(f"it ended early: {process.stderr.read()}")


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing(tmp_path):
    chance = random.Random(KILLS)
    limit = str(8 * 14 * max(3, KILLS))  # more steps in three epochs than before all kills
    arguments = ("--limit", limit, "--epochs", "3", "--save-every", "10")
    out, err = start(*arguments, "--save-dir", str(tmp_path / "whole")).communicate()
    assert "test acc: " in out, err
    arguments += ("--save-dir", str(tmp_path / "killed"), "--resume")
    known = set()
    for _ in range(KILLS):
        process = start(*arguments)
        after_batches(process, chance.randint(1, 25))
        threading.Event().wait(chance.random() * 0.01)  # anywhere within a step or a file
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        saved = {path.name for path in (tmp_path / "killed").glob("*.npz")}
        assert saved or not known
        known |= saved
    out, err = start(*arguments).communicate()
    assert "resumed: " in out and "test acc: " in out, err
    name = "lenet-epoch-0003.params"
    one, other = (tmp_path / folder / name for folder in ("whole", "killed"))
    assert one.read_bytes() == other.read_bytes()
    assert not list((tmp_path / "killed").glob(".lenet-*"))
    assert len(list((tmp_path / "killed").glob("*.npz"))) == 3


THREE_EPOCHS = ("--limit", "240", "--epochs", "3", "--save-dir")


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """The parameters' file of a run of three epochs by the script."""
    folder = tmp_path_factory.mktemp("whole")
    out, err = start(*THREE_EPOCHS, str(folder)).communicate()
    assert "test acc: " in out, err
    return (folder / "lenet-epoch-0003.params").read_bytes()


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_with_its_code_and_the_checkpoint_to_resume(
    number, code, says, tmp_path, never_stopped
):
    """After SIGTERM it is of the last step, after Ctrl-C of the last epoch."""
    arguments = (*THREE_EPOCHS, str(tmp_path))
    process = start(*arguments)
    after_batches(process, 37)
    process.send_signal(number)
    _, err = process.communicate()
    newest = max(map(str, tmp_path.glob("*.npz")))
    assert (process.returncode, "batch" in newest) == (code, number == signal.SIGTERM), err
    assert err.strip() == f"train_lenet.py: {says}; --resume continues from {newest}"
    assert {path.suffix for path in tmp_path.iterdir()} == {".params", ".npz"}
    out, _ = start(*arguments, "--resume").communicate()
    assert f"resumed: {newest}, epoch " in out
    assert (tmp_path / "lenet-epoch-0003.params").read_bytes() == never_stopped


@pytest.mark.slow
def test_sigterm_without_a_folder_ends_with_143():
    process = start("--limit", "240", "--epochs", "1000")
    after_batches(process, 2)
    process.terminate()
    _, err = process.communicate()
    assert process.returncode == 143
    assert "ended by SIGTERM; nothing was saved" in err


@pytest.mark.slow
def test_training_goes_on_when_the_disk_is_full(tmp_path):
    arguments = ("--limit", "80", "--save-dir", str(tmp_path), "--save-every", "4", "--resume")
    start(*arguments, "--epochs", "1").communicate()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "lenet-epoch-0001.npz" in before

    process = start(*arguments, "--epochs", "2", wrapper=("prlimit", "--fsize=100000"))
    out, err = process.communicate()
    assert process.returncode == 4
    assert "epoch 2, time" in out
    for name in (
        "lenet-epoch-0002-batch-000002.npz",
        "lenet-epoch-0002.params",
        "lenet-epoch-0002.npz",
    ):
        assert re.search(f"error: .*{name} was not written", err), (name, err)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("run", None, "'NoneType'"),
        ("epoch", "two", "'two'"),
        ("history", [{"epoch": 1}], "missing 4 required"),
    ],
)
def test_notes_that_are_not_a_runs_are_refused_by_name(whole, tmp_path, name, value, words):
    """A checkpoint of another program, or one made by hand."""
    options, _, _ = whole
    path = shutil.copy(checkpoint(whole, "0001"), tmp_path / "a.npz")
    set_in_header(path, ["notes", name], value)
    with pytest.raises(ResumeError, match=f"a.npz cannot be loaded: .*{words}"):
        run(**options, resume=str(path)).train()


@pytest.mark.parametrize("how", ["cut", "flipped", "foreign"])
def test_a_damaged_checkpoint_is_one_line_and_exit_2(whole, tmp_path, capsys, how):
    path = tmp_path / "a.npz"
    good = bytearray(Path(checkpoint(whole, "0001")).read_bytes())
    flipped = good[:]
    flipped[5000] ^= 1
    path.write_bytes({"cut": good[:-100], "flipped": flipped, "foreign": b"\x80\x04N."}[how])
    options = ["--dataset", "synthetic", "--device", "cpu", "--limit", "90", "--resume", str(path)]
    assert command_line.main([*options, "--model", whole[0]["model"]]) == 2
    err = capsys.readouterr().err
    assert re.search(r"error: .*a.npz .*\n$", err), err
    assert "Traceback" not in err
