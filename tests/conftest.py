"""What all tests share. gluonpar comes before MXNet, whatever module is imported first."""

# ruff: noqa: I001
import gluonpar  # noqa: F401

import importlib.util
import signal
import types

from tests.support import contexts
import mxnet as mx
import pytest
from gluonpar import replicas
from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background has SIGINT ignored, which all they start would
# inherit, and Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says what else the machine is doing, and nothing of the law tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser):
    text = "devices of the tests of what computes on devices: GPU_SIM_TESTS in the Makefile"
    parser.addoption("--device", choices=("cpu", "gpu-sim"), default="cpu", help=text)


def pytest_configure(config):
    """Choose the devices before the tests are imported."""
    if config.getoption("--device") == "gpu-sim":
        contexts.kind = mx.gpu


def pytest_ignore_collect(collection_path, config):
    """What needs the simulator, or others' packages, has environments of its own.

    None leaves others to pytest.
    """
    parts = {*collection_path.parts}
    if "gpu_sim" in parts and config.getoption("--device") == "cpu":
        return True
    return True if "programs" in parts and importlib.util.find_spec("gluoncv") is None else None


def pytest_collection_modifyitems(config, items):
    """Skip what this installation or these devices cannot run, and say why."""
    for item in items:
        # The docstring that writes an ONNX file needs the package, as test_onnx_export.py does.
        onnx = item.name == "gluonpar.checkpoint.onnx_export.export_onnx"
        if onnx and importlib.util.find_spec("onnx") is None:
            item.add_marker(pytest.mark.skip(reason="the package onnx is not installed"))
        if contexts.kind is mx.cpu:
            continue
        parameters = getattr(item, "callspec", _NO_PARAMETERS).params.values()
        on_host = any(isinstance(value, str) and value == "host" for value in parameters)
        of_cpu = item.get_closest_marker("cpu")
        if on_host or of_cpu:
            reason = of_cpu.args[0] if of_cpu else "'host' sums in the memory of CPU contexts"
            item.add_marker(pytest.mark.skip(reason=reason))


_NO_PARAMETERS = types.SimpleNamespace(params={})


@pytest.fixture(params=["mx.nd", "mx.np"])
def world(request):
    """``mx.nd``, or ``mx.np`` with NumPy's semantics switched on."""
    if request.param == "mx.nd":
        yield mx.nd
        return
    with mx.util.np_shape(True), mx.util.np_array(True):
        yield mx.np


@pytest.fixture
def small_buckets(monkeypatch):
    """The parameters of even a small network in several buckets, which several devices own."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 300)
