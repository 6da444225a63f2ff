"""devices.choose: exactly the requested devices, an error, or CPU devices and a notice."""

import os
from unittest import mock

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

    def pretend(*capabilities, counted=None, cuda_wheel=False, cuda=(11, 0), fault=None):
        shown = [driver.Gpu(i, f"Card {i}", cap) for i, cap in enumerate(capabilities)]

        def answers(value, error):
            raised = fault if isinstance(fault, error) else None
            return mock.Mock(return_value=value, side_effect=raised)

        class Features:
            def is_enabled(self, name):
                return cuda_wheel and name == "CUDA"

        monkeypatch.setattr(driver, "gpus", answers(shown, driver.DriverError))
        monkeypatch.setattr(driver, "cuda_version", lambda: cuda)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        number = len(shown) if counted is None else counted
        monkeypatch.setattr(mx.context, "num_gpus", answers(number, mx.base.MXNetError))
        monkeypatch.setattr(mx.runtime, "Features", Features)

    return pretend


@pytest.mark.parametrize("device", ["auto", "gpu"])
@pytest.mark.parametrize(
    ("present", "request_", "ids"),
    [
        (1, {"num_gpus": 1}, [0]),
        (4, {"num_gpus": 3}, [0, 1, 2]),
        (4, {}, [0, 1, 2, 3]),
        (4, {"gpus": (3, 0)}, [3, 0]),
    ],
)
def test_gpus_are_used_in_their_order_without_a_notice(machine, present, request_, ids, device):
    machine(*[T4] * present)
    assert choose(**request_, device=device) == DeviceChoice(gpus(*ids))


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


CUDA_FAILS = mx.base.MXNetError("CUDA: (999 vs. 0) unknown")


@pytest.mark.parametrize(
    ("shown", "more", "words"),
    [
        ([], {"fault": driver.DriverError("no driver here")}, ["no driver here"]),
        ([], {}, ["the NVIDIA driver shows no GPU"]),
        ([H200], {}, ["gpu 0 Card 0, compute capability 9.0", "5.0 to 8.9"]),
        ([], {"fault": driver.DriverError("cuInit failed")}, ["cuInit failed"]),
        ([T4], {"counted": 0}, ["gpu 0 Card 0", "without CUDA", "pip install -e '.[cu112]'"]),
        ([T4], {"counted": 0, "cuda_wheel": True, "cuda": (10, 2)}, ["CUDA up to 10.2", "11.0"]),
        ([T4], {"counted": 0, "cuda_wheel": True}, ["gpu 0 Card 0", "finds none", "doctor"]),
        ([T4], {"cuda_wheel": True, "fault": CUDA_FAILS}, ["gpu 0 Card 0", "finds none", "doctor"]),
    ],
    ids=["no driver", "no GPU", "kernels", "driver", "CPU wheel", "old driver", "count", "CUDA"],
)
@pytest.mark.parametrize("k", [None, 2])
def test_without_a_usable_gpu_cpu_devices_and_a_notice_or_an_error_that_says_why(
    machine, shown, more, words, k
):
    machine(*shown, **more)
    assert devices.gpus_present() == []
    choice = choose(k)
    assert choice.ctx == cpus(k or 1)
    assert "gluonpar doctor" in choice.notice and "\n" not in choice.notice
    with pytest.raises(ValueError, match="device='gpu'") as caught:
        choose(k, device="gpu")
    assert all(expected in str(caught.value) for expected in words)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"gpus": [0, 4]}, r"gpus=\[0, 4\].*\[4\].*\[0, 1\]"),
        ({"gpus": [-1]}, r"\[-1\]"),
        ({"gpus": [1, 0, 1]}, r"gpus .*twice.*\[1, 0, 1\]"),
        ({"gpus": []}, r"gpus .*\[\]"),
        ({"gpus": [0], "num_gpus": 1}, r"gpus=\[0\] and num_gpus=1"),
        ({"gpus": [0, 1], "device": "cpu"}, r"gpus=\[0, 1\] and device='cpu'"),
        ({"num_gpus": 3}, "num_gpus=3, .* 2 GPUs here"),
        ({"num_gpus": 3, "device": "gpu"}, "num_gpus=3, .* 2 GPUs here"),
        ({"num_gpus": 0}, "num_gpus .*at least 1, got 0"),
        ({"num_gpus": 1025, "device": "cpu"}, "num_gpus .*1024.* got 1025"),
        ({"device": "tpu"}, "device must be one of auto, gpu, cpu, got 'tpu'"),
    ],
)
def test_requests_that_cannot_be_met_are_errors_with_their_values(machine, request_, words):
    machine(T4, T4)
    with pytest.raises(ValueError, match=words):
        choose(**request_)


@pytest.mark.parametrize("before", [None, "2"])
def test_what_makes_gpus_repeat_is_set_for_a_time_and_restored_also_after_an_error(
    before, monkeypatch
):
    """tests/gpu_sim/test_programs.py tests that it reaches cuDNN."""
    names = list(devices.DETERMINISTIC)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(names[0], before)
    with pytest.raises(KeyError), devices.deterministic():
        assert {name: os.environ[name] for name in names} == devices.DETERMINISTIC
        raise KeyError("in between")
    assert [os.environ.get(name) for name in names] == [before, None]
