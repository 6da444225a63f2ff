"""The private fields and functions of MXNet's Python classes that gluonpar uses, by public names.

MXNet 1.9.1 is the last release, so they stay; no other package of gluonpar names one of them.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import gluon

# The code that calls a kvstore in the stock Trainer's and in Module's loops.
TRAINER_LOOP = gluon.Trainer._allreduce_grads.__code__
MODULE_INIT = mx.model._initialize_kvstore.__code__

# gluon.Parameter


def values(param: gluon.Parameter) -> list[mx.nd.NDArray] | None:
    """Return the parameter's own list of its arrays, by device; None if not initialised."""
    return param._data


def grads(param: gluon.Parameter) -> list[mx.nd.NDArray] | None:
    """Return the parameter's own list of its gradients, by device; None if it has none."""
    return param._grad


def stype(param: gluon.Parameter) -> str:
    """Return the storage type of the parameter's arrays."""
    return param._stype


def grad_stype(param: gluon.Parameter) -> str:
    """Return the storage type of the parameter's gradients."""
    return param._grad_stype


def awaits_shape(param: gluon.Parameter) -> bool:
    """Return whether the parameter is initialised when a forward pass shows its shape."""
    return bool(param._deferred_init)


def trainer(param: gluon.Parameter) -> gluon.Trainer | None:
    """Return the Trainer that updates the parameter."""
    return param._trainer


def wrap_initialisation(wrap: Callable[[Callable], Callable]) -> None:
    """Replace the function that gives a parameter its first values by ``wrap`` of it."""
    gluon.Parameter._init_impl = wrap(gluon.Parameter._init_impl)


# mx.nd.NDArray


def has_fresh_grad(array: mx.nd.NDArray) -> bool:
    """Return whether backward has written the array's gradient since the mark was removed."""
    return array._fresh_grad


def mark_grad(array: mx.nd.NDArray, fresh: bool) -> None:
    """Mark the array's gradient as fresh, or remove the mark."""
    array._fresh_grad = fresh


# gluon.Block


def children(block: gluon.Block) -> list[gluon.Block]:
    """Return the blocks that ``block`` directly consists of."""
    return list(block._children.values())


def params_by_place(block: gluon.Block) -> dict[str, gluon.Parameter]:
    """Return the block's parameters by their place in it, as ``save_parameters`` names them."""
    return block._collect_params_with_prefix()


# gluon.Trainer


def params(trainer: gluon.Trainer) -> list[gluon.Parameter]:
    """Return the Trainer's parameters in its order, which counts them for the optimizer."""
    return trainer._params


def optimizer(trainer: gluon.Trainer) -> mx.optimizer.Optimizer:
    """Return the Trainer's optimizer, also before its kvstore is made."""
    return trainer._optimizer


def kvstore_name(trainer: gluon.Trainer) -> Any:
    """Return the kvstore, or its name, that the Trainer was made with."""
    return trainer._kvstore_params["kvstore"]


def forget_kvstore_values(trainer: gluon.Trainer) -> None:
    """Have a Trainer whose kvstore updates weights give it the present ones before it does."""
    if trainer._kv_initialized and trainer._update_on_kvstore:
        trainer._reset_kvstore()


def wrap_kvstore_creation(wrap: Callable[[Callable], Callable]) -> None:
    """Replace the function by which Trainer and Module make a kvstore by ``wrap`` of it."""
    create = wrap(mx.model._create_kvstore)
    for module in (mx.model, gluon.trainer, mx.module.module):
        module._create_kvstore = create


# mx.optimizer.Optimizer


def update_counts(optimizer: mx.optimizer.Optimizer) -> dict[int, int]:
    """Return the optimizer's own number of updates of each parameter, by index."""
    return optimizer._index_update_count


def update_counts_by_device(optimizer: mx.optimizer.Optimizer) -> dict[int, dict[int, int]]:
    """Return the optimizer's own :func:`update_counts` of each device, by its number."""
    return optimizer._all_index_update_counts


def separate_update_counts(optimizer: mx.optimizer.Optimizer) -> None:
    """Give a copied optimizer counts that it does not share with the original: one per device."""
    counts = {device: dict(each) for device, each in optimizer._all_index_update_counts.items()}
    optimizer._all_index_update_counts, optimizer._index_update_count = counts, counts[0]


def count_updates(
    optimizer: mx.optimizer.Optimizer, indices: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Count an update of each parameter; return its learning rate and weight decay, by index."""
    optimizer._update_count(indices)
    return dict(zip(indices, zip(optimizer._get_lrs(indices), optimizer._get_wds(indices))))


def onnx_graph() -> type:
    """Return the class by which MXNet's exporter makes an ONNX graph; imports ``onnx``."""
    from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph

    return MXNetGraph
