"""Time LeNet with the book's channels, and with zeros up to multiples of 8 and of 16.

python -m benchmarks.training.lenet_kernels
DNNL_MAX_CPU_ISA=AVX2 python -m benchmarks.training.lenet_kernels

All take turns in one process, on CPU contexts: train_batch on a batch of 256, and the scores of
2,560 images by metrics.accuracy. With DNNL_VERBOSE=1 oneDNN prints each kernel and its time.

Exit code: 0; 1 if the losses differ; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

# ruff: noqa: I001 (gluonpar comes before MXNet)
from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from unittest import mock

import gluonpar
import mxnet as mx
import numpy as np
from gluonpar import metrics
from gluonpar.diagnostics import harness
from gluonpar.models import channels, lenet
from gluonpar.options import Measured, option

BATCH, IMAGES, TOLERANCE, BOOK = 256, 2560, 1e-4, (1, 20, 50)
HEADINGS, WIDTHS = ("channels", "ms per step", "quartiles", "ms per evaluation", "quartiles"), 20


class Variant:
    """LeNet that computes with ``first`` and ``second`` channels, and with ``inputs``."""

    def __init__(self, ctx, inputs, first, second):
        self.ctx, self.added = ctx, [inputs - 1, first - 20, second - 50]
        self.name = "the book's" if first == 20 else f"{inputs}, {first}, {second}"
        self.model = gluonpar.traceable(lambda X, params: lenet.lenet(X, params))
        mx.random.seed(0)
        start = gluonpar.init_lenet(scale=0.05)
        self.replicas = [gluonpar.get_params(start, c) for c in ctx]
        rng = np.random.default_rng(0)
        self.X = rng.random((IMAGES, 1, 28, 28), "float32")
        self.y = rng.integers(0, 10, IMAGES).astype("float32")
        self.losses = []

    def step(self):
        """Train on the first batch."""
        with mock.patch.object(channels, "missing", lambda *_: self.added):
            batch = self.X[:BATCH], self.y[:BATCH]
            self.losses = gluonpar.train_batch(*batch, self.replicas, self.ctx, 0.01, self.model)

    def evaluate(self):
        """Compute the accuracy on all images."""
        with mock.patch.object(channels, "missing", lambda *_: self.added):
            metrics.accuracy(self.X, self.y, self.replicas, self.ctx, self.model)


@dataclasses.dataclass(frozen=True)
class Row:
    """Samples of a variant's step and evaluation, and its last mean loss."""

    name: str
    step: harness.Samples
    evaluation: harness.Samples
    loss: float

    def as_dict(self):
        """Return everything, for JSON."""
        samples = {"step": self.step.as_dict(), "evaluation": self.evaluation.as_dict()}
        return {"name": self.name, "loss": self.loss, **samples}

    def line(self):
        """Return medians and quartiles in ms, aligned."""
        cells = [self.name]
        for samples in (self.step, self.evaluation):
            low, high = (1e3 * seconds for seconds in samples.quartiles)
            cells += [f"{1e3 * samples.median:.1f}", f"{low:.1f} to {high:.1f}"]
        return harness.columns(cells, [WIDTHS] * len(cells))


@dataclasses.dataclass(frozen=True)
class Asked(Measured):
    """The options."""

    about = __doc__.partition("\n")[0]

    num_gpus: int = option(2, "CPU contexts (%(default)s)", "K", least=1)
    rounds: int = option(15, "samples of each, in turns (%(default)s)", "N", least=1)
    steps: int = option(1, "steps per sample (%(default)s)", "N", least=1)
    warmup: int = option(3, "samples before that do not count (%(default)s)", "N", least=0)


def instruction_set():
    """Return what oneDNN may use of this processor's vector instructions."""
    limit = os.environ.get("DNNL_MAX_CPU_ISA", "ALL")
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    widest = next(
        (name for name in ("avx512f", "avx2") if name in flags), "neither AVX-512 nor AVX2"
    )
    return f"{widest}, DNNL_MAX_CPU_ISA={limit}"


def prepare(options):
    """Return the variants."""
    ctx = [mx.cpu(i) for i in range(options.num_gpus)]
    numbers = [(1, 20, 50), (1, 24, 56), (3, 24, 56), (1, 32, 64), (3, 32, 64)]
    return [Variant(ctx, *each) for each in numbers]


def measure(variants, console, record):
    """Print a line for each variant; return a complaint if they compute different functions."""
    options = record.options
    more = channels.missing(mx.nd.ones((1,)), *BOOK)
    ours = ", ".join(str(size + added) for size, added in zip(BOOK, more))
    rows = {"instruction set": instruction_set(), "gluonpar.lenet takes": ours}
    record.header(console, rows)
    timed = functools.partial(harness.interleaved, rounds=options.rounds, warmup=options.warmup)
    of_step = [harness.Candidate(v.name, v.step, mx.nd.waitall, options.steps) for v in variants]
    steps = timed(of_step)
    losses = [np.mean([float(loss.mean().asscalar()) for loss in v.losses]) for v in variants]
    evaluations = timed([harness.Candidate(v.name, v.evaluate, mx.nd.waitall) for v in variants])
    console.line("\n" + harness.columns(HEADINGS, [WIDTHS] * len(HEADINGS)))
    for variant, loss in zip(variants, losses):
        name = variant.name
        record.rows.append(Row(name, steps[name], evaluations[name], float(loss)))
        console.line(record.rows[-1].line())
    record.write()
    differ = max(losses) - min(losses) > TOLERANCE
    return [f"the losses differ: {losses}"] if differ else []


if __name__ == "__main__":
    sys.exit(harness.conduct(Asked, None, prepare, measure, "benchmarks.training.lenet_kernels"))
