"""MNIST by Module.fit, as MXNet's example/image-classification trains it."""

import argparse
import logging

import mxnet as mx
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--gpus", default="0,1", help="ids of the devices")
parser.add_argument("--kv-store", default="device")
parser.add_argument("--num-epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()


def read_data(part):
    with open(f"{part}-labels-idx1-ubyte", "rb") as file:
        label = np.frombuffer(file.read(), "uint8", offset=8)
    with open(f"{part}-images-idx3-ubyte", "rb") as file:
        image = np.frombuffer(file.read(), "uint8", offset=16)
    return image.reshape(-1, 1, 28, 28).astype("float32") / 255, label.astype("float32")


def get_mnist_iter(args, kv):
    train_img, train_lbl = read_data("train")
    val_img, val_lbl = read_data("t10k")
    train = mx.io.NDArrayIter(train_img, train_lbl, args.batch_size, shuffle=True)
    val = mx.io.NDArrayIter(val_img, val_lbl, args.batch_size)
    return train, val


def get_symbol():
    data = mx.sym.flatten(mx.sym.var("data"))
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=32), act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=10), name="softmax")


def fit(args, network, data_loader):
    kv = mx.kvstore.create(args.kv_store)
    logging.info("node %d of %d", kv.rank, kv.num_workers)
    train, val = data_loader(args, kv)
    device = mx.gpu if mx.context.num_gpus() else mx.cpu
    devs = [device(int(i)) for i in args.gpus.split(",")]
    model = mx.mod.Module(context=devs, symbol=network)
    schedule = mx.lr_scheduler.MultiFactorScheduler(step=[5], factor=0.1, base_lr=args.lr)
    options = {"learning_rate": args.lr, "wd": 1e-4, "momentum": 0.9, "lr_scheduler": schedule}
    model.fit(
        train,
        eval_data=val,
        eval_metric=["accuracy"],
        num_epoch=args.num_epochs,
        kvstore=kv,
        optimizer="sgd",
        optimizer_params=options,
        initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        batch_end_callback=[mx.callback.Speedometer(args.batch_size, 100)],
    )
    return model


model = fit(args, get_symbol(), get_mnist_iter)
