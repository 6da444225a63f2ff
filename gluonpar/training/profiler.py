"""A profile of some training steps: how long each part takes on each device, and why.

MXNet's profiler records when each operator ran. :class:`Profiler` chooses the steps,
:func:`classify` gives every operator a part of the step, and :class:`Profile` adds the parts up.
Times are microseconds of one clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.runtime import threads
from gluonpar.sharding import as_list

WARM_UP = 5  # steps before the window: the first steps allocate, trace and start threads
NUM_STEPS = 20  # in the window: enough for a mean

DATA, FORWARD, BACKWARD = "data", "forward", "backward"
EXCHANGE, UPDATE, OTHER = "exchange", "update", "other"
FUSED = "exchange + update"  # one operator does both
PARTS = (DATA, FORWARD, BACKWARD, EXCHANGE, UPDATE, FUSED, OTHER)

# Operators whose part their names tell: the first that matches. A segment that was traced has the
# names of its operators, joined.
_BY_NAME = {
    OTHER: r"gluonpar\.(runtime\.threads|heap|all_finite)|Delete\w+|WaitForVar",
    FUSED: r"gluonpar\.allreduce_update",
    UPDATE: r"gluonpar\.update|\w+_update(_phase[12])?",
    EXCHANGE: r"(gluonpar|KVStore).*",
    BACKWARD: r".*_backward_.*",
}
_COPY = re.compile(r"_copy(to(_[CG]PU2[CG]PU)?)?|(Sync)?Copy[CG]PU2[CG]PU")
_SUM = re.compile(
    r"(elemwise|broadcast)_add|add_n|ElementwiseSum|broadcast_(maximum|minimum)|_div_scalar|Cast"
)


class Span(NamedTuple):
    """An operator that ran on a device from ``start`` to ``end``; ``part`` is one of PARTS."""

    name: str
    device: int
    start: float
    end: float
    part: str = ""


class Profiler:
    """Records steps ``warm_up + 1`` to ``warm_up + num_steps`` of a loop over the devices ``ctx``.

    Call :meth:`step` at the end of each step. The window of these steps, which may end earlier with
    the ``with`` block, begins and ends by waiting for all devices. Outside it nothing is recorded
    and nothing costs time.

    MXNet has one profiler per process: nothing else may use it in the window, and its settings are
    not restored. It does not record which threads wait for a processor. Raises ValueError for more
    CPU contexts than processors + 2.
    """

    def __init__(
        self,
        ctx: mx.Context | Sequence[mx.Context],
        warm_up: int = WARM_UP,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self.ctx, self.warm_up, self.num_steps = as_list(ctx), warm_up, num_steps
        self._devices = {process_of(c): i for i, c in enumerate(self.ctx)} if num_steps else {}
        self._num_taken = 0
        self._until_end = contextlib.ExitStack()
        self._window: tuple[float, float] | None = None  # None until it has ended
        self._operators: list[Span] = []  # that began in the window

    def __enter__(self) -> Profiler:
        self._begin_or_end()
        return self

    def __exit__(self, *error: Any) -> None:
        self._until_end.__exit__(*error)

    def step(self) -> None:
        """End a step of the loop; the devices may still be computing it."""
        self._num_taken += 1
        self._begin_or_end()

    def _begin_or_end(self) -> None:
        if self._num_taken == self.warm_up and self.num_steps:
            self._until_end.enter_context(self._recorded())
        if self._num_taken == self.warm_up + self.num_steps:
            self._until_end.close()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the block, which begins and, unless it fails, ends by waiting for all devices."""
        record = {"profile_symbolic": True, "profile_imperative": True}
        # With aggregate_stats MXNet would run one operator at a time.
        omit = ["profile_memory", "profile_api", "continuous_dump", "aggregate_stats"]
        with tempfile.TemporaryDirectory(prefix="gluonpar-") as folder:
            path = pathlib.Path(folder) / "profile.json"
            mx.nd.waitall()
            mx.profiler.set_config(filename=str(path), **record, **dict.fromkeys(omit, False))
            mx.profiler.set_state("run")
            begin = time.time_ns() / 1000  # microseconds of the clock that MXNet's profiler uses
            try:
                yield
                mx.nd.waitall()
            finally:
                self._window = begin, time.time_ns() / 1000
                mx.profiler.set_state("stop")
                mx.profiler.dump()
                # All but a process's first file begin with a comma that JSON does not allow.
                content = re.sub(r"\[\s*,", "[", path.read_text(), count=1)
                events = json.loads(content)["traceEvents"]
                self._operators = read(events, self._devices, *self._window)

    @property
    def steps(self) -> tuple[int, int]:
        """Numbers of the first and the last step in the window, counted from 1."""
        return self.warm_up + 1, min(self._num_taken, self.warm_up + self.num_steps)

    @functools.cached_property
    def profile(self) -> Profile:
        """The recorded steps; raises ValueError if there are none."""
        num_steps = self.steps[1] - self.warm_up
        if self._window is None or num_steps <= 0:
            raise ValueError(
                f"no step was profiled: the loop has taken {self._num_taken} steps and the first "
                f"{self.warm_up} are for warming up; give a smaller warm_up or a longer loop"
            )
        spans = classify(self._operators, len(self.ctx))
        processors = threads.cores() if self.ctx[0].device_type == "cpu" else None
        return Profile([*map(str, self.ctx)], self._window, num_steps, spans, processors)


