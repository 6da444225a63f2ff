"""Operators that MXNet's profiler recorded: which part of a training step each is, and how long.

Without MXNet. Times are microseconds of one clock.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple, Sequence

DATA, FORWARD, BACKWARD = "data", "forward", "backward"
EXCHANGE, UPDATE, OTHER = "exchange", "update", "other"
FUSED = "exchange + update"  # one operator does both

_UPDATE = re.compile(r"\w+_update(_phase[12])?")
_COPY = re.compile(r"_copy(to(_[CG]PU2[CG]PU)?)?|(Sync)?Copy[CG]PU2[CG]PU")
_SUM = re.compile(r"(elemwise|broadcast)_add|add_n|broadcast_(maximum|minimum)|_div_scalar|Cast")


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


def events(text: str) -> list[dict]:
    """Return the events in a file of MXNet's profiler."""
    # All but the first file that a process writes begin with a comma that JSON does not allow.
    return json.loads(re.sub(r"\[\s*,", "[", text, count=1))["traceEvents"]


def read(text: str, devices: dict[int, int], begin: float, end: float) -> list[Span]:
    """Return the operators that began in the window [begin, end], in the order of their start.

    ``devices`` maps the file's process numbers to devices; other processes are left out.
    """
    found, begun = [], {}
    for event in events(text):
        device, kind, key = devices.get(event["pid"]), event["ph"], (event["pid"], event.get("tid"))
        if device is not None and kind == "B":
            begun.setdefault(key, []).append(event["ts"])
        elif device is not None and kind == "E":
            start = begun[key].pop()
            if begin <= start <= end:
                found.append(Span(event["name"], device, key[1], start, min(event["ts"], end)))
    return sorted(found, key=lambda span: span.start)


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
    summed = any(op.name == "gluonpar.host" for op in operators)
    update = FUSED if len(updaters) == 1 < num_devices and not summed else UPDATE
    traced = {op.device for op in operators if "_backward_" in op.name}
    after_backward = dict.fromkeys(range(num_devices), False)
    found = []
    for op in sorted(operators, key=lambda span: span.start):
        part = update if op.name == "gluonpar.update" else _by_name(op.name)
        if op.name == "ImperativeBulk" and op.device not in traced:
            part = BACKWARD
        if op.name == "gluonpar.host" or part == FUSED:
            after_backward = dict.fromkeys(after_backward, False)
        elif part in (BACKWARD, UPDATE):
            after_backward[op.device] = part == BACKWARD
        by_copies = not summed and update != FUSED
        place = _by_place(op.name, after_backward[op.device], by_copies)
        found.append(op._replace(part=part or place))
    return found


def _by_name(name: str) -> str:
    if name in ("gluonpar.runtime.threads", "gluonpar.heap", "DeleteVariable"):
        return OTHER
    if name.startswith(("gluonpar", "KVStore")):
        return EXCHANGE
    if "_backward_" in name:
        return BACKWARD
    return UPDATE if _UPDATE.fullmatch(name) else ""


def _by_place(name: str, after_backward: bool, by_copies: bool) -> str:
    if after_backward:
        exchanges = by_copies and (_COPY.fullmatch(name) or _SUM.fullmatch(name))
        return EXCHANGE if exchanges else BACKWARD
    return DATA if _COPY.fullmatch(name) else FORWARD


Intervals = Sequence["tuple[float, float]"]


def union(intervals: Intervals) -> list[tuple[float, float]]:
    """Return the same time as sorted intervals that do not touch.

    >>> union([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def without(intervals: Intervals, others: Intervals) -> list[tuple[float, float]]:
    """Return the time in ``intervals`` that is in none of ``others``.

    >>> without([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    edges = [edge for start, end in intervals for edge in ((start, 1, 0), (end, -1, 0))]
    edges += [edge for start, end in others for edge in ((start, 0, 1), (end, 0, -1))]
    found, inside, covered, since = [], 0, 0, 0.0
    for time, enters, covers in sorted(edges):
        if inside and not covered and since < time:
            found.append((since, time))
        inside, covered, since = inside + enters, covered + covers, time
    return union(found)


def length(intervals: Intervals) -> float:
    """Return the time that the intervals cover; overlapping time counts once."""
    return sum(end - start for start, end in union(intervals))


@dataclass
class Timeline:
    """``num_steps`` steps on ``devices`` (their names) in the ``window`` (begin, end).

    ``spans`` are classified (:func:`classify`); ``num_bytes`` are bytes per step by part,
    over all devices. An operator that waits for a processor counts as running: with fewer
    ``processors`` than devices, parts take longer than their computation.
    """

    devices: list[str]
    window: tuple[float, float]
    num_steps: int
    spans: list[Span]
    num_bytes: dict[str, float]
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

    def overlap(self) -> float | None:
        """Return the share of exchange and update during which some device computes, if any."""
        moved = self.intervals(EXCHANGE, UPDATE, FUSED)
        if not moved:
            return None
        return 1 - length(without(moved, self.intervals(FORWARD, BACKWARD))) / length(moved)

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

    def table(self) -> str:
        """Return a table of milliseconds per step by part and device, and the bytes per step."""
        alone = len(self.devices) == 1
        usual = (UPDATE,) if alone else (FUSED,) if self.intervals(FUSED) else (EXCHANGE, UPDATE)
        moving = [p for p in (EXCHANGE, UPDATE, FUSED) if p in usual or self.intervals(p)]
        rows = [["ms per step", *self.devices, "Python", "MB per step", "GB/s"]]
        for part in (DATA, FORWARD, BACKWARD, *moving, OTHER, "idle"):
            times = [f"{self.part_ms(part, d):.2f}" for d in range(len(self.devices))]
            python = f"{self.part_ms(part, None):.2f}" if part == DATA else ""
            rows.append([part, *times, python, *self._bytes(part)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        overlap = self.overlap()
        if overlap is not None and not alone:
            lines.append(f"{overlap:.0%} of {FUSED} overlapped forward or backward of some device")
        return "\n".join(lines)

    def _bytes(self, part: str) -> tuple[str, str]:
        parts = (EXCHANGE, UPDATE) if part == FUSED else (part,)
        num_bytes, ms = sum(self.num_bytes.get(p, 0) for p in parts), self.part_ms(part)
        known = num_bytes and ms
        return (f"{num_bytes / 1e6:.2f}", f"{num_bytes / ms / 1e6:.2f}") if known else ("", "")

    def trace(self, marks: Sequence[Span] = ()) -> list[dict]:
        """Return the spans and ``marks`` as events of the Trace Event Format, from 0 us.

        Each device is a process with a row per thread. Python is a process, and so is the exchange,
        with a row per device that takes part in it.
        """
        k, events, rows = len(self.devices), [], {}
        for pid, name in enumerate([*self.devices, "Python", "exchange"]):
            events.append(_metadata("process_name", pid, 0, name=name))
            events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for span in (*marks, *self.spans):
            if span.part in (EXCHANGE, FUSED):
                pid, key, row = k + 1, span.device, f"run by {self.devices[span.device]}"
            else:
                pid, key, row = k if span.device is None else span.device, span.thread, "thread {}"
            of_process = rows.setdefault(pid, {})
            if key not in of_process:
                tid = of_process[key] = len(of_process)
                events.append(_metadata("thread_name", pid, tid, name=row.format(tid)))
            kind = {"name": span.name, "cat": span.part, "ph": "X", "pid": pid}
            times = {"ts": span.start - self.window[0], "dur": span.end - span.start}
            events.append({**kind, "tid": of_process[key], **times})
        return events


def _metadata(kind: str, pid: int, tid: int, **arguments) -> dict:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
