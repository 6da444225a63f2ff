"""Profiler: only the steps in its window are recorded, and each operator's times add up."""

import os
import re
import time

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar.models import lenet
from gluonpar.runtime import engine
from gluonpar.training.profiler import Profiler
from gluonpar.training.workloads import pixel_lenet

CTX = [mx.cpu(0), mx.cpu(1)]


def rows(profiler):
    """The table's times by name, in its order, and its first line."""
    first, heading, *lines = profiler.table().splitlines()
    assert heading.endswith(f"ms per step, mean of {profiler.ctx}")
    return {name: float(time) for name, time in map(str.split, lines)}, first


def test_the_table_has_every_operator_of_the_steps_after_the_warm_up():
    X, y = np.arange(6 * 28 * 28, dtype="uint8").reshape(6, 1, 28, 28), np.arange(6)
    params = lenet.init_lenet(0.05)
    device_params = [gluonpar.get_params(params, c) for c in CTX]
    with Profiler(CTX, warm_up=2, num_steps=3) as watched:
        for _ in range(7):
            gluonpar.train_batch(X, y, device_params, CTX, 0.1, pixel_lenet)
            watched.step()
    times, first = rows(watched)
    assert watched.steps == (3, 5) and re.fullmatch(r"steps 3 to 5, \d+\.\d ms per step", first)
    names = " ".join(times)
    assert "Convolution" in names and "_backward_" in names
    assert max(map(len, times)) <= 40
    assert list(times)[-1] == "total"
    total = times.pop("total")
    assert sum(times.values()) == pytest.approx(total, abs=0.01 * len(times))
    assert sorted(times.values(), reverse=True) == [*times.values()]


def test_times_are_per_step_and_the_mean_of_the_devices():
    """40 ms on one of two devices in one of two steps; there is no other operator on the other."""
    with Profiler(CTX, warm_up=0, num_steps=2) as watched:
        engine.push(lambda: time.sleep(0.04), CTX[1], writes=[mx.nd.zeros((1,))], name="asleep")
        watched.step()
        watched.step()
    times, first = rows(watched)
    assert 10 <= times["asleep"] <= times["total"] and float(first.split()[4]) >= 20


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
    assert {"sin", "cos", "tan"} & {*rows(watched)[0]} == {"sin"}
    assert kept_by_mxnet(tmp_path) == set()


def test_running_operators_end_before_the_window_begins():
    done = []
    engine.push(lambda: done.append(sum(range(3_000_000))), CTX[1], reads=[mx.nd.ones((1,))])
    with Profiler(CTX, warm_up=0, num_steps=1):
        assert len(done) == 1


def test_an_operators_error_in_the_window_reaches_the_caller_and_ends_it(tmp_path):
    with pytest.raises(mx.MXNetError, match="a bug"):
        with Profiler(CTX, warm_up=0, num_steps=1) as watched:
            marker = mx.nd.zeros((1,))
            engine.push(lambda: {}["a bug"], CTX[0], writes=[marker])
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


def test_more_cpu_contexts_than_mxnet_can_profile_are_refused():
    most = len(os.sched_getaffinity(0)) + 2
    Profiler([mx.cpu(most - 1)])
    with pytest.raises(ValueError, match=rf"cpu\({most}\) cannot be .* {most} CPU"):
        Profiler([mx.cpu(most)])
