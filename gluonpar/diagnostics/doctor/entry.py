"""Whether this process was started to examine the installation: python -m gluonpar doctor.

Python imports a package before it runs the package's ``__main__``, and importing gluonpar imports
MXNet, which may be missing, broken, or end the process: just what the doctor is to look at. So the
package asks first of all, and then goes no further. The standard library is all that is needed, and
this module imports of it only what Python itself has at hand: whatever else it would import might
come from a file in the current folder that has the same name.
"""

from __future__ import annotations

import os
import sys


def for_doctor() -> None:
    """Do what ``python -m gluonpar doctor`` asks and end (SystemExit), if that is the command."""
    if is_doctor(sys.argv, _command_line()):
        sys.path[:] = [folder for folder in sys.path if folder not in ("", _current_folder())]
        from gluonpar.diagnostics.doctor import command

        raise SystemExit(command.main(sys.argv[2:]))


def is_doctor(argv: list[str], command_line: list[str]) -> bool:
    """Whether ``sys.argv``, and what Python itself was started with, run gluonpar's doctor.

    While Python looks for the module of ``-m``, ``sys.argv[0]`` is "-m"; only the command line
    tells which module it is.

    >>> is_doctor(["-m", "doctor"], ["python3", "-m", "gluonpar", "doctor"])
    True
    >>> is_doctor(["-m", "doctor"], ["python3", "-m", "hospital", "doctor"])
    False
    """
    if argv[:2] != ["-m", "doctor"] or len(command_line) <= len(argv):
        return False
    module = command_line[-len(argv)]
    for name in ("gluonpar", "gluonpar.__main__"):
        option = module[: -len(name)]  # as in -Imgluonpar; empty, if it is an argument of its own
        if module.endswith(name) and (not option or option[0] == "-" and option[-1] == "m"):
            return True
    return False


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _command_line() -> list[str]:
    if hasattr(sys, "orig_argv"):  # Python 3.10 and later
        return sys.orig_argv
    try:
        with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")[:-1]
    except OSError:  # no Linux, and so no MXNet
        return []
