"""A Gluon script that trains alike in one process and in several: six steps, marked 1 to 6.

    python examples/six_steps.py --dataset synthetic --epochs 2
    mpirun -n 2 python examples/six_steps.py --dataset synthetic --epochs 2

docs/cluster.md explains the steps, and what to leave out of a script for Horovod or PyTorch's DDP.
"""

import argparse
import pathlib

import gluonpar  # 1. before MXNet; a process that mpirun has started is a rank of the job
from gluonpar import cluster
from gluonpar.metrics import LossMeter, accuracy
from gluonpar.models.lenet import standardize
from gluonpar.training.data import dataset

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


def train(args):
    """Train as the options say, and return the network."""
    np.random.seed(args.seed)  # the order of the samples; rank 0's is that of all
    mx.random.seed(args.seed)  # the initial values, too

    # 2. The devices of this rank: one GPU of its host, or a CPU.
    ctx = [mx.gpu(cluster.local_rank())] if mx.context.num_gpus() else [mx.cpu()]

    # 3. Of every batch each rank loads its part; batch_size is that of all ranks.
    data = args.data  # every rank has all samples
    samples = gluon.data.ArrayDataset(data.train_images, data.train_labels)
    loader = gluonpar.DataLoader(samples, args.batch_size, shuffle=True)

    # 4. All ranks start with rank 0's values, and with the rate of one process.
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu", in_units=784), gluon.nn.Dense(10, in_units=64))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()  # one number per sample
    options = {"learning_rate": args.lr, "momentum": 0.9}
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", options)

    for epoch in range(1, args.epochs + 1):
        meter = LossMeter()
        for images, labels in loader:
            # 5. The step of all ranks, also on one without samples, which has no shards.
            shards = gluonpar.split_and_load((images, labels), ctx)
            with autograd.record():
                losses = [loss_of(net(standardize(X)), y) for X, y in shards]
            for loss in losses:
                loss.backward()
            trainer.step(loader.num_samples)
            meter.add(losses)

        # 6. All ranks measure and save together; one prints.
        nets, images = [net] * len(ctx), data.test_images
        share = accuracy(images, data.test_labels, nets, ctx, lambda X, net: net(standardize(X)))
        mean_loss = meter.read()
        if args.save:
            gluonpar.save_checkpoint(args.save, net, trainer)
        if cluster.is_main():
            print(f"epoch {epoch}, loss {mean_loss:.4f}, test acc {share:.3f}", flush=True)
    return net


def positive(text):
    """Return the value of an option that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def parse(argv=None):
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", choices=dataset.NAMES, default="fashion-mnist")
    parser.add_argument(
        "--limit", type=positive, help="use the first LIMIT training and test images only"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=positive, default=256, help="on all ranks together")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint after every epoch")
    args = parser.parse_args(argv)
    try:
        args.data = dataset.load(args.dataset, limit=args.limit)
    except (OSError, ValueError) as error:
        parser.error(f"--dataset or --limit: {error}")
    can_save = not args.save or pathlib.Path(args.save).parent.is_dir()
    if not cluster.gather(can_save)[0]:  # rank 0 writes
        parser.error(f"--save {args.save}: there is no such folder; make it, or give another")
    return args


if __name__ == "__main__":
    train(parse())
