"""gluonpar on mxnet-cu112, on a machine without a GPU: `make test-cuda` installs it and runs this.

The CUDA libraries are the real ones of PyPI, the driver libcuda.so.1 is a stub built by gcc, and
every computation is on CPU contexts. That a GPU computes is nowhere shown here.

Each test looks at a process of its own: pytest's cannot import gluonpar, having no driver. So
`make test-cuda` runs this file without conftest.py, which imports it.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from libcuda_stub import build_libcuda, build_library, cut

try:
    importlib.metadata.version("mxnet-cu112")
except importlib.metadata.PackageNotFoundError:
    pytest.skip(
        "mxnet-cu112 is not installed here; `make test-cuda` installs it and runs these tests",
        allow_module_level=True,
    )

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
SETTINGS = ("MXNET_", "OMP_", "GLUONPAR_", "CUDA_", "LD_", "PYTHON")
A6000, H200, K40 = ("NVIDIA RTX A6000", 8, 6), ("NVIDIA H200", 9, 0), ("Tesla K40m", 3, 5)
TRAINING = "--dataset synthetic --limit 64 --batch-size 32 --epochs 1 --num-gpus 2".split()


def python(*arguments, libraries=(), paths=(), **environment):
    """Run Python with these folders before the system's libraries and the packages installed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, REPOSITORY]))
    if libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=3600,
    )


def printed(program, **surroundings):
    done = python("-c", program, **surroundings)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def last_line(done):
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def doctor(**surroundings):
    """What the doctor finds, as {(topic, state): [text and remedy]}."""
    done = python("-m", "gluonpar", "doctor", "--json", **surroundings)
    assert done.stderr == "" and done.returncode in (0, 1)
    shown = json.loads(done.stdout)
    assert done.returncode == (shown["wrong"] > 0)
    found = {}
    for one in shown["findings"]:
        said = f"{one['text']} -> {one['remedy']}"
        found.setdefault((one["topic"], one["state"]), []).append(said)
    return found


@pytest.fixture(scope="module")
def a_driver(tmp_path_factory):
    """a_driver(gpus, ...): the folder of a libcuda.so.1 that shows those GPUs."""

    def build(gpus, **answers):
        folder = tmp_path_factory.mktemp("driver")
        build_libcuda(folder, gpus, **answers)
        return folder

    return build


@pytest.fixture(scope="module")
def a6000(a_driver):
    return a_driver([A6000])


def wheels_with(folder, damaged=(), missing=()):
    """A folder for sys.path, where PyPI's CUDA libraries seem to be installed, but for some."""
    for library in SITE.glob("nvidia/*/lib/lib*.so*"):
        place = folder / library.relative_to(SITE)
        place.parent.mkdir(parents=True, exist_ok=True)
        if library.name in damaged:
            with library.open("rb") as file:
                place.write_bytes(file.read(1 << 20))
        elif library.name not in missing:
            place.symlink_to(library)
    (folder / "sitecustomize.py").write_text(
        f"import sysconfig\nsysconfig.get_path = lambda name: {str(folder)!r}\n"
    )
    return folder


# the import, and where CUDA's libraries come from

MAPPED = """
import gluonpar, os
paths = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
for path in sorted(paths):
    if os.path.basename(path).startswith(("libcu", "libnv", "libnccl")):
        print(path)
"""


def test_without_a_driver_the_import_says_so_and_how_to_do_without(tmp_path):
    if python("-c", "import ctypes; ctypes.CDLL('libcuda.so.1')").returncode == 0:
        pytest.skip("this machine has NVIDIA's driver")
    said = last_line(python("-c", "import gluonpar"))
    assert said.startswith("ImportError: mxnet-cu112 cannot be loaded: libcuda.so.1: cannot open")
    assert "pip uninstall -y mxnet-cu112, then pip install 'gluonpar[cpu]'" in said
    found = doctor()
    assert "no NVIDIA driver: libcuda.so.1" in found["driver", "wrong"][0]
    assert "libcuda.so.1 is NVIDIA's driver" in found["mxnet", "wrong"][0]


def test_every_cuda_library_is_from_pypis_wheels(a6000):
    mapped = [Path(line) for line in printed(MAPPED, libraries=[a6000]).splitlines()]
    driver = [path for path in mapped if path.name == "libcuda.so.1"]
    assert driver == [a6000 / "libcuda.so.1"]
    others = [path for path in mapped if path not in driver]
    assert all(SITE / "nvidia" in path.parents for path in others)
    listed = printed(
        "from gluonpar.runtime import cuda_libraries as cuda; print(*cuda.LIBRARIES)",
        libraries=[a6000],
    )
    assert {path.name for path in others} == set(listed.split())


def test_another_cudnn_on_the_loaders_path_is_not_mixed_in(a6000, tmp_path):
    """cuDNN loads its parts by name at their first use; half of another cuDNN ends the process."""
    build_library(tmp_path, "libcudnn_ops_infer.so.8")
    build_library(tmp_path, "libcudnn_cnn_infer.so.8")
    program = (
        "import ctypes, gluonpar; print(ctypes.CDLL('libcudnn.so.8').cudnnOpsInferVersionCheck())"
    )
    assert printed(program, libraries=[tmp_path, a6000]) == "0\n"


