"""Run the tests on each supported Python, with several NumPy releases, and write a table.

    make test-matrix                              # every installed Python from 3.8 to 3.14
    make test-matrix PYTHONS="3.8 /opt/python/bin/python3.12"
    make test-matrix ARGS="--numpy newest"        # or oldest, or a version such as 1.22.4
    make test-matrix ARGS="-k ring tests/collectives/test_collectives.py"

Interpreters are searched for on PATH, in pyenv and in uv. Each gets up to three environments under
.matrix/, made as `make test` makes them: with the oldest NumPy that has a wheel for it, with the
newest NumPy 1 and with the newest NumPy. All suites together take about three hours. Their logs and
the table (Markdown) are written to .matrix/. Without PYTHONS and ARGS, `make test-matrix` then runs
tools/bare_systems.py, also by itself: `make test-bare`.

Exit status: 0, all suites passed; 1, one failed or could not be set up; 2, wrong arguments or no
interpreter found; 130, interrupted with Ctrl-C, after writing the table of the suites that had
finished. An interpreter that is not installed gets a row in the table and is no failure. The script
needs only Python 3.8 and its standard library.
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

# The oldest NumPy release that has an x86-64 Linux wheel for each interpreter.
OLDEST_NUMPY = {
    "3.8": "1.17.3",
    "3.9": "1.19.3",
    "3.10": "1.21.2",
    "3.11": "1.23.2",
    "3.12": "1.26.0",
    "3.13": "2.1.0",
    "3.14": "2.3.2",
}
NEWEST_1, NEWEST = "<2", ">=2"
HEADINGS = ("Python", "NumPy", "result", "passed", "skipped", "failed", "seconds")
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
INSTALLED = """
from importlib import metadata
have = {package.metadata["Name"]: package.version for package in metadata.distributions()}
print(have["numpy"], *("%s %s" % item for item in have.items() if item[0].startswith("mxnet")))
"""


class Interpreter(NamedTuple):
    """A version such as ``3.8`` or a path, the program found for it, and the program's version."""

    wanted: str
    path: str | None = None
    version: str = ""

    @property
    def minor(self) -> str:
        """Return major and minor version, such as ``3.8``."""
        return self.version.rpartition(".")[0]


class Row(NamedTuple):
    """One row of the table; ``numpy`` is the version that was, or was to be, installed."""

    python: str
    numpy: str = ""
    result: str = "not found"
    counts: dict = {}
    seconds: str = ""
    mxnet: str = ""
    log: Path | None = None

    @property
    def bad(self) -> bool:
        """Whether the interpreter was found and its tests did not pass."""
        return self.result not in ("passed", "not found")

    def cells(self) -> tuple[str, ...]:
        """Return the row's texts, in the order of HEADINGS."""
        numbers = [str(self.counts.get(name, "")) for name in ("passed", "skipped", "failed")]
        return (self.python, self.numpy, self.result, *numbers, self.seconds)


def output_of(*command: str) -> str:
    """Return what a program prints, or '' if it is missing or fails."""
    quiet = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=quiet, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def candidates(wanted: str) -> Iterator[str]:
    """Yield a path itself, or for a version every python3.X that is found."""
    if wanted not in OLDEST_NUMPY:
        yield wanted
        return
    yield shutil.which(f"python{wanted}") or ""
    installed = map(str, (PYENV / "versions").glob(f"{wanted}.*/bin/python"))
    yield from sorted(installed, key=lambda path: [*map(int, re.findall(r"\d+", path))])[::-1]
    yield output_of("uv", "python", "find", "--system", wanted)


def find(wanted: str) -> Interpreter:
    """Return the first candidate that runs and has a version that gluonpar supports."""
    for path in filter(None, candidates(wanted)):
        # Run it: pyenv puts shims of inactive versions on PATH, which fail.
        found = Interpreter(wanted, path, output_of(path, "-c", VERSION))
        if found.minor in ([wanted] if wanted in OLDEST_NUMPY else OLDEST_NUMPY):
            return found
    return Interpreter(wanted)


def requirements(numpy: str, minor: str) -> list[str]:
    """Return pip's version specifiers of NumPy for one interpreter."""
    oldest, *newest = f"=={OLDEST_NUMPY[minor]}", NEWEST_1, NEWEST
    if is_2(oldest):
        newest = [NEWEST]
    elif minor == "3.8":  # the last NumPy for it is 1.24
        newest = [NEWEST_1]
    if numpy == "all":
        return [oldest, *newest]
    return [{"oldest": oldest, "newest": newest[-1]}.get(numpy, f"=={numpy}")]


def is_2(requirement: str) -> bool:
    """Return whether a version specifier is of NumPy 2: ``==2.1.0`` or ``>=2``, not ``<2``."""
    return requirement.startswith(("==2", ">=2"))


