"""gluonpar verify: test on this machine's devices that gluonpar computes correctly."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Sequence

from gluonpar.diagnostics import self_test
from gluonpar.diagnostics.benchmark import harness, steps
from gluonpar.diagnostics.report import measurement, writing
from gluonpar.install import entry
from gluonpar.runtime import devices

EXAMPLES = """
gluonpar verify                  # all GPUs, or two CPU devices
gluonpar verify --num-gpus 4     # four GPUs, or four CPU devices
gluonpar verify --report gpu-report.json    # and benchmarks, in less than ten minutes
"""
EXIT_CODES = {
    0: "nothing is wrong",
    1: "something is wrong, and printed",
    entry.BAD_REQUEST: "the request cannot be met; a line says why",
    entry.INTERRUPTED: "interrupted (Ctrl-C)",
    entry.BROKEN_PIPE: "nobody reads the output any more, as after | head -1",
}


def main(argv: Sequence[str] | None = None, prog: str = "gluonpar verify") -> int:
    """Run the command line ``argv`` (default: the process's arguments); return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    options = parser(prog).parse_args(argv)
    num_gpus = options.num_gpus
    if num_gpus is None and (options.device == "cpu" or not devices.gpus_present()):
        num_gpus = 2  # one device has nothing to be compared with
    try:
        chosen = devices.choose(num_gpus, device=options.device)
        paths = options.report and writing.check_path(options.report)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return entry.BAD_REQUEST
    if chosen.notice:
        print(chosen.notice, file=sys.stderr)
    print(f"devices: {', '.join(map(str, chosen.ctx))}", flush=True)
    if paths:
        typed = f"{prog} {shlex.join(argv)}"
        how = (options.seconds, options.batch_size, typed)
        try:
            return 0 if writing.write(paths, chosen.ctx, *how) else 1
        except OSError as error:
            print(f"{prog}: error: cannot write {paths[0]}: {error.strerror}", file=sys.stderr)
            return entry.BAD_REQUEST
        except KeyboardInterrupt:
            print(f"\n{prog}: interrupted, nothing is written", file=sys.stderr)
            return entry.INTERRUPTED
    failures = self_test.run(chosen.ctx, lambda line: print(line, flush=True))
    wrong = f"{len(failures)} wrong. See `gluonpar doctor`."
    print(wrong if failures else "all is right on these devices")
    return 1 if failures else 0


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=entry.about(__doc__),
        epilog=entry.epilog(EXAMPLES, EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "K GPUs; K CPU devices if there is no GPU at all"
    made.add_argument("--num-gpus", type=int, metavar="K", help=what)
    what = "only GPUs, or only CPU devices"
    made.add_argument("--device", choices=devices.KINDS, default="auto", help=what)
    what = "also run the doctor and benchmarks; write figures and findings to FILE.json and FILE.md"
    made.add_argument("--report", metavar="FILE.json", help=what)
    what = "time for the report's benchmarks; all else takes some minutes (default: %(default)g)"
    seconds = {"type": harness.at_least(0, float), "default": measurement.SECONDS, "metavar": "S"}
    made.add_argument("--seconds", help=what, **seconds)
    sizes = ", ".join(f"{size} in {name}" for name, size in steps.BATCH_SIZES.items())
    what = f"samples per device in the report's training steps (default: {sizes})"
    made.add_argument("--batch-size", type=harness.at_least(1), metavar="N", help=what)
    return made
