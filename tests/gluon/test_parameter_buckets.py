"""A Trainer's buckets: which parameters they hold, and when they are made anew."""

import mxnet as mx
import pytest
from gluon_runs import contexts, give_grads, weights
from mxnet import gluon

from gluonpar import replicas
from gluonpar.collectives.exchange import Exchange
from gluonpar.gluon.parameter_buckets import Layout


def laid_out(params, in_order=None):
    return Layout(params, in_order or params, Exchange(params[0].list_ctx()))


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
