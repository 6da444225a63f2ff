"""Towers and average_gradients: training in the style of TensorFlow, one model per device."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
from mxnet import autograd, gluon

from gluonpar import cluster, gradients, replicas
from gluonpar.adapters.parallel import on_device
from gluonpar.collectives import Exchange, in_buckets, operations
from gluonpar.gluon import check_draws_nothing, consistency
from gluonpar.gluon.update import Updater
from gluonpar.optim import check_lr, sgd
from gluonpar.replicas import get_params
from gluonpar.runtime import devices, interrupts, memory, private_fields
from gluonpar.sharding import num_samples, split_and_load
from gluonpar.tasks import all_devices


class Towers:
    """One model per device on shared variables; every tower gets a batch of its own.

    ``variables`` are either a list of arrays, which is copied to each device (:func:`get_params`),
    or a Gluon Block that is initialised on all of ``ctx``. ``forward(batch, model)`` is called in
    the scope of a tower's device with the tower's batch and that device's list of arrays, or the
    Block. It returns a dict of named outputs, or the losses alone. The output ``"loss"`` (n,), one
    loss per sample, is minimised.

    ``update`` is :func:`gluonpar.sgd`, a function like it, or an ``mx.optimizer.Optimizer``.
    ``update(params, lr, batch_size)`` updates one device's variables in place from gradients that
    are sums over ``batch_size`` samples, except variables whose ``grad`` is None. It runs once per
    step, on the first tower's variables; the result, and the first tower's running statistics of
    batch normalisation, are then broadcast, so all towers have the same bits.

    A step weighs samples equally, not towers: it equals one device's step on all towers' samples,
    for batches of any size, up to rounding and batch normalisation. In a job of several processes
    the towers of all ranks take one step together, and variables start with rank 0's values. All
    ranks take the same steps, with batches of their own or none. Towers that are made inside
    ``gluonpar.cluster.local()`` are of this process only.

    Raises ValueError for a Block on a context that is listed twice, and for SGLD in several
    processes.

    >>> import mxnet as mx
    >>> def forward(batch, params):
    ...     return {"loss": (batch * params[0] - 6) ** 2, "prediction": batch * params[0]}
    >>> towers = Towers(forward, [mx.nd.zeros((1,))], [mx.cpu(0), mx.cpu(1)])
    >>> for _ in range(20):
    ...     outputs = towers.step([mx.nd.array([2]), mx.nd.array([2, 2])], lr=0.1)
    >>> [float(variables[0].asscalar()) for variables in towers.variables]
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
        self.ctx, self._cluster_scope = devices.as_list(ctx), cluster.scope()
        self._forward = forward
        self._exchange = Exchange(self.ctx)
        check_draws_nothing(update, self._exchange.num_processes)
        self._params: list[gluon.Parameter] = []  # a Block has some; constants are left out
        if isinstance(variables, gluon.Block):
            params = variables.collect_params().values()
            self._params = [p for p in params if not isinstance(p, gluon.Constant)]
            devices.check_distinct(self.ctx)
            self._models = [variables] * len(self.ctx)
            consistency.start_alike(self._params)
        else:
            first = get_params(variables, self.ctx[0])  # they have rank 0's values
            with cluster.local():  # another rank may have another number of towers
                self._models = [first, *(get_params(first, c) for c in self.ctx[1:])]
        self._needs_lr = not isinstance(update, mx.optimizer.Optimizer)
        self._update = update if self._needs_lr else _rule_of(update, self._params)

    @property
    def variables(self) -> list[Sequence[mx.nd.NDArray]]:
        """The variables of each tower, on its device: the arrays themselves, not copies."""
        if not isinstance(self._models[0], gluon.Block):
            return list(self._models)
        return [[param.data(c) for param in self._params] for c in self.ctx]

    @cluster.in_scope
    def step(self, batches: Iterable[Any], lr: float | None = None) -> dict[str, list]:
        """Take one step on one batch per tower; return the outputs by name, in tower order.

        ``batches[i]`` is an array (NumPy, ``mx.nd`` or ``mx.np``) or a nest of them, with one entry
        per sample along axis 0; it is loaded onto ``ctx[i]`` for tower i. With fewer batches than
        towers, the last towers do not take part. ``lr`` may be None only with an ``mx.optimizer``,
        which then uses its own learning rate. Outputs are on the device where they were computed,
        and from before the update. The gradients are overwritten; where a tower's loss does not
        depend on a variable, they count as zero. Nothing waits, but in a job of several processes a
        step waits until all ranks have begun it, to add up their samples. There a rank may have no
        batch, or one without samples, and then has no output.

        An exception in a tower is raised as a RuntimeError that names the device, with the
        exception as its cause. Raises ValueError for no batch on any rank, more batches than
        towers, a bad ``lr``, losses that are not one per sample, and variables that accumulate
        gradients (``grad_req='add'``). Running statistics aside, variables are then unchanged.
        """
        batches = list(batches)
        if len(batches) > len(self.ctx):
            raise ValueError(f"a step takes at most {len(self.ctx)} batches, got {len(batches)}")
        if lr is not None or self._needs_lr:
            check_lr(lr)
        for param in self._params:
            if param.grad_req == "add":
                raise ValueError(f"{param.name} must have grad_req='write', got 'add'")
        batches = [batch for batch in batches if num_samples(batch)]
        of_ranks = cluster.PendingGather(sum(map(num_samples, batches)), "samples")
        with autograd.pause():
            if batches and any(map(private_fields.awaits_shape, self._params)):
                with on_device(self.ctx[0], "tower 0"), autograd.predict_mode():
                    self._forward(split_and_load(batches[0], self.ctx[0])[0], self._models[0])
            variables = self.variables
            of_params = gradients.of(variables)
            gradients.mark_used(of_params.records)  # an earlier backward may have left some
            with all_devices(len(batches)) as call_on:
                outputs = self._run(batches, call_on)
            if not (number := sum(of_ranks.wait())):
                raise ValueError("a step takes at least 1 batch, got none on any rank")
            buckets = replicas.buckets(replicas.trained(variables), of_params.counting())
            with interrupts.held():
                self._exchange.reduce([bucket.grads for bucket in buckets])
                gradients.mark_used(of_params.records)
                self._update(variables[0], lr, number)
                # All ranks have made the same update; other variables become rank 0's.
                cluster.broadcast([array for array in variables[0] if array.grad is None])
                self._exchange.inside.broadcast(in_buckets([*zip(*variables)]))
        return outputs

    def _run(self, batches: list, call_on: Callable) -> dict[str, list]:
        """Run forward and backward on every tower; return the outputs by name."""
        outputs: list[dict[str, Any]] = []
        for i, (c, batch, model) in enumerate(zip(self.ctx, batches, self._models)):
            with on_device(c, f"tower {i}"), autograd.record():
                [loaded] = split_and_load(batch, c)
                output = call_on(c, self._forward, loaded, model)
            outputs.append(output if isinstance(output, dict) else {"loss": output})
            loss: Any = outputs[-1].get("loss")
            shape = (num_samples(batch),)
            if getattr(loss, "shape", None) != shape:
                got = getattr(loss, "shape", sorted(outputs[-1]))
                raise ValueError(
                    f"forward must return an output 'loss', one per sample, of shape {shape}, got "
                    f"{got} on {c}"
                )
            with on_device(c, f"backward of tower {i}"):
                call_on(c, loss.backward)
        return {name: [output[name] for output in outputs] for name in (outputs or [{}])[0]}


