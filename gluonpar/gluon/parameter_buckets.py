"""The parameters of a Gluon network on all devices, in buckets (:mod:`gluonpar.replicas`)."""

from __future__ import annotations

import collections.abc
from typing import Any, Collection, Sequence

from mxnet import gluon

from gluonpar import cluster, replicas
from gluonpar.collectives import Exchange
from gluonpar.gluon import batches
from gluonpar.plans import partition
from gluonpar.replicas import Copies, ParamBucket
from gluonpar.runtime import devices, memory, private_fields


class Layout:
    """Which parameters with a gradient are in which bucket, and which device is its root, if any.

    ``in_order`` are all of ``params`` in the order in which forward uses them: neighbours share a
    bucket. The buckets are summed by ``exchange``; with ``one_root`` device 0 is the root of all.
    Without, buckets of row_sparse gradients have no root, and every device updates.
    ``name`` is the Trainer's, which ranks compare. Arrays are looked up whenever they are needed:
    the parameters may be given others.
    """

    def __init__(
        self,
        params: Sequence[gluon.Parameter],
        in_order: Sequence[gluon.Parameter],
        exchange: Exchange,
        one_root: bool,
        name: str,
    ) -> None:
        self._params, self._kinds = params, _kinds(params)
        self._ctx, self._num_processes, self._name = exchange.ctx, exchange.num_processes, name
        index = {param: i for i, param in enumerate(params)}
        self.params = [param for param in in_order if param.grad_req != "null"]
        self._indices = [index[param] for param in self.params]
        buckets = replicas.neighbours([*map(_copies, self._indices, self.params)])
        sizes = [sum(memory.num_bytes(each.grads[0]) for each in bucket) for bucket in buckets]
        roots = partition.balance(sizes, 1 if one_root else len(self._ctx))
        self._buckets = []
        for bucket, root in zip(buckets, roots):
            indices = [each.index for each in bucket]
            on_all = bucket[0].grads[0].stype == "row_sparse" and not one_root
            self._buckets.append((indices, None if on_all else root))

    def is_current(self) -> bool:
        """Return whether the parameters still are of the same kinds, on the same contexts."""
        return _kinds(self._params) == self._kinds

    def buckets(
        self,
        ignore_stale_grad: bool,
        summed: bool = False,
        by_program: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> list[ParamBucket]:
        """Return the buckets, without parameters that backward reached on no device of any rank.

        Gradients are still to be summed, and then all ranks must call this before each sum, and
        compare ``facts``; or with ``summed`` they are sums, made by the program if ``by_program``.
        Unless ``ignore_stale_grad``, raises UserWarning if a parameter has no new gradient on any
        rank, or none on a device on which its own batch ran.
        """
        if summed:
            written = [batches.tracked[param].fresh() for param in self.params]
            on_some_rank = [*map(any, written)]
            if by_program and self._num_processes > 1:  # a rank without samples has sums, too
                on_some_rank = [True] * len(written)
                if ignore_stale_grad:  # this waits
                    on_some_rank = (cluster.total([*map(any, written)]) > 0).tolist()
        else:
            how = self._num_processes, self._name, facts
            written, on_some_rank = batches.summands(self.params, *how)
        counting = dict(zip(self._indices, written))
        used = {i for i, is_used in zip(counting, on_some_rank) if is_used}
        if not ignore_stale_grad:
            self._check_not_stale(counting, used)
        filled = []
        for indices, root in self._buckets:
            copies = [_copies(i, self._params[i], counting[i]) for i in indices if i in used]
            if copies:
                filled.append(ParamBucket(copies, root))
        return filled

    def _check_not_stale(self, counting: dict[int, list[bool]], used: Collection[int]) -> None:
        """Check that every parameter has a new gradient on each device that its batch ran on."""
        if counting and not used:
            raise UserWarning(
                "no gradient has been computed since the last update; call backward before step"
            )
        for i, on_devices in counting.items():
            ran = batches.ran_on(self._params[i]) if i in used else [True] * len(self._ctx)
            stale = [str(c) for c, was, ok in zip(self._ctx, ran, on_devices) if was and not ok]
            if stale:
                raise UserWarning(
                    f"backward has not computed a gradient of parameter {self._params[i].name} on "
                    f"{', '.join(stale)} since the last update: the model did not use it there. If "
                    "that is intended, call step(batch_size, ignore_stale_grad=True)"
                )


def listed(params: Any) -> list[gluon.Parameter]:
    """Return the Parameters in a list or dict; gluon.Trainer refuses other entries."""
    values = params.values() if hasattr(params, "values") else params
    if not isinstance(values, collections.abc.Iterable):
        return []
    return [param for param in values if isinstance(param, gluon.Parameter)]


def check(params: Any) -> None:
    """Raise ValueError unless ``params``, at least one, are dense, and on the same contexts.

    No parameter and no context may occur twice. Gradients may be row_sparse.
    """
    if isinstance(params, collections.abc.Iterable) and not [*params]:
        raise ValueError(
            "params must have at least one Parameter, got none; pass net.collect_params() of a "
            "network with layers that have parameters"
        )
    values = listed(params)
    for i, param in enumerate(values):
        if param in values[:i]:
            raise ValueError(f"parameter {param.name} is given more than once; give it once")
        stype, grad_stype = private_fields.stype(param), private_fields.grad_stype(param)
        if stype != "default" or grad_stype not in ("default", "row_sparse"):
            raise ValueError(
                f"parameter {param.name} must be dense, with a dense or row_sparse gradient, got "
                f"{stype} with a {grad_stype} gradient"
            )
        devices.check_distinct(param.list_ctx())


def _copies(index: int, param: gluon.Parameter, *fresh: list[bool]) -> Copies:
    return Copies(index, private_fields.values(param), private_fields.grads(param), *fresh)


def _kinds(params: Sequence[gluon.Parameter]) -> list[tuple]:
    return [(param, param.grad_req, param.dtype, param.list_ctx()) for param in params]
