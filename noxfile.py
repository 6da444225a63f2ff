"""The quick tests on each installed Python, with the oldest and the newest NumPy for it, by nox.

    make test-matrix                                  # every Python from 3.8 to 3.14 that is found
    make test-matrix PYTHONS="3.8 3.12"
    make test-matrix ARGS="-- -k ring tests/collectives"  # after -- are pytest's arguments
    nox -s "tests(python='3.12', numpy='1.26.0')"     # one of them

nox finds interpreters on PATH, to which those of pyenv are added; a Python that is not installed is
skipped. Environments, results (JUnit XML) and the table of all results (Markdown) are in .matrix/.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from xml.etree import ElementTree

import nox

# Of each Python the oldest NumPy that has an x86-64 Linux wheel for it, and the newest.
NUMPYS = {
    "3.8": ("1.17.3", "1.*"),
    "3.9": ("1.19.3", "2.*"),
    "3.10": ("1.21.2", "2.*"),
    "3.11": ("1.23.2", "2.*"),
    "3.12": ("1.26.0", "2.*"),
    "3.13": ("2.1.0", "2.*"),
    "3.14": ("2.3.2", "2.*"),
}
FOLDER = Path(".matrix")
HEADINGS = ("system", "Python", "NumPy", "passed", "failed", "skipped")
VERSIONS = "import sys, numpy; print('%d.%d.%d' % sys.version_info[:3], '|', numpy.__version__)"

PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
PYTHONS = map(str, sorted(PYENV.glob("versions/3.*/bin"), reverse=True))
os.environ["PATH"] = os.pathsep.join([*PYTHONS, os.environ["PATH"]])  # before pyenv's own shims

nox.options.default_venv_backend = "venv"  # virtualenv makes none for Python 3.8 any more
nox.options.download_python = "never"
nox.options.envdir = str(FOLDER)
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True


@nox.session
@nox.parametrize(
    ("python", "numpy"), [(python, numpy) for python in NUMPYS for numpy in NUMPYS[python]]
)
def tests(session: nox.Session, numpy: str) -> None:
    """Install gluonpar with this NumPy, run the tests, and write the table."""
    # Only wheels: with an old NumPy, pip falls back to releases that no longer build.
    session.env["PIP_ONLY_BINARY"] = ":all:"
    # pip 23 looked for what fits NumPy 1.23 for more than eight minutes, pip 26 half a minute.
    session.install("--upgrade", "pip")
    session.install("-e", ".[test]", f"numpy=={numpy}")
    # Without their requirements: MXNet's metadata ask for NumPy 1, d2l's pin other packages.
    session.install("--no-deps", "mxnet==1.9.1", "d2l==1.0.3")
    versions = session.run("python", "-c", VERSIONS, silent=True).strip()
    result = FOLDER / f"{session.python}-numpy-{numpy.replace('*', 'x')}.xml"
    result.unlink(missing_ok=True)
    name = f"junit_suite_name={platform.platform(terse=True)} | {versions}"
    quick = ["--numprocesses=logical", "--dist=worksteal"]
    options = [*quick, "-m", "not slow", *session.posargs]
    try:
        session.run("python", "-m", "pytest", "-o", name, f"--junitxml={result}", *options)
    finally:
        write_table()


def write_table() -> None:
    """Write the table of all results that are in the folder."""
    lines = [HEADINGS, ["---"] * 3 + ["---:"] * 3]
    for path in sorted(FOLDER.glob("*.xml")):
        suite = ElementTree.parse(path).find("testsuite")
        count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
        failed = count["failures"] + count["errors"]
        passed = count["tests"] - failed - count["skipped"]
        lines.append([suite.get("name"), str(passed), str(failed), str(count["skipped"])])
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    (FOLDER / "table.md").write_text(table)
    print(table)
