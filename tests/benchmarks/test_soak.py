"""A process that trains for some time stays as it was: memory, threads, files and speed."""

import json

import pytest

from tests.support.processes import run_python

STEPS_PER_SAMPLE, NUM_SAMPLES = 100, 30
ALLOWED_BYTES = 4_000_000  # in 1,000 steps: a page of memory per step
ALLOWED_SLOWDOWN = 1.25  # of the processor time, which other programs change by less

PROGRAM = f"""
import json, time
import gluonpar, mxnet as mx, numpy as np, psutil
from gluonpar import metrics

ctx, rng = [mx.cpu(0), mx.cpu(1)], np.random.default_rng(0)
mx.random.seed(0)
X, y = rng.normal(size=(8, 1, 28, 28)).astype("float32"), rng.integers(10, size=8)
start = gluonpar.init_lenet()
device_params = [gluonpar.get_params(start, c) for c in ctx]
process = psutil.Process()
for _ in range({NUM_SAMPLES}):
    cpu = time.process_time()
    for _ in range({STEPS_PER_SAMPLE}):
        losses = gluonpar.train_batch(X, y, device_params, ctx, 0.05)
    mx.nd.waitall()
    sample = {{"seconds": time.process_time() - cpu, "num_bytes": process.memory_info().rss}}
    sample.update(threads=process.num_threads(), files=process.num_fds())
    print(json.dumps({{**sample, "loss": sum(float(loss.sum().asscalar()) for loss in losses)}}))
for number, copies in enumerate(zip(*device_params)):
    metrics.check_identical(copies, f"parameter {{number}}")
"""


@pytest.mark.slow
def test_neither_memory_nor_speed_drifts_over_3000_steps():
    """The last third of the samples against the second: pools and caches fill in the first."""
    printed = run_python(PROGRAM, seconds=1800)
    samples = [json.loads(line) for line in printed.splitlines()]
    third = len(samples) // 3
    before, after = samples[third : 2 * third], samples[2 * third :]
    least = {
        key: [min(sample[key] for sample in part) for part in (before, after)]
        for key in ("num_bytes", "seconds")
    }
    print(least)  # pytest -s shows the figures that the documentation has
    assert least["num_bytes"][1] - least["num_bytes"][0] < ALLOWED_BYTES
    assert least["seconds"][1] / least["seconds"][0] < ALLOWED_SLOWDOWN
    for key in ("threads", "files"):
        assert before[0][key] == after[-1][key]
    assert samples[-1]["loss"] < samples[0]["loss"]
