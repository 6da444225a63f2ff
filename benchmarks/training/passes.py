"""Time backward passes, and steps of one network among many, beside MXNet without gluonpar.

python -m benchmarks.training.passes
python -m benchmarks.training.passes --params 161 --num-gpus 8 --networks 1,100 --rounds 20

Two processes take turns: in one a network of so many parameters has a gluonpar.Trainer, in the
other MXNet's, with kvstore='device'. In each round each records a loss per device and calls
backward of all losses in one pass, and in another step of each; then the Trainer makes a step. The
time is the processor time of the thread that calls backward: what the pass needs to be queued.

Exit code: 0; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np

from benchmarks import worker
from gluonpar.diagnostics import harness
from gluonpar.options import Measured, option

HEADINGS = ("networks", "passes", "gluonpar", "MXNet", "more", "whole step", "MXNet's", "ratio")
WIDTHS = (9, -11, 10, 10, 9, 11, 10, 7)
LIBRARIES, WAYS = ("gluonpar", "mxnet"), ("one", "per device")


def train(library, num_params, num_devices):
    """Read lines with a number of networks and of steps; answer with seconds of the first one."""
    worker.prepare(library, [])
    import mxnet as mx
    from mxnet import autograd, gluon

    if library == "gluonpar":
        import gluonpar as trainers
    else:
        trainers = gluon
    ctx, networks = [mx.cpu(i) for i in range(num_devices)], []

    def step(params, trainer, way):
        with autograd.record():
            losses = [mx.nd.add_n(*[param.data(c) for param in params]) for c in ctx]
        mx.nd.waitall()
        start, python = time.perf_counter(), time.thread_time()
        if way == "one":
            autograd.backward(losses)
        else:
            for loss in losses:
                loss.backward()
        python = time.thread_time() - python
        trainer.step(num_devices)
        mx.nd.waitall()
        return python, time.perf_counter() - start

    for line in sys.stdin:
        num_networks, way = json.loads(line)
        while len(networks) < num_networks:
            params = [gluon.Parameter(f"p{i}", shape=(4,)) for i in range(num_params)]
            for param in params:
                param.initialize(mx.init.One(), ctx=ctx)
            networks.append((params, trainers.Trainer(params, "sgd")))
            step(*networks[-1], way)
        print(json.dumps(step(*networks[0], way)), flush=True)


class Row(NamedTuple):
    """Median seconds of the passes of a step, and of passes and step, by library."""

    networks: int
    passes: str
    seconds: dict[str, list[float]]

    def as_dict(self):
        """Return all fields, for JSON."""
        return self._asdict()

    def line(self):
        """Return the figures, aligned; times in ms."""
        (ours, whole), (stock, stocks) = (self.seconds[library] for library in LIBRARIES)
        times = [f"{1e3 * s:.2f}" for s in (ours, stock, ours - stock, whole, stocks)]
        return harness.columns(
            (self.networks, self.passes, *times, f"{whole / stocks:.2f}"), WIDTHS
        )


@dataclasses.dataclass(frozen=True)
class Asked(Measured):
    """The options."""

    about = __doc__.partition("\n")[0]

    params: int = option(161, "parameters per network (%(default)s)", "N", least=1)
    num_gpus: int = option(8, "devices (%(default)s)", "N", least=1)
    networks: tuple[int, ...] = option(
        (1, 100), "networks that are alive; one makes steps (%(default)s)", "N,...", least=1
    )
    rounds: int = option(20, "samples, in turns (%(default)s)", "N", least=1)
    steps: int = option(
        1, "steps per sample, of which the last is timed (%(default)s)", "N", least=1
    )
    warmup: int = option(3, "samples before that do not count (%(default)s)", "N", least=1)


def prepare(options):
    """Return the numbers of networks; ValueError if not possible."""
    if min(options.networks) < 1:
        raise ValueError(f"networks must be at least 1, got {min(options.networks)}")
    return sorted(options.networks)


def measure(prepared, console, record):
    """Print a line for each number of networks and way of calling backward."""
    options = record.options
    times = f"ms per step, medians of {options.rounds} rounds; both libraries in turns"
    record.header(console, {"times": times})
    console.line("\n" + harness.columns(HEADINGS, WIDTHS))
    command = [sys.executable, "-m", "benchmarks.training.passes"]
    sizes = [str(options.params), str(options.num_gpus)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    root = pathlib.Path(__file__).resolve().parents[2]
    started = {
        library: subprocess.Popen([*command, "child", library, *sizes], cwd=root, **pipes)
        for library in LIBRARIES
    }
    try:
        for num_networks in prepared:
            for way in WAYS:
                record.rows.append(
                    Row(num_networks, way, sample(started, num_networks, way, options))
                )
                console.line(record.rows[-1].line())
                record.write()
    finally:
        for child in started.values():
            child.kill()
            child.communicate()
    return []


def sample(started, num_networks, way, options):
    """Return by library the median seconds of the passes, and of passes and step."""
    samples = {library: [] for library in started}
    bar = harness.progress_bar(f"{num_networks} networks, {way}")
    for library, counts in harness.turns(list(started), options.rounds, options.warmup, bar):
        child = started[library]
        for _ in range(options.steps):
            print(json.dumps([num_networks, way]), file=child.stdin, flush=True)
            answer = json.loads(child.stdout.readline())
        if counts:
            samples[library].append(answer)
    return {library: np.median(values, axis=0).tolist() for library, values in samples.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        train(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        sys.exit(harness.conduct(Asked, None, prepare, measure, "benchmarks.training.passes"))
