"""docs/step-by-step.html: it computes what the package does, and shows that, in a real browser.

The browser is Debian's chromium, or another one of the same family.
"""

from __future__ import annotations

import html
import inspect
import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from gluonpar.collectives import ALGORITHMS, Hop, simulate
from gluonpar.plans.plan import num_chunks, num_steps
from gluonpar.plans.registry import Algorithm
from gluonpar.plans.topologies import TOPOLOGIES, Link

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DOCS = Path(__file__).resolve().parents[2] / "docs"
PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
ASSETS = DOCS / "assets" / "step-by-step"
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(BROWSERS)}")


def run(folder: Path, page: str, *options: str):
    """Open a page in the browser and return what its scripts have written into #report."""
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    switches = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom".split()
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [BROWSER, *switches, profile, *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.S)
    assert done.returncode == 0 and found, done.stderr
    return json.loads(html.unescape(found[1]))


# What it computes

# Unlike the defaults and unlike each other, by the names of the topologies' parameters.
LINKS = {"link": Link(3e-6, 7e9), "sockets": Link(9e-6, 11e9), "network": Link(4e-5, 2e9)}
LINKS["pci"] = Link(2e-5, 5e9)

COMPUTE = """
const parse = (id) => JSON.parse(document.getElementById(id).textContent);
const compute = ({ algorithm, devices, bytes, topology, kinds }) => {
  const on = topologyOf(topology, devices, kinds);
  const { seconds, steps } = simulate(algorithm, devices, bytes, on);
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
    sizes = (4096, 1e8, 0, 516_272, 1, 1e9)
    for i, (name, on, links) in enumerate(product(PLANS, TOPOLOGIES, ({}, LINKS))):
        k = 8 - i % 3 if on == "nvlink" else 2 + 4 * i % 15
        yield name, k, sizes[i % 6], on, links
    yield "funnel", 3, 1e6, "full", {}


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
        }
        for name, k, num_bytes, on, links in cases()
    ]
    sources = (f"{ASSETS.as_uri()}/{name}.js" for name in ("plans", "words", "page"))
    scripts = "".join(f'<script src="{source}"></script>' for source in sources)
    page = f'<script id="cases" type="application/json">{json.dumps(told)}</script>'
    page += f'<pre id="report"></pre>{scripts}<script>{COMPUTE}</script>'
    return run(tmp_path_factory.mktemp("computed"), page)


@needs_browser
def test_the_page_computes_what_simulate_does(computed, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "funnel", Algorithm("funnel", funnel))
    assert len(computed["computed"]) == len(list(cases())) >= 30
    assert {k for _, k, *_ in cases()} == set(range(2, 17))
    for (name, k, num_bytes, on, links), result in zip(cases(), computed["computed"]):
        topology = TOPOLOGIES[on](k, **parameters(on, links))
        expected = simulate(name, k, num_bytes, topology)
        assert result["seconds"] == pytest.approx(expected.seconds, rel=1e-9), (name, k, on)
        timed = {tuple(hop): (begin, end) for hop, begin, end in expected.timed}
        assert {tuple(hop[:5]): tuple(hop[6:]) for hop in result["hops"]} == {
            hop: pytest.approx(times, rel=1e-9) for hop, times in timed.items()
        }, (name, k, on)
        for _, src, dst, _, _, route, *_ in result["hops"]:
            assert route == [i for i in topology.routes[src, dst] if i >= 0]


@needs_browser
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


# What it shows while it is used

TOLD = {
    "stepped": [
        {"algorithm": name, "devices": k, "topology": "full"}
        for name, k in zip(PLANS, (2, 4, 5, 3, 7, 6))
    ],
    "charts": [
        {"topology": on, "devices": k, "bytes": size}
        for on, k, size in (
            ("full", 8, "1M"),
            ("pcie", 16, "4K"),
            ("nvlink", 8, "0"),
            ("ethernet", 12, "100M"),
            ("nvswitch", 2, "1G"),
        )
    ],
}


def driven_page(told) -> str:
    """The page, with the script that drives it as a reader does."""
    driver = (Path(__file__).parents[1] / "support" / "step_by_step.js").read_text("utf-8")
    text = (DOCS / "step-by-step.html").read_text("utf-8")
    data = f'<script id="told" type="application/json">{json.dumps(told)}</script>'
    return text.replace("<head>", f"<head>{data}<script>{driver}</script>", 1)


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    """What the page shows while it is used."""
    folder = tmp_path_factory.mktemp("driven")
    shutil.copytree(DOCS / "assets", folder / "assets")
    return run(folder, driven_page(TOLD), "--virtual-time-budget=60000", "--lang=en")


def num_bytes(text):
    """The number that the page's K, M and G stand for."""
    number, unit = re.fullmatch(r"([\d.]+)([KMG]?)", text).groups()
    return round(float(number) * 1024 ** " KMG".index(unit or " "))


def settings_of(values):
    """The arguments of ``simulate`` and the package's result for settings of the page."""
    name, k, on = values["algorithm"], int(values["devices"]), values["topology"]
    return name, k, on, simulate(name, k, num_bytes(values.get("bytes", "1M")), on)


