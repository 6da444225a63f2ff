"""What follows each epoch: early stopping, the callback, and the files of the history."""

import csv
import dataclasses
import json
import struct
import sys

import pytest

import gluonpar
from gluonpar.training import Configuration, Console, Epoch, ResumeError, Run
from gluonpar.training.data import dataset
from gluonpar.training.workloads import LeNetWorkload

SMALL = {"dataset": "synthetic", "device": "cpu", "batch_size": 16, "limit": 48, "num_epochs": 6}


def train(**more):
    return gluonpar.train(2, verbose=False, **{**SMALL, **more})


@pytest.fixture
def accuracies(monkeypatch):
    """accuracies(a, b, ...): the runs' accuracies on their validation sets, in this order.

    On the test images it rises with every epoch.
    """

    def plan(*values):
        left, of_test = list(values), iter(range(1, 100))

        def accuracy(workload, images, labels):
            return left.pop(0) if len(labels) == 5 else next(of_test) / 100

        monkeypatch.setattr(LeNetWorkload, "accuracy", accuracy)

    return plan


# Early stopping


@pytest.mark.parametrize(
    ("wait", "values", "num_epochs"),
    [
        (1, (0.3, 0.4, 0.4), 3),  # as good is not better
        (2, (0.3, 0.2, 0.4, 0.3, 0.4), 5),
        (3, (0.5, 0.1, 0.2, 0.3), 4),
        (9, (0.5, 0.1, 0.1, 0.1, 0.1, 0.1), 6),
    ],
)
def test_a_run_stops_after_n_epochs_without_a_better_accuracy(accuracies, wait, values, num_epochs):
    accuracies(*values)
    history = train(early_stop=wait)
    assert [epoch.validation_accuracy for epoch in history.epochs] == [*values[:num_epochs]]
    assert all(epoch.validation_accuracy is None for epoch in train(num_epochs=1).epochs)


def test_the_images_that_early_stopping_holds_out_are_not_trained_on():
    """A run on the other images only is the same run."""
    data = dataset.load("synthetic", limit=48)
    rest, _, _ = data.hold_out(7)
    options = {**SMALL, "num_epochs": 2, "seed": 7}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "load", lambda *_: rest)
        want = gluonpar.train(2, verbose=False, **options)
    got = gluonpar.train(2, verbose=False, **options, early_stop=9)
    assert [epoch.loss for epoch in got.epochs] == [epoch.loss for epoch in want.epochs]
    assert want.epochs[0].loss != train(num_epochs=1, seed=7).epochs[0].loss


def test_a_run_with_another_validation_set_cannot_be_resumed(tmp_path):
    train(save_dir=str(tmp_path), num_epochs=1)
    with pytest.raises(ResumeError, match="early_stop was None and is now True"):
        train(save_dir=str(tmp_path), resume="", early_stop=2)


def test_early_stopping_counts_the_epochs_before_resuming(accuracies, tmp_path, capsys):
    accuracies(0.5, 0.1)
    train(save_dir=str(tmp_path), num_epochs=2, early_stop=3)
    accuracies(0.2, 0.3)
    again = gluonpar.train(2, **SMALL, save_dir=str(tmp_path), resume="", early_stop=3)
    assert [epoch.epoch for epoch in again.epochs] == [1, 2, 3, 4]
    lines = capsys.readouterr().out.splitlines()
    assert any("early stop" in line and "0.5000 of epoch 1" in line for line in lines)
    accuracies()  # a run that has stopped trains no further epoch
    assert len(train(save_dir=str(tmp_path), resume="", early_stop=3).epochs) == 4


# The callback


def test_the_callback_gets_each_epoch_after_its_checkpoint_and_can_end_the_run(tmp_path):
    seen, files = [], []

    def on_epoch(epoch):
        seen.append(epoch)
        files.append({path.name for path in tmp_path.glob("*.npz")})
        return epoch.epoch == 3

    history = train(save_dir=str(tmp_path), keep=9, on_epoch=on_epoch)
    assert seen == history.epochs and [epoch.epoch for epoch in seen] == [1, 2, 3]
    for number, names in enumerate(files, 1):
        assert names == {f"lenet-epoch-{i:04d}.npz" for i in range(1, number + 1)}
    assert len(history.params) == 8


def test_an_exception_of_the_callback_reaches_the_caller_and_what_was_reached_remains(tmp_path):
    def on_epoch(epoch):
        if epoch.epoch == 2:
            raise KeyError("a bug")

    run = Run(Configuration(**SMALL, save_dir=str(tmp_path)), Console(), on_epoch)
    with pytest.raises(KeyError, match="a bug"):
        run.train()
    assert [epoch.epoch for epoch in run.history.epochs] == [1, 2]
    assert run.kept == [str(tmp_path / f"lenet-epoch-000{i}.params") for i in (1, 2)]
    assert (tmp_path / "lenet-epoch-0002.npz").exists()


