"""Train a convolutional network on several devices, with gradients summed in one of three ways.

    python examples/training_loop.py --num-gpus 2 --num-workers 2 --save-dir out
    python examples/training_loop.py --num-gpus 2 --num-workers 2 --save-dir out --resume 3
    python examples/training_loop.py --sums by-hand --device cpu --dataset synthetic --epochs 1

docs/training-loop.md explains it. It is a program of one process; for several, see
examples/several_processes.py.
"""

import argparse
import pathlib

import gluonpar
from gluonpar.metrics import LossMeter, accuracy
from gluonpar.runtime import devices
from gluonpar.training.data import dataset

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.data.vision import transforms


CROP = transforms.RandomResizedCrop(28, scale=(0.8, 1.0))  # draws from Python's random


def augment(image):
    """Return a part of an image (height, width, channels), half of them mirrored."""
    image = CROP(mx.nd.array(image, dtype="uint8"))
    return mx.nd.flip(image, axis=1) if np.random.rand() < 0.5 else image


def network():
    """Return a network of uint8 images (n, height, width, channels), with all shapes known."""
    net = nn.HybridSequential()
    net.add(
        *(transforms.ToTensor(), transforms.Normalize(0.286, 0.353)),  # on the device
        *(nn.Conv2D(20, 5, activation="relu", in_channels=1), nn.MaxPool2D()),
        *(nn.Conv2D(50, 5, activation="relu", in_channels=20), nn.MaxPool2D()),
        *(nn.Dense(128, activation="relu", in_units=800), nn.Dense(10, in_units=128)),
    )
    return net


class Trainer:
    """gluonpar.Trainer sums the gradients and updates the parameters."""

    def __init__(self, net, options, schedule, ctx):
        self.net, options = net, {**options, "lr_scheduler": schedule}
        self.trainer = gluonpar.Trainer(net.collect_params(), "sgd", options)

    def step(self, batch_size):
        self.trainer.step(batch_size)

    def save(self, path):
        gluonpar.save_checkpoint(f"{path}.ckpt", self.net, self.trainer)

    def load(self, path, num_updates):
        gluonpar.load_checkpoint(f"{path}.ckpt", self.net, self.trainer)


class Kvstore:
    """gluon.Trainer makes a gluonpar.Trainer; parameters and states are saved in two files."""

    def __init__(self, net, options, schedule, ctx):
        self.net, self.ctx, options = net, ctx, {**options, "lr_scheduler": schedule}
        self.trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore="gluonpar")

    def step(self, batch_size):
        self.trainer.step(batch_size)

    def save(self, path):
        self.net.save_parameters(f"{path}.params")
        self.trainer.save_states(f"{path}.states")

    def load(self, path, num_updates):
        self.net.load_parameters(f"{path}.params", ctx=self.ctx)
        self.trainer.load_states(f"{path}.states")


class ByHand:
    """allreduce_grads sums the gradients; the update is written out."""

    def __init__(self, net, options, schedule, ctx):
        self.options, self.schedule, self.num_updates = options, schedule, 0
        self.params = list(net.collect_params().values())
        self.momenta = [[mx.nd.zeros_like(w) for w in param.list_data()] for param in self.params]
        self.replicas = [
            [*(param.data(c) for param in self.params), *(copies[i] for copies in self.momenta)]
            for i, c in enumerate(ctx)
        ]

    def step(self, batch_size):
        gluonpar.allreduce_grads(self.replicas)  # a device without samples adds nothing
        self.num_updates += 1
        how = {"lr": self.schedule(self.num_updates), "rescale_grad": 1 / batch_size}
        for param, copies in zip(self.params, self.momenta):
            for weight, grad, momentum in zip(param.list_data(), param.list_grad(), copies):
                mx.nd.sgd_mom_update(weight, grad, momentum, out=weight, **how, **self.options)

    def save(self, path):
        gluonpar.save_checkpoint(f"{path}.ckpt", self.replicas)

    def load(self, path, num_updates):
        gluonpar.load_checkpoint(f"{path}.ckpt", self.replicas)
        self.num_updates = num_updates  # for the schedule


SUMS = {"trainer": Trainer, "kvstore": Kvstore, "by-hand": ByHand}


def train(args):
    """Train as the options say, and return the network."""
    ctx, data = args.ctx, args.data
    images, test_images = (x.transpose(0, 2, 3, 1) for x in (data.train_images, data.test_images))

    samples = gluon.data.ArrayDataset(images, data.train_labels).transform_first(augment)
    how = {"shuffle": True, "num_workers": args.num_workers}
    loader = gluonpar.DataLoader(samples, args.batch_size, **how)

    mx.random.seed(args.seed)
    net = network()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()  # one number per sample
    num_steps = args.epochs * len(loader)
    schedule = mx.lr_scheduler.CosineScheduler(
        num_steps, base_lr=args.lr, warmup_steps=num_steps // 10
    )
    options = {"momentum": 0.9, "wd": 1e-4}
    sums = SUMS[args.sums](net, options, schedule, ctx)

    if args.resume:
        sums.load(args.save_dir / f"epoch-{args.resume}", args.resume * len(loader))

    for epoch in range(args.resume + 1, args.epochs + 1):
        np.random.seed([args.seed, epoch])  # for the order, and for what samples draw
        mx.random.seed(args.seed + epoch)  # for layers that draw, such as Dropout
        meter = LossMeter()
        for X, y in loader:
            shards = gluonpar.split_and_load((X, y), ctx)
            with autograd.record():
                losses = [loss_of(net(X_shard), y_shard) for X_shard, y_shard in shards]
            autograd.backward(losses)
            sums.step(len(y))
            meter.add(losses)
        nets = [net] * len(ctx)  # one network, with parameters on each device
        share = accuracy(test_images, data.test_labels, nets, ctx, lambda X, net: net(X))
        print(f"epoch {epoch}, loss {meter.read():.3f}, test acc {share:.2f}", flush=True)
        if args.save_dir:
            sums.save(args.save_dir / f"epoch-{epoch}")
    return net


def positive(text):
    """Return the value of an option that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def parse(argv=None):
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sums", choices=SUMS, default="trainer", help="how gradients are summed")
    parser.add_argument("--num-gpus", type=int, default=2, help="devices (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--dataset", choices=dataset.NAMES, default="fashion-mnist")
    parser.add_argument(
        "--limit", type=positive, help="use the first LIMIT training and test images only"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=positive, default=256, help="on all devices together")
    parser.add_argument("--lr", type=float, default=0.1, help="the largest learning rate")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-dir", type=pathlib.Path, help="save every epoch in this folder")
    parser.add_argument("--resume", type=int, default=0, help="the epoch to continue after")
    args = parser.parse_args(argv)
    if args.resume and not args.save_dir:
        parser.error("--resume needs --save-dir")
    if args.resume and not any(args.save_dir.glob(f"epoch-{args.resume}.*")):
        parser.exit(2, f"there is no checkpoint of epoch {args.resume} in {args.save_dir}\n")
    try:
        args.ctx = list(devices.choose(args.num_gpus, device=args.device).ctx)
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
