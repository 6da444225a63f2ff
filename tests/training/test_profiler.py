"""Profiler: only the steps in its window are recorded, each operator has its part, and they add up.

The expected values of the synthetic profiles are counted by hand, or instant by instant.
"""

import random
import re

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.models import lenet
from gluonpar.runtime import threads
from gluonpar.training.profiler import (
    FUSED,
    PARTS,
    Profile,
    Profiler,
    Span,
    classify,
    process_of,
    read,
)
from gluonpar.training.workloads import pixel_lenet

CTX = [mx.cpu(0), mx.cpu(1)]
DEVICES = ["cpu(0)", "cpu(1)"]


def test_the_window_has_every_devices_part_of_the_steps_after_the_warm_up():
    X, y = np.arange(6 * 28 * 28, dtype="uint8").reshape(6, 1, 28, 28), np.arange(6)
    params = lenet.init_lenet(0.05)
    device_params = [gluonpar.get_params(params, c) for c in CTX]
    with Profiler(CTX, warm_up=2, num_steps=3) as watched:
        for _ in range(7):
            gluonpar.train_batch(X, y, device_params, CTX, 0.1, pixel_lenet)
            mx.nd.ones((2,), ctx=mx.cpu(2)).wait_to_read()  # in no profile
            watched.step()
    spans, (begin, end) = watched.profile.spans, watched.profile.window
    assert watched.steps == (3, 5) and watched.profile.num_steps == 3
    for device in (0, 1):
        names = [span.name for span in spans if span.device == device]
        assert sum("_backward_FullyConnected" in name for name in names) == 3
        assert sum("Convolution" in name and "_backward_" not in name for name in names) == 3
        assert {"forward", "backward"} <= {span.part for span in spans if span.device == device}
    assert sum(span.part in ("update", FUSED) for span in spans) >= 3
    assert all(begin <= span.start <= span.end <= end for span in spans)


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
    names = {span.name for span in watched.profile.spans}
    assert {"sin", "cos", "tan"} & names == {"sin"}
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
        _ = watched.profile


def test_with_no_steps_mxnets_profiler_is_never_used(monkeypatch):
    monkeypatch.setattr(mx.profiler, "set_state", None)
    monkeypatch.setattr(mx.profiler, "set_config", None)
    watched = Profiler([mx.cpu(99)], num_steps=0, warm_up=0)
    with watched:
        watched.step()


def test_the_processes_of_a_profile_are_those_of_processors_and_then_gpus():
    processors = threads.cores()
    contexts = [*map(mx.cpu, range(processors + 2)), mx.gpu(0), mx.gpu(2)]
    numbers = [*range(processors + 2), processors, processors + 2]
    assert [*map(process_of, contexts)] == numbers
    most = processors + 2
    with pytest.raises(ValueError, match=rf"cpu\({most}\) cannot be .* {most} CPU"):
        Profiler([mx.cpu(most)])


# Adding up


def span(part, device, start, end):
    return Span(f"some {part}", device, start, end, part)


def by_instants(spans, end):
    """Rows of the table, and shares, of two steps of ``end`` ms in all, instant by instant."""
    rows, counts = {}, dict.fromkeys(("compute", "update", "exchange", "slowest", "Python"), 0)
    for t in range(end):
        running = [(s.part, s.device) for s in spans if s.start <= 1e3 * t < s.end]
        for device in (0, 1):
            mine = {part for part, on in running if on == device}
            for part in mine or {"idle"}:
                rows.setdefault(part, [0, 0])[device] += 0.5
            if mine - {"update", "exchange", FUSED}:
                counts["compute"] += 1
            elif "update" in mine:
                counts["update"] += 1
            elif {"exchange", FUSED} & {part for part, _ in running}:
                counts["exchange"] += 1
            else:
                counts["slowest" if running else "Python"] += 1
    rows.setdefault("idle", [0, 0])
    return rows, {reason: count / (2 * end) for reason, count in counts.items()}


def percentages(sentence):
    return re.findall(r"[\d.]+%", sentence)


def test_the_table_and_the_shares_count_every_instant_of_every_device_once():
    """And the sentence has the shares in percent, and the speedup that they allow."""
    rng = random.Random(0)
    for _ in range(100):
        spans = [
            span(
                rng.choice(PARTS), rng.randrange(2), 1e3 * start, 1e3 * (start + rng.randint(1, 9))
            )
            for start in rng.choices(range(30), k=rng.randrange(9))
        ]
        profile = Profile(DEVICES, (0, 40e3), 2, spans)
        rows, shares = by_instants(spans, 40)
        heading, *lines = [re.split("  +", line) for line in profile.table().splitlines()]
        assert heading == ["ms per step", *DEVICES]
        assert [name for name, *_ in lines] == [p for p in (*PARTS, "idle") if p in rows]
        assert {name: [*map(float, times)] for name, *times in lines} == rows
        assert profile.shares() == pytest.approx(shares, rel=1e-12)
        sentence, found = profile.sentence(), profile.shares()
        losses = [found[reason] for reason in ("slowest", "exchange", "update", "Python")]
        said = [found["compute"], *filter(None, losses)]
        assert percentages(sentence) == [f"{share:.1%}" for share in said]
        assert sentence.startswith("2 devices: ")
        assert f"at best {2 * found['compute'] + found['update']:.2f} times" in sentence
        fused = FUSED in rows and found["exchange"] > 0
        assert ("exchange and update not hidden" in sentence) == fused
        assert profile.step_seconds == 0.02


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


