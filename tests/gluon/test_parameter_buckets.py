"""Layout: gradients of Gluon parameters in flat buckets, and still each parameter's own."""

import gluon_runs as runs
import mxnet as mx
import numpy as np
import pytest
from gluon_runs import STATIC, contexts, give_grads, weights
from mxnet import gluon

from gluonpar import replicas
from gluonpar.gluon.parameter_buckets import Layout, check, listed
from gluonpar.gluon.trainer import Trainer
from gluonpar.runtime import memory


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 16)


def test_every_trained_parameter_is_in_one_bucket(small_buckets):
    params = weights([[1.0], [2.0, 3.0], [4.0], [5.0, 6.0, 7.0]], 2)
    params[2].grad_req = "null"
    layout = Layout(params)
    assert layout.indices == [0, 1, 3]
    assert sorted(i for bucket in layout.buckets for i in bucket.indices) == [0, 1, 3]
    assert {bucket.owner for bucket in layout.buckets} == {0, 1}
    assert layout.ctx == contexts(2)


def test_values_and_gradients_stay_what_they_were():
    params = weights([[1.0, 2.0], [3.0]], 3)
    give_grads(params, [[1.0, 2.0, 3.0], [4.0, None, 6.0]])
    before = runs.bits(params)
    layout = Layout(params)
    assert runs.bits(params) == before
    assert layout.fresh() == [[True] * 3, [True, False, True]]


def test_a_buckets_array_is_its_parameters_gradients():
    params = weights([[1.0, 2.0], [3.0]], 2)
    layout = Layout(params)
    give_grads(params, [[[4.0, 5.0], 6.0], [7.0, 8.0]])
    [bucket] = layout.buckets
    assert [grad.asnumpy().tolist() for grad in bucket.grads] == [[4, 5, 7], [6, 6, 8]]
    bucket.grads[1][:] = mx.nd.array([1.0, 2.0, 3.0])
    assert [param.list_grad()[1].asnumpy().tolist() for param in params] == [[1, 2], [3]]


def test_without_leaves_out_what_is_absent_only():
    params = weights([[1.0, 2.0], [3.0], [4.0]], 2)
    layout = Layout(params)
    assert layout.without(set()) == layout.buckets
    kept = layout.without({1})
    assert sorted(i for bucket in kept for i in bucket.indices) == [0, 2]
    for bucket in kept:
        sizes = [params[i].list_grad()[0].size for i in bucket.indices]
        assert [grad.size for grad in bucket.grads] == [sum(sizes)] * 2


def test_pinned_parameters_keep_their_arrays():
    params = weights([[1.0, 2.0], [3.0], [4.0]], 2)
    before = [memory.chunk(grad) for grad in params[1].list_grad()]
    layout = Layout(params, {params[1]})
    assert [memory.chunk(grad) for grad in params[1].list_grad()] == before
    assert [[*b.indices] for b in layout.buckets if 1 in b.indices] == [[1]]


CHANGES = {
    "cast": lambda param: param.cast("float64"),
    "freeze": lambda param: setattr(param, "grad_req", "null"),
    "add": lambda param: setattr(param, "grad_req", "add"),
    "contexts": lambda param: param.reset_ctx(contexts(3)),
    "anew": lambda param: param.initialize(ctx=contexts(2), force_reinit=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_notices_that_a_parameter_got_other_arrays(change):
    params = weights([[1.0, 2.0], [3.0]], 2)
    layout = Layout(params)
    params[0].set_data(mx.nd.array([5.0, 6.0]))
    assert layout.holds(params)
    for param in params if change == "contexts" else params[:1]:
        CHANGES[change](param)
    assert not layout.holds(params)
    assert Layout(params).holds(params)


def test_only_what_is_not_fresh_becomes_zero():
    params = weights([[1.0], [2.0]], 2)
    layout = Layout(params)
    give_grads(params, [[4.0, 5.0], [6.0, 7.0]])
    layout.mark_used()
    give_grads(params, [[1.0, None], [None, 2.0]])
    layout.zero_stale()
    grads = [[grad.asscalar() for grad in param.list_grad()] for param in params]
    assert grads == [[1, 0], [0, 2]]


@pytest.mark.parametrize("own", ["write", "add"])
def test_backward_can_be_made_to_add_and_as_the_parameter_says_again(own):
    params = weights([[1.0]], 2, grad_req=own)
    layout = Layout(params)
    layout.set_grad_req("add")
    for _ in range(2):
        give_grads(params, [[1.0, 2.0]])
    assert [grad.asscalar() for grad in params[0].list_grad()] == [2, 4]
    assert layout.fresh() == [[True, True]]
    layout.set_grad_req(None)
    assert layout.fresh() == [[True, True]]
    give_grads(params, [[1.0, 2.0]])
    want = [1, 2] if own == "write" else [3, 6]
    assert [grad.asscalar() for grad in params[0].list_grad()] == want


def test_list_grad_returns_what_backward_wrote():
    """A network that is static from its first backward on writes to the arrays of that time."""
    ctx = contexts(2)
    net = runs.mlp(ctx, hybridize=STATIC)
    params, [first, second] = list(net.collect_params().values()), runs.batches((6, 5))
    runs.backward(net, first, ctx)
    layout = Layout(params)
    assert layout.moved() == []
    runs.backward(net, second, ctx)
    assert layout.moved() == params
    plain = runs.mlp(ctx)
    runs.backward(plain, second, ctx)
    for mine, theirs in zip(params, plain.collect_params().values()):
        for a, b in zip(mine.list_grad(), theirs.list_grad()):
            np.testing.assert_allclose(a.asnumpy(), b.asnumpy(), rtol=1e-5, atol=1e-6)
    assert layout.moved() == []


def test_the_parameters_of_lists_and_dicts():
    params = weights([[1.0], [2.0]], 1)
    assert listed(params) == listed(tuple(params)) == listed({1: params[0], 2: params[1]}) == params
    assert listed(params[0]) == listed(None) == listed(5) == []
    check(params)


def test_a_trainers_buckets_hold_neighbouring_layers(monkeypatch):
    """gluon.Trainer sorts parameters by name, in which a tenth layer comes before the second."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 48)  # three layers
    net = gluon.nn.HybridSequential()
    net.add(*[gluon.nn.Dense(2, in_units=2, use_bias=False) for _ in range(12)])
    net.initialize(ctx=contexts(2))
    Trainer(net.collect_params(), "sgd")
    buckets = [memory.chunk(layer.weight.list_grad()[0]) for layer in net]
    assert buckets == [bucket for bucket in buckets[::3] for _ in range(3)]
    assert len({*buckets}) == 4
