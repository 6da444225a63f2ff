"""Which wheels of MXNet are installed. Standard library only: nothing is imported to find out."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

# mxnet, mxnet-cu112, mxnet-cu92mkl, ...: they all install the package ``mxnet``. Others that begin
# so, such as mxnet-model-server, do not.
_OF_MXNET = re.compile(r"mxnet(-(cu\d+(mkl)?|mkl|native))?")


def package() -> Path | None:
    """The folder of the package ``mxnet`` that an import would take; None: there is none."""
    spec = importlib.util.find_spec("mxnet")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def installed() -> list[str]:
    """Names of the wheels whose metadata lies beside that package; more than one is a fault.

    An empty list: there is no MXNet, or it came in another way than as a wheel.
    """
    folder = package()
    if folder is None:
        return []
    infos = folder.parent.glob("mxnet*-*.dist-info")
    names = {info.name.rsplit("-", 2)[0].replace("_", "-") for info in infos}
    return sorted(name for name in names if _OF_MXNET.fullmatch(name))


def with_cuda(names: list[str]) -> bool:
    """Whether one of these wheels needs CUDA.

    >>> with_cuda(["mxnet"]), with_cuda(["mxnet-cu112"])
    (False, True)
    """
    return any("-cu" in name for name in names)
