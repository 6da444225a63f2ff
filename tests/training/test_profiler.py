"""Profiler: only the steps in its window are recorded, each operator has its part, and they add up.

The expected values of the synthetic profiles are counted by hand, or instant by instant.
"""

import json
import random
import re

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.models import lenet
from gluonpar.runtime import threads
from gluonpar.training import profiler
from gluonpar.training.data import dataset
from gluonpar.training.profiler import FUSED, PARTS, Profile, Profiler, Span, classify, read
from gluonpar.training.workloads import pixel_lenet

CTX = [mx.cpu(0), mx.cpu(1)]
DEVICES = ["cpu(0)", "cpu(1)"]
X = np.arange(6 * 28 * 28, dtype="uint8").reshape(6, 1, 28, 28)
Y = np.arange(6, dtype="int32")


def loop(watched, num_steps, ctx=CTX):
    """Steps of LeNet under ``watched``; the parameters of each device afterwards."""
    mx.random.seed(0)
    params = lenet.init_lenet(0.05)
    device_params = [gluonpar.get_params(params, c) for c in ctx]
    batches = dataset.batches(np.tile(X, (num_steps, 1, 1, 1)), np.tile(Y, num_steps), len(X))
    with watched:
        for images, labels in batches:
            gluonpar.train_batch(images, labels, device_params, ctx, 0.1, pixel_lenet)
            watched.step()
    return device_params


def names_of(watched):
    return {span.name for span in watched.profile.spans}


@pytest.fixture(scope="module")
def watched():
    recording = Profiler(CTX, warm_up=2, num_steps=3)
    loop(recording, 7)
    return recording


@pytest.mark.parametrize("device", [0, 1])
def test_every_device_shows_each_steps_forward_and_backward(watched, device):
    names = [span.name for span in watched.profile.spans if span.device == device]
    assert sum("_backward_FullyConnected" in name for name in names) == 3
    assert sum("Convolution" in name and "_backward_" not in name for name in names) == 3
    for part in ("forward", "backward"):
        assert watched.profile.part_ms(part, device) > 0


def test_the_window_has_the_steps_after_the_warm_up_and_their_operators(watched):
    assert watched.steps == (3, 5)
    assert watched.profile.num_steps == 3
    parts = [span.part for span in watched.profile.spans]
    assert parts.count("update") + parts.count(FUSED) >= 3
    begin, end = watched.profile.window
    for span in watched.profile.spans:
        assert begin <= span.start <= span.end <= end, span


def test_a_profiled_loop_ends_with_the_same_bits():
    plain, seen = (loop(Profiler(CTX, warm_up=1, num_steps=n), 4) for n in (0, 2))
    for one, other in zip(plain, seen):
        assert [p.asnumpy().tobytes() for p in one] == [p.asnumpy().tobytes() for p in other]


def kept_by_mxnet(tmp_path):
    """Names of the operators that MXNet's profiler has kept since it was last asked."""
    path = tmp_path / "rest.json"
    mx.nd.waitall()
    mx.profiler.set_config(filename=str(path), continuous_dump=False, profile_memory=False)
    mx.profiler.set_state("run")
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    return {*re.findall(r'"name": "(\w+)",\s*"cat": "\w+",\s*"ph": "B"', path.read_text())}


def test_only_the_window_is_recorded(tmp_path):
    kept_by_mxnet(tmp_path)
    with Profiler(CTX, warm_up=1, num_steps=1) as watched:
        mx.nd.ones((3,)).cos().wait_to_read()
        watched.step()
        mx.nd.ones((3,)).sin()
        watched.step()
        mx.nd.ones((3,)).tan().wait_to_read()
    assert {"sin", "cos", "tan"} & names_of(watched) == {"sin"}
    assert kept_by_mxnet(tmp_path) == set()


def test_running_operators_end_before_the_window_begins():
    done = []
    gluonpar.runtime.engine.push(
        lambda: done.append(sum(range(3_000_000))), CTX[1], reads=[mx.nd.ones((1,))]
    )
    with Profiler(CTX, warm_up=0, num_steps=1):
        assert len(done) == 1


def test_an_operators_error_in_the_window_reaches_the_caller_and_ends_it(tmp_path):
    with pytest.raises(mx.MXNetError, match="a bug"):
        with Profiler(CTX, warm_up=0, num_steps=1) as watched:
            marker = mx.nd.zeros((1,))
            gluonpar.runtime.engine.push(lambda: {}["a bug"], CTX[0], writes=[marker])
            watched.step()
    mx.nd.ones((3,)).cos().wait_to_read()
    assert kept_by_mxnet(tmp_path) == set()


