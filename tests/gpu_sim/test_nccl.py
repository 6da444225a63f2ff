"""NCCL on simulated GPUs: what it is called for, what it is not, and what a fault leads to."""

import gc
import threading

import mxnet as mx
import numpy as np
import pytest

import gluonpar
from gluonpar import collectives
from gluonpar.runtime import nccl
from tests.support.contexts import contexts
from tests.support.simulated_gpus import counted


def ones(ctx, shape=(3,)):
    return [mx.nd.ones(shape, ctx=context) for context in ctx]


def test_communicators_and_streams_are_made_once_per_set_of_gpus():
    ctx = [mx.gpu(i) for i in (1, 3, 5)]
    first = counted(lambda: gluonpar.allreduce(ones(ctx), "nccl"))
    assert first["ncclCommInitAll"] == 1
    for same in (ctx, ctx[::-1]):
        counts = counted(lambda same=same: gluonpar.allreduce(ones(same), "nccl"))
        assert "ncclCommInitAll" not in counts and "cudaStreamCreate" not in counts


def test_sets_of_gpus_that_overlap_are_summed_at_once_from_several_threads():
    """Groups launched in another order on another GPU would wait for each other."""
    sets = [(0, 1), (1, 2), (2, 0), (0, 1, 2), (2, 3), (3, 0)]
    results = {}

    def repeat(ids):
        data = [mx.nd.full((1000,), i, ctx=mx.gpu(i)) for i in ids]
        for _ in range(20):
            gluonpar.allreduce(data, "nccl", op="mean")
        results[ids] = [array.asnumpy() for array in data]

    threads = [threading.Thread(target=repeat, args=(ids,)) for ids in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ids in sets:
        for array in results[ids]:
            np.testing.assert_allclose(array, np.mean(ids), rtol=1e-6)


@pytest.mark.parametrize(
    "ctx, words",
    [
        ([mx.cpu(0), mx.gpu(1)], r"GPU contexts only, got cpu\(0\)"),
        ([mx.gpu(1), mx.gpu(1)], r"got gpu\(1\) more than once"),
    ],
)
def test_what_nccl_cannot_do_is_refused_and_not_chosen(ctx, words):
    data = ones(ctx)
    with pytest.raises(ValueError, match=f"algorithm='nccl' .*{words}"):
        gluonpar.allreduce(data, "nccl")
    assert gluonpar.explain(data).algorithm != "nccl"
    assert "nccl" not in collectives.usable(ctx)
    gluonpar.allreduce(data)
    assert [array.asnumpy().tolist() for array in data] == [[2, 2, 2]] * 2


def test_nccl_is_refused_where_a_launch_waits_for_its_kernel(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match="algorithm='nccl' .*CUDA_LAUNCH_BLOCKING"):
        gluonpar.allreduce(ones(contexts(2)), "nccl")
    assert gluonpar.explain(ones(contexts(2))).algorithm != "nccl"


def test_an_error_is_raised_in_nccls_words_at_the_next_wait(monkeypatch):
    data = ones(contexts(2))
    mx.nd.waitall()
    with monkeypatch.context() as patch:
        patch.setitem(nccl.DTYPES, "float32", 99)
        gluonpar.allreduce(data, "nccl")
        with pytest.raises(mx.MXNetError, match="NCCLError: NCCL: invalid argument"):
            data[1].wait_to_read()
    mx.nd.waitall()
    for array in data:
        array[:] = 2
    gluonpar.allreduce(data, "nccl")
    assert [array.asnumpy().tolist() for array in data] == [[4, 4, 4]] * 2


def test_nothing_is_allocated_while_the_kernels_of_a_group_are_launched(monkeypatch):
    """Freeing memory waits for a GPU, on which a kernel may wait for one not yet launched."""
    library, waited, made = nccl._library(), [], []

    def allocate():
        made.append(mx.nd.empty((1 << 20,), ctx=mx.gpu(0)))

    def end_group():
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join(0.3)
        waited.append((thread, thread.is_alive(), gc.isenabled()))
        return library.ncclGroupEnd()

    class Library:
        ncclGroupEnd = staticmethod(end_group)

        def __getattr__(self, name):
            return getattr(library, name)

    monkeypatch.setattr(nccl, "_library", Library)
    data = ones(contexts(2))
    gluonpar.allreduce(data, "nccl")
    assert [array.asnumpy().tolist() for array in data] == [[2, 2, 2]] * 2
    ((thread, blocked, collects),) = waited
    thread.join(60)
    assert blocked and not collects and len(made) == 1
    assert gc.isenabled() and not nccl._allocations_lock.locked()
