"""run_tasks: run a forward and backward function of the user's on every device's shard.

A round is one call of several devices: of :func:`run_tasks`, or a step of Towers.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Callable, ContextManager, Iterator, Sequence

import mxnet as mx

from gluonpar import cluster, gradients
from gluonpar.runtime import device_threads, devices, interrupts, tape, threads

__all__ = ["TaskError", "run_tasks"]

_numbers = itertools.count()  # of rounds
_last_backward: dict[Any, int] = {}  # by context, the round in which its thread last began backward
# What is entered with a round before its calls, and left after them.
scopes: list[Callable[[Round], ContextManager]] = []


class Round(tape.Recording):
    """Calls of functions on ``num_devices`` devices of this process, and all passes they make."""

    def __init__(self, num_devices: int) -> None:
        super().__init__()
        self.num_devices, self._number = num_devices, next(_numbers)
        self.devices: list[mx.Context] = []  # that were called
        self.failed = ""  # why a device is missing, if one is
        self.sums: Any = None  # of SyncBatchNorms

    def call(self, ctx: mx.Context, function: Callable, *arguments: Any) -> Any:
        """Call ``function(*arguments)`` on the thread of ``ctx``, in this round."""
        scope = cluster.scope()

        def in_round() -> Any:
            thread = tape.this_thread
            outer = thread.round, thread.joint
            thread.round = thread.joint = self
            try:
                with scope():
                    return function(*arguments)
            finally:
                thread.round, thread.joint = outer

        if ctx not in self.devices:
            self.devices.append(ctx)
        return device_threads.call(ctx, in_round)

    def begin_pass(self) -> None:
        """Note that the thread of a device calls backward."""
        _last_backward[device_threads.current()] = self._number

    def has_begun_backward(self, ctx: mx.Context) -> bool:
        """Return whether the thread of ``ctx`` has called backward in this round or a later one."""
        return _last_backward.get(ctx, -1) >= self._number


def current_round() -> Round | None:
    """Return the round that this thread was called in, if it was."""
    return tape.this_thread.round


class TaskError(RuntimeError):
    """A task failed on the context ``ctx``; the task's exception is the cause (``__cause__``)."""

    ctx: mx.Context


def run_tasks(
    task: Any, shards: Sequence[Any], ctx: mx.Context | Sequence[mx.Context]
) -> list[Any]:
    """Run ``task`` on each shard in the scope of its context, and return the results.

    ``shards[i]`` belongs to ``ctx[i]``; there may be fewer shards than contexts. ``task`` has a
    method ``forward_backward(shard)`` or is a function of one shard. It calls ``autograd.record()``
    and ``backward()`` itself and may return anything. The results are returned unchanged in a list,
    in the order of the devices.

    The tasks are called one after another, each on a thread that is kept for its device; the
    devices compute in parallel, because MXNet's operators are only queued. A task that waits
    (``asnumpy``, a metric) delays the next device, so do that with the results. Each thread has
    workspaces and random generators of its own, so no device's operators are queued behind
    another's: see :class:`SyncBatchNorm`, which normalises over the samples of all tasks of the
    call. Within a task, ``run_tasks`` is part of that task's call. ``mx.random.seed`` seeds all
    generators; with ``mx.cpu(0)`` alone, or with GPUs, the random numbers are those of a plain
    loop. The first Ctrl-C is raised when all tasks have returned.

    In a job of several processes all ranks call it equally often, if the network has a
    :class:`SyncBatchNorm`. There ``shards`` may be empty: a rank without samples waits until the
    others have queued their tasks, and gets their running statistics.

    Raises ValueError for no shards in one process, more shards than contexts, or a context that is
    listed twice; RuntimeError if a :class:`SyncBatchNorm` was not called equally often on all
    devices; :class:`TaskError`, which names the device, if a task fails: later tasks do not run.
    After the last two the call's gradients count in no later step of a Trainer. Gradients that were
    added to others (``grad_req='add'``, ``no_sync()``) remain: call ``zero_grad()`` and begin
    again.

    >>> import mxnet as mx
    >>> shards = [mx.nd.ones((n,), ctx=mx.cpu(n)) for n in (1, 2)]
    >>> [float(loss.asscalar()) for loss in run_tasks(mx.nd.sum, shards, [mx.cpu(1), mx.cpu(2)])]
    [1.0, 2.0]
    """
    contexts = devices.as_list(ctx)
    devices.check_distinct(contexts)
    least = int(cluster.size() == 1 or current_round() is not None)
    if not least <= len(shards) <= len(contexts):
        number = f"{least} to {len(contexts)}, one per context"
        raise ValueError(f"the number of shards must be {number}, got {len(shards)}")
    threads.share(contexts)
    results = []
    with all_devices(len(shards)) as call_on:
        for shard, c in zip(shards, contexts):
            try:
                results.append(call_on(c, getattr(task, "forward_backward", task), shard))
            except Exception as error:
                failure = TaskError(f"the task failed on {c}: {type(error).__name__}: {error}")
                failure.ctx = c
                raise failure from error
    return results


@contextlib.contextmanager
def all_devices(num_devices: int) -> Iterator[Callable]:
    """Yield ``call(ctx, function, *arguments)``, which calls the function on the device's thread.

    It is to be called for ``num_devices`` devices, over which SyncBatchNorms sum; within a task
    they sum over the devices of that task's call. Ctrl-C is held back until the end.
    """
    outer = current_round()
    if outer:
        yield outer.call
        return
    with interrupts.held_while_waiting():
        round_ = Round(num_devices)
        try:
            with contextlib.ExitStack() as stack:
                for scope in scopes:
                    stack.enter_context(scope(round_))
                yield round_.call
        except BaseException:
            gradients.discard(round_)
            raise
