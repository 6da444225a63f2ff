"""How gluonpar's modules are entered without MXNet: by the command, and by other programs.

Python imports a package before its modules, and ``gluonpar/__init__.py`` imports MXNet. That takes
a second, may be broken, and loads CUDA's libraries, some of which read their settings only then. So
it calls :func:`without_mxnet` first. Other programs that do without MXNet run this file::

    runpy.run_path("gluonpar/install/entry.py")["skip_init"]("gluonpar")
    from gluonpar.install import driver

This module imports only modules that Python has loaded already: any other could come from a file in
the current folder.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False  # typing's, which is not loaded yet
if TYPE_CHECKING:
    from typing import Any, Callable

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


def without_mxnet() -> bool:
    """Return whether this process is the command ``gluonpar``, and its arguments need no MXNet.

    Then modules are imported from Python's own library first, and not from the current folder:
    other files could shadow them. For the other commands, Ctrl-C ends the imports without a
    traceback.
    """
    name = command(sys.argv, _command_line())
    if name in NEED_MXNET:
        sys.excepthook = _without_interrupts
        if name in ("selftest", "verify"):
            # On GPUs of compute capability 8.0 and later cuBLAS and cuDNN may round the factors of
            # float32 products to TF32, with 11 significant bits. Comparisons need float32.
            os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    if name is None or name in NEED_MXNET:
        return False
    try:
        current = os.getcwd()
    except OSError:  # it has been removed
        current = ""
    library = os.path.dirname(os.__file__)
    searched = [folder for folder in sys.path if folder not in ("", current)]
    sys.path[:] = sorted(searched, key=lambda folder: not folder.startswith(library))
    return True


def _without_interrupts(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Print an exception that ends the process, but no Ctrl-C, which came during an import."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def exit_code(error: ImportError) -> int | None:
    """Print in one line why MXNet cannot be imported, and return the command's exit code.

    None, with nothing printed, if this process is another program.
    """
    name = command(sys.argv, _command_line())
    if name is None:
        return None
    print(f"{program()} {name}: error: {error}", file=sys.stderr)
    return BAD_REQUEST


def run(program: str, work: Callable[[], int]) -> int:
    """Return ``work()``, the exit code of a command; after Ctrl-C, or ``| head``, another one.

    After Ctrl-C, and where the output cannot be written, a line on stderr begins with ``program``.
    """
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
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if full:
            print(f"{program}: error: cannot print: {error.strerror}", file=sys.stderr)
        return BAD_REQUEST if full else BROKEN_PIPE


def program() -> str:
    """Return how this process was started, for messages: "gluonpar" or "python -m gluonpar"."""
    return "gluonpar" if os.path.basename(sys.argv[0]) == "gluonpar" else "python -m gluonpar"


def about(docstring: str | None) -> str:
    """Return a command's description, what is after "gluonpar NAME: " in its module's docstring.

    >>> about("gluonpar doctor: print what is wrong.")
    'Print what is wrong.'
    """
    _, _, text = (docstring or "").partition(": ")
    return text[:1].upper() + text[1:]


def epilog(examples: str, exit_codes: dict[int, str]) -> str:
    """Return the end of a command's help: examples, one a line, and what its exit codes mean."""
    lines = [f"  {line.strip()}" for line in examples.strip().splitlines()]
    shown = ["examples:", *lines, ""] if lines else []
    return "\n".join([*shown, "exit codes:", *(f"  {k:<5}{v}" for k, v in exit_codes.items())])


def command(argv: list[str], command_line: list[str]) -> str | None:
    """Return the command that ``gluonpar`` is to run, "" without one; None: another program.

    ``argv`` is ``sys.argv`` and ``command_line`` that of Python. While Python looks for the module
    of ``-m``, ``sys.argv[0]`` is "-m"; only the command line has the module's name.

    >>> command(["-m", "doctor"], ["python3", "-m", "gluonpar", "doctor"])
    'doctor'
    """
    first = argv[1] if len(argv) > 1 else ""
    if first == "help" and len(argv) > 2:
        first = argv[2]
    if argv and os.path.basename(argv[0]) == "gluonpar":  # the script that pip installs
        return first
    if not argv or argv[0] != "-m" or len(command_line) <= len(argv):
        return None
    module = command_line[-len(argv)]
    for name in ("gluonpar", "gluonpar.__main__"):
        option = module[: -len(name)]  # "-Im" of -Imgluonpar, "" of -m gluonpar
        if module.endswith(name) and (not option or option[0] == "-" and option[-1] == "m"):
            return first
    return None


def _command_line() -> list[str]:
    if hasattr(sys, "orig_argv"):  # Python 3.10 and later
        return sys.orig_argv
    try:
        with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")[:-1]
    except OSError:  # not Linux, as the doctor will say
        return []
