"""Operators that MXNet's profiler recorded: which part of a training step each is, and how long.

Without MXNet. Times are microseconds of one clock.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence

DATA, FORWARD, BACKWARD = "data", "forward", "backward"
EXCHANGE, UPDATE, OTHER = "exchange", "update", "other"
FUSED = "exchange + update"  # one operator does both

_UPDATE = re.compile(r"\w+_update(_phase[12])?")
_COPY = re.compile(r"_copy(to(_[CG]PU2[CG]PU)?)?|(Sync)?Copy[CG]PU2[CG]PU")
_SUM = re.compile(r"(elemwise|broadcast)_add|add_n|broadcast_(maximum|minimum)|_div_scalar|Cast")
_HOUSEKEEPING = ("gluonpar.runtime.threads", "gluonpar.heap", "DeleteVariable")


class Span(NamedTuple):
    """``name`` from ``start`` to ``end``, in microseconds; ``device`` None is Python.

    ``part`` is one of the parts of a step above, or '' before it is classified.
    """

    name: str
    device: int | None
    thread: int
    start: float
    end: float
    part: str = ""


def events(content: str) -> list[dict[str, Any]]:
    """Return the events in a file of MXNet's profiler."""
    # All but the first file that a process writes begin with a comma that JSON does not allow.
    return json.loads(re.sub(r"\[\s*,", "[", content, count=1))["traceEvents"]


def read(content: str, devices: dict[int, int], begin: float, end: float) -> list[Span]:
    """Return the operators that began in the window [begin, end], in the order of their start.

    ``devices`` maps the file's process numbers to devices; other processes are left out.
    """
    operators, begun = [], {}
    for event in events(content):
        device, kind, key = devices.get(event["pid"]), event["ph"], (event["pid"], event.get("tid"))
        if device is not None and kind == "B":
            begun.setdefault(key, []).append(event["ts"])
        elif device is not None and kind == "E":
            start = begun[key].pop()
            if begin <= start <= end:
                operators.append(Span(event["name"], device, key[1], start, min(event["ts"], end)))
    return sorted(operators, key=lambda span: span.start)


def classify(operators: Sequence[Span], num_devices: int) -> list[Span]:
    """Return the operators with their parts, in the order of their start.

    By name: a name with ``_backward_`` is backward (the names of a traced segment are joined);
    ``..._update`` is update; gluonpar's own operators and a kvstore's are exchange.
    ``gluonpar.update`` is exchange and update in one if a single device runs it for all.
    ``ImperativeBulk``, a segment of untraced operators, is backward on a device that has no other
    backward operator.

    By place: between a device's backward and the exchange or update, copies and sums are exchange,
    unless gluonpar's own operators exchange, and other operators backward, such as the sum of the
    losses. Elsewhere copies are data, and other operators forward, such as a cast or an
    augmentation of the batch.
    """
    updaters = {op.device for op in operators if op.name == "gluonpar.update"}
    on_host = any(op.name == "gluonpar.host" for op in operators)
    fused = len(updaters) == 1 < num_devices and not on_host
    shows_backward = {op.device for op in operators if "_backward_" in op.name}
    after_backward = [False] * num_devices
    classified = []
    for op in sorted(operators, key=lambda span: span.start):
        if op.name in _HOUSEKEEPING:
            part = OTHER
        elif op.name == "gluonpar.update":
            part = FUSED if fused else UPDATE
        elif op.name.startswith(("gluonpar", "KVStore")):
            part = EXCHANGE
        elif "_backward_" in op.name:
            part = BACKWARD
        elif op.name == "ImperativeBulk" and op.device not in shows_backward:
            part = BACKWARD
        elif _UPDATE.fullmatch(op.name):
            part = UPDATE
        elif after_backward[op.device]:
            moves = _COPY.fullmatch(op.name) or _SUM.fullmatch(op.name)
            part = EXCHANGE if moves and not on_host and not fused else BACKWARD
        else:
            part = DATA if _COPY.fullmatch(op.name) else FORWARD
        if op.name == "gluonpar.host" or part == FUSED:
            after_backward = [False] * num_devices
        elif part in (BACKWARD, UPDATE):
            after_backward[op.device] = part == BACKWARD
        classified.append(op._replace(part=part))
    return classified


Intervals = Sequence["tuple[float, float]"]


