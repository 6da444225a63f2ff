"""devices.choose: exactly the requested devices, an error, or CPU devices and a notice."""

import mxnet as mx
import pytest

from gluonpar.runtime import devices, driver
from gluonpar.runtime.devices import choose

T4 = (7, 5)
H200 = (9, 0)


def cpus(k):
    return tuple(mx.cpu(i) for i in range(k))


def gpus(*ids):
    return tuple(mx.gpu(i) for i in ids)


@pytest.fixture
def machine(monkeypatch):
    """machine(capabilities, counted): GPUs the driver shows, and how many of them MXNet counts."""

    def pretend(capabilities, counted=None):
        shown = [driver.Gpu(i, f"Card {i}", cap) for i, cap in enumerate(capabilities)]
        count = len(shown) if counted is None else counted
        monkeypatch.setattr(driver, "gpus", lambda: shown)
        monkeypatch.setattr(driver, "cuda_version", lambda: (11, 2))
        monkeypatch.setattr(mx.context, "num_gpus", lambda: count)

    return pretend


@pytest.fixture
def no_driver(monkeypatch):
    def missing():
        raise driver.DriverMissing("no NVIDIA driver here")

    monkeypatch.setattr(driver, "gpus", missing)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)


@pytest.mark.parametrize(
    ("there", "requested"), [(n, k) for n in (1, 2, 4) for k in range(1, 5) if k <= n]
)
@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_as_many_gpus_or_more_are_used_silently(machine, there, requested, device):
    machine([T4] * there)
    assert choose(requested, device=device) == devices.DeviceChoice(gpus(*range(requested)))


@pytest.mark.parametrize("there", [1, 2, 4])
def test_no_number_means_all_gpus(machine, there):
    machine([T4] * there)
    assert choose().ctx == gpus(*range(there))


@pytest.mark.parametrize(("there", "words"), [(1, "1 GPU here"), (2, "2 GPUs here")])
@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_fewer_gpus_than_requested_is_an_error_that_says_how_many(machine, there, words, device):
    machine([T4] * there)
    with pytest.raises(ValueError, match=f"num_gpus=3, but MXNet can use {words}"):
        choose(3, device=device)


@pytest.mark.parametrize(("requested", "given"), [(None, 1), (1, 1), (3, 3)])
def test_without_any_gpu_as_many_cpu_devices_and_a_notice(no_driver, requested, given):
    choice = choose(requested)
    assert choice.ctx == cpus(given)
    for name in map(str, choice.ctx):
        assert name in choice.notice
    assert "no NVIDIA driver here" in choice.notice
    assert "\n" not in choice.notice


def test_device_gpu_without_any_is_an_error(no_driver):
    with pytest.raises(ValueError, match="device='gpu'.* no NVIDIA driver"):
        choose(2, device="gpu")


@pytest.mark.parametrize("there", [0, 4])
@pytest.mark.parametrize(("requested", "given"), [(None, 1), (1, 1), (8, 8)])
def test_device_cpu_takes_cpu_devices_and_says_nothing(machine, there, requested, given):
    machine([T4] * there)
    assert choose(requested, device="cpu") == devices.DeviceChoice(cpus(given))


def test_device_cpu_does_not_count_gpus(monkeypatch):
    """Counting them starts CUDA, which a forked process could not use afterwards."""
    monkeypatch.setattr(mx.context, "num_gpus", lambda: pytest.fail("counted"))
    monkeypatch.setattr(driver, "gpus", lambda: pytest.fail("listed"))
    assert choose(2, device="cpu").ctx == cpus(2)


def test_a_gpu_without_kernels_counts_as_none_and_is_named(machine):
    machine([H200])
    assert devices.gpus_present() == []
    choice = choose(1)
    assert choice.ctx == cpus(1)
    assert "gpu 0 Card 0, compute capability 9.0" in choice.notice
    assert "5.0 to 8.9" in choice.notice


def test_device_gpu_with_only_an_h200_is_an_error_that_names_it(machine):
    machine([H200])
    with pytest.raises(ValueError, match="compute capability 9.0 .*5.0 to 8.9"):
        choose(device="gpu")


def test_gpus_without_kernels_are_passed_over(machine):
    machine([H200, T4, H200, T4])
    assert devices.gpus_present() == [1, 3]
    assert choose(2).ctx == gpus(1, 3)
    with pytest.raises(ValueError, match=r"2 GPUs here \(ids \[1, 3\]\)"):
        choose(3)


