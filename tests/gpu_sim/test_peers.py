"""GPUs that cannot copy to each other directly: what is copied, and what is said."""

import json
import os
import subprocess
import sys

import pytest
from cuda_sim.environment import environment

PROGRAM = """
import json, sys
import gluonpar
import mxnet as mx
from cuda_sim.environment import counters, reset
from gluonpar.diagnostics import doctor
from gluonpar.runtime import peers

ctx = [mx.gpu(i) for i in range(4)]
found = {"header": peers.describe(ctx)}
data = [mx.nd.ones((1000,), ctx=c) for c in ctx]
found["explain"] = str(gluonpar.explain(data))
gluonpar.allreduce(data, "tree")
mx.nd.waitall()
found["counts"] = {name: count.times for name, count in counters().items()}
assert all((array == 4).asnumpy().all() for array in data)
for topic in ("gpu", "settings"):
    texts = [f"{one.state} {one.text} {one.remedy}" for one in doctor.examine(topic)]
    found[topic] = [text for text in texts if "peer" in text or "P2P" in text]
print(json.dumps(found))
"""


def run(program=PROGRAM, variables=None, **options):
    """Run it on four GPUs; return what it prints last."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_SIM_PEERS")}
    simulated = {**environment(4, **options), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **simulated, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# The tree's messages: 1-0 and 3-2, then 2-0, each one there and one back.
@pytest.mark.parametrize(
    ("options", "variables", "staged", "pairs"),
    [
        ({}, {}, 0, []),
        ({"peers": "0-1,2-3"}, {}, 2, ["0-2", "0-3", "1-2", "1-3"]),
        ({"peers": "none"}, {}, 6, ["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"]),
        ({}, {"MXNET_ENABLE_GPU_P2P": "0"}, 6, ["MXNET_ENABLE_GPU_P2P=0"]),
    ],
    ids=str,
)
def test_copies_are_staged_where_there_is_no_peer_access_and_all_say_so(
    options, variables, staged, pairs
):
    found = run(variables=variables, **options)
    assert found["counts"].get("peer staged", 0) == staged
    assert found["counts"].get("peer direct", 0) == 6 - staged
    for text in (found["header"], found["explain"]):
        assert ("no peer access" in text) == bool(pairs)
        assert all(pair in text for pair in pairs)
    assert found["explain"].startswith("nccl")
    [of_gpus] = found["gpu"]
    if "peers" in options:
        assert of_gpus.startswith("note") and ", ".join(pairs) in of_gpus
    else:
        assert of_gpus.startswith("ok")
    assert len(found["settings"]) == len(variables)
