"""The plot of a run, and the files that plots, traces and histories may be written to."""

import sys

import mxnet as mx
import pytest

from gluonpar.training import Epoch, History
from gluonpar.training.history import HISTORY_SUFFIXES, check_file, check_plot


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "lenet.png"
    check_plot(str(path))
    assert not path.exists()
    epochs = [Epoch(1, 10.94, 1.2344, 0.678, 5499.6), Epoch(2, 10.86, 0.9, 0.784, 5525.0)]
    History([mx.cpu(0)], epochs).plot(str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder has a file, and folders that are called like files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_bytes(b"")
    return tmp_path


LONG = "a" * 300


FILES = {
    "a trace": ["absent/x", "file/x", "folder", "/proc/x", "", "/dev/null", LONG],
    "a plot": ["lenet.xyz", "lenet", "absent/x.png", "folder.png", "/proc/x.png", LONG + ".png"],
    "a history": ["history.txt", "history", "absent/history.csv", "folder.json"],
}


@pytest.mark.parametrize(
    ("kind", "path"),
    [(kind, path) for kind, paths in FILES.items() for path in paths],
    ids=lambda value: value[:9],
)
def test_a_file_that_could_not_be_written_is_refused_and_changes_nothing(folder, kind, path):
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=f"cannot write {kind} to .*{path}"):
        if kind == "a plot":
            pytest.importorskip("matplotlib")
            check_plot(path)
        else:
            check_file(path, kind, HISTORY_SUFFIXES if kind == "a history" else ())
    check_file("trace.json", "a trace")
    assert sorted(folder.iterdir()) == before


def test_without_matplotlib_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        check_plot("lenet.png")
