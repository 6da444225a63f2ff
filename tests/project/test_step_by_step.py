"""docs/step-by-step.html plays what `simulate` computes, in a real browser.

The browser is Debian's chromium, or another one of the same family.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from simulator import TOPOLOGIES, simulate

from gluonpar.collectives import ALGORITHMS
from gluonpar.plans.plan import num_chunks, num_steps

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DOCS = Path(__file__).resolve().parents[2] / "docs"
PLANS = [name for name, plan in ALGORITHMS.items() if plan]
ASSETS = DOCS / "assets" / "step-by-step"
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(BROWSERS)}")


def run(folder: Path, page: str):
    """Open a page in the browser and return what its scripts have written into #report."""
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    switches = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom".split()
    # It would ignore what is written into the link after 200 changes in ten seconds.
    switches.append("--disable-ipc-flooding-protection")
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [BROWSER, *switches, profile, "--lang=en", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.S)
    assert done.returncode == 0 and found, done.stderr
    return json.loads(html.unescape(found[1]))


def test_nothing_is_loaded_from_outside():
    page = DOCS / "step-by-step.html"
    for path in (page, *ASSETS.iterdir()):
        text = path.read_text("utf-8")
        loads = r"https?:|//\w|url\((?!#)|@import|fetch\(|XMLHttp|import\("
        assert not re.search(loads, text), path
    links = re.findall(r'(?:src|href)="([^"]+)"', page.read_text("utf-8"))
    assert len(links) == 5 and all((DOCS / link).exists() for link in links)


# A sample of what it plays, with every algorithm, topology, number of devices and size.
SIZES = {"4K": 2**12, "1M": 2**20, "256M": 2**28}
DEVICES = (2, 3, 4, 5, 6, 7, 8, 16)
EVERY = [
    {"algorithm": name, "topology": on, "devices": k, "bytes": size}
    for i, (name, on) in enumerate(product(PLANS, TOPOLOGIES))
    for k in [DEVICES[(3 * i + i // len(TOPOLOGIES)) % len(DEVICES)]]
    for size in [[*SIZES][i % 3]]
]
TOLD = {
    "timelines": EVERY,
    "stepped": [
        {"algorithm": name, "devices": k, "topology": "full", "bytes": "1M"}
        for name, k in zip(PLANS, (2, 4, 5, 3, 7, 6, 8))
    ],
    "charts": [
        {"topology": on, "devices": k, "bytes": size}
        for on, k, size in zip(TOPOLOGIES, (8, 16, 2, 7), ("1M", "4K", "1M", "4K"))
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
    return run(folder, driven_page(TOLD))


def num_bytes(text):
    """The number that the page's K, M and G stand for."""
    number, unit = re.fullmatch(r"([\d.]+)([KMG]?)", text).groups()
    return round(float(number) * 1024 ** " KMG".index(unit or " "))


def simulated(values):
    """The package's result for settings of the page; bytes may be any number."""
    num_bytes = SIZES.get(values.get("bytes", "1M")) or values["bytes"]
    return simulate(values["algorithm"], values["devices"], num_bytes, values["topology"])


def numbers_before(name, k):
    """How many devices' values each chunk of each device has before each step, and at the end."""
    hops = ALGORITHMS[name](k)
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
def test_the_page_plays_what_simulate_says(driven):
    assert {v["devices"] for v in EVERY if v["topology"] == "ethernet"} >= {2, 7, 16}
    for values, played in zip(EVERY, driven["timelines"]):
        expected, on = simulated(values), TOPOLOGIES[values["topology"]](values["devices"])
        assert played["seconds"] == pytest.approx(expected.seconds, rel=1e-6), values
        assert {tuple(hop[:5]): hop[6:] for hop in played["hops"]} == {
            tuple(hop): pytest.approx([begin, end], rel=1e-6) for hop, begin, end in expected.timed
        }, values
        for _, src, dst, _, _, links, *_ in played["hops"]:
            assert links == [on.links[i] for i in on.routes[src, dst] if i >= 0]


@pytest.mark.slow
@needs_browser
def test_a_step_forward_or_back_goes_to_where_the_simulation_begins_a_step(driven):
    assert driven["errors"] == driven.get("failed", [])
    for told in driven["stepped"]:
        name, k = told["values"]["algorithm"], told["values"]["devices"]
        result = simulated(told["values"])
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
def test_the_keys_go_from_step_to_step_after_a_drag_of_the_slider(driven):
    times = begins(simulated(TOLD["stepped"][-1]))
    dragged_to = 0.4 * times[-1]
    after = next(i for i, time in enumerate(times) if time > dragged_to)
    expected = [times[after], times[after - 1], times[after - 2], times[-1], 0]
    assert all(pressed["taken"] for pressed in driven["dragged"])
    assert [pressed["now"] for pressed in driven["dragged"]] == pytest.approx(expected)


@pytest.mark.slow
@needs_browser
def test_the_chart_and_its_table_mark_the_algorithms_that_simulate_finds_fastest(driven):
    for told in driven["charts"]:
        values = told["values"]

        def seconds(size, values=values):
            times = {n: simulated({**values, "algorithm": n, "bytes": size}) for n in PLANS}
            return {name: result.seconds for name, result in times.items()}

        def best(times):
            return {name for name in PLANS if times[name] <= min(times.values()) * (1 + 1e-9)}

        times = seconds(values["bytes"])
        assert [row[1] for row in told["rows"]] == PLANS
        for marked, name, steps, time, relative in told["rows"]:
            assert int(steps) == num_steps(ALGORITHMS[name](int(values["devices"])))
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
                times = seconds(round(num_bytes(size) * towards))
                assert best(times) == {*names.strip().split(" = ")}, (values, size)


@pytest.mark.slow
@needs_browser
def test_a_link_carries_the_settings_and_what_is_not_valid_in_it_is_the_default(driven):
    chosen, usual, again = (driven[name] for name in ("chosen", "usual", "again"))
    carried = dict(parse_qsl(chosen["hash"][1:]))
    moment = carried.pop("t")
    assert float(moment) * 1e-6 == pytest.approx(chosen["shown"]["now"], rel=1e-6)
    assert {**usual["form"], **carried} == chosen["form"]
    assert again["form"] == chosen["form"] and again["hash"] == chosen["hash"]
    assert again["shown"]["panels"] == chosen["shown"]["panels"]
    assert usual["hash"] == "" and usual["form"] == driven["started"]["form"]
    assert driven["bad"]["form"] == usual["form"]
    assert driven["bad"]["shown"] == usual["shown"]
    assert driven["beyond"]["form"]["devices"] == "8"  # there are not 12 to choose
    assert "Finished" in driven["beyond"]["shown"]["panels"][0]["words"]
