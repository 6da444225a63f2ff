"""gluonpar doctor, mostly in installations that stand-in files have broken."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import gluonpar
from gluonpar.diagnostics import doctor as checks
from gluonpar.install import processors, wheels
from gluonpar.training.data import fashion_mnist
from tests.support.libcuda_stub import build_libcuda, build_library
from tests.support.processes import end

SETTINGS = ("MXNET_", "OMP_", "GLUONPAR_", "CUDA_", "LD_", "PYTHON")


@pytest.fixture
def run(tmp_path):
    """Run the doctor in a shell without settings, and with ``tmp_path`` on Python's path."""
    # gluonpar is there, too: some of these processes have no site-packages.
    (tmp_path / "gluonpar").symlink_to(pathlib.Path(gluonpar.__file__).parent)
    unset = {name: None for name in os.environ if name.startswith(SETTINGS)}

    def run(*options, shell='"$@"'):
        how = {"cwd": tmp_path, "wrapper": ("sh", "-c", shell, "sh")}
        variables = {**unset, "PYTHONPATH": str(tmp_path)}
        return end("-m", "gluonpar", "doctor", *options, **how, **variables)

    return run


@pytest.fixture
def mxnet(tmp_path, monkeypatch):
    """mxnet(wheel, body): a stand-in for MXNet, which the checks import."""

    def install(wheel="mxnet", body=""):
        (tmp_path / "mxnet").mkdir()
        (tmp_path / "mxnet" / "__init__.py").write_text(body)
        (tmp_path / f"{wheel.replace('-', '_')}-1.9.1.dist-info").mkdir()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def no_site_packages(folder):
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if not p.endswith('-packages')]\n"
    )


@pytest.mark.slow
def test_here_nothing_is_wrong_and_both_forms_have_the_same_findings(run):
    text, as_json = run(), run("--json")
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.endswith("nothing is wrong\n")
    findings = json.loads(as_json.stdout)["findings"]
    assert {finding["topic"] for finding in findings} >= set(checks.CHECKS)
    for finding in findings:
        if "other programs" not in finding["text"]:  # they change
            assert f"{finding['topic']}: {finding['text']}\n" in text.stdout


@pytest.mark.slow
def test_neither_mxnet_nor_numpy(run, tmp_path):
    no_site_packages(tmp_path)
    done = run("--json")
    assert (done.returncode, done.stderr) == (1, "")
    output = json.loads(done.stdout)
    wrong = {f["topic"]: f for f in output["findings"] if f["state"] == "wrong"}
    assert {*wrong} == {"numpy", "mxnet"}
    assert output["wrong"] == len(wrong) and all(f["remedy"] for f in wrong.values())
    assert "ModuleNotFoundError: No module named 'numpy'" in wrong["numpy"]["text"]
    assert f"finds none in {sys.prefix}" in wrong["mxnet"]["text"]
    assert wheels.CPU in wrong["mxnet"]["text"]
    (data,) = (f for f in output["findings"] if f["topic"] == "data")
    assert data["state"] == "note" and "No module named 'numpy'" in data["text"]
    assert any("no mpi4py" in f["text"] for f in output["findings"])


BROKEN = {
    "raise OSError('damaged')": "--force-reinstall --no-deps mxnet==1.9.1",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "ended with signal 11, Segm",
    "print('hello'); raise SystemExit(0)": "ended with exit code 0",
}


@pytest.mark.parametrize("body", BROKEN)
def test_an_mxnet_that_cannot_be_imported(body, mxnet):
    mxnet(body=body)
    (finding,) = checks.examine("mxnet")
    assert finding.state == "wrong" and finding.remedy and BROKEN[body] in finding.text


def test_settings_that_override_are_noted(monkeypatch):
    for setting in ("GOMP_SPINCOUNT=7", "OMP_NUM_THREADS=4096"):
        monkeypatch.setenv(*setting.split("="))
    remedies = {text.split()[0]: remedy for _, _, text, remedy in checks.examine("settings")}
    assert "GOMP_SPINCOUNT" in remedies["GOMP_SPINCOUNT=7"]
    assert "unset" in remedies["OMP_NUM_THREADS=4096"]


def test_a_check_that_hangs_is_a_finding(mxnet):
    mxnet(body="import signal; signal.pause()")
    ((topic, state, text, remedy),) = checks.examine("mxnet", timeout_seconds=0.05)
    assert (topic, state) == ("mxnet", "wrong") and "no result within 0.05 s" in text
    assert "mxnet==1.9.1" in remedy


SHELLS = {
    "no home": 'unset HOME USER LOGNAME; "$@"',
    "nothing can be written": 'cd /proc; export HOME=/proc TMPDIR=/proc PATH=; "$@"',
    "a folder that was removed": 'mkdir gone; cd gone; rmdir ../gone; "$@"',
    "no standard output": '"$@" >&-',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHELLS)
def test_unusual_environments(kind, run, tmp_path):
    no_site_packages(tmp_path)  # which is fast
    done = run(shell=SHELLS[kind])
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("WRONG  numpy: ") == (kind != "no standard output")


