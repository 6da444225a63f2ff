"""Profiler: only the steps in its window are recorded, and each operator's times add up."""

import json
import os
import re

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.models import lenet
from gluonpar.training.profiler import Profiler
from gluonpar.training.workloads import pixel_lenet

CTX = [mx.cpu(0), mx.cpu(1)]


def rows(profiler):
    """The table's rows, in its order, and its first two lines; long names may be alike."""
    first, heading, *lines = profiler.table().splitlines()
    cells = [line.split() for line in lines]
    return [(name, [*map(float, times)]) for name, *times in cells], first, heading.split()[-2:]


def test_the_table_has_every_operator_of_the_steps_after_the_warm_up():
    X, y = np.arange(6 * 28 * 28, dtype="uint8").reshape(6, 1, 28, 28), np.arange(6)
    params = lenet.init_lenet(0.05)
    device_params = [gluonpar.get_params(params, c) for c in CTX]
    with Profiler(CTX, warm_up=2, num_steps=3) as watched:
        for _ in range(7):
            gluonpar.train_batch(X, y, device_params, CTX, 0.1, pixel_lenet)
            mx.nd.ones((2,), ctx=mx.cpu(2)).tan().wait_to_read()  # in no profile
            watched.step()
    table, first, heading = rows(watched)
    names, times = zip(*table)
    assert watched.steps == (3, 5) and re.fullmatch(r"steps 3 to 5, \d+\.\d ms per step", first)
    assert heading == ["cpu(0)", "cpu(1)"]
    found = " ".join(names)
    assert "Convolution" in found and "_backward_" in found and "tan" not in names
    assert max(map(len, names)) <= 40
    assert names[-1] == "total"
    *times, total = times
    assert np.allclose(np.sum(times, axis=0), total, atol=0.01 * len(times))
    assert sorted(times, key=sum, reverse=True)[:3] == times[:3]
    assert all(0 < t for t in total)


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
    assert {"sin", "cos", "tan"} & {name for name, _ in rows(watched)[0]} == {"sin"}
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
def test_a_loop_that_ends_before_the_window_has_no_table(warm_up, taken):
    with Profiler(CTX, warm_up=warm_up, num_steps=1) as watched:
        for _ in range(taken):
            watched.step()
    with pytest.raises(ValueError, match=f"{taken} steps and the first {warm_up} "):
        watched.table()


def event(kind, name, ts, pid=0):
    return {"name": name, "cat": "operator", "ph": kind, "ts": ts, "pid": pid, "tid": 7}


def test_times_add_up_by_device_and_end_with_the_window(monkeypatch):
    """The two steps take 10 ms. The first process ids are CPU contexts', the next ones GPUs'."""
    processors = len(os.sched_getaffinity(0))

    def dump():
        events = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "cpu/0"}},
            *({**event(kind, "relu", 1000), "id": 1} for kind in "be"),  # no operator's
            *(event("B", "exp", -1), event("E", "exp", 2000)),  # began before it
            *(event("B", "exp", 1000), event("E", "exp", 2000)),
            *(event("B", "exp", 3000), event("E", "exp", 6000)),
            *(event("B", "exp", 9000, processors + 2), event("E", "exp", 99000, processors + 2)),
            *(event("B", "log", 0, processors + 2), event("E", "log", 5000, processors + 2)),
            *(event("B", "log", 0, 99), event("E", "log", 5000, 99)),
        ]
        with open(path[0], "w") as file:
            json.dump({"traceEvents": events}, file)

    path, clock = [], iter([0, 10_000_000])
    monkeypatch.setattr(mx.profiler, "set_config", lambda filename, **_: path.append(filename))
    monkeypatch.setattr(mx.profiler, "set_state", lambda _: None)
    monkeypatch.setattr(mx.profiler, "dump", dump)
    monkeypatch.setattr("gluonpar.training.profiler.time.time_ns", lambda: next(clock))
    with Profiler([mx.cpu(0), mx.gpu(2)], warm_up=0, num_steps=2) as watched:
        watched.step()
        watched.step()
    table, first, heading = rows(watched)
    assert (first, heading) == ("steps 1 to 2, 5.0 ms per step", ["cpu(0)", "gpu(2)"])
    assert table == [("exp", [2.0, 0.5]), ("log", [0.0, 2.5]), ("total", [2.0, 3.0])]


def test_more_cpu_contexts_than_mxnet_can_profile_are_refused():
    most = len(os.sched_getaffinity(0)) + 2
    Profiler([mx.cpu(most - 1)])
    with pytest.raises(ValueError, match=rf"cpu\({most}\) cannot be .* {most} CPU"):
        Profiler([mx.cpu(most)])
