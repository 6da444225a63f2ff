"""Install the wheel of dist/ in a fresh environment and run the tests on it; `make dist` made it.

    make dist test-dist
    make test-dist ARGS="-- -k collectives"     # further arguments of pytest
    make test-dist ARGS="--keep /tmp/gluonpar"  # leave environment and tests there to look at

The tests run from the unpacked sdist with its gluonpar/ taken away, so what they import is what was
installed. A wheel built straight from the checkout must hold the same files, byte for byte, as the
one of dist/, which was built from the sdist.

Exit code 0: all passed; 1: something failed, and was named; 2: there is nothing in dist/ to test.
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
D2L = "d2l==1.0.3"  # as in the Makefile: the book's companion, without its pins
WHERE = "import gluonpar; print(gluonpar.__file__)"


class Failed(Exception):
    """What went wrong, in one sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="default: %(default)s")
    parser.add_argument("--extra", default="cpu", help="which MXNet, cpu or cu112 (default: cpu)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work there and leave it")
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
    print("test_dist: the wheel and the sdist are good")
    return 0


def found(dist: Path) -> tuple[Path, Path]:
    """The wheel and the sdist in ``dist``; Failed unless there is one of each."""
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        raise Failed(f"{dist} holds {len(wheels)} wheels and {len(sdists)} sdists: run `make dist`")
    return wheels[0], sdists[0]


@contextlib.contextmanager
def workplace(kept: Path | None) -> Iterator[Path]:
    """A folder to work in, which goes afterwards unless it was asked for."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gluonpar-") as folder:
        yield Path(folder)


def run(what: str, command: Sequence[object], cwd: Path) -> None:
    """Run the command and show what it says; Failed, naming ``what``, if it fails."""
    print(f"test_dist: {what}", flush=True)
    status = subprocess.run([str(word) for word in command], cwd=cwd).returncode
    if status:
        raise Failed(f"{what} ended with status {status}")


def compare(wheel: Path, folder: Path) -> None:
    """The wheel of the checkout must hold what the wheel of the sdist does."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "direct", ROOT]
    run("building a wheel straight from the checkout", command, folder)
    (direct,) = (folder / "direct").glob("*.whl")
    here, there = contents(wheel), contents(direct)
    differ = sorted(
        name for name in here.keys() | there.keys() if here.get(name) != there.get(name)
    )
    if differ:
        raise Failed(
            f"the wheels built from the sdist and from the checkout differ in {', '.join(differ)}; "
            "an old build/ in the checkout does that: run `make clean`"
        )


def contents(wheel: Path) -> dict[str, bytes]:
    """The bytes of the wheel's files by their names; of RECORD, the lines in order."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return {
        name: b"\n".join(sorted(data.split())) if name.endswith("/RECORD") else data
        for name, data in files.items()
    }


def install(wheel: Path, extra: str, environment: Path) -> Path:
    """Install the wheel and what its tests need in a new environment; its interpreter."""
    run("making an environment", [sys.executable, "-m", "venv", "--clear", environment], ROOT)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(f"installing {wheel.name}[{extra},test]", [*pip, f"{wheel}[{extra},test]"], environment)
    run(f"installing {D2L}", [*pip, "--no-deps", D2L], environment)
    return python


def unpack(sdist: Path, folder: Path) -> Path:
    """The sdist without the package and what says that it is there; the folder of its files."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.12 warns without
        archive.extractall(folder, **safely)
    (files,) = folder.iterdir()
    for name in ("gluonpar", "gluonpar.egg-info"):
        shutil.rmtree(files / name)
    return files


def run_tests(python: Path, tests: Path, more: Sequence[str]) -> None:
    """Run tests and doctests on what is installed; Failed if that is not what gets imported."""
    done = subprocess.run([python, "-c", WHERE], cwd=tests, capture_output=True, text=True)
    if "site-packages" not in done.stdout:
        raise Failed(f"the tests would import {done.stdout.strip() or done.stderr.strip()}")
    print(f"test_dist: {done.stdout.strip()}", flush=True)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run("running the tests", [*pytest, "tests", *more], tests)
    if not more:
        doctests = [*pytest, "-p", "tests.conftest", "--pyargs", "gluonpar"]
        run("running the docstrings' examples", doctests, tests)


if __name__ == "__main__":
    sys.exit(main())
