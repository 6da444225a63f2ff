"""Time candidates in turns, and run a benchmark from its command line.

The speed of a machine changes with time (heat, other programs). So candidates take turns: each
round takes one sample of every candidate, in an order that changes from round to round.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import os
import platform
import random
import re
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence, TypeVar

import mxnet as mx
import numpy as np

from gluonpar.install import __version__, driver
from gluonpar.options import Measured, Parser, parse, run
from gluonpar.runtime import threads
from gluonpar.training import Console

Progress = Callable[[Iterable[int]], Iterable[int]]
T = TypeVar("T")
M = TypeVar("M", bound=Measured)


@dataclass(frozen=True)
class Candidate:
    """A function to be timed, under a name.

    A sample is the time of ``calls`` calls of ``run()`` and one of ``wait()``, which returns when
    everything that ``run`` started has finished. It begins when MXNet has nothing left to do.
    """

    name: str
    run: Callable[[], Any]
    wait: Callable[[], Any] = lambda: None
    calls: int = 1

    def sample(self) -> float:
        """Run and wait; return the seconds per call of ``run``."""
        mx.nd.waitall()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.run()
        self.wait()
        return (time.perf_counter() - start) / self.calls


@dataclass(frozen=True)
class Samples:
    """One candidate's measurements, in the order of the rounds."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """The median."""
        return float(np.median(self.values))

    @property
    def quartiles(self) -> list[float]:
        """The lower and the upper quartile."""
        return np.percentile(self.values, (25, 75)).tolist()

    @property
    def spread(self) -> float:
        """The interquartile range."""
        return float(np.diff(self.quartiles)[0])

    def as_dict(self) -> dict[str, Any]:
        """Return the times, in seconds, for JSON."""
        times = {"median_seconds": self.median, "quartiles_seconds": self.quartiles}
        return {**times, "seconds": list(self.values)}


def turns(
    candidates: Sequence[T], rounds: int, warmup: int = 0, progress: Progress = iter
) -> Iterator[tuple[T, bool]]:
    """Yield each candidate once per round, and whether the sample counts: not if it warms up.

    The order of each round is random, and the same in every run. ``progress`` may wrap the
    iteration over all rounds, as ``tqdm`` does.
    """
    for round_ in progress(range(-warmup, rounds)):
        for candidate in random.Random(round_).sample(candidates, len(candidates)):
            yield candidate, round_ >= 0


def interleaved(
    candidates: Sequence[Candidate], rounds: int, warmup: int = 0, progress: Progress = iter
) -> dict[str, Samples]:
    """Time all candidates in :func:`turns`; return their samples in seconds, by name."""
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    gc.collect()
    gc.disable()  # else it would run in some of the samples
    try:
        for candidate, counts in turns(candidates, rounds, warmup, progress):
            sample = candidate.sample()
            if counts:
                seconds[candidate.name].append(sample)
    finally:
        gc.enable()
    return {name: Samples(values) for name, values in seconds.items()}


def machine() -> dict[str, Any]:
    """Return the conditions of a measurement: processor, cores, GPUs, versions, date; for JSON."""
    gpus: list[str] = []
    with contextlib.suppress(driver.DriverError):
        gpus += map(str, driver.gpus())
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
        match = re.search(r"^model name\s*: (.*)", file.read(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.machine()


class Record:
    """The results so far (rows with ``as_dict()``), and what else the --json file will hold."""

    def __init__(self, parser: Parser, options: Measured) -> None:
        self.parser, self.machine = parser, machine()
        self.options: Any = options
        self.rows: list[Any] = []
        self.more: dict[str, Any] = {}

    def header(self, console: Console, rows: dict[str, str]) -> None:
        """Print the conditions of the measurement: versions, machine, date, and ``rows``."""
        gpus = "".join(f"; {gpu}" for gpu in self.machine["gpus"])
        where = f"{self.machine['processor']}, {self.machine['cores']} cores usable{gpus}"
        rows = {"machine": where, "date": self.machine["date"], **rows}
        console.header({name: wrapped(text, len(name) + 2) for name, text in rows.items()})

    def write(self) -> None:
        """Write everything so far to the --json file; exit with one line if that fails."""
        path = self.options.json
        if not path:
            return
        content = {"machine": self.machine, "arguments": vars(self.options), **self.more}
        content["rows"] = [row.as_dict() for row in self.rows]
        try:
            Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self.parser.error(f"cannot write {path}: {error.strerror}")


def conduct(
    kind: type[M],
    argv: Sequence[str] | None,
    prepare: Callable[[M], T],
    measure: Callable[[T, Console, Record], list[str]],
    prog: str | None = None,
) -> int:
    """Parse the options in ``argv``, prepare and measure; return the exit code.

    A ValueError of ``prepare`` is an error of the command line. ``measure`` extends the record's
    rows and returns complaints, one line each.
    """

    def work() -> int:
        options, parser = parse(kind, argv, prog)
        console, record = Console(), Record(parser, options)
        try:
            prepared = prepare(options)
        except (ValueError, MemoryError) as error:
            parser.error(parser.in_options(error))
        record.write()
        complaints = measure(prepared, console, record)
        for complaint in complaints:
            console.notice(f"{parser.prog}: {complaint}")
        if console.failure:
            parser.error(f"cannot print: {console.failure}")
        return 1 if complaints else 0

    return run(prog or "benchmark", work)


def columns(cells: Sequence[Any], widths: Sequence[int]) -> str:
    """Return a table's line: right-justified cells, left-justified where the width is negative."""
    return " ".join(f"{c!s:{'<' if w < 0 else '>'}{abs(w)}}" for c, w in zip(cells, widths))


def wrapped(text: str, start: int = 0) -> str:
    """Return a text in lines of at most 80 columns; the first begins at column ``start``."""
    wrapper = textwrap.TextWrapper(80, " " * start, "  ", break_on_hyphens=False)
    return wrapper.fill(text)[start:]


def progress_bar(title: str) -> Progress:
    """Return ``tqdm`` as a wrapper for :func:`turns`, shown only on a terminal that can erase."""
    from tqdm import tqdm

    disable = True if os.environ.get("TERM") == "dumb" else None  # None: unless on a terminal
    return functools.partial(tqdm, desc=title, leave=False, disable=disable)
