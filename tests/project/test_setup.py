"""What setup.py declares, as pip recorded it when it installed the package."""

from importlib.metadata import metadata, requires, version

import pytest

import gluonpar


def required(extra):
    """Return the requirements of one extra, without their markers."""
    marked = [line.replace('"', "'").split(";", 1) for line in requires("gluonpar") if ";" in line]
    return [name.strip() for name, marker in marked if f"extra == '{extra}'" in marker]


def test_the_version_is_the_packages_own():
    assert version("gluonpar") == gluonpar.__version__


def test_pythons_bounds_are_those_mxnet_runs_on():
    assert set(metadata("gluonpar")["Requires-Python"].split(",")) == {">=3.8", "<3.13"}


@pytest.mark.parametrize(("extra", "wheel"), [("cpu", "mxnet"), ("cu112", "mxnet-cu112")])
def test_each_device_extra_installs_its_own_mxnet_and_no_other(extra, wheel):
    assert [name for name in required(extra) if "mxnet" in name] == [f"{wheel}==1.9.1"]
    assert "setuptools" in required(extra), "distutils for Python 3.12"


def test_no_other_requirement_brings_an_mxnet():
    holders = [line for line in requires("gluonpar") if line.startswith("mxnet")]
    assert len(holders) == 2


def test_the_cuda_libraries_come_with_cu112_alone():
    libraries = {name for name in required("cu112") if name.startswith("nvidia-")}
    assert "nvidia-cudnn-cu11==8.9.6.50" in libraries, "cuDNN 9 is not libcudnn.so.8"
    assert len(libraries) == 10
    assert not [name for name in required("cpu") if name.startswith("nvidia-")]