def union(intervals: Intervals) -> list[tuple[float, float]]:
    """Return the same time as sorted intervals that do not touch.

    >>> union([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def without(intervals: Intervals, removed: Intervals) -> list[tuple[float, float]]:
    """Return the time in ``intervals`` that is in none of ``removed``.

    >>> without([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    rest, removed = [], union(removed)
    for start, end in union(intervals):
        for first, last in removed:
            if start < first < end:
                rest.append((start, first))
            if first < end and start < last:
                start = last
        if start < end:
            rest.append((start, end))
    return rest


def length(intervals: Intervals) -> float:
    """Return the time that the intervals cover; overlapping time counts once."""
    return sum(end - start for start, end in union(intervals))


@dataclass
class Timeline:
    """``num_steps`` steps on ``devices`` (their names) in the ``window`` (begin, end).

    ``spans`` are classified (:func:`classify`). An operator that waits for a processor counts as
    running: with fewer ``processors`` than devices, parts take longer than their computation.
    """

    devices: list[str]
    window: tuple[float, float]
    num_steps: int
    spans: list[Span]
    processors: int | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds per step."""
        return length([self.window]) / self.num_steps / 1e6

    def intervals(self, *parts: str, device: int | None = -1) -> list[tuple[float, float]]:
        """Return when ``parts`` (default: any) ran on a device; None: Python; -1: anywhere."""
        return union(
            (span.start, span.end)
            for span in self.spans
            if (not parts or span.part in parts) and device in (-1, span.device)
        )

    def part_ms(self, part: str, device: int | None = -1) -> float:
        """Return milliseconds per step of a part, or of 'idle', when no operator runs."""
        covered = self.intervals(*([] if part == "idle" else [part]), device=device)
        if part == "idle":
            covered = without([self.window], covered)
        return length(covered) / self.num_steps / 1e3

    def table(self) -> str:
        """Return a table of milliseconds per step by part and device."""
        rows = [["ms per step", *self.devices, "Python"]]
        exchanges = [part for part in (EXCHANGE, UPDATE, FUSED) if self.intervals(part)]
        for part in (DATA, FORWARD, BACKWARD, *exchanges, OTHER, "idle"):
            times = [f"{self.part_ms(part, device):.2f}" for device in range(len(self.devices))]
            python = f"{self.part_ms(part, None):.2f}" if part == DATA else ""
            rows.append([part, *times, python])
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        )

    def shares(self) -> dict[str, float]:
        """Return the shares of a step, averaged over devices; they add up to 1.

        Each instant of a device counts once: it computes; or else it updates; or else some device
        exchanges; or else another device is still busy (the slowest); or else all wait for Python.
        """
        busy = union((span.start, span.end) for span in self.spans if span.device is not None)
        totals = dict.fromkeys(("compute", "update", "exchange", "slowest", "Python"), 0.0)
        for device in range(len(self.devices)):
            reasons = {
                "compute": self.intervals(DATA, FORWARD, BACKWARD, OTHER, device=device),
                "update": self.intervals(UPDATE, device=device),
                "exchange": self.intervals(EXCHANGE, FUSED),
                "slowest": busy,
                "Python": [self.window],
            }
            rest = [self.window]
            for reason, covered in reasons.items():
                left = without(rest, covered)
                totals[reason] += length(rest) - length(left)
                rest = left
        whole = length([self.window]) * len(self.devices)
        return {reason: time / whole for reason, time in totals.items()}

    def sentence(self) -> str:
        """Return a sentence that explains why K devices are not K times as fast as one of them.

        Its speed-up is an upper bound: a single device would have memory and caches for itself.
        """
        shares, k = self.shares(), len(self.devices)
        words = {
            "slowest": "waiting for the slowest device",
            "exchange": f"exchange{' and update' if self.intervals(FUSED) else ''} not hidden",
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

    def trace_events(self, steps: Sequence[Span] = ()) -> list[dict[str, Any]]:
        """Return the spans, and ``steps``, as events of the Trace Event Format, from 0 us.

        Each device is a process with a row per thread, Python is one, and so is the exchange, with
        a row per device that runs it.
        """
        python, exchange = len(self.devices), len(self.devices) + 1
        names = enumerate([*self.devices, "Python", "exchange"])
        result = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
            for pid, name in names
        ]
        for span in (*steps, *self.spans):
            pid, tid = python if span.device is None else span.device, span.thread
            if span.part in (EXCHANGE, FUSED):
                pid, tid = exchange, pid
            times = {"ts": span.start - self.window[0], "dur": span.end - span.start}
            event = {"name": span.name, "cat": span.part, "ph": "X", "pid": pid, "tid": tid}
            result.append({**event, **times})
        return result
