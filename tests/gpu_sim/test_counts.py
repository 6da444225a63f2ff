"""How often a step copies, waits and allocates, as a GPU's driver would count it."""

import mxnet as mx
import pytest
from count_gpu_operations import lenet, per_step
from cuda_sim import counters, reset

import gluonpar
from gluonpar.training.workloads import LeNetWorkload
from tests.support.contexts import contexts

COPIES = ("peer direct", "peer staged", "ncclAllReduce", "D2D", "H2D pinned", "H2D pageable")
WAITS_AND_ALLOCATIONS = ("cudaStreamSynchronize", "cudaMalloc", "cudaHostAlloc")
LENET = 12  # waits for a stream of each GPU in LeNet's step, apart from the all-reduce


def counted(step):
    counts = per_step(step)
    return {name: counts[name] for name in (*COPIES, *WAITS_AND_ALLOCATIONS) if counts[name]}


@pytest.mark.parametrize("k", [2, 8])
def test_lenets_step_with_nccl_is_one_group_of_calls_per_gpu(k):
    calls = 8 * k  # one for each parameter, without copies; NCCL launches a group as one kernel
    want = {"H2D pinned": 2 * k, "ncclAllReduce": calls, "cudaStreamSynchronize": LENET * k + k}
    assert counted(lenet(contexts(k), "nccl")) == want


@pytest.mark.parametrize("k", [2, 8])
def test_lenets_step_with_the_tree_is_two_messages_and_an_addition_per_gpu_but_one(k):
    joins = splits = k  # of the eight gradients
    waits = LENET * k + joins + splits + 3 * (k - 1)
    want = {"H2D pinned": 2 * k, "peer direct": 2 * (k - 1), "cudaStreamSynchronize": waits}
    assert counted(lenet(contexts(k), "tree")) == want


@pytest.mark.parametrize("algorithm", ["tree", None])
@pytest.mark.parametrize("k", [2, 4])
def test_a_trainers_bucket_of_60_parameters_is_one_message_to_its_root_and_one_back(k, algorithm):
    ctx, num_params = contexts(k), 60
    params = [mx.gluon.Parameter(f"p{i}", shape=(i + 1, 3)) for i in range(num_params)]
    for param in params:
        param.initialize(ctx=ctx)
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    trainer = gluonpar.Trainer(params, optimizer, algorithm=algorithm)

    def step():
        for param in params:
            for value in param.list_data():
                value._fresh_grad = True  # as after backward
        trainer.step(1)

    updates = -(-num_params // optimizer.aggregate_num)
    if algorithm is None:  # NCCL, which waits once on each GPU
        assert counted(step) == {"cudaStreamSynchronize": 2 * k + updates}
        seen = {name: count.times for name, count in counters().items()}
        assert seen["ncclReduce"] == seen["ncclBroadcast"] == k * num_params
        return
    messages, additions = 2 * (k - 1), k - 1
    joins, splits = k + 1, 1 + (k - 1)  # of gradients, of parameters
    want = {"peer direct": messages}
    want["cudaStreamSynchronize"] = messages + additions + updates + joins + splits
    assert counted(step) == want


def test_training_copies_from_pinned_memory_and_allocates_nothing_once_it_runs(monkeypatch):
    """The next batches are queued meanwhile, so the memory in use varies until all was in use."""
    step, number, seen = LeNetWorkload.step, 0, []

    def counting(self, *batch):
        nonlocal number
        number += 1
        if number in (61, 71, 81, 91):  # no loss is read in between: see log_interval
            mx.nd.waitall()
            seen.append({name: count.times for name, count in counters().items()})
            reset()
        return step(self, *batch)

    monkeypatch.setattr(LeNetWorkload, "step", counting)
    options = {"dataset": "synthetic", "limit": 16 * 95, "device": "gpu", "verbose": False}
    gluonpar.train(2, batch_size=16, num_epochs=1, log_interval=50, **options)
    for counts in seen[1:]:
        assert counts["H2D pinned"] == 10 * 2 * 2
        # NCCL's, the conversion of the losses, and whether the first GPU's parameters are finite
        assert counts["cudaStreamSynchronize"] == 10 * (2 * (LENET + 1 + 1) + 1)
        assert not {"H2D pageable", "cudaHostAlloc"} & {*counts}
    assert any("cudaMalloc" not in counts for counts in seen[1:])