H200, T4 = ("NVIDIA H200", 9, 0), ("Tesla T4", 7, 5)


@pytest.fixture
def machine(tmp_path, monkeypatch, mxnet):
    """machine(gpus, wheel, ...): GPUs that the driver shows, and the wheel of MXNet."""

    def pretend(gpus, wheel="mxnet-cu112", **driver):
        build_libcuda(tmp_path, gpus, **driver)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        mxnet(wheel)

    return pretend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "wheel", "states", "words"),
    [
        ([H200], "mxnet-cu112", ["wrong"], "5.0 to 8.9 only"),
        ([H200], "mxnet", ["note"], "5.0 to 8.9 only"),
        ([T4, H200], "mxnet-cu112", ["ok", "note"], "not usable"),
        ([T4], "mxnet", ["note"], "without CUDA"),
        ([("Tesla K80", 3, 7)], "mxnet-cu112", ["wrong"], "not usable"),
        ([], "mxnet-cu112", ["note"], "no GPU (CUDA_VISIBLE_DEVICES is '-1')"),
    ],
)
def test_gpus_against_the_kernels_in_the_wheel(gpus, wheel, states, words, machine, monkeypatch):
    machine(gpus, wheel, cuda=12040, cuInit=0 if gpus else 100)  # CUDA_ERROR_NO_DEVICE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    findings = checks.examine("gpu")
    assert [finding.state for finding in findings] == ["ok", *states]
    assert words in findings[-1].text


@pytest.mark.slow
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize(
    ("driver", "harmless", "words"),
    [
        ({"cuInit": 803}, "note", "failed with error 803"),
        ({"cuda": 10020}, "ok", "CUDA up to 10.2"),
        (None, "note", "no NVIDIA driver found"),
    ],
    ids=["that fails", "too old", "missing"],
)
def test_a_bad_driver_is_wrong_only_with_a_wheel_that_needs_it(
    driver, harmless, words, needed, machine, tmp_path
):
    machine([T4], "mxnet-cu112" if needed else "mxnet", **(driver or {}))
    if driver is None:  # this also holds where a driver is installed: the loader stops here
        (tmp_path / "libcuda.so.1").write_text("not a library\n" * 100)
    (_, state, text, _), *others = checks.examine("gpu")
    assert state == ("wrong" if needed else harmless) and words in text
    assert bool(others) == (driver == {"cuda": 10020})


def test_cuda_libraries_are_listed_up_to_one_that_ends_the_process(machine, tmp_path, monkeypatch):
    """A library that was cut off ends it by a signal, without a message."""
    names, ends = wheels.CUDA_LIBRARIES, "#include <unistd.h>\n__attribute__((constructor)) "
    build_library(tmp_path, names[0])
    (tmp_path / names[1]).write_bytes(b"damaged")
    build_library(tmp_path, names[3], ends + "void end(void) { _exit(7); }")
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    machine([])
    loaded, damaged, absent, last = checks.examine("cuda")
    assert loaded[:3] == ("cuda", "ok", f"{names[0]} loads from the system")
    for finding, words in ((damaged, names[1]), (absent, f"{names[2]}: cannot open shared")):
        assert finding.state == "wrong" and words in finding.text
        assert "--force-reinstall" in finding.remedy
    assert last.state == "wrong" and f"exit code 7; last line: loading {names[3]}" in last.text


@pytest.mark.parametrize(
    ("group", "limits", "quota"),
    [
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "200000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("", {"cpu.max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/c",
            {"cpu/c/cpu.cfs_quota_us": "50000", "cpu/c/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpu_quotas_of_control_groups(group, limits, quota, tmp_path):
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processors.quota(tmp_path) == quota


def test_a_quota_bounds_the_number_of_processors(monkeypatch):
    allowed = processors.usable()
    for granted, number in ((0.5, 1), (1.0, 1), (allowed + 0.5, allowed)):
        monkeypatch.setattr(processors, "quota", lambda granted=granted: granted)
        assert processors.usable() == number
    monkeypatch.setattr(processors, "quota", lambda: 0.5)
    assert "0.5" in processors.shared()


def test_other_programs_on_the_processors_are_noted():
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        notes = [finding.text for finding in checks.examine("threads") if finding.state == "note"]
    finally:
        loop.kill()
        loop.wait()
    assert any("other programs use" in text for text in notes)


def test_damaged_data_are_wrong_and_absent_data_are_not(tmp_path, monkeypatch):
    folder = tmp_path / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{stem}-ubyte.gz").write_bytes(b"not gzip")
    monkeypatch.setenv("MXNET_HOME", str(tmp_path))
    ((_, state, text, remedy),) = checks.examine("data")
    assert state == "wrong" and "train-images-idx3-ubyte.gz" in text and "--data-dir" in remedy
    monkeypatch.setattr(
        fashion_mnist, "folders", lambda: {tmp_path / "a": "one", tmp_path / "b": "two"}
    )
    ((state, text, _),) = checks.data()
    assert state == "note" and f"{tmp_path / 'a'} (one), {tmp_path / 'b'} (two)" in text
