"""Which gradients count: those of the newest batch that wrote their parameter.

On one device, with ``grad_req='write'``, a gradient is that of the last backward pass that reached
the parameter. On several devices the backward of one batch is one pass, or a pass per device; with
fewer samples than devices some do not take place, and there the gradients of an earlier batch are
left, which must not count. What belongs to one batch is read from MXNet's tape
(:mod:`gluonpar.runtime.tape`), by this law:

- A recording is of one batch.
- A pass goes on with the newest batch that a parameter that it writes has gradients of.
- It begins another batch if that one has been used, or if another recording of that batch has
  written on one of its devices; its own recordings take along what they have written.
- A gradient counts if its parameter's newest batch wrote it.

MXNet's flags say which count: where a batch begins, those of gradients of others are cleared. Nor
do gradients count that a call of run_tasks, or a step of Towers, had computed when it failed.
Passes that add to gradients are of no batch (:mod:`gluonpar.gluon.accumulation`).
"""

from __future__ import annotations

import functools
import itertools
from operator import attrgetter
from typing import Any, Callable, Iterable, Sequence

from mxnet import gluon

from gluonpar.cluster import world
from gluonpar.gluon import accumulation, ages, device_sums, gradients
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
        self.batch, self.devices = _BEFORE, set()


_BEFORE = Gradients.batch = _Batch()  # of what was written before the parameter was tracked
_BEFORE.use()


def _write(written: Sequence[tuple[tape.Recording, Gradients, int]]) -> None:
    """Note what a pass will write, and let what is of other batches not count: the law."""
    newest = max({grads.batch for _, grads, _ in written}, key=attrgetter("number"))
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
            grads.batch, grads.sum_on = batch, None
            pairs = zip(grads.values, grads.wrote)
            old = [value for value, part in pairs if part is None or part.batch is not batch]
            memory.set_grad_flags(old, False)
        recording.part.devices.add(grads.devices[i])
        if grads.wrote[i] is not recording.part:
            grads.wrote[i] = recording.part
            ages.count(grads, i)


def _begin_pass(reached: tape.Reached) -> Callable[[], None]:
    """Note what a pass will write; return what is to be done after it."""
    with tape.lock:
        found = [(key, *each) for key, names in reached.items() for each in gradients.named(names)]
        adding = [(grads, i) for _, grads, i in found if grads.adds]
        written = [each for each in found if not each[1].adds] if adding else found
        if written:
            _write(written)
        saved = [(grads, i, accumulation.prepare(grads, i)) for grads, i in adding]
    round_ = device_sums.current_round()
    if round_ is not None:
        round_.written += written

    def end_pass() -> None:
        for _, grads, _ in found:
            grads.follow()
        for each in saved:
            accumulation.add(*each)

    return end_pass


def track(params: Iterable[gluon.Parameter]) -> None:
    """Watch from now on which passes write the gradients of ``params``, which may be deferred."""
    tape.watch(_begin_pass, gradients.renamed)
    for param in params:
        if gradients.of(param) is None:
            gradients.add(param)


def _tracking(change: Callable) -> Callable:
    """Track a parameter of several devices, or of several ranks, as soon as it has gradients."""

    @functools.wraps(change)
    def tracked(param: gluon.Parameter, *args: Any) -> None:
        change(param, *args)
        if gradients.of(param) is not None:
            gradients.add(param)
        elif len(private_fields.values(param) or ()) > (not world.launched()):
            track([param])

    return tracked


for _function in (private_fields.ALLOCATES_GRADIENTS, private_fields.CASTS):
    private_fields.wrap(_function, _tracking)


def fresh(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the gradient of a tracked parameter counts.

    With grad_req='add' all do or none.
    """
    grads = gradients.of(param)
    flags = grads.flags()
    return [any(flags)] * len(flags) if grads.adds_always else flags


def summands(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the gradient of a tracked parameter is added in the next sum.

    It is if it is :func:`fresh`; of a sum that several devices have, one is added.
    """
    on, counting = gradients.of(param).sum_on, fresh(param)
    return [counts and (on is None or i in on) for i, counts in enumerate(counting)]


def ran_on(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the last batch that wrote the parameter's gradient ran there."""
    grads = gradients.of(param)
    parts = [part for part in grads.batch.parts if part.batch is grads.batch]
    return [any(device in part.devices for part in parts) for device in grads.devices]


def mark_used(params: Iterable[gluon.Parameter]) -> None:
    """Let no gradient of ``params`` count until backward has written it again."""
    with tape.lock:
        for grads in map(gradients.of, params):
            if any(grads.flags()):
                grads.batch.use()
                memory.set_grad_flags(grads.values, False)
            grads.accumulates = False
            grads.sum_on = grads.sum_on if grads.adds_always else None


def mark_summed(params: Iterable[gluon.Parameter], devices: Sequence[int]) -> None:
    """Note that the gradients on ``devices`` are sums, which count, and others may be, too.

    The sums are over all ranks: on one of them ``devices`` is one device, and on the others none.
    In the next sum only the gradients on ``devices`` are added, and passes that add to them will
    find zeros on the other devices.
    """
    with tape.lock:
        for grads in map(gradients.of, params):
            grads.batch.use()
            memory.set_grad_flags(grads.values, True)
            grads.sum_on = devices
            ages.begin(grads)


def discard(written: Iterable[tuple[tape.Recording, Gradients, int]]) -> None:
    """Let no gradient count that passes have written; those that were added to others stay."""
    for _, grads, i in written:
        memory.set_grad_flags(grads.values[i : i + 1], False)
