"""make_parallel: run a function of a batch on every device's shard of it."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.runtime.devices import as_list
from gluonpar.sharding import num_samples, split_and_load


class _Run(NamedTuple):
    """The context that ``fn`` ran on, and its number of samples."""

    ctx: mx.Context
    num_samples: int


def make_parallel(fn: Callable, ctx: mx.Context | Sequence[mx.Context], **batch: Any) -> Any:
    """Compute ``fn(**batch)`` on all devices: each runs ``fn`` on its own shard of the batch.

    ``batch`` are named arrays (NumPy, ``mx.nd`` or ``mx.np``) or nests of them, with one entry per
    sample along axis 0. They are split and loaded by :func:`split_and_load`, so with fewer samples
    than devices ``fn`` is called fewer times. ``fn`` returns an array, or a nest of tuples, lists,
    namedtuples and dicts of arrays, with one row per sample, or k rows per sample, in the order of
    the samples. Call i runs in the scope of ``ctx[i]``: arrays that it creates without a context
    are created there. The outputs are concatenated along axis 0 in the order of the batch, as new
    arrays on ``ctx[0]``.

    Under ``autograd.record()`` all of this is recorded, splitting and copying too, and backward
    runs each shard's part on the device that ran its forward. ``fn`` gets its parameters in one of
    two ways. Arrays on one device are copied with ``w.as_in_context(x.context)``, which is
    recorded, so the gradients of all shards flow back and are added in ``w.grad``. A Gluon Block
    that is initialised on all of ``ctx`` is called as usual, and each device keeps the gradient of
    its own copy, for ``gluon.Trainer`` to sum. Take the mean or sum over samples of the
    concatenated output, not in ``fn``. Nothing waits.

    Raises ValueError for no batch, for arguments that ``split_and_load`` refuses, for nests, shapes
    or dtypes that differ between devices, and for outputs without a row per sample; TypeError for
    outputs that are not dense MXNet arrays. An exception in ``fn`` is raised as a RuntimeError that
    names the device, with the exception as its cause.

    After ``make_parallel`` in Effective TensorFlow, "Multi-GPU processing with data parallelism".

    >>> import mxnet as mx
    >>> a, b = mx.nd.arange(5), mx.nd.ones((5,)) * 10
    >>> c = make_parallel(lambda a, b: a + b, [mx.cpu(0), mx.cpu(1)], a=a, b=b)
    >>> c.context, c.asnumpy().tolist()
    (cpu(0), [10.0, 11.0, 12.0, 13.0, 14.0])

    The gradient with respect to a ``w`` on one device, computed on two devices:

    >>> w = mx.nd.ones((1,)); w.attach_grad()
    >>> with mx.autograd.record():
    ...     fn = lambda x: x * w.as_in_context(x.context)
    ...     loss = make_parallel(fn, [mx.cpu(0), mx.cpu(1)], x=a).mean()
    >>> loss.backward()
    >>> w.grad.asscalar()
    2.0
    """
    contexts = as_list(ctx)
    if not callable(fn):
        raise TypeError(f"fn must be a function of the batch's arrays, got {type(fn).__name__}")
    if not batch:
        raise ValueError("make_parallel needs at least one array, passed by name, such as x=x")
    shards = split_and_load(batch, contexts)
    runs = [_Run(c, num_samples(shard)) for shard, c in zip(shards, contexts)]
    outputs = []
    for i, (shard, run) in enumerate(zip(shards, runs)):
        with on_device(run.ctx, f"shard {i} of {len(shards)}"):
            outputs.append(fn(**shard))
    return _join(outputs, runs, "output")


@contextlib.contextmanager
def on_device(ctx: mx.Context, what: str) -> Iterator[None]:
    """Make ``ctx`` the default context, and raise exceptions as RuntimeErrors that name it.

    The message is "``what`` failed on ``ctx``: ..."; the exception is the cause, so both tracebacks
    are shown.
    """
    try:
        with mx.Context(
            ctx
        ):  # a copy: a Context that is entered twice does not restore the outer scope
            yield
    except Exception as error:
        raise RuntimeError(f"{what} failed on {ctx}: {type(error).__name__}: {error}") from error


def _join(parts: list[Any], runs: list[_Run], path: str) -> Any:
    """The nest of ``parts``, with their arrays concatenated on the first device."""
    _check_same_nest(parts, runs, path)
    first = parts[0]
    if isinstance(first, dict):
        joined = copy.copy(first)  # keeps the subclass of dict
        for key in first:
            joined[key] = _join([part[key] for part in parts], runs, f"{path}[{key!r}]")
        return joined
    if isinstance(first, (tuple, list)):
        columns = enumerate(zip(*parts))
        items = [_join(list(column), runs, f"{path}[{i}]") for i, column in columns]
        return (
            type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
        )  # namedtuple
    _check_arrays(parts, runs, path)
    return _concatenate([array.as_in_context(runs[0].ctx) for array in parts])


def _concatenate(arrays: list[mx.nd.NDArray]) -> mx.nd.NDArray:
    if isinstance(arrays[0], mx.np.ndarray):
        return mx.np.concatenate(arrays, axis=0)
    if np.dtype(arrays[0].dtype) == bool:  # mx.nd.concat does not take bool
        return mx.nd.concat(*[array.astype("uint8") for array in arrays], dim=0).astype("bool")
    return mx.nd.concat(*arrays, dim=0)


def _check_same_nest(parts: list[Any], runs: list[_Run], path: str) -> None:
    kinds = [_describe(part) for part in parts]
    for kind, run in zip(kinds, runs):
        if kind != kinds[0]:
            raise ValueError(
                f"fn must return the same nest on every device, got {path} a {kind} on {run.ctx} "
                f"and a {kinds[0]} on {runs[0].ctx}"
            )


def _describe(part: Any) -> str:
    name = type(part).__name__
    if isinstance(part, dict):
        return f"{name} with the keys {', '.join(sorted(map(repr, part)))}"
    if isinstance(part, (tuple, list)):
        return f"{name} of {len(part)}"
    if isinstance(part, mx.nd.NDArray):
        return f"{'mx.np' if isinstance(part, mx.np.ndarray) else 'mx.nd'} array"
    return name


def _check_arrays(arrays: list[Any], runs: list[_Run], path: str) -> None:
    """Check that the arrays are dense, of one dtype, and of one shape per sample."""
    for array, run in zip(arrays, runs):
        if not isinstance(array, mx.nd.NDArray) or array.stype != "default":
            kind = getattr(array, "stype", type(array).__name__)
            raise TypeError(f"fn must return dense MXNet arrays, got {path} a {kind} on {run.ctx}")
        rows = array.shape[0] if array.shape else None
        if rows is None or rows % run.num_samples:
            raise ValueError(
                f"fn must return one row per sample, got {path} of shape {array.shape} on "
                f"{run.ctx} for {run.num_samples} samples; take sums and means of the result"
            )
    kinds = [
        (array.shape[0] // run.num_samples, array.shape[1:], np.dtype(array.dtype))
        for array, run in zip(arrays, runs)
    ]
    for array, kind, run in zip(arrays, kinds, runs):
        if kind != kinds[0]:
            here, there = (
                f"shape {a.shape} and dtype {np.dtype(a.dtype)} on {r.ctx} "
                f"for {r.num_samples} samples"
                for a, r in ((array, run), (arrays[0], runs[0]))
            )
            raise ValueError(
                f"{path} may differ in the number of samples only, got {here} and {there}"
            )
