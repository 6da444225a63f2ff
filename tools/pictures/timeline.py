"""Steps over time, drawn: what ran when on each device, in the exchange and in Python."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Sequence

from gluonpar.collectives.drawing import COLOURS, GREY, save, sheet, style
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
from gluonpar.training.profiler.timeline import Timeline, union
from pictures.paper import SMALL, TITLE, box, words

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, _, PURPLE, *_ = COLOURS
PARTS = {
    FORWARD: BLUE,
    BACKWARD: PURPLE,
    EXCHANGE: ORANGE,
    UPDATE: ORANGE,
    FUSED: ORANGE,
    DATA: GREEN,
    OTHER: GREY,
}
# Inches from the upper left corner.
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 10.0, 1.25, 9.85, 1.0, 0.5, 0.32
LEAST = 0.025  # of a span's width, so that it can be seen
LETTER = 0.07  # of the width of a letter
CLOSE = 100.0  # microseconds between two operators of a part that are drawn as one


def steps(timeline: Timeline, first: int = 0, num_steps: int = 3) -> Timeline:
    """``num_steps`` whole steps of a profile, from the ``first`` that begins in it, from 0 us.

    A step begins where a device goes forward after its backward: what Python does meanwhile is for
    a later one. Operators of a part that follow each other closely are one span, which is called
    like the part. Raises ValueError if the profile has too few steps.
    """
    begins = [min(starts) for starts in zip(*map(_starts, _by_device(timeline)))]
    if first < 0 or num_steps < 1 or first + num_steps >= len(begins):
        raise ValueError(
            f"first={first}, num_steps={num_steps}: the profile has {max(0, len(begins) - 1)} "
            "whole steps; profile more steps, or draw fewer"
        )
    begin, end = begins[first], begins[first + num_steps]
    spans = []
    for device in (*range(len(timeline.devices)), None):
        for part in PARTS:
            close = [(a, b + CLOSE) for a, b in timeline.intervals(part, device=device)]
            for start, stop in union(close):
                both = max(start, begin) - begin, min(stop - CLOSE, end) - begin
                if both[0] < both[1]:
                    spans.append(Span(part, device, 0, round(both[0]), round(both[1]), part))
    window = 0, round(end - begin)
    return Timeline(timeline.devices, window, num_steps, spans, {}, timeline.processors)


def _by_device(timeline: Timeline) -> list[list[Span]]:
    return [
        sorted((s for s in timeline.spans if s.device == i), key=lambda span: span.start)
        for i in range(len(timeline.devices))
    ]


def _starts(spans: Sequence[Span]) -> list[float]:
    """When the device goes forward, each time for the first time after its backward."""
    found, backward = [], True
    for span in spans:
        if span.part == FORWARD and backward:
            found.append(span.start)
        backward = span.part == BACKWARD or (backward and span.part != FORWARD)
    return found


def as_dict(timeline: Timeline) -> dict[str, Any]:
    """For JSON: what :func:`from_dict` makes the same timeline of. Times are whole microseconds."""
    return {
        "devices": timeline.devices,
        "processors": timeline.processors,
        "num_steps": timeline.num_steps,
        "window": list(timeline.window),
        "spans": [[s.part, s.device, s.start, s.end] for s in timeline.spans],
    }


def from_dict(record: dict[str, Any]) -> Timeline:
    """The timeline of :func:`as_dict`. Raises KeyError if something is missing."""
    spans = [Span(part, device, 0, *both, part) for part, device, *both in record["spans"]]
    window, num_steps = tuple(record["window"]), record["num_steps"]
    return Timeline(record["devices"], window, num_steps, spans, {}, record["processors"])


def from_trace(events: Sequence[dict], processors: int | None = None) -> Timeline:
    """The timeline of the ``traceEvents`` in a file of ``--trace`` or ``Profiler.save``.

    Such a file does not say how many ``processors`` the devices shared. Raises KeyError for events
    of other programs.
    """
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    processes = {
        pid: args["name"] for (kind, pid, _), args in named.items() if kind == "process_name"
    }
    devices = [name for _, name in sorted(processes.items()) if name not in ("Python", "exchange")]
    spans, num_steps, end = [], 0, 0.0
    for event in events:
        if event["ph"] != "X":
            continue
        start, stop, device = event["ts"], event["ts"] + event["dur"], event["pid"]
        end = max(end, stop)
        if event["cat"] == "step":
            num_steps += 1
            continue
        if processes[device] == "exchange":
            device = devices.index(
                named["thread_name", device, event["tid"]]["name"][len("run by ") :]
            )
        elif processes[device] == "Python":
            device = None
        spans.append(Span(event["name"], device, event["tid"], start, stop, event["cat"]))
    return Timeline(devices, (0.0, end), num_steps, spans, {}, processors)


def draw_timeline(
    timeline: Timeline, title: str, path: str | os.PathLike | None = None, note: str = ""
) -> Figure:
    """All of ``timeline`` (:func:`steps`), a row for each device, for the exchange and for Python.

    ``Profiler.timeline`` is what a profile has seen. The colours are those of the parts; below are
    the time in ms, the sentence that says why K devices are not K times as fast as one, for these
    steps, and ``note``. Written to ``path`` too, if given. Raises ImportError without matplotlib.
    """
    moving = (EXCHANGE, UPDATE, FUSED) if timeline.fused else (EXCHANGE,)
    rows = [
        (name, _spans(timeline, device, moving)) for device, name in enumerate(timeline.devices)
    ]
    if any(span.part in moving for span in timeline.spans):
        together = [s for s in timeline.spans if s.part in moving]
        rows.append(("exchange\nand update" if timeline.fused else "exchange", together))
    rows.append(("Python", _spans(timeline, None, ())))
    rows = [(name, [s for s in spans if _seen(timeline, s)]) for name, spans in rows]
    notes = [*textwrap.wrap(timeline.sentence(), 112), *textwrap.wrap(note, 112)]
    bottom = TOP + ROW * len(rows)
    with style("timeline"):
        figure, axes = sheet(WIDTH, bottom + 0.46 + 0.21 * len(notes))
        words(axes, LEFT, 0.26, title, ha="left", size=TITLE, weight="bold")
        _legend(axes, {s.part: None for _, spans in rows for s in spans})
        _scale(axes, timeline, bottom)
        for i, (name, spans) in enumerate(rows):
            _row(axes, TOP + ROW * i, name, spans, timeline)
        for i, line in enumerate(notes):
            words(axes, LEFT, bottom + 0.5 + 0.21 * i, line, ha="left", size=SMALL)
        if path is not None:
            save(figure, path, title, _description(timeline))
    return figure


def _spans(timeline: Timeline, device: int | None, but: Sequence[str]) -> list[Span]:
    return [s for s in timeline.spans if s.device == device and s.part not in but]


def _seen(timeline: Timeline, span: Span) -> bool:
    """Whether to draw it: what is shorter than the eye sees only if it is the row's matter."""
    width = _inches(timeline, span.end) - _inches(timeline, span.start)
    return span.part != OTHER or width >= LEAST


