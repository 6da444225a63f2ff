"""tools/choose_extra.py: which MXNet to install, before anything is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from libcuda_stub import build_libcuda

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "choose_extra.py"
T4, H200 = ("Tesla T4", 7, 5), ("NVIDIA H200", 9, 0)

pytestmark = pytest.mark.skipif(
    not (SCRIPT.parents[1] / "gluonpar").is_dir(),
    reason="the script is for a clone, before anything is installed; here the package is",
)


def choose(library_folder, **environment):
    """Run the script with the folder's libcuda.so.1; return the extra and the reason."""
    # -S hides site-packages: the script is run before anything is installed.
    result = subprocess.run(
        [sys.executable, "-S", str(SCRIPT)],
        cwd=library_folder,
        env={**os.environ, "LD_LIBRARY_PATH": str(library_folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    extra, reason = result.stdout.rstrip("\n"), result.stderr
    assert reason.startswith(f"{extra}: ") and reason.count("\n") == 1
    return extra, reason


def test_a_gpu_with_kernels_means_cu112(tmp_path):
    build_libcuda(tmp_path, [T4])
    extra, reason = choose(tmp_path)
    assert extra == "cu112" and "gpu 0 Tesla T4, compute capability 7.5\n" in reason


def test_a_gpu_without_kernels_means_cpu(tmp_path):
    build_libcuda(tmp_path, [H200], cuda=12080)
    extra, reason = choose(tmp_path)
    assert extra == "cpu"
    assert "gpu 0 NVIDIA H200, compute capability 9.0" in reason and "5.0 to 8.9" in reason


@pytest.mark.parametrize("gpus", [(T4, H200), (H200, T4)])
def test_one_gpu_with_kernels_is_enough_and_the_other_is_named(tmp_path, gpus):
    build_libcuda(tmp_path, gpus)
    extra, reason = choose(tmp_path)
    usable, unusable = reason.split(" (not usable: ")
    assert extra == "cu112"
    assert "Tesla T4" in usable and "H200" not in usable
    assert "H200" in unusable and "T4" not in unusable


def test_a_missing_driver_means_cpu(tmp_path):
    # The loader stops at a libcuda.so.1 that is no library, so this also holds where a driver is.
    (tmp_path / "libcuda.so.1").write_text("not a library\n" * 100)
    extra, reason = choose(tmp_path)
    assert extra == "cpu" and "libcuda.so.1" in reason


def test_no_visible_gpu_means_cpu_and_quotes_the_variable(tmp_path):
    build_libcuda(tmp_path, [], init=100)
    extra, reason = choose(tmp_path, CUDA_VISIBLE_DEVICES="-1")
    assert extra == "cpu" and "CUDA_VISIBLE_DEVICES is '-1'" in reason


def test_a_driver_that_does_not_start_means_cpu_and_names_the_code(tmp_path):
    build_libcuda(tmp_path, [T4], init=803)
    extra, reason = choose(tmp_path)
    assert extra == "cpu" and "cuInit failed with error 803" in reason


@pytest.mark.parametrize(("cuda", "expected"), [(10020, "cpu"), (11000, "cu112")])
def test_a_driver_older_than_cuda_11_means_cpu(tmp_path, cuda, expected):
    build_libcuda(tmp_path, [T4], cuda=cuda)
    extra, reason = choose(tmp_path)
    assert extra == expected
    assert ("CUDA up to 10.2" in reason) == (expected == "cpu")
