"""A loop of one's own: linear regression on two devices. Only ``allreduce`` is gluonpar's."""

# ruff: noqa: I001 - gluonpar first: it prepares the process for MXNet
from gluonpar import allreduce

import mxnet as mx
from mxnet import autograd, nd

ctx = [mx.cpu(0), mx.cpu(1)]  # or [mx.gpu(0), mx.gpu(1)]
lr, batch_size = 0.1, 64

true_w, true_b = nd.array([[2.0], [-3.4]]), 4.2
X = nd.random.normal(shape=(1024, 2))
y = nd.dot(X, true_w) + true_b

# Every device has its own copy of the parameters.
replicas = [(nd.zeros((2, 1), ctx=c), nd.zeros((1,), ctx=c)) for c in ctx]
for params in replicas:
    for param in params:
        param.attach_grad()

for _ in range(100):
    batch = nd.random.randint(0, len(X), shape=(batch_size,))
    with autograd.record():
        losses = []
        for i, (c, (w, b)) in enumerate(zip(ctx, replicas)):
            mine = batch[i :: len(ctx)]  # this device's part of the batch
            features, target = X[mine].as_in_context(c), y[mine].as_in_context(c)
            losses.append((nd.dot(features, w) + b - target) ** 2 / 2)
    autograd.backward(losses)
    for copies in zip(*replicas):
        allreduce([param.grad for param in copies])  # every device now has the whole batch's
    for params in replicas:
        for param in params:
            param -= lr * param.grad / batch_size

w, b = replicas[1]
print(f"w = {w.asnumpy().ravel().round(2)}, b = {b.asscalar():.2f}")
