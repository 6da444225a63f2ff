"""Time candidates in turns, and run a benchmark from its command line.

A machine's speed changes with time (heat, other programs). So candidates take turns: each round
takes one sample of every candidate, in an order that changes from round to round.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Collection, Iterable, Iterator, Sequence, TypeVar

import mxnet as mx
import numpy as np

from gluonpar.install import driver, entry
from gluonpar.install.entry import BAD_REQUEST, BROKEN_PIPE, INTERRUPTED
from gluonpar.install.version import __version__
from gluonpar.runtime import devices, threads
from gluonpar.training.console import Console
from gluonpar.training.history import check_plot

MEASURED, WRONG = 0, 1
EXIT_CODES = {
    MEASURED: "measured",
    WRONG: "some value was wrong; a line says which",
    BAD_REQUEST: "the request cannot be met; a line says why",
    INTERRUPTED: "interrupted (Ctrl-C); what was measured is kept",
    BROKEN_PIPE: "nobody reads the output any more, as after | head -1",
}

Progress = Callable[[Iterable[int]], Iterable[int]]
T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A function to be timed, under a name.

    A sample is the time of ``run()``, ``calls`` times one after the other, and then ``wait()``,
    which returns when everything that ``run`` started has finished: MXNet's operators return when
    they are queued. ``prepare()`` is called before each sample and not timed.
    """

    name: str
    run: Callable[[], Any]
    wait: Callable[[], Any] = lambda: None
    prepare: Callable[[], Any] = lambda: None
    calls: int = 1

    def sample(self) -> float:
        """Prepare, run and wait; return the seconds of the last two, per call."""
        self.prepare()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.run()
        self.wait()
        return (time.perf_counter() - start) / self.calls


@dataclass(frozen=True)
class Samples:
    """One candidate's measurements, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return float(np.median(self.values))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile."""
        return tuple(np.percentile(self.values, (25, 75)).tolist())

    @property
    def spread(self) -> float:
        """The interquartile range."""
        return self.quartiles[1] - self.quartiles[0]

    def as_dict(self) -> dict[str, Any]:
        """Return times in seconds for JSON."""
        samples = {"quartiles_seconds": list(self.quartiles), "seconds": list(self.values)}
        return {"median_seconds": self.median, **samples}


def order(num_candidates: int, round_: int) -> list[int]:
    """Return the order in which the candidates run in this round.

    Rounds are the rows of a Williams design ("Experimental designs balanced for the estimation of
    residual effects of treatments", 1949): over 2n rounds, or n if n is even, each of n candidates
    has every place equally often and follows within a round every other one equally often.

    >>> [order(3, i) for i in range(6)]
    [[0, 1, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 2, 1], [1, 0, 2]]
    """
    n = num_candidates
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]  # 0, 1, -1, 2, -2, ...
    row = [(i + round_) % n for i in zigzag]
    return row[::-1] if round_ // n % 2 else row


def turns(
    candidates: Sequence[T], rounds: int, warmup: int = 0, progress: Progress = iter
) -> Iterator[tuple[T, bool]]:
    """Yield each candidate once per round, and whether the sample counts: not if it warms up.

    ``progress`` may wrap the iteration over all rounds, as ``tqdm`` does. Raises ValueError for
    fewer than one round or a negative ``warmup``.
    """
    if rounds < 1 or warmup < 0:
        must = "rounds must be at least 1 and warmup at least 0"
        raise ValueError(f"{must}, got rounds={rounds}, warmup={warmup}")
    for round_ in progress(range(-warmup, rounds)) if candidates else ():
        for i in order(len(candidates), round_):
            yield candidates[i], round_ >= 0


def interleaved(
    candidates: Sequence[Candidate], rounds: int, warmup: int = 0, progress: Progress = iter
) -> dict[str, Samples]:
    """Time all candidates in :func:`turns`; return their samples in seconds, by name.

    Raises ValueError also without candidates and for two of the same name.
    """
    names = [candidate.name for candidate in candidates]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"candidates must have different names, and be at least one; got {names}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # else it would run in some of the samples
    try:
        for candidate, counts in turns(candidates, rounds, warmup, progress):
            sample = candidate.sample()
            if counts:
                seconds[candidate.name].append(sample)
    finally:
        gc.enable()
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def shares(items: Sequence[T], deadline: float) -> Iterator[tuple[T, float]]:
    """Yield each item and until when it may take: an equal share of what is left for the others.

    Both times are those of ``time.monotonic()``.
    """
    for i, item in enumerate(items):
        now = time.monotonic()
        yield item, now + max(0.0, deadline - now) / (len(items) - i)