def test_a_cpu_wheel_next_to_a_usable_gpu_says_which_wheel_to_install(machine):
    machine([T4], counted=0)
    choice = choose(1)
    assert choice.ctx == cpus(1)
    assert "gpu 0 Card 0" in choice.notice
    assert "without CUDA" in choice.notice
    assert "pip install 'gluonpar[cu112]'" in choice.notice


def with_a_cuda_wheel(monkeypatch, cuda_version, num_gpus):
    class Features:
        def is_enabled(self, name):
            return name == "CUDA"

    monkeypatch.setattr(mx.runtime, "Features", Features)
    monkeypatch.setattr(devices.wheels, "installed", lambda: ["mxnet-cu112"])
    monkeypatch.setattr(driver, "cuda_version", lambda: cuda_version)
    monkeypatch.setattr(driver, "gpus", lambda: [driver.Gpu(0, "Card 0", T4)])
    monkeypatch.setattr(mx.context, "num_gpus", num_gpus)


def test_a_driver_too_old_for_the_wheel_is_named(monkeypatch):
    with_a_cuda_wheel(monkeypatch, (10, 2), lambda: 0)
    with pytest.raises(ValueError, match="10.2, and mxnet-cu112 needs 11.0"):
        choose(1, device="gpu")


def test_cuda_that_fails_counts_as_no_gpu_and_is_quoted(monkeypatch):
    def failing():
        raise mx.base.MXNetError("Traceback (most recent call last):\n  CUDA: (999 vs. 0) unknown")

    with_a_cuda_wheel(monkeypatch, (11, 2), failing)
    assert devices.gpus_present() == []
    choice = choose(2)
    assert choice.ctx == cpus(2)
    assert "mxnet-cu112 (CUDA: (999 vs. 0) unknown)" in choice.notice
    assert "\n" not in choice.notice


def test_a_driver_without_gpus_says_so(machine):
    machine([])
    assert "driver shows no GPU" in choose(1).notice


def test_a_failing_driver_is_quoted(monkeypatch):
    def failing():
        raise driver.DriverError("cuInit", 803)

    monkeypatch.setattr(driver, "gpus", failing)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    assert "cuInit failed with error 803" in choose(1).notice


def test_ids_are_taken_in_their_order(machine):
    machine([T4] * 4)
    assert choose(gpus=[3, 0]) == devices.DeviceChoice(gpus(3, 0))
    assert choose(2, gpus=(2, 1)).ctx == gpus(2, 1)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"gpus": [0, 4]}, r"gpus=\[0, 4\].*\[4\].*\[0, 1\]"),
        ({"gpus": [-1]}, r"\[-1\]"),
        ({"gpus": [1, 0, 1]}, r"gpus .*twice.*\[1, 0, 1\]"),
        ({"gpus": []}, r"gpus .*\[\]"),
        ({"gpus": [0], "num_gpus": 2}, r"num_gpus=2 and gpus=\[0\]"),
        ({"gpus": [0, 1], "device": "cpu"}, r"gpus=\[0, 1\] and device='cpu'"),
        ({"num_gpus": 0}, "num_gpus .*at least 1, got 0"),
        ({"num_gpus": -2}, "num_gpus .*at least 1, got -2"),
        ({"num_gpus": 0, "device": "cpu"}, "num_gpus .*at least 1, got 0"),
        ({"device": "tpu"}, "device must be one of auto, gpu, cpu, got 'tpu'"),
    ],
)
def test_requests_that_cannot_be_met_are_errors_with_their_values(machine, request_, words):
    machine([T4, T4])
    with pytest.raises(ValueError, match=words):
        choose(**request_)


@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_ids_without_any_gpu_are_an_error_even_for_auto(no_driver, device):
    with pytest.raises(ValueError, match=r"gpus=\[0\].*no NVIDIA driver"):
        choose(gpus=[0], device=device)


def test_the_id_of_a_gpu_without_kernels_is_an_error(machine):
    machine([H200, T4])
    with pytest.raises(ValueError, match=r"no GPU with id \[0\].*\[1\]"):
        choose(gpus=[0])


def test_one_context_is_a_list_of_one():
    assert devices.as_list(mx.cpu(3)) == [mx.cpu(3)]
    assert devices.as_list((mx.cpu(1), mx.cpu(0))) == [mx.cpu(1), mx.cpu(0)]


@pytest.mark.parametrize("count", [1025, 10**23])
def test_more_than_1024_cpu_devices_are_an_error(count):
    """MXNet would start a thread for each, and the system would end the process or never begin."""
    with pytest.raises(ValueError, match=f"num_gpus .*1024.* got {count}"):
        choose(count, device="cpu")
    assert len(choose(1024, device="cpu").ctx) == 1024
