"""A step's parts, from the operators that ran: their times, their overlap, and why they take it.

Pure Python on a list of spans, so that it can be tested without MXNet. Times are microseconds of
one clock.
"""

from __future__ import annotations

from typing import Sequence

from gluonpar.training.profiler.operators import (
    BACKWARD,
    DATA,
    EXCHANGE,
    FORWARD,
    FUSED,
    OTHER,
    UPDATE,
    Span,
)

Intervals = Sequence["tuple[float, float]"]


def union(intervals: Intervals) -> list[tuple[float, float]]:
    """The same instants as intervals in order, apart from each other.

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
    """The instants of ``intervals`` that are in none of ``others``.

    >>> without([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    found, others, i = [], union(others), 0
    for start, end in union(intervals):
        while i < len(others) and others[i][1] <= start:
            i += 1
        j = i
        while j < len(others) and others[j][0] < end:
            if start < others[j][0]:
                found.append((start, others[j][0]))
            start = max(start, others[j][1])
            j += 1
        if start < end:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    """Time that the intervals cover; what several cover counts once."""
    return sum(end - start for start, end in union(intervals))


class Timeline:
    """``num_steps`` steps on ``devices`` (their names), seen in the ``window`` (begin, end).

    ``spans`` have their parts (:func:`operators.classify`); those of Python's thread have the
    device None. ``num_bytes`` are bytes a step by part, over all devices. What a device's operators
    do not cover of the window is idle. An operator that waits for a processor counts as running: if
    fewer ``processors`` than devices do the work, the parts take longer than the work in them.
    """

    def __init__(
        self,
        devices: Sequence[str],
        window: tuple[float, float],
        num_steps: int,
        spans: Sequence[Span],
        num_bytes: dict[str, float],
        processors: int | None = None,
    ) -> None:
        self.devices, self.window, self.num_steps = list(devices), window, num_steps
        self.spans, self.num_bytes, self.processors = list(spans), dict(num_bytes), processors
        self.fused = any(span.part == FUSED for span in spans)
        if self.fused:
            self.num_bytes[FUSED] = num_bytes.get(EXCHANGE, 0) + num_bytes.get(UPDATE, 0)

    @property
    def step_seconds(self) -> float:
        """Seconds a step."""
        return length([self.window]) / self.num_steps / 1e6

    def intervals(self, *parts: str, device: int | None = -1) -> list[tuple[float, float]]:
        """When ``parts`` (default: any) ran on the device, or on None, Python; -1: anywhere."""
        return union(
            (span.start, span.end)
            for span in self.spans
            if (not parts or span.part in parts) and device in (-1, span.device)
        )

    def part_ms(self, part: str, device: int | None = -1) -> float:
        """Milliseconds a step of a part, or of 'idle', on a device, Python's thread or anywhere."""
        if part == "idle":
            covered = without([self.window], self.intervals(device=device))
        else:
            covered = self.intervals(part, device=device)
        return length(covered) / self.num_steps / 1e3

    def overlap(self) -> float | None:
        """Share of exchange and update during which some device computed; None without any."""
        moved = self.intervals(EXCHANGE, UPDATE, FUSED)
        if not moved:
            return None
        return 1 - length(without(moved, self.intervals(FORWARD, BACKWARD))) / length(moved)

    def shares(self) -> dict[str, float]:
        """Shares of a step, averaged over devices, that add up to 1; each instant counts once.

        A device computes, or else it updates, or else some device exchanges, or else another device
        computes or updates (the slowest one is waited for), or else all wait for Python.
        """
        compute = (DATA, FORWARD, BACKWARD, OTHER)
        anywhere = [s for s in self.spans if s.device is not None]
        busy = union((s.start, s.end) for s in anywhere)
        totals = dict.fromkeys(("compute", "update", "exchange", "slowest", "Python"), 0.0)
        for device in range(len(self.devices)):
            rest = [self.window]
            for reason, claimed in (
                ("compute", self.intervals(*compute, device=device)),
                ("update", self.intervals(UPDATE, device=device)),
                ("exchange", self.intervals(EXCHANGE, FUSED)),
                ("slowest", busy),
                ("Python", [self.window]),
            ):
                left = without(rest, claimed)
                totals[reason] += length(rest) - length(left)
                rest = left
        whole = length([self.window]) * len(self.devices)
        return {reason: time / whole for reason, time in totals.items()}

    def sentence(self) -> str:
        """Why K devices are not K times as fast as one of them, from these numbers.

        "At best", because one of them alone would have the memory and the caches for itself.
        """
        shares, k = self.shares(), len(self.devices)
        exchange = "exchange and update" if self.fused else "exchange"
        words = {
            "slowest": "waiting for the slowest device",
            "exchange": f"{exchange} not hidden",
            "update": "update",
            "Python": "waiting for Python",
        }
        parts = [f"{shares['compute']:.1%} of a step is compute"]
        parts += [f"{shares[r]:.1%} {words[r]}" for r in words if shares[r] >= 0.0005]
        if k == 1:
            return f"1 device: {', '.join(parts)}"
        times = k * shares["compute"] + shares["update"]
        shared = ""
        if self.processors is not None and self.processors < k:
            times = min(times, self.processors)
            shared = f", for they share {self.processors} processors"
        which = f"at best {times:.2f} times one of these devices"
        return f"{k} devices: {', '.join(parts)}; {which}{shared}"

    def table(self) -> str:
        """Milliseconds a step of each part on each device, and the bytes it moves a step."""
        alone = len(self.devices) == 1
        usual = (UPDATE,) if alone else (FUSED,) if self.fused else (EXCHANGE, UPDATE)
        moving = [p for p in (EXCHANGE, UPDATE, FUSED) if p in usual or self.intervals(p)]
        rows = [["ms a step", *self.devices, "Python", "MB a step", "GB/s"]]
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
        num_bytes, ms = self.num_bytes.get(part, 0), self.part_ms(part)
        if not num_bytes or not ms:
            return "", ""
        return f"{num_bytes / 1e6:.2f}", f"{num_bytes / ms / 1e6:.2f}"

    def trace(self, marks: Sequence[Span] = ()) -> list[dict]:
        """The spans, and ``marks``, as complete events of the Trace Event Format, from 0 us.

        A process for each device with a row for each of its threads, one for Python, and one for
        the exchange with a row for each device that takes part.
        """
        k = len(self.devices)
        events, rows = [], {}
        for pid, name in enumerate([*self.devices, "Python", "exchange"]):
            events.append(_named("process_name", pid, 0, name=name))
            events.append(_named("process_sort_index", pid, 0, sort_index=pid))
        for span in (*marks, *self.spans):
            if span.part in (EXCHANGE, FUSED):
                pid, key, row = k + 1, span.device, f"run by {self.devices[span.device]}"
            else:
                pid, key, row = k if span.device is None else span.device, span.thread, "thread {}"
            mine = rows.setdefault(pid, {})
            if key not in mine:
                mine[key] = len(mine)
                events.append(_named("thread_name", pid, mine[key], name=row.format(mine[key])))
            times = {"ts": span.start - self.window[0], "dur": span.end - span.start}
            kind = {"name": span.name, "cat": span.part, "ph": "X"}
            events.append({**kind, "pid": pid, "tid": mine[key], **times})
        return events


def _named(kind: str, pid: int, tid: int, **arguments) -> dict:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
