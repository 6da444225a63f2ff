"""Before and after each backward pass: apply the law, and add where gradients accumulate."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Sequence

from mxnet import autograd, gluon

from gluonpar.cluster import world
from gluonpar.gradients import law, samples, sums
from gluonpar.gradients.by_hand import Unjoined
from gluonpar.gradients.records import Gradients, tracked
from gluonpar.gradients.static_graphs import track
from gluonpar.runtime import private_fields, tape

_numbers = itertools.count()  # of passes


@tape.observers.append
def _begin_pass(reached: Sequence[tape.Written], heads: Sequence[int]) -> Callable[[], None]:
    """Note what a pass will write; return what is to be done after it."""
    samples.count(heads, reached)
    thread, number, is_local = tape.this_thread.program, next(_numbers), world.is_apart()
    written: list[law.Written] = []
    added: list[tuple[Gradients, int]] = []
    followed: list[tuple[Gradients, int]] = []
    with tape.lock:
        for each in reached:
            recording, record, i = each
            if isinstance(record, Unjoined):
                record.written.append((number, thread, recording, i))
                continue
            followed.append((record, i))
            if record.adds():
                added.append((record, i))
            else:
                record.sums = None
                record.note_lost(i, is_local)
                written.append(each)
        if written:
            batch, new = law.write(written, thread, is_local)
            for grads, i in () if is_local else new:
                grads.age.count(i)
            for grads, _ in added:
                grads.beside.add(batch)
        saved = [sums.prepare_to_add(grads, i) for grads, i in added]

    def end_pass() -> None:
        for grads, i in followed:
            grads.follow(i)
        for (grads, i), before in zip(added, saved):
            if before is not None:
                with autograd.pause():
                    grads.grads[i] += before

    return end_pass


@private_fields.around(private_fields.ALLOCATES_GRADIENTS)
@private_fields.around(private_fields.CASTS)
def _track_changed(change: Callable, param: gluon.Parameter, *args: Any) -> None:
    """Track a parameter of several devices, or of several ranks, as soon as it has gradients."""
    change(param, *args)
    if param in tracked:
        tracked[param].renew()
    elif len(private_fields.values(param) or ()) > (not world.launched()):
        track([param])
