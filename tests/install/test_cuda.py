"""The driver's GPUs, and which of CUDA's libraries are loaded, in which order."""

from pathlib import Path

import pytest

from gluonpar.install import driver, wheels
from gluonpar.install.driver import DriverError, Gpu
from gluonpar.install.wheels import CUDA_LIBRARIES as LIBRARIES
from tests.support.libcuda_stub import FUNCTIONS, build_libcuda

T4, H200 = ("Tesla T4", 7, 5), ("NVIDIA H200", 9, 0)


@pytest.fixture
def libcuda(tmp_path, monkeypatch):
    """libcuda(*gpus, ...): let the driver be a shared library that shows these."""

    def install(*gpus, **answers):
        # Under its usual name it would be the driver of all later tests of this process.
        library = build_libcuda(tmp_path, gpus, name=f"libcuda-{len(answers)}.so", **answers)
        monkeypatch.setattr(driver, "LIBRARY", str(library))

    return install


@pytest.mark.parametrize(("number", "version"), [(12040, (12, 4)), (10020, (10, 2))])
def test_gpus_and_cuda_version(libcuda, number, version):
    libcuda(T4, H200, cuda=number)
    assert driver.gpus() == [Gpu(0, "Tesla T4", (7, 5)), Gpu(1, "NVIDIA H200", (9, 0))]
    assert driver.cuda_version() == version


def test_peer_access_is_told_per_pair_and_must_go_both_ways(libcuda):
    libcuda(T4, T4, T4, peers={(0, 2), (2, 0), (1, 2)})
    direct = driver.peers([2, 0, 1])
    assert direct == {(0, 2), (2, 0), (1, 2)} and driver.peers([1]) == set()
    assert "copies of GPUs 0-1, 1-2 go" in driver.staged([2, 0, 1], direct)
    assert driver.staged([0, 2], direct) == driver.staged([1], direct) == ""


def test_usable_is_capability_5_0_to_8_9():
    capabilities = [(3, 7), (4, 9), (5, 0), (6, 1), (8, 9), (8, 10), (9, 0), (10, 0), (12, 0)]
    usable = [c for c in capabilities if driver.usable(Gpu(0, "any", c))]
    assert usable == [(5, 0), (6, 1), (8, 9)]


def test_a_driver_that_shows_no_device_gives_an_empty_list(libcuda):
    libcuda(cuInit=100)
    assert driver.gpus() == []
    libcuda()
    assert driver.gpus() == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_call_of_the_driver_fails_silently(libcuda, function):
    """Not even with the code that means an empty list if cuInit returns it."""
    code = 803 if function == "cuInit" else 100
    libcuda(T4, **{function: code})
    with pytest.raises(DriverError, match=f"{function} failed with error {code}"):
        driver.gpus()


def test_a_library_that_cannot_be_loaded_is_a_missing_driver(monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    for function in (driver.gpus, driver.cuda_version):
        with pytest.raises(DriverError, match="libcuda-that-is-not-there.so.1.*--gpus all"):
            function()


@pytest.mark.parametrize(
    ("source", "of_wheels", "from_system"),
    [
        *((source, LIBRARIES, []) for source in (None, "", "pypi")),
        ("system", LIBRARIES[:2], [LIBRARIES[0], LIBRARIES[-1]]),
    ],
)
def test_libraries_are_loaded_in_order_from_pypis_wheels_unless_the_environment_says_system(
    source, of_wheels, from_system, tmp_path, monkeypatch
):
    loaded, paths = [], {name: Path(name) for name in from_system}
    for name in of_wheels:
        folder = tmp_path / "nvidia" / name.split(".")[0] / "lib"
        folder.mkdir(parents=True)
        (folder / name).touch()
        paths.setdefault(name, folder / name)

    def load(path, mode):
        assert mode == wheels.ctypes.RTLD_GLOBAL
        if "/" not in path and path not in from_system:
            raise OSError(f"{path}: cannot open shared object file: No such file or directory")
        loaded.append(path)

    monkeypatch.setattr(wheels.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(wheels.ctypes, "CDLL", load)
    monkeypatch.setenv("GLUONPAR_CUDA", source or "")
    if source is None:
        monkeypatch.delenv("GLUONPAR_CUDA")
    wheels.load_cuda_libraries()
    assert loaded == [str(paths[name]) for name in LIBRARIES if name in paths]
