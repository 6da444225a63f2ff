"""Console: the lines of a run, and its progress bar."""

import io

import mxnet as mx

from gluonpar.training import Console, Epoch, History

CTX = [mx.cpu(0), mx.cpu(1)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_last_line_has_the_last_accuracy_and_the_mean_time():
    console = Console(io.StringIO())
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
    assert console.err.getvalue() == ""


def test_the_bar_of_a_resumed_epoch_begins_with_the_batches_done():
    console = Console(io.StringIO(), Terminal())
    assert list(console.batches(iter("bc"), total=3, batch_size=10, epoch=7, done=1)) == ["b", "c"]
    assert "10/30" in console.err.getvalue().split("\r")[1]
