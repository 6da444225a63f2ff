"""Run ``python -m gluonpar doctor`` before anything else of gluonpar is imported.

Python imports a package before its ``__main__``, and ``gluonpar/__init__.py`` imports MXNet, which
may be broken; so it calls :func:`run_doctor_and_exit` first. This module imports only modules that
Python has loaded already: any other could come from a file in the current folder.
"""

from __future__ import annotations

import os
import sys


def run_doctor_and_exit() -> None:
    """If this process was started with ``python -m gluonpar doctor``, run it and exit."""
    if is_doctor(sys.argv, _command_line()):
        try:
            current_folder = os.getcwd()
        except OSError:  # it has been removed
            current_folder = ""
        sys.path[:] = [folder for folder in sys.path if folder not in ("", current_folder)]
        from gluonpar.diagnostics.doctor import command

        raise SystemExit(command.main(sys.argv[2:]))


def is_doctor(argv: list[str], command_line: list[str]) -> bool:
    """Return whether ``sys.argv`` and Python's whole command line are those of gluonpar's doctor.

    While Python looks for the module of ``-m``, ``sys.argv[0]`` is "-m"; only the command line
    has the module's name.

    >>> is_doctor(["-m", "doctor"], ["python3", "-m", "gluonpar", "doctor"])
    True
    """
    if argv[:2] != ["-m", "doctor"] or len(command_line) <= len(argv):
        return False
    module = command_line[-len(argv)]
    for name in ("gluonpar", "gluonpar.__main__"):
        option = module[: -len(name)]  # "-Im" of -Imgluonpar, "" of -m gluonpar
        if module.endswith(name) and (not option or option[0] == "-" and option[-1] == "m"):
            return True
    return False


def _command_line() -> list[str]:
    if hasattr(sys, "orig_argv"):  # Python 3.10 and later
        return sys.orig_argv
    try:
        with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")[:-1]
    except OSError:  # not Linux, where there is no MXNet 1.9.1
        return []
