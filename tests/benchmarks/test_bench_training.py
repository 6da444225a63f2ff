"""The training benchmark: its laws, what it prints and keeps; no failure goes unseen."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import bench_tools
import mxnet as mx
import numpy as np
import pytest
from bench_tools import actor, played_by
from processes import runs

from benchmarks.training import candidates, contest, process, tables
from benchmarks.training.candidates import CANDIDATES, Setting
from benchmarks.training.contest import Contest, Row
from gluonpar.diagnostics.benchmark.measure import Samples

SCRIPT = bench_tools.SCRIPTS / "bench_training.py"
TINY = ("--device", "cpu", "--workload", "mlp", "--batch-size", "8", "--rounds", "1")
TINY += ("--steps", "1", "--warmup", "1")
CPUS = [("cpu", 0), ("cpu", 1)]


@pytest.fixture
def script():
    return bench_tools.load("bench_training")


@pytest.fixture
def command(script, capsys):
    return bench_tools.runner(script, capsys)


@pytest.fixture
def child():
    """child(source): a process that runs it, ended after the test."""
    started = []

    def start(source):
        started.append(process.Child([sys.executable, "-c", source], os.environ))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_no_candidate_inherits_settings(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("HOROVOD_RANK", "7")
    assert "MXNET_CPU_TEMP_COPY" in os.environ  # gluonpar is imported here
    setting = Setting("mlp", [mx.cpu(0), mx.cpu(1)], pythons={"torch ddp": "other"})
    teams = {}
    for name in CANDIDATES:
        argv, env = candidates.launch(name, setting)
        assert argv[0] == ("other" if name == "torch ddp" else sys.executable)
        assert not {"MXNET_CPU_TEMP_COPY", "HOROVOD_RANK"} & set(env)
        teams[name] = env.get("OMP_NUM_THREADS")
    assert {n for n, team in teams.items() if team} == {"one context", "torch ddp", "horovod"}
    assert teams["one context"] == str(candidates.threads.cores())


def test_a_row_s_figures():
    setting = Setting("mlp", [mx.cpu(0)])
    row = Row("gluonpar", setting, Samples((0.1, 0.2, 0.4)), 2.0, 1.0, 0.0, 5, 0.0)
    assert row.images_per_second == pytest.approx(128 / 0.2)
    for deviation, wrong in ((None, False), (9e-4, False), (-2e-3, True), (float("nan"), True)):
        assert Row(*list(vars(row).values())[:5], deviation, 5, 0.0).wrong is wrong


def test_a_child_answers_line_by_line(child):
    echo = child("import sys\nfor line in sys.stdin: print(line, end='', flush=True)")
    assert echo.ask({"steps": 3}) == {"steps": 3}
    with pytest.raises(process.Unable, match="no legs"):
        echo.ask({"unable": "no legs"})


def test_a_child_s_last_words_are_heard(child):
    with pytest.raises(process.Died, match=r"exit code 1\n(.*\n)*  ZeroDivisionError"):
        child("1 / 0").hear()
    with pytest.raises(process.Died, match="killed by signal 9"):
        child("import os; os.kill(os.getpid(), 9)").hear()


def test_ending_a_child_ends_what_it_started(child):
    parent = child(
        "import subprocess\nsleeps = subprocess.Popen(['sleep', '60'])\n"
        "print('{\"pid\": %d}' % sleeps.pid, flush=True)\ninput()"
    )
    grandchild = parent.hear()["pid"]
    assert runs(grandchild)
    parent.end()
    wait_until(lambda: not runs(grandchild))


def wait_until(condition, seconds=600):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_losses_must_agree_with():
    losses = {"gluonpar": 1.0, "book": 2.0, "trainer device": 3.0, "one context": 4.0, "floor": 9.0}
    one, two = ([mx.cpu(i) for i in range(k)] for k in (1, 2))
    assert contest.expected(losses, Setting("mlp", two)) == 4.0
    assert contest.expected(losses, Setting("resnet18", one)) == 4.0
    assert contest.expected(losses, Setting("resnet18", two)) == 3.0
    del losses["trainer device"]
    assert contest.expected(losses, Setting("resnet18", two)) == 1.5
    assert np.isnan(contest.expected({"floor": 9.0}, Setting("mlp", two)))


def test_memory_beside_a_plain_run_s():
    setting = Setting("mlp", [mx.cpu(0), mx.cpu(1)])
    row = Row("gluonpar", setting, Samples((0.1,)), 2.0, 1.0, 0.0, 5, 0.0)
    held = [{"parameters": 3_000_000, "gradients": 2_000_000, "others": n} for n in (0, 400_000)]
    line = tables.memory(dataclasses.replace(row, memory=held))
    assert "parameters 3.00 MB, gradients 2.00 MB, others 0.40 MB; a plain " in line
    assert line.endswith("parameters and gradients, 5.00 MB")


def test_one_table_of_all(command, monkeypatch):
    by_devices = "(0.3, 0.2)[int(sys.argv[-1]) - 1] * steps"
    ours = actor(trained={"seconds": by_devices}, peak_bytes=7_000_000)
    played_by(monkeypatch, floor=actor(), gluonpar=ours)
    acted = contest.launch

    def launch(name, setting):
        argv, env = acted(name, setting)
        return [*argv, str(len(setting.ctx))], env

    monkeypatch.setattr(contest, "launch", launch)
    code, out, _ = command(*TINY, "--candidates", "gluonpar,floor", "--num-gpus", "1,2")
    assert code == 0
    rows = [line.split() for line in out[-4:]]
    assert rows[0][:4] == ["workload", "candidate", "K=1", "ms"]
    assert rows[1] == ["mlp", "gluonpar", "300.00", "30.00", "1.00", "200.00", "20.00", "1.50"]
    assert rows[2] == ["mlp", "floor", "10.00", "1.00", "1.00", "10.00", "1.00", "1.00"]
    assert out[-1].endswith("peak 7 MB on 2 devices, 7 MB on one: 0.0 MB for each further device")


def test_candidates_take_turns_and_are_timed_by_themselves(monkeypatch):
    played_by(monkeypatch, quick=actor(), slow=actor(loss=1.0005))
    with Contest(Setting("mlp", [mx.cpu(0)], rounds=3)) as held:
        for name in ("quick", "slow"):
            held.start(name)
        held.measure()
        quick, slow = held.rows()
    assert quick.samples.seconds == pytest.approx((0.01, 0.01, 0.01))
    assert (quick.first_loss, quick.last_loss, quick.wrong, slow.wrong) == (2.0, 1.0, False, False)


def test_another_loss_is_wrong_and_burnt_time_is_told(command, monkeypatch):
    played_by(monkeypatch, a=actor(), b=actor(), c=actor(1.002), d=actor(idle_cpu_seconds=0.5))
    code, out, err = command(*TINY, "--candidates", "a,b,c,d")
    assert code == 1
    assert err[0] == "d: burnt 50% of a core while others trained"
    assert "another loss than the others': c on mlp" in err[1]
    assert cells(out)["c"][-2:] == ["+2.0e-03", "0"]


def cells(out):
    """The table's cells by candidate, under its headings."""
    start = next(i for i, line in enumerate(out) if line.startswith("candidate  "))
    return {line[:28].strip(): line[28:].split() for line in out[start + 1 :] if line[28:29] == " "}


