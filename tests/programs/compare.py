"""Programs of others, trained by MXNet's Trainer and by gluonpar, and what comes out compared.

A program is a generator: it is called with contexts and a :class:`Way`, trains some batches, and
after each step yields the losses, a list of arrays, and the parameters.

``python tests/programs/compare.py NAME K...`` prints a line of JSON for each number of devices, by
the two ways in turn, which make Trainers of one class. ``--times`` prints the time of a step on two
devices, with stock's Trainer without gluonpar in the process. Without a name it prints the table of
docs/programs.md, all in processes of their own.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from typing import Optional

import numpy as np

# The programs by module, with what changes in them besides the line that makes the Trainer.
PROGRAMS = {
    "gluoncv_programs": {
        "cifar_resnet": "",
        "ssd": "",
        "ssd_contrib": "",
        "ssd_synchronised": "`SyncBatchNorm`, 2 for `run_tasks`",
        "yolo": "",
        "faster_rcnn": "6 around MXNet's `ROIAlign`",
        "fcn": "",
        "fcn_synchronised": "`SyncBatchNorm`, 8 for `run_tasks`",
        "fcn_as_one": "",
    },
    "gluonnlp_programs": {"bert": "", "awd_lstm": ""},
    "d2l_programs": {"resnet18": "", "inference": "", "d2lzh_train": ""},
    "mxnet_programs": {"fitted": "", "module": "", "bucketing_module": ""},
}
NAMES = [name for names in PROGRAMS.values() for name in names]
# Those that are run on two and on four devices.
ALIKE = [name for name in NAMES if name not in ("ssd_contrib", "fcn_as_one")]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a program trains: the one line of it that is changed."""

    name: str
    kvstore: str = "device"  # also for Module and other code that takes a name
    update_on_kvstore: Optional[bool] = None

    def trainer(self, params, optimizer, options=None, **more):
        """What the program's line ``gluon.Trainer(params, optimizer, options, ...)`` becomes."""
        from mxnet import gluon

        if self.name == "gluonpar.Trainer":
            import gluonpar

            return gluonpar.Trainer(params, optimizer, options, **more)
        if self.update_on_kvstore is not None:
            more["update_on_kvstore"] = self.update_on_kvstore
        return gluon.Trainer(params, optimizer, options, kvstore=self.kvstore, **more)


AS_SHIPPED = Way("gluon.Trainer")
# Updated on the kvstore, as by default, a gamma that BatchNorm fixes at 1 decays there.
STOCK = Way("gluon.Trainer", update_on_kvstore=False)
KVSTORE = Way("kvstore='gluonpar'", kvstore="gluonpar")
TRAINER = Way("gluonpar.Trainer")


def ways(name):
    """The ways to compare with stock: a Module has a kvstore, but no Trainer."""
    return [KVSTORE] if "module" in name else [KVSTORE, TRAINER]


def program(name):
    module = next(module for module, names in PROGRAMS.items() if name in names)
    return getattr(importlib.import_module(module), name)


@dataclasses.dataclass
class Run:
    """The losses of each step, and copies of all parameters after the first and the last one."""

    losses: list
    first: list
    last: list
    seconds: list  # of each step


def run(name, k, way):
    """Run a program to its end on ``k`` devices."""
    import mxnet as mx

    function, ctx = program(name), [mx.cpu(i) for i in range(k)]
    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)
    losses, seconds, first = [], [], None
    steps = function(ctx, way)
    while True:
        mx.nd.waitall()
        began = time.perf_counter()
        try:
            of_step, params = next(steps)
        except StopIteration:
            break
        mx.nd.waitall()
        seconds.append(time.perf_counter() - began)
        losses.append([loss.asnumpy() for loss in of_step])
        last = _copied(params)
        first = first or last
    return Run(losses, first, last, seconds)


def _copied(params):
    """Every device's copy of every parameter that is trained, in order."""
    trained = [param for param in params if param.grad_req != "null"]
    return [(param.name, [array.asnumpy() for array in param.list_data()]) for param in trained]


