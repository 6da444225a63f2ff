"""The sdist holds the project, the wheel holds the package, and both say what they are."""

from __future__ import annotations

import email
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gluonpar

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(gluonpar.__file__).resolve().parent
# Builds in the folder it runs in, into the folder it is given, with the setuptools that is there.
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"

pytestmark = pytest.mark.skipif(
    not (ROOT / "gluonpar").is_dir(), reason="the tests run on an installed wheel: no source here"
)


def git_files():
    """What git tracks here, and what it would if it were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return None
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project, as a clone has it."""
    names = git_files()
    if names is None:
        pytest.skip("this is no git checkout: nothing says which files are the project's")
    folder = tmp_path_factory.mktemp("tree")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder, set(names)


def build(kind, source, target):
    target.mkdir()
    command = [sys.executable, "-c", BUILD.format(kind), str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tree, tmp_path_factory):
    """The sdist's folder, unpacked."""
    made = build("sdist", tree[0], tmp_path_factory.mktemp("sdist") / "out")
    with tarfile.open(made) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.12 warns without
        archive.extractall(made.parent / "unpacked", **safely)
    return made.parent / "unpacked" / f"gluonpar-{gluonpar.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that is built from the sdist."""
    with zipfile.ZipFile(build("wheel", sdist, tmp_path_factory.mktemp("wheel") / "out")) as made:
        yield made


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(wheel.read(f"{dist_info()}/METADATA"))


def dist_info():
    return f"gluonpar-{gluonpar.__version__}.dist-info"


def test_the_sdist_holds_every_file_of_the_project(tree, sdist):
    packed = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert tree[1] - packed == set()
    others = {name for name in packed - tree[1] if not name.startswith("gluonpar.egg-info/")}
    assert others == {"PKG-INFO", "setup.cfg"}


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    own = {name for name in names if not name.startswith(dist_info())}
    source = {path for path in PACKAGE.rglob("*") if path.suffix == ".py"}
    assert own == {f"gluonpar/{path.relative_to(PACKAGE)}" for path in source} | {
        "gluonpar/py.typed"
    }
    about = {name.rpartition("/")[2] for name in names - own}
    assert about == {"LICENSE", "METADATA", "RECORD", "WHEEL", "top_level.txt"}


def test_the_wheel_is_for_every_python_three(wheel):
    text = wheel.read(f"{dist_info()}/WHEEL").decode()
    assert "Root-Is-Purelib: true" in text and "Tag: py3-none-any" in text
    assert wheel.read(f"{dist_info()}/top_level.txt").decode().split() == ["gluonpar"]


def test_the_modules_in_the_wheel_are_the_source(wheel):
    for path in PACKAGE.rglob("*.py"):
        assert wheel.read(f"gluonpar/{path.relative_to(PACKAGE)}") == path.read_bytes()


def test_the_metadata_say_who_what_and_where_it_runs(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("gluonpar", gluonpar.__version__)
    assert metadata["Author"] == "The gluonpar developers"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.8", "<3.13"}
    assert (metadata["License"] or metadata["License-Expression"]) == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    described = metadata.get_payload().strip() or metadata["Description"].strip()
    assert described.startswith("# gluonpar")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not metadata.get_all("Project-URL") and not metadata["Home-page"]


def test_the_classifiers_are_the_license_s_and_those_of_every_python(metadata):
    classifiers = metadata.get_all("Classifier")
    assert "License :: OSI Approved :: Apache Software License" in classifiers
    assert "Typing :: Typed" in classifiers
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(classifiers))
    assert minors == ["8", "9", "10", "11", "12"]


def test_the_extras(metadata):
    wanted = {"cpu", "cu112", "d2l", "mpi", "notebook", "plot", "test", "docs", "dist"}
    assert wanted <= set(metadata.get_all("Provides-Extra"))
    always = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(re.match(r"\w+", line)[0] for line in always) == ["numpy", "tqdm"]


def test_the_license_is_apache_2_and_in_the_wheel(wheel):
    text = (ROOT / "LICENSE").read_bytes()
    # Of the text as the Apache Software Foundation publishes it, and Debian in common-licenses.
    assert hashlib.sha256(text).hexdigest() == LICENSE_SHA256
    (packed,) = [name for name in wheel.namelist() if name.endswith("LICENSE")]
    assert wheel.read(packed) == text


LICENSE_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_the_citation_is_of_this_version_and_names_what_it_descends_from():
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    top = dict(re.findall(r"^([\w-]+): *(.*)$", text, re.M))
    assert {"cff-version", "message", "title", "authors", "references"} <= set(top)
    assert (top["cff-version"], top["title"]) == ("1.2.0", "gluonpar")
    assert (top["version"], top["license"]) == (gluonpar.__version__, "Apache-2.0")
    references = text.partition("\nreferences:\n")[2]
    entries = references.count("\n    title: ")
    assert entries == references.count("- type: ") == references.count("\n    authors:\n") >= 5
    for title in ("Dive into Deep Learning", "Effective TensorFlow"):
        assert f"title: {title}\n" in references


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").read_bytes() == b""
