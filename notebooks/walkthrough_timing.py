"""Time a training step in processes of its own, for the walkthrough's table of settings.

MXNet reads its settings once, and the threads of a CPU context that has computed can only be
reduced, so each setting needs a new process: ``python walkthrough_timing.py DEVICES together`` (or
``alone``: each device takes its own steps on its shard, without an exchange) prints milliseconds
per step as JSON, for each of the networks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Mapping

BATCH_SIZE, WARM_UP, NUM_STEPS, BLOCKS = 256, 3, 6, 2


def measure(settings: Mapping[str, tuple], rounds: int = 2) -> dict[str, dict[str, float]]:
    """Return the median ms per step of each setting, by its name, and network.

    A setting is the number of devices, "together" or "alone", and environment variables. The
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
    return {
        name: {network: statistics.median(times) for network, times in networks.items()}
        for name, networks in samples.items()
    }


# What importing gluonpar has set in the notebook's process, and what would replace it.
_CHANGED = ("MXNET_CPU_TEMP_COPY", "OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS", "GLIBC_TUNABLES")


def main(num_devices: int, how: str) -> None:
    """Print the times of one process as JSON."""
    import gluonpar
    import mxnet as mx
    import numpy as np
    from gluonpar.models.lenet import lenet
    from gluonpar.runtime import threads

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
    for name, model, params in (
        ("LeNet", lenet, gluonpar.init_lenet(scale=0.1)),
        ("perceptron", perceptron, of_perceptron),
    ):
        device_params = [gluonpar.get_params(params, c) for c in ctx]
        threads.share(ctx)
        steps = [(X, y, device_params, ctx)]
        if how == "alone":
            shards = zip(np.array_split(X, num_devices), np.array_split(y, num_devices))
            steps = [(*s, [r], [c]) for s, r, c in zip(shards, device_params, ctx)]

        def block(num_steps, steps=steps, model=model):
            start = time.perf_counter()
            for _ in range(num_steps):
                for step in steps:
                    gluonpar.train_batch(*step, lr=0.01, model=model)
            mx.nd.waitall()
            return 1e3 * (time.perf_counter() - start) / num_steps

        block(WARM_UP)
        found[name] = [block(NUM_STEPS) for _ in range(BLOCKS)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
