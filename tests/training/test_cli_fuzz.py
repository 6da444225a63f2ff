"""The command lines under arguments that hypothesis makes up: exit code 0 or 2, never a traceback.

With 2, stderr has one line with "error: ", which names a flag or a value of the command line.
get_data and bench_training may also end with 1, which is theirs to say: what was asked for was
looked at, and is not there or not right. What takes time is replaced: networks by one layer, data
by a few images, the benchmarks' processes by one that answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pathlib
import subprocess
import sys
import traceback
import types

import bench_tools
import mxnet as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.training import process
from gluonpar.diagnostics.benchmark import measure
from gluonpar.models import resnet
from gluonpar.runtime import driver
from gluonpar.training import command_line, workloads
from gluonpar.training.data import dataset, locate

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAME_EVERY_TIME = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

NUMBERS = ["0", "-1", "1", "2", "3", "2.5", "1e3", "nan", "inf", "-inf", "1e400", "0x10", "\u0663"]
NUMBERS += ["9" * 23, "9" * 5000, "1,2", "1,,2", "0,0", "1,nan", "1,1,1", " 1 "]
NAMES = ["", " ", "-", "--", ";", "None", "\u00e9\u65e5", "\udcff", "a" * 300, "\u202e", "%s", "{}"]
# In the folder in which each command line runs; see `scene`.
PATHS = [".", "..", "folder", "file", "new", "new/deep", "file/below", "folder/new", "/proc/new"]
PATHS += ["new.png", "folder/new.png", "full.png", "/proc/new.png", "pipe", "pipe.png", "loop.png"]
PATHS += ["/dev/null", "/dev/full", "a" * 250, "a" * 250 + ".png", "\udcff.png", "\udcff", "data"]
ANYTHING = st.sampled_from([*NUMBERS, *NAMES, *PATHS])


def command_lines(flags, positional=()):
    """Lists of arguments: flags by their good values, mostly; and odd ones, or none at all.

    ``flags`` are (values, more): the first are good, the others what else may be tried with this
    flag; None in place of values for a flag that takes none.
    """

    def one(name):
        good = flags[name]
        if good is None:
            return st.just([name]) | st.just([f"{name}=1"])
        values = st.sampled_from(good) | st.sampled_from(good) | ANYTHING
        joined = values.map(lambda value: [f"{name}={value}"])
        return values.map(lambda value: [name, value]) | joined | st.just([name])

    words = st.sampled_from([*positional, *NAMES, *NUMBERS]).map(lambda word: [word])
    unknown = st.sampled_from(["--frobnicate", "-x", "--no-epochs"]).map(lambda flag: [flag])
    flag = st.sampled_from(sorted(flags)).flatmap(one)
    pieces = st.lists(flag | flag | flag | flag | flag | flag | words | unknown, max_size=4)
    return pieces.map(lambda lists: [argument for piece in lists for argument in piece])


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """The folder to run in: a file, a folder, a pipe that nobody reads, a full disk."""
    folder = tmp_path / "scene"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "file").write_bytes(b"\x00" * 100)
    (folder / "folder").mkdir()
    os.mkfifo("pipe")
    os.symlink("/dev/full", "full.png")
    os.symlink("pipe", "pipe.png")
    os.symlink("loop.png", "loop.png")
    return folder


@pytest.fixture
def no_gpu(monkeypatch):
    def missing():
        raise driver.DriverMissing("no NVIDIA driver here")

    monkeypatch.setattr(driver, "gpus", missing)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)


class Outcome(types.SimpleNamespace):
    """Exit code, stdout, stderr."""


def run(main, argv, encoding="utf-8"):
    """Call ``main``, as Python would for a script whose streams have this encoding."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    err = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(argv)) or 0
        except SystemExit as exit_:
            code = exit_.code or 0
        except Exception:
            raise AssertionError(f"{argv}:\n{traceback.format_exc()}") from None
    out.flush(), err.flush()
    texts = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]
    return Outcome(code=code, out=texts[0], err=texts[1])


