"""One process of a candidate: makes its training, then does what the messages say.

Run by its path, with a request (:meth:`jobs.Job.worker`) as its argument. Between two messages it
is stopped, so that another candidate has the machine.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOOPBACK, PR_SET_PDEATHSIG = "127.0.0.1", 1


def main(request: dict) -> None:
    """Make the training, connect, and answer until the connection is closed."""
    from benchmarks.training import training, workloads

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process sees no end
    prepare(request["runtime"], request["task"][2])
    if os.environ.get("DMLC_ROLE", "worker") != "worker":
        import mxnet  # noqa: F401  # a parameter server serves while it is imported

        return
    task = workloads.task(*request["task"])
    try:
        module = importlib.import_module(f"benchmarks.{request['module']}")
        made = module.make(task, **request["options"])
    except training.UnavailableError as reason:
        hello, made = {"unavailable": str(reason)}, None
    else:
        hello = {"rank": made.rank, "pid": os.getpid(), "loss": made.loss()}
        hello["version"] = made.version
        hello["imports_gluonpar"] = hasattr(sys.modules.get("gluonpar"), "__version__")
    with socket.create_connection((LOOPBACK, request["port"])) as connection:
        lines = connection.makefile("rw")
    print(json.dumps(hello), file=lines, flush=True)
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in lines if made else ():
        print(json.dumps(answer(made, **json.loads(line))), file=lines, flush=True)
    os._exit(0)  # libraries would wait for the other ranks


def answer(training, steps: int = 0, add: int = 0) -> dict:
    """Take ``steps`` steps, or sum arrays of ``add`` float32, or else report; return the figures.

    They are the seconds of all steps together, without garbage collection during them; those of the
    sum and how many elements are wrong; or the memory and the loss.
    """
    if steps:
        gc.collect()
        training.barrier()
        start = time.perf_counter()
        training.run(steps)
        return {"seconds": time.perf_counter() - start}
    if not add:
        memory = {"peak_bytes": peak_bytes(), "memory": training.memory()}
        return {**memory, "loss": training.loss()}
    import mxnet as mx

    x = mx.nd.full((add,), training.rank + 1)
    x.wait_to_read()
    training.barrier()
    start = time.perf_counter()
    total = training.allreduce(x)
    total.wait_to_read()
    seconds = time.perf_counter() - start
    right = training.size * (training.size + 1) // 2
    return {"seconds": seconds, "wrong": int((total.asnumpy() != right).sum())}


def peak_bytes() -> int:
    """Return the peak resident memory; 0 where there is no /proc.

    Not by getrusage, which includes the memory of the process that started this one.
    """
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def prepare(runtime: str, devices: list) -> None:
    """Import gluonpar, or make MXNet importable without it, or do nothing."""
    if runtime == "gluonpar":
        importlib.import_module("gluonpar.step")
    if runtime == "mxnet":
        install = ROOT / "gluonpar" / "install"  # files that can be run without gluonpar
        runpy.run_path(str(install / "compatibility.py"))["install"]()
        if any(kind == "gpu" for kind, _ in devices):
            runpy.run_path(str(install / "wheels.py"))["load_cuda_libraries"]()


if __name__ == "__main__":
    # Last on the path, so that the repository's folders hide no installed module.
    sys.path[:] = [*sys.path[1:], str(ROOT)]
    main(json.loads(sys.argv[1]))
