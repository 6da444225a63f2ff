"""Linear regression on two devices in a hand-written loop that uses only ``allreduce_grads``."""

from gluonpar import allreduce_grads

import mxnet as mx
from mxnet import autograd, nd

ctx = [mx.cpu(0), mx.cpu(1)]  # or [mx.gpu(0), mx.gpu(1)]
lr, batch_size = 0.1, 64

true_w, true_b = nd.array([[2.0], [-3.4]]), 4.2
X = nd.random.normal(shape=(1024, 2))
y = nd.dot(X, true_w) + true_b

# Each device has its own copy of the parameters.
replicas = [(nd.zeros((2, 1), ctx=c), nd.zeros((1,), ctx=c)) for c in ctx]
for params in replicas:
    for param in params:
        param.attach_grad()

for _ in range(100):
    batch = nd.random.randint(0, len(X), shape=(batch_size,))
    with autograd.record():
        losses = []
        for i, (c, (w, b)) in enumerate(zip(ctx, replicas)):
            shard = batch[i :: len(ctx)]  # this device's part of the batch
            features, target = X[shard].as_in_context(c), y[shard].as_in_context(c)
            losses.append((nd.dot(features, w) + b - target) ** 2 / 2)
    autograd.backward(losses)
    allreduce_grads(replicas)  # now the whole batch's, on every device
    for params in replicas:
        for param in params:
            param -= lr * param.grad / batch_size

w, b = replicas[1]
print(f"w = {w.asnumpy().ravel().round(2)}, b = {b.asscalar():.2f}")
