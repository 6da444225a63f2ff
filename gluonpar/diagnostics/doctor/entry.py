"""What ``python -m gluonpar`` does before anything else of gluonpar is imported.

Python imports a package before its ``__main__``, and ``gluonpar/__init__.py`` imports MXNet. That
may be broken, and loads CUDA's libraries, some of which read their settings only then. So it calls
:func:`before_mxnet` first. This module imports only modules that Python has loaded already: any
other could come from a file in the current folder.
"""

from __future__ import annotations

import os
import sys

# cuBLAS and cuDNN may round the factors of float32 products to TF32, with 11 significant bits, on
# GPUs of compute capability 8.0 and later. Comparisons need float32; training is faster without.
FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0"}


def before_mxnet() -> None:
    """For ``python -m gluonpar doctor``: run it and exit; for ``verify``: set :data:`FLOAT32`.

    The benchmarks of ``verify --report`` run without it, and its self test in a process of its own.
    """
    name = command(sys.argv, _command_line())
    if name == "doctor":
        try:
            current_folder = os.getcwd()
        except OSError:  # it has been removed
            current_folder = ""
        sys.path[:] = [folder for folder in sys.path if folder not in ("", current_folder)]
        from gluonpar.diagnostics.doctor import command as doctor

        raise SystemExit(doctor.main(sys.argv[2:]))
    if name == "verify" and not any(word.startswith("--r") for word in sys.argv):
        for variable, value in FLOAT32.items():
            os.environ.setdefault(variable, value)


def command(argv: list[str], command_line: list[str]) -> str:
    """Return the command of ``python -m gluonpar COMMAND``, "" if this is another program.

    ``argv`` is ``sys.argv`` and ``command_line`` that of Python. While Python looks for the module
    of ``-m``, ``sys.argv[0]`` is "-m"; only the command line has the module's name.

    >>> command(["-m", "doctor"], ["python3", "-m", "gluonpar", "doctor"])
    'doctor'
    """
    if len(argv) < 2 or argv[0] != "-m" or len(command_line) <= len(argv):
        return ""
    module = command_line[-len(argv)]
    for name in ("gluonpar", "gluonpar.__main__"):
        option = module[: -len(name)]  # "-Im" of -Imgluonpar, "" of -m gluonpar
        if module.endswith(name) and (not option or option[0] == "-" and option[-1] == "m"):
            return argv[1]
    return ""


def _command_line() -> list[str]:
    if hasattr(sys, "orig_argv"):  # Python 3.10 and later
        return sys.orig_argv
    try:
        with open("/proc/self/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")[:-1]
    except OSError:  # not Linux, where there is no MXNet 1.9.1
        return []
