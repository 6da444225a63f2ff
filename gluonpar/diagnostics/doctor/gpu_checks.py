"""What the doctor looks at on the side of the GPUs: the driver, the GPUs, CUDA's libraries."""

from __future__ import annotations

import os
from typing import Any, Iterator

from gluonpar.diagnostics.doctor import probes
from gluonpar.diagnostics.doctor.findings import CPU, CUDA, NOTE, OK, WRONG, Finding
from gluonpar.runtime import wheels


def gpus() -> Iterator[Finding]:
    """The driver, and each GPU's compute capability against what the wheel has kernels for."""
    needed = wheels.with_cuda(wheels.installed())
    facts, failure = probes.ask("driver")
    if failure:
        remedy = "the message says what to do; nvidia-smi may say more"
        yield Finding("driver", WRONG if needed else NOTE, failure, remedy)
        return
    if "missing" in facts:
        remedy = f"without a GPU: pip uninstall -y mxnet-cu112, then {CPU}; with one: its driver"
        text = f"no NVIDIA driver: {facts['missing']}; devices are CPU contexts"
        yield Finding("driver", *((WRONG, text, remedy) if needed else (OK, text)))
        return
    text = f"NVIDIA's, {facts['file']}, knows CUDA up to {facts['cuda']}"
    if needed and facts["too_old"]:
        remedy = "install a newer driver; until then use CPU devices (--device cpu)"
        yield Finding("driver", WRONG, f"{text}; mxnet-cu112 needs CUDA 11", remedy)
    else:
        yield Finding("driver", OK, text)
    if not facts["gpus"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        remedy = "see what nvidia-smi -L lists; unset CUDA_VISIBLE_DEVICES, if it hides them"
        yield Finding("gpu", NOTE, f"the driver shows no GPU{why}", remedy)
    any_usable = any(gpu["usable"] for gpu in facts["gpus"])
    for gpu in facts["gpus"]:
        yield _gpu(gpu, facts["kernels"], needed, any_usable)


def _gpu(gpu: dict[str, Any], kernels: str, needed: bool, any_usable: bool) -> Finding:
    if not gpu["usable"]:
        age = "too new" if gpu["newer"] else "too old"
        text = (
            f"{gpu['name']}: {age}, MXNet cannot run on it. mxnet-cu112 has machine code for "
            f"compute capability {kernels} only, and nothing that a driver could translate; "
            "elsewhere an operator ends with 'no kernel image is available for execution'"
        )
        remedy = f"train on CPU devices (--device cpu, {CPU}) or on a GPU of those capabilities"
        return Finding("gpu", WRONG if needed and not any_usable else NOTE, text, remedy)
    if not needed:
        text = f"{gpu['name']}: usable, but the MXNet installed is without CUDA"
        return Finding("gpu", NOTE, text, f"to use it: pip uninstall -y mxnet, then {CUDA}")
    return Finding("gpu", OK, f"{gpu['name']}: usable")


def cuda_libraries() -> Iterator[Finding]:
    """Which CUDA libraries load, from where, and which a wheel with CUDA lacks."""
    needed = wheels.with_cuda(wheels.installed())
    facts, failure = probes.ask("cuda")
    if failure:
        yield Finding("cuda", WRONG, failure, f"reinstall them: {CUDA}")
        return
    for name, path in facts["loaded"].items():
        yield Finding("cuda", OK, f"{name} loads from {path}")
    for name, (error, remedy) in facts["failed"].items() if needed else ():
        yield Finding("cuda", WRONG, f"{name} does not load: {error}", remedy or CUDA)
    if needed and facts["untried"]:
        text = f"not tried, since they may need what is damaged: {', '.join(facts['untried'])}"
        yield Finding("cuda", NOTE, text, "run this once more after the repair")
    if not (needed or facts["loaded"]):
        yield Finding("cuda", OK, "no CUDA libraries, and the MXNet installed needs none")
