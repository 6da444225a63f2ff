"""docs/step-by-step.html has the package's plans and topologies, and computes what it does."""

from __future__ import annotations

import inspect
import json
import math
import re
from itertools import product
from pathlib import Path

import browser
import pytest

from gluonpar.collectives import ALGORITHMS, Hop, simulate
from gluonpar.plans.registry import Algorithm
from gluonpar.plans.topologies import TOPOLOGIES, Link

DOCS = Path(__file__).resolve().parents[2] / "docs"
PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
ASSETS = DOCS / "assets" / "step-by-step"
# Unlike the defaults and unlike each other, by the names of the topologies' parameters.
LINKS = {"link": Link(3e-6, 7e9), "sockets": Link(9e-6, 11e9), "network": Link(4e-5, 2e9)}
LINKS["pci"] = Link(2e-5, 5e9)

COMPUTE = """
const parse = (id) => JSON.parse(document.getElementById(id).textContent);
const compute = ({ algorithm, devices, bytes, topology, kinds, memory }) => {
  const on = topologyOf(topology, devices, kinds);
  const { seconds, steps } = simulate(algorithm, devices, bytes, on, memory || Infinity);
  const hops = steps.flatMap(({ messages }, step) => messages.flatMap((m) => m.chunks.map(
    (chunk) => [step, m.src, m.dst, chunk, m.adds, m.route, m.begin, m.end])));
  return { seconds, hops };
};
const machines = Object.entries(PLANS.topologies).flatMap(([topology, { kinds, machines }]) =>
  Object.keys(machines).map((k) => [topology, +k, topologyOf(topology, k, Object.values(kinds))]));
PLANS.algorithms.funnel = { plans: { 3: { chunks: 2, steps: ["10+0 20+0", "10+01 20+01"] } } };
const report = { computed: parse("cases").map(compute), machines };
document.getElementById("report").textContent = JSON.stringify(report);
"""


def cases():
    """Every algorithm on every topology, each with its default links and with others."""
    sizes, memories = (4096, 1e8, 0, 516_272, 1, 1e9), (None, 2e10, 5e8)
    for i, (name, on, links) in enumerate(product(PLANS, TOPOLOGIES, ({}, LINKS))):
        k = 8 - i % 3 if on == "nvlink" else 2 + 4 * i % 15
        yield name, k, sizes[i % 6], on, links, memories[i // 2 % 3]
    yield "funnel", 3, 1e6, "full", {}, 2e10


def funnel(num_devices):
    """Two steps of the same messages, with one chunk and with two, as in ``COMPUTE``."""
    hops = [(0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1)]
    return [Hop(step, src, 0, chunk, reduce=True) for step, src, chunk in hops]


def parameters(on, links):
    """The links that a topology's function takes, by name: the default ones, or ``links``."""
    every = inspect.signature(TOPOLOGIES[on]).parameters.values()
    return {p.name: links.get(p.name, p.default) for p in every if isinstance(p.default, Link)}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """What the browser computes of ``cases``, and its topologies."""
    told = [
        {
            "algorithm": name,
            "devices": k,
            "bytes": num_bytes,
            "topology": on,
            "kinds": [link._asdict() for link in parameters(on, links).values()],
            "memory": memory,
        }
        for name, k, num_bytes, on, links, memory in cases()
    ]
    sources = (f"{ASSETS.as_uri()}/{name}.js" for name in ("plans", "words", "page"))
    scripts = "".join(f'<script src="{source}"></script>' for source in sources)
    page = f'<script id="cases" type="application/json">{json.dumps(told)}</script>'
    page += f'<pre id="report"></pre>{scripts}<script>{COMPUTE}</script>'
    return browser.run(tmp_path_factory.mktemp("computed"), page)


@browser.needed
def test_the_page_computes_what_simulate_does(computed, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "funnel", Algorithm("funnel", funnel))
    assert len(computed["computed"]) == len(list(cases())) >= 30
    assert {k for _, k, *_ in cases()} == set(range(2, 17))
    for (name, k, num_bytes, on, links, memory), result in zip(cases(), computed["computed"]):
        topology = TOPOLOGIES[on](k, **parameters(on, links))
        expected = simulate(name, k, num_bytes, topology, memory or math.inf)
        assert result["seconds"] == pytest.approx(expected.seconds, rel=1e-9), (name, k, on)
        timed = {tuple(hop): (begin, end) for hop, begin, end in expected.timed}
        assert {tuple(hop[:5]): tuple(hop[6:]) for hop in result["hops"]} == {
            hop: pytest.approx(times, rel=1e-9) for hop, times in timed.items()
        }, (name, k, on)
        for _, src, dst, _, _, route, *_ in result["hops"]:
            assert route == [i for i in topology.routes[src, dst] if i >= 0]


@browser.needed
def test_the_page_has_the_topologies_of_the_package(computed):
    machines = {(on, k): machine for on, k, machine in computed["machines"]}
    assert set(machines) == {
        (on, k) for on in TOPOLOGIES for k in range(2, 9 if on == "nvlink" else 17)
    }
    for (on, k), machine in machines.items():
        expected, links = TOPOLOGIES[on](k), machine["links"]
        assert [link["name"] for link in links] == expected.links
        for number in ("latency", "bandwidth"):
            values = getattr(expected, number)[:-1].tolist()
            assert [link[number] for link in links] == pytest.approx(values, rel=1e-12), (on, k)
        routes = [[[i for i in route if i >= 0] for route in row] for row in expected.routes]
        assert machine["routes"] == routes, (on, k)


def test_nothing_is_loaded_from_outside():
    page = DOCS / "step-by-step.html"
    for path in (page, *ASSETS.iterdir()):
        text = path.read_text("utf-8")
        assert not re.search(r"https?:|//\w|url\((?!#)|@import|fetch\(|XMLHttp|import\(", text), (
            path
        )
    links = re.findall(r'(?:src|href)="([^"]+)"', page.read_text("utf-8"))
    assert len(links) == 5 and all((DOCS / link).exists() for link in links)
