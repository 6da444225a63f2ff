"""Dive into Deep Learning, 13.5: data parallelism from scratch, with its loop over batches."""

import argparse

from d2l import mxnet as d2l
from mxnet import autograd, gluon, np, npx

npx.set_np()
parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, default=2)
args = parser.parse_args()
devices = [d2l.try_gpu(i) if npx.num_gpus() else npx.cpu(i) for i in range(args.num_gpus)]
batch_size, lr, num_epochs = 32, 0.2, 2

params = [
    *(np.random.normal(scale=0.1, size=(6, 1, 3, 3)), np.zeros(6)),
    *(np.random.normal(scale=0.1, size=(6 * 13 * 13, 10)), np.zeros(10)),
]
loss = gluon.loss.SoftmaxCrossEntropyLoss()


def net(X, params):
    conv = npx.convolution(data=X, weight=params[0], bias=params[1], kernel=(3, 3), num_filter=6)
    pooled = npx.pooling(data=npx.relu(conv), kernel=(2, 2), stride=(2, 2), pool_type="max")
    return np.dot(pooled.reshape(pooled.shape[0], -1), params[2]) + params[3]


def get_params(params, device):
    new_params = [p.copyto(device) for p in params]
    for p in new_params:
        p.attach_grad()
    return new_params


def allreduce(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].copyto(data[0].ctx)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def split_batch(X, y, devices):
    parts = (gluon.utils.split_and_load(part, devices, even_split=False) for part in (X, y))
    return tuple(parts)


def train_batch(X, y, device_params, devices, lr):
    X_shards, y_shards = split_batch(X, y, devices)
    with autograd.record():
        losses = [
            loss(net(X_shard, params), y_shard)
            for X_shard, y_shard, params in zip(X_shards, y_shards, device_params)
        ]
    for loss_shard in losses:
        loss_shard.backward()
    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
    for params in device_params:
        d2l.sgd(params, lr, X.shape[0])


images = gluon.data.vision.FashionMNIST(train=True)
dataset = images.transform_first(gluon.data.vision.transforms.ToTensor())
train_iter = gluon.data.DataLoader(dataset, batch_size, shuffle=True)
device_params = [get_params(params, device) for device in devices]
for _ in range(num_epochs):
    for X, y in train_iter:
        train_batch(X, y, device_params, devices, lr)
