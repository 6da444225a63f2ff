"""CIFAR-10 on several machines, as MXNet's example/distributed_training trains it."""

import argparse
import random

import mxnet as mx
from mxnet import autograd, gluon, kv, nd
from mxnet.gluon.model_zoo import vision

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, default=4, help="of each machine")
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()

store = kv.create("dist")
batch_size = 8 * args.num_gpus
device = mx.gpu if mx.context.num_gpus() else mx.cpu
ctx = [device(i) for i in range(args.num_gpus)]


def transform(data, label):
    return nd.transpose(data.astype("float32"), (2, 0, 1)) / 255, float(label)


class SplitSampler(gluon.data.sampler.Sampler):
    """The samples of one of equal parts of the data, in any order."""

    def __init__(self, length, num_parts, part_index):
        self.part_len = length // num_parts
        self.start = self.part_len * part_index

    def __iter__(self):
        indices = list(range(self.start, self.start + self.part_len))
        random.shuffle(indices)
        return iter(indices)

    def __len__(self):
        return self.part_len


train_set = gluon.data.vision.CIFAR10(train=True, transform=transform)
test_set = gluon.data.vision.CIFAR10(train=False, transform=transform)
sampler = SplitSampler(len(train_set), store.num_workers, store.rank)
train_data = gluon.data.DataLoader(train_set, batch_size, sampler=sampler)
test_data = gluon.data.DataLoader(test_set, batch_size)

net = vision.resnet18_v1(classes=10)
net.initialize(mx.init.Xavier(), ctx=ctx)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.001}, kvstore=store)

for epoch in range(args.epochs):
    for data, label in train_data:
        data_parts = gluon.utils.split_and_load(data, ctx)
        label_parts = gluon.utils.split_and_load(label, ctx)
        with autograd.record():
            losses = [loss_of(net(X), y) for X, y in zip(data_parts, label_parts)]
        for loss in losses:
            loss.backward()
        trainer.step(len(data))
    accuracy = mx.metric.Accuracy()
    for data, label in test_data:
        accuracy.update(label, net(data.as_in_context(ctx[0])))
    print(f"epoch {epoch}, test accuracy {accuracy.get()[1]:.3f}")
