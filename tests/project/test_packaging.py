"""The sdist holds the whole project, the wheel only the package, and their metadata are right."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest

import gluonpar
from tests.support.processes import end, end_python

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(gluonpar.__file__).resolve().parent
DIST_INFO = f"gluonpar-{gluonpar.__version__}.dist-info"
# Builds in the current folder, into the folder of the argument, with the installed setuptools.
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"

from_source = pytest.mark.skipif(
    not (ROOT / "gluonpar").is_dir(), reason="the tests run on an installed wheel, without a source"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the files that git tracks or would add, and their names."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout, so the project's files are unknown")
    names = {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}
    folder = tmp_path_factory.mktemp("tree")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder, names


def build(kind, source, target):
    done = end_python(BUILD.format(kind), target, cwd=source)
    assert done.returncode == 0, done.stderr
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    """The folder of the unpacked sdist."""
    made = build("sdist", tree[0], tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(made) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.12 warns without
        archive.extractall(unpacked, **safely)
    return unpacked / f"gluonpar-{gluonpar.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    with zipfile.ZipFile(build("wheel", sdist, tmp_path_factory.mktemp("wheel"))) as made:
        yield made


@pytest.mark.slow
@from_source
def test_the_sdist_holds_every_file_of_the_project(tree, sdist):
    packed = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert tree[1] - packed == set()
    added = {name for name in packed - tree[1] if not name.startswith("gluonpar.egg-info/")}
    assert added == {"PKG-INFO", "setup.cfg"}


@pytest.mark.slow
@from_source
def test_the_wheel_holds_the_source_of_the_package_and_nothing_else(wheel):
    files = {name for name in wheel.namelist() if not name.endswith("/")}
    source = {f"gluonpar/{p.relative_to(PACKAGE)}": p for p in PACKAGE.rglob("*.py")}
    source["gluonpar/py.typed"] = PACKAGE / "py.typed"
    assert {name for name in files if not name.startswith(DIST_INFO)} == set(source)
    assert all(wheel.read(name) == path.read_bytes() for name, path in source.items())
    about = {name.rpartition("/")[2] for name in files - set(source)}
    assert about == {"LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt"}
    assert "Tag: py3-none-any" in wheel.read(f"{DIST_INFO}/WHEEL").decode()


@pytest.mark.slow
@from_source
def test_the_installed_command_works_outside_a_checkout(wheel, tmp_path):
    target = tmp_path / "target"
    offline = ["--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", "-q", *offline]
    subprocess.run([*pip, "--target", target, wheel.filename], check=True)

    def console(*arguments):
        program = target / "bin" / "gluonpar"
        return end(program, *arguments, cwd=tmp_path, PYTHONPATH=str(target))

    assert console("--version").stdout == f"gluonpar {gluonpar.__version__}\n"
    data = ["--dataset", "synthetic", "--limit", "32", "--epochs", "1", "--save-dir", "out"]
    done = console("train", "--device", "cpu", *data, "--plot", "out/a.png")
    assert (done.returncode, done.stderr) == (0, "") and "test acc: " in done.stdout
    names = {path.suffix for path in (tmp_path / "out").iterdir()}
    assert names == {".params", ".npz", ".png"}
    done = console("selftest", "--num-gpus", "0")
    assert done.returncode == 2 and done.stderr.startswith("gluonpar selftest: error: --num-gpus ")


def required(extra):
    """Return the requirements of one extra as installed, with their markers by name."""
    marked = [line.replace('"', "'").split(";", 1) for line in requires("gluonpar") if ";" in line]
    return {name.strip(): marker for name, marker in marked if f"extra == '{extra}'" in marker}


@pytest.mark.parametrize(("extra", "wheel"), [("cpu", "mxnet"), ("cu112", "mxnet-cu112")])
def test_only_the_device_extras_install_an_mxnet_and_each_its_own(extra, wheel):
    (name,) = [name for name in required(extra) if "mxnet" in name]
    assert name == f"{wheel}==1.9.1"
    assert "python_version < '3.13'" in required(extra)[name], "where NumPy 1 has wheels"
    assert len([line for line in requires("gluonpar") if line.startswith("mxnet")]) == 2
