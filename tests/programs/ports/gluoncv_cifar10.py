"""CIFAR-10 as gluon-cv's script for classification trains it."""

import argparse
import logging

import mxnet as mx
from gluoncv.data import transforms as gcv_transforms
from gluoncv.model_zoo import get_model
from mxnet import autograd as ag
from mxnet import gluon
from mxnet.gluon.data.vision import transforms

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8, help="of each device")
parser.add_argument("--num-gpus", type=int, default=2)
parser.add_argument("--num-epochs", type=int, default=2)
parser.add_argument("--lr-decay-epoch", type=int, default=1)
parser.add_argument("--save", default="cifar10.params")
opt = parser.parse_args()

batch_size = opt.batch_size * opt.num_gpus
device = mx.gpu if mx.context.num_gpus() else mx.cpu
context = [device(i) for i in range(opt.num_gpus)]

net = get_model("cifar_resnet20_v1", classes=10)
normalised = [transforms.ToTensor(), transforms.Normalize(0.5, 0.2)]
transform_train = transforms.Compose(
    [gcv_transforms.RandomCrop(32, pad=4), transforms.RandomFlipLeftRight(), *normalised]
)
transform_test = transforms.Compose(normalised)


def test(ctx, val_data):
    metric = mx.metric.Accuracy()
    for batch in val_data:
        data = gluon.utils.split_and_load(batch[0], ctx_list=ctx, batch_axis=0)
        label = gluon.utils.split_and_load(batch[1], ctx_list=ctx, batch_axis=0)
        metric.update(label, [net(X) for X in data])
    return metric.get()[1]


def train(epochs, ctx):
    net.initialize(mx.init.Xavier(), ctx=ctx)
    train_data = gluon.data.DataLoader(
        gluon.data.vision.CIFAR10(train=True).transform_first(transform_train),
        batch_size=batch_size,
        shuffle=True,
        last_batch="discard",
    )
    val_data = gluon.data.DataLoader(
        gluon.data.vision.CIFAR10(train=False).transform_first(transform_test),
        batch_size=batch_size,
    )
    options = {"learning_rate": 0.1, "wd": 0.0001, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "nag", options)
    train_metric, loss_fn = mx.metric.Accuracy(), gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(epochs):
        train_metric.reset()
        if epoch == opt.lr_decay_epoch:
            trainer.set_learning_rate(trainer.learning_rate * 0.1)
        for batch in train_data:
            data = gluon.utils.split_and_load(batch[0], ctx_list=ctx, batch_axis=0)
            label = gluon.utils.split_and_load(batch[1], ctx_list=ctx, batch_axis=0)
            with ag.record():
                output = [net(X) for X in data]
                loss = [loss_fn(yhat, y) for yhat, y in zip(output, label)]
            for of_device in loss:
                of_device.backward()
            trainer.step(batch_size)
            train_metric.update(label, output)
        logging.info("epoch %d, train %s, val %s", epoch, train_metric.get(), test(ctx, val_data))
    net.save_parameters(opt.save)


net.hybridize()
train(opt.num_epochs, context)
