"""Steps of gluonpar.Trainer in ranks, with one context each, by the size of the buckets.

mpirun -n 2 python -m benchmarks.cluster.buckets --workload mlp --rounds 12

All sizes take turns in the same processes. Rank 0 prints the slowest rank's milliseconds per step.
"""

from __future__ import annotations

import argparse
import functools
import time

import numpy as np

import gluonpar  # before MXNet, which then imports with any NumPy

import mxnet as mx  # isort: skip
from benchmarks.training.gluon import Gluon
from benchmarks.training.training import shard
from benchmarks.training.workloads import WORKLOADS, task

SIZES = 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26  # bytes


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="mlp")
    parser.add_argument("--rounds", type=int, default=12, help="samples of each size")
    parser.add_argument("--steps", type=int, default=3, help="steps per sample")
    options = parser.parse_args()
    rank, size = gluonpar.cluster.rank(), gluonpar.cluster.size()
    number = WORKLOADS[options.workload].batch_size
    whole = task(options.workload, number, [("cpu", i) for i in range(size)])
    of_sizes = {}
    for num_bytes in SIZES:
        make = functools.partial(gluonpar.Trainer, bucket_bytes=num_bytes)
        of_sizes[num_bytes] = Gluon(shard(whole, rank, size), [mx.cpu()], make)
        of_sizes[num_bytes].batch_size = number
        of_sizes[num_bytes].run(2)  # not measured
    samples: dict[int, list[float]] = {num_bytes: [] for num_bytes in SIZES}
    for _ in range(options.rounds):
        for num_bytes, training in of_sizes.items():
            gluonpar.cluster.gather(None)
            start = time.perf_counter()
            training.run(options.steps)
            mine = (time.perf_counter() - start) / options.steps
            samples[num_bytes].append(max(gluonpar.cluster.gather(mine)))
    if gluonpar.cluster.is_main():
        print(f"{options.workload}, {size} ranks: ms per step, median (quartiles)")
        for num_bytes, values in samples.items():
            low, median, high = 1e3 * np.percentile(values, [25, 50, 75])
            print(f"{num_bytes / (1 << 20):9.4g} MiB {median:8.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
