"""The training benchmark's command: tables and JSON; every failure is reported."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import bench_tools
import mxnet as mx
import numpy as np
import pytest
from bench_tools import actor, program
from processes import runs, wait_until

from benchmarks import comparison, jobs
from benchmarks.training import __main__ as script
from benchmarks.training import candidates, tables
from benchmarks.training.candidates import CANDIDATES, Setting, StepResult
from gluonpar.diagnostics.benchmark.harness import Samples

TINY = ("--device", "cpu", "--workload", "mlp", "--batch-size", "8", "--rounds", "1")
TINY += ("--steps", "1", "--warmup", "1")
TASK = ["mlp", 8, [("cpu", 0), ("cpu", 1)]]


@pytest.fixture
def command(capsys):
    return bench_tools.runner(script, capsys)


@pytest.fixture
def play(monkeypatch):
    """Return play(name=source): a candidate of that name whose process runs the source."""

    def played_by(**sources):
        for name, source in sources.items():
            monkeypatch.setitem(CANDIDATES, name, program(source))

    return played_by


@pytest.fixture
def job():
    """Return job(source), which starts a job that is closed after the test."""
    started = []

    def start(source, **more):
        started.append(jobs.Job(program(source, **more), TASK))
        return started[-1]

    yield start
    for each in started:
        each.close()


def cells(out):
    """Return the table's cells by candidate, under its headings."""
    start = next(i for i, line in enumerate(out) if line.startswith("candidate  "))
    return {line[:28].strip(): line[28:].split() for line in out[start + 1 :] if line[28:29] == " "}


@pytest.mark.parametrize(("team", "threads"), [("", None), ("all", 4), ("share", 2)])
def test_no_candidate_inherits_settings(job, monkeypatch, team, threads):
    for name in ("OMP_NUM_THREADS", "HOROVOD_RANK", "DMLC_ROLE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "7")
    assert "MXNET_CPU_TEMP_COPY" in os.environ  # gluonpar is imported here
    monkeypatch.setattr(jobs.threads, "cores", lambda: 4)
    shown = "{'rank': 0, 'loss': 2.0, 'env': dict(os.environ)}"
    env = job(actor().replace("ready = {", f"ready = {shown}; _ = {{", 1), team=team).ready[0][
        "env"
    ]
    assert env.get("OMP_NUM_THREADS") == (threads and str(threads))
    assert not {"MXNET_CPU_TEMP_COPY", "HOROVOD_RANK", "DMLC_ROLE"} & set(env)
    others = {"one context", "torch ddp", "horovod", "processes"}
    prepared = {"gluonpar trainer prepared", "trainer gluonpar prepared"}
    assert {n for n, of in CANDIDATES.items() if of.team} == others | prepared


def test_a_job_answers_message_by_message(job):
    echo = job(actor(then="steps and print(json.dumps({'got': steps}), file=lines)"))
    assert echo.ask({"steps": 3}) == [{"got": 3}]
    with pytest.raises(comparison.Unavailable, match="no legs"):
        job(actor(hello={"unavailable": "no legs"}))


def test_a_failure_has_the_last_lines_of_the_process(job):
    with pytest.raises(jobs.Failed, match=r"exit code 1\n(.*\n)*  ZeroDivisionError"):
        job("1 / 0")
    with pytest.raises(jobs.Failed, match="killed by signal 9"):
        job(actor(then="os.kill(os.getpid(), 9)")).ask({"steps": 1})


def test_closing_a_job_ends_what_its_process_started(job):
    parent = job(actor(then="", hello={"rank": 0, "loss": 2.0}).replace(
        "ready['pid']", "import subprocess as s; ready['child'] = s.Popen(['sleep', '60']).pid\n"
        "ready['pid']"))  # fmt: skip
    grandchild = parent.ready[0]["child"]
    assert runs(grandchild)
    parent.close()
    wait_until(lambda: not runs(grandchild))


def test_which_loss_is_expected():
    losses = {"gluonpar": 1.0, "book": 2.0, "trainer device": 3.0, "one context": 4.0}
    assert comparison.expected_loss(losses, ("one context", "trainer device")) == 4.0
    del losses["one context"]
    assert comparison.expected_loss(losses, ("one context", "trainer device")) == 3.0
    assert comparison.expected_loss(losses) == 2.0
    assert np.isnan(comparison.expected_loss({}))
    for deviation, wrong in ((None, False), (9e-4, False), (-2e-3, True), (float("nan"), True)):
        assert comparison.is_wrong(deviation) is wrong


def test_memory_is_compared_with_a_plain_run():
    setting = Setting("mlp", [mx.cpu(0), mx.cpu(1)])
    held = [{"parameters": 3_000_000, "gradients": 2_000_000, "others": n} for n in (0, 400_000)]
    row = StepResult("gluonpar", setting, Samples((0.1,)), 2.0, 1.0, 0.0, 5, 0.0, memory=held)
    assert row.images_per_second == pytest.approx(128 / 0.1)
    line = tables.memory(row)
    assert "parameters 3.00 MB, gradients 2.00 MB, others 0.40 MB; a plain " in line
    assert line.endswith("parameters and gradients, 5.00 MB")


def test_one_table_of_all_numbers_of_devices(command, play):
    ours = actor(seconds="(0.3, 0.2)[int(sys.argv[-1]) - 1] * steps")
    play(floor=actor(), gluonpar=ours)
    code, out, err = command(*TINY, "--candidates", "gluonpar,floor", "--num-gpus", "1,2")
    assert (code, err) == (0, [])
    rows = [line.split() for line in out[-3:]]
    assert rows[0][:4] == ["workload", "candidate", "K=1", "ms"]
    assert rows[1] == ["mlp", "gluonpar", "300.00", "30.00", "1.00", "200.00", "20.00", "1.50"]
    assert rows[2] == ["mlp", "floor", "10.00", "1.00", "1.00", "10.00", "1.00", "1.00"]


def test_candidates_take_turns_and_are_timed_by_themselves(play):
    play(quick=actor(), slow=actor(loss=1.0005, seconds="steps"))
    with comparison.Comparison() as held:
        setting = Setting("mlp", [mx.cpu(0)], rounds=3)
        quick, slow = candidates.measure(setting, held, ["quick", "slow"])
    assert quick.samples.values == pytest.approx((0.01, 0.01, 0.01))
    assert slow.samples.values == pytest.approx((1.0, 1.0, 1.0))
    assert (quick.first_loss, quick.last_loss, quick.wrong, slow.wrong) == (2.0, 1.0, False, False)


def test_another_loss_is_wrong_and_busy_waiting_is_reported(command, play):
    play(a=actor(), b=actor(), c=actor(1.002), d=actor(idle_cpu_seconds=0.5))
    code, out, err = command(*TINY, "--candidates", "a,b,c,d")
    assert code == 1
    assert err[0] == "d: used 50% of a core while others trained"
    assert "another loss than the others': c on mlp" in err[1]
    assert cells(out)["c"][-2] == "+2.0e-03"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "how"),
    [
        ("import sys; sys.exit('nothing to train')", "exit code 1"),
        (actor(then="1 / 0"), "exit code 1"),
        (actor(then="os.kill(os.getpid(), 11)"), "killed by signal 11"),
    ],
    ids=["at once", "while training", "by a signal"],
)
def test_a_candidate_that_ends_is_reported_and_the_others_go_on(command, play, tmp_path, dies, how):
    play(dies=dies, lives=actor(), cannot=actor(hello={"unavailable": "no torch"}))
    path = tmp_path / "bench.json"
    code, out, err = command(*TINY, "--candidates", "dies,lives,cannot", "--json", path)
    assert code == 1
    assert list(cells(out)) == ["lives"]
    assert err[:2] == ["left out: cannot: no torch", f"failed: dies: {how}"]
    assert err[-1].endswith("failed: dies on mlp, batch 8 on [cpu(0), cpu(1)]")
    kept = json.loads(path.read_text())
    assert [name for _, name, _ in kept["failed"]] == ["dies"]
    assert [name for _, name, _ in kept["left_out"]] == ["cannot"]


