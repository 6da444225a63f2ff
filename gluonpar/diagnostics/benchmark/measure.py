"""How every benchmark of this project measures: candidates take turns, and every sample waits.

Candidates that run one after another meet different machines: a warm or throttled processor, a
neighbour's job. So they are interleaved, one sample each a round, and the order changes from
round to round. Reported is the median, with the interquartile range as its spread.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import platform
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np

from gluonpar.runtime import driver, threads
from gluonpar.runtime.version import __version__


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Candidate:
    """Something to be timed under a name.

    A sample is the time of ``run()`` and then ``wait()``, which must return only when all that
    ``run`` started is done: MXNet's operators return when they are queued. ``prepare()`` comes
    before each sample and is not timed.
    """

    name: str
    run: Callable[[], Any]
    wait: Callable[[], Any] = _nothing
    prepare: Callable[[], Any] = _nothing


@dataclass(frozen=True)
class Samples:
    """One candidate's times, in the order of the rounds.

    >>> samples = Samples((4.0, 1.0, 2.0, 3.0, 100.0))
    >>> samples.median, samples.spread
    (3.0, 2.0)
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one, in seconds."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the samples is below the first, a quarter above the second."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """The interquartile range in seconds: the middle half of the samples lies within it."""
        low, high = self.quartiles
        return high - low


def order(num_candidates: int, round_: int) -> list[int]:
    """Who runs first, second, ... in this round.

    Rounds are the rows of a Williams design ("Experimental designs balanced for the estimation of
    residual effects of treatments", 1949): over 2n rounds, or n if n is even, each of n candidates
    has every place equally often and follows within a round every other one equally often. Merely
    rotating A B C would keep B behind A in all rounds but one.

    >>> [order(3, i) for i in range(6)]
    [[0, 1, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 2, 1], [1, 0, 2]]
    """
    n = num_candidates
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]  # 0, 1, -1, 2, -2, ...
    row = [(i + round_) % n for i in zigzag]
    return row[::-1] if round_ // n % 2 else row


def interleaved(
    candidates: Sequence[Candidate],
    rounds: int,
    warmup: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[str, Samples]:
    """Time all candidates in turns; their samples by name.

    ``warmup`` rounds come first and are thrown away. ``progress`` may wrap the iteration over all
    rounds, as ``tqdm`` does. ValueError for fewer than one round, a negative ``warmup``, no
    candidate, or two of one name.
    """
    names = [candidate.name for candidate in candidates]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"candidates {names}: give at least one, and each a name of its own")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds={rounds}, warmup={warmup}; need rounds >= 1 and warmup >= 0")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        for round_ in progress(range(-warmup, rounds)):
            for i in order(len(names), round_):
                sample = _timed(candidates[i])
                if round_ >= 0:
                    seconds[names[i]].append(sample)
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def _timed(candidate: Candidate) -> float:
    candidate.prepare()
    start = time.perf_counter()
    candidate.run()
    candidate.wait()
    return time.perf_counter() - start


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector would run in whoever's sample happens to fill its quota."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores usable, GPUs, versions, date; JSON takes it."""
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


def _processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The processor's name; only its architecture where Linux does not tell the name."""
    with contextlib.suppress(OSError), open(cpuinfo, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def write_json(path: str, content: Any) -> None:
    """Write ``content`` as JSON; ValueError, with the path and the reason, if that cannot be."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
