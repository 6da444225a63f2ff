"""The training benchmark's worker with something planted in gluonpar's step, by a clock of its own.

Run with the planted statements and the worker's request as its arguments. They come after each
step and may use ``self``, the training; ``count``, the steps so far; ``kept``, a list; ``clock``,
whose ``seconds`` go on by 0.01 a step and not otherwise.
"""

import importlib
import json
import os
import sys
import types


def main(source, request):
    """Answer as the worker does, on stdout; what libraries print goes to stderr."""
    import benchmarks.training
    from benchmarks.training import worker

    sys.modules["bench_training"] = benchmarks.training  # by this name the worker knows it
    ours = importlib.import_module("bench_training.ours")
    clock, kept = types.SimpleNamespace(seconds=0.0), []
    worker.time = types.SimpleNamespace(
        perf_counter=lambda: clock.seconds, process_time=lambda: 2 * clock.seconds
    )
    real_step, planted = ours.Ours.step, compile(source, "planted", "exec")

    def step(self):
        real_step(self)
        clock.seconds += 0.01
        self.count = getattr(self, "count", 0) + 1
        exec(planted, {"self": self, "count": self.count, "kept": kept, "clock": clock})

    ours.Ours.step = step
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker.main(json.loads(request), replies)


if __name__ == "__main__":
    main(*sys.argv[1:])