def check(outcome, argv, codes=(0, 2)):
    """The law."""
    assert outcome.code in codes, (argv, outcome)
    assert "Traceback" not in outcome.out + outcome.err, (argv, outcome)
    if outcome.code == 2:
        lines = [line for line in outcome.err.splitlines() if "error: " in line]
        assert len(lines) == 1, (argv, outcome.err)
        said = outcome.err[outcome.err.index("error: ") :]
        assert any(word in said for word in names_in(argv)), (argv, outcome.err)


def names_in(argv):
    """What a message may name: flags, values, and how Python shows them."""
    for argument in argv:
        for word in (argument, *argument.split("=", 1), *argument.split(",")):
            if word.strip():
                yield from (word, repr(word)[1:-1])
                yield word.encode("ascii", "backslashreplace").decode()
            else:
                yield from (repr(word), "expected", "unrecognized")  # as argparse has it


# The training scripts


@pytest.fixture
def small(monkeypatch, scene, no_gpu):
    """Networks of one layer, and twenty images."""
    images = dataset.synthetic(0, 20, 10)

    def layer():
        return [mx.nd.random.normal(0, 0.01, shape) for shape in ((10, 784), (10,))]

    def apply(X, params):
        return mx.nd.FullyConnected(X.astype("float32") / 255, *params, num_hidden=10)

    def net(width):
        made = mx.gluon.nn.HybridSequential()
        made.add(mx.gluon.nn.Dense(10, in_units=784))
        return made

    monkeypatch.setattr(workloads.models, "init_lenet", lambda scale: layer())
    monkeypatch.setattr(workloads, "pixel_lenet", apply)
    monkeypatch.setattr(resnet, "resnet18", net)
    monkeypatch.setattr(dataset, "synthetic", lambda: images)
    monkeypatch.setattr(locate, "folders", lambda files=None: {})


ON_TWENTY = ["--dataset", "synthetic", "--device", "cpu", "--batch-size", "8", "--epochs", "1"]
TRAINING = {
    "--num-gpus": ["1", "2", "3"],
    "--gpus": ["0", "0,1"],
    "--device": ["cpu", "auto", "gpu"],
    "--weights": ["1", "1,2", "1e-320", "1e308,1e308"],
    "--allreduce": ["ring", "star", "host", "quux"],
    "--batch-size": ["1", "7", "20", "9" * 23],
    "--lr": ["0.1", "1e-300", "1e38", "-0.1"],
    "--seed": ["0", "7", "2147483647"],
    "--dataset": ["synthetic", "fashion-mnist"],
    "--data-dir": ["folder", "data"],
    "--limit": ["1", "9", "20", "21"],
    "--log-interval": ["1", "2"],
    "--save-dir": ["new", "folder"],
    "--save-every": ["1", "2"],
    "--keep": ["1", "3"],
    "--resume": ["folder", "file", "new", "/proc/self/mem", "/dev/full"],
    "--plot": ["new.svg", "new.png"],
    "--trace": ["new.json", "/dev/null"],
    "--profile": None,
    "--dry-run": None,
    "--help": None,
    "--version": None,
}


@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_training(model, small):
    """Epochs are not among the flags: a run without end is what 10**23 of them ask for."""
    codes = set()

    @settings(SAME_EVERY_TIME, max_examples=80 if model == "lenet" else 25)
    @given(command_lines(TRAINING), st.sampled_from(["utf-8", "ascii"]))
    def fuzzed(arguments, encoding):
        argv = [*ON_TWENTY, *arguments]
        outcome = run(lambda argv: command_line.main("Train.", argv, model=model), argv, encoding)
        check(outcome, argv)
        codes.add(outcome.code)

    fuzzed()
    assert codes == {0, 2}


