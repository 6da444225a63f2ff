"""The choice on GPUs without NCCL: links are measured once a process, and only then."""

import json
import os
import subprocess
import sys

import pytest
from cuda_sim.environment import environment

PROGRAM = """
import json, threading
import gluonpar
import mxnet as mx
from cuda_sim.environment import counters, reset

def copies():
    mx.nd.waitall()
    direct = counters().get("peer direct")
    found = direct.times if direct else 0
    reset()
    return found

ctx = [mx.gpu(i) for i in range(3)]
data = [mx.nd.ones((1000,), ctx=c) for c in ctx]
weights = [mx.nd.ones((4,), ctx=c) for c in ctx]
for weight in weights:
    weight.attach_grad()
copies()
with mx.autograd.record():
    losses = [(weight * weight).sum() for weight in weights]
    choices = [str(gluonpar.explain(data))]
    found = {"first": copies()}
    losses = [loss * 2 for loss in losses]
for loss in losses:
    loss.backward()
gradients = [weight.grad for weight in weights]
gluonpar.allreduce(gradients)
assert all((gradient == 12).asnumpy().all() for gradient in gradients)
copies()
with mx.util.np_shape(True), mx.util.np_array(True):
    choices.append(str(gluonpar.explain([mx.nd.ones((9,), ctx=c) for c in ctx])))
calls = [threading.Thread(target=gluonpar.explain, args=(data,)) for _ in range(4)]
for call in calls:
    call.start()
for call in calls:
    call.join()
found["later"] = copies()
found["choices"] = choices
print(json.dumps(found))
"""


def run(*command, **variables):
    """Run it on three GPUs, of which two cannot access each other, so that NCCL is not chosen."""
    simulated = {**environment(3, peers="0-1,1-2"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **simulated, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_links_are_measured_at_the_first_choice_only():
    found = json.loads(run("-c", PROGRAM, GLUONPAR_LINKS="").splitlines()[-1])
    assert found["first"] > 12 and found["later"] == 0
    for choice in found["choices"]:
        assert "measured" in choice and "GB/s" in choice


@pytest.mark.parametrize("variable", ["GLUONPAR_LINKS=off", "MXNET_ENFORCE_DETERMINISM=1"])
def test_nothing_is_measured_where_it_is_turned_off_or_results_must_repeat(variable):
    name, value = variable.split("=")
    found = json.loads(run("-c", PROGRAM, **{"GLUONPAR_LINKS": "", name: value}).splitlines()[-1])
    assert (found["first"], found["later"]) == (0, 0)
    assert all("assumed" in choice for choice in found["choices"])


def test_what_bench_has_saved_is_used_and_nothing_is_measured(tmp_path):
    path = str(tmp_path / "links.json")
    few = ("--max-bytes", "64K", "--iters", "2", "--warmup", "1", "--json", path)
    table = run("-m", "gluonpar", "bench", "--links", "--device", "gpu", "--num-gpus", "3", *few)
    assert "gpu(2)" in table and "0-2" in table  # who has no peer access
    found = json.loads(run("-c", PROGRAM, GLUONPAR_LINKS=path).splitlines()[-1])
    assert (found["first"], found["later"]) == (0, 0)
    assert all(path in choice for choice in found["choices"])
