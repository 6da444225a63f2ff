"""Train every operator of MXNet with gluonpar.Trainer, and compare with gluon.Trainer.

    python tools/operator_sweep.py               # all of operator_table.py: some minutes
    python tools/operator_sweep.py sin _npi_det  # these

``gluonpar`` relies on what it finds: every gradient is an array of its own, because some operators
cannot write into views, and ``no_sync`` does without ``grad_req='add'``, with which some overwrite
gradients. Run it after a change to how gradients are stored, read or added up.

Each operator alone writes the gradients of a Block's Parameters, whatever way it has of doing it:
operators in C++ and of oneDNN, written to and added to, called one by one and from static graphs.
On one device the result must have the same bits, on two it must be the same to rounding. Operators
may crash, so they are trained in other processes; those read cases from standard input: name,
number of the case, form and ``grad_req``.
"""

# ruff: noqa: I001
import gluonpar

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import traceback

import mxnet as mx
import numpy as np
import operator_table
from mxnet import autograd, gluon
from operator_table import C, P

FORMS = {
    "imperative": None,
    "hybridized": {},
    "static": {"static_alloc": True, "static_shape": True},
}
STEPS, LEARNING_RATE = 2, 0.0625
# The gradients of outputs are these multiples of the same numbers. Their sum is 1, so two devices'
# gradients add up to those of one device to the bit, if backward is linear.
HEADS = {1: [1.0], 2: [2.0, -1.0]}
SECONDS = 600  # for one process, whose cases take milliseconds; one that crashes may hang
TOGETHER = 400  # cases in one process
JOBS = 2


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
        """Return the outputs, and of the first Parameter what is linear in it."""
        outputs = self.case.call(F, *(inputs[f"x{i}"] for i in range(len(inputs))))
        if not isinstance(outputs, (list, tuple)):
            outputs = [*outputs] if type(outputs) is mx.sym.Symbol else [outputs]
        # MXNet's static graphs lose the gradient of an output that is a copy of an input's.
        return [x * lead, *(output * 1 for output in outputs)]


def values(given, number):
    """Return the array of an input, which is a ``P`` or ``C``."""
    if isinstance(given, C):
        return np.asarray(given.values, given.dtype)
    if given.values is not None:
        return np.asarray(given.values, "float32")
    rng = np.random.RandomState(number)
    return np.asarray(rng.uniform(given.low, given.high, given.shape), "float32")


def function(F, name):
    """Return the operator ``name`` in ``mx.nd`` or ``mx.sym``."""
    for prefix, room in (
        *(("_npi_", F.numpy._internal), ("_npx_", F.numpy_extension._op), ("_np_", F.numpy._op)),
        *(("_contrib_", F.contrib), ("_linalg_", F.linalg), ("_sparse_", F.sparse)),
        *(("_image_", F.image), ("_random_", F.random)),
    ):
        if name.startswith(prefix) and (prefix != "_random_" or name.endswith("_like")):
            return getattr(room, name[len(prefix) :])
    return getattr(F._internal if name.startswith("_") else F.op, name)


def direct(name, case):
    """Return a call of it with its inputs by name, or by position if their number varies."""
    arrays, _ = operator_table.arguments(name)
    if any("[]" in kind for kind in arrays.values()):
        return lambda F, *inputs: function(F, name)(*inputs, **case.attributes)
    return lambda F, *inputs: function(F, name)(**dict(zip(arrays, inputs)), **case.attributes)


def stock(*args):
    """Make MXNet's own Trainer, which is compared with."""
    return gluon.Trainer(*args, kvstore=None)


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
    """Return the values of what is trained, by name."""
    return {
        name[len("net_") :]: param.list_data()[device].asnumpy()
        for name, param in net.collect_params().items()
        if param.grad_req != "null"
    }


def compare(case, form, grad_req):
    """Return what is wrong, or None."""
    before = result(network(case, grad_req, "imperative", [mx.cpu()]))
    try:
        want = result(train(stock, 1, case, form, grad_req))
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
    """Return the Block of a case, hybridized, with its values on ``ctx``."""
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
    """Return a case, with how it is called."""
    case = operator_table.RECIPES[name][number]
    return case if case.call else case._replace(call=direct(name, case))


def train_given():
    """Train the cases on standard input, and print what is wrong with each, or null, as JSON."""
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


def trained_by_one(keys):
    """Return what one process found until its end, which is the result of the case it was at."""
    text = "".join(f"{json.dumps(key)}\n" for key in keys)
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    try:
        command = [sys.executable, __file__, "--stdin"]
        done = subprocess.run(command, input=text, timeout=SECONDS, **options)
        output, how = done.stdout, f"ended with {done.returncode}: {done.stderr[-500:]}"
    except subprocess.TimeoutExpired as stopped:
        output, how = (stopped.stdout or b"").decode(), "stood still"
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    results = {tuple(one["case"]): one["wrong"] for one in found}
    if len(results) < len(keys):
        results[keys[len(results)]] = f"the process {how}"
    return results


def trained(keys):
    """Train the cases in as many processes as it takes: another one after each that crashes."""
    results = {}
    while len(results) < len(keys):
        results.update(trained_by_one([key for key in keys if key not in results]))
    return results


def main():
    """Print what is wrong, and return how many cases are."""
    parser = argparse.ArgumentParser(description="Train operators with gluonpar.Trainer.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators; default: all")
    parser.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stdin:
        train_given()
        return 0
    keys = [key for key in operator_table.keys() if key[0] in (options.names or [key[0]])]
    groups = [keys[i : i + TOGETHER] for i in range(0, len(keys), TOGETHER)]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        found = [each for results in pool.map(trained, groups) for each in results.items()]
    wrong = [f"{' '.join(map(str, key))}: {wrong}" for key, wrong in found if wrong]
    print(*wrong, f"{len(found)} cases, {len(wrong)} wrong", sep="\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main()))
