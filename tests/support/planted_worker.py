"""The benchmarks' worker with a fault planted in gluonpar's step, and a clock of its own.

Run with the planted statements and the worker's request as its arguments. They are executed after
each step and may use ``self``, the training; ``count``, the steps so far; ``kept``, a list;
``clock``, whose ``seconds`` increase by 0.01 per step.
"""

import json
import pathlib
import sys
import types


def main(source, request):
    """Answer as the worker does."""
    from benchmarks import worker

    worker.prepare("gluonpar", [])
    from benchmarks.training import train_batch

    clock, kept = types.SimpleNamespace(seconds=0.0), []
    worker.time = types.SimpleNamespace(
        perf_counter=lambda: clock.seconds, process_time=lambda: 2 * clock.seconds
    )
    real_step, planted = train_batch.TrainBatch.step, compile(source, "planted", "exec")

    def step(self):
        real_step(self)
        clock.seconds += 0.01
        self.count = getattr(self, "count", 0) + 1
        exec(planted, {"self": self, "count": self.count, "kept": kept, "clock": clock})

    train_batch.TrainBatch.step = step
    worker.main(json.loads(request))


if __name__ == "__main__":
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))
    main(*sys.argv[1:])
