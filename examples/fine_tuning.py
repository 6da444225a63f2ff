"""Fine-tune a network of Gluon's model zoo: a new last layer first, then the whole network.

    python examples/fine_tuning.py --num-gpus 2 --device cpu
    mpirun -n 2 python examples/fine_tuning.py --num-gpus 1
    python examples/fine_tuning.py --num-gpus 2 --model mobilenet1.0 --pretrained --size 224

The images are drawn by the program, so nothing is downloaded without --pretrained, which loads
what the network has learnt on ImageNet. For images of your own, replace striped() by
gluon.data.vision.ImageFolderDataset with a transform to arrays of shape (3, size, size).
"""

import argparse

import gluonpar
from gluonpar import cluster
from gluonpar.metrics import LossMeter, accuracy
from gluonpar.runtime import devices

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision

NUM_CLASSES = 4


def striped(count, size, seed):
    """Return noisy images (count, 3, size, size) of stripes in four directions, and these."""
    rng = np.random.RandomState(seed)
    labels = np.arange(count) % NUM_CLASSES
    angle, phase = np.pi * labels / NUM_CLASSES, rng.uniform(0, 2 * np.pi, count)
    rows, columns = np.mgrid[:size, :size] * 0.8
    across = np.multiply.outer(np.cos(angle), rows) + np.multiply.outer(np.sin(angle), columns)
    stripes = np.sin(across + phase[:, None, None])[:, None]
    images = stripes + rng.normal(0, 0.3, (count, 3, size, size))
    return images.astype("float32"), labels.astype("float32")


def network(name, pretrained, size, ctx):
    """Return a network with a new last layer, and with all shapes known."""
    net = vision.get_model(name, classes=NUM_CLASSES)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=ctx)
    if pretrained:
        net.features = vision.get_model(name, pretrained=True, ctx=ctx).features
    net(mx.nd.zeros((1, 3, size, size), ctx=ctx[0]))
    net.hybridize(static_alloc=True)
    return net


def train(args):
    """Train as the options say; return the network, and the loss of every epoch."""
    np.random.seed(args.seed)  # the order of the samples; rank 0's is that of all
    mx.random.seed(args.seed)
    ctx = args.ctx
    samples = gluon.data.ArrayDataset(*striped(args.limit, args.size, args.seed))
    loader = gluonpar.DataLoader(samples, args.batch_size, shuffle=True)  # this rank's part
    test_images, test_labels = striped(100, args.size, args.seed + 1)
    net = network(args.model, args.pretrained, args.size, ctx)
    loss_of, history = gluon.loss.SoftmaxCrossEntropyLoss(), []

    # Layers that do not learn have no gradients, which saves memory, time and sums.
    net.features.collect_params().setattr("grad_req", "null")
    phases = [("last layer", net.features, net.output, args.lr), ("all", None, net, args.lr / 10)]
    for name, frozen, part, lr in phases:
        part.collect_params().setattr("grad_req", "write")
        options = {"learning_rate": lr, "momentum": 0.9, "wd": 1e-4}
        trainer = gluonpar.Trainer(part.collect_params(), "sgd", options)
        for epoch in range(1, args.epochs + 1):
            meter = LossMeter()
            for X, y in loader:
                shards = gluonpar.split_and_load((X, y), ctx)
                if frozen:  # outside record(), so that batch normalisation changes nothing
                    shards = [(frozen(X), y) for X, y in shards]
                with autograd.record():
                    losses = [loss_of(part(X), y) for X, y in shards]
                for loss in losses:
                    loss.backward()
                trainer.step(loader.num_samples)
                meter.add(losses)
            gluonpar.average_statistics(net)  # each device has its own, of its samples
            nets = [net] * len(ctx)  # one network, with parameters on each device
            share = accuracy(test_images, test_labels, nets, ctx, lambda X, net: net(X))
            history.append(meter.read())
            if cluster.is_main():
                line = f"{name}, epoch {epoch}, loss {history[-1]:.3f}, test acc {share:.2f}"
                print(line, flush=True)
    return net, history


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
    parser.add_argument("--model", default="resnet18_v1", help="a name of the model zoo")
    parser.add_argument("--pretrained", action="store_true", help="download what it has learnt")
    parser.add_argument("--size", type=positive, default=32, help="height and width of an image")
    parser.add_argument("--limit", type=positive, default=640, help="number of training images")
    parser.add_argument("--epochs", type=positive, default=3, help="for each of the two parts")
    parser.add_argument("--batch-size", type=positive, default=32, help="on all processes together")
    parser.add_argument("--lr", type=float, default=0.02, help="a tenth of it for all layers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        args.ctx = list(devices.choose(args.num_gpus, device=args.device).ctx)  # of this rank
    except ValueError as error:
        parser.error(f"--num-gpus: {error}")
    return args


if __name__ == "__main__":
    train(parse())
