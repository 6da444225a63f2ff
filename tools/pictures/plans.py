"""The plans and topologies as data for docs/step-by-step.html, which simulates them in a browser.

In a plan, a word is a message: sender, receiver, "+" if the receiver adds and "=" if it replaces,
and the chunks, each as one digit in base 36. A line of words is a step. In a topology, a link has
a name, the number of its kind, and the factors by which it has the kind's latency and bandwidth,
which readers choose; a link of kind -1 has exactly these numbers. ``routes`` has a line per sender
with a word per receiver: the numbers of the links on the way, each as two digits in base 36.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import defaultdict
from typing import Any, Callable, Iterable

from drawing import colour_of

from gluonpar.collectives import ALGORITHMS, Hop
from gluonpar.plans.plan import num_chunks, num_steps
from gluonpar.plans.topologies import TOPOLOGIES, Link, Topology

DEVICES = range(2, 17)
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
    """Return docs/assets/step-by-step/plans.js, which has one line per plan and per topology."""
    algorithms = {
        name: _algorithm(name, algorithm.plan, colour_of(name))
        for name, algorithm in ALGORITHMS.items()
        if algorithm.plan is not None
    }
    topologies = {name: _topology(make) for name, make in TOPOLOGIES.items()}
    plans = _lines({"algorithms": _lines(algorithms), "topologies": _lines(topologies)})
    return f"// Written by tools/draw_pictures.py: make pictures\nconst PLANS = {plans};\n"


def _lines(values: dict[Any, str]) -> str:
    """JSON of an object with a line per name; the values are JSON."""
    return "{\n" + ",\n".join(f'"{name}": {value}' for name, value in values.items()) + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _algorithm(name: str, plan: Callable[[int], list[Hop]], colour: str) -> str:
    documentation = sys.modules[plan.__module__].__doc__ or ""
    english = documentation.splitlines()[0].partition(": ")[2]
    english = english[:1].upper() + english[1:]
    parts = {"colour": colour, "en": english, "zh": CHINESE.get(name, english)}
    plans = _lines({k: _json(_plan(plan(k))) for k in DEVICES})
    return _lines({**{key: _json(part) for key, part in parts.items()}, "plans": plans})


def _plan(hops: list[Hop]) -> dict[str, Any]:
    words: list[dict[str, str]] = [defaultdict(str) for _ in range(num_steps(hops))]
    for step, src, dst, chunk, reduce in sorted(hops):
        words[step][DIGITS[src] + DIGITS[dst] + "=+"[reduce]] += DIGITS[chunk]
    steps = [" ".join(map("".join, step.items())) for step in words]
    return {"chunks": num_chunks(hops), "steps": steps}


def _topology(make: Callable[..., Topology]) -> str:
    parameters = inspect.signature(make).parameters.values()
    kinds = {p.name: p.default for p in parameters if isinstance(p.default, Link)}
    machines = {k: _json(_machine(make, kinds, k)) for k in DEVICES if _exists(make, k)}
    links = {name: kind._asdict() for name, kind in kinds.items()}
    return _lines({"kinds": _json(links), "machines": _lines(machines)})


def _exists(make: Callable[..., Topology], num_devices: int) -> bool:
    try:
        return bool(make(num_devices))
    except ValueError:
        return False


def _machine(make: Callable[..., Topology], kinds: Iterable[str], k: int) -> dict[str, Any]:
    """The links of a topology and its routes.

    A link is of the kind whose latency adds to its own, or of none: the links between the sockets
    of a cube mesh.
    """
    none = {kind: Link(0.0, 1.0) for kind in kinds}
    bare = make(k, **none)
    links = [[-1, *numbers] for numbers in zip(bare.latency[:-1], bare.bandwidth)]
    for number, kind in enumerate(kinds):
        made = make(k, **{**none, kind: Link(1.0, 1.0)})
        for i in (made.latency != bare.latency).nonzero()[0]:
            links[i] = [number, made.latency[i], made.bandwidth[i]]
    named = [f"{name}: " + " ".join(f"{n:g}" for n in of) for name, of in zip(bare.links, links)]
    routes = [
        " ".join("".join(_two_digits(link) for link in route if link >= 0) for route in row)
        for row in make(k).routes
    ]
    return {"links": named, "routes": routes}


def _two_digits(number: int) -> str:
    return DIGITS[number // 36] + DIGITS[number % 36]
