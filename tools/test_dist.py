"""Install the wheel in dist/ into a fresh environment and run the tests on it.

    make dist test-dist
    make test-dist ARGS="-- -k collectives"  # further arguments of pytest
    make test-dist ARGS="--keep DIR"         # keep environment and tests in this folder

The tests run from the unpacked sdist without its gluonpar/, so that they import the installed
package. The wheel in dist/, which was built from the sdist, must hold the same files, byte for
byte, as a wheel built from the checkout.

Exit status: 0, success; 1, a step failed, and is named; 2, dist/ does not hold one wheel and one
sdist.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
D2L = "d2l==1.0.3"  # as in the Makefile; installed without its pinned requirements
WHERE = "import gluonpar; print(gluonpar.__file__)"


class Failed(Exception):
    """A step that failed, in one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="default: %(default)s")
    parser.add_argument("--extra", default="cpu", choices=["cpu", "cu112"], help="which MXNet")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this folder and keep it")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest")
    args = parser.parse_args(argv)
    try:
        wheel, sdist = found(args.dist)
    except Failed as reason:
        parser.error(str(reason))
    try:
        with workplace(args.keep) as folder:
            compare(wheel, folder)
            python = install(wheel, args.extra, folder / "environment")
            tests = unpack(sdist, folder / "tests")
            run_tests(python, tests, args.pytest)
    except Failed as reason:
        print(f"test_dist: {reason}", file=sys.stderr)
        return 1
    print("test_dist: wheel and sdist passed")
    return 0


def found(dist: Path) -> tuple[Path, Path]:
    """Return the wheel and the sdist in ``dist``. Raises Failed unless there is one of each."""
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        raise Failed(f"{dist} holds {len(wheels)} wheels and {len(sdists)} sdists: run `make dist`")
    return wheels[0], sdists[0]


@contextlib.contextmanager
def workplace(kept: Path | None) -> Iterator[Path]:
    """Return ``kept``, or a temporary folder that is removed afterwards."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gluonpar-") as folder:
        yield Path(folder)


def run(what: str, command: Sequence[object], cwd: Path) -> None:
    """Run a command and show its output. Raises Failed with ``what`` if it fails."""
    print(f"test_dist: {what}", flush=True)
    status = subprocess.run([str(word) for word in command], cwd=cwd).returncode
    if status:
        raise Failed(f"{what} ended with status {status}")


def compare(wheel: Path, folder: Path) -> None:
    """Raise Failed unless a wheel built from the checkout has the same contents as ``wheel``."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "direct", ROOT]
    run("building a wheel from the checkout", command, folder)
    (direct,) = (folder / "direct").glob("*.whl")
    here, there = contents(wheel), contents(direct)
    differ = sorted(
        name for name in here.keys() | there.keys() if here.get(name) != there.get(name)
    )
    if differ:
        raise Failed(
            f"the wheels built from the sdist and from the checkout differ in {', '.join(differ)}; "
            "an old build/ in the checkout can cause that: run `make clean`"
        )


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the wheel's files, bytes by name; RECORD with its lines sorted."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return {
        name: b"\n".join(sorted(data.split())) if name.endswith("/RECORD") else data
        for name, data in files.items()
    }


def install(wheel: Path, extra: str, environment: Path) -> Path:
    """Install the wheel and its tests' requirements; return the environment's interpreter."""
    run("making an environment", [sys.executable, "-m", "venv", "--clear", environment], ROOT)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(f"installing {wheel.name}[{extra},test]", [*pip, f"{wheel}[{extra},test]"], environment)
    mxnet = {"cpu": "mxnet==1.9.1", "cu112": "mxnet-cu112==1.9.1"}[extra]
    run(f"installing {mxnet} and {D2L}", [*pip, "--no-deps", mxnet, D2L], environment)
    return python


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist without the package and its metadata; return the folder of the files."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.12 warns without
        archive.extractall(folder, **safely)
    (files,) = folder.iterdir()
    for name in ("gluonpar", "gluonpar.egg-info"):
        shutil.rmtree(files / name)
    return files


def run_tests(python: Path, tests: Path, more: Sequence[str]) -> None:
    """Run tests and doctests on the installed package. Raises Failed if another is imported."""
    done = subprocess.run([python, "-c", WHERE], cwd=tests, capture_output=True, text=True)
    if "site-packages" not in done.stdout:
        raise Failed(f"the tests would import {done.stdout.strip() or done.stderr.strip()}")
    print(f"test_dist: {done.stdout.strip()}", flush=True)
    workers = ["--numprocesses=logical", "--dist=worksteal"]
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]
    run("running the tests", [*pytest, "tests", *more], tests)
    if not more:
        doctests = [*pytest, "-p", "tests.conftest", "--pyargs", "gluonpar"]
        run("running the docstrings' examples", doctests, tests)


if __name__ == "__main__":
    sys.exit(main())
