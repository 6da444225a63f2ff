"""Which gradients count: the ones that their parameter's newest batch wrote.

On one device, with ``grad_req='write'``, the last backward pass that reached the parameter wrote
the gradient. On several devices the backward of one batch is one pass, or a pass per device; with
fewer samples than devices some do not take place, and there the gradients of an earlier batch are
left, which must not count. What belongs to one batch is read from MXNet's tape
(:mod:`gluonpar.runtime.tape`), by this law:

- A recording is of one batch.
- A pass goes on with the newest batch that a parameter that it writes has gradients of.
- It begins another batch if that one has been used, or if another recording of that batch has
  written on one of its devices; its own recordings take along what they have written.
- A gradient counts if its parameter's newest batch wrote it.

MXNet's flags say which count: where a batch begins, the flags of other batches' gradients are
cleared. Gradients that passes add to are of no batch; what was written beside them is used with
them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Iterable, Sequence

from mxnet import autograd, gluon

from gluonpar.batch_norm import current_round
from gluonpar.cluster import world
from gluonpar.gluon import gradients
from gluonpar.gluon.gradients import Gradients
from gluonpar.runtime import memory, private_fields, tape


class _Batch:
    """Gradients that count together; ``parts`` of other batches have been in this one."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number, self.is_used = next(self.numbers), False
        self.parts: set[_Part] = set()

    def use(self) -> None:
        self.is_used = True
        self.parts.clear()


class _Part:
    """What a recording has written of its batch, and on which devices."""

    def __init__(self) -> None:
        self.batch = _BEFORE
        self.devices: set[tuple[int, int]] = set()


_BEFORE = Gradients.batch = _Batch()  # of what was written before the parameter was tracked
_BEFORE.use()


def _write(written: Sequence[tape.Written]) -> _Batch:
    """Note what a pass will write, and let what is of other batches not count: the law.

    Return the batch that the pass is of.
    """
    newest = max({grads.batch for _, grads, _ in written}, key=lambda batch: batch.number)
    for recording in {recording for recording, *_ in written}:
        if recording.part is None or recording.part.batch.is_used:
            recording.part = _Part()
    parts = {recording.part for recording, *_ in written}
    devices = {grads.devices[i] for _, grads, i in written}
    others = newest.parts - parts
    begins = newest.is_used or any(not part.devices.isdisjoint(devices) for part in others)
    batch = _Batch() if begins else newest
    batch.parts |= parts
    for part in parts:
        part.batch = batch
    for recording, grads, i in written:
        if grads.batch is not batch:
            grads.batch = batch
            pairs = zip(grads.values, grads.wrote)
            old = [value for value, part in pairs if part is None or part.batch is not batch]
            memory.set_grad_flags(old, False)
        grads.sum_on = None
        recording.part.devices.add(grads.devices[i])
        if grads.wrote[i] is not recording.part:
            grads.wrote[i] = recording.part
            grads.count(i)
    return batch


def _begin_pass(reached: Sequence[tape.Written]) -> Callable[[], None]:
    """Note what a pass will write; return what is to be done after it."""
    with tape.lock:
        written = [each for each in reached if not each[1].adds()]
        added = [(grads, i) for _, grads, i in reached if grads.adds()]
        if written:
            batch = _write(written)
            for grads, _ in added:
                grads.beside.add(batch)
        saved = [grads.prepare_to_add(i) for grads, i in added]
    tasks = current_round()
    if tasks is not None:
        tasks.after_failure.append(functools.partial(_discard, written))

    def end_pass() -> None:
        for _, grads, i in reached:
            grads.follow(i)
        for (grads, i), before in zip(added, saved):
            if before is not None:
                with autograd.pause():
                    grads.grads[i] += before

    return end_pass


def track(params: Iterable[gluon.Parameter]) -> None:
    """Watch from now on which passes write the gradients of ``params``, which may be deferred."""
    tape.watch(_begin_pass)
    for param in params:
        if param not in gradients.tracked:
            gradients.tracked[param] = Gradients(param)


@private_fields.around(private_fields.ALLOCATES_GRADIENTS)
@private_fields.around(private_fields.CASTS)
def _track_changed(change: Callable, param: gluon.Parameter, *args: Any) -> None:
    """Track a parameter of several devices, or of several ranks, as soon as it has gradients."""
    change(param, *args)
    if param in gradients.tracked:
        gradients.tracked[param].renew()
    elif len(private_fields.values(param) or ()) > (not world.launched()):
        track([param])


def ran_on(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the last batch that wrote the parameter's gradient ran there."""
    grads = gradients.tracked[param]
    parts = [part for part in grads.batch.parts if part.batch is grads.batch]
    return [any(device in part.devices for part in parts) for device in grads.devices]


def _use(grads: Gradients) -> None:
    for batch in (grads.batch, *grads.beside):
        batch.use()
    grads.beside.clear()


def mark_used(params: Iterable[gluon.Parameter]) -> None:
    """Let no gradient of ``params`` count until backward has written it again."""
    with tape.lock:
        for grads in map(gradients.tracked.__getitem__, params):
            if any(grads.fresh()):
                _use(grads)
                memory.set_grad_flags(grads.values, False)
            grads.accumulates, grads.sum_on = False, grads.sum_on if grads.adds_always else None


def mark_summed(params: Iterable[gluon.Parameter], root: int = 0) -> None:
    """Note that the gradients on all devices, or on device ``root`` only, are sums, and count.

    Only rank 0's on ``root`` are added in the next sum, or added to by passes.
    """
    devices = [root] if world.rank() == 0 else []
    with tape.lock:
        for grads in map(gradients.tracked.__getitem__, params):
            _use(grads)
            memory.set_grad_flags(grads.values, True)
            grads.become_sums(devices)


def _discard(written: Iterable[tape.Written]) -> None:
    """After tasks that failed, let no gradient count that their passes have written, not added."""
    for _, grads, i in written:
        grads.batch.use()
        memory.set_grad_flags(grads.values[i : i + 1], False)
