"""What docs/step-by-step.html plays: the plans, and when `simulate` says each message arrives.

A word of a plan is a message: sender, receiver, "+" if the receiver adds and "=" if it replaces,
and the chunks, each as one digit in base 36. A line of words is a step. A machine is a topology for
some devices: links (name and bandwidth), and routes, with a line per sender and a word per
receiver, the numbers of the links on the way as two digits in base 36. ``seconds`` has a number per
size of the chart. ``steps`` has, for each size that is played, a line per step: after how many
microseconds each message has arrived, one number if it is the same for all of them, and nothing if
the line is that of the step before.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any, Callable, Iterable, Sequence

from drawing import colour_of
from simulator import TOPOLOGIES, Topology, simulate

from gluonpar.collectives import ALGORITHMS, Hop
from gluonpar.plans.plan import num_chunks, num_steps

DEVICES = (2, 3, 4, 5, 6, 7, 8, 16)
PLAYED = {"4K": 2**12, "1M": 2**20, "256M": 2**28}
CHART = [2**power for power in range(8, 31, 2)]  # 256 bytes to 1 GB
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# The first line of an algorithm's file, in Chinese.
CHINESE = {
    "star": "每个设备都把数组发给设备 0，由它求和，再把和发回每个设备。",
    "balanced": "设备 c 对所有设备的块 c 求和，然后每个设备取来所有的和。",
    "ring": "各块沿环形传递：先是不断增大的部分和，再是完整的和。",
    "bidirectional-ring": "两个方向相反的环形同时进行，各传一半的块。",
    "tree": "部分和沿二项树向上汇到设备 0，和再沿原路向下发回。",
    "halving-doubling": "设备两两交换一半，再交换四分之一、八分之一；然后反向进行。",
    "recursive-doubling": "设备两两交换整个数组并各自相加，距离依次为 1、2、4……",
}


def text() -> str:
    """Return docs/assets/step-by-step/timelines.js, which has one line per plan and machine."""
    plans = {name: plan for name, plan in ALGORITHMS.items() if plan}
    algorithms = {name: _algorithm(name, plan, colour_of(name)) for name, plan in plans.items()}
    topologies = {
        name: _lines({k: _json(_machine(make(k), plans)) for k in DEVICES})
        for name, make in TOPOLOGIES.items()
    }
    parts = {"played": _json([*PLAYED]), "chart": _json(CHART)}
    parts.update(algorithms=_lines(algorithms), topologies=_lines(topologies))
    written = "// Written by tools/draw_pictures.py: make pictures"
    return f"{written}\nconst TIMELINES = {_lines(parts)};\n"


def _lines(values: dict[Any, str]) -> str:
    """JSON of an object with a line per name; the values are JSON."""
    return "{\n" + ",\n".join(f'"{name}": {value}' for name, value in values.items()) + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _algorithm(name: str, plan: Callable[[int], list[Hop]], colour: str) -> str:
    documentation = sys.modules[plan.__module__].__doc__ or ""
    english = documentation.splitlines()[0].partition(": ")[2]
    english = english[:1].upper() + english[1:]
    parts = {"colour": colour, "en": english, "zh": CHINESE.get(name, english)}
    plans = _lines({k: _json(_plan(plan(k))) for k in DEVICES})
    return _lines({**{key: _json(part) for key, part in parts.items()}, "plans": plans})


def _plan(hops: list[Hop]) -> dict[str, Any]:
    words: list[dict[str, str]] = [defaultdict(str) for _ in range(num_steps(hops))]
    for hop in sorted(hops):
        words[hop.step][_message(hop)] += DIGITS[hop.chunk]
    return {"chunks": num_chunks(hops), "steps": [" ".join(map("".join, s.items())) for s in words]}


def _message(hop: Hop) -> str:
    return DIGITS[hop.src] + DIGITS[hop.dst] + "=+"[hop.reduce]


def _machine(on: Topology, algorithms: Iterable[str]) -> dict[str, Any]:
    k = on.num_devices
    routes = [
        " ".join(_digits(link for link in route if link >= 0) for route in row) for row in on.routes
    ]
    return {
        "links": [f"{name}: {bandwidth:g}" for name, bandwidth in zip(on.links, on.bandwidth)],
        "routes": routes,
        "seconds": {
            name: [float(f"{simulate(name, k, size, on).seconds:.7g}") for size in CHART]
            for name in algorithms
        },
        "steps": {
            name: [_steps(name, on, size) for size in PLAYED.values()] for name in algorithms
        },
    }


def _digits(links: Iterable[int]) -> str:
    return "".join(DIGITS[link // 36] + DIGITS[link % 36] for link in links)


def _steps(algorithm: str, on: Topology, num_bytes: int) -> list[str]:
    timed = sorted(simulate(algorithm, on.num_devices, num_bytes, on).timed)
    steps: list[dict[str, str]] = [{} for _ in range(timed[-1][0].step + 1)]
    for hop, begin, end in timed:
        steps[hop.step][_message(hop)] = f"{(end - begin) * 1e6:.7g}"
    lines = [_short([*step.values()]) for step in steps]
    return ["" if line == before else line for before, line in zip(["", *lines], lines)]


def _short(times: Sequence[str]) -> str:
    return times[0] if len({*times}) == 1 else " ".join(times)
