"""The private fields and functions of MXNet's Python classes that gluonpar uses, by public names.

MXNet 1.9.1 is the last release, so these names stay. A field that is a list or a dict is returned
itself, not as a copy.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from operator import attrgetter, methodcaller
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.contrib import estimator

# Fields of gluon.Parameter:
values = attrgetter("_data")  # its arrays by device; None if it is not initialised
grads = attrgetter("_grad")  # its gradients by device; None if it has none
stype, grad_stype = attrgetter("_stype"), attrgetter("_grad_stype")  # storage types of these
awaits_shape = attrgetter("_deferred_init")  # not empty if a forward pass will initialise it
trainer = attrgetter("_trainer")  # the Trainer that updates it, or None
differentiable = attrgetter("_differentiable")  # False for running statistics

# Fields and methods of gluon.Block:
children = attrgetter("_children")  # by name; only its direct children
params_by_place = methodcaller("_collect_params_with_prefix")  # by save_parameters' names
alias = methodcaller("_alias")  # with a number, the prefix of a block that is given none

# Fields of gluon.Trainer:
params = attrgetter("_params")  # a list; the optimizer's indices are its indices
updaters = attrgetter("_updaters")  # by device; they apply the optimizer and hold its states

# Fields of Module: its kvstore, its contexts, and what updates its parameters (at first None).
kvstore, module_contexts, updater = map(attrgetter, ("_kvstore", "_context", "_updater"))

# Fields of mx.optimizer.Optimizer:
update_counts = attrgetter("_index_update_count")  # by the parameter's index
update_counts_by_device = attrgetter("_all_index_update_counts")  # the same by the device's number

# MXNet's functions that around() can wrap: the name, and the classes or modules that have it.
INITIALISES = "_init_impl", [gluon.Parameter]  # sets the first values
SETS_VALUES = "set_data", [gluon.Parameter]  # sets new values; load_parameters calls it
ALLOCATES_GRADIENTS = "_init_grad", [gluon.Parameter]
CASTS = "cast", [gluon.Parameter]  # makes other arrays
MAKES_TRAINER = "__init__", [gluon.Trainer]
PREPARES_MODULE = "init_optimizer", [mx.mod.Module]  # makes its kvstore and optimizer
CREATES_KVSTORE = "_create_kvstore", [mx.model]  # of a FeedForward
MAKES_GRAPH = "__init__", [mx.nd.CachedOp]  # of a hybridized block: (graph, symbol, flags)
STEPS_ESTIMATOR = "batch_end", [estimator.GradientUpdateHandler]  # by the number of losses
BUILDS_GRAPH = "_build_cache", [gluon.HybridBlock]


def around(function: tuple[str, list]) -> Callable[[Callable], Callable]:
    """Decorate ``replacement(original, *args)``: it is called wherever ``function`` was."""
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


_times_set: weakref.WeakKeyDictionary[gluon.Parameter, int] = weakref.WeakKeyDictionary()


def times_set(param: gluon.Parameter | None) -> int:
    """Return how often the program has replaced the parameter's values.

    It does so by ``set_data``, ``load_parameters`` or ``load_checkpoint``. What was computed from
    the former values, such as a float32 copy, is then out of date.
    """
    return 0 if param is None else _times_set.get(param, 0)


def note_set(params: Iterable[gluon.Parameter]) -> None:
    """Count that the program has replaced the values of ``params``."""
    for param in params:
        _times_set[param] = times_set(param) + 1


@around(SETS_VALUES)
def _set_data(set_data: Callable, param: gluon.Parameter, data: mx.nd.NDArray) -> None:
    if values(param) is not None:
        note_set([param])
    set_data(param, data)


def static_params(block: gluon.HybridBlock) -> set[gluon.Parameter]:
    """Return the parameters of the block's graph; none if it was made without ``static_shape``."""
    if block._cached_op is None or not dict(block._flags).get("static_shape"):
        return set()
    return {param for is_data, param in block._cached_op_args if not is_data}


def keep_no_arrays(block: gluon.HybridBlock) -> None:
    """Make the block's graph again, as one that is given all parameters and keeps no arrays."""
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
    """Make a Trainer that updates on its kvstore copy the present weights there again."""
    if trainer._kv_initialized and trainer._update_on_kvstore:
        trainer._reset_kvstore()


def begin_step(optimizer: mx.optimizer.Optimizer, indices: Iterable[int]) -> None:
    """Make the next updates of these parameters use one learning rate.

    MXNet's schedules read the largest update count of any parameter, which would change within a
    step if some parameters were left out of earlier steps. So it is raised before the step.
    """
    counts, first = optimizer._index_update_count, optimizer.begin_num_update
    numbers = [counts.get(i, first) + 1 for i in indices]
    optimizer.num_update = max([optimizer.num_update, *numbers])


def count_updates(
    optimizer: mx.optimizer.Optimizer, indices: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Count an update of each parameter; return learning rates and weight decays by index."""
    optimizer._update_count(indices)
    return dict(zip(indices, zip(optimizer._get_lrs(indices), optimizer._get_wds(indices))))


def runs_own_code(dataset: Any) -> bool:
    """Return whether loading a sample calls code of a program: a transform, or a class of its own.

    Arrays, lists and MXNet's own datasets without a transform call none.
    """
    if type(dataset).__module__.partition(".")[0] not in ("builtins", "numpy", "mxnet"):
        return True
    fields = getattr(dataset, "__dict__", {})
    if any(fields.get(name) is not None for name in ("_transform", "_fn")):
        return True
    reads = [fields.get("_data"), fields.get("_dataset")]
    if isinstance(dataset, gluon.data.ArrayDataset):
        reads = fields["_data"]
    return any(runs_own_code(each) for each in reads if each is not None)


def onnx_graph() -> type:
    """Return MXNet's class that makes ONNX graphs; imports ``onnx``."""
    from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph

    return MXNetGraph
