"""python -m gluonpar doctor, in installations that are broken for real, by files put in the way."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from libcuda_stub import build_libcuda, cut

import gluonpar
from gluonpar.diagnostics.doctor import checks, command, entry, findings, gpu_checks, probes
from gluonpar.runtime import cuda_libraries, wheels

PLACES = {}
SETTINGS = ("MXNET_", "OMP_", "GLUONPAR_", "CUDA_", "LD_", "PYTHON")


@pytest.fixture(autouse=True, scope="module")
def package_alone(tmp_path_factory):
    """A folder with gluonpar alone: some children do not look where it may be installed."""
    PLACES["gluonpar"] = tmp_path_factory.mktemp("alone")
    (PLACES["gluonpar"] / "gluonpar").symlink_to(pathlib.Path(gluonpar.__file__).parent)


def surroundings(stubs=None, **environment):
    """The process's environment without settings; None takes a variable away."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    path = os.pathsep.join(map(str, [*([stubs] if stubs else []), PLACES["gluonpar"]]))
    wanted = {**inherited, "PYTHONPATH": path, **environment}
    return {name: value for name, value in wanted.items() if value is not None}


def run(*arguments, stubs=None, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gluonpar", *arguments],
        env=surroundings(stubs, **environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )


def examined(stubs=None, cwd=None, **environment):
    """Exit code, and of every topic its findings that are not ok."""
    done = run("doctor", "--json", stubs=stubs, cwd=cwd, **environment)
    assert done.stderr == ""
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
        if "free" not in finding["text"] and "load average" not in finding["text"]:  # they change
            assert f"{finding['topic']}: {finding['text']}\n" in words.stdout


def test_neither_mxnet_nor_numpy(tmp_path):
    no_site_packages(tmp_path)
    code, found = examined(tmp_path)
    assert code == 1
    assert found["numpy"] == [
        "wrong: cannot be used: ModuleNotFoundError: No module named 'numpy'",
    ]
    assert found["mxnet"] == [f"wrong: there is no MXNet in {sys.prefix}"]
    assert "no mpi4py, so one process only" in found["mpi"][0]


BROKEN = {
    "raise OSError('libgomp.so.1: cannot open shared object')": "apt-get install libgomp1",
    "raise ImportError('half of it is missing')": "half of it is missing. Reinstall it",
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


def the_real_mxnet(folder, without, instead=None):
    """MXNet's own files in another place, but for one, which is left out or replaced."""
    package = folder / "mxnet"
    package.mkdir()
    (folder / "mxnet-1.9.1.dist-info").mkdir()
    for path in wheels.package().iterdir():
        if path.name not in (without, "__pycache__"):
            (package / path.name).symlink_to(path)
    if instead is not None:
        (package / without).write_bytes(instead)


def test_an_mxnet_without_its_library(tmp_path):
    the_real_mxnet(tmp_path, without="libmxnet.so")
    _, found = examined(tmp_path)
    (finding,) = found["mxnet"]
    assert "Cannot find the MXNet library" in finding
    assert "pip install --force-reinstall --no-deps mxnet==1.9.1" in finding


def test_an_mxnet_whose_library_was_cut_off(tmp_path):
    with open(wheels.package() / "libmxnet.so", "rb") as file:
        the_real_mxnet(tmp_path, without="libmxnet.so", instead=file.read(1 << 20))
    _, found = examined(tmp_path)
    library = tmp_path / "mxnet" / "libmxnet.so"
    assert f"{library} is damaged: cut off after 1048576 of at least" in found["mxnet"][0]


@pytest.mark.parametrize("instead", [None, b"def broken(:\n", b"\0"])
def test_an_mxnet_with_a_module_that_is_missing_or_no_python(instead, tmp_path):
    the_real_mxnet(tmp_path, without="base.py", instead=instead)
    _, found = examined(tmp_path)
    assert "pip install --force-reinstall --no-deps mxnet==1.9.1" in found["mxnet"][0]


def test_both_wheels(tmp_path):
    package(tmp_path, "mxnet", "", "mxnet", "mxnet_cu112")
    code, found = examined(tmp_path)
    assert code == 1
    assert "mxnet and mxnet-cu112 are both installed" in found["mxnet"][0]


# whatever is broken: 0 or 1, and no traceback


@pytest.fixture(scope="module")
def answers():
    """What every probe answers here."""
    return {name: probes.ask(name) for name in probes._PROBES}


@pytest.mark.parametrize("name", probes._PROBES)
def test_a_probe_that_fails_or_raises_is_a_finding(name, answers, monkeypatch, capsys):
    def failing(probe):
        return probes.Answer({}, "it broke") if probe == name else answers[probe]

    def raising(probe):
        if probe == name:
            raise OSError("it broke")
        return answers[probe]

    for ask in (failing, raising):
        monkeypatch.setattr(probes, "ask", ask)
        code = command.main(["--json"])
        shown = json.loads(capsys.readouterr().out)
        assert code == (1 if shown["wrong"] else 0)
        broken = [f for f in shown["findings"] if "it broke" in f["text"]]
        assert len(broken) == 1 and broken[0]["remedy"]
        assert broken[0]["state"] == "wrong" or name == "driver", "no driver is needed here"


@pytest.mark.parametrize("check", command.CHECKS, ids=lambda check: check.__name__)
def test_every_check_may_raise(check, answers, monkeypatch, capsys):
    def broken():
        raise MemoryError("none left")

    broken.__name__ = check.__name__
    monkeypatch.setattr(probes, "ask", answers.__getitem__)
    monkeypatch.setattr(command, "CHECKS", [broken if c is check else c for c in command.CHECKS])
    assert command.main([]) == 1
    words = f"WRONG  {check.__name__}: could not be examined: MemoryError: none left"
    assert words in capsys.readouterr().out


def test_proc_that_cannot_be_read(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, io, os\n"
        "def refusing(real):\n"
        "    def opening(path, *args, **kwargs):\n"
        "        if str(path)[:5] in ('/proc', '/sys/'): raise PermissionError(13, 'no')\n"
        "        return real(path, *args, **kwargs)\n"
        "    return opening\n"
        "builtins.open = io.open = refusing(io.open)\n"
        "os.open = refusing(os.open)\n"
        "def no(): raise OSError('unobtainable')\n"
        "os.getloadavg = no\n"
    )
    code, found = examined(tmp_path)
    assert (code, found["threads"]) == (0, [])


SURROUNDINGS = {
    "no home": {"HOME": None, "USER": None, "LOGNAME": None},
    "nothing can be written": {"HOME": "/proc", "TMPDIR": "/proc", "cwd": "/proc"},
    "no path": {"PATH": ""},
    "ASCII out": {
        **{"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
        **{"MXNET_HOME": "/no/such/f\xf6lder\u20ac"},
    },
    "ASCII": {
        **{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        **{"MXNET_HOME": "/no/such/f\xf6lder\u20ac"},
    },
}


@pytest.mark.parametrize("what", SURROUNDINGS)
def test_strange_surroundings(what, tmp_path):
    no_site_packages(tmp_path)  # so that it is quick
    code, found = examined(tmp_path, **SURROUNDINGS[what])
    assert code == 1 and len(found["numpy"]) == 1 and len(found["settings"]) < 3
    words = run("doctor", stubs=tmp_path, **SURROUNDINGS[what])
    assert words.returncode == 1 and words.stderr == ""


@pytest.mark.parametrize(
    "name", ["json", "signal", "re", "typing", "subprocess", "ctypes", "numpy"]
)
def test_a_file_in_the_current_folder_that_hides_a_module(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')")
    _, found = examined(cwd=tmp_path)
    assert f"note: {tmp_path / name}.py hides the module {name}" in found["python"][0]


def test_a_current_folder_that_is_gone(tmp_path):
    no_site_packages(tmp_path)
    (tmp_path / "gone").mkdir()
    program = f"cd gone && rmdir ../gone && exec {sys.executable} -m gluonpar doctor"
    done = subprocess.run(
        ["sh", "-c", program],
        env=surroundings(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "WRONG  numpy:" in done.stdout


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (">&-", ""),
        (">&- 2>&- <&-", ""),
        (">/dev/full", "doctor: standard output: [Errno 28] No space left on device"),
        ("| head -c 1", ""),
        ("| :", ""),
    ],
)
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_standard_output_that_takes_nothing(form, redirection, said, tmp_path):
    no_site_packages(tmp_path)
    (tmp_path / "code").write_text("")
    program = f"{{ {sys.executable} -m gluonpar doctor {form}; echo $? >code; }} {redirection}"
    if "|" not in redirection:
        program = f"{sys.executable} -m gluonpar doctor {form} {redirection}; echo $? >code"
    done = subprocess.run(
        ["sh", "-c", program],
        env=surroundings(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "code").read_text() == "1\n"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert said in done.stderr


def test_mpirun_of_another_mpi(monkeypatch):
    facts = {"mpi4py": "4.0", "library": "MPICH Version: 4.2", "vendor": "MPICH"}
    ours = {**facts, "starter": "/a/mpirun", "starter_says": "HYDRA build details: Version: 4.2"}
    other = {**facts, "starter": "/b/mpirun", "starter_says": "mpirun (Open MPI) 5.0.11"}
    states = []
    for answer in (ours, other, facts):
        monkeypatch.setattr(probes, "ask", lambda probe, answer=answer: probes.Answer(answer, ""))
        states.append([finding.state for finding in checks.mpi()])
    assert states == [["ok", "ok"], ["ok", "wrong"], ["ok", "note"]]


def test_cuda_that_does_not_answer_mxnet(monkeypatch):
    facts = {"version": "1.9.1", "file": "/a", "cuda": True, "adds": True, "num_gpus": 0}
    failing = {**facts, "cuda_fails": "CUDA: Check failed: e == cudaSuccess (803 vs. 0)"}
    monkeypatch.setattr(probes, "ask", lambda probe: probes.Answer(failing, ""))
    first, second = checks.mxnet()
    assert (first.state, second.state) == ("ok", "wrong")
    assert "since CUDA does not answer it: CUDA: Check failed: e == cudaSuccess (803" in second.text


def test_of_mxnets_long_errors_the_line_that_says_what_it_is():
    words = "Traceback (most recent call last):\n  File a.h, line 458\n  CUDA: Check failed\n"
    assert probes._gist(RuntimeError(words)) == "CUDA: Check failed"
    assert probes._gist(RuntimeError("first\nsecond")) == "first"
    assert probes._gist(RuntimeError()) == ""


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


def test_settings_that_override_and_one_that_there_is_not():
    code, found = examined(
        MXNET_CPU_TEMP_COPY="7",
        OMP_NUM_THREADS="4096",
        GLUONPAR_CUDA="sytem",
    )
    assert code == 1
    overridden = "note: MXNET_CPU_TEMP_COPY=7 in the environment overrides gluonpar's 256"
    assert overridden in found["settings"]
    assert any("OMP_NUM_THREADS=4096 threads a device" in text for text in found["threads"])
    assert "GLUONPAR_CUDA=sytem is none of pypi, system" in found["cuda"][0]


def test_damaged_data_is_wrong_and_absent_data_is_not(tmp_path, monkeypatch):
    folder = tmp_path / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{stem}-ubyte.gz").write_bytes(b"not gzip")
    monkeypatch.setenv("MXNET_HOME", str(tmp_path))
    (finding,) = checks.data()
    assert finding.state == "wrong" and "train-images-idx3-ubyte.gz" in finding.text
    nowhere = probes.Answer({"tried": ["/a", "/b"]}, "")
    monkeypatch.setattr(probes, "ask", lambda probe: nowhere)
    (finding,) = checks.data()
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
    monkeypatch.setattr(wheels, "installed", lambda: wheel)
    found = list(gpu_checks.gpus())
    assert [finding.state for finding in found] == states
    assert words in found[-1].text


@pytest.mark.parametrize(
    ("init", "cuda_version", "words"),
    [(803, 11020, "failed with error 803"), (0, 10020, "needs CUDA 11")],
)
def test_a_driver_that_fails_or_is_too_old(init, cuda_version, words, tmp_path, monkeypatch):
    build_libcuda(tmp_path, [T4], init=init, cuda=cuda_version)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(wheels, "installed", lambda: ["mxnet-cu112"])
    found = list(gpu_checks.gpus())
    assert found[0].state == "wrong" and words in found[0].text


def test_cuda_libraries_say_from_where_and_what_is_missing(tmp_path, monkeypatch):
    for name in cuda_libraries.LIBRARIES[:2]:
        built = build_libcuda(tmp_path, [])  # any library will do
        built.rename(tmp_path / name)
    (tmp_path / cuda_libraries.LIBRARIES[2]).write_bytes(b"damaged")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    monkeypatch.setattr(wheels, "installed", lambda: ["mxnet-cu112"])
    found = {finding.text.split()[0]: finding for finding in gpu_checks.cuda_libraries()}
    for name in cuda_libraries.LIBRARIES[:2]:
        assert found[name].text == f"{name} loads from {tmp_path / name}"
    assert found[cuda_libraries.LIBRARIES[2]].state == "wrong"
    assert len(found) == len(cuda_libraries.LIBRARIES)


def test_a_damaged_library_of_pypis_has_its_remedy(tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "cufft" / "lib"
    folder.mkdir(parents=True)
    library = cut(build_libcuda(folder, [])).rename(folder / "libcufft.so.10")
    unlisted = folder / "libcufftw.so.10"
    unlisted.write_bytes(b"")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sysconfig\nsysconfig.get_path = lambda name: {str(tmp_path)!r}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(wheels, "installed", lambda: ["mxnet-cu112"])
    found = {finding.text.split()[0]: finding for finding in gpu_checks.cuda_libraries()}
    assert found["not"].state == "note" and "libcudnn.so.8" in found["not"].text
    for path in (library, unlisted):
        assert f"{path} is damaged" in found[path.name].text
        remedy = "pip install --force-reinstall --no-deps --no-cache-dir nvidia-cufft-cu11"
        assert (found[path.name].state, found[path.name].remedy) == ("wrong", remedy)


def test_no_driver_is_wrong_only_with_a_wheel_that_needs_it(monkeypatch):
    missing = probes.Answer({"missing": "libcuda.so.1: cannot open"}, "")
    monkeypatch.setattr(probes, "ask", lambda probe: missing)
    states = []
    for wheel in ("mxnet", "mxnet-cu112"):
        monkeypatch.setattr(wheels, "installed", lambda wheel=wheel: [wheel])
        states += [finding.state for finding in gpu_checks.gpus()]
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
    assert checks.cpu_quota(tmp_path) == quota


def test_little_or_no_shared_memory_is_noted(monkeypatch):
    (none,) = checks.shared_memory("/no/such/folder")
    monkeypatch.setattr(checks, "SHM_BYTES", 1 << 60)
    (little,) = checks.shared_memory("/")
    assert (none.state, little.state) == ("note", "note")
    assert "--shm-size=1g" in little.remedy


def test_a_check_that_fails_is_a_finding_and_the_others_are_done(monkeypatch, capsys):
    def broken():
        yield findings.Finding("first", "ok", "seen")
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(command, "CHECKS", (broken, checks.shared_memory))
    assert command.report() == 1
    out = capsys.readouterr().out
    assert "WRONG  broken: could not be examined: KeyError: 'what nobody thought of'" in out
    assert "shared memory" in out


def test_a_probe_that_hangs_is_a_finding():
    facts, failure = probes.ask("mxnet", timeout_seconds=0.05)
    assert facts == {} and failure.startswith("did not answer within 0.05 s (the load average is ")


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
    assert entry.is_doctor(argv, command_line) is ours


def test_the_command_line_is_known_on_pythons_that_do_not_keep_it(monkeypatch):
    want = sys.orig_argv if hasattr(sys, "orig_argv") else None
    monkeypatch.delattr(sys, "orig_argv", raising=False)
    got = entry._command_line()
    assert got and (want is None or got[-len(want) + 1 :] == want[1:])
