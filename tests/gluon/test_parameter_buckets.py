"""A Trainer's buckets: which parameters they hold, in which order, and who updates them."""

import mxnet as mx
import pytest
from gluon_runs import contexts, give_grads, weights
from mxnet import gluon

from gluonpar import replicas
from gluonpar.collectives.exchange import Exchange
from gluonpar.gluon.parameter_buckets import Layout, check, listed


def laid_out(params, in_order=None):
    return Layout(params, in_order or params, Exchange(params[0].list_ctx()))


def test_every_trained_parameter_is_in_one_bucket(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 16)
    params = weights([[1.0], [2.0, 3.0], [4.0], [5.0, 6.0, 7.0]], 2)
    params[2].grad_req = "null"
    layout = laid_out(params)
    give_grads(params[:2], [[1, None], [2, 3]])
    assert [copies.index for bucket in layout.buckets(True) for copies in bucket.copies] == [1, 0]
    give_grads([params[3]], [[4, 5]])
    buckets = layout.buckets(True)
    assert [copies.index for bucket in buckets for copies in bucket.copies] == [3, 1, 0]
    assert {bucket.root for bucket in buckets} == {0, 1}
    copies = buckets[-1].copies[-1]
    assert copies == (0, params[0]._data, params[0]._grad, [True, False])
    assert copies.stale == params[0]._grad[1:]


CHANGES = {
    "cast": lambda param: param.cast("float64"),
    "freeze": lambda param: setattr(param, "grad_req", "null"),
    "add": lambda param: setattr(param, "grad_req", "add"),
    "contexts": lambda param: param.reset_ctx(contexts(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_notices_that_a_parameter_is_of_another_kind(change):
    params = weights([[1.0, 2.0], [3.0]], 2)
    layout = laid_out(params)
    params[0].set_data(mx.nd.array([5.0, 6.0]))
    params[1].initialize(ctx=contexts(2), force_reinit=True)
    assert layout.is_current()
    for param in params if change == "contexts" else params[:1]:
        CHANGES[change](param)
    assert not layout.is_current()
    assert laid_out(params).is_current()


def test_the_parameters_of_lists_and_dicts():
    params = weights([[1.0], [2.0]], 1)
    assert listed(params) == listed(tuple(params)) == listed({1: params[0], 2: params[1]}) == params
    assert listed(params[0]) == listed(None) == listed(5) == []
    check(params)


def test_buckets_hold_neighbouring_layers(monkeypatch):
    """gluon.Trainer sorts parameters by name, in which a tenth layer comes before the second."""
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 48)  # three layers
    net = gluon.nn.HybridSequential()
    net.add(*[gluon.nn.Dense(2, in_units=2, use_bias=False) for _ in range(12)])
    net.initialize(ctx=contexts(2))
    params = net.collect_params()
    by_name = [params[name] for name in sorted(params)]
    give_grads(by_name, [[1, 1]] * 12)
    buckets = laid_out(by_name, list(params.values())).buckets(ignore_stale_grad=False)
    layers = [[by_name[copies.index] for copies in bucket.copies] for bucket in buckets]
    in_turn = [layer.weight for layer in net][::-1]
    assert layers == [in_turn[i : i + 3] for i in (0, 3, 6, 9)]
