"""MXNet's Updater, which applies an optimizer and has its states, made right where it is not.

- MXNet creates no momentum while that option is 0, and SGD and LARS leave an existing one as it was
  in a step with momentum 0, though ``m = momentum * m - lr * grad`` is ``-lr * grad`` then.
- With ``multi_precision`` the next update overwrites weights that were set by ``set_data``: it
  begins with a float32 copy of the weights from before.
- LBSGD adds up gradients without copying the first, which the next backward overwrites.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.optimizer import LARS, LBSGD, NAG, SGD, Optimizer, Signum, ccSGD

from gluonpar.checkpoint import optimizer_states

# What creates a momentum for each parameter unless it is 0.
_WITH_MOMENTUM = (SGD, NAG, LARS, LBSGD, Signum)


def may_keep_arrays(optimizer: Optimizer) -> bool:
    """Return whether it may have arrays of its own besides the states: all but MXNet's may."""
    return not optimizer_states.is_of_mxnet(optimizer) or isinstance(optimizer, LBSGD)


class Updater(mx.optimizer.Updater):
    """Updates weights of one device by their gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._compared: set[int] = set()  # parameters that are their float32 copies, rounded

    def weights_were_set(self) -> None:
        """Renew, in the next update, the elements of float32 copies that are not the weights."""
        self._compared.clear()

    def __call__(self, index: Sequence[int], grad: Sequence, weight: Sequence) -> None:
        """Update each ``weight`` by its ``grad``, in place."""
        if may_keep_arrays(self.optimizer):
            grad = [array.copy() for array in grad]
        stepped = []
        for i, g, w in zip(index, grad, weight):
            self.prepare(i, w)
            if self._is_step_without_momentum(i) and g.stype == "default":
                stepped.append(self._momentum_and_weight(i, w))
        for momentum, value in stepped:
            value.copyto(momentum)
        super().__call__(index, grad, weight)
        for momentum, value in stepped:
            nd.elemwise_sub(value, momentum, out=momentum)

    def prepare(self, i: int, weight: mx.nd.NDArray) -> Any:
        """Return the state of parameter ``i``, complete and on the context of ``weight``."""
        optimizer, state = self.optimizer, self.states.get(i)
        if i not in self.states:
            state = optimizer.create_state_multi_precision(i, weight.as_nd_ndarray())
            self._compared.add(i)
        elif not self.states_synced[i]:
            state = self.sync_state_context(state, weight.context)
            self._compared.discard(i)  # it may have been loaded
        if isinstance(optimizer, _WITH_MOMENTUM) and optimizer.momentum and _lacks(state):
            new = optimizer.create_state_multi_precision(i, weight.as_nd_ndarray())
            state = _filled(state, new)
        self.states[i], self.states_synced[i] = state, True
        if i not in self._compared:
            self._compared.add(i)
            self._renew_copy(i, weight.as_nd_ndarray())
        return state

    def _is_step_without_momentum(self, i: int) -> bool:
        optimizer = self.optimizer
        if type(optimizer) not in (SGD, ccSGD, LARS) or optimizer.momentum:
            return False
        return not _lacks(self.states[i])

    def _momentum_and_weight(self, i: int, weight: mx.nd.NDArray) -> tuple:
        state = self.states[i]
        return state if isinstance(state, (tuple, list)) else (state, weight.as_nd_ndarray())

    def _renew_copy(self, i: int, weight: mx.nd.NDArray) -> None:
        """Make float32 copies of the weights equal to them, where they do not round to them."""
        optimizer, state = self.optimizer, self.states[i]
        if not isinstance(state, (tuple, list)) or not optimizer.multi_precision:
            return
        if weight.dtype != np.float16:
            return
        create = type(optimizer).create_state_multi_precision
        if create is Optimizer.create_state_multi_precision:
            copy = state[0]
        elif create in [of.create_state_multi_precision for of in (SGD, NAG, LARS)]:
            copy = state[1]
        else:  # an optimizer whose states we do not know
            return
        rounds = copy.astype("float16") == weight
        copy[:] = nd.where(rounds, copy, weight.astype("float32"))


def _lacks(state: Any) -> bool:
    return state is None or isinstance(state, (tuple, list)) and any(x is None for x in state)


def _filled(state: Any, new: Any) -> Any:
    """Return ``state`` with what is None taken from ``new``."""
    if isinstance(state, (tuple, list)):
        return tuple(map(_filled, state, new))
    return new if state is None else state
