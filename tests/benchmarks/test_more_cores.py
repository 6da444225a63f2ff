"""The prediction for more cores: what is measured goes into it, and what contradicts it is said."""

import json

import bench_tools
import pytest

from benchmarks.training import more_cores

ARGS = ("--workload", "mlp", "--rounds", "1", "--steps", "1", "--warmup", "1")


@pytest.fixture
def command(capsys):
    return bench_tools.runner(more_cores, capsys)


def test_devices_that_do_not_divide_the_batch_are_refused(command):
    code, _, err = command("--num-gpus", "3")
    assert code == 2 and "256" in " ".join(err)


def test_a_step_is_predicted_from_one_shard_and_what_grows_with_the_devices():
    found = {"alone": 4.0, "python": 1.0, "rest": 2.5, "step": 4.6}
    one = more_cores.row("lenet", 1, {"alone": 8.0, "python": 1, "rest": 1.5, "step": 8.0}, None)
    row = more_cores.row("lenet", 2, found, one)
    assert (row.at_least, row.at_most, row.speedup) == (4.0, 5.0, 8.0 / 5.0)
    assert more_cores.row("lenet", 2, {**found, "python": 4.5}, one).at_least == 4.5


@pytest.mark.parametrize(("step", "right"), [(3.5, False), (3.7, True), (5.4, True), (5.6, False)])
def test_a_measured_step_outside_of_the_prediction_is_a_complaint(monkeypatch, step, right):
    monkeypatch.setattr(more_cores.threads, "cores", lambda: 2)
    one = more_cores.row("lenet", 1, {"alone": 8.0, "python": 1, "rest": 1.0, "step": 8.0}, None)
    found = {"alone": 4.0, "python": 1.0, "rest": 2.0, "step": step}
    assert more_cores.row("lenet", 2, found, one).right is right
    assert more_cores.row("lenet", 4, found, one).right  # no core for each device


@pytest.mark.slow
def test_every_row_has_its_parts_and_only_those_with_a_core_per_device_are_measured(
    command, tmp_path, monkeypatch
):
    monkeypatch.setattr(more_cores.threads, "cores", lambda: 2)
    code, out, err = command(*ARGS, "--num-gpus", "2,4", "--json", str(tmp_path / "a.json"))
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["num_devices"] for row in rows] == [1, 2, 4]
    assert [row["measured"] is not None for row in rows] == [True, True, False]
    assert all(0 < row["python"] and 0 < row["alone"] <= row["at_most"] for row in rows)
    assert code in (0, 1), err  # other programs may run beside it
