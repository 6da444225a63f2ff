"""Train a convolutional network in several processes, each with one device or more.

    mpirun -n 2 python examples/several_processes.py --num-gpus 1 --save-dir out
    mpirun -n 2 python examples/several_processes.py --num-gpus 1 --save-dir out --resume 3
    python examples/several_processes.py --num-gpus 2 --device cpu --dataset synthetic --epochs 1

The last line is the same training in one process with two devices. docs/cluster.md explains the
program, and how Slurm or several machines start it.
"""

import argparse
import pathlib
import sys

import gluonpar
from gluonpar import cluster
from gluonpar.metrics import LossMeter, accuracy
from gluonpar.models import lenet
from gluonpar.runtime import devices
from gluonpar.training.data import dataset

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn


def batches(images, labels, batch_size, seed):
    """Yield this rank's part of each batch, and the number of samples on all ranks."""
    order = np.random.RandomState(seed).permutation(len(images))  # the same on all ranks
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        mine = np.array_split(batch, cluster.size())[cluster.rank()]
        yield images[mine], labels[mine], len(batch)


def network():
    """Return LeNet for images of shape (n, 1, 28, 28), with all shapes known."""
    net = nn.HybridSequential()
    net.add(
        *(nn.Conv2D(20, 5, activation="relu", in_channels=1), nn.MaxPool2D()),
        *(nn.Conv2D(50, 5, activation="relu", in_channels=20), nn.MaxPool2D()),
        *(nn.Dense(128, activation="relu", in_units=800), nn.Dense(10, in_units=128)),
    )
    return net


def train(args):
    """Train as the options say, and return the network."""
    ctx, data = args.ctx, args.data

    net = network()
    mx.random.seed(args.seed)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()  # one number per sample
    options = {"learning_rate": args.lr, "momentum": 0.9}
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", options)  # starts from rank 0's values

    if args.resume:
        path = args.save_dir / f"epoch-{args.resume}.ckpt"
        try:
            gluonpar.load_checkpoint(path, net, trainer)  # rank 0 reads, and sends it to all
        except ValueError as error:  # on all ranks, such as for a file that is missing
            sys.exit(f"error: {error}" if cluster.is_main() else 1)

    for epoch in range(args.resume + 1, args.epochs + 1):
        meter = LossMeter()
        of_epoch = [data.train_images, data.train_labels, args.batch_size, [args.seed, epoch]]
        for images, labels, num_samples in batches(*of_epoch):
            shards = gluonpar.split_and_load((images, labels), ctx) if len(labels) else []
            with autograd.record():
                losses = [loss_of(net(lenet.standardize(X)), y) for X, y in shards]
            if losses:
                autograd.backward(losses)
            trainer.step(num_samples)  # on every rank, also on one without samples
            meter.add(losses)

        # All ranks call these three. Each evaluates its part of the test images; rank 0 writes.
        nets = [net] * len(ctx)  # one network, with parameters on each device
        test = (data.test_images, data.test_labels)
        share = accuracy(*test, nets, ctx, lambda X, net: net(lenet.standardize(X)))
        loss = meter.read()
        if args.save_dir:
            gluonpar.save_checkpoint(args.save_dir / f"epoch-{epoch}.ckpt", net, trainer)
        if cluster.is_main():
            print(f"epoch {epoch}, loss {loss:.3f}, test acc {share:.2f}", flush=True)
    return net


def positive(text):
    """Return the value of an option that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def parse(argv=None):
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-gpus", type=int, default=1, help="devices of each process")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--dataset", choices=dataset.NAMES, default="fashion-mnist")
    parser.add_argument(
        "--limit", type=positive, help="use the first LIMIT training and test images only"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--batch-size", type=positive, default=256, help="on all processes together"
    )
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-dir", type=pathlib.Path, help="save every epoch in this folder")
    parser.add_argument("--resume", type=int, default=0, help="the epoch to continue after")
    args = parser.parse_args(argv)
    if args.resume and not args.save_dir:
        parser.error("--resume needs --save-dir")
    try:
        args.ctx = list(devices.choose(args.num_gpus, device=args.device).ctx)  # of this rank
    except ValueError as error:
        parser.error(f"--num-gpus: {error}")
    try:
        args.data = dataset.load(args.dataset, limit=args.limit)
    except (OSError, ValueError) as error:
        parser.error(f"--dataset or --limit: {error}")
    try:
        if args.save_dir:
            args.save_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--save-dir: {error}; give a folder that can be written")
    return args


if __name__ == "__main__":
    train(parse())
