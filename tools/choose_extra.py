"""Say which MXNet suits this machine: the extra `cu112` (GPUs) or `cpu`.

    python tools/choose_extra.py                          # prints one word, and on stderr why
    pip install -e ".[$(python tools/choose_extra.py)]"   # what `make train` does with it

It needs nothing but the standard library, and exits 0 whatever it finds; 2 for other arguments.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Sequence


def load_driver() -> ModuleType:
    """Load gluonpar/runtime/driver.py by its file's path, as the module `gluonpar_driver`."""
    # `import gluonpar.runtime.driver` would run gluonpar/__init__.py, which imports MXNet: the very thing
    # that is not installed yet when this script is asked which one to install.
    path = Path(__file__).resolve().parent.parent / "gluonpar" / "runtime" / "driver.py"
    spec = importlib.util.spec_from_file_location("gluonpar_driver", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its class's module up there
    spec.loader.exec_module(module)
    return module


def choose(driver: ModuleType) -> tuple[str, str]:
    """Return the extra and the reason for it, in words; `driver` is gluonpar.runtime.driver."""
    try:
        cuda, gpus = driver.cuda_version(), driver.gpus()
    except driver.DriverMissing as error:
        return "cpu", f"no NVIDIA driver here: {error.__cause__}"
    except driver.DriverError as error:
        return "cpu", str(error)
    if not gpus:
        return "cpu", f"the NVIDIA driver shows no GPU{_visibility()}"
    if cuda < driver.OLDEST_CUDA:
        return "cpu", (
            f"the NVIDIA driver knows CUDA up to {driver.version(cuda)}, and mxnet-cu112 needs "
            f"{driver.version(driver.OLDEST_CUDA)} or later; a newer driver would do"
        )
    usable = [gpu for gpu in gpus if driver.usable(gpu)]
    unusable = [str(gpu) for gpu in gpus if not driver.usable(gpu)]
    kernels = (
        f"mxnet-cu112 has kernels for {driver.version(driver.OLDEST_CAPABILITY)} "
        f"to {driver.version(driver.NEWEST_CAPABILITY)}"
    )
    if not usable:
        return "cpu", f"{'; '.join(unusable)}; {kernels}"
    reason = "; ".join(map(str, usable))
    if unusable:
        reason += f" (not usable: {'; '.join(unusable)}; {kernels})"
    return "cu112", reason


def _visibility() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the extra to stdout and one sentence to stderr."""
    summary, _, details = (__doc__ or "").partition("\n")
    argparse.ArgumentParser(
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    extra, reason = choose(load_driver())
    print(f"{extra}: {reason}", file=sys.stderr)
    print(extra)


if __name__ == "__main__":
    main()
