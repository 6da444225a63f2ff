"""Towers: one model a device on shared variables, each fed a batch of its own."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar.gluon.parallel import on_device
from gluonpar.gluon.tower_variables import SharedVariables, check_gradients, forget_gradients
from gluonpar.metrics import LossMeter
from gluonpar.optim import sgd
from gluonpar.runtime import threads
from gluonpar.runtime.devices import as_list
from gluonpar.sharding import num_samples, split_and_load
from gluonpar.step import check_lr

STEPS_IN_FLIGHT = 4


class Epoch(NamedTuple):
    """What :meth:`Towers.run_epoch` has done; ``loss`` is the mean over ``num_samples``."""

    loss: float
    num_samples: int
    num_steps: int


class Towers:
    """One model a device, on shared variables; every tower is fed a batch of its own.

    ``variables`` are either a list of arrays, copied to each device, with gradients
    (:func:`get_params`), or a Gluon Block that is initialised on all of ``ctx``.
    ``forward(batch, model)`` is the model and its losses: ``batch`` is what the generator gave, on
    the tower's device, and ``model`` that device's list of arrays, or the Block. It returns a dict
    of named outputs, of which ``"loss"`` (n,), one loss a sample, is what is minimised, or the
    losses alone. It is called in the scope of the tower's device.

    ``update(params, lr, batch_size)`` changes one device's variables in place, given gradients that
    are sums over ``batch_size`` samples, but for those whose ``grad`` is None (a Block's frozen
    layers and running statistics): :func:`gluonpar.sgd`, a function like it, or an
    ``mx.optimizer.Optimizer``. It runs once a step, on the first tower's variables, when the sums
    over all towers are there; then the others get the result. So all towers hold the same bits,
    whatever the rule, and its state lives once. Batch normalisation's running statistics are the
    first tower's, everywhere.

    A step weighs samples alike, not towers: it equals one device's step on all the towers' samples,
    for batches of any sizes, up to rounding and batch normalisation. With equal batches that is the
    mean of :func:`average_gradients`.

    Raises ValueError for a Block that is not on all of ``ctx``, or adds up its gradients
    (``grad_req='add'``), and an empty list; TypeError for other variables.

    >>> import mxnet as mx
    >>> def forward(batch, params):
    ...     return {"loss": (batch * params[0] - 6) ** 2, "prediction": batch * params[0]}
    >>> towers = Towers(forward, [mx.nd.zeros((1,))], [mx.cpu(0), mx.cpu(1)])
    >>> for _ in range(20):
    ...     outputs = towers.step([mx.nd.array([2]), mx.nd.array([2, 2])], lr=0.1)
    >>> [variables[0].asscalar() for variables in towers.variables]
    [3.0, 3.0]
    >>> [array.context for array in outputs["prediction"]]
    [cpu(0), cpu(1)]

    After the multi-GPU recipe of TensorFlow's CIFAR-10 example ("towers").
    """

    def __init__(
        self,
        forward: Callable,
        variables: gluon.Block | Sequence[mx.nd.NDArray],
        ctx: mx.Context | Sequence[mx.Context],
        update: Callable | mx.optimizer.Optimizer = sgd,
    ) -> None:
        self.ctx = as_list(ctx)
        self._forward = forward
        threads.share(self.ctx)
        self._shared = SharedVariables(variables, self.ctx)
        self._needs_lr = not isinstance(update, mx.optimizer.Optimizer)
        self._update = update if self._needs_lr else _rule_of(update, self._shared.params)

    @property
    def variables(self) -> list[Sequence[mx.nd.NDArray]]:
        """Per tower, its variables on its device: the arrays themselves, not copies."""
        return self._shared.arrays

    def step(self, batches: Iterable[Any], lr: float | None = None) -> dict[str, list]:
        """One step on one batch a tower; the outputs by name, each a list in tower order.

        ``batches[i]`` is an array (NumPy, ``mx.nd`` or ``mx.np``) or a nest of them, with one entry
        a sample along axis 0; tower i gets it on ``ctx[i]``. With fewer batches than towers, the
        last towers sit the step out. ``lr`` may be None only with an ``mx.optimizer``, which then
        uses its own. Outputs are on the device where they were computed, from before the update;
        nothing waits. The gradients are used up.

        An exception in a tower becomes a RuntimeError that names the device, with the exception as
        its cause; all variables stay as they were. Raises ValueError, likewise, for no batch, more
        batches than towers, a bad ``lr``, outputs whose names differ or lack ``"loss"``, losses
        that are not one a sample, and a variable that a tower's loss does not depend on.
        """
        batches = list(batches)
        self._check(batches, lr)
        with autograd.pause():
            self._finish_initialisation(batches[0])
            with self._shared.kept_on_error():
                outputs = self._run(batches)
            self._shared.sum_gradients(len(batches))
            self._update(self.variables[0], lr, sum(output["loss"].size for output in outputs))
            self._shared.share()
        return {name: [output[name] for output in outputs] for name in outputs[0]}

    def run_epoch(self, batches: Iterable[Any], lr: float | None = None) -> Epoch:
        """Steps until ``batches`` ends, each tower drawing its next batch in turn; what was done.

        In the last step the towers that no batch is left for sit out. Waits at the end, to read the
        loss, and where more than a few steps are under way. Raises as :meth:`step`, ValueError if
        there is no batch at all, and ``metrics.Diverged`` if the loss is not finite.
        """
        remaining, meter, in_flight = iter(batches), LossMeter(), deque()
        samples = steps = 0
        while True:
            drawn = list(itertools.islice(remaining, len(self.ctx)))
            if not drawn:
                break
            losses = [loss.as_nd_ndarray() for loss in self.step(drawn, lr)["loss"]]
            meter.add(losses)
            samples, steps = samples + sum(loss.size for loss in losses), steps + 1
            in_flight.append(losses[0])
            if len(in_flight) > STEPS_IN_FLIGHT:  # it bounds the memory in use
                in_flight.popleft().wait_to_read()
        if not steps:
            raise ValueError("batches gave no batch; an epoch needs one or more")
        return Epoch(meter.read(), samples, steps)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, list]:
        """Outputs by name, each a list in the order of the batches, in predict mode.

        The towers take the batches in turn. Nothing is recorded, and no variable, gradient or
        running statistic changes. ``forward`` need not return ``"loss"`` here. Nothing waits, and
        all outputs are kept. Raises RuntimeError, as :meth:`step`, for an exception in a tower.
        """
        found: list[dict] = []
        with autograd.pause(train_mode=False):
            for i, batch in enumerate(batches):
                found.append(self._outputs(i % len(self.ctx), batch))
                _check_names(found[-1], found[0], self.ctx[i % len(self.ctx)])
        return {name: [output[name] for output in found] for name in (found or [{}])[0]}

    def _check(self, batches: list, lr: float | None) -> None:
        if not 1 <= len(batches) <= len(self.ctx):
            raise ValueError(
                f"{len(batches)} batches for {len(self.ctx)} towers; a step takes one for each, or "
                "fewer, but at least one"
            )
        if lr is not None:
            check_lr(lr)
        elif self._needs_lr:
            raise ValueError("lr=None; give a learning rate, such as 0.1, or an mx.optimizer")

    def _outputs(self, i: int, batch: Any) -> dict[str, Any]:
        """What ``forward`` says of the batch in tower i."""
        with on_device(self.ctx[i], f"tower {i}"):
            [loaded] = split_and_load(batch, self.ctx[i])
            output = self._forward(loaded, self._shared.models[i])
        return output if isinstance(output, dict) else {"loss": output}

    def _run(self, batches: list) -> list[dict[str, Any]]:
        """Forward, then backward, of each tower; their outputs."""
        running = list(zip(self.ctx, self.variables, batches))
        outputs: list[dict] = []
        for i, (c, arrays, batch) in enumerate(running):
            forget_gradients(arrays)
            with autograd.record():
                outputs.append(self._outputs(i, batch))
            _check_names(outputs[-1], outputs[0], c)
            _check_loss(outputs[-1], num_samples(batch), c)
        for i, (c, arrays, _) in enumerate(running):
            with on_device(c, f"backward of tower {i}"):
                outputs[i]["loss"].backward()
            check_gradients(arrays, c)
        return outputs

    def _finish_initialisation(self, batch: Any) -> None:
        """Have a Block that does not know its shapes see a batch first, in predict mode.

        Then there are variables that an exception can leave as they were.
        """
        if not self._shared.are_initialised:
            with autograd.predict_mode():
                self._outputs(0, batch)


def _rule_of(optimizer: mx.optimizer.Optimizer, params: list | None) -> Callable:
    """The optimizer as a function ``update(params, lr, batch_size)``."""
    if params is not None and not optimizer.param_dict:
        optimizer.param_dict = dict(enumerate(params))  # their lr_mult and wd_mult
    apply, scale = mx.optimizer.get_updater(optimizer), optimizer.rescale_grad

    def update(arrays: Sequence[mx.nd.NDArray], lr: float | None, batch_size: int) -> None:
        if lr is not None:
            optimizer.set_learning_rate(lr)
        optimizer.rescale_grad = scale / batch_size
        for i, array in enumerate(arrays):
            if array.grad is not None:
                apply(i, array.grad, array)

    return update


def _check_names(output: dict, first: dict, ctx: mx.Context) -> None:
    if output.keys() != first.keys():
        raise ValueError(
            f"forward returned {sorted(output)} on {ctx}, but {sorted(first)} before; "
            "the names must be the same every time"
        )


def _check_loss(output: dict, n: int, ctx: mx.Context) -> None:
    if "loss" not in output:
        raise ValueError(f"forward returned {sorted(output)} on {ctx}; one must be named 'loss'")
    loss = output["loss"]
    if getattr(loss, "shape", None) != (n,):
        kind = f"has shape {loss.shape}" if hasattr(loss, "shape") else f"is {loss!r}"
        raise ValueError(
            f"the loss {kind} on {ctx} for a batch of {n} samples; return one loss a sample, of "
            f"shape ({n},), and leave the mean to the step"
        )
