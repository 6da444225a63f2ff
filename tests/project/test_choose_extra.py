"""tools/choose_extra.py: which MXNet to install, before anything is installed."""

from pathlib import Path

import pytest

from tests.support.libcuda_stub import build_libcuda
from tests.support.processes import end

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "choose_extra.py"
T4, H200 = ("Tesla T4", 7, 5), ("NVIDIA H200", 9, 0)

pytestmark = pytest.mark.skipif(
    not (SCRIPT.parents[1] / "gluonpar").is_dir(),
    reason="the script is for a clone, before anything is installed; here the package is",
)


# Of the GPUs that the driver shows: the extra, words of the reason, and those after "not usable".
CASES = {
    "one with kernels is enough": ([H200, T4], "cu112", "gpu 1 Tesla T4", "gpu 0 NVIDIA H200"),
    "none with kernels": ([H200], "cpu", "gpu 0 NVIDIA H200, compute capability 9.0", ""),
    "no driver": (None, "cpu", "libcuda.so.1", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_extra_and_the_reason(case, tmp_path):
    gpus, extra, words, unusable = CASES[case]
    if gpus is None:  # this also holds where a driver is installed: the loader stops here
        (tmp_path / "libcuda.so.1").write_text("not a library\n" * 100)
    else:
        build_libcuda(tmp_path, gpus)
    # -I and -S hide all packages: the script is run before anything is installed.
    done = end("-I", "-S", SCRIPT, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout == f"{extra}\n" and done.stderr.count("\n") == 1
    usable, _, others = done.stderr.partition(" (not usable: ")
    assert usable.startswith(f"{extra}: ") and words in usable
    assert others.startswith(unusable) and bool(others) == bool(unusable)