@pytest.mark.parametrize("value", [*NUMBERS, *NAMES])
def test_epochs(value, small):
    argv = [*ON_TWENTY, "--dry-run", "--epochs", value]
    check(run(lambda argv: command_line.main("Train.", argv), argv), argv)


# The benchmarks


class Answering:
    """In place of a candidate's process."""

    def __init__(self, *launch, **more):
        pass

    def hear(self):
        return {"loss": 2.0, "ours": False, "version": ""}

    def ask(self, message):
        trained = {"seconds": 0.01, "cpu_seconds": 0.01, "resident_bytes": 5, "threads": 3}
        replicas = {"devices": 2, "parameters": 8, "differing": 0, "not_finite": 0}
        report = {"loss": 1.0, "peak_bytes": 5, "idle_seconds": 1, "idle_cpu_seconds": 0}
        if "report" in message:
            return {**report, "memory": [], "replicas": replicas}
        return {**trained, "descriptors": 7}

    def end(self):
        pass


MEASURING = {
    "--device": ["cpu", "auto", "gpu"],
    "--json": ["new.json", "/dev/null"],
    "--plot": ["new.svg", "new.png"],
    "--help": None,
    "--version": None,
}
ALLREDUCE = {
    **MEASURING,
    "--num-gpus": ["1", "2", "3"],
    "--min-bytes": ["4", "4K", "1G"],
    "--max-bytes": ["4K", "1M", "1G", "8G", "9" * 23 + "G"],
    "--factor": ["2", "8"],
    "--dtype": ["float16", "float32", "float64", "int8", "uint8"],
    "--op": ["sum", "mean", "max", "min"],
    "--iters": ["1", "2"],
    "--warmup": ["0", "1"],
    "--check": ["0", "1"],
    "--algorithms": ["ring", "host,star", "star,star"],
}
STEPS = {
    **MEASURING,
    "--workload": ["lenet", "mlp,lenet", "resnet18"],
    "--num-gpus": ["1", "2", "1,2,3"],
    "--candidates": ["gluonpar", "book,floor", "torch ddp", "horovod"],
    "--batch-size": ["1", "6", "256"],
    "--steps": ["1", "5"],
    "--rounds": ["1", "3"],
    "--warmup": ["0", "5"],
    "--soak": ["1", "99", "100", "250"],
    "--torch-python": ["file", "folder", "/bin/true", "/bin/false"],
    "--horovod-python": ["/bin/true", "/absent"],
}


def few(rounds):
    """What measures in turns, but three rounds at the most."""

    def interleaved(found, count, warmup=0, progress=iter):
        for _ in progress(range(min(count, rounds))):
            pass
        return {candidate.name: measure.Samples((1e-3, 2e-3)) for candidate in found}

    return interleaved


def test_bench_allreduce(scene, no_gpu, monkeypatch):
    script, codes = bench_tools.load("bench_allreduce"), set()
    monkeypatch.setattr(measure, "interleaved", few(3))
    monkeypatch.setattr(script.contest, "_zeros", nothing_large)
    monkeypatch.setattr(script.contest, "count_wrong", lambda *_: {})

    @settings(SAME_EVERY_TIME, max_examples=80)
    @given(command_lines(ALLREDUCE))
    def fuzzed(arguments):
        argv = ["--device", "cpu", "--max-bytes", "64K", *arguments]
        outcome = run(script.main, argv)
        check(outcome, argv)
        codes.add(outcome.code)

    fuzzed()
    assert codes == {0, 2}


def nothing_large(setting, size):
    """Arrays of a few elements, whatever the size."""
    shape = (min(size, 8),)
    return [mx.nd.zeros(shape, ctx=context, dtype=setting.dtype) for context in setting.ctx]