@dataclass
class Profile:
    """``num_steps`` steps on ``devices`` (their names) in the ``window`` (begin, end).

    ``spans`` are classified (:func:`classify`). An operator that waits for a processor counts as
    running: with fewer ``processors`` than devices, parts take longer than their computation.
    """

    devices: list[str]
    window: tuple[float, float]
    num_steps: int
    spans: list[Span]
    processors: int | None = None

    def __post_init__(self) -> None:
        ends = [end for span in self.spans for end in (span.start, span.end)]
        edges = np.unique([*self.window, *ends])  # nothing begins or ends between two
        self._lengths = np.diff(edges)
        shape = len(self.devices), len(self._lengths)
        # By part: whether it runs on a device between two neighbouring edges.
        self._runs = {part: np.zeros(shape, bool) for part in PARTS}
        for span in self.spans:
            first, last = np.searchsorted(edges, (span.start, span.end))
            self._runs[span.part][span.device, first:last] = True
        self._busy = np.any([*self._runs.values()], axis=0)

    @property
    def step_seconds(self) -> float:
        """Seconds per step."""
        return (self.window[1] - self.window[0]) / self.num_steps / 1e6

    def table(self) -> str:
        """Return a table of milliseconds per step by part and device.

        It has the parts that ran, and 'idle', when none did.
        """
        rows = [["ms per step", *self.devices]]
        for part, runs in {**self._runs, "idle": ~self._busy}.items():
            if part == "idle" or runs.any():
                times = runs @ self._lengths / self.num_steps / 1e3
                rows.append([part, *(f"{time:.2f}" for time in times)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        )

    def shares(self) -> dict[str, float]:
        """Return the shares of a step, averaged over devices; they add up to 1.

        Each instant of a device counts once: it computes; or else it updates; or else some device
        exchanges; or else another device is still busy (the slowest); or else all wait for Python.
        """
        runs = self._runs
        reasons = {
            "compute": runs[DATA] | runs[FORWARD] | runs[BACKWARD] | runs[OTHER],
            "update": runs[UPDATE],
            "exchange": (runs[EXCHANGE] | runs[FUSED]).any(axis=0),
            "slowest": self._busy.any(axis=0),
            "Python": np.ones_like(self._busy),
        }
        first = np.select([*reasons.values()], [*range(len(reasons))])
        whole = self._lengths.sum()
        return {
            reason: float(np.mean((first == i) @ self._lengths / whole))
            for i, reason in enumerate(reasons)
        }

    def sentence(self) -> str:
        """Return a sentence that explains why K devices are not K times as fast as one of them.

        Its speed-up is an upper bound: a single device would have memory and caches for itself.
        """
        shares, k = self.shares(), len(self.devices)
        words = {
            "slowest": "waiting for the slowest device",
            "exchange": f"exchange{' and update' if self._runs[FUSED].any() else ''} not hidden",
            "update": "update",
            "Python": "waiting for Python",
        }
        parts = [f"{shares['compute']:.1%} of a step is compute"]
        parts += [f"{shares[r]:.1%} {words[r]}" for r in words if shares[r] >= 0.0005]
        if k == 1:
            return f"1 device: {', '.join(parts)}"
        speedup, shared = k * shares["compute"] + shares["update"], ""
        if self.processors is not None and self.processors < k:
            speedup = min(speedup, self.processors)
            shared = f", because they share {self.processors} processors"
        bound = f"at best {speedup:.2f} times one of these devices"
        return f"{k} devices: {', '.join(parts)}; {bound}{shared}"


def classify(operators: Sequence[Span], num_devices: int) -> list[Span]:
    """Return the operators with their parts, in the order of their start.

    By name: a name with ``_backward_`` is backward; ``..._update`` is update; gluonpar's own
    operators and a kvstore's are exchange. ``ImperativeBulk``, a segment of untraced operators, is
    backward on a device that has no other backward operator.

    By place: from a device's backward to its update, copies and sums are exchange, unless
    gluonpar's own operators exchange, and other operators backward, such as the sum of the losses,
    until some device updates. Elsewhere copies are data, and other operators forward, such as a
    cast or an augmentation of the batch.
    """
    by_own_operator = {op.name for op in operators} & {"gluonpar.host", "gluonpar.allreduce_update"}
    shows_backward = {op.device for op in operators if "_backward_" in op.name}
    place = [FORWARD] * num_devices
    classified = []
    for op in sorted(operators, key=lambda span: span.start):
        part = next((part for part, name in _BY_NAME.items() if re.fullmatch(name, op.name)), "")
        here, copies = place[op.device], _COPY.fullmatch(op.name)
        if op.name == "ImperativeBulk" and op.device not in shows_backward:
            part = BACKWARD
        elif not part and here == FORWARD:
            part = DATA if copies else FORWARD
        elif not part:
            moves = (copies or _SUM.fullmatch(op.name)) and not by_own_operator
            part = EXCHANGE if moves else BACKWARD if here == BACKWARD else FORWARD
        if op.name in by_own_operator:
            place = [FORWARD] * num_devices
        elif part == UPDATE:
            place = [EXCHANGE if there == BACKWARD else there for there in place]
            place[op.device] = FORWARD
        elif part == BACKWARD:
            place[op.device] = BACKWARD
        classified.append(op._replace(part=part))
    return classified


def read(
    events: Sequence[dict[str, Any]], devices: dict[int, int], begin: float, end: float
) -> list[Span]:
    """Return the operators that began in the window [begin, end].

    ``devices`` maps the events' process numbers to devices; other processes are left out.
    """
    operators = []
    for first, last in zip(events, events[1:]):  # MXNet writes an operator's two events in a row
        device, start = devices.get(first["pid"]), first.get("ts")
        if first["ph"] == "B" and device is not None and begin <= start <= end:
            operators.append(Span(first["name"], device, start, min(last["ts"], end)))
    return operators


def process_of(context: mx.Context) -> int:
    """Return the number of the process that MXNet's profile has for a context.

    They are one per processor, for CPU contexts, then those of GPUs. Raises ValueError if the
    profile has none for this one.
    """
    processors = len(os.sched_getaffinity(0))  # as MXNet counts them
    if context.device_type == "gpu":
        return processors + context.device_id
    most = processors + 2  # the last two are of pinned and shared memory, which have no operators
    if context.device_id >= most:
        raise ValueError(
            f"{context} cannot be profiled: MXNet can profile at most {most} CPU contexts on this "
            "machine; use fewer"
        )
    return context.device_id