def compared(ours, stock):
    """What a reader wants to know of a run beside stock's."""
    bits = [
        [array.tobytes() for step in one.losses for array in step]
        + [copy.tobytes() for _, copies in one.last for copy in copies]
        for one in (ours, stock)
    ]
    replicas = [len({copy.tobytes() for copy in copies}) == 1 for _, copies in ours.last]
    finite = all(np.isfinite(array).all() for step in ours.losses for array in step)
    return {
        "same bits": bits[0] == bits[1],
        "replicas agree": all(replicas),
        "finite": bool(finite),
        "after one step": _difference(ours.first, stock.first),
        "at the end": _difference(ours.last, stock.last),
    }


def _difference(ours, stock):
    """The largest difference of a parameter, as a share of that parameter's largest value."""
    found = [0.0]
    for (_, (got, *_)), (_, (want, *_)) in zip(ours, stock):
        got, want = got.astype("float64"), want.astype("float64")
        found.append(float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)))
    return max(found)


def _compare(name, ks):
    import mxnet as mx

    import gluonpar

    if name == "fcn_as_one":
        one = run(name, 1, STOCK)
        for k in ks:
            found = compared(run(name, k, TRAINER), one)
            print(json.dumps({"k": k, "way": "one device", **found}), flush=True)
        return
    for k, way in zip(ks, itertools.cycle(ways(name))):
        # The contexts have their share of the processors from here on: some operators add in an
        # order that depends on the number of threads.
        gluonpar.allreduce([mx.nd.zeros((1,), ctx=mx.cpu(i)) for i in range(k)])
        found = compared(run(name, k, way), run(name, k, STOCK))
        print(json.dumps({"k": k, "way": way.name, **found}), flush=True)


def child(name, *arguments, timeout=600):
    """Run this file in a process of its own; return what its lines of JSON hold."""
    command = [sys.executable, __file__, name, *map(str, arguments)]
    environment = dict(os.environ)
    # Several networks, one after another, would fill all of gluonpar's 256 workspaces. With 1
    # or 4 of them MXNet's SyncBatchNorm stands still.
    if "--times" not in arguments:
        environment["MXNET_CPU_TEMP_COPY"] = "256" if name == "ssd_contrib" else "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _seconds(name, way):
    """The median time of a step on two devices, without the first, over three runs."""
    steps = [second for _ in range(3) for second in run(name, 2, way).seconds[1:]]
    print(json.dumps({"seconds": float(np.median(steps))}))


def _table():
    print("| program | lines changed | two devices | four devices | time of a step: stock, ours |")
    print("|---|---|---|---|---|")
    for name in [*ALIKE, "ssd_contrib"]:
        found = child(name, 2, *([4] if name in ALIKE else []))
        cells = [_said([line for line in found if line["k"] == k]) for k in (2, 4)]
        more = next(names[name] for names in PROGRAMS.values() if name in names)
        what = program(name).__doc__.split("\n")[0].rstrip(".")
        changed = f"1; {more}" if more else "1"
        print(f"| {what} | {changed} | {cells[0]} | {cells[1]} | {_times(name)} |", flush=True)


def _times(name):
    if name.endswith("_synchronised") or name == "ssd_contrib":
        return ""  # stock has no such layer, or stands still without gluonpar's workspaces
    ours = "trainer" if TRAINER in ways(name) else "kvstore"
    found = [[child(name, "--times", how)[0]["seconds"] for how in ("stock", ours)] for _ in "123"]
    stock, ours = 1000 * np.median(found, axis=0)
    return f"{stock:.0f} ms, {ours:.0f} ms"


def _said(lines):
    if not lines:
        return ""
    if all(line["same bits"] for line in lines):
        return "same bits"
    worst = [max(line[when] for line in lines) for when in ("after one step", "at the end")]
    return f"{worst[0]:.0e} after one step, {worst[1]:.0e} at the end"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", choices=NAMES, help="of the program (all: the table)")
    parser.add_argument("devices", nargs="*", type=int, help="numbers of devices")
    parser.add_argument("--times", choices=("stock", "kvstore", "trainer"))
    arguments = parser.parse_args()
    if arguments.name is None:
        _table()
    elif arguments.times == "stock":
        _seconds(arguments.name, AS_SHIPPED)
    elif arguments.times:
        import gluonpar  # noqa: F401

        _seconds(arguments.name, {"kvstore": KVSTORE, "trainer": TRAINER}[arguments.times])
    else:
        _compare(arguments.name, arguments.devices)


if __name__ == "__main__":
    main()
