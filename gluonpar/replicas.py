"""Every device's own copy of the parameters, with its gradients."""

from __future__ import annotations

from typing import Sequence

import mxnet as mx


def get_params(params: Sequence[mx.nd.NDArray], ctx: mx.Context) -> list[mx.nd.NDArray]:
    """Copies of ``params`` on ``ctx``, each with a gradient; they never alias the originals.

    Shapes and dtypes are kept. Gradients start at zero and are overwritten by each backward
    (``grad_req='write'``). From ``get_params`` in Dive into Deep Learning, 13.5.3.
    """
    copies = [
        param.copyto(ctx) for param in params
    ]  # as_in_context would alias on the same context
    for copy in copies:
        copy.attach_grad()
    return copies


def check(device_params: Sequence[Sequence[mx.nd.NDArray]], ctx: Sequence[mx.Context]) -> None:
    """Raise ValueError unless ``device_params[i]`` are on ``ctx[i]`` and all of like shapes."""
    if len(device_params) != len(ctx):
        raise ValueError(
            f"{len(device_params)} copies of the parameters for {len(ctx)} contexts {ctx}; "
            "make one a context: [get_params(params, c) for c in ctx]"
        )
    first = [param.shape for param in device_params[0]]
    for params, c in zip(device_params, ctx):
        for i, param in enumerate(params):
            if param.context != c:
                raise ValueError(f"parameter {i} is on {param.context}, but its device is {c}")
        shapes = [param.shape for param in params]
        if shapes != first:
            raise ValueError(f"parameters on {c} have shapes {shapes}, on {ctx[0]} {first}")


def grads(device_params: Sequence[Sequence[mx.nd.NDArray]]) -> list[list[mx.nd.NDArray]]:
    """Per parameter, the list of its gradients, one a device: what an all-reduce takes."""
    return [[copy.grad for copy in copies] for copies in zip(*device_params)]


def zero_grads(params: Sequence[mx.nd.NDArray]) -> None:
    """Set one device's gradients to zero, in place: what a device without samples contributes."""
    for param in params:
        param.grad[:] = 0