def end(process: subprocess.Popen) -> None:
    """Interrupt a program's process group, and kill it after ten seconds."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass  # it has ended, or is killed below
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Give a list of the interrupts that arrive meanwhile, none of which raises.

    An exception while a program is being started would leave it running, and nobody to end it.
    """
    held: list[int] = []
    before = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
    for number, _ in before:
        signal.signal(number, lambda caught, frame: held.append(caught))
    try:
        yield held
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def logged(command: list[str], log: Path, **environment: str) -> int:
    """Run a command in the repository, append its output to ``log``, and return its exit status.

    The command gets its own process group, so that Ctrl-C can end everything that it started.
    """
    outer_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in outer_make}
    with log.open("a", encoding="utf-8", errors="replace") as out:
        with interrupts_held() as held:
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
            if held:
                raise KeyboardInterrupt
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
    """Return the numbers of pytest's last line; an empty dictionary if pytest crashed before it."""
    lines = [line for line in log.read_text("utf-8").splitlines() if line.strip()]
    found = re.findall(r"(\d+) (passed|skipped|failed|error)", lines[-1] if lines else "")
    if not found:
        return {}
    numbers = {"passed": 0, "skipped": 0, "failed": 0}
    for number, outcome in found:
        numbers[outcome.replace("error", "failed")] += int(number)
    return numbers


def set_up(venv: Path, log: Path, interpreter: Interpreter, numpy: str, extra: str) -> bool:
    """Make or update the environment and return whether that succeeded.

    Only wheels are installed: with an old NumPy, pip falls back to releases that no longer build.
    """
    constraint = venv.with_name(f"{venv.name}.txt")
    constraint.write_text(f"numpy{numpy}\n")
    make = ["make", f"VENV={venv}", f"PYTHON={interpreter.path}", f"EXTRA={extra}"]
    if is_2(numpy) and not is_2(f"=={OLDEST_NUMPY[interpreter.minor]}"):
        constraint.write_text("")  # the extra requires NumPy 1 here, so make installs it afterwards
        make.append(f"NUMPY={numpy}")
    pip = {"PIP_CONSTRAINT": str(constraint.resolve()), "PIP_ONLY_BINARY": ":all:"}
    return logged([*make, f"{venv}/.tests"], log, **pip) == 0


def test(interpreter: Interpreter, numpy: str, options: argparse.Namespace) -> Row:
    """Run the tests on one interpreter and one NumPy; return the row."""
    bound = {NEWEST_1: "1", NEWEST: "2"}.get(numpy, numpy.lstrip("="))
    venv = options.folder / f"{interpreter.version}-numpy-{bound}"
    log = venv.with_name(f"{venv.name}.log")
    log.write_text("")
    if not set_up(venv, log, interpreter, numpy, options.extra):
        return Row(interpreter.version, bound, "SET-UP FAILED", log=log)
    python = str(venv.absolute() / "bin" / "python")
    installed, _, mxnet = output_of(python, "-c", INSTALLED).partition(" ")
    chosen = ["-k", options.k] if options.k else []
    start = time.monotonic()
    code = logged([python, "-m", "pytest", "-v", "-rfE", *chosen, *options.tests], log)
    seconds = f"{time.monotonic() - start:.0f}"
    result = "FAILED" if code else "passed"
    return Row(interpreter.version, installed, result, counts(log), seconds, mxnet, log)


def summary(row: Row) -> str:
    """Return a row's numbers as text."""
    numbers = ", ".join(f"{number} {name}" for name, number in row.counts.items())
    return f"{numbers or 'no results'} in {row.seconds or 0} s"


def table(rows: list[Row]) -> str:
    """Return the table in Markdown, below a line with the date, MXNet's version and the commit."""
    mxnet = ", ".join(sorted({row.mxnet for row in rows} - {""})) or "MXNet unknown"
    commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if output_of("git", "status", "--porcelain") else ""
    lines = [HEADINGS, (*["---"] * 3, *["---:"] * 4), *(row.cells() for row in rows)]
    body = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{datetime.date.today()}, {mxnet}, commit {commit}{changed}\n\n{body}"


def run_all(interpreters: list[Interpreter], options: argparse.Namespace) -> Iterator[Row]:
    """Run one suite after the other and yield the rows, printing progress."""
    missing = [found for found in interpreters if not found.path]
    yield from (Row(found.wanted) for found in missing)
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
    """Return the options; exit with status 2 if one is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pythons", default=" ".join(OLDEST_NUMPY), help="versions or paths, separated by spaces"
    )
    parser.add_argument("--numpy", default="all", help="all, oldest, newest or a version")
    parser.add_argument("--extra", default="cpu", choices=["cpu", "cu112"], help="which MXNet")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".matrix"),
        help="folder for environments, logs and table (default: .matrix)",
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="select tests, as pytest's -k")
    parser.add_argument("tests", nargs="*", help="test files (default: all)")
    options = parser.parse_args()
    if not re.fullmatch(r"all|oldest|newest|\d+\.\d+(\.\d+)?", options.numpy):
        parser.error(f"--numpy must be all, oldest, newest or a version, got {options.numpy}")
    for wanted in options.pythons.split():
        if re.fullmatch(r"\d+(\.\d+)*", wanted) and wanted not in OLDEST_NUMPY:
            parser.error(f"--pythons must be {', '.join(OLDEST_NUMPY)} or paths, got {wanted}")
    return options


def main() -> int:
    """Run the matrix and return the exit status."""
    options = parse()
    interpreters = [find(wanted) for wanted in options.pythons.split()]
    if not any(found.path for found in interpreters):
        print(
            f"test_matrix: no interpreter found for {options.pythons}; install one or give a path",
            file=sys.stderr,
        )
        return 2
    (ROOT / options.folder).mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's & ignores SIGINT
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
