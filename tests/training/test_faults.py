"""Memory that runs out, full disks and exceptions: one message each, and nothing hangs.

Each program runs in a process of its own, with a time limit that fails the test.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest

from gluonpar.install import memory_limits
from gluonpar.training import Run, command_line
from tests.support import checkpoint_files, processes

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1] / "scripts"
COMMON = ("--dataset", "synthetic", "--device", "cpu", "--num-gpus", "2")

PLANTED = r"(__main__\.)?Planted: the planted error"  # Python 3.8 and 3.9 print the module


def ended(*command, **limits):
    """Run a process with the limits of prlimit(1), in bytes: exit code, stdout, stderr."""
    sizes = (f"--{kind}={size}" for kind, size in limits.items())
    done = processes.end(*command, wrapper=("prlimit", "--core=0", *sizes))
    return done.returncode, done.stdout, done.stderr


def train(name, *arguments, **options):
    return ended(SCRIPTS / f"train_{name}.py", *COMMON, *arguments, **options)


@pytest.fixture(scope="module")
def imported():
    return processes.address_space_once_imported()


IN_A_STEP = r"out of memory: cannot allocate about \d+ MB for a step of 512 samples"
IN_AN_ARRAY = r"Unable to allocate .*array.*; try a smaller --batch-size than 512, or more memory$"
# The limit, in MB, of which kind of memory, and what is said.
LIMITS = {
    "the data": ("as after import", 40, IN_AN_ARRAY),  # made of arrays of 36 MB
    # Checked before training, because MXNet would crash or hang.
    "a step": ("as after import", 220, IN_A_STEP),
    "a step's data": ("data", 560, IN_A_STEP),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "resnet18"])
@pytest.mark.parametrize("lacking", LIMITS)
def test_too_little_memory_is_one_line_and_the_exit_code(lacking, name, imported):
    kind, megabytes, words = LIMITS[lacking]
    size = megabytes * memory_limits.MB + (imported if "after import" in kind else 0)
    limit = {kind.split()[0]: size}
    code, out, err = train(name, "--batch-size", "512", "--limit", "1024", **limit)
    assert (code, out) == (3, "")
    assert err.startswith(f"train_{name}.py: error: out of memory: ") and err.count("\n") == 1
    assert re.search(words, err), err


@pytest.mark.slow
def test_no_memory_in_a_step_is_one_line_and_3_and_the_checkpoint_stays(imported, tmp_path):
    """Enough for the small arrays, but not for those of a step on 6000 images."""
    saving = ("--save-dir", tmp_path, "--epochs", "1", "--batch-size", "6000")
    code, _, err = train("lenet", *saving, "--limit", "64")
    assert code == 0, err
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "lenet-epoch-0001.npz" in before
    small = {"as": imported + 2800 * memory_limits.MB}
    folder = tmp_path / "other"
    code, out, err = train("lenet", "--save-dir", folder, *saving[2:], **small)
    assert code == 3 and "training: 1 epoch of 1 batch" in out, err
    words = r"out of memory: .*(alloc|memory object).*; try a smaller --batch-size than 6000, or "
    assert err.count("\n") == 1 and re.search(words, err), err
    assert list(folder.iterdir()) == []
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == before


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError("Unable to allocate 3. GiB for an array"), "Unable to allocate 3. GiB for"),
        (mx.MXNetError("Traceback:\n  x.cc\nMXNetError: Failed to allocate CPU Memory"), "Failed"),
        (mx.MXNetError("Check failed: CUDA: out of memory"), "Check failed: CUDA: out of memory"),
        (mx.MXNetError("MXNetError: Resource temporarily unavailable"), "Resource temporarily"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (OSError(12, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (mx.MXNetError("Shape mismatch"), None),
        (OSError(28, "No space left on device"), None),
    ],
)
def test_which_errors_are_about_memory_and_their_message(error, short):
    found = memory_limits.shortage(error)
    assert found == short or found.startswith(short)


def test_out_of_memory_names_the_checkpoint_to_resume(monkeypatch, capsys, tmp_path):
    def run_out(run):
        (tmp_path / "lenet-epoch-0001-batch-000002.npz").write_bytes(b"")
        raise MemoryError

    codes = []
    monkeypatch.setattr(Run, "train", run_out)
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code) or sys.exit(code))
    with pytest.raises(SystemExit):
        command_line.main([*COMMON, "--save-dir", str(tmp_path), "--dry-run"])
    err = capsys.readouterr().err
    assert codes == [3] and err.count("\n") == 1
    assert err.endswith(f"; --resume continues from {tmp_path}/lenet-epoch-0001-batch-000002.npz\n")


def test_memory_that_is_required_is_not_kept():
    for _ in range(50):
        memory_limits.require("a test", 1 << 30)
    with pytest.raises(MemoryError, match="about 1073741824 MB for a test"):
        memory_limits.require("a test", 1 << 50)


@pytest.mark.parametrize("model", ["lenet", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_an_exception_in_an_operator_is_printed_once_and_ends_with_1(model, tmp_path):
    """What fails later, while the process ends, is not printed."""
    program = HERE.parent / "support" / "faulty_training.py"
    code, out, err = ended(program, model, "--save-dir", tmp_path, "--save-every", "1")
    assert code == 1 and "test acc" not in out
    assert re.fullmatch(PLANTED, err.splitlines()[-1])
    assert len(re.findall(f"^{PLANTED}", err, re.M)) == 1 and "in drain" not in err
    assert "in fail" in err  # where it was raised
    places = [path.name for path in sorted(tmp_path.glob("*.npz"))]
    assert places == [f"{model}-epoch-0001-batch-00000{step}.npz" for step in (1, 2)]
    for path in tmp_path.glob("*.npz"):
        checkpoint_files.read(path)  # not damaged


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirection, code, says",
    [
        (">&-", 0, ""),
        (">/dev/full", 4, "train_lenet.py: error: the output .*: No space left on device\n"),
        ("2>&- >&-", 0, ""),
        ("| head -1", 141, ""),
    ],
)
def test_training_goes_on_without_output_and_ends_if_nobody_reads_it(
    redirection, code, says, tmp_path
):
    options = f"{' '.join(COMMON)} --limit 64 --epochs 2 --save-dir {tmp_path}"
    train = f"{sys.executable} {SCRIPTS / 'train_lenet.py'} {options}"
    line = f"{train} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == code and re.fullmatch(says, done.stderr), done
    assert done.stdout.startswith("gluonpar ") == (code == 141)
    if code != 141:
        assert len([*tmp_path.glob("*.npz")]) == 2
