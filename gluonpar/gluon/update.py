"""The update of one device's parameters by any optimizer, and which parameters can be updated.

MXNet's Updater applies an optimizer and holds its states. Four of its faults are corrected here:

- While ``momentum`` is 0 MXNet creates no momentum arrays, and SGD and LARS do not touch existing
  ones. They should become ``-lr * grad``, which is ``momentum * m - lr * grad``.
- With ``multi_precision`` an update begins with a float32 copy of the weights, and so it overwrites
  weights that ``set_data`` has set since.
- NAG's operator reads a weight again after it has written it, unless a forward without gradients
  has brought it into one of oneDNN's layouts: an evaluation would change the training.
- LBSGD adds up gradients without copying the first, which the next backward overwrites.
"""

from __future__ import annotations

import collections.abc
from typing import Any, Callable, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon, nd
from mxnet.optimizer import LARS, LBSGD, NAG, SGD, SGLD, Nadam, Optimizer, Signum, ccSGD

from gluonpar.checkpoint import optimizer_states
from gluonpar.runtime import devices, private_fields, used_numbers

Note = Callable[[Sequence[int], used_numbers.Calls], None]


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


# Optimizers that create a momentum for each parameter unless it is 0.
_WITH_MOMENTUM = (SGD, NAG, LARS, LBSGD, Signum)


def needs_one_root(optimizer: Optimizer) -> bool:
    """Return whether all parameters must be updated on the same device, and each one only once.

    LARS compares the parameters that it updates together. Nadam, SGLD and LBSGD change or draw
    numbers that the optimizer keeps, and so may optimizers that are not MXNet's.
    """
    is_of_mxnet = optimizer_states.is_of_mxnet(optimizer)
    return not is_of_mxnet or isinstance(optimizer, (LARS, LBSGD, Nadam, SGLD))


def check_draws_nothing(optimizer: Any, num_processes: int) -> None:
    """Raise ValueError for an optimizer that would update differently on each of the ranks."""
    if isinstance(optimizer, SGLD) and num_processes > 1:
        raise ValueError(
            "SGLD draws other random numbers on each rank: use another optimizer in a job of "
            "several processes"
        )


class Updater(mx.optimizer.Updater):
    """Updates weights of one device by their gradients.

    ``note`` is called with the indices of parameters and the numbers by which they were updated.
    """

    def __init__(self, optimizer: Optimizer, note: Note | None = None) -> None:
        super().__init__(optimizer)
        self.note = note
        # By parameter, how often its values had been set when it was its float32 copy, rounded.
        self.compared: dict[int, int] = {}
        # LBSGD keeps gradients that it is given, and optimizers that are not MXNet's may.
        is_of_mxnet = optimizer_states.is_of_mxnet(optimizer)
        self._may_keep_arrays = not is_of_mxnet or isinstance(optimizer, LBSGD)

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update each ``weight`` by its ``grad``, in place; they may be lists or one of each."""
        if not isinstance(index, (list, tuple)):
            index, grad, weight = [index], [grad], [weight]
        weight = [w.as_nd_ndarray() for w in weight]
        states = [*map(self.prepare, index, weight)]
        if self._may_keep_arrays:
            grad = [array.copy() for array in grad]
        steps = []  # momenta that become -lr * grad, and the weights or their float32 copies
        if type(self.optimizer) in (SGD, ccSGD, LARS) and not self.optimizer.momentum:
            for state, g, w in zip(states, grad, weight):
                if not _lacks(state) and g.stype == "default":
                    steps.append(state if isinstance(state, (tuple, list)) else (state, w))
        for momentum, value in steps:
            value.copyto(momentum)
        updated = weight
        if isinstance(self.optimizer, NAG):
            updated = [w.copy() for w in weight]  # no forward brings these into another layout
        if self.note:
            with used_numbers.noted() as used:
                super().__call__(index, grad, updated)
            self.note(index, used)
        else:
            super().__call__(index, grad, updated)
        for new, w in zip(updated, weight):
            if new is not w:
                new.copyto(w)
        for momentum, value in steps:
            nd.elemwise_sub(value, momentum, out=momentum)

    def prepare(self, i: int, weight: mx.nd.NDArray) -> Any:
        """Return the state of parameter ``i``, complete and on the context of ``weight``."""
        optimizer, state, weight = self.optimizer, self.states.get(i), weight.as_nd_ndarray()
        num_set = private_fields.times_set(optimizer.param_dict.get(i))
        if i not in self.states:
            state = optimizer.create_state_multi_precision(i, weight)
            self.compared[i] = num_set
        elif not self.states_synced[i]:
            state = self.sync_state_context(state, weight.context)
            self.compared.pop(i, None)  # it may have been loaded
        if isinstance(optimizer, _WITH_MOMENTUM) and optimizer.momentum and _lacks(state):
            state = _filled(state, optimizer.create_state_multi_precision(i, weight))
        self.states[i], self.states_synced[i] = state, True
        if self.compared.get(i) != num_set:
            self.compared[i] = num_set
            self._renew_copy(state, weight)
        return state

    def _renew_copy(self, state: Any, weight: mx.nd.NDArray) -> None:
        """Replace the float32 copy of a weight by the weight wherever it no longer rounds to it."""
        has_copy = isinstance(state, (tuple, list)) and self.optimizer.multi_precision
        if not has_copy or weight.dtype != np.float16:
            return
        create = type(self.optimizer).create_state_multi_precision
        if create is Optimizer.create_state_multi_precision:
            copy = state[0]
        elif create in [of.create_state_multi_precision for of in (SGD, NAG, LARS)]:
            copy = state[1]
        else:  # the optimizer's states are not known
            return
        rounds = copy.astype("float16") == weight
        copy[:] = nd.where(rounds, copy, weight.astype("float32"))


class Follower:
    """Updates a device other than the first, in programs that call an updater for each device.

    It copies what the first device has computed, which alone has states.
    """

    def __init__(self, params: Sequence[gluon.Parameter], device: int) -> None:
        self._params, self._device = params, device

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Copy the first device's weights, which have been updated, to each ``weight``."""
        for i in index if isinstance(index, (list, tuple)) else [index]:
            first, *others = self._params[i].list_data()
            first.copyto(others[self._device - 1])

    def set_states(self, states: bytes) -> None:
        """Load nothing: the first device's updater loads the states."""


def followers(params: Sequence[gluon.Parameter], ctx: Sequence[mx.Context]) -> list[Follower]:
    """Return the updaters of all devices but the first."""
    return [Follower(params, device) for device in range(1, len(ctx))]


def _lacks(state: Any) -> bool:
    return state is None or isinstance(state, (tuple, list)) and any(x is None for x in state)


def _filled(state: Any, new: Any) -> Any:
    """Return ``state`` with the arrays of ``new`` where it is None."""
    if isinstance(state, (tuple, list)):
        return tuple(map(_filled, state, new))
    return new if state is None else state
