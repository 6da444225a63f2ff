"""One process of a candidate: makes its training, then does what the messages say.

Run by its path, with a request (:meth:`jobs.Job.worker`) as its argument. Between two messages it
blocks in a read, so that another candidate has the machine; the processor time that its threads
take meanwhile is part of its report.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import runpy
import socket
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"


def main(request: dict) -> None:
    """Make the training, connect, and answer until the connection is closed."""
    from benchmarks.training import training, workloads

    prepare(request["runtime"], request["task"][2])
    if os.environ.get("DMLC_ROLE", "worker") != "worker":
        import mxnet  # noqa: F401  # a parameter server serves while it is imported

        return
    task = workloads.task(*request["task"])
    try:
        module = importlib.import_module(f"benchmarks.{request['module']}")
        made = module.make(task, **request["options"])
    except training.Unavailable as reason:
        connect(request["port"], {"unavailable": str(reason)})
        return
    hello = {"rank": made.rank, "pid": os.getpid(), "loss": made.loss(), "version": made.version}
    hello["imports_gluonpar"] = "gluonpar.install.startup" in sys.modules
    serve(made, connect(request["port"], hello))
    os._exit(0)  # libraries would wait for the other ranks


def connect(port: int, hello: dict):
    """Return a file of the connection to the parent process, after sending ``hello``."""
    with socket.create_connection((LOOPBACK, port)) as connection:  # its file keeps it open
        lines = connection.makefile("rw")
    print(json.dumps(hello), file=lines, flush=True)
    return lines


def serve(training, lines) -> None:
    """Answer each message until the connection is closed."""
    idle_seconds = idle_cpu_seconds = 0.0
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        line = lines.readline()
        idle_seconds += time.perf_counter() - wall
        idle_cpu_seconds += time.process_time() - cpu
        if not line:
            return
        message = json.loads(line)
        if "steps" in message:
            answer = train(training, message["steps"])
        elif "sum" in message:
            answer = add(training, message["sum"])
        else:
            answer = {"loss": training.loss(), **training.report()}
            answer.update(idle_seconds=idle_seconds, idle_cpu_seconds=idle_cpu_seconds)
        print(json.dumps(answer), file=lines, flush=True)


def train(training, steps: int) -> dict:
    """Return the seconds of all steps together, without garbage collection during them."""
    gc.collect()
    training.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    training.run(steps)
    return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}


def add(training, n: int) -> dict:
    """Return the seconds of an all-reduce of ``n`` float32, and how many sums are wrong."""
    import mxnet as mx

    x = mx.nd.full((n,), training.rank + 1)
    x.wait_to_read()
    training.barrier()
    start = time.perf_counter()
    total = training.allreduce(x)
    total.wait_to_read()
    seconds = time.perf_counter() - start
    right = training.size * (training.size + 1) // 2
    return {"seconds": seconds, "wrong": int((total.asnumpy() != right).sum())}


def prepare(runtime: str, devices: list) -> None:
    """Import gluonpar, or make MXNet importable without it, or do nothing."""
    if runtime == "gluonpar":
        importlib.import_module("gluonpar")
    if runtime == "mxnet":
        path = ROOT / "gluonpar" / "install" / "standalone.py"
        runpy.run_path(str(path))["skip_init"]("gluonpar")
        importlib.import_module("gluonpar.install.compatibility").install()
        if any(kind == "gpu" for kind, _ in devices):
            importlib.import_module("gluonpar.install.cuda_libraries").load_libraries()


if __name__ == "__main__":
    # Last on the path, so that the repository's folders hide no installed module.
    sys.path[:] = [*sys.path[1:], str(ROOT)]
    main(json.loads(sys.argv[1]))