@pytest.mark.parametrize(
    ("dies", "how"),
    [
        ("import sys; sys.exit('nothing to train')", "exit code 1"),
        (actor(then="1 / 0"), "exit code 1"),
        (actor(then="import os; os.kill(os.getpid(), 11)"), "killed by signal 11"),
    ],
    ids=["at once", "while training", "by a signal"],
)
def test_one_that_dies_is_reported_and_the_others_go_on(command, monkeypatch, tmp_path, dies, how):
    played_by(monkeypatch, dies=dies, lives=actor())
    path = tmp_path / "bench.json"
    code, out, err = command(*TINY, "--candidates", "dies,lives", "--json", path)
    assert code == 1
    assert list(cells(out)) == ["lives"]
    assert err[0] == f"failed: dies: {how}"
    assert err[-1].endswith("failed: dies on mlp, batch 8 on [cpu(0), cpu(1)]")
    assert [name for _, name, _ in json.loads(path.read_text())["failed"]] == ["dies"]


def test_one_that_cannot_is_left_out(command, monkeypatch):
    played_by(monkeypatch, cannot='print(\'{"unable": "no torch"}\')', lives=actor())
    code, _, err = command(*TINY, "--candidates", "cannot,lives")
    assert (code, err) == (0, ["left out: cannot: no torch"])


