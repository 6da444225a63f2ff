"""Train operators with gluonpar.Trainer, and compare with gluon.Trainer on one device.

    echo '["sin", 0, "static", "write"]' | python tests/support/operator_sweep.py

trains the cases on standard input: name, number of the case, form and ``grad_req``. It
prints a line of JSON after each, so that the case that ends the process can be told.
"""

# ruff: noqa: I001
import gluonpar

import json
import sys
import traceback

import mxnet as mx
import numpy as np
import operator_table
from gluon_runs import STATIC, stock_trainer
from mxnet import autograd, gluon
from operator_table import C, P

FORMS = {"imperative": None, "hybridized": {}, "static": STATIC}
STEPS, LEARNING_RATE = 2, 0.0625
# The gradients of outputs are these multiples of the same numbers. Their sum is 1, so two devices'
# gradients add up to those of one device to the bit, if backward is linear.
HEADS = {1: [1.0], 2: [2.0, -1.0]}


class Alone(gluon.HybridBlock):
    """Only an operator, whose inputs are Parameters, after a Parameter of 3 elements.

    So backward of the operator itself writes gradients, at odd places of a bucket.
    """

    def __init__(self, case, grad_req):
        super().__init__(prefix="net_")
        self.case = case
        self.lead = self.params.get("a", shape=(3,), init="ones")
        for i, given in enumerate(case.inputs):
            value = values(given, i)
            options = {"shape": value.shape, "dtype": value.dtype, "init": "zeros"}
            options["grad_req"] = "write" if isinstance(given, P) else "null"
            setattr(self, f"x{i}", self.params.get(f"x{i}", **options))
        for param in self.collect_params().values():
            if param.grad_req == "write":
                param.grad_req = grad_req

    def hybrid_forward(self, F, x, lead, **inputs):
        outputs = self.case.call(F, *(inputs[f"x{i}"] for i in range(len(inputs))))
        if not isinstance(outputs, (list, tuple)):
            outputs = [*outputs] if type(outputs) is mx.sym.Symbol else [outputs]
        # MXNet's static graphs lose the gradient of an output that is a copy of an input's.
        return [x * lead, *(output * 1 for output in outputs)]


def values(given, number):
    if isinstance(given, C):
        return np.asarray(given.values, given.dtype)
    if given.values is not None:
        return np.asarray(given.values, "float32")
    rng = np.random.RandomState(number)
    return np.asarray(rng.uniform(given.low, given.high, given.shape), "float32")


def function(F, name):
    """The operator ``name`` in ``mx.nd`` or ``mx.sym``."""
    for prefix, room in (
        *(("_npi_", F.numpy._internal), ("_npx_", F.numpy_extension._op), ("_np_", F.numpy._op)),
        *(("_contrib_", F.contrib), ("_linalg_", F.linalg), ("_sparse_", F.sparse)),
        *(("_image_", F.image), ("_random_", F.random)),
    ):
        if name.startswith(prefix) and (prefix != "_random_" or name.endswith("_like")):
            return getattr(room, name[len(prefix) :])
    return getattr(F._internal if name.startswith("_") else F.op, name)


def direct(name, case):
    """A call of the operator with its inputs by name, or by position if their number varies."""
    arrays, _ = operator_table.arguments(name)
    if any("[]" in kind for kind in arrays.values()):
        return lambda F, *inputs: function(F, name)(*inputs, **case.attributes)
    return lambda F, *inputs: function(F, name)(**dict(zip(arrays, inputs)), **case.attributes)


def train(kind, devices, case, form, grad_req):
    """Train two steps, and return the Block."""
    ctx = [mx.cpu(i) for i in range(devices)]
    net = network(case, grad_req, form, ctx)
    array = mx.np.array if case.numpy else mx.nd.array
    trainer = kind(net.collect_params(), "sgd", {"learning_rate": LEARNING_RATE})
    factors = [1.0] * devices if case.own_heads else HEADS[devices]
    for step in range(STEPS):
        for _ in range(2 if grad_req == "add" else 1):
            heads, gradients = [], []
            for c, factor in zip(ctx, factors):
                mx.random.seed(step, ctx=c)
                with autograd.record():
                    outputs = net(array([1.0, 2.0, 3.0], ctx=c))
                for i, output in enumerate(outputs):
                    w = factor * np.random.RandomState(i).uniform(0.5, 1.5, output.shape)
                    heads.append(output)
                    gradients.append(array(w, ctx=output.context, dtype=output.dtype))
            autograd.backward(heads, gradients)
        trainer.step(devices if case.own_heads else 1)
        if grad_req == "add":
            net.collect_params().zero_grad()
    return net


def result(net, device=0):
    return {
        name[len("net_") :]: param.list_data()[device].asnumpy()
        for name, param in net.collect_params().items()
        if param.grad_req != "null"
    }


def compare(case, form, grad_req):
    """Return what is wrong, or None."""
    before = result(network(case, grad_req, "imperative", [mx.cpu()]))
    try:
        want = result(train(stock_trainer, 1, case, form, grad_req))
    except Exception as error:
        raise RuntimeError(f"stock: {error}") from error
    moved = [name for name in want if (want[name] != before[name]).any()]
    if "a" not in moved:
        return f"useless: these move: {moved}"
    if not all(np.isfinite(value).all() for value in want.values()):
        return "useless: not finite"
    for devices in case.devices:
        net = train(gluonpar.Trainer, devices, case, form, grad_req)
        for device in range(devices):
            for name, value in result(net, device).items():
                error = np.abs(value.astype("float64") - want[name]).max()
                limit = 0 if devices == 1 else 1e-6 * np.abs(want[name]).max()
                if not error <= limit:
                    return f"{devices} devices: {name} on device {device} is off by {error}"
    return None


def network(case, grad_req, form, ctx):
    """The Block of a case, hybridized, with its values on ``ctx``."""
    mx.random.seed(0)
    np.random.seed(0)
    array = mx.np.array if case.numpy else mx.nd.array
    net = Alone(case, grad_req)
    net.initialize(mx.init.Uniform(0.3), ctx=ctx)
    for i, given in enumerate(case.inputs):
        value = values(given, i)
        for copy in getattr(net, f"x{i}").list_data():
            array(value, dtype=value.dtype).copyto(copy)
    if FORMS[form] is not None:
        net.hybridize(**FORMS[form])
    return net


def find(name, number):
    """A case, with how it is called."""
    case = operator_table.RECIPES[name][number]
    return case if case.call else case._replace(call=direct(name, case))


def main():
    for key in map(json.loads, sys.stdin):
        name, number, form, grad_req = key
        try:
            case = find(name, number)
            with mx.util.np_shape(case.numpy), mx.util.np_array(case.numpy):
                wrong = compare(case, form, grad_req)
                mx.nd.waitall()
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            wrong = f"{type(error).__name__}: {lines[0]} ... {lines[-1]}"
        print(json.dumps({"case": key, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
