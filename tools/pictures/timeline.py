"""Recorded training steps over time: one row per device, and one for the all-reduce."""

from __future__ import annotations

import os
import textwrap
from typing import Any, Sequence

from drawing import BACKWARD_COLOUR, COLOURS, FORWARD_COLOUR, GREY, save, style
from matplotlib.figure import Figure

from gluonpar.training.profiler import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    FUSED,
    UPDATE,
    Profile,
    Span,
)

COLOUR = {FORWARD: FORWARD_COLOUR, BACKWARD: BACKWARD_COLOUR}
COLOUR.update(dict.fromkeys((EXCHANGE, UPDATE, FUSED), COLOURS[1]))
GAP = 100.0  # operators of one kind with fewer microseconds between them are drawn as one


def record(profile: Profile, first: int, num_steps: int) -> dict[str, Any]:
    """Return ``num_steps`` whole steps of a profile from step ``first`` on, as written to JSON.

    A step begins where a device starts its first forward operator after a backward one. Times are
    whole microseconds from the beginning of the first step. Raises ValueError if the profile has
    too few steps.
    """
    devices = range(len(profile.devices))
    begins = [min(starts) for starts in zip(*(_starts(profile, i) for i in devices))]
    if first + num_steps >= len(begins):
        raise ValueError(
            f"first={first}, num_steps={num_steps}: the profile must have more steps than that, "
            f"got {len(begins)}; profile a longer run"
        )
    begin, end = begins[first], begins[first + num_steps]
    spans = []
    for device in devices:
        for part in COLOUR:
            ran = [(s.start, s.end) for s in profile.spans if (s.device, s.part) == (device, part)]
            for start, stop in _joined(ran):
                start, stop = max(start, begin) - begin, min(stop, end) - begin
                if start < stop:
                    spans.append(Span(part, device, round(start), round(stop), part))
    window = 0, round(end - begin)
    steps = Profile(profile.devices, window, num_steps, spans, profile.processors)
    return {
        "devices": profile.devices,
        "num_steps": num_steps,
        "window": list(window),
        "sentence": steps.sentence(),
        "spans": [[s.part, s.device, s.start, s.end] for s in spans],
    }


def _joined(intervals: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Return the intervals, sorted, with those joined that overlap or are less than GAP apart."""
    joined: list[list[float]] = []
    for start, end in sorted(intervals):
        if joined and start < joined[-1][1] + GAP:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined


def _starts(profile: Profile, device: int) -> list[float]:
    """Where the device runs forward for the first time after each backward."""
    starts, backward = [], True
    for span in sorted((s for s in profile.spans if s.device == device), key=lambda s: s.start):
        if span.part == FORWARD and backward:
            starts.append(span.start)
        backward = span.part == BACKWARD or (backward and span.part != FORWARD)
    return starts


def draw(steps: dict[str, Any], title: str, note: str, path: str | os.PathLike) -> None:
    """Draw what :func:`record` returned, with its sentence and ``note`` below, to ``path``."""
    names = [*steps["devices"], "all-reduce\nand update"]
    rows = [(i, (FORWARD, BACKWARD)) for i in range(len(steps["devices"]))]
    rows.append((None, (EXCHANGE, UPDATE, FUSED)))
    notes = [*textwrap.wrap(steps["sentence"], 112), *textwrap.wrap(note, 112)]
    with style("timeline"):
        figure = Figure((10, 3.6))
        axes = figure.add_axes((0.12, 0.34, 0.865, 0.46), xlim=(0, steps["window"][1] / 1e3))
        for y, (device, parts) in enumerate(rows):
            axes.axhspan(y - 0.32, y + 0.32, color=GREY, alpha=0.11, lw=0)
            for part in parts:
                ran = [
                    (start / 1e3, (end - start) / 1e3)
                    for kind, on, start, end in steps["spans"]
                    if kind == part and (device is None or on == device)
                ]
                if ran:
                    where = {"fc": COLOUR[part], "lw": 0.3, "ec": COLOUR[part]}
                    label = f"_{part}" if y and device is not None else part
                    gid = f"row-{y}-{part.replace(' ', '')}"
                    axes.broken_barh(ran, (y - 0.32, 0.64), label=label, gid=gid, **where)
        axes.set_yticks(range(len(rows)), names)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="milliseconds")
        axes.grid(axis="y", alpha=0)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.text(0.12, 0.93, title, size=13, weight="bold")
        where = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(ncol=6, frameon=False, handlelength=1.2, labelcolor=GREY, **where)
        for i, line in enumerate(notes):
            figure.text(0.12, 0.155 - 0.052 * i, line, size=9.5)
        save(figure, path, title, _description(steps))


def _description(steps: dict[str, Any]) -> str:
    def ms(parts: Sequence[str], device: int | None = None) -> float:
        """Milliseconds per step in these parts."""
        spans = [
            (b - a) for part, i, a, b in steps["spans"] if part in parts and device in (i, None)
        ]
        return sum(spans) / 1e3 / steps["num_steps"]

    devices = ", ".join(
        f"forward {ms([FORWARD], i):.1f} ms and backward {ms([BACKWARD], i):.1f} ms on {name}"
        for i, name in enumerate(steps["devices"])
    )
    step = steps["window"][1] / 1e3 / steps["num_steps"]
    return (
        f"One row per device, and one for the all-reduce and the update, over "
        f"{steps['num_steps']} steps of {step:.1f} ms each. A step takes {devices}, and "
        f"{ms([EXCHANGE, UPDATE, FUSED]):.1f} ms for all-reduce and update. {steps['sentence']}."
    )
