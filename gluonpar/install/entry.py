"""The command line of gluonpar: which command a process runs, its options, messages and exit codes.

Python imports a package before its modules, and ``gluonpar/__init__.py`` imports MXNet. That takes
a second, may be broken, and loads CUDA's libraries, some of which read their settings only then. So
it calls :func:`without_mxnet` first. Other programs that do without MXNet run this file::

    runpy.run_path("gluonpar/install/entry.py")["skip_init"]("gluonpar")
    from gluonpar.install import driver
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from typing import Any, Callable, NoReturn

NEED_MXNET = ("train", "bench", "selftest", "verify")  # doctor and others do without

BAD_REQUEST, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
EXIT_CODES = {  # of all commands; each has its own meaning of 0 and 1
    BAD_REQUEST: "the request cannot be met; a line says why",
    INTERRUPTED: "interrupted (Ctrl-C)",
    BROKEN_PIPE: "nobody reads the output any more, as after | head -1",
}


def skip_init(*packages: str) -> None:
    """Make ``packages`` importable without their ``__init__``, unless they have been imported."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for name in packages:
        if name not in sys.modules:
            package = sys.modules[name] = type(sys)(name)
            package.__path__ = [os.path.join(root, *name.split("."))]


def command() -> str | None:
    """Return the command that ``gluonpar`` is to run, "" without one; None: another program.

    While Python looks for the module of ``-m``, ``sys.argv[0]`` is "-m", and only the command line
    of the process has the module's name.
    """
    name, *arguments = sys.argv or [""]
    if name == "-m":
        with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
            name = file.read().split("\0")[:-1][-len(sys.argv)]
    if os.path.basename(name) != "gluonpar":  # neither the module nor the script that pip installs
        return None
    words = [word for word in arguments if word != "help"]  # `gluonpar help train`
    return words[0] if words else ""


def without_mxnet() -> bool:
    """Return whether this process is the command ``gluonpar``, and its arguments need no MXNet."""
    name = command()
    if name in ("selftest", "verify"):
        # On GPUs of compute capability 8.0 and later cuBLAS and cuDNN may round the factors of
        # float32 products to TF32, with 11 significant bits. Comparisons need float32.
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    return name is not None and name not in NEED_MXNET


def end_command(error: ImportError) -> None:
    """If this process is the command ``gluonpar``, print why MXNet is not imported, and exit."""
    name = command()
    if name is not None:
        Parser(prog=f"gluonpar {name}").error(str(error))


def run(program: str, work: Callable[[], int]) -> int:
    """Return ``work()``, the exit code of a command, or another one, as :data:`EXIT_CODES` says."""
    try:
        return work()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print(f"\n{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        full = error.errno == errno.ENOSPC and not error.filename
        if not (full or isinstance(error, BrokenPipeError)):
            raise
        # Else Python would fail again at its end, when it writes its buffers.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if full:
            print(f"{program}: error: cannot print: {error.strerror}", file=sys.stderr)
        return BAD_REQUEST if full else BROKEN_PIPE


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line, and help that is printed as it is written.

    The help ends with ``examples``, one per line, and the meaning of ``exit_codes``, to which
    :data:`EXIT_CODES` are added.
    """

    def __init__(
        self, examples: str = "", exit_codes: dict[int, str] | None = None, **more: Any
    ) -> None:
        commands = [f"  {line}" for line in examples.strip().splitlines()]
        lines = ["examples:", *commands, ""] if commands else []
        if exit_codes:
            codes = sorted({**EXIT_CODES, **exit_codes}.items())
            lines += ["exit codes:", *(f"  {code:<5}{meaning}" for code, meaning in codes)]
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=how, epilog="\n".join(lines), **more)

    def in_options(self, message: object) -> str:
        """Return the message of a function's error, with options in place of its arguments.

        >>> parser = Parser()
        >>> _ = parser.add_argument("--num-gpus")
        >>> parser.in_options("num_gpus=3, but there are 2; num_gpus must be at most 2")
        '--num-gpus 3, but there are 2; --num-gpus must be at most 2'
        """
        text = str(message)
        for action in self._actions:
            option, name = action.option_strings[0], action.dest
            # A name of one word, such as device, may be a word of the message.
            end = r"\b" if "_" in name else r"(?= (must|needs)\b)"
            text = re.sub(rf"(?<![\w./'-]){name}='?([^\s',]+)'?", rf"{option} \1", text)
            text = re.sub(rf"(?<![\w./'-]){name}{end}", option, text)
        return text

    def error(self, message: str) -> NoReturn:
        """Exit with one line on stderr."""
        self.exit(BAD_REQUEST, f"{self.prog}: error: {message}\n")
