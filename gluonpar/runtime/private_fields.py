"""The private fields and functions of MXNet's Python classes that gluonpar uses, by public names.

MXNet 1.9.1 is the last release, so they stay. Lists and dicts are the objects' own, not copies.
"""

from __future__ import annotations

import contextlib
import functools
from operator import attrgetter, methodcaller
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.contrib import estimator

# Of a gluon.Parameter:
values = attrgetter("_data")  # its arrays by device; None if it is not initialised
grads = attrgetter("_grad")  # its gradients by device; None if it has none
stype, grad_stype = attrgetter("_stype"), attrgetter("_grad_stype")  # storage types of these
awaits_shape = attrgetter("_deferred_init")  # not empty if a forward pass will initialise it
trainer = attrgetter("_trainer")  # the Trainer that updates it, or None
differentiable = attrgetter("_differentiable")  # False for running statistics

# Of a gluon.Block: its direct children, by name, and its parameters by their place in the block, as
# ``save_parameters`` names them.
children, params_by_place = attrgetter("_children"), methodcaller("_collect_params_with_prefix")
alias = methodcaller("_alias")  # with a number, the prefix of a block that is given none

# Of a gluon.Trainer:
params = attrgetter("_params")  # a list; the optimizer's indices are its indices
optimizer = attrgetter("_optimizer")
updaters = attrgetter("_updaters")  # by device; they apply the optimizer and hold its states

# Of a Module: its kvstore, its contexts, and what updates its parameters, None at first.
kvstore, module_contexts, updater = map(attrgetter, ("_kvstore", "_context", "_updater"))

# Of an mx.optimizer.Optimizer:
update_counts = attrgetter("_index_update_count")  # by the parameter's index
update_counts_by_device = attrgetter("_all_index_update_counts")  # the same by the device's number

# Functions of MXNet for :func:`around`: the name, and the classes or modules that have it.
INITIALISES = "_init_impl", [gluon.Parameter]  # sets the first values
SETS_VALUES = "set_data", [gluon.Parameter]  # sets other values; load_parameters calls it
ALLOCATES_GRADIENTS = "_init_grad", [gluon.Parameter]
CASTS = "cast", [gluon.Parameter]  # makes other arrays
MAKES_TRAINER = "__init__", [gluon.Trainer]
PREPARES_MODULE = "init_optimizer", [mx.mod.Module]  # makes its kvstore and optimizer
CREATES_KVSTORE = "_create_kvstore", [mx.model]  # of a FeedForward
MAKES_GRAPH = "__init__", [mx.nd.CachedOp]  # of a hybridized block: (graph, symbol, flags)
STEPS_ESTIMATOR = "batch_end", [estimator.GradientUpdateHandler]  # by the number of losses
BUILDS_GRAPH = "_build_cache", [gluon.HybridBlock]


def around(function: tuple[str, list]) -> Callable[[Callable], Callable]:
    """Have the decorated ``replacement(original, *args)`` called in place of ``function``."""
    name, owners = function
    original = getattr(owners[0], name)

    def decorate(replacement: Callable) -> Callable:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        for owner in owners:
            setattr(owner, name, called)
        return replacement

    return decorate


def static_params(block: gluon.HybridBlock) -> set[gluon.Parameter]:
    """Return the parameters of the block's graph, if it was made with ``static_shape``."""
    if block._cached_op is None or not dict(block._flags).get("static_shape"):
        return set()
    return {param for is_data, param in block._cached_op_args if not is_data}


def keep_no_arrays(block: gluon.HybridBlock) -> None:
    """Make a block's graph anew, with all parameters as data, of which it keeps no arrays."""
    block._cached_op = mx.nd.CachedOp(block._cached_graph[1], block._flags)


@contextlib.contextmanager
def graph_traced_anew(block: gluon.HybridBlock) -> Iterator[None]:
    """In this context, let the block show a graph that is traced now, if it has one."""
    traced = block._cached_graph
    if traced:
        block._cached_graph = traced[0], block(*traced[0])
    try:
        yield
    finally:
        block._cached_graph = traced


def forget_parent(block: gluon.Block) -> None:
    """Have a block keep no reference to the block in whose scope it was called last."""
    block._scope._old_scope = None


def forget_kvstore_values(trainer: gluon.Trainer) -> None:
    """Have a Trainer give its kvstore the present weights, if it updates by the kvstore."""
    if trainer._kv_initialized and trainer._update_on_kvstore:
        trainer._reset_kvstore()


def begin_step(optimizer: mx.optimizer.Optimizer, indices: Iterable[int]) -> None:
    """Have the next update of each of these parameters use the same learning rate.

    MXNet's schedules read the largest count of any parameter. If parameters were left out of
    earlier steps, that count would change between the updates of one step.
    """
    counts, first = optimizer._index_update_count, optimizer.begin_num_update
    numbers = [counts.get(i, first) + 1 for i in indices]
    optimizer.num_update = max([optimizer.num_update, *numbers])


def count_updates(
    optimizer: mx.optimizer.Optimizer, indices: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Count an update of each parameter; return its learning rate and weight decay, by index."""
    optimizer._update_count(indices)
    return dict(zip(indices, zip(optimizer._get_lrs(indices), optimizer._get_wds(indices))))


def onnx_graph() -> type:
    """Return the class of MXNet that makes an ONNX graph; imports ``onnx``."""
    from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph

    return MXNetGraph
