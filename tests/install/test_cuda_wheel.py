"""gluonpar on mxnet-cu112, on a machine without a GPU: `make test-cuda` installs it and runs this.

The CUDA libraries are PyPI's, the driver libcuda.so.1 is a stub built by gcc, and all computation
is on CPU contexts. Nothing here shows that a GPU computes correctly.

Each test starts processes: pytest's own has no driver, so it cannot import gluonpar, nor
conftest.py.
"""

import importlib.metadata
import os
import re
import sysconfig
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.libcuda_stub import build_libcuda, build_library

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
TRAINING = "--dataset synthetic --limit 64 --batch-size 32 --epochs 1 --num-gpus 2".split()


def python(*arguments, libraries=(), **environment):
    """Run Python with these folders before the system's libraries."""
    unset = {name: None for name in os.environ if name.startswith(SETTINGS)}
    environment["PYTHONPATH"] = str(REPOSITORY)
    if libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    return processes.end(*arguments, seconds=3600, **{**unset, **environment})


def output_of(program, **setup):
    done = python("-c", program, **setup)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def import_error(**setup):
    """Return the last line of a failing import of gluonpar."""
    done = python("-c", "import gluonpar.step", **setup)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def a6000(tmp_path_factory):
    """The folder of a libcuda.so.1 that shows a GPU for which the wheel has kernels."""
    folder = tmp_path_factory.mktemp("driver")
    build_libcuda(folder, [("NVIDIA RTX A6000", 8, 6)])
    return folder


MAPPED = """
import gluonpar, os
paths = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if ".so" in line}
for path in sorted(paths):
    if os.path.basename(path).startswith(("libcu", "libnv", "libnccl")):
        print(path)
"""


def test_without_a_driver_the_import_names_the_remedy():
    if python("-c", "import ctypes; ctypes.CDLL('libcuda.so.1')").returncode == 0:
        pytest.skip("this machine has NVIDIA's driver")
    message = import_error()
    assert message.startswith(
        "ImportError: mxnet-cu112 cannot be loaded: libcuda.so.1: cannot open"
    )
    assert "pip uninstall -y mxnet-cu112, then pip install --no-deps mxnet==1.9.1" in message


def test_every_cuda_library_is_from_pypis_wheels(a6000):
    mapped = [Path(line) for line in output_of(MAPPED, libraries=[a6000]).splitlines()]
    driver = [path for path in mapped if path.name == "libcuda.so.1"]
    assert driver == [a6000 / "libcuda.so.1"]
    others = [path for path in mapped if path not in driver]
    assert all(SITE / "nvidia" in path.parents for path in others)
    program = "from gluonpar.install import wheels; print(*wheels.CUDA_LIBRARIES)"
    assert {path.name for path in others} == set(output_of(program, libraries=[a6000]).split())


def test_parts_of_another_cudnn_on_the_loaders_path_are_not_used(a6000, tmp_path):
    """cuDNN loads its parts by name at their first use; parts of another cuDNN end the process."""
    build_library(tmp_path, "libcudnn_ops_infer.so.8")
    build_library(tmp_path, "libcudnn_cnn_infer.so.8")
    program = (
        "import ctypes, gluonpar; print(ctypes.CDLL('libcudnn.so.8').cudnnOpsInferVersionCheck())"
    )
    assert output_of(program, libraries=[tmp_path, a6000]) == "0\n"


CORE = ("step/test_step.py", "collectives/test_collectives.py", "gluon/test_trainer.py")


def test_the_tests_of_the_core_pass_on_this_mxnet(a6000):
    """K devices against the oracle in float64, every collective by value, the Trainer."""
    files = [REPOSITORY / "tests" / name for name in CORE]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, libraries=[a6000])
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^(\d+) passed", done.stdout, re.M)
    assert passed and int(passed[1]) > 200, done.stdout


def test_cuda_that_fails_in_mxnet_is_quoted_and_cpu_devices_train(a6000):
    """The stub has only its GPUs' names, so CUDA's runtime cannot start on it."""
    done = python("-m", "gluonpar", "doctor", libraries=[a6000])
    assert (done.returncode, done.stderr) == (1, "")
    assert "CUDA fails: MXNetError: CUDA: Check failed: e == cudaSuccess" in done.stdout
    done = python(REPOSITORY / "scripts" / "train_lenet.py", *TRAINING, libraries=[a6000])
    assert done.returncode == 0, done.stderr
    assert "No GPU that MXNet can use; using " in done.stderr
