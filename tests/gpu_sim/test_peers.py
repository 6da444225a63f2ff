"""GPUs that cannot copy to each other directly: what is copied, and what is said."""

import json

import pytest

from tests.support import simulated_gpus

PROGRAM = """
import json
import gluonpar
import mxnet as mx
from gluonpar.diagnostics import doctor
from tests.support.simulated_gpus import counted

data = [mx.nd.ones((1000,), ctx=mx.gpu(i)) for i in range(4)]
report = {"explain": str(gluonpar.explain(data))}
gluonpar.allreduce(data)
report["counts"] = counted(lambda: gluonpar.allreduce(data, "tree"))
report["chunks"] = counted(lambda: gluonpar.allreduce(data, "balanced"))
assert all((array == 64).asnumpy().all() for array in data)
for topic in ("gpu", "settings"):
    texts = [f"{one.state} {one.text} {one.remedy}" for one in doctor.examine(topic)]
    report[topic] = [text for text in texts if "peer" in text or "P2P" in text]
print(json.dumps(report))
"""


# The tree's messages: 1-0 and 3-2, then 2-0, each one there and one back.
@pytest.mark.parametrize(
    ("options", "variables", "staged", "pairs"),
    [
        ({}, {}, 0, []),
        ({"peers": "0-1,2-3"}, {}, 2, ["0-2", "0-3", "1-2", "1-3"]),
        ({"peers": "none"}, {}, 6, ["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"]),
        ({}, {"MXNET_ENABLE_GPU_P2P": "0"}, 6, ["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"]),
    ],
    ids=str,
)
def test_copies_are_staged_where_there_is_no_peer_access_and_all_say_so(
    options, variables, staged, pairs
):
    printed = simulated_gpus.run(PROGRAM, num_gpus=4, variables=variables, **options)
    report = json.loads(printed.splitlines()[-1])
    assert report["counts"].get("peer staged", 0) == staged
    assert report["counts"].get("peer direct", 0) == 6 - staged
    assert sum(report["chunks"].get(f"peer {how}", 0) for how in ("staged", "direct")) == 24
    assert ("no peer access" in report["explain"]) == bool(pairs)
    assert all(pair in report["explain"] for pair in pairs)
    assert report["explain"].startswith("nccl")
    [of_gpus] = report["gpu"]
    if "peers" in options:
        assert of_gpus.startswith("note") and ", ".join(pairs) in of_gpus
    else:
        assert of_gpus.startswith("ok")
    assert len(report["settings"]) == len(variables)
