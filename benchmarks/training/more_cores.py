"""Predict the step of train_batch on more cores than this machine has, a core per device.

python -m benchmarks.training.more_cores
python -m benchmarks.training.more_cores --workload resnet18 --num-gpus 1,2,4,8 --rounds 5 --steps 1

Everything runs with one thread per device. Measured for K devices: "alone", one device's step on
its shard; "python", the processor time of the thread that calls train_batch on K devices; and
"rest", a step of K devices whose model does nothing but use each parameter, so that splitting,
queues, all-reduce and update remain. With a core per device a step then takes at least the longer
of alone and python, and at most alone plus what the rest takes longer than on one device: the rest
is measured on this machine's cores, which K devices share. Where there is a core per device here,
the step itself is measured, too. Images/s and the speed-up over one device are those of "at most".

The prediction assumes that devices do not slow each other down through caches and memory.

Exit code: 0; 1 if a measured step is outside what is predicted by more than 10%; 2 for a request
that cannot be met; 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass

if "mxnet" not in sys.modules:
    os.environ["OMP_NUM_THREADS"] = "1"  # read when MXNet is imported, below

import numpy as np

import gluonpar
from benchmarks.training import train_batch
from benchmarks.training.workloads import WORKLOADS, task
from gluonpar.diagnostics import harness
from gluonpar.options import Measured, option
from gluonpar.runtime import threads

HEADINGS = ("workload", "K", "alone", "python", "rest", "at least", "at most", "measured")
HEADINGS += ("images/s", "speed-up")
WIDTHS = (-10, 4, 9, 9, 9, 10, 10, 10, 10, 10)
TOLERANCE = 0.1  # of the prediction


@gluonpar.traceable
def nothing(X, params):
    """Return one score per sample that depends on the first element of each parameter."""
    F = gluonpar.operators(X)
    total = F.mean(F.reshape(X, shape=(0, -1)), axis=1)
    for param in params:
        first = F.slice_axis(F.reshape(param, shape=(-1,)), axis=0, begin=0, end=1)
        total = F.broadcast_add(total, first)
    return total


def difference(scores, y):
    """Return one loss per sample."""
    return scores - y


class Rest(train_batch.TrainBatch):
    """A step without the model's computation."""

    def step(self):
        """Take a step as a user would."""
        params, ctx = self.device_params, self.ctx
        gluonpar.train_batch(self.X, self.y, params, ctx, self.lr, nothing, difference)


def main(argv=None) -> int:
    """Measure what ``argv`` asks for and print the predictions; return the exit code."""
    return harness.conduct(Asked, argv, prepare, measure, "benchmarks.training.more_cores")


@dataclasses.dataclass(frozen=True)
class Asked(Measured):
    """The options."""

    about = __doc__.partition("\n")[0]

    workload: tuple[str, ...] = option(
        ("lenet",), "what to train (%(default)s)", "A,B", choices=WORKLOADS
    )
    num_gpus: tuple[int, ...] = option(
        (1, 2, 4, 8, 16), "numbers of devices (%(default)s)", "K,...", least=1
    )
    steps: int = option(5, "steps per sample (%(default)s)", "N", least=1)
    rounds: int = option(12, "samples, in turns (%(default)s)", "N", least=1)
    warmup: int = option(3, "samples before that do not count (%(default)s)", "N", least=1)


def prepare(options):
    """Return pairs of a workload and the numbers of devices; ValueError if not possible."""
    for workload in options.workload:
        samples = WORKLOADS[workload].batch_size
        for k in options.num_gpus:
            if not 1 <= k <= samples or samples % k:
                raise ValueError(f"num_gpus must divide {samples}, {workload}'s batch, got {k}")
    return [(workload, sorted({1, *options.num_gpus})) for workload in options.workload]


def measure(prepared, console, record):
    """Print a line for each workload and number of devices; return complaints."""
    options = record.options
    times = f"ms per step, medians of {options.rounds} rounds of {options.steps} steps; "
    record.header(console, {"times": f"{times}alone, rest and the step itself in turns"})
    console.line("\n" + harness.columns(HEADINGS, WIDTHS))
    for workload, numbers in prepared:
        for k in numbers:
            one = record.rows[-numbers.index(k)] if k > 1 else None
            record.rows.append(row(workload, k, sample(workload, k, options), one))
            console.line(record.rows[-1].line())
            record.write()
    return [
        f"{row.workload}, K={row.num_devices}: {1e3 * row.measured:.1f} ms is not as predicted"
        for row in record.rows
        if not row.right
    ]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in seconds per step."""

    workload: str
    num_devices: int
    alone: float
    python: float
    rest: float
    at_least: float
    at_most: float
    measured: float | None  # where each device has a core
    speedup: float  # of the one-device step over ``at_most``

    @property
    def right(self) -> bool:
        """Whether what was measured, if anything, is as predicted."""
        if self.measured is None:
            return True
        return self.at_least * (1 - TOLERANCE) < self.measured < self.at_most * (1 + TOLERANCE)

    def as_dict(self):
        """Return all fields, for JSON."""
        return vars(self)

    def line(self):
        """Return the figures, aligned."""
        times = (self.alone, self.python, self.rest, self.at_least, self.at_most, self.measured)
        figures = ["-" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in times]
        speed = f"{WORKLOADS[self.workload].batch_size / self.at_most:.0f}", f"{self.speedup:.2f}"
        return harness.columns((self.workload, self.num_devices, *figures, *speed), WIDTHS)


def row(workload, k, medians, one):
    """Return the prediction from ``medians``; ``one`` is the row of one device, if not it."""
    alone, python, rest = (medians[part] for part in ("alone", "python", "rest"))
    most = alone + max(0.0, rest - (one.rest if one else rest))
    measured = medians["step"] if k <= threads.cores() else None
    speedup = (one.alone if one else alone) / most
    return Row(workload, k, alone, python, rest, max(alone, python), most, measured, speedup)


def sample(workload, k, options):
    """Return median seconds per step of "alone", "python", "rest" and the whole "step"."""
    n, devices = WORKLOADS[workload].batch_size, [("cpu", i) for i in range(k)]
    made = {
        "alone": train_batch.TrainBatch(task(workload, n // k, devices[:1])),
        "rest": Rest(task(workload, n, devices)),
        "step": train_batch.TrainBatch(task(workload, n, devices)),
    }
    samples = {part: [] for part in (*made, "python")}
    bar = harness.progress_bar(f"{workload}, K={k}")
    for part, counts in harness.turns(list(made), options.rounds, options.warmup, bar):
        start, python = time.perf_counter(), time.thread_time()
        for _ in range(options.steps):
            made[part].step()
        python = time.thread_time() - python
        made[part].wait()
        if counts:
            samples[part].append((time.perf_counter() - start) / options.steps)
            if part == "step":
                samples["python"].append(python / options.steps)
    return {part: float(np.median(values)) for part, values in samples.items()}


if __name__ == "__main__":
    sys.exit(main())
