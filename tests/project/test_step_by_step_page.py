"""docs/step-by-step.html in use: what it shows is the simulation's, for every reader."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qsl

import browser
import pytest

from gluonpar.collectives import ALGORITHMS, simulate
from gluonpar.plans.plan import num_chunks, num_steps
from gluonpar.plans.topologies import TOPOLOGIES, Link

DOCS = Path(__file__).resolve().parents[2] / "docs"
PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
pytestmark = [pytest.mark.slow, browser.needed]

TOLD = {
    "stepped": [
        {"algorithm": name, "devices": k, "topology": "full", "memory": memory}
        for name, k, memory in zip(PLANS, (2, 4, 5, 3, 7, 6), ("", "2", "", "", "5", "0.5"))
    ],
    "scrubbed": [
        [
            {"topology": on, "devices": k, "algorithm": name, "memory": "3"},
            [*range(0, 1000, 90), 1000],
        ]
        for on, k, name in (
            ("ethernet", 8, "halving-doubling"),
            ("pcie", 6, "balanced"),
            ("nvlink", 8, "halving-doubling"),
            ("nvswitch", 5, "star"),
        )
    ],
    "charts": [
        {"topology": on, "devices": k, "bytes": size, "memory": memory}
        for on, k, size, memory in (
            ("full", 8, "1M", ""),
            ("pcie", 16, "4K", "20"),
            ("nvlink", 8, "0", ""),
            ("ethernet", 12, "100M", "5"),
            ("nvswitch", 2, "1G", ""),
        )
    ],
}


def page(told) -> str:
    """The page, with the script that drives it."""
    driver = (Path(__file__).parents[1] / "support" / "step_by_step.js").read_text("utf-8")
    text = (DOCS / "step-by-step.html").read_text("utf-8")
    data = f'<script id="told" type="application/json">{json.dumps(told)}</script>'
    return text.replace("<head>", f"<head>{data}<script>{driver}</script>", 1)


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    """What the page shows while it is used."""
    folder = tmp_path_factory.mktemp("driven")
    shutil.copytree(DOCS / "assets", folder / "assets")
    return browser.run(folder, page(TOLD), "--virtual-time-budget=60000", "--lang=en")


def num_bytes(text):
    """The number that the page's K, M and G stand for."""
    number, unit = re.fullmatch(r"([\d.]+)([KMG]?)", text).groups()
    return round(float(number) * 1024 ** " KMG".index(unit or " "))


def settings_of(values):
    """The arguments of ``simulate`` and the package's result for settings of the page."""
    name, k, on = values["algorithm"], int(values["devices"]), values["topology"]
    memory = float(values["memory"] or "inf") * 1e9
    return name, k, on, simulate(name, k, num_bytes(values.get("bytes", "1M")), on, memory)


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


def label(chunks):
    """Consecutive chunks, as the page writes them."""
    first, last = min(chunks), max(chunks)
    assert len(chunks) == last - first + 1
    return f"{first}–{last}" if first < last else str(first)


def test_at_any_moment_messages_sums_and_shared_links_are_those_of_the_simulation(driven):
    glowing = 0
    for values, states in driven["scrubbed"]:
        name, k, on, result = settings_of(values)
        before, routes = numbers_before(name, k), TOPOLOGIES[on](k).routes
        alone = simulate(
            name, k, num_bytes("1M"), on
        )  # no time for sums: a message ends on arrival
        flights = {hop: end - begin for hop, begin, end in alone.timed}
        for position, shown in zip(TOLD["scrubbed"][0][1], states):
            (panel,), now = shown["panels"], position / 1000 * result.seconds
            assert shown["now"] == pytest.approx(now)
            moving, adding, have = {}, set(), dict(before[-1])
            step = max(hop.step for hop, begin, _ in result.timed if begin <= now)
            if position < 1000:
                have = dict(before[step])
            for hop, begin, end in result.timed if position < 1000 else ():
                if hop.step != step:
                    continue
                at, arrived = (hop.dst, hop.chunk), begin + flights[hop]
                gained = before[step + 1][at] - before[step][at]
                if now < arrived:
                    moving.setdefault((hop.src, hop.dst, hop.reduce), []).append(hop.chunk)
                elif now < end:
                    adding.add(hop.dst)
                    have[at] += (now - arrived) / (end - arrived) * gained
                else:
                    have[at] += gained
            texts = [f"{'=+'[adds]}{label(chunks)}" for (_, _, adds), chunks in moving.items()]
            used = Counter(i for src, dst, _ in moving for i in routes[src, dst] if i >= 0)
            shared = sorted(users for users in used.values() if users > 1)
            assert panel["messages"] == sorted(texts)
            assert panel["covered"] == 0  # devices' numbers
            assert panel["glowing"] == len(shared)
            assert sorted(panel["times"]) == [
                f"×{users}" for users in shared if users > 2 or len(shared) <= 8
            ]
            assert panel["adding"] == sorted(adding)
            assert panel["have"] == pytest.approx([*have.values()], abs=0.006)  # two digits
            glowing += len(shared)
    assert glowing > 20


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


def test_two_algorithms_run_on_one_clock_and_the_one_that_has_ended_says_so(driven):
    values = {**driven["chosen"]["form"], "topology": "ethernet"}
    on = TOPOLOGIES["ethernet"](6, link=Link(10e-6, 3.5e9), network=Link(7e-6, 1.2e9))
    results = {n: simulate(n, 6, 1 << 16, on, 20e9) for n in (values["algorithm"], values["with"])}
    longest = max(result.seconds for result in results.values())
    for shown, part in ((driven["chosen"]["shown"], 0.4), (driven["late"], 0.99)):
        assert shown["now"] == pytest.approx(part * longest)
        assert [panel["name"] for panel in shown["panels"]] == [*results]
        for panel, result in zip(shown["panels"], results.values()):
            ended = result.seconds < part * longest
            assert bool(panel["badge"]) == ended
            begun = sum(begin <= part * longest for begin in begins(result))
            assert panel["words"].startswith("Finished" if ended else f"Step {begun} of ")
    assert [bool(panel["badge"]) for panel in driven["late"]["panels"]] == [True, False]


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


def test_what_is_typed_is_shown_as_invalid_and_the_last_good_value_kept(driven):
    assert driven["invalid"] == [
        [None, "Times for 1M bytes", "1M", ""],
        [
            "true",
            "Times for 1M bytes",
            "many",
            "Bytes must be a number such as 4096, 4K, 1M or 1G, got “many”. "
            "The page still shows 1M.",
        ],
        [None, "Times for 2M bytes", "2M", ""],
    ]
    assert "from 2 to 16 on this topology, got “32”" in driven["many"]
    assert "from 2 to 8 on this topology, got nothing. The page still shows 8" in driven["empty"]


def test_only_the_links_of_the_plan_are_drawn(driven):
    assert driven["started"]["panels"][0]["wires"] == 8  # the ring, on a link per pair


def test_buttons_step_and_playing_goes_to_the_end(driven):
    times = begins(simulate("ring", 4, 1 << 20))
    moments = [shown["now"] for shown in driven["buttons"]]
    assert moments == pytest.approx([times[1], times[2], times[1], times[-1], 0])
    assert driven["played"]["now"] == pytest.approx(times[-1])


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
