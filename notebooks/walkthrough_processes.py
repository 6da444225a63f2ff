"""Start a program in one process or several, for the walkthrough."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(program: str, num_processes: int, num_devices: int) -> None:
    """Run ``program`` with the number of devices as its argument; print what it prints."""
    command = [sys.executable, "-c", program, str(num_devices)]
    if num_processes > 1:
        mpirun = pathlib.Path(sys.executable).with_name("mpirun")
        command = [str(mpirun), "--oversubscribe", "-n", str(num_processes), *command]
    done = subprocess.run(command, env={**os.environ, **AS_ROOT}, capture_output=True, text=True)
    print(done.stdout or done.stderr, end="")
