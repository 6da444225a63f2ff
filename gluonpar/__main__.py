"""python -m gluonpar verify tests gluonpar on this machine; python -m gluonpar doctor finds faults.

    python -m gluonpar verify                  # all GPUs, or two CPU devices
    python -m gluonpar verify --num-gpus 4     # four GPUs, or four CPU devices
    python -m gluonpar verify --report gpu-report.json    # and benchmarks, in less than ten minutes
    python -m gluonpar doctor                  # what is installed, and the remedy for each fault
    python -m gluonpar doctor --json

Exit code 0: nothing is wrong. 1: something is wrong, and printed. 2: the request cannot be met.
130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Sequence

from gluonpar.diagnostics import self_test
from gluonpar.diagnostics.benchmark import harness, steps
from gluonpar.diagnostics.doctor import command
from gluonpar.diagnostics.report import measurement, writing
from gluonpar.runtime import devices

PROGRAM = "python -m gluonpar verify"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gluonpar",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="command")
    commands.required = True
    what = "test on this machine's devices that gluonpar computes correctly"
    verify = commands.add_parser("verify", help=what, description=what)
    what = "K GPUs; K CPU devices if there is no GPU at all"
    verify.add_argument("--num-gpus", type=int, metavar="K", help=what)
    what = "only GPUs, or only CPU devices"
    verify.add_argument("--device", choices=devices.KINDS, default="auto", help=what)
    what = "also run the doctor and benchmarks; write figures and findings to FILE.json and FILE.md"
    verify.add_argument("--report", metavar="FILE.json", help=what)
    what = "time for the report's benchmarks; all else takes some minutes (default: %(default)g)"
    seconds = {"type": harness.at_least(0, float), "default": measurement.SECONDS, "metavar": "S"}
    verify.add_argument("--seconds", help=what, **seconds)
    sizes = ", ".join(f"{size} in {name}" for name, size in steps.BATCH_SIZES.items())
    what = f"samples per device in the report's training steps (default: {sizes})"
    verify.add_argument("--batch-size", type=harness.at_least(1), metavar="N", help=what)
    what = "print what is installed and what is wrong, with a remedy for each fault"
    commands.add_parser("doctor", help=what)
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["doctor"]:
        return command.main(argv[1:])
    options = parser.parse_args(argv)
    num_gpus = options.num_gpus
    if num_gpus is None and (options.device == "cpu" or not devices.gpus_present()):
        num_gpus = 2  # one device has nothing to be compared with
    try:
        chosen = devices.choose(num_gpus, device=options.device)
        paths = options.report and writing.check_path(options.report)
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    if chosen.notice:
        print(chosen.notice, file=sys.stderr)
    print(f"devices: {', '.join(map(str, chosen.ctx))}", flush=True)
    if paths:
        typed = shlex.join(["python", "-m", "gluonpar", *argv])
        how = (options.seconds, options.batch_size, typed)
        try:
            return 0 if writing.write(paths, chosen.ctx, *how) else 1
        except OSError as error:
            print(f"{PROGRAM}: error: cannot write {paths[0]}: {error.strerror}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"\n{PROGRAM}: interrupted, nothing is written", file=sys.stderr)
            return harness.INTERRUPTED
    failures = self_test.run(chosen.ctx, lambda line: print(line, flush=True))
    wrong = f"{len(failures)} wrong. See `python -m gluonpar doctor`."
    print(wrong if failures else "all is right on these devices")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
