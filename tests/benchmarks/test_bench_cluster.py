"""benchmarks/cluster: what it measures is right, what is wrong it says, and its model."""

import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from bench_tools import load
from mpi_jobs import needs_mpi
from processes import state

from benchmarks.cluster import contest, gate, jobs, model, tables
from benchmarks.cluster.contest import STEPS, Row
from benchmarks.cluster.model import Measured, Network, allreduce_seconds, fit

script = load("bench_cluster")
SIZES = (256, 262144, 11_000_000)


def measured(network, processes, sizes=SIZES, cores=2, disturb=lambda s: s):
    return [
        Measured(p, n, disturb(allreduce_seconds(p, n, network, c)), c)
        for p in processes
        for c in [model.crowding(p, cores)]
        for n in sizes
    ]


@pytest.mark.parametrize(
    "network", [Network(3e-4, 5e-5, 2e9), Network(0.0, 1e-4, 1e9), Network(1e-4, 0.0, 5e8)]
)
def test_the_fit_finds_the_network_that_made_the_figures(network):
    assert fit(measured(network, (2, 4, 8))) == pytest.approx(network, rel=1e-6, abs=1e-12)


def test_a_fit_of_noisy_figures_is_off_by_no_more_than_they():
    noise = iter([1.1, 0.9, 1.05, 0.95, 1.1, 0.9, 1.0, 0.9, 1.1] * 2)
    points = measured(Network(3e-4, 5e-5, 2e9), (2, 4, 8), disturb=lambda s: s * next(noise))
    found = fit(points)
    for p, n, seconds, crowding in points:
        assert allreduce_seconds(p, n, found, crowding) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize("points", [[], [Measured(2, 1000, 1e-3)], [Measured(2, 1000, 1e-3)] * 2])
def test_figures_that_cannot_tell_the_bandwidth_fit_no_model(points):
    with pytest.raises(ValueError, match="fit no model; take several sizes"):
        fit(points)


def test_processes_that_share_processors_take_turns_on_them():
    alone = allreduce_seconds(4, 10**6, Network(0.5, 0.25, 1e6), 1)
    assert allreduce_seconds(4, 10**6, Network(0.5, 0.25, 1e6), 2) == 2 * alone - 0.5


def test_a_step_takes_at_worst_its_parts_and_hides_only_the_transfer():
    network = Network(1e-3, 1e-3, 1e6)
    best, worst = model.step_seconds(4, 3.0, 10**6, network)
    assert worst == pytest.approx(3.0 + 1e-3 + 4e-3 + 1.5)
    assert best == pytest.approx(3.0 + 1e-3 + 4e-3)  # 1.5 s hide in 2 s of backward
    best, worst = model.step_seconds(4, 1.5, 10**6, network)
    assert worst - best == pytest.approx(1.0)  # of 1.5 s, as much as backward takes
    assert model.step_seconds(1, 3.0, 10**6, network) == (3.0, 3.0)


ANSWERS = """
import sys
from benchmarks.cluster import gate
rank = int(sys.argv[2])
gate.turns(int(sys.argv[1]), {"rank": rank, "loss": 0.5}, {
    "double": lambda x: {"x": 2 * x + rank}, "end": lambda _: sys.exit(3)})
"""


@pytest.fixture
def two_ranks():
    opened = gate.Gate(2, seconds=60)
    ranks = [
        subprocess.Popen([sys.executable, "-c", ANSWERS, str(opened.port), str(rank)])
        for rank in (1, 0)
    ]
    yield opened, ranks
    opened.close()
    for rank in ranks:
        rank.wait()


def test_ranks_answer_in_their_order_and_are_stopped_between_turns(two_ranks):
    opened, ranks = two_ranks
    hellos = opened.open()
    assert [hello["rank"] for hello in hellos] == [0, 1]
    assert sorted(opened.pids) == sorted(rank.pid for rank in ranks)
    for x in (1, 5):
        assert opened.ask({"double": x}) == [{"x": 2 * x}, {"x": 2 * x + 1}]
        for pid in opened.pids:
            _, status = os.waitpid(pid, os.WUNTRACED)  # returns when it has stopped
            assert os.WIFSTOPPED(status) and state(pid) == "T"


def test_a_rank_that_ends_is_lost_and_closing_kills_the_others(two_ranks):
    opened, ranks = two_ranks
    opened.open()
    with pytest.raises(gate.Lost, match="a rank has ended"):
        opened.ask({"end": None})
    opened.close()
    assert {rank.wait(timeout=600) for rank in ranks} <= {3, -signal.SIGKILL}


def test_ranks_that_do_not_come_are_lost():
    opened = gate.Gate(2, seconds=0.01)
    with pytest.raises(gate.Lost, match="0 of 2 ranks have come: that is all"):
        opened.open()
    opened.close()


def row(name, seconds=None, **more):
    made = Row(name, 2, 4, seconds or {}, **more)
    made.lo_bytes = {what: [0.0] * len(each) for what, each in made.seconds.items()}
    return made


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({}, False),
        ({"wrong_sums": 1}, True),
        ({"deviation": 2e-3}, True),
        ({"deviation": float("nan")}, True),
        ({"deviation": 5e-4}, False),
    ],
)
def test_wrong_is_a_wrong_sum_and_another_loss(more, wrong):
    assert row("gluonpar", **more).wrong is wrong


