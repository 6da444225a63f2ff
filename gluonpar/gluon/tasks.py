"""run_tasks: a forward and backward of one's own, run on every device's shard."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Sequence

import mxnet as mx

from gluonpar.runtime import threads
from gluonpar.runtime.devices import as_list


class TaskError(RuntimeError):
    """A task failed on the device ``ctx``; its own exception is the cause (``__cause__``).

    What :func:`run_tasks` raises is also of the cause's type, so that ``except KeyError`` still
    catches a task's KeyError.
    """

    ctx: mx.Context

    def __str__(self) -> str:
        return str(self.args[0])


def run_tasks(
    task: Any, shards: Sequence[Any], ctx: mx.Context | Sequence[mx.Context]
) -> list[Any]:
    """Run ``task`` on each shard inside its context, ``shards[i]`` on ``ctx[i]``; the results.

    ``task`` has a method ``forward_backward(shard)``, or is a function of one shard. It records and
    differentiates by itself (``autograd.record()``, ``backward()``) and returns what it likes: a
    loss, several, a dict of them, of any shapes. The list has its results as they are, in the order
    of the devices, one for each shard; ``zip(*results)`` turns tuples of losses into one list a
    loss. There may be fewer shards than contexts, as for a small batch; :class:`gluonpar.Trainer`
    then counts the rest as zero.

    The tasks are called one after the other on the caller's thread. The devices work side by side
    all the same, for MXNet's operators are only queued: but a task that waits (``asnumpy``,
    ``asscalar``, a metric) holds the next device up, so do that with the results. A thread for each
    device, as in gluon-cv, would have random numbers of its own, which ``mx.random.seed`` does not
    reach, and workspaces that MXNet never frees.

    Raises ValueError for no shards, or more than contexts; TypeError for a task that cannot be
    called. If a task fails, the later ones do not run and the earlier ones' results are dropped:
    :class:`TaskError` names the device. Compare ``gluoncv.utils.parallel``.

    >>> import mxnet as mx
    >>> shards = [mx.nd.ones((n,), ctx=mx.cpu(n)) for n in (1, 2)]
    >>> [float(loss.asscalar()) for loss in run_tasks(mx.nd.sum, shards, [mx.cpu(1), mx.cpu(2)])]
    [1.0, 2.0]
    """
    contexts = as_list(ctx)
    call = getattr(task, "forward_backward", task)
    if not callable(call):
        raise TypeError(
            f"{task!r} is no task: it needs a method forward_backward(shard), or is a function"
        )
    if not 1 <= len(shards) <= len(contexts):
        raise ValueError(
            f"{len(shards)} shards for {len(contexts)} contexts: give one a context, or fewer for "
            "a small batch; split_and_load and split_samples make them"
        )
    threads.share(contexts)
    return [_call(call, shard, c) for shard, c in zip(shards, contexts)]


def _call(call: Callable[[Any], Any], shard: Any, ctx: mx.Context) -> Any:
    try:
        with ctx:
            return call(shard)
    except Exception as error:
        raise _naming(ctx, error) from error


def _naming(ctx: mx.Context, error: Exception) -> TaskError:
    """A TaskError that is of the error's type too, where Python can combine the two."""
    kind, named = type(error), TaskError()
    if not isinstance(named, kind):
        with contextlib.suppress(TypeError):  # a kind that cannot be combined: TaskError alone
            shown = {"__str__": TaskError.__str__, "__module__": kind.__module__}
            both = type(kind.__name__, (kind, TaskError), shown)
            named = both.__new__(both)
    named.args = (f"the task failed on {ctx}: {kind.__name__}: {error}",)
    named.ctx = ctx
    return named
