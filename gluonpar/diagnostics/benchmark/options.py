"""What the benchmarks' command lines have in common: options, record, exit code, columns."""

from __future__ import annotations

import argparse
import contextlib
import functools
from typing import Any, Callable, Collection, Iterator, Sequence

from mxnet.base import MXNetError

from gluonpar.diagnostics.benchmark import measure
from gluonpar.runtime import devices
from gluonpar.runtime.version import __version__
from gluonpar.training import command_line
from gluonpar.training import plot as training_plot
from gluonpar.training.console import Console

MEASURED, WRONG = 0, 1


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a request; has the options that all benchmarks have.

    Without ``on_devices`` it has no --device.
    """

    def __init__(self, description: str, plot_help: str, on_devices: bool = True) -> None:
        super().__init__(description=description)
        self.add_argument("--version", action="version", version=f"gluonpar {__version__}")
        if on_devices:
            help_ = "GPUs or nothing; CPU devices; or CPU devices if there is no GPU at all"
            self.add("--device", "auto", help_, choices=devices.KINDS)
        self.add_argument("--json", metavar="FILE", help="write all samples to this file")
        self.add_argument("--plot", metavar="FILE.png", help=plot_help)

    def add(self, name: str, default: Any, help_: str, **more: Any) -> None:
        """An option whose help ends with its default."""
        self.add_argument(name, default=default, help=f"{help_} (default: %(default)s)", **more)

    def error(self, message: str) -> None:
        """Exit with one line."""
        self.exit(command_line.BAD_REQUEST, f"{self.prog}: error: {message}\n")

    @contextlib.contextmanager
    def requests(self) -> Iterator[None]:
        """Exit with one line if a ValueError is raised within."""
        try:
            yield
        except ValueError as error:
            self.error(str(error))


class Record:
    """What a run has measured so far: its rows, and for JSON where and what was asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Any] = []
        self.more: dict[str, Any] = {}

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """See :func:`measure.machine`."""
        return measure.machine()

    def keep(self) -> None:
        """Write what there is to --json, so that it is there whatever comes."""
        if self.options.json:
            content = {"machine": self.machine, "arguments": vars(self.options), **self.more}
            content["rows"] = [row.as_dict() for row in self.rows]
            measure.write_json(self.options.json, content)


def conduct(
    made: Parser,
    argv: Sequence[str] | None,
    run: Callable[[Parser, Console, Record], list[str]],
    plot: Callable[[argparse.Namespace, list[Any]], None],
) -> int:
    """Let ``run`` measure what ``argv`` asks for; the exit code.

    It extends the record's rows and returns what was wrong, a line each. What has been measured is
    plotted, if that was asked for, even if the rest failed or Ctrl-C came.
    """
    options = made.parse_args(argv)
    console, record = Console(), Record(options)
    try:
        with made.requests():
            if options.plot:
                training_plot.check(options.plot)
        wrong = run(made, console, record)
    except (KeyboardInterrupt, MXNetError) as error:
        # Ctrl-C may arrive in a function of ours that MXNet's engine runs, and makes its error.
        if "KeyboardInterrupt" not in repr(error):
            raise
        console.notice(f"\n{made.prog}: interrupted; {len(record.rows)} rows were measured")
        return command_line.INTERRUPTED
    finally:
        if options.plot and record.rows:
            with made.requests():
                _draw(plot, options, record.rows)
    for complaint in wrong:
        console.notice(f"{made.prog}: {complaint}")
    return WRONG if wrong else MEASURED


def _draw(plot: Callable, options: argparse.Namespace, rows: list[Any]) -> None:
    try:
        plot(options, rows)
    except OSError as error:
        raise ValueError(f"plot={options.plot} cannot be written: {error.strerror}") from error


def among(known: Collection[str]) -> Callable[[str], list[str]]:
    """An argparse type for comma-separated names out of ``known``; each counts once.

    >>> among(["ring", "star"])("star, ring,star")
    ['star', 'ring']
    """

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in found:
            if name not in known:
                there = ", ".join(known)
                raise argparse.ArgumentTypeError(f"there is no {name!r}; there are: {there}")
        return found

    return names


def numbers(text: str) -> list[int]:
    """An argparse type for comma-separated whole numbers; each counts once."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,2,4") from None


def processor(machine: dict[str, Any]) -> str:
    """A header's line on :func:`measure.machine`."""
    gpus = "".join(f"; {gpu}" for gpu in machine["gpus"])
    return f"{machine['processor']}, {machine['cores']} cores usable{gpus}"


def columns(cells: Sequence[Any], widths: Sequence[int]) -> str:
    """The cells side by side: right-justified, or left-justified where the width is negative.

    >>> columns(("ring", 1.5), (-6, 5))
    'ring     1.5'
    """
    return " ".join(f"{c!s:{'<' if w < 0 else '>'}{abs(w)}}" for c, w in zip(cells, widths))


def progress_bar(**more: Any) -> Callable:
    """``tqdm`` on a terminal, gone when it is done."""
    from tqdm import tqdm

    return functools.partial(tqdm, leave=False, disable=None, **more)
