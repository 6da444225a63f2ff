"""Train an LSTM that predicts each next character of a text, on several devices.

    python examples/language_model.py --num-gpus 2 --device cpu
    mpirun -n 2 python examples/language_model.py --num-gpus 1
    python examples/language_model.py --data book.txt --units 256 --epochs 20 --lr 5

The text, random sentences without --data, is cut into as many streams as the batch size says. The
perplexity is of its last tenth, which is not trained on; n equally likely characters would give n.
"""

import argparse
import pathlib
import random

import gluonpar
from gluonpar import cluster
from gluonpar.metrics import LossMeter
from gluonpar.runtime import devices

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


class CharacterModel(gluon.Block):
    """Scores (length, streams, characters) of the next characters, and the new state."""

    def __init__(self, num_chars, units):
        super().__init__()
        self.embedding = gluon.nn.Embedding(num_chars, units)
        self.lstm = gluon.rnn.LSTM(units, input_size=units)
        self.scores = gluon.nn.Dense(num_chars, flatten=False, in_units=units)

    def forward(self, chars, state):
        outputs, state = self.lstm(self.embedding(chars), state)
        return self.scores(outputs), state


def sentences():
    """Return a text of random sentences, such as "a dog sees the small tree."."""
    rng, articles, nouns = random.Random(0), ["a ", "the "], ["dog", "cat", "small tree", "house"]
    parts = articles, nouns, [" sees ", " hears ", " finds "], articles, nouns, [".\n"]
    return "".join(rng.choice(part) for _ in range(600) for part in parts)


def streams(chars, batch_size):
    """Cut the text into consecutive parts; return this rank's, (characters, streams)."""
    parts = chars[: len(chars) // batch_size * batch_size].reshape(batch_size, -1)
    return np.array_split(parts, cluster.size())[cluster.rank()].T.astype("float32")


def run(net, part, args, trainer=None):
    """Return the mean loss of this part of the text on all ranks; a trainer learns it, too."""
    shards = gluonpar.split_and_load(part, args.ctx, batch_axis=1)
    states = [net.lstm.begin_state(X.shape[1], ctx=X.context) for X in shards]  # one per device
    loss_of, meter = gluon.loss.SoftmaxCrossEntropyLoss(), LossMeter()
    for start in range(0, len(part) - 1, args.length):
        stop, losses = min(start + args.length, len(part) - 1), []
        # Without detach(), backward would go on through all batches before.
        states = [[array.detach() for array in state] for state in states]
        with autograd.record() if trainer else autograd.pause():
            for i, X in enumerate(shards):
                scores, states[i] = net(X[start:stop], states[i])
                targets = X[start + 1 : stop + 1].reshape((-1,))
                losses.append(loss_of(scores.reshape((-3, 0)), targets))  # one per character
        if trainer:
            autograd.backward(losses)
            num_chars = (stop - start) * args.batch_size  # on all ranks
            trainer.clip_global_norm(args.clip * num_chars)  # the gradients are sums still
            trainer.step(num_chars)
        meter.add(losses)
    return meter.read()


def train(args):
    """Train as the options say; return the network, and the perplexity after every epoch."""
    mx.random.seed(0)
    alphabet, chars = np.unique(list(args.text), return_inverse=True)
    parts, history = np.split(chars, [len(chars) * 9 // 10]), []
    train_part, test_part = (streams(part, args.batch_size) for part in parts)
    net = CharacterModel(len(alphabet), args.units)
    net.initialize(mx.init.Xavier(), ctx=args.ctx)
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"learning_rate": args.lr})
    for epoch in range(1, args.epochs + 1):
        loss = run(net, train_part, args, trainer)
        history.append(np.exp(run(net, test_part, args)))
        if cluster.is_main():
            print(f"epoch {epoch}, loss {loss:.3f}, perplexity {history[-1]:.2f}", flush=True)
    return net, history


def parse(argv=None):
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-gpus", type=int, default=1, help="devices of each process")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--data", type=pathlib.Path, metavar="FILE", help="a text in UTF-8")
    parser.add_argument("--units", type=int, default=64, help="of the LSTM")
    parser.add_argument("--length", type=int, default=32, help="characters of a step")
    parser.add_argument("--batch-size", type=int, default=16, help="on all processes together")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2.0)
    parser.add_argument("--clip", type=float, default=0.5, help="largest norm of the gradient")
    args = parser.parse_args(argv)
    if min(args.units, args.length, args.epochs) < 1:
        parser.error("--units, --length and --epochs must be at least 1")
    try:
        args.ctx = list(devices.choose(args.num_gpus, device=args.device).ctx)  # of this rank
        args.text = args.data.read_text("utf-8") if args.data else sentences()
    except (OSError, ValueError) as error:
        parser.error(f"--num-gpus or --data: {error}")
    if not cluster.size() <= args.batch_size <= len(args.text) // 20:
        least, most = f"{cluster.size()} (processes)", f"{len(args.text) // 20} (characters / 20)"
        parser.error(f"--batch-size must be from {least} to {most}, got {args.batch_size}")
    return args


if __name__ == "__main__":
    train(parse())