def test_the_slowest_rank_counts_and_warm_up_does_not():
    made = row("gluonpar")
    for counts in (False, True):
        answers = [{"seconds": 1.0, "wrong": 0}, {"seconds": 3.0, "wrong": 2}]
        contest.Contest._add(made, STEPS, answers, sent=80, steps=2, counts=counts)
    assert (made.seconds, made.lo_bytes) == ({STEPS: [1.5]}, {STEPS: [20.0]})
    assert made.wrong_sums == 4  # in the warm-up, too


def test_tables_show_medians_beside_ours_and_the_floor():
    rows = [
        row("gluonpar", {8: [1e-3, 2e-3, 9e-3], STEPS: [0.03]}, last_loss=2.0),
        row("horovod", {8: [5e-3], STEPS: [0.06]}, last_loss=2.0),
        row("floor", {STEPS: [0.02]}, last_loss=2.5),
    ]
    assert [line.split() for line in tables.sums(rows, (8,))[1:]] == [
        ["gluonpar", "8", "2.000", "4.000", "1.00", "0.00"],
        ["horovod", "8", "5.000", "0.000", "2.50", "0.00"],
    ]
    assert [line.split()[4] for line in tables.steps(rows)[1:]] == ["1.50", "3.00", "1.00"]
    assert tables.points(rows, 2) == [Measured(2, 32, 2e-3, 1.0)]
    assert tables.compute_seconds(rows) == 0.02


def test_a_prediction_is_for_the_network_that_is_asked_for(monkeypatch):
    rows = [
        row("gluonpar", {n: [allreduce_seconds(2, 4 * n, Network(0, 1e-4, 1e9))] for n in SIZES})
    ]
    asked = ["--latency-us", "25", "--gbit", "8", "--compute-ms", "40", "--model-bytes", "1000000"]
    options = script.parser().parse_args(asked)
    last = script.prediction(options, rows, cores=2)[-1]
    assert last.split()[:2] == ["1024", "processes:"]
    network = Network(fit(tables.points(rows, 2)).overhead_seconds, 25e-6, 1e9)
    best, worst = model.step_seconds(1024, 0.04, 10**6, network)
    assert f"{1e3 * best:.1f} to" in last and f"{1e3 * worst:.1f} ms a step" in last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0"], "--processes 0"),
        (["--sizes", "a"], "'a' is no list of numbers"),
        (["--rounds", "0"], "--rounds 0"),
        (["--batch-size", "3"], "--batch-size 3 leaves some of 4 processes without an image"),
        (["--gbit", "0"], "--gbit 0"),
        (["--latency-us", "nan"], "--latency-us nan"),
        (["--candidates", "nccl"], "there is no 'nccl'"),
        (["--horovod-python", "/nowhere"], "--horovod-python"),
    ],
)
def test_a_request_that_cannot_be_met_is_a_line_and_exit_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        script.main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and len(lines) == 1 and words in lines[0], lines


def measure(arguments, capsys):
    code = script.main(["--rounds", "1", "--steps", "1", "--batch-size", "4", *arguments])
    return code, capsys.readouterr()


@needs_mpi
def test_all_that_mxnet_brings_sums_right_and_trains_the_same(monkeypatch, tmp_path, capsys):
    path, temporary = tmp_path / "found.json", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code, (out, err) = measure(
        ["--processes", "2", "--sizes", "64,65536", "--json", str(path)], capsys
    )
    assert code == 0, out + err
    assert "left out: horovod: --horovod-python names no interpreter" in err
    rows = {found["name"]: found for found in json.loads(path.read_text())["rows"]}
    assert set(rows) == set(jobs.CANDIDATES) - {"horovod"}
    for name, found in rows.items():
        of = jobs.CANDIDATES[name]
        whats = (["64", "65536"] if of.sums else []) + (["steps"] if of.trains else [])
        assert list(found["seconds"]) == whats and found["wrong_sums"] == 0, found
        assert found["deviation"] is None or abs(found["deviation"]) < 1e-5, found
        assert (found["last_loss"] is not None) == of.trains
        if of.trains:
            assert found["last_loss"] < found["first_loss"], found
    carried = rows["gluonpar over tcp"]["lo_bytes"]["65536"][0]
    # what the model says, and headers; others on this machine may use the loopback, too
    assert carried >= model.sent_bytes(2, 4 * 65536)
    assert list(temporary.iterdir()) == []


def test_a_candidate_that_cannot_run_is_left_out_and_one_that_dies_has_failed(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(jobs.shutil, "which", lambda _: None)
    monkeypatch.setattr(jobs.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").symlink_to("/bin/false")
    code, (out, err) = measure(
        ["--processes", "2", "--sizes", "64", "--candidates", "gluonpar,floor"], capsys
    )
    assert code == 1
    assert "left out: gluonpar: there is no mpirun: pip install 'gluonpar[mpi]'" in err
    assert "failed: floor: 0 of 1 ranks have come: " in err and "exit code 1" in err
    assert ": failed: floor on 2 processes" in err
