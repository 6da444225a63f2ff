"""make_parallel: a function of a batch, run on every device's shard of it."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.runtime.devices import as_list
from gluonpar.sharding import num_samples, split_and_load


class _Run(NamedTuple):
    """Where ``fn`` ran, and on how many samples."""

    ctx: mx.Context
    num_samples: int


def make_parallel(fn: Callable, ctx: mx.Context | Sequence[mx.Context], **batch: Any) -> Any:
    """``fn(**batch)``, computed on all devices: each runs ``fn`` on its own shard of the batch.

    ``batch`` are named arrays (NumPy, ``mx.nd`` or ``mx.np``) or nests of them, with one entry a
    sample along axis 0. They are cut and moved by :func:`split_and_load`, so with fewer samples
    than devices ``fn`` is called fewer times. ``fn`` returns an array, or a nest of tuples, lists,
    namedtuples and dicts of arrays, with one row a sample, or k rows a sample, in the order of the
    samples. Call i runs in the scope of ``ctx[i]``: an array that it creates without saying where
    lands there. The outputs are put together along axis 0 in the order of the batch, as new arrays
    on ``ctx[0]``.

    Under ``autograd.record()`` all of this is recorded, cutting and moving too, and backward runs
    each shard's part on the device that ran its forward. ``fn`` finds its parameters in one of two
    ways. Arrays that live on one device come with ``w.as_in_context(x.context)``: that is recorded,
    so the gradients of all shards travel back and are added in ``w.grad``. A Gluon Block that is
    initialised on all of ``ctx`` is simply called, and each device keeps the gradient of its own
    copy, for ``gluon.Trainer`` to sum. Take the mean or sum over samples of the joined output, not
    in ``fn``. Nothing waits.

    Raises ValueError without any batch, for what ``split_and_load`` refuses, for nests, shapes or
    dtypes that differ between devices and for outputs without a row for each sample; TypeError for
    outputs that are no dense MXNet arrays. An exception in ``fn`` becomes a RuntimeError that names
    the device, with the exception as its cause.

    After ``make_parallel`` in Effective TensorFlow, "Multi-GPU processing with data parallelism".

    >>> import mxnet as mx
    >>> a, b = mx.nd.arange(5), mx.nd.ones((5,)) * 10
    >>> c = make_parallel(lambda a, b: a + b, [mx.cpu(0), mx.cpu(1)], a=a, b=b)
    >>> c.context, c.asnumpy().tolist()
    (cpu(0), [10.0, 11.0, 12.0, 13.0, 14.0])

    The gradient with respect to one ``w`` on one device, through two devices:

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
        raise TypeError(f"fn is a {type(fn).__name__}; pass a function of the batch's arrays")
    if not batch:
        raise ValueError("make_parallel got no batch; pass at least one array by name, as x=x")
    shards = split_and_load(batch, contexts)
    runs = [_Run(c, num_samples(shard)) for shard, c in zip(shards, contexts)]
    outputs = []
    for i, (shard, run) in enumerate(zip(shards, runs)):
        with on_device(run.ctx, f"shard {i} of {len(shards)}"):
            outputs.append(fn(**shard))
    return _join(outputs, runs, "output")


@contextlib.contextmanager
def on_device(ctx: mx.Context, what: str) -> Iterator[None]:
    """Scope in which new arrays land on ``ctx``, and exceptions tell where they happened.

    An exception becomes a RuntimeError ("``what`` failed on ``ctx``: ...") with the exception as
    its cause, so both tracebacks are shown.
    """
    try:
        with mx.Context(ctx):  # a copy: an object that is entered twice forgets the outer scope
            yield
    except Exception as error:
        raise RuntimeError(f"{what} failed on {ctx}: {type(error).__name__}: {error}") from error


def _join(parts: list[Any], runs: list[_Run], path: str) -> Any:
    """The nest that all ``parts`` are, with their arrays put together on the first device."""
    _check_same_nest(parts, runs, path)
    first = parts[0]
    if isinstance(first, dict):
        joined = copy.copy(first)  # whatever kind of dict it is
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
    if np.dtype(arrays[0].dtype) == bool:  # which mx.nd.concat does not take
        return mx.nd.concat(*[array.astype("uint8") for array in arrays], dim=0).astype("bool")
    return mx.nd.concat(*arrays, dim=0)


def _check_same_nest(parts: list[Any], runs: list[_Run], path: str) -> None:
    kinds = [_describe(part) for part in parts]
    for kind, run in zip(kinds, runs):
        if kind != kinds[0]:
            raise ValueError(
                f"{path} is a {kind} on {run.ctx}, but a {kinds[0]} on {runs[0].ctx}; "
                "fn must return the same nest on every device"
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
    """Dense arrays of one dtype and shape, but for axis 0: there, equally many rows a sample."""
    for array, run in zip(arrays, runs):
        if not isinstance(array, mx.nd.NDArray) or array.stype != "default":
            kind = getattr(array, "stype", type(array).__name__)
            raise TypeError(f"{path} on {run.ctx} is a {kind}; fn must return dense MXNet arrays")
        rows = array.shape[0] if array.shape else None
        if rows is None or rows % run.num_samples:
            raise ValueError(
                f"{path} has shape {array.shape} on {run.ctx} for {run.num_samples} samples; "
                "fn must return a row for each sample: take sums and means of the joined output"
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
                f"{path} has {here}, but {there}; only the number of samples may differ"
            )
