"""timeline: a step's parts add up, and the sentence says what the numbers say."""

import random
import re

import pytest

from gluonpar.training.timeline import FUSED, Span, Timeline, length, union, without

DEVICES = ["cpu(0)", "cpu(1)"]


def span(part, device, start, end, thread=0):
    return Span(f"some {part}", device, thread, start, end, part)


# Two steps of 1 ms in all: cpu(1) computes longer, cpu(0) then sums, both update.
SPANS = [
    *(span("data", None, 0, 100), span("forward", 0, 100, 400), span("forward", 1, 100, 500)),
    *(span("backward", 0, 400, 1000), span("backward", 1, 500, 1200)),
    *(span("exchange", 0, 1200, 1600), span("update", 0, 1600, 1700)),
    *(span("update", 1, 1600, 1800), span("other", 0, 1700, 1800)),
]
BYTES = {"data": 50_000, "exchange": 2_000_000, "update": 3_000_000}


@pytest.fixture
def two():
    return Timeline(DEVICES, (0, 2000), 2, SPANS, BYTES)


def instants(intervals):
    return {t for start, end in intervals for t in range(start, end)}


def test_intervals_are_the_same_instants_however_they_lie():
    rng = random.Random(0)
    for _ in range(300):
        a, b = (
            [(s, s + rng.randrange(6)) for s in rng.choices(range(30), k=rng.randrange(7))]
            for _ in "ab"
        )
        assert instants(union(a)) == instants(a)
        assert all(one[1] < other[0] for one, other in zip(union(a), union(a)[1:]))
        assert length(a) == len(instants(a))
        assert instants(without(a, b)) == instants(a) - instants(b)


def test_a_part_is_milliseconds_a_step_on_its_device(two):
    assert two.part_ms("forward", 0) == 0.15
    assert two.part_ms("backward", 1) == 0.35
    assert two.part_ms("data", None) == 0.05
    assert two.part_ms("data", 0) == 0
    assert two.part_ms("update") == 0.1  # of both devices, at the same time


def test_parts_and_idle_add_up_to_the_step_on_every_device(two):
    for device in (0, 1):
        parts = ("data", "forward", "backward", "exchange", "update", "other", "idle")
        assert sum(two.part_ms(part, device) for part in parts) == pytest.approx(1.0, rel=1e-12)
    assert two.step_seconds == 0.001


def test_what_several_operators_cover_counts_once():
    spans = [span("forward", 0, 0, 60), span("backward", 0, 40, 100, thread=1)]
    assert Timeline(DEVICES, (0, 200), 1, spans, {}).part_ms("idle", 0) == 0.1


def test_shares_say_what_each_instant_of_each_device_went_to(two):
    shares = two.shares()
    assert shares == pytest.approx(
        {
            "compute": (900 + 100 + 1100) / 4000,
            "update": (100 + 200) / 4000,
            "exchange": (400 + 400) / 4000,
            "slowest": 200 / 4000,  # cpu(0) waits from 1000 to 1200
            "Python": 600 / 4000,  # both at first and at the end
        },
        rel=1e-12,
    )
    assert sum(shares.values()) == pytest.approx(1, rel=1e-12)


def test_overlap_is_the_share_of_the_exchange_during_which_some_device_computed(two):
    assert two.overlap() == 0
    hidden = [*SPANS, span("backward", 1, 1200, 1350)]
    assert Timeline(DEVICES, (0, 2000), 2, hidden, {}).overlap() == pytest.approx(150 / 600)


def test_exchange_behind_computing_costs_nothing():
    spans = [span("backward", 0, 0, 100), span("backward", 1, 0, 100), span("exchange", 0, 20, 80)]
    timeline = Timeline(DEVICES, (0, 100), 1, spans, {})
    assert timeline.overlap() == 1
    assert timeline.shares()["compute"] == 1
    assert timeline.shares()["exchange"] == 0


def test_nothing_exchanged_has_no_overlap():
    assert Timeline(DEVICES, (0, 9), 1, [span("forward", 0, 0, 9)], {}).overlap() is None