def _rule_of(optimizer: mx.optimizer.Optimizer, params: list[gluon.Parameter]) -> Callable:
    """Return the optimizer as a function ``update(params, lr, batch_size)``."""
    if not optimizer.param_dict:
        optimizer.param_dict = dict(enumerate(params))  # so that their lr_mult and wd_mult count
    apply = Updater(optimizer)

    def update(arrays: Sequence[mx.nd.NDArray], lr: float | None, batch_size: int) -> None:
        if lr is not None:
            optimizer.set_learning_rate(lr)
        scale = optimizer.rescale_grad
        optimizer.rescale_grad = scale / batch_size
        try:
            for i, array in enumerate(arrays):
                if array.grad is not None:
                    apply(i, array.grad, array)
        finally:
            optimizer.rescale_grad = scale  # other Towers may be made with this optimizer

    return update


def average_gradients(tower_grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Return for each variable the mean of its gradients over towers, on the first one's device.

    ``tower_grads[i]`` are tower i's gradients, in the same order of variables for every tower:
    float arrays, ``mx.nd`` or ``mx.np``, or pairs (gradient, variable). Returns a list of new
    arrays, or of pairs (mean, the first tower's variable). In a job of several processes the mean
    is over the towers of all of them. The inputs are not changed; nothing is recorded, and nothing
    waits. All towers weigh the same: for batches of different sizes use :class:`gluonpar.Towers`.

    Raises ValueError for towers with different numbers of gradients, and for shapes or dtypes that
    differ; TypeError for entries that are not arrays or pairs, such as None.

    After ``average_gradients`` in TensorFlow's CIFAR-10 example for several GPUs.

    >>> import mxnet as mx
    >>> towers = [[mx.nd.full((2,), value, ctx=mx.cpu(i))] for i, value in enumerate((1, 4))]
    >>> average_gradients(towers)[0].asnumpy().tolist()
    [2.5, 2.5]
    """
    if not isinstance(tower_grads, (list, tuple)) or not tower_grads:
        raise ValueError(f"tower_grads must hold one list per tower, got {tower_grads!r}")
    lengths = [len(entries) for entries in tower_grads]
    if len(set(lengths)) > 1:
        raise ValueError(f"every tower must have one gradient per variable, got {lengths}")
    variables = [*zip(*tower_grads)]
    paired = all(isinstance(e, (tuple, list)) and len(e) == 2 for of in variables for e in of)
    lists = [[entry[0] if paired else entry for entry in entries] for entries in variables]
    for j, grads in enumerate(lists):
        different = list({id(grad): grad for grad in grads}.values())  # towers may share an array
        dtype, _ = operations.check_list(different, f"the towers' gradients of variable {j}")
        operations.check_op("mean", dtype)
    with autograd.pause(), memory.any_shape():
        means = [grads[0].copy() for grads in lists]
    if lists:
        sums = [[mean, *grads[1:]] for mean, grads in zip(means, lists)]
        Exchange([grad.context for grad in lists[0]], op="mean").reduce(in_buckets(sums))
    return [(mean, of[0][1]) for mean, of in zip(means, variables)] if paired else means
