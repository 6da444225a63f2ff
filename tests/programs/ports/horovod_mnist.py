"""MNIST as a script for Horovod trains it: one device per process, one part of the data each."""

import argparse

import mxnet as mx
import horovod.mxnet as hvd
from mxnet import autograd, gluon

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16, help="of each process")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
device = mx.gpu if mx.context.num_gpus() else mx.cpu
context = device(hvd.local_rank())


def mnist(part, **options):
    return mx.io.MNISTIter(
        image=f"{part}-images-idx3-ubyte",
        label=f"{part}-labels-idx1-ubyte",
        batch_size=args.batch_size,
        **options,
    )


train_data = mnist("train", shuffle=True, num_parts=hvd.size(), part_index=hvd.rank())
val_data = mnist("t10k")

model = gluon.nn.HybridSequential()
with model.name_scope():
    model.add(gluon.nn.Conv2D(8, 5, activation="relu"), gluon.nn.MaxPool2D(2, 2))
    model.add(gluon.nn.Flatten(), gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(10))
model.initialize(mx.init.Xavier(magnitude=2), ctx=context)
model.hybridize()

params = model.collect_params()
hvd.broadcast_parameters(params, root_rank=0)
options = {"momentum": 0.9, "learning_rate": args.lr * hvd.size()}
trainer = hvd.DistributedTrainer(params, "sgd", options)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
metric = mx.metric.Accuracy()

for epoch in range(args.epochs):
    train_data.reset()
    metric.reset()
    for batch in train_data:
        data = batch.data[0].as_in_context(context)
        label = batch.label[0].as_in_context(context)
        with autograd.record():
            output = model(data)
            loss = loss_fn(output, label)
        loss.backward()
        trainer.step(args.batch_size)
        metric.update([label], [output])

    _, train_acc = metric.get()
    val_data.reset()
    metric.reset()
    for batch in val_data:
        label = batch.label[0].as_in_context(context)
        metric.update([label], [model(batch.data[0].as_in_context(context))])
    if hvd.rank() == 0:
        print(f"epoch {epoch}, train {train_acc:.3f}, validation {metric.get()[1]:.3f}")
