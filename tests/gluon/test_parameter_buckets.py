"""A Trainer's buckets: which parameters they hold, in which order, and who updates them."""

from gluon_runs import contexts, weights
from mxnet import gluon

from gluonpar import replicas
from gluonpar.gluon.parameter_buckets import Layout, check, listed


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
    layout = Layout(by_name, list(params.values()))
    buckets = layout.buckets({i: [True] * 2 for i in range(12)}, range(12))
    found = [[by_name[copies.index] for copies in bucket.copies] for bucket in buckets]
    in_turn = [layer.weight for layer in net][::-1]
    assert found == [in_turn[i : i + 3] for i in (0, 3, 6, 9)]
