"""python -m gluonpar doctor, in installations that are broken for real, by files put in the way."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from libcuda_stub import build_libcuda

from gluonpar import asked, cuda, doctor, probes, symptoms

REPOSITORY = pathlib.Path(__file__).parent.parent
SETTINGS = ("MXNET_", "OMP_", "GLUONPAR_", "CUDA_", "LD_", "PYTHON")


def run(*arguments, stubs=None, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    path = os.pathsep.join(map(str, [*([stubs] if stubs else []), REPOSITORY]))
    return subprocess.run(
        [sys.executable, "-m", "gluonpar", *arguments],
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def examined(stubs=None, **environment):
    """Exit code, and of every topic its findings that are not ok."""
    done = run("doctor", "--json", stubs=stubs, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    shown = json.loads(done.stdout)
    wrong = [f for f in shown["findings"] if f["state"] == "wrong"]
    assert shown["wrong"] == len(wrong) and all(f["remedy"] for f in wrong)
    assert done.returncode == (1 if wrong else 0)
    found = {f["topic"]: [] for f in shown["findings"]}
    for finding in shown["findings"]:
        if finding["state"] != "ok":
            found[finding["topic"]].append(f"{finding['state']}: {finding['text']}")
    return done.returncode, found


def package(folder, name, body, *wheels):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body)
    for wheel in wheels:
        (folder / f"{wheel}-1.9.1.dist-info").mkdir()


def no_site_packages(folder):
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if not p.endswith('-packages')]\n"
    )


def test_here_nothing_is_wrong_and_both_forms_say_the_same(tmp_path):
    words, as_json = run("doctor"), run("doctor", "--json")
    assert (words.returncode, words.stderr) == (0, "")
    assert words.stdout.endswith("nothing is wrong\n")
    findings = json.loads(as_json.stdout)["findings"]
    topics = {finding["topic"] for finding in findings}
    assert topics >= {"python", "numpy", "mxnet", "driver", "cuda", "settings", "threads"}
    assert topics >= {"shared memory", "data", "mpi"}
    for finding in findings:
        if finding["topic"] != "shared memory":  # its free bytes may change in between
            assert f"{finding['topic']}: {finding['text']}\n" in words.stdout


def test_neither_mxnet_nor_numpy(tmp_path):
    no_site_packages(tmp_path)
    code, found = examined(tmp_path)
    assert code == 1
    assert found["numpy"] == [
        "wrong: cannot be used: ModuleNotFoundError: No module named 'numpy'",
    ]
    assert "No module named 'numpy'" in found["mxnet"][0]
    assert "no mpi4py, so one process only" in found["mpi"][0]


BROKEN = {
    "raise OSError('libgomp.so.1: cannot open shared object')": "apt-get install libgomp1",
    "raise ImportError('half of it is missing')": "ImportError: half of it is missing",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "ended the process (SIGSEGV)",
    "import os; os._exit(3)": "ended the process with exit code 3",
    "print('hello'); raise SystemExit(0)": "ended the process with exit code 0",
}


@pytest.mark.parametrize("body", BROKEN)
def test_an_mxnet_that_cannot_be_imported(body, tmp_path):
    package(tmp_path, "mxnet", body, "mxnet")
    code, found = examined(tmp_path)
    assert code == 1
    assert len(found["mxnet"]) == 1 and BROKEN[body] in found["mxnet"][0]


def test_both_wheels(tmp_path):
    package(tmp_path, "mxnet", "", "mxnet", "mxnet_cu112")
    code, found = examined(tmp_path)
    assert code == 1
    assert "mxnet and mxnet-cu112 are both installed" in found["mxnet"][0]


def test_numpy_2(tmp_path):
    package(
        tmp_path,
        "numpy",
        "__version__ = '2.1.0'\nclass ones:\n"
        "    def __init__(self, n): self.n = n\n    def sum(self): return self.n\n",
    )
    code, found = examined(tmp_path)
    assert code == 1
    assert found["numpy"][0].startswith("wrong: 2.1.0 at ")
    assert "needs one before 2" in found["numpy"][0]


def test_a_data_folder_that_cannot_be_read_and_settings_that_override(tmp_path):
    code, found = examined(
        MXNET_HOME="/tmp/" + "long" * 2000,
        MXNET_CPU_TEMP_COPY="7",
        OMP_NUM_THREADS="4096",
        GLUONPAR_CUDA="sytem",
    )
    assert code == 1
    assert "File name too long" in found["data"][0]
    overridden = "note: MXNET_CPU_TEMP_COPY=7 in the environment overrides gluonpar's 64"
    assert overridden in found["settings"]
    assert any("OMP_NUM_THREADS=4096 threads a device" in text for text in found["threads"])
    assert "GLUONPAR_CUDA=sytem is none of pypi, system" in found["cuda"][0]


def test_damaged_data_is_wrong_and_absent_data_is_not(tmp_path, monkeypatch):
    folder = tmp_path / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{stem}-ubyte.gz").write_bytes(b"not gzip")
    monkeypatch.setenv("MXNET_HOME", str(tmp_path))
    (finding,) = symptoms.data()
    assert finding.state == "wrong" and "train-images-idx3-ubyte.gz" in finding.text
    nowhere = probes.Answer({"tried": ["/a", "/b"]}, "")
    monkeypatch.setattr(probes, "ask", lambda probe: nowhere)
    (finding,) = symptoms.data()
    assert finding.state == "note" and "none of /a, /b" in finding.text


H200, T4 = ("NVIDIA H200", 9, 0), ("Tesla T4", 7, 5)


@pytest.mark.parametrize(
    ("gpus", "wheel", "states", "words"),
    [
        ([H200], ["mxnet-cu112"], ["ok", "wrong"], "too new, MXNet cannot run on it"),
        ([H200], ["mxnet"], ["ok", "note"], "compute capability 5.0 to 8.9 only"),
        ([T4, H200], ["mxnet-cu112"], ["ok", "ok", "note"], "too new"),
        ([T4], ["mxnet"], ["ok", "note"], "the MXNet installed is without CUDA"),
        ([("Tesla K80", 3, 7)], ["mxnet-cu112"], ["ok", "wrong"], "too old"),
        ([], ["mxnet-cu112"], ["ok", "note"], "the driver shows no GPU"),
    ],
)
def test_gpus_against_what_the_wheel_has_kernels_for(
    gpus, wheel, states, words, tmp_path, monkeypatch
):
    build_libcuda(tmp_path, gpus)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(symptoms, "wheels", lambda: wheel)
    found = list(symptoms.gpus())
    assert [finding.state for finding in found] == states
    assert words in found[-1].text


@pytest.mark.parametrize(
    ("init", "cuda_version", "words"),
    [(803, 11020, "failed with error 803"), (0, 10020, "needs CUDA 11")],
)
def test_a_driver_that_fails_or_is_too_old(init, cuda_version, words, tmp_path, monkeypatch):
    build_libcuda(tmp_path, [T4], init=init, cuda=cuda_version)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(symptoms, "wheels", lambda: ["mxnet-cu112"])
    found = list(symptoms.gpus())
    assert found[0].state == "wrong" and words in found[0].text


def test_cuda_libraries_say_from_where_and_what_is_missing(tmp_path, monkeypatch):
    for name in cuda.LIBRARIES[:2]:
        built = build_libcuda(tmp_path, [])  # any library will do
        built.rename(tmp_path / name)
    (tmp_path / cuda.LIBRARIES[2]).write_bytes(b"damaged")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    monkeypatch.setattr(symptoms, "wheels", lambda: ["mxnet-cu112"])
    found = {finding.text.split()[0]: finding for finding in symptoms.cuda_libraries()}
    for name in cuda.LIBRARIES[:2]:
        assert found[name].text == f"{name} loads from {tmp_path / name}"
    assert found[cuda.LIBRARIES[2]].state == "wrong"
    assert len(found) == len(cuda.LIBRARIES)


def test_no_driver_is_wrong_only_with_a_wheel_that_needs_it(monkeypatch):
    missing = probes.Answer({"missing": "libcuda.so.1: cannot open"}, "")
    monkeypatch.setattr(probes, "ask", lambda probe: missing)
    states = []
    for wheel in ("mxnet", "mxnet-cu112"):
        monkeypatch.setattr(symptoms, "wheels", lambda wheel=wheel: [wheel])
        states += [finding.state for finding in symptoms.gpus()]
    assert states == ["ok", "wrong"]


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "rubbish"}, None),
    ],
)
def test_limits_of_control_groups(files, quota, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert symptoms.cpu_quota(tmp_path) == quota


def test_little_or_no_shared_memory_is_noted(monkeypatch):
    (none,) = symptoms.shared_memory("/no/such/folder")
    monkeypatch.setattr(symptoms, "SHM_BYTES", 1 << 60)
    (little,) = symptoms.shared_memory("/")
    assert (none.state, little.state) == ("note", "note")
    assert "--shm-size=1g" in little.remedy


def test_a_check_that_fails_is_a_finding_and_the_others_are_done(monkeypatch, capsys):
    def broken():
        yield symptoms.Finding("first", "ok", "seen")
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(doctor, "CHECKS", (broken, symptoms.shared_memory))
    assert doctor.report() == 1
    out = capsys.readouterr().out
    assert "WRONG  broken: could not be examined: KeyError: 'what nobody thought of'" in out
    assert "shared memory" in out


def test_a_probe_that_hangs_is_a_finding():
    answer = probes.ask("mxnet", timeout_seconds=0.05)
    assert answer == ({}, "did not answer within 0.05 s")


@pytest.mark.parametrize(
    ("argv", "command_line", "ours"),
    [
        (["-m", "doctor", "--json"], ["py", "-m", "gluonpar", "doctor", "--json"], True),
        (["-m", "doctor"], ["py", "-mgluonpar", "doctor"], True),
        (["-m", "doctor"], ["py", "-Im", "gluonpar.__main__", "doctor"], True),
        (["-m", "doctor"], ["py", "-m", "other.gluonpar", "doctor"], False),
        (["-m", "verify"], ["py", "-m", "gluonpar", "verify"], False),
        (["train.py", "doctor"], ["py", "train.py", "doctor"], False),
        (["-m", "doctor"], [], False),
    ],
)
def test_only_python_m_gluonpar_doctor_is_the_doctor(argv, command_line, ours):
    assert asked.is_doctor(argv, command_line) is ours


def test_the_command_line_is_known_on_pythons_that_do_not_keep_it(monkeypatch):
    want = sys.orig_argv if hasattr(sys, "orig_argv") else None
    monkeypatch.delattr(sys, "orig_argv", raising=False)
    got = asked._command_line()
    assert got and (want is None or got[-len(want) + 1 :] == want[1:])
