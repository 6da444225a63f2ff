"""kvstore='gluonpar' for MXNet's Module: the store sums gradients, and MXNet updates each copy.

MXNet calls the optimizer for each device in turn. Most of its optimizers then update all copies
alike. The others, and optimizers that are not MXNet's, are refused.
"""

from __future__ import annotations

from typing import Any, Callable

from mxnet import lr_scheduler, optimizer
from mxnet.optimizer import LARS, LBSGD, NAG, SGLD, Nadam

from gluonpar import cluster
from gluonpar.cluster import world
from gluonpar.gluon import check_draws_nothing
from gluonpar.gluon.kvstore import GluonPar, is_ours
from gluonpar.runtime import devices, interrupts, private_fields

# These change numbers of their own, or draw some, in the update of each copy. What NAG computes
# depends, also between ranks, on the memory layout of a copy (gluonpar.gluon.update).
_OF_ONE_COPY = (LARS, LBSGD, NAG, Nadam, SGLD)


@private_fields.around(private_fields.PREPARES_MODULE)
def _prepare(
    prepare: Callable, module: Any, kvstore: Any = "local", *args: Any, **how: Any
) -> None:
    """Start with rank 0's parameters, and refuse what would update the copies differently."""
    if isinstance(kvstore, str) and is_ours(kvstore) and world.launched():
        kvstore = GluonPar()  # for a single device Module makes no store of this name
    before = private_fields.updater(module)
    prepare(module, kvstore, *args, **how)
    store, updater = private_fields.kvstore(module), private_fields.updater(module)
    if not is_ours(store) or updater is before:
        return
    used, ctx = updater.optimizer, private_fields.module_contexts(module)
    devices.check_distinct(ctx)
    check_draws_nothing(used, cluster.size())
    for each, known in ((used, optimizer.optimizer), (used.lr_scheduler, lr_scheduler)):
        name = type(each).__name__
        is_known = each is None or type(each) is getattr(known, name, None)
        is_alike = is_known and not isinstance(each, _OF_ONE_COPY)
        if len(ctx) > 1 and not is_alike or store.num_workers > 1 and isinstance(each, NAG):
            raise ValueError(
                f"Module calls the optimizer for each device in turn, and {name} might update the "
                f"copies on {ctx} differently; train with gluonpar.Trainer, which updates once"
            )
    if store.num_workers > 1:
        module.set_params(*module.get_params())  # copies rank 0's values, set by init(), to devices
    module.update = interrupts.held()(module.update)


@private_fields.around(private_fields.CREATES_KVSTORE)
def _refuse(create: Callable, kvstore: Any, *args: Any) -> tuple:
    if is_ours(kvstore):
        raise ValueError("kvstore 'gluonpar' trains no mx.model.FeedForward; use mx.mod.Module")
    return create(kvstore, *args)
