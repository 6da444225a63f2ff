"""What a step of training LeNet must do, in NumPy and float64, without gluonpar or MXNet.

Forward, backward and update, written out from the definitions (convolution as a sum over the
kernel's positions).
"""

import numpy as np


def convolve(x, w, b):
    """Valid cross-correlation: (n, c, h, w), (o, c, kh, kw) to (n, o, h - kh + 1, w - kw + 1)."""
    kh, kw = w.shape[2:]
    height, width = x.shape[2] - kh + 1, x.shape[3] - kw + 1
    out = np.zeros((x.shape[0], w.shape[0], height, width)) + b[None, :, None, None]
    for i in range(kh):
        for j in range(kw):
            patch = x[:, :, i : i + height, j : j + width]
            out += np.einsum("nchw,oc->nohw", patch, w[:, :, i, j], optimize=True)
    return out


def convolve_backward(x, w, dout):
    """Gradients with respect to x, w and b."""
    kh, kw = w.shape[2:]
    height, width = dout.shape[2:]
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for i in range(kh):
        for j in range(kw):
            patch = x[:, :, i : i + height, j : j + width]
            dw[:, :, i, j] = np.einsum("nchw,nohw->oc", patch, dout, optimize=True)
            dx[:, :, i : i + height, j : j + width] += np.einsum(
                "nohw,oc->nchw", dout, w[:, :, i, j], optimize=True
            )
    return dx, dw, dout.sum(axis=(0, 2, 3))


def pool(x):
    """Mean over 2x2 windows; an odd last row or column is left out."""
    h, w = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    return x[:, :, :h, :w].reshape(*x.shape[:2], h // 2, 2, w // 2, 2).mean(axis=(3, 5))


def pool_backward(x, dout):
    dx = np.zeros_like(x)
    h, w = dout.shape[2] * 2, dout.shape[3] * 2
    dx[:, :, :h, :w] = dout.repeat(2, axis=2).repeat(2, axis=3) / 4
    return dx


class Step:
    """Losses and summed gradients of LeNet with softmax cross-entropy on (X, y) at ``params``.

    ``margins`` are the smallest distances of a relu's input from its kink, layer by layer, relative
    to the layer's standard deviation: near one, float32 may take the other side.
    """

    def __init__(self, X, y, params):
        W1, b1, W2, b2, W3, b3, W4, b4 = params
        z1 = convolve(X, W1, b1)
        h1 = pool(np.maximum(z1, 0))
        z2 = convolve(h1, W2, b2)
        h2 = pool(np.maximum(z2, 0)).reshape(len(X), -1)
        z3 = h2 @ W3 + b3
        h3 = np.maximum(z3, 0)
        scores = h3 @ W4 + b4
        shifted = scores - scores.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(X))
        self.losses = -log_p[rows, y]
        self.margins = np.array([np.abs(z).min() / z.std() for z in (z1, z2, z3)])

        dscores = np.exp(log_p)
        dscores[rows, y] -= 1
        dz3 = (dscores @ W4.T) * (z3 > 0)
        dpooled2 = (dz3 @ W3.T).reshape(len(X), z2.shape[1], z2.shape[2] // 2, z2.shape[3] // 2)
        dz2 = pool_backward(z2, dpooled2) * (z2 > 0)
        dh1, dW2, db2 = convolve_backward(h1, W2, dz2)
        dz1 = pool_backward(z1, dh1) * (z1 > 0)
        _, dW1, db1 = convolve_backward(X, W1, dz1)
        self.grads = [
            *(dW1, db1, dW2, db2),
            *(h2.T @ dz3, dz3.sum(axis=0), h3.T @ dscores, dscores.sum(axis=0)),
        ]


def train(batches, params, lr):
    """Parameters after one step of minibatch SGD a batch, and the smallest margins met."""
    params, margins = [np.array(p, dtype=np.float64) for p in params], np.inf
    for X, y in batches:
        step = Step(X.astype(np.float64), y, params)
        margins = np.minimum(margins, step.margins)
        params = [p - lr * g / len(X) for p, g in zip(params, step.grads)]
    return params, margins
