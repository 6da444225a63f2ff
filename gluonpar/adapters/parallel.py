"""make_parallel: run a function of a batch on every device's shard of it."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx

from gluonpar import cluster
from gluonpar.runtime import devices
from gluonpar.sharding import NESTS, items, num_samples, rebuild, split_and_load


def make_parallel(fn: Callable, ctx: mx.Context | Sequence[mx.Context], **batch: Any) -> Any:
    """Compute ``fn(**batch)`` on all devices: each runs ``fn`` on its own shard of the batch.

    ``batch`` are named arrays (NumPy, ``mx.nd`` or ``mx.np``) or nests of them, with one entry per
    sample along axis 0, split by :func:`split_and_load`: with fewer samples than devices ``fn`` is
    called fewer times. Call i runs in the scope of ``ctx[i]``. ``fn`` returns an array, or a nest
    of tuples, lists, namedtuples and dicts of arrays, with k rows per sample in the samples' order.
    They are concatenated along axis 0 in the order of the batch, as new arrays on ``ctx[0]``.

    Under ``autograd.record()`` splitting and copying are recorded, too, and backward runs each
    shard's part on the device that ran its forward. In ``fn``, copy parameters that are on one
    device with ``w.as_in_context(x.context)``: the gradients of all shards are added in ``w.grad``.
    A Gluon Block that is initialised on all of ``ctx`` is called as usual, and each device keeps
    the gradient of its own copy, for ``gluon.Trainer`` to sum. A Block with :class:`SyncBatchNorm`
    is trained on CPU contexts by :func:`run_tasks` or :class:`Towers` instead. Take the mean or sum
    over samples of the concatenated output, not in ``fn``. Nothing waits.

    In a job of several processes it is refused outside ``gluonpar.cluster.local()``: ``fn`` may use
    any array, and backward would leave in its gradient only what this process adds. Inside, the
    output and the gradients are of this rank's part of the batch; ``allreduce([w.grad])``, called
    outside, sums them.

    Raises ValueError for a batch without arrays, in a job outside ``cluster.local()``, for nests
    that differ between devices, and for outputs without a row per sample; TypeError for outputs
    that are not dense MXNet arrays; what ``split_and_load`` raises for a batch, and MXNet's
    ``concat`` for shapes or dtypes that differ. An exception in ``fn`` is raised as a RuntimeError
    that names the device, with the exception as its cause.

    After ``make_parallel`` in Effective TensorFlow, "Multi-GPU processing with data parallelism".

    >>> import mxnet as mx
    >>> w = mx.nd.ones((1,)) * 10; w.attach_grad()
    >>> fn = lambda x: x * w.as_in_context(x.context)
    >>> with mx.autograd.record():
    ...     outputs = make_parallel(fn, [mx.cpu(0), mx.cpu(1)], x=mx.nd.arange(5))
    >>> outputs.backward()
    >>> outputs.context, outputs.asnumpy().tolist(), float(w.grad.asscalar())
    (cpu(0), [0.0, 10.0, 20.0, 30.0, 40.0], 10.0)
    """
    contexts = devices.as_list(ctx)
    if cluster.size() > 1:
        raise ValueError(
            "make_parallel must stay in one process: backward writes the gradients of any array "
            f"that fn uses, to which the other {cluster.size() - 1} ranks cannot add; call it "
            "inside gluonpar.cluster.local() on this rank's part of the batch, and sum the "
            "gradients by gluonpar.Trainer or allreduce"
        )
    shards = split_and_load(batch, contexts)
    outputs = []
    for i, (shard, c) in enumerate(zip(shards, contexts)):
        with on_device(c, f"shard {i} of {len(shards)}"):
            outputs.append(fn(**shard))
    return _join(outputs, [*zip(contexts, map(num_samples, shards))], "output")


@contextlib.contextmanager
def on_device(ctx: mx.Context, name: str) -> Iterator[None]:
    """Make ``ctx`` the default context; raise exceptions as RuntimeError: "name failed on ctx"."""
    try:
        with mx.Context(ctx):  # a copy: entered twice, one Context does not restore the outer scope
            yield
    except Exception as error:
        raise RuntimeError(f"{name} failed on {ctx}: {type(error).__name__}: {error}") from error


def _join(parts: Sequence[Any], runs: Sequence[tuple[mx.Context, int]], path: str) -> Any:
    """Return the nest of ``parts``, with their arrays concatenated on the first device.

    ``runs`` are the context of each part, and the number of samples that it is of.
    """
    first = parts[0]
    if isinstance(first, NESTS):
        for part, (c, _) in zip(parts, runs):
            if type(part) is not type(first) or len(part) != len(first):
                raise ValueError(f"{path} must be alike on all devices, but differs on {c}")
        keys = [key for key, _ in items(first)]
        joined = (_join([part[key] for part in parts], runs, f"{path}[{key!r}]") for key in keys)
        return rebuild(first, joined)
    for part, (c, n) in zip(parts, runs):
        kind = getattr(part, "stype", type(part).__name__)
        if kind != "default":
            raise TypeError(f"fn must return dense MXNet arrays, got {path} a {kind} on {c}")
        if not part.shape or part.shape[0] % n:
            raise ValueError(
                f"fn must return one row per sample, got {path} of shape {part.shape} on {c} for "
                f"{n} samples; take sums and means of the result"
            )
    # As mx.np arrays in any case: mx.nd.concat does not take bool.
    arrays = [array.as_in_context(runs[0][0]).as_np_ndarray() for array in parts]
    joined = mx.np.concatenate(arrays, axis=0)
    return joined if isinstance(first, mx.np.ndarray) else joined.as_nd_ndarray()
