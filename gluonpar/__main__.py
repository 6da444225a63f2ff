"""The command gluonpar: the list of its commands, and the start of each."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Sequence

from gluonpar import options
from gluonpar.install import startup

ABOUT = "Train one model on several devices with MXNet, and examine this machine."
HINT = "To start: gluonpar train --num-gpus 2"
COMMANDS: dict[str, type[options.Options]] = {
    "train": options.Configuration,
    "bench": options.Bench,
    "selftest": options.SelfTest,
    "doctor": options.Doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["help"]:  # as `gluonpar COMMAND --help`
        argv = [*argv[1:], "--help"]
    name = argv[0] if argv else ""
    name = "selftest" if name == "verify" else name
    if name in COMMANDS:
        return start(name, argv[1:], f"gluonpar {name}")
    lines = [f"  {each:<10}{kind.title}" for each, kind in COMMANDS.items()]
    parser = options.Parser(
        prog="gluonpar",
        usage="%(prog)s COMMAND [OPTION ...], or %(prog)s COMMAND --help",
        description="\n".join([ABOUT, "", "commands:", *lines, "", HINT]),
    )
    if name not in ("", "-h", "--help", "--version"):
        parser.error(f"there is no command {name!r}; start with one of {', '.join(COMMANDS)}")

    def work() -> int:
        parser.parse_args(argv or ["--help"])
        return 0

    return options.run("gluonpar", work)


def start(name: str, argv: Sequence[str], prog: str, model: str = "") -> int:
    """Check the options ``argv`` of a command, import MXNet if it needs it, and run it.

    Returns the exit code. ``prog`` is the program's name in messages. A script that trains one
    ``model`` refuses another.
    """
    kind, given = COMMANDS[name], ["--model", model, *argv] if model else argv

    def work() -> int:
        parser = options.parser(kind, prog)
        values = parser.parse_args(given)
        if not options.OF_JOBS & os.environ.keys():
            options.parse(kind, given, prog)
        if model and values.model != model:
            parser.error(f"--model must be {model} here; `gluonpar train` trains others")
        if name == "selftest":
            # On GPUs of compute capability 8.0 and later cuBLAS and cuDNN may round the factors of
            # float32 products to TF32, with 11 significant bits. Comparisons need float32.
            os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
        if name != "doctor":
            try:
                startup.start()
            except ImportError as error:
                parser.error(str(error))
        if name in ("bench", "selftest"):
            from gluonpar import cluster

            if cluster.size() > 1:
                if cluster.is_main():
                    parser.error(
                        "it examines the devices of one process, and was started as "
                        f"{cluster.size()}; start it without mpirun or srun"
                    )
                return options.BAD_REQUEST
        code: int = importlib.import_module(f"gluonpar.{kind.module}").main(given, prog)
        return code

    return options.run(prog, work)


if __name__ == "__main__":
    sys.exit(main())
