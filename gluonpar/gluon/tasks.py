"""run_tasks: run a forward and backward function of the user's on every device's shard."""

from __future__ import annotations

import contextlib
from typing import Any, Sequence

import mxnet as mx

from gluonpar.runtime import threads
from gluonpar.runtime.devices import as_list


class TaskError(RuntimeError):
    """A task failed on the context ``ctx``; the task's exception is the cause (``__cause__``).

    :func:`run_tasks` raises an instance of both TaskError and the cause's type, so that ``except
    KeyError`` still catches a task's KeyError.
    """

    ctx: mx.Context

    def __str__(self) -> str:
        return str(self.args[0])


def run_tasks(
    task: Any, shards: Sequence[Any], ctx: mx.Context | Sequence[mx.Context]
) -> list[Any]:
    """Run ``task`` on each shard in the scope of its context, and return the results.

    ``shards[i]`` belongs to ``ctx[i]``; there may be fewer shards than contexts. ``task`` has a
    method ``forward_backward(shard)`` or is a function of one shard. It records and differentiates
    itself (``autograd.record()``, ``backward()``) and may return anything. The results are returned
    unchanged in a list, in the order of the devices.

    The tasks are called one after another on the caller's thread; the devices still run in
    parallel, because MXNet's operators are only queued. A task that waits (``asnumpy``, a metric)
    delays the next device, so do that with the results. (One thread per device, as in
    ``gluoncv.utils.parallel``, would have random generators that ``mx.random.seed`` does not seed.)

    Raises ValueError for no shards, or more shards than contexts; TypeError for a task that is not
    callable; :class:`TaskError`, which names the device, if a task fails: later tasks do not run.

    >>> import mxnet as mx
    >>> shards = [mx.nd.ones((n,), ctx=mx.cpu(n)) for n in (1, 2)]
    >>> [float(loss.asscalar()) for loss in run_tasks(mx.nd.sum, shards, [mx.cpu(1), mx.cpu(2)])]
    [1.0, 2.0]
    """
    contexts = as_list(ctx)
    call = getattr(task, "forward_backward", task)
    if not callable(call):
        raise TypeError(f"task must be a function or have a method forward_backward, got {task!r}")
    if not 1 <= len(shards) <= len(contexts):
        raise ValueError(f"shards must be 1 to {len(contexts)}, one per context, got {len(shards)}")
    threads.share(contexts)
    results = []
    for shard, c in zip(shards, contexts):
        try:
            with c:
                results.append(call(shard))
        except Exception as error:
            raise _task_error(c, error) from error
    return results


def _task_error(ctx: mx.Context, error: Exception) -> TaskError:
    """A TaskError of a class made here, as only that lets ``except`` match the error's type too."""
    kind, named = type(error), TaskError()
    if not isinstance(named, kind):
        with contextlib.suppress(TypeError):  # the type cannot be combined
            shown = {"__str__": TaskError.__str__, "__module__": kind.__module__}
            both = type(kind.__name__, (kind, TaskError), shown)
            named = both.__new__(both)
    named.args = (f"the task failed on {ctx}: {kind.__name__}: {error}",)
    named.ctx = ctx
    return named
