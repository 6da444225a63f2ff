"""Sums over the processes of a job, each with arrays on simulated GPUs: what is copied and called.

Every rank prints what it counted; the job fails if a value is wrong.
"""

import ast
import os
import sys
import textwrap

import pytest

from tests.support.mpi_jobs import mpirun, needs_mpi, succeed

pytestmark = needs_mpi

START = """
import os, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1 + rank]
import gluonpar, mxnet as mx, numpy as np
from gluonpar import cluster
from gluonpar.collectives.exchange import Exchange, in_buckets
from cuda_sim import counters
from tests.support.simulated_gpus import counted

def arrays(dtype="float32", sizes=(1000, 7, 7, 70000), ctx=mx.gpu(0)):
    return [mx.nd.full((size,), rank + 1 + i, ctx, dtype) for i, size in enumerate(sizes)]

def check(sums):
    for i, array in enumerate(sums):
        assert (array.asnumpy() == 2 * i + 3).all(), array
"""


def run(program, *visible, **environment):
    """Run the program on as many ranks as there are ``visible``; return what each printed."""
    source = START + textwrap.dedent(program)
    command = [sys.executable, "-c", source, *visible]
    path = os.pathsep.join(sys.path)
    out, _ = succeed(mpirun((len(visible), command), PYTHONPATH=path, **environment))
    return [ast.literal_eval(line) for line in out.splitlines()]


def test_pinned_memory_is_kept():
    """Four arrays per size are made when first used, so that four messages can be under way."""
    program = """
    lists = [arrays(sizes=sizes) for sizes in ((900,), (901,), (8, 3, 3, 70000), (900,))]

    def step():
        for some in lists:
            for i, array in enumerate(some):
                array[:] = rank + 1 + i
            cluster.allreduce(some)
        for some in lists:
            check(some)
        cluster.allreduce(lists[0], compression="fp16")
        cluster.broadcast(lists[1])
    print([counted(step) for _ in range(5)][-1])
    """
    for counts in run(program, "0,1", "0,1"):
        assert counts["D2H pinned"] == counts["H2D pinned"] == 7 + 2
        assert not {"cudaHostAlloc", "cudaFreeHost", "cudaMalloc", "ncclAllReduce"} & set(counts)


def test_one_gpu_per_rank_is_summed_by_nccl_without_copies():
    program = """
    data = arrays()
    first = counted(lambda: cluster.allreduce(data))
    check(data)
    again = [arrays(), arrays("int32", (5,)), arrays("float64", (5,))]
    second = counted(lambda: [cluster.allreduce(some) for some in again])
    for some in again:
        check(some)
    print((first, second))
    """
    for first, second in run(program, "0", "1"):
        assert first["ncclCommInitRank"] == 1 and first["ncclAllReduce"] == 4
        # Full of the values: a kernel per array. No copy, and no communicator, stream or memory.
        assert second["ncclAllReduce"] == 6
        allowed = {"ncclAllReduce", "nccl", "cudaStreamSynchronize", "kernel"}
        assert set(second) <= allowed


@pytest.mark.parametrize("visible", ["01", "00"], ids=["a GPU each", "one GPU for both"])
def test_what_nccl_is_not_for_goes_through_the_host(visible):
    program = """
    calls = [
        lambda: cluster.allreduce(data, compression="fp16"),
        lambda: cluster.allreduce(data, by_nccl=False),
        lambda: Exchange([mx.gpu(0)], "star").allreduce(in_buckets([[array] for array in data])),
    ]
    for call in calls if rank_sees_its_own else [lambda: cluster.allreduce(data)]:
        data = arrays()
        counts = counted(call)
        check(data)
        assert counts["D2H pinned"] == counts["H2D pinned"] == 4
        assert "ncclAllReduce" not in counts
    for data in (arrays("float16"), arrays(ctx=mx.cpu(0))):
        assert "ncclAllReduce" not in counted(lambda: cluster.allreduce(data))
        check(data)
    print(True)
    """
    program = program.replace("rank_sees_its_own", str(visible[0] != visible[1]))
    assert run(program, *visible) == [True, True]


def test_cudnns_dropout_has_other_masks_on_each_rank():
    """Its seed is C's rand(); MXNet's own random numbers are in test_programs.py."""
    program = """
    gluonpar.get_params([mx.nd.ones((1,))], mx.gpu(0))
    print(mx.nd.Dropout(mx.nd.ones((64,), mx.gpu(0)), mode="always").asnumpy().tolist())
    """
    first, second = run(program, "0", "1")
    assert first != second


@pytest.mark.parametrize("visible", ["01", "00"], ids=["a GPU each", "one GPU for both"])
def test_values_that_are_set_are_compared_on_gpus(visible):
    """Equal ones are no error, and cost a copy of each parameter; others name the parameter."""
    program = """
    def step(value):
        weight.set_data(mx.nd.array([value]))
        with mx.autograd.record():
            loss = weight.data() * 2
        loss.backward()
        trainer.step(2)
        mx.nd.waitall()

    weight = mx.gluon.Parameter("w", shape=(1,))
    weight.initialize(ctx=mx.gpu(0))
    trainer = gluonpar.Trainer([weight], "sgd")
    step(3.0)
    try:
        step(4.0 + rank)
    except mx.MXNetError as error:
        print("value of w (checksum) is" in str(error))
    """
    assert run(program, *visible) == [True, True]