def until(deadline: float, each_round: Callable[[], object] = lambda: None) -> Progress:
    """Return a wrapper for :func:`turns` that ends at ``deadline``, but after one round at least.

    ``each_round`` is called before each round.
    """

    def progress(rounds: Iterable[int]) -> Iterator[int]:
        for round_ in rounds:
            each_round()
            yield round_
            if round_ >= 0 and time.monotonic() > deadline:
                return

    return progress


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, GPUs, versions, date; for JSON."""
    try:
        gpus = [str(gpu) for gpu in driver.gpus()]
    except (driver.DriverMissing, driver.DriverError):
        gpus = []
    return {
        "processor": _processor(),
        "cores": threads.cores(),
        "gpus": gpus,
        "python": platform.python_version(),
        "mxnet": mx.__version__,
        "numpy": np.__version__,
        "gluonpar": __version__,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """Return the processor's name, or its architecture if it has none."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as file:
        found = re.search(r"^model name\s*: (.*)", file.read(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.machine()


class BenchmarkParser(argparse.ArgumentParser):
    """A parser with the options of all benchmarks; --plot and --device only if asked for."""

    def __init__(
        self,
        description: str,
        plot_help: str = "",
        on_devices: bool = True,
        prog: str | None = None,
        examples: str = "",
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=entry.epilog(examples, EXIT_CODES),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--version", action="version", version=f"gluonpar {__version__}")
        self.add_argument("--json", metavar="FILE", help="write all samples to this file")
        if on_devices:
            help_ = "gpu: GPUs only; cpu: CPU devices; auto: CPU devices if there is no GPU"
            self.add("--device", "auto", help_, choices=devices.KINDS)
        if plot_help:
            self.add_argument("--plot", metavar="FILE.png", help=plot_help)
        self.set_defaults(plot=None)

    def add(self, name: str, default: Any, help_: str, **more: Any) -> None:
        """Add an option whose help ends with its default."""
        self.add_argument(name, default=default, help=f"{help_} (default: %(default)s)", **more)

    def error(self, message: str) -> None:
        """Exit with one line."""
        self.exit(BAD_REQUEST, f"{self.prog}: error: {message}\n")


class Record:
    """The results so far, rows with ``as_dict()``, and what --json keeps beside them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.machine = options, machine()
        self.rows: list[Any] = []
        self.more: dict[str, Any] = {}

    def header(self, console: Console, rows: dict[str, str]) -> None:
        """Print what the figures depend on: versions, machine, date, and ``rows``."""
        where = {"machine": processor(self.machine), "date": self.machine["date"]}
        console.header(__version__, {**where, **rows})

    def write(self) -> None:
        """Write everything so far to the --json file; ValueError if that is not possible."""
        path = self.options.json
        if not path:
            return
        content = {"machine": self.machine, "arguments": vars(self.options), **self.more}
        content["rows"] = [row.as_dict() for row in self.rows]
        try:
            Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from error


def conduct(
    parser: BenchmarkParser,
    argv: Sequence[str] | None,
    prepare: Callable[[argparse.Namespace], T],
    measure: Callable[[T, Console, Record], list[str]],
    plot: Callable[[argparse.Namespace, list[Any]], None] | None = None,
) -> int:
    """Parse ``argv``, prepare, measure and plot; return the exit code.

    A ValueError of ``prepare`` is an error of the command line. ``measure`` extends the record's
    rows and returns complaints, one line each. Rows measured before Ctrl-C or an error are plotted.
    """
    return entry.run(parser.prog, lambda: _conduct(parser, argv, prepare, measure, plot))


def _conduct(parser, argv, prepare, measure, plot) -> int:
    options = parser.parse_args(argv)
    console, record = Console(), Record(options)
    try:
        try:
            if options.plot:
                check_plot(options.plot)
            prepared = prepare(options)
            record.write()
        except ValueError as error:
            parser.error(str(error))
        complaints = measure(prepared, console, record)
    except KeyboardInterrupt:
        console.notice(f"\n{parser.prog}: interrupted; {len(record.rows)} rows were measured")
        return INTERRUPTED
    finally:
        if options.plot and record.rows:
            try:
                plot(options, record.rows)
            except OSError as error:
                parser.error(f"cannot write {options.plot}: {error.strerror}")
    for complaint in complaints:
        console.notice(f"{parser.prog}: {complaint}")
    return WRONG if complaints else MEASURED


def one_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type for comma-separated names out of ``known``, without repetitions."""

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"got {name!r}; choose from {', '.join(known)}")
        return found

    return names


def at_least(minimum: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Return an argparse type for a finite number that is not below ``minimum``."""

    def number(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if minimum <= value < float("inf"):
                return value
        raise argparse.ArgumentTypeError(f"must be a number of at least {minimum}, got {text!r}")

    return number


def integers(text: str) -> list[int]:
    """Convert comma-separated integers of at least 1, without repetitions; an argparse type."""
    return list(dict.fromkeys(at_least(1)(part) for part in text.split(",")))


def processor(machine: dict[str, Any]) -> str:
    """Return one line about :func:`machine`."""
    gpus = "".join(f"; {gpu}" for gpu in machine["gpus"])
    return f"{machine['processor']}, {machine['cores']} cores usable{gpus}"


def columns(cells: Sequence[Any], widths: Sequence[int]) -> str:
    """Return a table's line: right-justified cells, left-justified where the width is negative."""
    return " ".join(f"{c!s:{'<' if w < 0 else '>'}{abs(w)}}" for c, w in zip(cells, widths))


def progress_bar(title: str) -> Progress:
    """Return ``tqdm`` as a wrapper for :func:`turns`, shown on a terminal only."""
    from tqdm import tqdm

    return functools.partial(tqdm, desc=title, leave=False, disable=None)
