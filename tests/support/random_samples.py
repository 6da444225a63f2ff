"""Datasets that draw random numbers, and what they draw; as a program, a rank that writes it."""

import itertools
import json
import pathlib
import random
import sys

import numpy as np

import gluonpar
from gluonpar import cluster

import mxnet as mx  # isort: skip
from mxnet import gluon  # isort: skip

NUMBER = 13  # of samples; the last of four batches has one, so ranks are without samples
ARRAYS = np.arange(float(NUMBER)), -np.arange(float(NUMBER))


def draw(x, *labels):
    return np.array([x, np.random.rand(), random.random(), np.random.randn()])


def draw_by_mxnet(x, *labels):
    return np.array([x, mx.nd.random.uniform(shape=(1,)).asscalar()])


class Draws(gluon.data.Dataset):
    def __len__(self):
        return NUMBER

    def __getitem__(self, i):
        return draw(i)


def mixed(samples):
    """A batch, with what is drawn once for all of it, as mixup does."""
    drawn = np.random.rand(), random.random()
    return mx.nd.array([[x, *drawn] for x in samples], dtype="float64")


one, two = gluon.data.ArrayDataset(ARRAYS[0]), gluon.data.ArrayDataset(*ARRAYS)
DATASETS = {
    "transform": one.transform(draw),
    "of several": two.transform(draw),
    "first": two.transform_first(draw),
    "own": Draws(),
    "inside": gluon.data.ArrayDataset(one.transform(draw), ARRAYS[1]),
    "sampled": one.transform(draw).take(NUMBER),
    "list": [*range(NUMBER)],  # whose batches draw
    "mxnet": one.transform(draw_by_mxnet),
}


def loader(name, **how):
    batchify = mixed if name == "list" else None
    return gluonpar.DataLoader(DATASETS[name], 4, batchify_fn=batchify, **how)


def rows(batches):
    """What the samples of these batches drew, on all ranks, in the order of the epoch."""
    found = []
    for batch in batches:
        data = batch[0] if isinstance(batch, (list, tuple)) else batch
        found += itertools.chain(*cluster.gather(data.asnumpy().tolist()))
    return [tuple(row) for row in found]


def epochs(name, number=2, seed=5, **how):
    """What the samples of a new loader's epochs drew, and what the program draws then.

    Rank 0's seed counts; the others have seeds of their own.
    """
    own = None if seed is None else seed + cluster.rank()
    np.random.seed(own)
    random.seed(own)
    loads = loader(name, **how)
    return [rows(loads) for _ in range(number)], (np.random.rand(), random.random())


CASES = [
    (name, {"num_workers": workers, "shuffle": name != "own"})
    for name, numbers in [
        ("transform", (0, 3)),
        ("own", (0, 2)),
        ("list", (1,)),
        ("mxnet", (1, 3)),
    ]
    for workers in numbers
]

if __name__ == "__main__":
    found = [epochs(name, **how) for name, how in CASES]
    if cluster.is_main():
        pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
