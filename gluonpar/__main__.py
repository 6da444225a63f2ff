"""python -m gluonpar verify: is what runs here right? python -m gluonpar doctor: what is wrong?

    python -m gluonpar verify                  # all GPUs, or two CPU devices
    python -m gluonpar verify --num-gpus 4     # four GPUs, or four CPU devices
    python -m gluonpar doctor                  # what is installed, and each fault's remedy
    python -m gluonpar doctor --json

Exit code 0: all is right. 1: something is not, and it is printed. 2: the request cannot be met.
"""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

from gluonpar.diagnostics import self_test
from gluonpar.diagnostics.doctor import command
from gluonpar.runtime import devices

RIGHT, WRONG, BAD_REQUEST = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Do what ``argv`` asks (default: the process's arguments); the exit code."""
    options = _parser().parse_args(argv)
    return options.command(options)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m gluonpar",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(title="commands", metavar="command", dest="name")
    commands.required = True
    what = "prove on this machine's devices that what runs here is right"
    verify = commands.add_parser("verify", help=what, description=what)
    verify.add_argument(
        "--num-gpus", type=int, metavar="K", help="K GPUs; K CPU devices if there is no GPU at all"
    )
    verify.add_argument(
        "--device", choices=devices.KINDS, default="auto", help="GPUs or nothing; CPU devices"
    )
    verify.set_defaults(command=lambda options: _verify(options, verify))
    what = "say what is installed and what is wrong, each with its remedy"
    examine = commands.add_parser("doctor", help=what, description=what)
    command.add_options(examine)
    examine.set_defaults(command=lambda options: command.report(options.json))
    return made


def _verify(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    num_gpus = options.num_gpus
    if num_gpus is None and (options.device == "cpu" or not devices.gpus_present()):
        num_gpus = 2  # with one device there is little to compare
    try:
        chosen = devices.choose(num_gpus, device=options.device)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return BAD_REQUEST
    if chosen.notice:
        print(chosen.notice, file=sys.stderr)
    print(f"devices: {', '.join(map(str, chosen.ctx))}")
    findings = self_test.prove(chosen.ctx, lambda line: print(line, flush=True))
    if findings:
        print(f"{len(findings)} wrong. See `python -m gluonpar doctor`.")
        return WRONG
    print("all is right on these devices")
    return RIGHT


if __name__ == "__main__":
    sys.exit(main())
