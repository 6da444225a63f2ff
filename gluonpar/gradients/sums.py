"""Gradients that are not of one batch: passes have added to them, or they are sums over devices.

With ``no_sync`` or ``grad_req='add'`` passes add to gradients, which are then of no batch. Where
the gradients are sums over devices, passes add to the sum on one device. If such a pass has also
written a batch, that batch is used when these gradients are used. ``no_sync`` does without MXNet's
``'add'``, with which the backward of some operators still overwrites the gradient, and of others
writes to memory that is not theirs (MXNet 1.9.1: mean, clip, cumsum, ...).

Before the sum over devices ``list_grad()`` holds parts of the gradient. A Trainer sums them, or the
program does by :func:`gluonpar.allreduce` or ``allreduce_many``. A program may clip and update by
sums, not by parts.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Sequence

import mxnet as mx
from mxnet import autograd

from gluonpar import cluster
from gluonpar.cluster import world
from gluonpar.collectives import operations
from gluonpar.gradients import ages
from gluonpar.gradients.records import Gradients, OfParameter, Sums, of_grads
from gluonpar.runtime import memory, tape


def prepare_to_add(grads: Gradients, i: int) -> mx.nd.NDArray | None:
    """Before a pass that adds on device ``i``, return a copy of what it will overwrite."""
    with autograd.pause():
        if grads.sums is not None:
            others = [grad for j, grad in enumerate(grads.grads) if j not in grads.sums.added]
            memory.zero(others)
            grads.sums = None
        overwrites = not grads.adds_always and grads.counting()[i]
        grads.note_added(i)
        return grads.grads[i].copy() if overwrites else None


def mark_used(of_params: Iterable[Gradients]) -> None:
    """Let none of these gradients count until backward has written it again."""
    with tape.lock:
        for grads in of_params:
            if grads.lost or any(grads.counting()):
                _use(grads)
            memory.set_grad_flags(grads.values, False)
            grads.accumulates, grads.sums = False, grads.sums if grads.adds_always else None


def mark_summed(
    of_params: Iterable[Gradients], root: int = 0, on_some_rank: Iterable[bool] | None = None
) -> None:
    """Note that the gradients on all devices, or on device ``root`` only, are sums, and count.

    The next sum adds only rank 0's gradients on ``root``, and passes add only to these.
    ``on_some_rank`` says for each parameter whether any rank has a gradient (None: all do);
    otherwise nothing counts.
    """
    sums, none = Sums([root] if world.rank() == 0 else []), Sums([])
    with tape.lock:
        for grads, counts in zip(of_params, on_some_rank or itertools.repeat(True)):
            _use(grads)
            memory.set_grad_flags(grads.values, counts)
            grads.reset()
            if counts or not grads.adds_always:
                grads.sums = sums if counts else none
            grads.age.begin_before_last_sum()


def mark_exchanged(of_params: Sequence[Gradients], on_some_rank: Sequence[bool]) -> None:
    """Note a sum that the program uses itself: only gradients to which passes add still count."""
    pairs = [*zip(of_params, on_some_rank)]
    mark_summed([grads for grads, any_counts in pairs if any_counts and grads.adds()])
    mark_used([grads for grads in of_params if not grads.adds()])


def _use(grads: Gradients) -> None:
    for batch in (grads.newest(True), grads.newest(False), *grads.beside):
        batch.use()
    grads.beside.clear()
    if not world.is_apart():
        grads.lost.clear()


@operations.after_sums.append
def _note_sums(lists: Iterable[Sequence[mx.nd.NDArray]]) -> None:
    """Note that a program has summed gradients over all devices: the next sum adds all of them."""
    for grads in filter(None, map(of_grads, lists)):
        grads.sums = Sums(range(len(grads.values)), by_program=True)


def are_sums(of_params: Sequence[Gradients]) -> bool:
    """Return whether some of these gradients count, and all of these are sums."""
    counting = [grads for grads in of_params if any(grads.counting())]
    return bool(counting) and all(grads.sums is not None for grads in counting)


def check_summed(of_params: Iterable[OfParameter]) -> None:
    """Raise ValueError if backward has written one of these gradients since they were summed."""
    for grads in of_params:
        is_sum = len(grads.values) * cluster.size() == 1 or grads.sums is not None
        if not is_sum and any(grads.counting()):
            raise ValueError(
                f"backward has written the gradient of {grads.param().name} since the last sum "
                "over devices; call allreduce_grads() before update(), or step() instead of both"
            )


def summands(
    of_params: Sequence[Gradients], num_processes: int, of: str, **compared: Any
) -> tuple[list[list[bool]], list[bool]]:
    """Return per parameter which devices' gradients the next sum adds, and if any rank has one.

    If the gradients are sums, one is added. Gradients that are older than other ranks' gradients
    are not added. All ranks call this before each sum, with the same name ``of``; what else they
    compare are arguments of :func:`gluonpar.cluster.check_equal_async`. A rank that has new
    gradients of all parameters does not wait.
    """
    new = [grads.counting() for grads in of_params]
    on_some_rank, is_old = [*map(any, new)], [False] * len(new)
    if num_processes > 1 and (of_params or compared):
        pairs = zip(of_params, on_some_rank)
        of_this = [grads.age.of(counts, grads.adds(), bool(grads.lost)) for grads, counts in pairs]
        on_some_rank, is_old = ages.of_ranks(of_this, of, **compared)
    added = []
    for grads, counts, old in zip(of_params, new, is_old):
        on = range(len(counts)) if grads.sums is None else grads.sums.added
        # With 'add' a gradient holds all that there has been, also of a rank without samples.
        counts = [grads.adds_always or (is_new and not old) for is_new in counts]
        added.append([is_added and i in on for i, is_added in enumerate(counts)])
    return added, on_some_rank


def summed(
    of_params: Sequence[Gradients], num_processes: int, may_be_stale: bool
) -> tuple[list[list[bool]], list[bool]]:
    """Return, as :func:`summands` does, which of the gradients, which are sums, count.

    On a rank without samples nothing shows sums that gluonpar has not made. If parameters
    ``may_be_stale``, ranks compare, and this waits.
    """
    counting = [grads.counting() for grads in of_params]
    on_some_rank = [*map(any, counting)]
    made_here = any(grads.sums and not grads.sums.by_program for grads in of_params)
    if num_processes > 1 and not made_here:
        every = [True] * len(counting)
        on_some_rank = (cluster.total(on_some_rank) > 0).tolist() if may_be_stale else every
    return counting, on_some_rank