# Files


def read(path):
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with open(path, newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_the_history_is_complete_after_every_epoch_and_after_resuming(tmp_path, suffix):
    path, lengths = tmp_path / f"history{suffix}", []
    files = {"history": str(path), "save_dir": str(tmp_path / "out")}
    count = lambda epoch: lengths.append(len(read(path)))  # noqa: E731
    train(**files, num_epochs=2, on_epoch=count)
    history = train(**files, num_epochs=3, resume="", on_epoch=count)
    assert lengths == [1, 2, 3]
    assert [Epoch(**row) for row in read(path)] == history.epochs
    names = [field.name for field in dataclasses.fields(Epoch)]
    assert list(read(path)[0]) == names[:-1] and names[-1] == "validation_accuracy"
    assert not list(tmp_path.glob(".*"))


def test_what_was_written_is_printed_once_at_the_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {name: str(tmp_path / f"a.{name}") for name in ("csv", "png")}
    options = {"history": files["csv"], "plot": files["png"], "save_dir": str(tmp_path)}
    gluonpar.train(2, **{**SMALL, "num_epochs": 2}, **options)
    out = capsys.readouterr().out.splitlines()
    [line] = [line for line in out if line.startswith("saved: ")]
    assert line == out[-1]
    assert line == f"saved: {tmp_path}, {files['png']}, {files['csv']}"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_without_a_path_is_a_figure_that_a_notebook_shows():
    pytest.importorskip("matplotlib")
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    history = train(num_epochs=2)
    figure = history.plot()
    assert [axes.lines[0].get_ydata().tolist() for axes in figure.axes][0] == [
        epoch.loss for epoch in history.epochs
    ]
    formats, _ = shell().display_formatter.format(figure)
    assert formats["image/png"]


def test_histories_are_compared_as_objects():
    one, other = train(num_epochs=1), train(num_epochs=1)
    assert one == one and one != other and one != "a history"


@pytest.mark.parametrize(
    ("option", "lacking", "package"),
    [
        ("plot", ["matplotlib.backends.backend_agg"], "matplotlib"),
        ("tensorboard", ["tensorboardX", "torch.utils.tensorboard"], "tensorboardX"),
    ],
)
def test_a_package_that_is_lacking_is_named_before_training(option, lacking, package, monkeypatch):
    for name in lacking:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"{option}.*pip install {package}"):
        train(**{option: "never-made.png"})


# TensorBoard


def scalars(folder):
    """Return (tag, step, value) of all events, and the steps from which earlier ones are purged."""
    from tensorboardX.proto.event_pb2 import Event

    values, purged = [], []
    for path in sorted(folder.glob("*tfevents*")):
        content = path.read_bytes()
        while content:  # a TFRecord: length, its CRC, data, their CRC
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            values += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            purged += [event.step] if event.HasField("session_log") else []
    return values, purged


def test_tensorboards_files_have_every_figure_and_a_resumed_run_goes_on(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install tensorboardX")
    folder = tmp_path / "new" / "run"
    files = {"tensorboard": str(folder), "save_dir": str(tmp_path / "out")}
    train(**files, num_epochs=2)
    history = train(**files, num_epochs=3, resume="")
    written, purged = scalars(folder)
    wanted = [
        (name, epoch.epoch, pytest.approx(getattr(epoch, name), rel=1e-6))
        for epoch in history.epochs
        for name in ("loss", "test_accuracy", "images_per_second", "lr")
    ]
    assert written == wanted
    assert purged == [1, 2, 3]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_note_and_the_new_one_is_there(
    tmp_path, capsys
):
    old, new = (tmp_path / f"lenet-epoch-000{epoch}.npz" for epoch in (1, 2))

    def put_a_folder_in_its_place(epoch):
        if epoch.epoch == 2:
            old.unlink(missing_ok=True)
            old.mkdir()

    options = {**SMALL, "num_epochs": 4, "keep": 2, "save_dir": str(tmp_path)}
    run = Run(Configuration(num_gpus=2, **options), Console(), put_a_folder_in_its_place)
    run.train()
    assert run.lost == []
    notes = [line for line in capsys.readouterr().err.splitlines() if str(old) in line]
    assert notes and "was not removed" in notes[0]
    assert old.is_dir() and not new.exists()
    assert len([*tmp_path.glob("*.npz")]) == 3
