"""Which gradients count: those that their parameter's newest batch wrote.

MXNet counts every gradient that backward has written since the last step. On one device the last
pass that reached a parameter wrote its gradient (``grad_req='write'``). On several devices the
backward of one batch is one pass, or passes for each device. With fewer samples than devices some
devices have no pass, and still have gradients of an earlier batch. Only these must not count. What
belongs to one batch is read from MXNet's tape (:mod:`gluonpar.runtime.tape`), by this law:

- A recording is of one batch; so is a call of ``run_tasks``, which is one recording.
- A pass goes on with the newest batch that a parameter that it writes has gradients of.
- It begins another batch if that one has been used, or if it writes again where other recordings of
  that batch have written, and leaves out devices that they wrote on; its own recordings take along
  what they have written. But passes that a thread makes in a row on one device are of one batch:
  on the first device, where batches begin, as many as there have been on another device.
- A gradient counts if its parameter's newest batch wrote it.

So the third of the passes ``0 1 0`` on devices 0 and 1 begins a batch. The fourth of ``0 0 1 1``
does not: there are two passes for each device, as in adversarial training. Where two batches cannot
be told apart, all gradients count, as in MXNet.

On a rank of a job, passes inside ``cluster.local()`` are of batches of their own. Steps of the job
leave these out; steps inside, which are those of a program of one process, go by all passes.

This module is the law, and nothing else: it reads no array, and calls no function of MXNet.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any, Sequence, Tuple

Device = Tuple[int, int]  # type and number


class Batch:
    """Gradients that count together."""

    numbers = itertools.count()

    def __init__(self, is_local: bool = False) -> None:
        self.number, self.is_used, self.is_local = next(self.numbers), False, is_local
        # Parts on whose devices others have written since are left out. A part may be of another
        # batch by now.
        self.parts: set[Part] = set()
        self.num_parts: collections.Counter[Device] = collections.Counter()  # that wrote there
        self.last: dict[int, set[Device]] = {}  # the devices that a thread's last pass wrote on

    def use(self) -> None:
        """Note that a step has used the batch: no pass goes on with it."""
        self.is_used = True
        self.parts.clear()
        self.last.clear()


class Part:
    """The gradients of a batch that one recording has written, and on which devices."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.devices: set[Device] = set()
        self.has_failed = False  # whether one of its tasks has failed


BEFORE = Part(Batch())  # for gradients that were written before they were tracked, or are sums
BEFORE.batch.use()


class _Newest:
    """Which batch has written last, and by device whether the gradient counts."""

    def __init__(self, num_devices: int) -> None:
        self.batch, self.counts = BEFORE.batch, [True] * num_devices


class Tracked:
    """One parameter on some devices: which batches have written it last, and what counts."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self.reset()

    def reset(self) -> None:
        """Have all gradients count, and none belong to a batch that passes go on with."""
        self.wrote = [BEFORE] * len(self.devices)  # by device, last
        self._all, self._of_job = _Newest(len(self.devices)), _Newest(len(self.devices))

    def newest(self, is_local: bool) -> Batch:
        """Return the batch that has written last, of the job or, if ``is_local``, of all."""
        return self._all.batch if is_local else self._of_job.batch

    def note(self, i: int, part: Part) -> None:
        """Note that ``part`` of a batch writes the gradient on device ``i``."""
        for view in (self._all, self._of_job):
            if view is self._of_job and part.batch.is_local:
                view.counts[i] = False
                continue
            if view.batch is not part.batch:
                view.batch = part.batch
                of_batch = [written.batch is part.batch for written in self.wrote]
                view.counts = [*map(bool.__and__, view.counts, of_batch)]
            view.counts[i] = True
        self.wrote[i] = part

    def note_added(self, i: int) -> None:
        """Note that a pass adds to the gradient on device ``i``, which then belongs to no batch."""
        self.wrote[i] = BEFORE
        self._all.counts[i] = self._of_job.counts[i] = True

    def among(self, written: Sequence[bool], is_local: bool = False) -> list[bool]:
        """Return by device which gradients count, among those that have been written."""
        by_device = zip(written, (self._all if is_local else self._of_job).counts, self.wrote)
        return [is_new and counts and not part.has_failed for is_new, counts, part in by_device]


# A gradient that a pass writes: the recording, the Tracked parameter, and the device's index there.
Written = Tuple[Any, Any, int]


def write(
    written: Sequence[Written], thread: int, is_local: bool = False
) -> tuple[Batch, list[tuple[Any, int]]]:
    """Note what a pass of ``thread`` will write; ``is_local`` if it is inside ``cluster.local()``.

    Returns the batch of the pass, and the gradients that another part has written before.
    """
    recordings, params, indices = map(set, zip(*written))
    newest = max((tracked.newest(is_local) for tracked in params), key=lambda batch: batch.number)
    parts = {_part(recording, newest) for recording in recordings}
    devices = {tracked.devices[i] for _, tracked, i in written}
    is_first = 0 in indices
    is_over = newest.is_used or newest.is_local != is_local
    begins = is_over or _begins_another(newest, parts, devices, thread, is_first)
    batch = Batch(is_local) if begins else newest
    for part in parts:
        if part.batch is not batch:  # it takes along what it has written
            part.batch = batch
            batch.num_parts.update(part.devices)
    new = []
    for recording, tracked, i in written:
        part, device = recording.part, tracked.devices[i]
        if tracked.wrote[i] is not part:
            new.append((tracked, i))
        tracked.note(i, part)
        if device not in part.devices:
            part.devices.add(device)
            batch.num_parts[device] += 1
    batch.last[thread] = devices
    batch.parts = {part for part in batch.parts - parts if not part.devices <= devices}
    if is_first and not batch.parts:  # this might be a batch's first pass
        batch.num_parts = collections.Counter(devices)
    batch.parts |= parts
    return batch, new


def _part(recording: Any, newest: Batch) -> Part:
    if recording.part is None or recording.part.batch.is_used:
        recording.part = Part(newest)
        recording.part.has_failed = recording.has_failed
    return recording.part


def _begins_another(
    batch: Batch, parts: set[Part], devices: set[Device], thread: int, is_first: bool
) -> bool:
    """Return whether a pass of ``parts``, on ``devices``, begins another batch than this one."""
    others = {device for part in batch.parts - parts for device in part.devices}
    if others.isdisjoint(devices) or others <= devices:
        return False
    if batch.last.get(thread) != devices:
        return True
    most = max(batch.num_parts.values())
    return is_first and any(batch.num_parts[device] >= most for device in devices)


def discard(recording: Any) -> None:
    """Let no gradient of a recording count, because one of its tasks has failed."""
    recording.has_failed = True
    if recording.part is not None:
        recording.part.has_failed = True
        recording.part.batch.use()
