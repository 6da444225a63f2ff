import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from libcuda_stub import build_libcuda

from gluonpar.runtime import driver
from gluonpar.runtime.driver import DriverError, DriverMissing, Gpu

T4, A6000, H200 = ("Tesla T4", 7, 5), ("NVIDIA RTX A6000", 8, 6), ("NVIDIA H200", 9, 0)


class FakeDriver:
    """libcuda's functions in Python: device handles differ from indices, and calls can fail."""

    def __init__(self, *gpus, cuda=11020, failing=None):
        self.gpus, self.cuda, self.failing = gpus, cuda, failing or {}

    def _answer(self, function, reference=None, value=None):
        if reference is not None:
            reference._obj.value = value
        return self.failing.get(function, 0)

    def cuInit(self, flags):
        assert flags == 0
        return self._answer("cuInit")

    def cuDriverGetVersion(self, version):
        return self._answer("cuDriverGetVersion", version, self.cuda)

    def cuDeviceGetCount(self, count):
        return self._answer("cuDeviceGetCount", count, len(self.gpus))

    def cuDeviceGet(self, device, index):
        return self._answer("cuDeviceGet", device, 100 + index)

    def cuDeviceGetName(self, name, size, device):
        name.value = self.gpus[device.value - 100][0].encode()[: size - 1]
        return self._answer("cuDeviceGetName")

    def cuDeviceGetAttribute(self, value, attribute, device):
        number = self.gpus[device.value - 100][{75: 1, 76: 2}[attribute]]
        return self._answer("cuDeviceGetAttribute", value, number)


def test_gpus_lists_index_name_and_capability_in_the_drivers_order():
    assert driver.gpus(FakeDriver(H200, T4, A6000)) == [
        Gpu(0, "NVIDIA H200", (9, 0)),
        Gpu(1, "Tesla T4", (7, 5)),
        Gpu(2, "NVIDIA RTX A6000", (8, 6)),
    ]


def test_gpus_through_a_real_shared_library(tmp_path):
    library = ctypes.CDLL(str(build_libcuda(tmp_path, [T4, H200], cuda=12040)))
    gpus = driver.gpus(library)
    assert gpus == [Gpu(0, "Tesla T4", (7, 5)), Gpu(1, "NVIDIA H200", (9, 0))]
    assert [driver.usable(gpu) for gpu in gpus] == [True, False]
    assert driver.cuda_version(library) == (12, 4)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((3, 7), False),
        ((4, 9), False),
        ((5, 0), True),
        ((6, 1), True),
        ((7, 5), True),
        ((8, 9), True),
        ((8, 10), False),
        ((9, 0), False),
        ((10, 0), False),
        ((12, 0), False),
    ],
)
def test_usable_is_capability_5_0_to_8_9(capability, expected):
    assert driver.usable(Gpu(0, "any", capability)) is expected


@pytest.mark.parametrize(("number", "expected"), [(10020, (10, 2)), (11020, (11, 2))])
def test_cuda_version_reads_the_drivers_number(number, expected):
    assert driver.cuda_version(FakeDriver(cuda=number)) == expected


def test_a_driver_that_shows_no_device_gives_an_empty_list():
    assert driver.gpus(FakeDriver(failing={"cuInit": 100})) == []
    assert driver.gpus(FakeDriver()) == []


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(803, "restart the machine"), (804, "cuda/compat"), (34, "stub"), (4711, "nvidia-smi")],
)
def test_a_failing_cuinit_names_the_code_and_a_remedy(code, remedy):
    said = rf"cuInit failed with error {code}: .*{remedy}"
    with pytest.raises(DriverError, match=said) as caught:
        driver.gpus(FakeDriver(T4, failing={"cuInit": code}))
    assert caught.value.code == code


@pytest.mark.parametrize(
    "function", ["cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"]
)
def test_no_call_of_the_driver_fails_silently(function):
    with pytest.raises(DriverError, match=f"{function} failed with error 101"):
        driver.gpus(FakeDriver(T4, failing={function: 101}))


def test_no_device_counts_as_empty_only_where_cuinit_says_it():
    with pytest.raises(DriverError, match="cuDeviceGetCount failed with error 100"):
        driver.gpus(FakeDriver(T4, failing={"cuDeviceGetCount": 100}))


def test_a_library_that_cannot_be_loaded_is_a_missing_driver(monkeypatch):
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    for ask in (driver.load, driver.gpus, driver.cuda_version):
        with pytest.raises(DriverMissing, match=r"libcuda-that-is-not-there\.so\.1.*--gpus all"):
            ask()


def test_the_module_needs_nothing_but_the_standard_library():
    # -I and -S: no site-packages, no folder of this repository.
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('alone', {str(Path(driver.__file__))!r})\n"
        "module = sys.modules['alone'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(module.usable(module.Gpu(0, 'T4', (7, 5))), 'gluonpar' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], check=True, stdout=subprocess.PIPE, text=True
    )
    assert result.stdout.split() == ["True", "False"]
