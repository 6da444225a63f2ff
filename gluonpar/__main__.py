"""The command gluonpar: the list of its commands, and the start of each."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Sequence

from gluonpar.install import __version__, entry, startup

ABOUT = "Train one model on several devices with MXNet, and examine this machine."
HINT = "To start: gluonpar train --num-gpus 2"
# The module whose ``main`` runs the command, imported when it is used: all but doctor need MXNet.
COMMANDS = {
    "train": ("training.command_line", "train LeNet or ResNet-18 on K GPUs, or on K CPU devices"),
    "bench": ("diagnostics.bench", "measure the all-reduce algorithms beside MXNet's own"),
    "selftest": ("diagnostics.self_test", "test that gluonpar computes correctly on these devices"),
    "doctor": ("diagnostics.doctor", "print what is installed and what is wrong, with remedies"),
}
ALIASES = {"verify": "selftest"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] == "help":  # as `gluonpar COMMAND --help`
        argv = [*argv[1:], "--help"]
    argv[:1] = [ALIASES.get(name, name) for name in argv[:1]]
    if argv and argv[0] in COMMANDS:
        prog = f"gluonpar {argv[0]}"

        def work() -> int:
            if argv[0] == "selftest":
                # On GPUs of compute capability 8.0 and later cuBLAS and cuDNN may round the factors
                # of float32 products to TF32, with 11 significant bits. Comparisons need float32.
                os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
            try:
                if argv[0] != "doctor":
                    startup.start()
            except ImportError as error:
                entry.Parser(prog=prog).error(str(error))
            if argv[0] in ("bench", "selftest") and _is_in_job(prog):
                return entry.BAD_REQUEST
            module = importlib.import_module(f"gluonpar.{COMMANDS[argv[0]][0]}")
            return module.main(argv[1:], prog)

        return entry.run(prog, work)
    lines = [f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items()]
    parser = entry.Parser(
        prog="gluonpar",
        usage="%(prog)s COMMAND [OPTION ...], or %(prog)s COMMAND --help",
        description="\n".join([ABOUT, "", "commands:", *lines, "", HINT]),
    )
    parser.add_argument("--version", action="version", version=f"gluonpar {__version__}")
    if argv and argv[0] not in ("-h", "--help", "--version"):
        parser.error(f"there is no command {argv[0]!r}; start with one of {', '.join(COMMANDS)}")
    parser.parse_args(argv)
    parser.print_help()
    return 0


def _is_in_job(prog: str) -> bool:
    """Return whether this is a rank of several; rank 0 prints what to do instead."""
    from gluonpar import cluster

    if cluster.size() > 1 and cluster.is_main():
        line = f"it examines the devices of one process, and was started as {cluster.size()}"
        print(f"{prog}: error: {line}; start it without mpirun or srun", file=sys.stderr)
    return cluster.size() > 1


if __name__ == "__main__":
    sys.exit(main())
