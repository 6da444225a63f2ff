"""A Trainer's buckets are made anew when a parameter has changed in kind."""

import mxnet as mx
import pytest
from gluon_runs import contexts, weights

from gluonpar.collectives.exchange import Exchange
from gluonpar.gluon.parameter_buckets import Layout


def laid_out(params):
    return Layout(params, params, Exchange(params[0].list_ctx()))


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