@pytest.mark.slow
def test_real_candidates(command, tmp_path):
    path = tmp_path / "bench.json"
    chosen = "gluonpar,book,torch ddp,floor"
    code, out, err = command(*TINY, "--candidates", chosen, "--json", path)
    assert (code, [line for line in err if "torch ddp" not in line]) == (0, [])
    assert out[0].startswith("gluonpar ")
    assert any(line.startswith("machine: ") for line in out)
    rows = cells(out)
    assert [name for name in rows if name != "torch ddp"] == ["gluonpar", "book", "floor"]
    assert rows["floor"][4] == "1.00"
    kept = json.loads(path.read_text())
    assert [row["name"] for row in kept["rows"]] == list(rows)
    for row in kept["rows"]:
        assert len(row["seconds"]) == 1
        assert row["last_loss"] < row["first_loss"]
        assert row["peak_bytes"] > 1e7
        assert not row["wrong"]
        assert row["imports_gluonpar"] == (row["name"] in ("gluonpar", "floor"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workload", "vgg"), "'vgg'; choose from lenet, mlp, resnet18"),
        (("--candidates", "ours"), "'ours'; choose from gluonpar, book"),
        (("--num-gpus", "two"), "'two'"),
        (("--num-gpus", "1,0"), "--num-gpus"),
        (("--num-gpus", "9"), "batch_size must be at least 9"),
        (("--batch-size", "0"), "--batch-size"),
        (("--workload", "resnet18", "--batch-size", "9"), "batch_size must be a multiple of 2"),
        (("--steps", "0"), "--steps"),
        (("--rounds", "0"), "--rounds"),
        (("--warmup", "-1"), "--warmup"),
        (("--torch-python", "/nowhere"), "--torch-python: cannot start /nowhere"),
        (("--torch-python", "/bin/false"), "/bin/false has exit code 1"),
        (("--horovod-python", "/nowhere"), "--horovod-python"),
        (("--soak", "99"), "soak must be at least 100 steps, got 99"),
        (("--soak", "100", "--candidates", "book"), "got 'book'"),
        (("--soak", "100", "--plot", "soak.txt"), "soak.txt"),
        (("--plot", "bench.png"), "--plot needs --soak"),
        (("--json", "/"), "cannot write /: "),
        (("--bogus",), "--bogus"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(command, arguments, words):
    bench_tools.expect_one_line(command(*TINY, *arguments), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "forever"),
    [
        (signal.SIGINT, ("--rounds", "1000000")),
        (signal.SIGKILL, ("--rounds", "1000000")),
        (signal.SIGINT, ("--soak", "1000000")),
    ],
)
def test_no_process_is_left_behind(number, forever):
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.training", *TINY, "--candidates", "gluonpar", *forever],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=bench_tools.ROOT,
    )
    children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
    try:
        wait_until(lambda: "date: " in run.stdout.readline())
        wait_until(lambda: children.read_text())
        pids = children.read_text().split()
        run.send_signal(number)
        _, err = run.communicate(timeout=600)
    finally:
        run.kill()
    wait_until(lambda: not any(runs(pid) for pid in pids))
    if number == signal.SIGINT:
        assert run.returncode == 130
        assert "interrupted; 0 rows were measured" in err
        assert "Traceback" not in err
