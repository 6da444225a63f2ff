"""The process of one candidate: trains as it is told on stdin, answers on stdout, ends at the end.

Run by its path, with a request (:func:`process.request`) as its argument. Between two lines it
blocks in a read, so that another candidate has the machine; what it burns meanwhile, it reports.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import sys
import time


class Idle:
    """Processor time spent by all threads of this process while it waited for a line."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def read(self) -> str:
        """The next line."""
        wall, cpu = time.perf_counter(), time.process_time()
        line = sys.stdin.readline()
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.process_time() - cpu
        return line


def main(request: dict, answers) -> None:
    """Make the training, then answer until stdin ends."""

    def answer(message: dict) -> None:
        print(json.dumps(message), file=answers, flush=True)

    from benchmarks.training import process, workloads

    prepare(request["runtime"], request["task"][2])
    module = importlib.import_module(f"benchmarks.training.{request['module']}")
    try:
        training = module.make(workloads.task(*request["task"]), **request["options"])
    except process.Unable as reason:
        answer({"unable": str(reason)})
        return
    ours = "gluonpar" in sys.modules
    answer({"loss": training.loss(), "ours": ours, "version": getattr(module, "VERSION", "")})
    serve(training, answer)


def serve(training, answer) -> None:
    """Steps and reports, as long as lines come."""
    idle = Idle()
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        line = idle.read()
        if not line:
            return
        asked = json.loads(line)
        if "steps" in asked:
            answer(trained(training, asked["steps"]))
        else:
            answer(report(training, idle))


def report(training, idle: Idle) -> dict:
    """What came of it; the peak is that before the loss and the memory were asked for."""
    from benchmarks.training import alike, vitals

    bytes_ = vitals.peak_bytes()
    loss = training.loss()  # it asks the other processes for theirs
    return {
        "loss": loss,
        "peak_bytes": bytes_ + training.other_bytes,
        "idle_seconds": idle.seconds,
        "idle_cpu_seconds": idle.cpu_seconds,
        "replicas": alike.compare(training.values()),
        "memory": training.memory(),
    }


def trained(training, steps: int) -> dict:
    """Seconds of so many steps, with no garbage collection among them, and the process after."""
    from benchmarks.training import vitals

    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    training.run(steps)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, **vitals.now()}


def prepare(runtime: str, devices) -> None:
    """The process as gluonpar prepares it, as the bare MXNet needs it, or as it is."""
    if runtime == "gluonpar":
        importlib.import_module("gluonpar")
    if runtime == "mxnet":
        import numpy

        if "bool" not in vars(numpy):
            numpy.bool = bool  # MXNet 1.9.1 cannot be imported otherwise
        if any(kind == "gpu" for kind, _ in devices):
            from benchmarks.training import alone

            alone.load("runtime/cuda_libraries").load_libraries()


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve()
    # Last on the path, not first: gluonpar's modules must not hide others of the same names.
    sys.path[:] = [*sys.path[1:], str(here.parents[1]), str(here.parents[2])]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    main(json.loads(sys.argv[1]), replies)
