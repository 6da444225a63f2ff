"""What MXNet's profiler wrote is read and given its part of a step; the parts add up."""

import json
import random
import re

import pytest

from gluonpar.training.timeline import (
    FUSED,
    Span,
    Timeline,
    classify,
    events,
    length,
    read,
    union,
    without,
)

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
FUSED_SPANS = [
    span._replace(part=FUSED if span.part == "exchange" else span.part)
    for span in SPANS
    if span.part != "update"
]


@pytest.fixture
def two():
    return Timeline(DEVICES, (0, 2000), 2, SPANS)


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


def percentages(sentence):
    return re.findall(r"[\d.]+%", sentence)


def test_the_sentence_of_two_devices(two):
    """Compute, slowest device, exchange, update, Python; the speed-up."""
    sentence = two.sentence()
    assert percentages(sentence) == ["52.5%", "5.0%", "20.0%", "7.5%", "15.0%"]
    assert sentence.startswith("2 devices: ") and "at best 1.12 times" in sentence
    assert (
        "exchange and update not hidden" in Timeline(DEVICES, (0, 2000), 2, FUSED_SPANS).sentence()
    )


def test_the_sentence_of_one_device_compares_with_no_other():
    spans = [span("forward", 0, 0, 900), span("update", 0, 900, 950)]
    sentence = Timeline(["gpu(0)"], (0, 1000), 1, spans).sentence()
    assert percentages(sentence) == ["90.0%", "5.0%", "5.0%"]
    assert sentence.startswith("1 device: ") and "times" not in sentence


def test_devices_that_share_processors_are_not_faster_than_these():
    names = [f"cpu({i})" for i in range(4)]
    spans = [span("forward", i, 0, 1000) for i in range(4)]
    for processors, times in ((2, "2.00"), (4, "4.00"), (None, "4.00")):
        sentence = Timeline(names, (0, 1000), 1, spans, processors).sentence()
        assert f"at best {times} times" in sentence
        assert ("2 processors" in sentence) == (processors == 2)


def test_exchange_behind_computing_costs_nothing():
    spans = [span("backward", 0, 0, 100), span("backward", 1, 0, 100), span("exchange", 0, 20, 80)]
    assert Timeline(DEVICES, (0, 100), 1, spans).shares()["compute"] == 1


def test_the_table_has_a_row_for_each_part_that_there_is(two):
    first, *rows = [line.split() for line in two.table().splitlines()]
    assert first == ["ms", "per", "step", *DEVICES, "Python"]
    assert rows == [
        ["data", "0.00", "0.00", "0.05"],
        ["forward", "0.15", "0.20"],
        ["backward", "0.30", "0.35"],
        ["exchange", "0.20", "0.00"],
        ["update", "0.05", "0.10"],
        ["other", "0.05", "0.00"],
        ["idle", "0.25", "0.35"],
    ]
    fused = Timeline(DEVICES, (0, 2000), 2, FUSED_SPANS).table().splitlines()
    names = [line.split("  ")[0] for line in fused]
    assert names == ["ms per step", "data", "forward", "backward", FUSED, "other", "idle"]


def test_the_trace_has_a_process_for_each_device_python_and_the_exchange_and_begins_at_0():
    shifted = [s._replace(start=s.start + 1000, end=s.end + 1000) for s in SPANS]
    timeline = Timeline(DEVICES, (1000, 3000), 2, shifted)
    events = timeline.trace_events([Span("step 1", None, 0, 1000, 2000, "step")])
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    drawn = [
        (names[e["pid"]], e["cat"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"
    ]
    assert drawn[0] == ("Python", "step", 0, 1000)
    for s, event in zip(SPANS, drawn[1:]):
        where = "Python" if s.device is None else DEVICES[s.device]
        assert event == ("exchange" if s.part == "exchange" else where, s.part, s.start, s.end)


# Reading and classifying


def event(kind, name, ts, pid=0, tid=7):
    return {"name": name, "cat": "operator", "ph": kind, "ts": ts, "pid": pid, "tid": tid}


def file(*found):
    return json.dumps({"traceEvents": list(found), "displayTimeUnit": "ms"}, indent=4)


ONE = (event("B", "relu", 10), event("E", "relu", 15))


def test_a_file_that_begins_with_a_comma_too_many_is_read():
    text = file(*ONE).replace("[", "[\n,\n", 1)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert events(text) == list(ONE)


def test_threads_of_one_device_do_not_mix():
    both = (
        *(event("B", "relu", 10, tid=1), event("B", "exp", 11, tid=2)),
        *(event("E", "relu", 15, tid=1), event("E", "exp", 12, tid=2)),
    )
    assert read(file(*both), {0: 0}, 0, 100) == [
        Span("relu", 0, 1, 10, 15),
        Span("exp", 0, 2, 11, 12),
    ]


def test_other_processes_and_kinds_of_events_are_left_out():
    others = (
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "cpu/0"}},
        {**event("b", "relu", 10, pid=99), "id": 1},
        *(event("B", "relu", 10, pid=1), event("E", "relu", 11, pid=1)),
    )
    assert read(file(*others, *ONE), {0: 0}, 0, 100) == [Span("relu", 0, 7, 10, 15)]


