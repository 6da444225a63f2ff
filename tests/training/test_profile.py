"""Profiler: only the steps in the window are recorded, and no result changes."""

import json

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.models import lenet
from gluonpar.runtime import memory, threads
from gluonpar.training import profiler, timeline
from gluonpar.training.data import dataset
from gluonpar.training.profiler import Profiler
from gluonpar.training.workloads import pixel_lenet

CTX = [mx.cpu(0), mx.cpu(1)]
X = np.arange(6 * 28 * 28, dtype="uint8").reshape(6, 1, 28, 28)
Y = np.arange(6, dtype="int32")


def loop(watched, num_steps, ctx=CTX):
    """Steps of LeNet under ``watched``; the parameters of each device afterwards."""
    mx.random.seed(0)
    params = lenet.init_lenet(0.05)
    device_params = [gluonpar.get_params(params, c) for c in ctx]
    batches = dataset.batches(np.tile(X, (num_steps, 1, 1, 1)), np.tile(Y, num_steps), len(X))
    with watched:
        for images, labels in watched.loading(batches):
            gluonpar.train_batch(images, labels, device_params, ctx, 0.1, pixel_lenet)
            watched.step()
    return device_params


def recorded(tmp_path):
    """Names of the operators that MXNet's profiler has kept since it was last asked."""
    path = tmp_path / "rest.json"
    mx.nd.waitall()
    mx.profiler.set_config(filename=str(path), continuous_dump=False, profile_memory=False)
    mx.profiler.set_state("run")
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    return {event["name"] for event in timeline.events(path.read_text()) if event["ph"] == "B"}


@pytest.fixture(scope="module")
def watched():
    found = Profiler(CTX, warm_up=2, num_steps=3)
    loop(found, 7)
    return found


def spans(watched, device):
    return [span for span in watched.timeline.spans if span.device == device]


@pytest.mark.parametrize("device", [0, 1])
def test_every_device_shows_each_steps_forward_and_backward(watched, device):
    names = [span.name for span in spans(watched, device)]
    assert sum("_backward_FullyConnected" in name for name in names) == 3
    assert sum("Convolution" in name and "_backward_" not in name for name in names) == 3
    for part in ("forward", "backward"):
        assert watched.timeline.part_ms(part, device) > 0


def test_the_window_has_the_steps_after_the_warm_up_and_their_operators(watched):
    assert watched.steps == (3, 5)
    assert watched.timeline.num_steps == 3
    parts = [span.part for span in watched.timeline.spans]
    assert parts.count("update") + parts.count(timeline.FUSED) >= 3
    names = [span.name for span in spans(watched, None)]
    assert names.count("batch") == 3
    assert names.count("copy to cpu(0)") == names.count("copy to cpu(1)") == 2 * 3  # X and y
    begin, end = watched.timeline.window
    for span in watched.timeline.spans:
        assert begin <= span.start <= span.end <= end, span


def test_a_profiled_loop_ends_with_the_same_bits():
    plain, seen = (loop(Profiler(CTX, warm_up=1, num_steps=n), 4) for n in (0, 2))
    for one, other in zip(plain, seen):
        assert [p.asnumpy().tobytes() for p in one] == [p.asnumpy().tobytes() for p in other]


def test_nothing_is_recorded_after_the_window(tmp_path):
    recorded(tmp_path)
    from_numpy = memory.from_numpy
    with Profiler(CTX, warm_up=0, num_steps=1) as watched:
        assert memory.from_numpy is not from_numpy
        mx.nd.ones((3,)).sin().wait_to_read()
        watched.step()
        mx.nd.ones((3,)).cos().wait_to_read()
    assert "sin" in {span.name for span in watched.timeline.spans}
    assert memory.from_numpy is from_numpy
    assert recorded(tmp_path) == set()


def test_nothing_is_recorded_before_the_window():
    with Profiler(CTX, warm_up=1, num_steps=1) as watched:
        mx.nd.ones((3,)).cos().wait_to_read()
        watched.step()
        mx.nd.ones((3,)).sin()
        watched.step()
    assert {"sin", "cos"} & {span.name for span in watched.timeline.spans} == {"sin"}


def test_running_operators_end_before_the_window_begins():
    done = []
    gluonpar.runtime.engine.push(
        lambda: done.append(sum(range(3_000_000))), CTX[1], reads=[mx.nd.ones((1,))]
    )
    with Profiler(CTX, warm_up=0, num_steps=1):
        assert len(done) == 1


def test_an_operators_error_in_the_window_reaches_the_caller_and_ends_it(tmp_path):
    from_numpy = memory.from_numpy
    with pytest.raises(mx.MXNetError, match="a bug"):
        with Profiler(CTX, warm_up=0, num_steps=1) as watched:
            marker = mx.nd.zeros((1,))
            gluonpar.runtime.engine.push(lambda: {}["a bug"], CTX[0], writes=[marker])
            watched.step()
    mx.nd.ones((3,)).cos().wait_to_read()
    assert recorded(tmp_path) == set()
    assert memory.from_numpy is from_numpy


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
        assert list(watched.loading("ab")) == ["a", "b"]
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


def test_the_trace_is_a_file_of_the_trace_event_format(watched, tmp_path):
    path = tmp_path / "trace.json"
    watched.save(path)
    found = json.loads(path.read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert list(named.values()) == ["cpu(0)", "cpu(1)", "Python", "exchange"]
    complete = [event for event in found if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == set(named)
    length = watched.timeline.window[1] - watched.timeline.window[0]
    for event in complete:
        assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= length * (1 + 1e-9)
    steps = [event for event in complete if event["cat"] == "step"]
    assert [event["name"] for event in steps] == ["step 3", "step 4", "step 5"]
    for one, other in zip(steps, steps[1:]):
        assert one["ts"] + one["dur"] == pytest.approx(other["ts"], rel=1e-9)
