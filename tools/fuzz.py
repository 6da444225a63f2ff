#!/usr/bin/env python
"""Give the readers of data files, checkpoints and optimizer states inputs that nobody would write.

    python tools/fuzz.py                                      # 100000 inputs for each reader
    python tools/fuzz.py --target idx --inputs 1000000 --seed 7
    python tools/fuzz.py --target idx --replay .fuzz/idx/crash-...

Inputs are made by libFuzzer (Serebryany 2016, "Continuous fuzzing with libFuzzer and
AddressSanitizer") through atheris, which prefers those that reach new code of the readers. Each
reader runs in a process of its own, with limits on memory and on the time of one input; what it
must do with an input is in tests/support/fuzz_targets.py. Needs: pip install 'gluonpar[fuzz]'.

Exit code: 0, nothing was found; 1, a reader broke its law, crashed or hung, and the input is in the
file named; 2, the request cannot be met; 130, Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Iterator, Sequence, TextIO

ROOT = pathlib.Path(__file__).resolve().parents[1]
READERS = ("idx", "checkpoint", "states")
# What is instrumented, so that libFuzzer sees which branches an input takes.
MODULES = [f"gluonpar.{name}" for name in ("archive", "files", "idx", "fashion_mnist")]
MODULES += ["gluonpar.checkpoint.optimizer_states", "gluonpar.checkpoint.training_state", "zipfile"]
SECONDS = 10  # for one input; more is a hang
START_SECONDS = 300  # for importing MXNet on a busy machine
NUM_BYTES = 1 << 30  # beyond what the process has when it begins
LONGEST_INPUT = 8192
FOUND_NOTHING, FOUND, BAD_REQUEST, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parser().parse_args(argv)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if options.work:
        return work(options)
    if options.replay:
        return replay(options)
    try:
        import atheris  # noqa: F401
    except ImportError as error:
        return refuse(f"{error}; pip install 'gluonpar[fuzz]', or `make fuzz`")
    findings = []
    try:
        for name in options.target:
            folder = options.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            findings += fuzz(name, options, folder)
    except OSError as error:
        return refuse(f"--folder {options.folder} cannot be used: {error.strerror}")
    except KeyboardInterrupt:
        return INTERRUPTED
    for finding in findings:
        print(finding, file=sys.stderr)
    return FOUND if findings else FOUND_NOTHING


def parser() -> argparse.ArgumentParser:
    """The options."""
    summary, _, details = (__doc__ or "").partition("\n")
    made = argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--inputs", type=positive, default=100_000, metavar="N", help="for each")
    made.add_argument("--target", type=targets, default=READERS, metavar="A,B", help="of READERS")
    made.add_argument("--seed", type=positive, default=1, metavar="N", help="of the inputs")
    made.add_argument("--folder", type=pathlib.Path, default=ROOT / ".fuzz", help="to keep")
    made.add_argument("--replay", type=pathlib.Path, metavar="FILE", help="give one target this")
    for name, kind in (("--work", pathlib.Path), ("--tell", int)):  # for a process of ours
        made.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return made


def positive(text: str) -> int:
    """An argparse type: what libFuzzer takes for a number."""
    number = int(text)
    if not 1 <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is out of range; give 1 to {(1 << 31) - 1}")
    return number


def targets(text: str) -> list[str]:
    """An argparse type: readers that there are."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in READERS:
            there = ", ".join(READERS)
            raise argparse.ArgumentTypeError(f"there is no {name!r}; there are: {there}")
    return names


def refuse(message: str) -> int:
    """Say in one line why it cannot be done; the exit code."""
    print(f"fuzz.py: error: {message}", file=sys.stderr)
    return BAD_REQUEST