@pytest.mark.parametrize(
    ("window", "intervals"),
    [((10, 15), [(10, 15)]), ((11, 20), []), ((0, 9), []), ((0, 12), [(10, 12)])],
)
def test_only_what_began_in_the_window_counts_and_ends_with_it(window, intervals):
    assert [(s.start, s.end) for s in read(file(*ONE), {0: 0}, *window)] == intervals


def parts(*names, k=2):
    """The parts of operators (name, or (device, name)) that run one after the other."""
    pairs = [name if isinstance(name, tuple) else (0, name) for name in names]
    spans = [Span(name, device, 0, i, i + 1) for i, (device, name) in enumerate(pairs)]
    return [span.part for span in classify(spans, k)]


FORWARD_SEGMENT = "_minus_scalar,_div_scalar,Convolution,relu"
BACKWARD_SEGMENT = "_backward_log,_backward_sum,elemwise_mul,_backward_FullyC"


def test_a_traced_step_with_a_sum_and_an_update_a_device():
    step = ("ImperativeBulk", FORWARD_SEGMENT, BACKWARD_SEGMENT, "transpose,transpose")
    names = (*step, "gluonpar.host", "multi_sgd_update")
    expected = ["forward", "forward", "backward", "backward", "exchange", "update"]
    assert parts(*names) == expected
    assert parts(*names, *names) == expected * 2


def test_a_bulk_is_backward_only_where_nothing_else_shows_backward():
    untraced = ("Convolution", "relu", "ImperativeBulk", "broadcast_sub", "gluonpar.update")
    assert parts(*untraced, "Convolution", k=1) == [
        *("forward", "forward", "backward", "backward", "update", "forward"),
    ]


def test_copies_and_sums_after_backward_are_exchange_and_before_it_are_not():
    names = ("CopyCPU2CPU", "elemwise_add", "_backward_relu", "CopyCPU2CPU", "elemwise_add")
    assert parts(*names, "sgd_update", "CopyCPU2CPU") == [
        *("data", "forward", "backward", "exchange", "exchange", "update", "data"),
    ]


def test_an_update_that_one_device_runs_for_all_is_exchange_too():
    names = ("_backward_relu", (1, "_backward_relu"), "gluonpar.update", (1, "relu"), "relu")
    assert parts(*names) == ["backward", "backward", FUSED, "forward", "forward"]


def test_an_update_on_every_device_is_only_an_update():
    names = ("_backward_relu", (1, "_backward_relu"), "gluonpar.update", (1, "elemwise_add"))
    assert parts(*names, (1, "gluonpar.update")) == [
        *("backward", "backward", "update", "exchange", "update"),
    ]


def test_an_update_after_a_sum_is_only_an_update_even_on_one_device():
    assert parts("_backward_relu", "gluonpar.host", "gluonpar.update")[1:] == ["exchange", "update"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gluonpar", "exchange"),
        ("gluonpar.host", "exchange"),
        ("KVStoreReduce", "exchange"),
        ("gluonpar.runtime.threads", "other"),
        ("DeleteVariable", "other"),
        ("sgd_update", "update"),
        ("multi_mp_sgd_mom_update", "update"),
        ("adam_update", "update"),
        ("lamb_update_phase1", "update"),
        ("_backward_Convolution", "backward"),
        ("update_gate", "forward"),
        ("Convolution", "forward"),
        ("_copyto", "data"),
    ],
)
def test_a_name_on_its_own(name, part):
    assert parts(name) == [part]
