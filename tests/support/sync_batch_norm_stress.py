"""Random networks with SyncBatchNorm, numbers of devices and modes, until the time is up.

python sync_batch_norm_stress.py SECONDS SEED
"""

import random
import sys
import time

import gluonpar

import mxnet as mx  # isort: skip
from mxnet import autograd  # isort: skip
from mxnet.gluon import nn  # isort: skip

MODES = [None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]
STEPS = 8


class Branches(nn.HybridBlock):
    """The sum of several stacks of convolution, SyncBatchNorm and activation, and of the input."""

    def __init__(self, channels, num_branches, depth):
        super().__init__()
        self.branches = []
        for _ in range(num_branches):
            stack = nn.HybridSequential()
            for _ in range(depth):
                norm = gluonpar.SyncBatchNorm(in_channels=channels, timeout_seconds=600)
                stack.add(nn.Conv2D(channels, 3, padding=1, in_channels=channels), norm)
                stack.add(nn.Activation("relu"))
            self.register_child(stack)
            self.branches.append(stack)

    def hybrid_forward(self, F, x):
        return F.add_n(x, *(branch(x) for branch in self.branches))


def network(rng):
    channels = rng.randint(1, 6)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels, 3, padding=1))
    for _ in range(rng.randint(1, 4)):
        net.add(Branches(channels, rng.randint(1, 4), rng.randint(1, 3)))
        net.add(nn.Dropout(rng.choice([0, 0.3])))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(2))
    return net


def train(rng):
    """Train a random network for some steps; check that all devices have the same parameters."""
    ctx = [mx.cpu(i) for i in range(rng.randint(2, 8))]
    mode, size, predict = rng.choice(MODES), rng.randint(2, 12), rng.random() < 0.5
    net = network(rng)
    net.initialize(ctx=ctx)
    if mode is not None:
        net.hybridize(**mode)
    trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    batch = mx.nd.random.normal(shape=(2 * len(ctx), 3, size, size))

    def forward_backward(shard):
        with autograd.record():
            loss = (net(shard) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(STEPS):
        shards = gluonpar.split_and_load(batch, ctx)
        losses = gluonpar.run_tasks(forward_backward, shards, ctx)
        trainer.step(len(batch))
        if predict:
            [net(shard) for shard in shards]
    assert all(loss.asscalar() < float("inf") for loss in losses)
    for name, param in net.collect_params().items():
        copies = {array.asnumpy().tobytes() for array in param.list_data()}
        assert len(copies) == 1, f"{name} differs between devices"
    mx.nd.waitall()


def main(seconds, seed):
    rng, number = random.Random(seed), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or number == 0:
        train(rng)
        number += 1
    print(f"{number} networks, {number * STEPS} steps")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
