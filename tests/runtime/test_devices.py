"""devices.choose: exactly the requested devices, an error, or CPU devices and a notice."""

import mxnet as mx
import pytest

from gluonpar.install import driver
from gluonpar.runtime import devices
from gluonpar.runtime.devices import DeviceChoice, choose

T4, H200 = (7, 5), (9, 0)


def cpus(k):
    return tuple(mx.cpu(i) for i in range(k))


def gpus(*ids):
    return tuple(mx.gpu(i) for i in ids)


@pytest.fixture
def machine(monkeypatch):
    """machine(capabilities, ...): the driver's GPUs, how many MXNet counts, its CUDA, a fault."""

    def pretend(
        *capabilities, counted=None, cuda_wheel=False, cuda=(11, 0), fault=None, module=False
    ):
        shown = [driver.Gpu(i, f"Card {i}", cap) for i, cap in enumerate(capabilities)]

        def list_gpus():
            if isinstance(fault, driver.DriverError):
                raise fault
            return shown

        def num_gpus():
            if isinstance(fault, mx.base.MXNetError):
                raise fault
            return len(shown) if counted is None else counted

        class Features:
            def is_enabled(self, name):
                return cuda_wheel and name == "CUDA"

        monkeypatch.setattr(driver, "gpus", list_gpus)
        monkeypatch.setattr(driver, "cuda_version", lambda: cuda)
        monkeypatch.setattr(driver, "has_kernel_module", lambda: module)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(mx.context, "num_gpus", num_gpus)
        monkeypatch.setattr(mx.runtime, "Features", Features)
        if cuda_wheel:
            monkeypatch.setattr(devices.wheels, "installed", lambda: ["mxnet-cu112"])

    return pretend


@pytest.mark.parametrize("device", ["auto", "gpu"])
@pytest.mark.parametrize(("present", "requested"), [(1, 1), (4, 3), (4, None)])
def test_as_many_gpus_or_more_are_used_without_a_notice(machine, present, requested, device):
    machine(*[T4] * present)
    assert choose(requested, device=device) == DeviceChoice(gpus(*range(requested or present)))


@pytest.mark.parametrize(("present", "words"), [(1, "1 GPU here"), (2, "2 GPUs here")])
@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_fewer_gpus_than_requested_is_an_error_that_says_how_many(machine, present, words, device):
    machine(*[T4] * present)
    with pytest.raises(ValueError, match=f"num_gpus=3, .* {words}"):
        choose(3, device=device)


NO_DRIVER = driver.DriverMissingError("no NVIDIA driver here")


@pytest.mark.parametrize("fault", [NO_DRIVER, None], ids=["no driver", "a driver, but no GPU"])
@pytest.mark.parametrize(
    ("k", "names"), [(None, "cpu(0)"), (2, "cpu(0), cpu(1)"), (8, "cpu(0) to cpu(7)")]
)
def test_without_any_gpu_as_many_cpu_devices_and_a_notice_of_no_fault(machine, fault, k, names):
    machine(fault=fault)
    choice = choose(k)
    assert choice.ctx == cpus(k or 1)
    assert f" {names} (" in choice.notice and "gluonpar doctor" in choice.notice
    assert "driver" not in choice.notice and "\n" not in choice.notice


def test_a_gpu_that_is_hidden_or_out_of_reach_is_explained(machine, monkeypatch):
    machine(fault=NO_DRIVER, module=True)  # as in a container
    assert "no NVIDIA driver here" in choose(8).notice
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES is '7'" in choose(8).notice


def test_device_cpu_gives_cpu_devices_without_a_notice_and_counts_no_gpus(monkeypatch):
    """Counting them starts CUDA, which a forked process could not use afterwards."""
    monkeypatch.setattr(mx.context, "num_gpus", lambda: pytest.fail("counted"))
    monkeypatch.setattr(driver, "gpus", lambda: pytest.fail("listed"))
    for k in (None, 1, 8):
        assert choose(k, device="cpu") == DeviceChoice(cpus(k or 1))


def test_gpus_without_kernels_are_skipped(machine):
    machine(H200, T4, H200, T4)
    assert devices.gpus_present() == [1, 3]
    assert choose(2).ctx == gpus(1, 3)
    with pytest.raises(ValueError, match=r"2 GPUs here \(ids \[1, 3\]\)"):
        choose(3)
    with pytest.raises(ValueError, match=r"no GPU with id \[0\].*\[1, 3\]"):
        choose(gpus=[0])


CUDA_FAILS = mx.base.MXNetError("Traceback (most recent call last):\n  CUDA: (999 vs. 0) unknown")


@pytest.mark.parametrize(
    ("shown", "more", "words"),
    [
        ([H200], {}, ["gpu 0 Card 0, compute capability 9.0", "5.0 to 8.9"]),
        (
            [],
            {"fault": driver.DriverError("cuInit failed with error 803")},
            ["cuInit failed with error 803"],
        ),
        ([T4], {"counted": 0}, ["gpu 0 Card 0", "without CUDA", "pip install -e '.[cu112]'"]),
        ([T4], {"counted": 0, "cuda_wheel": True, "cuda": (10, 2)}, ["CUDA up to 10.2", "11.0"]),
        ([T4], {"counted": 0, "cuda_wheel": True}, ["gpu 0 Card 0", "mxnet-cu112 finds none"]),
        ([T4], {"cuda_wheel": True, "fault": CUDA_FAILS}, ["mxnet-cu112 (CUDA: (999 vs. 0) unkn"]),
    ],
    ids=["kernels", "driver", "CPU wheel", "old driver", "count", "CUDA"],
)
def test_why_no_gpu_can_be_used_is_a_notice_or_an_error(machine, shown, more, words):
    machine(*shown, **more)
    assert devices.gpus_present() == []
    choice = choose(2)
    assert choice.ctx == cpus(2) and "\n" not in choice.notice
    with pytest.raises(ValueError, match="device='gpu'") as caught:
        choose(2, device="gpu")
    for expected in words:
        assert expected in choice.notice and expected in str(caught.value)


def test_ids_are_used_in_their_order(machine):
    machine(*[T4] * 4)
    assert choose(gpus=[3, 0]) == DeviceChoice(gpus(3, 0))
    assert choose(gpus=(2, 1), device="gpu").ctx == gpus(2, 1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"gpus": [0, 4]}, r"gpus=\[0, 4\].*\[4\].*\[0, 1\]"),
        ({"gpus": [-1]}, r"\[-1\]"),
        ({"gpus": [1, 0, 1]}, r"gpus .*twice.*\[1, 0, 1\]"),
        ({"gpus": []}, r"gpus .*\[\]"),
        ({"gpus": [0], "num_gpus": 1}, r"gpus=\[0\] and num_gpus=1"),
        ({"gpus": [0, 1], "device": "cpu"}, r"gpus=\[0, 1\] and device='cpu'"),
        ({"num_gpus": 0}, "num_gpus .*at least 1, got 0"),
        ({"num_gpus": 1025, "device": "cpu"}, "num_gpus .*1024.* got 1025"),
        ({"device": "tpu"}, "device must be one of auto, gpu, cpu, got 'tpu'"),
    ],
)
def test_requests_that_cannot_be_met_are_errors_with_their_values(machine, request_, words):
    """MXNet would start a thread for each of 1025 CPU devices, and the system end the process."""
    machine(T4, T4)
    with pytest.raises(ValueError, match=words):
        choose(**request_)
    assert len(choose(1024, device="cpu").ctx) == 1024