def fuzz(name: str, options: argparse.Namespace, folder: pathlib.Path) -> list[str]:
    """Fuzz one reader in a process of its own; what was found, in words."""
    command = [sys.executable, __file__, "--target", name, "--inputs", str(options.inputs)]
    command += ["--seed", str(options.seed), "--folder", str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # arrays of ten elements need no team of threads
    start = time.monotonic()
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(dir=memory_disk()) as work:
        ours, its = os.pipe()  # libFuzzer and atheris write to the other two
        command += ["--work", work, "--tell", str(its)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, pass_fds=[its])
        os.close(its)
        try:
            with open(ours, encoding="ascii") as told:
                seen, hung = follow(told, name, options.inputs)
            code = None if hung else process.wait(START_SECONDS)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
        report(name, seen, time.monotonic() - start, said)
        if code == 0 and not hung:
            return []
        return [explain(name, seen, hung, said, folder, pathlib.Path(work) / "input")]


def follow(told: TextIO, name: str, total: int) -> tuple[dict[str, Any], bool]:
    """Show the progress until the process ends; what it told last, and whether it fell silent."""
    seen, patience = {"inputs": 0, "taken": 0, "seconds": 0.0}, START_SECONDS
    with progress_bar(name, total) as show:
        while True:
            ready, _, _ = select.select([told], [], [], patience)
            if not ready:
                return seen, True
            line = told.readline()
            if not line:
                return seen, False
            seen, patience = json.loads(line), 6 * SECONDS
            show(seen)


@contextlib.contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on a terminal; elsewhere a line each ten seconds."""
    from tqdm import tqdm

    last = [time.monotonic()]
    with tqdm(total=total, desc=name, unit="input", leave=False, disable=None) as bar:

        def show(seen: dict[str, Any]) -> None:
            bar.update(seen["inputs"] - bar.n)
            if bar.disable and time.monotonic() - last[0] > 10:
                last[0] = time.monotonic()
                print(f"{name}: {seen['inputs']} of {total} inputs", file=sys.stderr, flush=True)

        yield show


def report(name: str, seen: dict[str, Any], seconds: float, said: str) -> None:
    """Print what was done."""
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said) or [("no", "no", "no")]
    edges, features, kept = coverage[-1]
    rate = seen["inputs"] / max(seen["seconds"], 1e-9)
    print(
        f"{name}: {seen['inputs']} inputs, {rate:.0f} a second, {seconds:.0f} s in all; "
        f"{seen['taken']} were taken, the others refused; {edges} branches and {features} features "
        f"reached, {kept} inputs kept for them",
        flush=True,
    )


def explain(
    name: str, seen: dict, hung: bool, said: str, folder: pathlib.Path, last: pathlib.Path
) -> str:
    """What was found, and where the input is."""
    written = re.search(r"Test unit written to (.+)", said)  # not if it hung, or was killed
    where = written[1] if written else folder / "last"
    if not written and last.exists():
        where.write_bytes(last.read_bytes())
    exceptions = re.findall(r"^[\w.]+(?:Error|Finding|Exception|Interrupt)\b.*$", said, re.M)
    signs = exceptions or re.findall(r"ERROR: libFuzzer: (.*)", said) or said.splitlines()[-5:]
    what = f"no answer for {6 * SECONDS} s" if hung else " / ".join(signs[-1:])
    again = f"python tools/fuzz.py --target {name} --replay {where}"
    return f"fuzz.py: {name}: after {seen['inputs']} inputs: {what}\n  again: {again}"


def replay(options: argparse.Namespace) -> int:
    """Give the input in a file to one target, without libFuzzer."""
    import faulthandler

    if len(options.target) != 1:
        return refuse(f"--replay {options.replay} is for one target; name it with --target")
    try:
        data = options.replay.read_bytes()
    except OSError as error:
        return refuse(f"--replay {options.replay} cannot be read: {error.strerror}")
    import fuzz_targets

    faulthandler.enable()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        target = fuzz_targets.TARGETS[options.target[0]](pathlib.Path(folder))
        with fuzz_targets.memory_limit(NUM_BYTES):
            taken = target(data)
    faulthandler.cancel_dump_traceback_later()
    print(f"{options.target[0]}: the input was {'taken' if taken else 'refused'}")
    return FOUND_NOTHING


def work(options: argparse.Namespace) -> int:
    """In the process of one reader: let libFuzzer call it. Does not return, unless by exception."""
    import atheris

    with atheris.instrument_imports(include=MODULES):
        import fuzz_targets

    target = fuzz_targets.TARGETS[options.target[0]](options.work)
    corpus = options.work / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(target.seeds()):
        (corpus / str(i)).write_bytes(seed)
    arguments = [f"-runs={options.inputs}", f"-seed={options.seed}", f"-timeout={SECONDS}"]
    arguments += [f"-artifact_prefix={options.folder}/", f"-max_len={LONGEST_INPUT}"]
    arguments += ["-rss_limit_mb=4096", "-len_control=0", str(corpus)]
    last = os.open(options.work / "input", os.O_CREAT | os.O_WRONLY)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        """Half of the inputs are changed where the format has numbers, half anywhere."""
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return target.changed(data, chance)[:most]
        return atheris.Mutate(data, most)

    one = telling(target, options, last)
    atheris.Setup([sys.argv[0], *arguments], one, custom_mutator=mutated)
    with fuzz_targets.memory_limit(NUM_BYTES):
        atheris.Fuzz()
    return FOUND_NOTHING


def telling(
    target: Callable[[bytes], bool], options: argparse.Namespace, last: int
) -> Callable[[bytes], None]:
    """The target as libFuzzer calls it, which tells each half a second how far it is.

    Each input is first written to the file descriptor ``last``, whatever comes of it.
    """
    start = time.monotonic()
    seen, due = {"inputs": 0, "taken": 0, "seconds": 0.0}, [start]

    def one(data: bytes) -> None:
        os.pwrite(last, data, 0)
        os.ftruncate(last, len(data))
        seen["taken"] += target(data)
        seen["inputs"] += 1
        seen["seconds"] = time.monotonic() - start
        if time.monotonic() > due[0] or seen["inputs"] >= options.inputs:
            due[0] = time.monotonic() + 0.5
            os.write(options.tell, json.dumps(seen).encode() + b"\n")

    return one


def memory_disk() -> str | None:
    """A folder in memory, where there is one: every input becomes a file."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