@pytest.mark.parametrize(("warm_up", "taken"), [(3, 2), (3, 3), (0, 0)])
def test_a_loop_that_ends_before_the_window_has_no_profile(warm_up, taken):
    watched = Profiler(CTX, warm_up=warm_up, num_steps=1)
    with watched:
        for _ in range(taken):
            watched.step()
    with pytest.raises(ValueError, match=f"{taken} steps and the first {warm_up} "):
        watched.table()


def test_with_no_steps_mxnets_profiler_is_never_used(monkeypatch):
    monkeypatch.setattr(mx.profiler, "set_state", None)
    monkeypatch.setattr(mx.profiler, "set_config", None)
    watched = Profiler([mx.cpu(99)], num_steps=0, warm_up=0)
    with watched:
        watched.step()


def test_devices_that_mxnets_profiler_cannot_record_are_refused():
    most = threads.cores() + 2
    assert profiler.device_of_process([mx.cpu(i) for i in range(most)]) == {
        i: i for i in range(most)
    }
    with pytest.raises(ValueError, match=rf"cpu\({most}\) cannot be .* {most} CPU"):
        Profiler([mx.cpu(most)])


def test_gpus_are_numbered_after_the_processors(monkeypatch):
    names = ["cpu/0", "cpu/1", "gpu/0", "gpu/1", "gpu/2", "cpu pinned/", "cpu shared/"]
    monkeypatch.setattr(profiler, "_processes", lambda: names)
    assert profiler.device_of_process([mx.gpu(0), mx.gpu(2)]) == {2: 0, 4: 1}
    with pytest.raises(ValueError, match=r"cpu\(2\) cannot be .* 2 CPU contexts and 3 GPUs"):
        profiler.device_of_process([mx.cpu(2)])


def test_the_trace_has_the_operators_of_the_window_by_device(watched, tmp_path):
    path = tmp_path / "trace.json"
    watched.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == DEVICES
    begun = [(processes[e["pid"]], e["name"]) for e in events if e["ph"] == "B"]
    profiled = [(DEVICES[span.device], span.name) for span in watched.profile.spans]
    assert sorted(begun) == sorted(profiled)


# Adding up: two steps of 1 ms in all. cpu(1) computes longer, cpu(0) then sums, both update.


def span(part, device, start, end):
    return Span(f"some {part}", device, start, end, part)


SPANS = [
    *(span("data", 0, 0, 100), span("forward", 0, 100, 400), span("forward", 1, 100, 500)),
    *(span("backward", 0, 400, 1000), span("backward", 1, 500, 1200)),
    *(span("exchange", 0, 1200, 1600), span("update", 0, 1600, 1700)),
    *(span("update", 1, 1600, 1800), span("other", 0, 1700, 1800)),
]
TWO = Profile(DEVICES, (0, 2000), 2, SPANS)
WITH_FUSED = Profile(
    DEVICES,
    (0, 2000),
    2,
    [
        s._replace(part=FUSED if s.part == "exchange" else s.part)
        for s in SPANS
        if s.part != "update"
    ],
)


def test_a_part_takes_the_instants_in_which_it_runs_each_of_them_once():
    rng = random.Random(0)
    for _ in range(100):
        spans = [
            span(rng.choice(PARTS), rng.randrange(2), start, start + rng.randrange(9))
            for start in rng.choices(range(30), k=rng.randrange(9))
        ]
        profile = Profile(DEVICES, (0, 40), 1, spans)
        for device, part in ((0, "forward"), (1, "update"), (None, "exchange"), (0, "idle")):
            instants = {
                t
                for s in spans
                for t in range(s.start, s.end)
                if device in (None, s.device) and part in (s.part, "idle")
            }
            expected = 40 - len(instants) if part == "idle" else len(instants)
            assert 1e3 * profile.part_ms(part, device) == pytest.approx(expected, rel=1e-12)
        assert sum(profile.shares().values()) == pytest.approx(1, rel=1e-12)


def test_parts_and_idle_add_up_to_the_step_on_every_device():
    for device in (0, 1):
        parts = ("data", "forward", "backward", "exchange", "update", "other", "idle")
        assert sum(TWO.part_ms(part, device) for part in parts) == pytest.approx(1.0, rel=1e-12)
    assert TWO.step_seconds == 0.001


