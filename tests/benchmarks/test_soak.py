"""A process that trains for some time stays as it was: memory, threads, files and speed."""

import json

import pytest
from processes import run_python

STEPS_PER_SAMPLE, NUM_SAMPLES = 100, 30
ALLOWED_BYTES = 4_000_000  # in 1,000 steps: a page of memory per step
ALLOWED_SLOWDOWN = 1.25  # of the processor time, which other programs change by less

PROGRAM = f"""
import json, time
import gluonpar, mxnet as mx, numpy as np, psutil
from gluonpar import metrics

ctx, rng = [mx.cpu(0), mx.cpu(1)], np.random.default_rng(0)
mx.random.seed(0)
X, y = rng.normal(size=(32, 1, 28, 28)).astype("float32"), rng.integers(10, size=32)
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


def drift(samples):
    """Compare the last third of the samples with the second: pools and caches fill in the first."""
    third = len(samples) // 3
    before, after = samples[third : 2 * third], samples[2 * third :]

    def least(part, key):
        return min(sample[key] for sample in part)

    return {
        "num_bytes": least(after, "num_bytes") - least(before, "num_bytes"),
        "slowdown": least(after, "seconds") / least(before, "seconds"),
        "threads": after[-1]["threads"] - before[0]["threads"],
        "files": after[-1]["files"] - before[0]["files"],
    }


@pytest.mark.slow
def test_neither_memory_nor_speed_drifts_over_3000_steps():
    printed = run_python(PROGRAM, seconds=1800)
    samples = [json.loads(line) for line in printed.splitlines()]
    changes = drift(samples)
    print(changes)  # pytest -s shows the figures that the documentation has
    assert changes["num_bytes"] < ALLOWED_BYTES, changes
    assert changes["slowdown"] < ALLOWED_SLOWDOWN, changes
    assert changes["threads"] == changes["files"] == 0, changes
    assert samples[-1]["loss"] < samples[0]["loss"]
