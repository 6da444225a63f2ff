"""The operators in a file of MXNet's profiler, and the part of a training step that each is."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, Sequence

DATA, FORWARD, BACKWARD = "data", "forward", "backward"
EXCHANGE, UPDATE, OTHER = "exchange", "update", "other"
FUSED = "exchange + update"  # one operator does both

_UPDATE = re.compile(r"\w+_update(_phase[12])?")
_COPIES = {"CopyCPU2CPU", "CopyCPU2GPU", "CopyGPU2CPU", "CopyGPU2GPU", "_copyto", "_copy"}
_SUMS = {"elemwise_add", "add_n", "broadcast_maximum", "broadcast_minimum", "_div_scalar", "Cast"}


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
    and other operators backward, such as the sum of the losses. Elsewhere copies are data, and
    other operators forward, such as a cast or an augmentation of the batch.
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
        found.append(op._replace(part=part or _by_place(op.name, after_backward[op.device])))
    return found


def _by_name(name: str) -> str:
    if name in ("gluonpar.runtime.threads", "DeleteVariable"):
        return OTHER
    if name.startswith(("gluonpar", "KVStore")):
        return EXCHANGE
    if "_backward_" in name:
        return BACKWARD
    return UPDATE if _UPDATE.fullmatch(name) else ""


def _by_place(name: str, after_backward: bool) -> str:
    if after_backward:
        return EXCHANGE if name in _COPIES or name in _SUMS else BACKWARD
    return DATA if name in _COPIES else FORWARD
