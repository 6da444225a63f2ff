"""What the seeds of gluonpar.DataLoader's samples cost, beside MXNet's DataLoader.

python -m benchmarks.data_loader
python -m benchmarks.data_loader --samples 60000 --batch-size 256 --workers 0,2

Microseconds per sample of an epoch, in which samples are one number: from an array, which runs no
code of the program, by a transform that returns it, and by one that draws from np.random. Median
(and least to most) of the rounds, in which all take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import gluonpar
from gluonpar.diagnostics import harness

import mxnet as mx  # isort: skip
import numpy as np  # isort: skip


def same(x: float) -> float:
    """Return the sample."""
    return x


def drawn(x: float) -> float:
    """Return the sample and a random number."""
    return x + np.random.rand()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    samples = mx.gluon.data.ArrayDataset(np.arange(args.samples, dtype="float32"))
    datasets = {
        "an array": samples,
        "a transform": samples.transform(same),
        "a transform that draws": samples.transform(drawn),
    }
    print(*(f"{name}: {value}" for name, value in harness.machine().items()), sep="\n")
    for workers in map(int, args.workers.split(",")):
        for name, dataset in datasets.items():
            loaders = [
                kind(dataset, args.batch_size, num_workers=workers)
                for kind in (mx.gluon.data.DataLoader, gluonpar.DataLoader)
            ]
            times: list[list[float]] = [[], []]
            for _ in range(args.rounds + 1):  # the first warms up
                for loader, found in zip(loaders, times):
                    start = time.perf_counter()
                    for batch in loader:
                        batch.wait_to_read()
                    found.append((time.perf_counter() - start) / args.samples * 1e6)
            stock, ours = (found[1:] for found in times)
            more = statistics.median(b - a for a, b in zip(stock, ours))
            shown = f"MXNet {_shown(stock)}, gluonpar {_shown(ours)}, difference {more:.1f}"
            print(f"{workers} workers, {name}: {shown}")


def _shown(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"


if __name__ == "__main__":
    main()
