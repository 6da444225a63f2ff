"""Time a training step in processes of its own, for the walkthrough's table of settings.

MXNet reads its settings once, and the threads of a CPU context that has computed can only be
reduced, so each setting needs a new process: ``python walkthrough_timing.py DEVICES step`` (or
``gradients``: the devices compute the gradients of their shards, which nothing reads) prints
milliseconds per step as JSON, for each of the networks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from unittest import mock
from typing import Dict, List, Mapping

BATCH_SIZE, WARM_UP, NUM_STEPS, BLOCKS = 256, 2, 4, 3
NETWORKS = ("LeNet", "perceptron")
HALF, ALL, TWO = "1 device, half of the cores", "1 device, all cores", "2 devices, all cores"
GRADIENTS = "2 devices, gradients only"
STOCK_ONE, STOCK_TWO = "1 device, MXNet's defaults", "2 devices, MXNet's defaults"
COMPARISONS = {  # what changes, and the settings before and after
    "all cores instead of half, one device": (HALF, ALL),
    "two devices instead of one, all cores": (ALL, TWO),
    "without exchange and update, two devices": (TWO, GRADIENTS),
    "gluonpar's settings, one device": (STOCK_ONE, ALL),
    "gluonpar's settings, two devices": (STOCK_TWO, TWO),
}
Times = Dict[str, Dict[str, List[float]]]  # samples in ms per step, by setting and network


def settings(cores: int) -> dict[str, tuple]:
    """Return the settings to compare on a machine with ``cores`` cores, for :func:`measure`."""
    half = {"OMP_NUM_THREADS": str(max(1, cores // 2))}
    stock = {
        "MXNET_CPU_TEMP_COPY": "4",
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=7",
        "MXNET_OMP_MAX_THREADS": half["OMP_NUM_THREADS"],
    }
    return {
        HALF: (1, "step", half),
        ALL: (1, "step", {}),
        TWO: (2, "step", {}),
        GRADIENTS: (2, "gradients", {}),
        STOCK_ONE: (1, "step", stock),
        STOCK_TWO: (2, "step", stock),
    }


def measure(settings: Mapping[str, tuple], rounds: int = 2) -> Times:
    """Return samples, each the ms per step of a few steps, of each setting and network.

    A setting is the number of devices, "step" or "gradients", and environment variables. The
    settings take turns, so that a disturbance of the machine does not affect one setting only.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in _CHANGED}
    samples: dict[str, dict[str, list]] = {name: {} for name in settings}
    for _ in range(rounds):
        for name, (num_devices, how, environment) in settings.items():
            done = subprocess.run(
                [sys.executable, __file__, str(num_devices), how],
                env={**inherited, **environment},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for network, times in json.loads(done.stdout).items():
                samples[name].setdefault(network, []).extend(times)
    return samples


# What importing gluonpar has set in the notebook's process, and what would replace it.
_CHANGED = ("MXNET_CPU_TEMP_COPY", "OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS", "GLIBC_TUNABLES")


def main(num_devices: int, how: str) -> None:
    """Print the times of one process as JSON."""
    import gluonpar
    import mxnet as mx
    import numpy as np
    from gluonpar.models.lenet import lenet
    from gluonpar.runtime import threads

    if how == "gradients":  # the same step without its last part
        mock.patch.object(gluonpar.step, "allreduce_sgd").start()

    def perceptron(X, params):
        W1, b1, W2, b2, W3, b3 = params
        hidden = mx.nd.relu(mx.nd.dot(X.reshape((len(X), -1)), W1) + b1)
        return mx.nd.dot(mx.nd.relu(mx.nd.dot(hidden, W2) + b2), W3) + b3

    widths = (784, 2048, 2048, 10)
    of_perceptron = []
    for inputs, outputs in zip(widths, widths[1:]):
        of_perceptron += [mx.nd.random.normal(scale=0.03, shape=(inputs, outputs))]
        of_perceptron += [mx.nd.zeros((outputs,))]

    ctx = [mx.cpu(i) for i in range(num_devices)]
    random = np.random.RandomState(0)
    X = random.uniform(size=(BATCH_SIZE, 1, 28, 28)).astype("float32")
    y = random.randint(10, size=BATCH_SIZE).astype("float32")
    found = {}
    models = ((lenet, gluonpar.init_lenet(scale=0.1)), (perceptron, of_perceptron))
    for name, (model, params) in zip(NETWORKS, models):
        device_params = [gluonpar.get_params(params, c) for c in ctx]
        threads.share(ctx)

        def block(num_steps, model=model, device_params=device_params):
            start = time.perf_counter()
            for _ in range(num_steps):
                gluonpar.train_batch(X, y, device_params, ctx, lr=0.01, model=model)
            mx.nd.waitall()
            return 1e3 * (time.perf_counter() - start) / num_steps

        block(WARM_UP)
        found[name] = [block(NUM_STEPS) for _ in range(BLOCKS)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
