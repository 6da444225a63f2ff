"""Copies between GPUs, and from pinned memory, as the simulated driver counts and does them."""

import mxnet as mx
import pytest
import simulated_gpus
from contexts import contexts

from gluonpar import allreduce


@pytest.mark.parametrize("algorithm, messages", [("star", 6), ("tree", 6), ("balanced", 24)])
def test_all_copies_between_gpus_are_direct(algorithm, messages):
    data = [mx.nd.ones((4096,), ctx=c) for c in contexts(4)]
    allreduce(data, algorithm)  # enables peer access, and allocates
    counts = simulated_gpus.counted(lambda: allreduce(data, algorithm))
    assert counts["peer direct"] == messages and "peer staged" not in counts


LOAD = """
import gluonpar, mxnet as mx, numpy as np
ctx = [mx.gpu(0), mx.gpu(1)]
batches = [gluonpar.split_and_load(np.full((2, 1000), i, "float32"), ctx) for i in range(200)]
print([{number for shard in shards for number in shard.asnumpy().flat} for shards in batches])
"""


def test_pinned_memory_is_not_filled_again_before_it_is_copied():
    printed = simulated_gpus.run(LOAD, delays=1)
    assert printed.strip() == str([{float(i)} for i in range(200)])