def test_the_real_thing(command, tmp_path):
    path = tmp_path / "bench.json"
    chosen = "gluonpar,book,torch ddp,floor"
    code, out, err = command(*TINY, "--candidates", chosen, "--json", path)
    assert (code, [line for line in err if "torch ddp" not in line]) == (0, [])
    assert out[0].startswith("gluonpar ")
    assert any(line.startswith("machine: ") for line in out)
    rows = cells(out)
    assert [name for name in rows if name != "torch ddp"] == ["gluonpar", "book", "floor"]
    assert rows["floor"][3] == "1.00"
    kept = json.loads(path.read_text())
    assert [row["name"] for row in kept["rows"]] == list(rows)
    for row in kept["rows"]:
        assert len(row["seconds"]) == 1
        assert row["last_loss"] < row["first_loss"]
        assert row["peak_bytes"] > 1e7
        assert not row["wrong"]
        assert row["imports_gluonpar"] == (row["name"] in ("gluonpar", "floor"))


@pytest.mark.parametrize("names", ["a,floor", "floor"])
def test_plot(command, monkeypatch, tmp_path, names):
    pytest.importorskip("matplotlib")
    played_by(monkeypatch, a=actor(), floor=actor())
    path = tmp_path / "bench.png"
    arguments = ("--candidates", names, "--plot", path, "--num-gpus", "1,2")
    code, _, err = command(*TINY, *arguments)
    assert (code, err) == (0, [])
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workload", "vgg"), "no 'vgg'; there are: lenet, mlp, resnet18"),
        (("--candidates", "ours"), "no 'ours'; there are: gluonpar, book"),
        (("--num-gpus", "two"), "'two' is no list"),
        (("--num-gpus", "1,0"), "--num-gpus 0"),
        (("--num-gpus", "9"), "--batch-size 8 leaves some of 9"),
        (("--batch-size", "0"), "--batch-size 0"),
        (("--workload", "resnet18", "--batch-size", "9"), "--batch-size 9 cannot be cut evenly"),
        (("--steps", "0"), "--steps 0"),
        (("--rounds", "0"), "--rounds 0"),
        (("--warmup", "-1"), "--warmup -1"),
        (("--torch-python", "/nowhere"), "--torch-python /nowhere cannot be started"),
        (("--torch-python", "/bin/false"), "--torch-python /bin/false is no Python"),
        (("--horovod-python", "/nowhere"), "--horovod-python /nowhere cannot be started"),
        (("--soak", "0"), "--soak 0 steps show nothing"),
        (("--soak", "99"), "--soak 99 steps show nothing; give 20000, or at least 100"),
        (("--soak", "100", "--candidates", "book"), "--candidates book cannot be soaked; these"),
        (("--soak", "100", "--plot", "soak.txt"), "soak.txt"),
        (("--plot", "bench.txt"), "bench.txt"),
        (("--json", "/"), "cannot write /: "),
        (("--bogus",), "--bogus"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(command, arguments, words):
    bench_tools.expect_one_line(command(*TINY, *arguments), words)


def test_an_interpreter_that_does_not_end_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 1000\n")
    path.chmod(0o755)
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(ValueError, match=f"torch_python={path}"):
        process.check_python("torch_python", str(path))


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
        [sys.executable, str(SCRIPT), *TINY, "--candidates", "gluonpar", *forever],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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
