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


def choose(library_folder, **environment):
    """Run the script with the folder's libcuda.so.1; return the extra and the reason."""
    # -I and -S hide all packages: the script is run before anything is installed.
    done = end("-I", "-S", SCRIPT, LD_LIBRARY_PATH=str(library_folder), **environment)
    extra, reason = done.stdout.rstrip("\n"), done.stderr
    assert reason.startswith(f"{extra}: ") and reason.count("\n") == 1
    return extra, reason


@pytest.mark.parametrize(
    ("gpus", "setup", "expected", "words"),
    [
        ([T4], {}, "cu112", ["gpu 0 Tesla T4, compute capability 7.5\n"]),
        (
            [H200],
            {"cuda": 12080},
            "cpu",
            ["gpu 0 NVIDIA H200, compute capability 9.0", "5.0 to 8.9"],
        ),
        ([], {"cuInit": 100}, "cpu", ["CUDA_VISIBLE_DEVICES is '-1'"]),
        ([T4], {"cuInit": 803}, "cpu", ["cuInit failed with error 803"]),
        ([T4], {"cuda": 10020}, "cpu", ["CUDA up to 10.2"]),
        ([T4], {"cuda": 11000}, "cu112", []),
    ],
    ids=["kernels", "no kernels", "hidden", "a driver that fails", "CUDA 10.2", "CUDA 11.0"],
)
def test_a_usable_gpu_means_cu112_and_none_means_cpu(tmp_path, gpus, setup, expected, words):
    build_libcuda(tmp_path, gpus, **setup)
    extra, reason = choose(tmp_path, CUDA_VISIBLE_DEVICES="-1")
    assert extra == expected and all(word in reason for word in words)


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