def a_toolkit(folder):
    """A folder with some of CUDA's libraries, as a toolkit has them: no cuDNN, no NCCL."""
    names = ("libcudart.so.11.0", "libnvToolsExt.so.1", "libnvrtc.so.11.2")
    for name in names:
        (library,) = SITE.glob(f"nvidia/*/lib/{name}")
        shutil.copyfile(library, folder / name)
    return names


def test_pypis_libraries_come_before_a_systems(a6000, tmp_path):
    a_toolkit(tmp_path)
    assert str(tmp_path) not in printed(MAPPED, libraries=[tmp_path, a6000])


def test_a_systems_libraries_come_first_if_the_user_says_so(a6000, tmp_path):
    names = a_toolkit(tmp_path)
    surroundings = {"libraries": [tmp_path, a6000], "GLUONPAR_CUDA": "system"}
    mapped = [Path(line) for line in printed(MAPPED, **surroundings).splitlines()]
    for path in mapped:
        if path.name != "libcuda.so.1":
            assert (path.parent == tmp_path) == (path.name in names)
    said = doctor(**surroundings)["cuda", "ok"]
    for name in names:
        assert f"{name} loads from {tmp_path / name} -> " in said
    assert sum(str(SITE) in line for line in said) == len(said) - len(names)


def test_no_system_cuda_is_an_error_if_the_user_asked_for_it(a6000):
    surroundings = {"libraries": [a6000], "GLUONPAR_CUDA": "system"}
    said = last_line(python("-c", "import gluonpar", **surroundings))
    assert "GLUONPAR_CUDA=system, but the system's loader finds no libcudart.so.11.0" in said
    assert "or unset GLUONPAR_CUDA to take PyPI's libraries" in said
    (finding,) = [f for f in doctor(**surroundings)["cuda", "wrong"]]
    assert finding.startswith("libcudart.so.11.0 does not load: GLUONPAR_CUDA=system, but")


@pytest.mark.parametrize("name", ["libcufft.so.10", "libcudnn_cnn_infer.so.8"])
def test_a_damaged_library_is_named_and_so_is_its_wheel(name, a6000, tmp_path):
    surroundings = {"libraries": [a6000], "paths": [wheels_with(tmp_path, damaged=[name])]}
    said = last_line(python("-c", "import gluonpar", **surroundings))
    (path,) = tmp_path.glob(f"nvidia/*/lib/{name}")
    assert f"ImportError: mxnet-cu112 cannot be loaded: {path} is damaged: cut off after" in said
    remedy = f"pip install --force-reinstall --no-deps --no-cache-dir nvidia-{path.parts[-3]}-cu11"
    assert remedy in said
    (finding,) = doctor(**surroundings)["cuda", "wrong"]
    assert f"{name} does not load: {path} is damaged" in finding and remedy in finding


def test_a_library_that_is_not_installed_is_named_with_the_remedy(a6000, tmp_path):
    surroundings = {
        "libraries": [a6000],
        "paths": [wheels_with(tmp_path, missing=["libcurand.so.10"])],
    }
    said = last_line(python("-c", "import gluonpar", **surroundings))
    assert "mxnet-cu112 cannot be loaded: libcurand.so.10: cannot open shared object file" in said
    assert "pip install 'gluonpar[cu112]' brings them" in said
    (finding,) = doctor(**surroundings)["cuda", "wrong"]
    assert finding.startswith("libcurand.so.10 does not load: libcurand.so.10: cannot open")


def test_both_wheels_at_once(a6000, tmp_path):
    (tmp_path / "mxnet").symlink_to(SITE / "mxnet")
    for wheel in ("mxnet", "mxnet_cu112"):
        (tmp_path / f"{wheel}-1.9.1.dist-info").mkdir()
    surroundings = {"libraries": [a6000], "paths": [tmp_path]}
    said = last_line(python("-c", "import gluonpar", **surroundings))
    assert f"mxnet and mxnet-cu112 are both installed in {tmp_path}" in said
    assert "pip uninstall -y mxnet mxnet-cu112" in said
    assert "mxnet and mxnet-cu112 are both installed" in doctor(**surroundings)["mxnet", "wrong"][0]


def test_an_mxnet_that_was_cut_off(a6000, tmp_path):
    (tmp_path / "mxnet").mkdir()
    for path in (SITE / "mxnet").iterdir():
        (tmp_path / "mxnet" / path.name).symlink_to(path)
    library = tmp_path / "mxnet" / "libmxnet.so"
    library.unlink()
    with (SITE / "mxnet" / "libmxnet.so").open("rb") as file:
        library.write_bytes(file.read(1 << 20))
    cut(library, 1 << 20)
    said = last_line(python("-c", "import gluonpar", libraries=[a6000], paths=[tmp_path]))
    assert f"ImportError: {library} is damaged: cut off after 1048576 of at least" in said


