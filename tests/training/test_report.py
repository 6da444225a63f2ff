"""report: the lines of a run, word by word, and its plot."""

import io
import sys

import mxnet as mx
import pytest

from gluonpar.training import console as report

CTX = [mx.cpu(0), mx.cpu(1)]
FIRST = report.Epoch(1, 10.94, 1.2344, 0.678, 5499.6)
SECOND = report.Epoch(2, 10.86, 0.9, 0.784, 5525.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def console():
    return report.Console(io.StringIO(), io.StringIO())


def history():
    return report.History(CTX, [FIRST, SECOND])


def test_an_epochs_line(console):
    console.epoch(FIRST)
    line = "epoch 1, time 10.9 sec, loss 1.234, test acc 0.68, 5500 images/sec\n"
    assert console.out.getvalue() == line


def test_the_last_line_has_the_last_accuracy_and_the_mean_time(console):
    console.result(history())
    assert console.out.getvalue() == "test acc: 0.78, 10.9 sec/epoch on [cpu(0), cpu(1)]\n"


def test_the_mean_time_is_over_all_epochs(console):
    epochs = [report.Epoch(i, seconds, 1, 0.5, 1) for i, seconds in enumerate((1, 2, 6), 1)]
    console.result(report.History(CTX[:1], epochs))
    assert console.out.getvalue() == "test acc: 0.50, 3.0 sec/epoch on [cpu(0)]\n"


def test_the_header_names_versions_then_a_line_a_row(console):
    console.header("9.8.7", {"devices": "two", "batch size": "64"})
    first, *rows = console.out.getvalue().splitlines()
    assert first.startswith(f"gluonpar 9.8.7, mxnet {mx.__version__}, numpy ")
    assert rows == ["devices: two", "batch size: 64"]


def test_notices_go_to_err_and_lines_to_out(console):
    console.notice("chosen")
    console.line("said")
    assert (console.out.getvalue(), console.err.getvalue()) == ("said\n", "chosen\n")


def test_lines_and_notices_are_out_at_once():
    pipes = [io.TextIOWrapper(io.BufferedWriter(io.BytesIO())) for _ in range(2)]
    console = report.Console(*pipes)
    console.line("said")
    console.notice("chosen")
    assert [pipe.buffer.raw.getvalue() for pipe in pipes] == [b"said\n", b"chosen\n"]


def test_a_console_speaks_to_the_process_by_default(capsys):
    console = report.Console()
    console.line("said")
    console.notice("chosen")
    assert capsys.readouterr() == ("said\n", "chosen\n")


def run_through(console):
    seen = []
    for batch in console.batches(iter("abc"), total=3, epoch=7):
        seen.append(batch)
        console.progress(0.5)
        console.line(batch)
    return seen


def test_without_a_terminal_there_is_no_bar(console):
    assert run_through(console) == ["a", "b", "c"]
    assert console.err.getvalue() == ""
    assert console.out.getvalue() == "a\nb\nc\n"


def test_on_a_terminal_there_is_a_bar_on_err_only():
    console = report.Console(io.StringIO(), Terminal())
    assert run_through(console) == ["a", "b", "c"]
    assert "epoch 7" in console.err.getvalue()
    assert "/3" in console.err.getvalue()
    assert console.out.getvalue() == "a\nb\nc\n"


def test_progress_outside_an_epoch_is_harmless(console):
    console.progress(1.0)
    assert console.err.getvalue() == ""


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "lenet.png"
    report.check_plot(str(path))
    assert not path.exists()
    report.plot(history(), str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_trace_may_be_any_file_in_a_folder_that_can_be_written(tmp_path):
    report.check_trace(str(tmp_path / "trace.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent/trace.json", "No such file or directory; give a file in a folder that exists"),
        ("file/trace.json", "Not a directory; give a file in a folder that exists"),
        ("folder", "it is a folder; give a file in it"),
    ],
)
def test_a_trace_that_has_no_place_is_refused(tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=f"cannot write a trace to .*{name}: {why}"):
        report.check_trace(str(tmp_path / name))


def test_a_trace_in_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="cannot write a trace to /proc/trace.json: .* written"):
        report.check_trace("/proc/trace.json")


@pytest.mark.parametrize("path", ["", "/dev/null", "a" * 300])
def test_a_trace_that_could_not_be_renamed_is_refused(path):
    with pytest.raises(ValueError, match=f"cannot write a trace to .*{path}"):
        report.check_trace(path)


@pytest.mark.parametrize("path", ["/proc/lenet.png", "a" * 300 + ".png"])
def test_a_plot_that_cannot_be_written_is_refused(path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=f"cannot plot to {path}: .*; give another file"):
        report.check_plot(path)


def test_what_a_stream_cannot_show_is_shown_as_code():
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=name) for name in ("ascii", "utf-8"))
    console = report.Console(out, err)
    console.line("/\u00e9\udcff")
    console.notice("/\u00e9\udcff")
    assert out.buffer.getvalue() == b"/\\xe9\\udcff\n"
    assert err.buffer.getvalue() == "/\u00e9\\udcff\n".encode()


@pytest.mark.parametrize("name", ["lenet.xyz", "lenet", "lenet.params"])
def test_a_plot_of_another_kind_is_refused(tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=f"cannot plot to .*{name}: its ending must be .*png"):
        report.check_plot(str(tmp_path / name))


@pytest.mark.parametrize("name", ["absent/lenet.png", "folder.png", "file/lenet.png"])
def test_a_plot_that_has_no_place_is_refused(tmp_path, name):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=f"cannot plot to .*{name}: .* a folder that exists"):
        report.check_plot(str(tmp_path / name))


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ValueError, match=r"needs matplotlib .*pip install 'gluonpar\[plot\]'"):
        report.check_plot("lenet.png")