def test_shares_say_what_each_instant_of_each_device_went_to():
    assert TWO.shares() == pytest.approx(
        {
            "compute": (1000 + 100 + 1100) / 4000,
            "update": (100 + 200) / 4000,
            "exchange": (400 + 400) / 4000,
            "slowest": (200 + 100) / 4000,  # cpu(0) from 1000 to 1200, cpu(1) up to 100
            "Python": 400 / 4000,  # both at the end
        },
        rel=1e-12,
    )


def percentages(sentence):
    return re.findall(r"[\d.]+%", sentence)


def test_the_sentence_of_two_devices():
    """Compute, slowest device, exchange, update, Python; the speed-up."""
    sentence = TWO.sentence()
    assert percentages(sentence) == ["55.0%", "7.5%", "20.0%", "7.5%", "10.0%"]
    assert sentence.startswith("2 devices: ") and "at best 1.18 times" in sentence
    assert "exchange and update not hidden" in WITH_FUSED.sentence()


def test_the_sentence_of_one_device_compares_with_no_other():
    spans = [span("forward", 0, 0, 900), span("update", 0, 900, 950)]
    sentence = Profile(["gpu(0)"], (0, 1000), 1, spans).sentence()
    assert percentages(sentence) == ["90.0%", "5.0%", "5.0%"]
    assert sentence.startswith("1 device: ") and "times" not in sentence


def test_devices_that_share_processors_are_not_faster_than_these():
    names = [f"cpu({i})" for i in range(4)]
    spans = [span("forward", i, 0, 1000) for i in range(4)]
    for processors, times in ((2, "2.00"), (4, "4.00"), (None, "4.00")):
        sentence = Profile(names, (0, 1000), 1, spans, processors).sentence()
        assert f"at best {times} times" in sentence
        assert ("2 processors" in sentence) == (processors == 2)


def test_exchange_behind_computing_costs_nothing():
    spans = [span("backward", 0, 0, 100), span("backward", 1, 0, 100), span("exchange", 0, 20, 80)]
    assert Profile(DEVICES, (0, 100), 1, spans).shares()["compute"] == 1


def test_the_table_has_a_row_for_each_part_that_there_is():
    first, *rows = [line.split() for line in TWO.table().splitlines()]
    assert first == ["ms", "per", "step", *DEVICES]
    assert rows == [
        ["data", "0.05", "0.00"],
        ["forward", "0.15", "0.20"],
        ["backward", "0.30", "0.35"],
        ["exchange", "0.20", "0.00"],
        ["update", "0.05", "0.10"],
        ["other", "0.05", "0.00"],
        ["idle", "0.20", "0.35"],
    ]
    names = [line.split("  ")[0] for line in WITH_FUSED.table().splitlines()]
    assert names == ["ms per step", "data", "forward", "backward", FUSED, "other", "idle"]


# Reading and classifying


def event(kind, name, ts, pid=0, tid=7):
    return {"name": name, "cat": "operator", "ph": kind, "ts": ts, "pid": pid, "tid": tid}


ONE = (event("B", "relu", 10), event("E", "relu", 15))


def test_threads_of_one_device_do_not_mix():
    both = (
        *(event("B", "relu", 10, tid=1), event("B", "exp", 11, tid=2)),
        *(event("E", "relu", 15, tid=1), event("E", "exp", 12, tid=2)),
    )
    assert sorted(read(both, {0: 0}, 0, 100)) == [
        Span("exp", 0, 11, 12),
        Span("relu", 0, 10, 15),
    ]


def test_other_processes_and_kinds_of_events_are_left_out():
    unused = (
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "cpu/0"}},
        {**event("b", "relu", 10, pid=99), "id": 1},
        *(event("B", "relu", 10, pid=1), event("E", "relu", 11, pid=1)),
    )
    assert read((*unused, *ONE), {0: 0}, 0, 100) == [Span("relu", 0, 10, 15)]


@pytest.mark.parametrize(
    ("window", "intervals"),
    [((10, 15), [(10, 15)]), ((11, 20), []), ((0, 9), []), ((0, 12), [(10, 12)])],
)
def test_only_what_began_in_the_window_counts_and_ends_with_it(window, intervals):
    assert [(s.start, s.end) for s in read(ONE, {0: 0}, *window)] == intervals


def parts(*names, k=2):
    """The parts of operators (name, or (device, name)) that run one after the other."""
    pairs = [name if isinstance(name, tuple) else (0, name) for name in names]
    spans = [Span(name, device, i, i + 1) for i, (device, name) in enumerate(pairs)]
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
