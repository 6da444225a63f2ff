"""Copies between GPUs, as counters() of the simulated driver counts them."""

import mxnet as mx
import pytest
from contexts import contexts
from cuda_sim.environment import counters, reset

from gluonpar import allreduce


@pytest.mark.parametrize("algorithm, messages", [("star", 6), ("tree", 6), ("balanced", 24)])
def test_all_copies_between_gpus_are_direct(algorithm, messages):
    data = [mx.nd.ones((4096,), ctx=c) for c in contexts(4)]
    allreduce(data, algorithm)  # enables peer access, and allocates
    mx.nd.waitall()
    reset()
    allreduce(data, algorithm)
    mx.nd.waitall()
    counted = counters()
    direct, staged = (counted.get(f"peer {way}") for way in ("direct", "staged"))
    assert direct.times == messages and (staged is None or staged.times == 0)
