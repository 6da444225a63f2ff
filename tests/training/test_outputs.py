"""What follows each epoch: early stopping, the callback, and the plot."""

import sys

import pytest

import gluonpar
from gluonpar.training import Configuration, Console, Epoch, History, Run
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
    assert all((tmp_path / f"lenet-epoch-0002.{kind}").exists() for kind in ("params", "npz"))


def test_what_was_written_is_printed_once_at_the_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = {"plot": str(tmp_path / "a.png"), "save_dir": str(tmp_path)}
    gluonpar.train(2, **{**SMALL, "num_epochs": 2}, **options)
    out = capsys.readouterr().out.splitlines()
    [line] = [line for line in out if line.startswith("saved: ")]
    assert line == out[-1]
    assert line == f"saved: {tmp_path}, {tmp_path / 'a.png'}"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_without_a_path_is_a_figure_that_a_notebook_shows():
    pytest.importorskip("matplotlib")
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    history = train(num_epochs=2)
    figure = history.plot()
    shown = figure.axes[0].lines[0].get_ydata().tolist()
    assert shown == [epoch.loss for epoch in history.epochs]
    formats, _ = shell().display_formatter.format(figure)
    assert formats["image/png"]


def test_a_plot_has_the_accuracy_that_early_stopping_goes_by():
    pytest.importorskip("matplotlib")
    epochs = [Epoch(i, 1, 1, i / 10, 1, 0.2, (None, 0.4, 0.3)[i]) for i in range(3)]
    figure = History([], epochs).plot()
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[1].lines}
    assert lines == {"test": [[0, 0], [1, 0.1], [2, 0.2]], "validation": [[1, 0.4], [2, 0.3]]}
    assert figure.axes[1].get_legend() is not None
    assert History([], epochs[:1]).plot().axes[1].get_legend() is None


def test_without_matplotlib_a_plot_is_refused_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ValueError, match="plot.*pip install matplotlib"):
        train(plot="never-made.png")


def test_histories_are_compared_as_objects():
    one, other = train(num_epochs=1), train(num_epochs=1)
    assert one == one and one != other and one != "a history"
