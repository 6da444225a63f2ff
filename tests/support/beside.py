"""A network that MXNet's own Trainer trains, in a process with gluonpar and in one without.

python beside.py reads programs, a line of JSON each, and prints what :func:`results` returns of
them. gluonpar is not imported then.
"""

import atexit
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import warnings

import numpy as np

KVSTORES = (None, "device", "updates")  # the last one updates, as MXNet does if it is not told


class Network:
    """Two parameters on three devices, two static graphs that share a layer, and their Trainer."""

    def __init__(self, kvstore):
        import mxnet as mx
        from mxnet import autograd, gluon

        self.mx, self.autograd = mx, autograd
        self.ctx = [mx.cpu(i) for i in range(3)]
        self.params = [gluon.Parameter(name, shape=(2,)) for name in ("v", "w")]
        layers = [gluon.nn.Dense(2, in_units=2, prefix=f"{name}_") for name in "abc"]
        self.heads = []
        for head in layers[1:]:
            self.heads.append(gluon.nn.HybridSequential(prefix=""))
            self.heads[-1].add(layers[0], head)
            self.heads[-1].hybridize(static_alloc=True, static_shape=True)
        for layer in layers:
            self.params += layer.collect_params().values()
        for param in self.params:
            param.initialize(mx.init.One(), ctx=self.ctx)
        on = {"kvstore": kvstore and "device", "update_on_kvstore": kvstore == "updates"}
        self.trainer = gluon.Trainer(self.params, "sgd", {"learning_rate": 0.1}, **on)

    def backward(self, devices, used, times, together):
        """Passes of a batch that has samples on ``devices``, in this order."""
        losses = []
        for i in devices:
            for n in range(times):
                with self.autograd.record():
                    values = [self.params[j].data(self.ctx[i]) for j in used]
                    losses.append(sum((value * (i + n + 2)).sum() for value in values))
                if not together:
                    losses[-1].backward()
        if together:
            self.autograd.backward(losses)

    def share(self, devices, heads):
        """A pass for each device, of the heads on their common layer."""
        for i in devices:
            with self.autograd.record():
                X = self.mx.nd.full((1, 2), i + 1, ctx=self.ctx[i])
                loss = sum((self.heads[j](X) ** 2).sum() for j in heads) * 0.01
            loss.backward()

    def step(self, ignores):
        self.trainer.step(2, ignore_stale_grad=ignores)

    def sum(self):
        self.trainer.allreduce_grads()

    def require(self, i, grad_req):
        self.params[i].grad_req = grad_req

    def do(self, name, arguments):
        """Return what can be seen after an event: errors, values, gradients, MXNet's flags."""
        seen = []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                getattr(self, name)(*arguments)
            except (AssertionError, UserWarning, ValueError, self.mx.MXNetError) as error:
                seen.append(repr(error).split("Stack trace")[0])
        seen += [str(each.message) for each in said]
        for param in self.params:
            for arrays in (param._data, param._grad or ()):
                seen += [array.asnumpy().tobytes().hex() for array in arrays]
            seen += [value._fresh_grad for value in param._data] if param._grad else []
        return seen


def results(kvstore, program):
    """Return, for a program of :meth:`Network`'s events, what can be seen after each."""
    network = Network(kvstore)
    return [network.do(name, arguments) for name, arguments in program]


@functools.lru_cache(None)
def _process():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, __file__], **pipes)
    atexit.register(process.communicate)  # it ends with its input
    return process


def of_another_process(kvstore, program):
    """Return :func:`results` of another process, which does not import gluonpar."""
    process = _process()
    print(json.dumps([kvstore, program]), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def main():
    """Answer until the end of the input."""
    root = pathlib.Path(__file__).resolve().parents[2]
    path = root / "gluonpar" / "install" / "compatibility.py"  # NumPy's former names
    spec = importlib.util.spec_from_file_location("compatibility", path)
    compatibility = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compatibility)
    compatibility.install()
    for line in sys.stdin:
        answer = results(*json.loads(line))
        assert "gluonpar" not in sys.modules
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