def numbers_before(name, k):
    """How many devices' values each chunk of each device has before each step, and at the end."""
    hops = ALGORITHMS[name].plan(k)
    chunks, values = num_chunks(hops), {}
    values = {(i, chunk): {i} for i in range(k) for chunk in range(chunks)}
    states = [dict(values)]
    for step in range(num_steps(hops)):
        for _, src, dst, chunk, reduce in (hop for hop in hops if hop.step == step):
            kept = values[dst, chunk] if reduce else set()
            values[dst, chunk] = kept | states[-1][src, chunk]
        states.append(dict(values))
    return [{at: len(some) for at, some in state.items()} for state in states]


def begins(result):
    """When the steps begin, and the end."""
    return [*sorted({begin for _, begin, _ in result.timed}), result.seconds]


@pytest.mark.slow
@needs_browser
def test_a_step_forward_or_back_goes_to_where_the_simulation_begins_a_step(driven):
    assert driven["errors"] == driven.get("failed", [])
    for told in driven["stepped"]:
        name, k, _, result = settings_of(told["values"])
        assert [shown["now"] for shown in told["forward"]] == pytest.approx(begins(result))
        assert told["back"] == pytest.approx(begins(result)[-2::-1])
        for i, (shown, numbers) in enumerate(zip(told["forward"], numbers_before(name, k))):
            (panel,) = shown["panels"]
            assert panel["have"] == [*numbers.values()], (name, i)
            assert panel["whole"] == [*numbers.values()].count(k)
            if i < len(told["forward"]) - 1:
                assert panel["words"].startswith(f"Step {i + 1} of {len(told['back'])}, ")
        assert set(told["forward"][0]["panels"][0]["have"]) == {1}
        assert set(told["end"]["panels"][0]["have"]) == {k}
        assert told["end"] == told["forward"][-1] and "Finished" in panel["words"]


@pytest.mark.slow
@needs_browser
def test_the_chart_and_its_table_mark_the_algorithms_that_simulate_finds_fastest(driven):
    for told in driven["charts"]:
        values = told["values"]

        def seconds(size, values=values):
            times = {n: settings_of({**values, "algorithm": n, "bytes": size}) for n in PLANS}
            return {name: result.seconds for name, (*_, result) in times.items()}

        def best(times):
            return {name for name in PLANS if times[name] <= min(times.values()) * (1 + 1e-9)}

        times = seconds(values["bytes"])
        assert [row[1] for row in told["rows"]] == PLANS
        for marked, name, steps, time, relative in told["rows"]:
            assert int(steps) == num_steps(ALGORITHMS[name].plan(int(values["devices"])))
            number, unit = time.split()
            seconds_shown = float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
            assert seconds_shown == pytest.approx(times[name], rel=0.006)  # three digits
            assert (marked == "fastest") == (relative == "fastest") == (name in best(times))
            if marked != "fastest":
                factor = float(relative.split()[0])
                assert factor == pytest.approx(times[name] / min(times.values()), rel=0.006)
        ranges = re.findall(r"([a-z= -]+) from (\S+) to ([\d.]+[KMG]?)", told["sentence"])
        assert (ranges[0][1], ranges[-1][2]) == ("256", "1G")
        assert (told["strip"], told["lines"]) == (len(ranges), len(PLANS))
        for names, first, last in ranges:
            for size, towards in ((first, 1.01), (last, 1 / 1.01)):
                times = seconds(str(round(num_bytes(size) * towards)))
                assert best(times) == {*names.strip().split(" = ")}, (values, size)


@pytest.mark.slow
@needs_browser
def test_a_link_carries_the_settings_and_what_is_not_valid_in_it_is_the_default(driven):
    chosen, usual, again = (driven[name] for name in ("chosen", "usual", "again"))
    carried = dict(parse_qsl(chosen["hash"][1:]))
    moment = carried.pop("t")
    assert float(moment) * 1e-6 == pytest.approx(chosen["shown"]["now"], rel=1e-6)
    assert {**usual["form"], **carried, "latency": "10"} == {**chosen["form"], "bandwidth2": ""}
    assert again["form"] == chosen["form"] and again["hash"] == chosen["hash"]
    assert again["shown"]["panels"] == chosen["shown"]["panels"]
    assert usual["hash"] == "" and usual["form"] == driven["started"]["form"]
    assert driven["bad"]["form"] == usual["form"]
    assert driven["bad"]["shown"] == usual["shown"]
    assert driven["beyond"]["form"]["devices"] == "8"  # nvlink has no more
    assert "Finished" in driven["beyond"]["shown"]["panels"][0]["words"]


@pytest.mark.slow
@needs_browser
def test_every_word_is_there_in_chinese(driven):
    english, chinese = driven["text"]["en"], driven["text"]["zh"]
    assert english.keys() == chinese.keys()
    for name, text in english.items():
        assert sorted(re.findall(r"\{\d\}", text)) == sorted(re.findall(r"\{\d\}", chinese[name]))
    shown = driven["chinese"]
    assert (shown["lang"], shown["title"]) == ("zh-CN", chinese["title"])
    assert driven["english"] == {"lang": "en", "title": english["title"]}
    assert shown["now"] == pytest.approx(20e-6)
    names = [*PLANS, *TOPOLOGIES, "gluonpar.collectives.simulate", "all-reduce", "English"]
    names += ["Home", "End", "DGX-1V", "NVLink", "PCIe", "GPU", "CPU"]
    words = "\n".join([shown["title"], *shown["words"]])
    assert len(words) > 1000
    text = re.sub("|".join(map(re.escape, sorted(names, key=len, reverse=True))), "", words)
    assert re.findall(r"[A-Za-z]{3,}", text) == []