# computing on CPU contexts


def test_allreduce_on_cpu_contexts_is_exact(a6000):
    program = """
import gluonpar, mxnet as mx, numpy as np
from gluonpar import collectives
for algorithm in collectives.ALGORITHMS:
    for k in (2, 3, 4):
        values = [np.arange(1001, dtype="float32") + 2000 * i for i in range(k)]
        data = [mx.nd.array(v, ctx=mx.cpu(i)) for i, v in enumerate(values)]
        gluonpar.allreduce(data, algorithm)
        right = all((array.asnumpy() == sum(values)).all() for array in data)
        print(algorithm, k, right)
"""
    lines = printed(program, libraries=[a6000]).splitlines()
    assert len(lines) >= 7 * 3
    assert [line for line in lines if not line.endswith("True")] == []


CORE = ("test_step.py", "test_collectives.py", "test_update.py", "test_trainer.py")


def test_the_tests_of_the_core_pass_on_this_mxnet(a6000):
    """K devices against the oracle in float64, every collective by value, the Trainer."""
    files = [REPOSITORY / "tests" / name for name in CORE]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, libraries=[a6000])
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^(\d+) passed in", done.stdout, re.M)
    assert passed and int(passed[1]) > 900, done.stdout


def test_gluonpars_own_proof_on_cpu_devices(a6000):
    done = python("-m", "gluonpar", "verify", "--num-gpus", "2", libraries=[a6000])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "devices: cpu(0), cpu(1)" in done.stdout
    assert done.stdout.endswith("all is right on these devices\n")


# the GPUs that the driver shows


@pytest.mark.parametrize(
    ("gpu", "age"), [(H200, "too new"), (K40, "too old")], ids=["capability 9.0", "capability 3.5"]
)
def test_a_gpu_without_kernels_is_said_to_be_so(gpu, age, a_driver):
    name, *capability = gpu
    shown = f"gpu 0 {name}, compute capability {capability[0]}.{capability[1]}"
    libraries = [a_driver([gpu])]
    (finding,) = doctor(libraries=libraries)["gpu", "wrong"]
    assert f"{shown}: {age}, MXNet cannot run on it" in finding
    assert "machine code for compute capability 5.0 to 8.9 only" in finding
    assert "train on CPU devices (--device cpu" in finding

    script = REPOSITORY / "scripts" / "train_lenet.py"
    done = python(script, *TRAINING, "--device", "gpu", libraries=libraries)
    assert done.returncode == 2 and done.stdout == ""
    assert shown in done.stderr and "kernels for 5.0 to 8.9 only" in done.stderr
    assert "Traceback" not in done.stderr and "no kernel image" not in done.stderr

    done = python(script, *TRAINING, libraries=libraries)
    assert done.returncode == 0, done.stderr
    assert f"the devices are cpu(0), cpu(1): {shown}" in done.stderr
    assert "on [cpu(0), cpu(1)]" in done.stdout


def test_a_gpu_with_kernels_is_said_to_be_usable(a6000):
    found = doctor(libraries=[a6000])
    shown = "gpu 0 NVIDIA RTX A6000, compute capability 8.6: usable -> "
    assert found["gpu", "ok"] == [shown]
    assert f"NVIDIA's, {a6000 / 'libcuda.so.1'}, knows CUDA up to 11.2 -> " in found["driver", "ok"]


def test_cuda_that_fails_under_mxnet_is_quoted_and_cpu_devices_train(a6000):
    """The stub knows no more than its GPUs' names, so CUDA's runtime cannot start on it."""
    (finding,) = doctor(libraries=[a6000])["mxnet", "wrong"]
    assert "CUDA does not answer it: CUDA: Check failed: e == cudaSuccess" in finding
    script = REPOSITORY / "scripts" / "train_lenet.py"
    done = python(script, *TRAINING, libraries=[a6000])
    assert done.returncode == 0, done.stderr
    assert "is there, but CUDA does not answer mxnet-cu112 (CUDA: Check failed" in done.stderr


def test_a_driver_that_is_too_old(a_driver):
    libraries = [a_driver([A6000], cuda=10020)]
    (finding,) = doctor(libraries=libraries)["driver", "wrong"]
    assert "knows CUDA up to 10.2; mxnet-cu112 needs CUDA 11 -> install a newer" in finding
    script = REPOSITORY / "scripts" / "train_lenet.py"
    done = python(script, *TRAINING, "--device", "gpu", libraries=libraries)
    assert done.returncode == 2
    assert "knows CUDA up to 10.2, and mxnet-cu112 needs 11.0 or later: install" in done.stderr


def test_a_driver_that_fails(a_driver):
    libraries = [a_driver([A6000], init=803)]
    (finding,) = doctor(libraries=libraries)["driver", "wrong"]
    assert "cuInit failed with error 803" in finding and "restart the machine" in finding
    script = REPOSITORY / "scripts" / "train_lenet.py"
    done = python(script, *TRAINING, libraries=libraries)
    assert done.returncode == 0, done.stderr
    assert "cuInit failed with error 803" in done.stderr
