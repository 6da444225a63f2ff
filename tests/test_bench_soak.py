"""The soak of the training benchmark: growth is found out, noise is not growth."""

import json

import bench_tools
import mxnet as mx
import pytest
from bench_tools import actor, played_by

from gluonpar.bench_training import soak
from gluonpar.bench_training.candidates import Setting

TINY = ("--device", "cpu", "--workload", "mlp", "--batch-size", "8", "--warmup", "1")


@pytest.fixture
def command(capsys):
    return bench_tools.runner(bench_tools.load("bench_training"), capsys)


def test_the_slope_is_that_of_the_samples():
    setting = Setting("mlp", [mx.cpu(0)])
    grows = soak.Soak(setting, (100, 200, 300), (5_000_000, 7_000_000, 9_000_000))
    assert (grows.slope, grows.growth) == pytest.approx((20_000, 4_000_000))
    assert not grows.wrong
    assert soak.Soak(setting, (100, 200), (0, 8_000_001)).wrong
    assert not soak.Soak(setting, (1,), (10**9,)).wrong


@pytest.mark.parametrize(("each", "code"), [("0", 0), ("500000", 1), ("-500000", 0)])
def test_a_soak_tells_growth_from_noise(command, monkeypatch, tmp_path, each, code):
    resident = f"100_000_000 + {each} * total // 100 + (300 if total % 200 else 0)"
    played_by(monkeypatch, gluonpar=actor(resident=resident))
    path = tmp_path / "soak.json"
    got, out, err = command(*TINY, "--soak", 2000, "--json", path)
    assert got == code
    assert "after 100 steps" in out[-1] and "after 2000, at most" in out[-1]
    [row] = json.loads(path.read_text())["rows"]
    assert row["steps"] == list(range(100, 2001, 100))
    assert row["slope"] == pytest.approx(int(each) / 100, abs=1)
    assert len(row["resident_bytes"]) == 20
    assert [line.partition(": ")[2] for line in err] == (
        ["gluonpar grew on mlp, batch 8 on [cpu(0), cpu(1)]"] if code else []
    )


def test_the_warm_up_does_not_count(monkeypatch):
    played_by(monkeypatch, gluonpar=actor(resident="total"))
    result = soak.soak(Setting("mlp", [mx.cpu(0)], warmup=10), 3)
    assert (result.steps, result.resident) == ((1, 2, 3), (11, 12, 13))


def test_a_soak_of_the_real_thing(command, tmp_path):
    path = tmp_path / "soak.json"
    code, out, err = command(*TINY, "--soak", 3, "--json", path)
    assert (code, err) == (0, [])
    [row] = json.loads(path.read_text())["rows"]
    assert row["steps"] == [1, 2, 3]
    assert all(number > 1e7 for number in row["resident_bytes"])
    assert out[-1].startswith("gluonpar, mlp, batch 8 on [cpu(0), cpu(1)]: resident ")


def test_a_soak_that_dies_is_reported(command, monkeypatch):
    played_by(monkeypatch, gluonpar=actor(then="1 / 0"))
    code, _, err = command(*TINY, "--soak", 3)
    assert code == 1
    assert "failed: gluonpar on mlp, batch 8 on [cpu(0), cpu(1)]: exit code 1" in err[0]
    assert "ZeroDivisionError" in err[-1]