# Reading and classifying


def event(kind, name, ts, pid=0):
    return {"name": name, "cat": "operator", "ph": kind, "ts": ts, "pid": pid, "tid": 7}


@pytest.mark.parametrize(
    ("window", "intervals"),
    [((10, 15), [(10, 15)]), ((11, 20), []), ((0, 9), []), ((0, 12), [(10, 12)])],
)
def test_only_a_devices_operators_that_began_in_the_window_count_and_end_with_it(window, intervals):
    events = (
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "cpu/0"}},
        *({**event(kind, "relu", 10, pid=99), "id": 1} for kind in "be"),
        *(event("B", "relu", 10), event("E", "relu", 15)),
        *(event("B", "exp", 10, pid=1), event("E", "exp", 11, pid=1)),
    )
    spans = [Span("relu", 0, start, end) for start, end in intervals]
    assert read(events, {0: 0}, *window) == spans


def parts(*names, k=2):
    """The parts of operators (name, or (device, name)) that run one after the other."""
    pairs = [name if isinstance(name, tuple) else (0, name) for name in names]
    spans = [Span(name, device, i, i + 1) for i, (device, name) in enumerate(pairs)]
    return [span.part for span in classify(spans, k)]


FORWARD_SEGMENT = "_minus_scalar,_div_scalar,Convolution,relu"
BACKWARD_SEGMENT = "_backward_log,_backward_sum,elemwise_mul,_backward_FullyC"
BOTH = ("_backward_relu", (1, "_backward_relu"))

STEPS = {
    "a sum on the host, an update on every device": (
        ("ImperativeBulk", FORWARD_SEGMENT, BACKWARD_SEGMENT, "transpose,transpose")
        + ("gluonpar.host", "multi_sgd_update"),
        ("forward", "forward", "backward", "backward", "exchange", "update"),
    ),
    "copies and sums by MXNet after backward; before it they are something else": (
        ("CopyCPU2CPU", "elemwise_add", "_backward_relu", "CopyCPU2CPU", "elemwise_add")
        + ("sgd_update",),
        ("data", "forward", "backward", "exchange", "exchange", "update"),
    ),
    "one update for all": (
        (*BOTH, "gluonpar.allreduce_update", (1, "relu"), "relu"),
        ("backward", "backward", FUSED, "forward", "forward"),
    ),
    "an update on every device, a sum in MXNet": (
        (*BOTH, "gluonpar.update", (1, "elemwise_add"), (1, "gluonpar.update")),
        ("backward", "backward", "update", "exchange", "update"),
    ),
    "a sum on the host, an update on one device": (
        ("_backward_relu", "gluonpar.host", "gluonpar.update"),
        ("backward", "exchange", "update"),
    ),
    "a sum on the host, an update of MXNet's operators": (
        (*BOTH, "gluonpar.host", "_mul_scalar", (1, "_mul_scalar")),
        ("backward", "backward", "exchange", "forward", "forward"),
    ),
    "a kvstore that updates on one device and copies the parameters to the other": (
        (*BOTH, "ElementwiseSum", "sgd_update", (1, "CopyCPU2CPU"), (1, "relu"), "relu"),
        ("backward", "backward", "exchange", "update", "exchange", "forward", "forward"),
    ),
}


@pytest.mark.parametrize("kind", STEPS)
def test_the_parts_of_a_step_and_of_the_next(kind):
    names, expected = STEPS[kind]
    assert parts(*names, *names) == [*expected] * 2


def test_a_bulk_is_backward_only_where_nothing_else_shows_backward():
    untraced = ("Convolution", "relu", "ImperativeBulk", "broadcast_sub", "gluonpar.update")
    assert parts(*untraced, "Convolution", k=1) == [
        *("forward", "forward", "backward", "backward", "update", "forward"),
    ]


NAMES = {
    "exchange": ("gluonpar", "gluonpar.host", "KVStoreReduce"),
    "other": ("gluonpar.runtime.threads", "DeleteVariable", "WaitForVar"),
    "update": ("sgd_update", "multi_mp_sgd_mom_update", "adam_update", "lamb_update_phase1"),
    "backward": ("_backward_Convolution",),
    "forward": ("update_gate", "Convolution"),
    "data": ("_copyto",),
}


@pytest.mark.parametrize("part", NAMES)
def test_a_name_on_its_own(part):
    assert [parts(name) for name in NAMES[part]] == [[part]] * len(NAMES[part])