def test_bench_training(scene, no_gpu, monkeypatch):
    script, codes = bench_tools.load("bench_training"), set()
    monkeypatch.setattr(process, "Child", Answering)
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 5)
    rounds = range

    def at_most_three(count, *more):
        return rounds(count, *more) if more else rounds(min(count, 3))

    monkeypatch.setattr(script.contest, "range", at_most_three, raising=False)

    @settings(SAME_EVERY_TIME, max_examples=80)
    @given(command_lines(STEPS))
    def fuzzed(arguments):
        argv = ["--device", "cpu", "--candidates", "gluonpar,floor", *arguments]
        outcome = run(script.main, argv)
        check(outcome, argv, (0, 1, 2))
        codes.add(outcome.code)

    fuzzed()
    assert {0, 2} <= codes


# The others


def test_get_data(scene, monkeypatch):
    script, codes = bench_tools.load("get_data"), set()
    monkeypatch.setattr(locate, "folders", lambda files=None: {})
    monkeypatch.setattr(script, "install", lambda: "not in a test")

    @settings(SAME_EVERY_TIME, max_examples=40)
    @given(command_lines({"--data-dir": ["folder", "data"], "--help": None}))
    def fuzzed(argv):
        outcome = run(script.main, argv, "ascii")
        check(outcome, argv, (0, 1, 2))
        codes.add(outcome.code)

    fuzzed()
    assert codes == {0, 1, 2}


@pytest.mark.skipif(
    not (ROOT / "gluonpar").is_dir(),
    reason="the script is for a clone, before anything is installed; here the package is",
)
def test_choose_extra(scene, monkeypatch):
    script, codes = bench_tools.load("choose_extra"), set()
    assert run(script.main, ["--frobnicate"]).code == 2

    @settings(SAME_EVERY_TIME, max_examples=40)
    @given(command_lines({"--help": None}))
    def fuzzed(argv):
        outcome = run(script.main, argv)
        check(outcome, argv)
        codes.add(outcome.code)

    fuzzed()
    assert codes == {0, 2}


def test_verify_and_doctor(scene, no_gpu, monkeypatch):
    main, codes = importlib.import_module("gluonpar.__main__"), set()
    monkeypatch.setattr(main.proof, "prove", lambda ctx, say: [])
    monkeypatch.setattr(main.doctor, "examine", lambda: [])
    flags = {
        "--num-gpus": ["1", "2", "1024", "1025"],
        "--device": ["cpu", "gpu", "auto"],
        "--json": None,
        "--help": None,
    }

    @settings(SAME_EVERY_TIME, max_examples=80)
    @given(st.sampled_from([["verify"], ["doctor"], []]), command_lines(flags, ["verify"]))
    def fuzzed(command, arguments):
        argv = [*command, *arguments]
        outcome = run(main.main, argv)
        check(outcome, [*argv, "command"])  # what is missing is called so
        codes.add(outcome.code)

    fuzzed()
    assert codes == {0, 2}


# As processes: what only those show


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (
            ["scripts/train_lenet.py", "--resume", "a" * 300],
            2,
            b"aaa cannot be read: File name too",
        ),
        (["scripts/train_resnet18.py", "--save-dir", b"\xff"], 2, b"\\udcff: MXNet takes names in"),
        (["scripts/bench_allreduce.py", "--max-bytes", "\u00e9"], 2, b"is no size such as 4096"),
        (["scripts/get_data.py", "--data-dir", b"\xff" * 9], 1, b"\\udcff"),
        (["-m", "gluonpar", "doctor", "--frobnicate"], 2, b"--frobnicate"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_processes_end_with_their_code_and_no_traceback(command, code, words, scene):
    """Where nothing but ASCII can be printed."""
    common = ["--dataset", "synthetic", "--device", "cpu", "--epochs", "1"]
    path = ROOT / command[0]
    whole = [sys.executable, str(path) if path.exists() else command[0], *command[1:]]
    if "train" in command[0]:
        whole += common
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(whole, capture_output=True, env=env)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert words in done.stderr


def test_an_interpreter_that_never_ends_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nexec sleep 1000\n")
    path.chmod(0o755)
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(ValueError, match=f"torch_python={path} is no Python: it does not end with"):
        process.check_python("torch_python", str(path))
