"""The choice: the host's memory, NCCL, or the tree for small arrays and the ring for large ones."""

import mxnet as mx
import pytest

import gluonpar
from gluonpar.collectives import ALGORITHMS, EXECUTORS, usable
from gluonpar.collectives.choice import choose
from gluonpar.collectives.exchange import Exchange
from gluonpar.collectives.executor import named
from tests.support.cards import formula

LENET = 516_272
CPUS, GPUS = ([make(i) for i in range(9)] for make in (mx.cpu, mx.gpu))


@pytest.fixture(params=["is not installed", ""])
def refusal(request, monkeypatch):
    nccl = EXECUTORS["nccl"]._replace(refusal=lambda ctx: request.param)
    monkeypatch.setitem(EXECUTORS, "nccl", nccl)
    return request.param


@pytest.mark.parametrize("num_bytes", [4, LENET, 1 << 30])
def test_gpus_take_nccl_where_it_takes_them(num_bytes, refusal):
    chosen = choose(GPUS[:4], num_bytes)
    assert (chosen.algorithm == "nccl") == (not refusal)
    assert refusal in chosen.why


@pytest.mark.parametrize("k", range(2, 10))
@pytest.mark.parametrize("first", [mx.cpu(0), mx.gpu(0)])
@pytest.mark.parametrize("refusal", ["is not installed"], indirect=True)
@pytest.mark.usefixtures("refusal")
def test_without_nccl_it_is_the_faster_of_tree_and_ring_by_their_cards(k, first):
    def seconds(name, num_bytes):
        messages = len(ALGORITHMS[name](k))
        return messages * 1e-4 + formula(name, "critical path", k) * num_bytes / 1e10

    for num_bytes in (4, LENET, *(1 << log for log in range(14, 31))):
        fastest = min(("tree", "ring"), key=lambda name: seconds(name, num_bytes))
        assert choose([first, *GPUS[1:k]], num_bytes).algorithm == fastest


def test_a_bucket_has_the_bytes_of_all_its_lists():
    mixed = Exchange([CPUS[0], GPUS[1]])  # not for NCCL; from 2 MB on the ring
    data = [mx.nd.ones((250_000,), ctx=CPUS[0])] * 2
    assert [mixed.chosen([data] * n) for n in (1, 2)] == [*map(named, ("tree", "ring"))]


def test_cpu_contexts_take_the_host_and_one_array_the_plan_without_a_hop():
    assert choose(CPUS, LENET).algorithm == "host"
    assert choose(GPUS[:1], LENET).algorithm == "star"
    assert ALGORITHMS["star"](1) == []


def test_explain_says_it_and_names_are_checked_before_anything_is_summed():
    data = [mx.nd.ones((2,), ctx=context) for context in CPUS[:2]]
    assert str(gluonpar.explain(data)).startswith("host: ")
    assert "host" in usable(CPUS) and "host" not in usable([CPUS[0], GPUS[1]])
    with pytest.raises(ValueError, match=r"algorithm='host' .*CPU contexts only, got gpu\(1\)"):
        gluonpar.collectives.check_algorithm("host", [CPUS[0], GPUS[1]])
    with pytest.raises(ValueError, match=r"algorithm='nccl' .*GPU contexts only, got cpu\(0\)"):
        gluonpar.allreduce(data, "nccl")
    assert [array.asnumpy().tolist() for array in data] == [[1, 1], [1, 1]]