def test_the_table(two):
    first, *rows, last = [line.split("  ") for line in two.table().splitlines()]
    rows = {name: [cell.strip() for cell in cells if cell] for name, *cells in rows}
    assert first[:3] == ["ms per step", *DEVICES]
    assert last[0].startswith("0% ")
    assert rows == {
        "data": ["0.00", "0.00", "0.05", "0.05", "1.00"],  # MB per step and GB/s at the end
        "forward": ["0.15", "0.20"],
        "backward": ["0.30", "0.35"],
        "exchange": ["0.20", "0.00", "2.00", "10.00"],
        "update": ["0.05", "0.10", "3.00", "30.00"],
        "other": ["0.05", "0.00"],
        "idle": ["0.25", "0.35"],
    }
    without_bytes = Timeline(DEVICES, (0, 2000), 2, SPANS, {}).table().splitlines()
    assert without_bytes[4].split() == ["exchange", "0.20", "0.00"]


def fused():
    spans = [s._replace(part=FUSED) if s.part == "exchange" else s for s in SPANS]
    return Timeline(DEVICES, (0, 2000), 2, [s for s in spans if s.part != "update"], BYTES)


def test_one_operator_for_exchange_and_update_is_one_row_with_both_bytes():
    rows = [line.split("  ")[0] for line in fused().table().splitlines()[:-1]]
    assert rows == [*("ms per step", "data", "forward", "backward", FUSED, "other", "idle")]
    [row] = [line for line in fused().table().splitlines() if line.startswith(FUSED + " ")]
    assert row.split()[3:] == ["0.20", "0.00", "5.00", "25.00"]


def test_one_device_exchanges_nothing_and_overlaps_with_nobody():
    alone = [s for s in SPANS if s.device in (0, None) and s.part != "exchange"]
    table = Timeline(DEVICES[:1], (0, 2000), 2, alone, BYTES).table()
    assert "exchange" not in table
    assert "overlap" not in table


def percentages(sentence):
    return re.findall(r"[\d.]+%", sentence)


def test_the_sentence_of_two_devices(two):
    """Compute, slowest device, exchange, update, Python; the speed-up."""
    sentence = two.sentence()
    assert percentages(sentence) == ["52.5%", "5.0%", "20.0%", "7.5%", "15.0%"]
    assert sentence.startswith("2 devices: ") and "at best 1.12 times" in sentence
    assert "exchange and update not hidden" in fused().sentence()


def test_the_sentence_of_one_device_compares_with_no_other():
    spans = [span("forward", 0, 0, 900), span("update", 0, 900, 950)]
    sentence = Timeline(["gpu(0)"], (0, 1000), 1, spans, {}).sentence()
    assert percentages(sentence) == ["90.0%", "5.0%", "5.0%"]
    assert sentence.startswith("1 device: ") and "times" not in sentence


def test_devices_that_share_processors_are_not_faster_than_these():
    names = [f"cpu({i})" for i in range(4)]
    spans = [span("forward", i, 0, 1000) for i in range(4)]
    for processors, times in ((2, "2.00"), (4, "4.00"), (None, "4.00")):
        sentence = Timeline(names, (0, 1000), 1, spans, {}, processors).sentence()
        assert f"at best {times} times" in sentence
        assert ("2 processors" in sentence) == (processors == 2)


def rows(events, kind):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == kind}


def test_the_trace_has_a_row_for_each_device_one_for_python_and_one_for_the_exchange(two):
    events = two.trace([Span("step 1", None, 0, 0, 1000)])
    assert list(rows(events, "process_name").values()) == [*DEVICES, "Python", "exchange"]
    assert rows(events, "thread_name") == {
        **{(0, 0): "thread 0", (1, 0): "thread 0", (2, 0): "thread 0"},
        (3, 0): "run by cpu(0)",
    }
    where = {(e["cat"], e["pid"]) for e in events if e["ph"] == "X"}
    assert ("exchange", 3) in where
    assert ("exchange", 0) not in where
    assert {pid for part, pid in where if part in ("forward", "backward", "update")} == {0, 1}
    assert {part for part, pid in where if pid == 2} == {"data", ""}


def test_the_trace_counts_from_the_windows_begin():
    spans = [span("forward", 0, 1030, 1040), span("forward", 0, 1032, 1041, thread=9)]
    events = Timeline(DEVICES, (1000, 2000), 1, spans, {}).trace()
    found = [(e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"]
    assert found == [(30, 10, 0), (32, 9, 1)]
