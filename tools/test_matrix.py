"""Run the tests on each Python and NumPy that gluonpar says it runs on, and write a table.

    make test-matrix                              # Python 3.8 to 3.12, as far as they are here
    make test-matrix PYTHONS="3.8 /opt/python/bin/python3.12"
    make test-matrix ARGS="--numpy newest"                 # or oldest, or a version such as 1.22.4
    make test-matrix ARGS="-k ring tests/collectives/test_collectives.py"

An interpreter is looked for on PATH, among pyenv's and among uv's. Each gets an environment as
`make test` makes it, under .matrix/, for the oldest NumPy that has a wheel for it and one for the
newest that it and MXNet 1.9.1 allow. The suites run one after the other, the whole in an hour or
two; a log of each, and the table (Markdown), are under .matrix/.

Exit code 0: all passed; 1: one failed, or could not be set up; 2: no interpreter is there, or the
arguments make no sense; 130: Ctrl-C, with the table of what had ended. An interpreter that is not
there is a line of the table and no failure. This needs Python 3.8 and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))

# The oldest release of NumPy with a wheel (x86-64 Linux) for each interpreter: pip finds these,
# and none with the number before. MXNet's own bounds are numpy>1.16,<2.
OLDEST_NUMPY = {
    "3.8": "1.17.3",
    "3.9": "1.19.3",
    "3.10": "1.21.2",
    "3.11": "1.23.2",
    "3.12": "1.26.0",
}
NEWEST = "<2"  # MXNet 1.9.1 does not run on NumPy 2
HEADINGS = ("Python", "NumPy", "result", "passed", "skipped", "failed", "seconds")
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
INSTALLED = """
from importlib import metadata
have = {package.metadata["Name"]: package.version for package in metadata.distributions()}
print(have["numpy"], *("%s %s" % item for item in have.items() if item[0].startswith("mxnet")))
"""


class Interpreter(NamedTuple):
    """What was asked for (``3.8``, or a path), the program that answers to it, its version."""

    asked: str
    path: str | None = None
    version: str = ""

    @property
    def minor(self) -> str:
        """Return the version without its last part, such as ``3.8``."""
        return self.version.rpartition(".")[0]


class Row(NamedTuple):
    """One line of the table; ``numpy`` is what is installed, or what could not be."""

    python: str
    numpy: str = ""
    result: str = "not found"
    counts: dict = {}
    seconds: str = ""
    mxnet: str = ""
    log: Path | None = None

    @property
    def bad(self) -> bool:
        """Whether the interpreter was there and the tests did not all pass."""
        return self.result not in ("passed", "not found")

    def cells(self) -> tuple[str, ...]:
        """Return the texts under HEADINGS."""
        numbers = [str(self.counts.get(name, "")) for name in ("passed", "skipped", "failed")]
        return (self.python, self.numpy, self.result, *numbers, self.seconds)


def answer(*command: str) -> str:
    """Return what a program prints; nothing if it is not there or fails."""
    quiet = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=quiet, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def candidates(asked: str) -> Iterator[str]:
    """Yield the programs that may be what was asked for: itself, or python3.X of several places."""
    if asked not in OLDEST_NUMPY:
        yield asked
        return
    yield shutil.which(f"python{asked}") or ""
    installed = map(str, (PYENV / "versions").glob(f"{asked}.*/bin/python"))
    yield from sorted(installed, key=lambda path: [*map(int, re.findall(r"\d+", path))])[::-1]
    yield answer("uv", "python", "find", "--system", asked)


def find(asked: str) -> Interpreter:
    """Return the first candidate that really runs and is of a version gluonpar supports."""
    for path in filter(None, candidates(asked)):
        # Executed, not just looked up: a pyenv shim is on PATH also for versions not active.
        found = Interpreter(asked, path, answer(path, "-c", VERSION))
        if found.minor in ([asked] if asked in OLDEST_NUMPY else OLDEST_NUMPY):
            return found
    return Interpreter(asked)


def requirements(numpy: str, minor: str) -> list[str]:
    """Return what pip is to install for one interpreter: oldest and newest NumPy, or as named."""
    named = {"oldest": f"=={OLDEST_NUMPY[minor]}", "newest": NEWEST}
    if numpy == "both":
        return list(named.values())
    return [named.get(numpy, f"=={numpy}")]


def end(process: subprocess.Popen) -> None:
    """Interrupt a program and all it started; after ten seconds kill what is left of it."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):  # it is gone, or is killed now
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def logged(command: list[str], log: Path, **environment: str) -> int:
    """Run a command in the repository, its output appended to a file; return its exit code.

    It has a process group of its own, so that Ctrl-C ends all of it and waits until it has.
    """
    outer_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in outer_make}
    with log.open("a", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            for line in process.stdout:
                out.write(line)
                out.flush()
                show_progress(line)
            return process.wait()
        except BaseException:
            end(process)
            raise


def show_progress(line: str) -> None:
    """Show pytest's percentage on a terminal."""
    percent = re.search(r"\[ *(\d+%)\]$", line)
    if percent and sys.stdout.isatty():
        print(f"\r  {percent[1]} of the tests", end="\r", flush=True)


def counts(log: Path) -> dict[str, int]:
    """Return the numbers of pytest's last line; none if it did not get there, as in a crash."""
    lines = [line for line in log.read_text("utf-8").splitlines() if line.strip()]
    found = re.findall(r"(\d+) (passed|skipped|failed|error)", lines[-1] if lines else "")
    if not found:
        return {}
    numbers = {"passed": 0, "skipped": 0, "failed": 0}
    for number, outcome in found:
        numbers[outcome.replace("error", "failed")] += int(number)
    return numbers


def set_up(venv: Path, log: Path, python: str, numpy: str, extra: str) -> bool:
    """Make the environment, or bring it up to date, and return whether that went well.

    Of wheels only: with an old NumPy pip goes back to releases that no longer build.
    """
    constraint = venv.with_name(f"{venv.name}.txt")
    constraint.write_text(f"numpy{numpy}\n")
    make = ["make", f"VENV={venv}", f"PYTHON={python}", f"EXTRA={extra}", f"{venv}/.tests"]
    return logged(make, log, PIP_CONSTRAINT=str(constraint.resolve()), PIP_ONLY_BINARY=":all:") == 0


def test(interpreter: Interpreter, numpy: str, options: argparse.Namespace) -> Row:
    """Run the tests on one interpreter and one NumPy; return the line of the table."""
    bound = "newest" if numpy == NEWEST else numpy.lstrip("=")
    venv = options.folder / f"{interpreter.version}-numpy-{bound}"
    log = venv.with_name(f"{venv.name}.log")
    log.write_text("")
    if not set_up(venv, log, interpreter.path, numpy, options.extra):
        return Row(interpreter.version, bound, "SET-UP FAILED", log=log)
    python = str(venv.absolute() / "bin" / "python")
    installed, _, mxnet = answer(python, "-c", INSTALLED).partition(" ")
    chosen = ["-k", options.k] if options.k else []
    start = time.monotonic()
    code = logged([python, "-m", "pytest", "-v", "-rfE", *chosen, *options.tests], log)
    seconds = f"{time.monotonic() - start:.0f}"
    result = "FAILED" if code else "passed"
    return Row(interpreter.version, installed, result, counts(log), seconds, mxnet, log)


def summary(row: Row) -> str:
    """Return the numbers of a line in words."""
    numbers = ", ".join(f"{number} {name}" for name, number in row.counts.items())
    return f"{numbers or 'no numbers'} in {row.seconds or 0} s"


def table(rows: list[Row]) -> str:
    """Return the table in Markdown, below a line that says of what and when it is."""
    mxnet = ", ".join(sorted({row.mxnet for row in rows} - {""})) or "MXNet unknown"
    commit = answer("git", "rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if answer("git", "status", "--porcelain") else ""
    lines = [HEADINGS, (*["---"] * 3, *["---:"] * 4), *(row.cells() for row in rows)]
    body = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{datetime.date.today()}, {mxnet}, commit {commit}{changed}\n\n{body}"


def run_all(interpreters: list[Interpreter], options: argparse.Namespace) -> Iterator[Row]:
    """Yield the lines of the table as they come to be known, saying what runs."""
    missing = [found for found in interpreters if not found.path]
    yield from (Row(found.asked) for found in missing)
    runs = [
        (found, numpy)
        for found in interpreters
        if found.path
        for numpy in requirements(options.numpy, found.minor)
    ]
    for number, (found, numpy) in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {found.path} ({found.version}), numpy{numpy}", flush=True)
        row = test(found, numpy, options)
        print(f"  {row.result}: {summary(row)}; {row.log}", flush=True)
        yield row


def parse() -> argparse.Namespace:
    """Return the options; end with 2 where one makes no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pythons", default=" ".join(OLDEST_NUMPY), help="versions or paths, with spaces between"
    )
    parser.add_argument("--numpy", default="both", help="both, oldest, newest or a version")
    parser.add_argument("--extra", default="cpu", choices=["cpu", "cu112"], help="which MXNet")
    parser.add_argument(
        "--folder", type=Path, default=Path(".matrix"), help="where all of it goes, from the root"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only such tests, as pytest's -k")
    parser.add_argument("tests", nargs="*", help="only these test files")
    options = parser.parse_args()
    if not re.fullmatch(r"both|oldest|newest|\d+\.\d+(\.\d+)?", options.numpy):
        parser.error(f"--numpy {options.numpy}: say both, oldest, newest or a version as 1.22.4")
    for asked in options.pythons.split():
        if re.fullmatch(r"\d+(\.\d+)*", asked) and asked not in OLDEST_NUMPY:
            parser.error(f"Python {asked}: say {', '.join(OLDEST_NUMPY)}, or a path")
    return options


def main() -> int:
    """Run the matrix and return the exit code."""
    options = parse()
    interpreters = [find(asked) for asked in options.pythons.split()]
    if not any(found.path for found in interpreters):
        print(f"test_matrix: none of these is here: {options.pythons}", file=sys.stderr)
        return 2
    (ROOT / options.folder).mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell's & had SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    rows: list[Row] = []
    interrupted = False
    try:
        for row in run_all(interpreters, options):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    text = table(rows)
    (options.folder / "table.md").write_text(text)
    print(f"\n{text}", end="", flush=True)
    return 130 if interrupted else int(any(row.bad for row in rows))


if __name__ == "__main__":
    sys.exit(main())
