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


def choose(library_folder):
    """Run the script with the folder's libcuda.so.1; return the extra and the reason."""
    # -S hides site-packages: the script is run before anything is installed.
    result = subprocess.run(
        [sys.executable, "-S", str(SCRIPT)],
        cwd=library_folder,
        env={**os.environ, "LD_LIBRARY_PATH": str(library_folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    extra, reason = result.stdout.rstrip("\n"), result.stderr
    assert reason.startswith(f"{extra}: ") and reason.count("\n") == 1
    return extra, reason


@pytest.mark.parametrize(
    ("gpus", "driver", "expected"),
    [
        ([T4], {}, "cu112"),
        ([H200], {"cuda": 12080}, "cpu"),
        ([H200, T4], {}, "cu112"),
        ([], {"init": 100}, "cpu"),
        ([T4], {"cuda": 10020}, "cpu"),
    ],
)
def test_one_gpu_with_kernels_and_a_driver_of_cuda_11_mean_cu112(tmp_path, gpus, driver, expected):
    build_libcuda(tmp_path, gpus, **driver)
    extra, reason = choose(tmp_path)
    assert extra == expected
    if H200 in gpus:
        assert "H200" in reason.partition("not usable: ")[2] or extra == "cpu"


def test_a_missing_driver_means_cpu(tmp_path):
    # The loader stops at a libcuda.so.1 that is no library, so this also holds where a driver is.
    (tmp_path / "libcuda.so.1").write_text("not a library\n" * 100)
    extra, reason = choose(tmp_path)
    assert extra == "cpu" and "libcuda.so.1" in reason
