"""The variables that towers share: a copy on each device, all with the same bits."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import mxnet as mx
from mxnet import gluon

from gluonpar import replicas
from gluonpar.collectives import broadcast_many, reduce


class SharedVariables:
    """A list of arrays, copied to each of ``ctx`` with gradients, or a Block that is on all.

    ``models[i]`` is what tower i computes with: its list of arrays, or the Block. ``params`` are
    the Block's parameters but for constants, or None. Raises as :class:`gluonpar.Towers` says.
    """

    def __init__(
        self, variables: gluon.Block | Sequence[mx.nd.NDArray], ctx: Sequence[mx.Context]
    ) -> None:
        self.ctx, self.params = ctx, None
        if isinstance(variables, gluon.Block):
            self.params = _params_of(variables, ctx)
            self.models = [variables] * len(ctx)
        else:
            _check_arrays(variables)
            self.models = [replicas.get_params(variables, c) for c in ctx]

    @property
    def are_initialised(self) -> bool:
        """False for a Block that has not seen a batch and so does not know all its shapes."""
        try:
            return bool(self.arrays)
        except gluon.parameter.DeferredInitializationError:
            return False

    @property
    def arrays(self) -> list[Sequence[mx.nd.NDArray]]:
        """Per device, its variables: the arrays themselves, not copies."""
        if self.params is None:
            return list(self.models)
        return [[param.data(c) for param in self.params] for c in self.ctx]

    def sum_gradients(self, num_devices: int) -> None:
        """Make the first device's gradients the sums over the first ``num_devices``, in place."""
        for bucket in replicas.buckets(self.arrays[:num_devices]):
            reduce(list(bucket.grads))

    def share(self) -> None:
        """Give the first device's variables to all others, those that are not trained too."""
        broadcast_many([list(copies) for copies in zip(*self.arrays)])

    @contextlib.contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Scope that puts back what forward and backward change: the running statistics."""
        statistics = [array for arrays in self.arrays for array in arrays if array.grad is None]
        before = [array.copy() for array in statistics]
        try:
            yield
        except BaseException:
            for array, saved in zip(statistics, before):
                saved.copyto(array)
            raise


def forget_gradients(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Mark one device's gradients as old, for :func:`check_gradients` to tell them from new."""
    for array in arrays:
        if array.grad is not None:
            array._fresh_grad = False


def check_gradients(arrays: Sequence[mx.nd.NDArray], ctx: mx.Context) -> None:
    """Raise ValueError if backward has left an old gradient: it would be summed once more."""
    for j, array in enumerate(arrays):
        if array.grad is not None and not array._fresh_grad:
            raise ValueError(
                f"the loss on {ctx} does not depend on variable {j} of shape {array.shape}; leave "
                "it out of the variables, or set its grad_req to 'null'"
            )


def _check_arrays(variables: Any) -> None:
    if not isinstance(variables, (list, tuple)) or not all(
        isinstance(variable, mx.nd.NDArray) for variable in variables
    ):
        raise TypeError(
            f"variables is a {type(variables).__name__}; pass a list of MXNet arrays or a Block"
        )
    if not variables:
        raise ValueError("variables is an empty list; pass at least one array")


def _params_of(block: gluon.Block, ctx: Sequence[mx.Context]) -> list[gluon.Parameter]:
    """Parameters of the Block, but for constants; all on all of ``ctx``."""
    params = [p for p in block.collect_params().values() if not isinstance(p, gluon.Constant)]
    if len(set(ctx)) < len(ctx):
        raise ValueError(f"ctx={ctx} names a context twice, but a Block has one copy on each")
    for param in params:
        missing = [c for c in ctx if c not in param.list_ctx()]
        if missing:
            raise ValueError(
                f"{param.name} is on {param.list_ctx()}, not on {missing}; call "
                f"initialize(ctx={ctx}) or collect_params().reset_ctx({ctx})"
            )
        if param.grad_req == "add":
            raise ValueError(f"{param.name} has grad_req='add'; a step needs 'write'")
    return params
