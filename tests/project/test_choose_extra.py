"""tools/choose_extra.py: which MXNet to install, before anything is installed."""

from pathlib import Path

import pytest
from libcuda_stub import build_libcuda
from processes import end

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "choose_extra.py"
T4, H200 = ("Tesla T4", 7, 5), ("NVIDIA H200", 9, 0)

pytestmark = pytest.mark.skipif(
    not (SCRIPT.parents[1] / "gluonpar").is_dir(),
    reason="the script is for a clone, before anything is installed; here the package is",
)


def choose(library_folder):
    """Run the script with the folder's libcuda.so.1; return the extra and the reason."""
    # -I and -S hide all packages: the script is run before anything is installed.
    done = end("-I", "-S", SCRIPT, LD_LIBRARY_PATH=str(library_folder))
    extra, reason = done.stdout.rstrip("\n"), done.stderr
    assert reason.startswith(f"{extra}: ") and reason.count("\n") == 1
    return extra, reason


def test_one_gpu_with_kernels_is_enough_and_the_other_is_named(tmp_path):
    build_libcuda(tmp_path, [H200, T4])
    extra, reason = choose(tmp_path)
    usable, unusable = reason.split(" (not usable: ")
    assert extra == "cu112"
    assert "gpu 1 Tesla T4, compute capability 7.5" in usable and "H200" not in usable
    assert "H200" in unusable and "T4" not in unusable


def test_a_gpu_without_kernels_means_cpu(tmp_path):
    build_libcuda(tmp_path, [H200])
    extra, reason = choose(tmp_path)
    assert extra == "cpu" and "gpu 0 NVIDIA H200, compute capability 9.0" in reason


def test_a_missing_driver_means_cpu(tmp_path):
    # The loader stops at a libcuda.so.1 that is no library, so this also holds where a driver is.
    (tmp_path / "libcuda.so.1").write_text("not a library\n" * 100)
    extra, reason = choose(tmp_path)
    assert extra == "cpu" and "libcuda.so.1" in reason