def _inches(timeline: Timeline, time: float) -> float:
    begin, end = timeline.window
    return LEFT + (RIGHT - LEFT) * (time - begin) / (end - begin)


def _row(axes: Axes, top: float, name: str, spans: Sequence[Span], timeline: Timeline) -> None:
    middle = top + ROW / 2
    box(axes, (LEFT, middle - BAR / 2), (RIGHT - LEFT, BAR), GREY, None, 0.11, radius=0)
    words(axes, LEFT - 0.12, middle, name, ha="right")
    for i, span in enumerate(spans):
        left, right = (_inches(timeline, time) for time in (span.start, span.end))
        corner, size = (left, middle - BAR / 2), (max(right - left, LEAST), BAR)
        gid = f"span-{'Python' if span.device is None else span.device}-{span.part}-{i}"
        box(axes, corner, size, PARTS[span.part], gid.replace(" ", ""), radius=0)
        if right - left > LETTER * (len(span.part) + 2):
            words(axes, (left + right) / 2, middle, span.part, color="white", size=SMALL)


def _scale(axes: Axes, timeline: Timeline, bottom: float) -> None:
    """Milliseconds below the rows, about ten of them, and where they are."""
    begin, end = timeline.window
    total = (end - begin) / 1e3
    tick = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e9) if total / size <= 10)
    for i in range(int(total / tick) + 1):
        x = _inches(timeline, begin + 1e3 * i * tick)
        axes.plot([x, x], [TOP - 0.02, bottom + 0.04], color=GREY, lw=0.6, alpha=0.5, zorder=0)
        words(axes, x, bottom + 0.17, f"{i * tick} ms" if i == 0 else i * tick, size=SMALL)


def _legend(axes: Axes, parts: Sequence[str]) -> None:
    x = LEFT
    for part in (part for part in PARTS if part in parts):
        box(axes, (x, 0.58), (0.2, 0.16), PARTS[part], radius=0.02)
        words(axes, x + 0.28, 0.66, part, ha="left", size=SMALL)
        x += 0.4 + LETTER * (len(part) + 4)


def _description(timeline: Timeline) -> str:
    """The picture in words: what a step takes on each device, and the sentence."""
    devices = []
    for i, name in enumerate(timeline.devices):
        forward, backward = (timeline.part_ms(part, i) for part in (FORWARD, BACKWARD))
        devices.append(f"forward {forward:.1f} ms and backward {backward:.1f} ms on {name}")
    moved = sum(timeline.part_ms(part) for part in (EXCHANGE, UPDATE, FUSED))
    return (
        f"A row for each of {len(devices)} devices, one for the exchange and one for Python's "
        f"thread, over {timeline.num_steps} steps of {1e3 * timeline.step_seconds:.1f} ms each. A "
        f"step takes {', '.join(devices)}, and {moved:.1f} ms for exchange and update. "
        f"{timeline.sentence()}."
    )
