"""Console: the lines of a run, and its progress bar."""

import io

import mxnet as mx
import pytest

from gluonpar.training import Console, Epoch, History

CTX = [mx.cpu(0), mx.cpu(1)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def console():
    return Console(io.StringIO(), io.StringIO())


def test_the_last_line_has_the_last_accuracy_and_the_mean_time(console):
    epochs = [Epoch(i, seconds, 1, i / 4, 1) for i, seconds in enumerate((1, 2, 6), 1)]
    console.result(History(CTX, epochs))
    assert console.out.getvalue() == "test acc: 0.75, 3.0 sec/epoch on [cpu(0), cpu(1)]\n"


def run_through(console):
    seen = []
    for batch in console.batches(iter("abc"), total=3, batch_size=10, epoch=7):
        seen.append(batch)
        console.progress(0.5)
        console.line(batch)
    return seen


def test_on_a_terminal_there_is_a_bar_on_err_only():
    console = Console(io.StringIO(), Terminal())
    assert run_through(console) == ["a", "b", "c"]
    assert "epoch 7" in console.err.getvalue()
    assert "/30" in console.err.getvalue() and " images/s, loss 0.500]" in console.err.getvalue()
    assert console.out.getvalue() == "a\nb\nc\n"


def test_on_a_dumb_terminal_there_is_none(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(io.StringIO(), Terminal())
    run_through(console)
    with console.evaluating(3, 10000):
        pass
    assert console.err.getvalue() == ""


def test_an_evaluation_is_announced_on_a_terminal_and_then_cleared(console):
    terminal = Console(io.StringIO(), Terminal())
    with terminal.evaluating(3, 10000), console.evaluating(3, 10000):
        during = terminal.err.getvalue()
        assert "epoch 3" in during and "10000 images" in during
    assert not terminal.err.getvalue().rsplit("\r", 2)[1].strip()
    assert terminal.out.getvalue() + console.out.getvalue() + console.err.getvalue() == ""


def test_the_bar_of_a_resumed_epoch_begins_with_the_batches_done():
    console = Console(io.StringIO(), Terminal())
    assert list(console.batches(iter("bc"), total=3, batch_size=10, epoch=7, done=1)) == ["b", "c"]
    assert "10/30" in console.err.getvalue().split("\r")[1]


def test_lines_are_flushed_and_what_a_stream_cannot_encode_is_escaped():
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=name) for name in ("ascii", "utf-8"))
    console = Console(out, err)
    console.line("/\u00e9\udcff")
    console.notice("/\u00e9\udcff")
    assert out.buffer.getvalue() == b"/\\xe9\\udcff\n"
    assert err.buffer.getvalue() == "/\u00e9\\udcff\n".encode()
