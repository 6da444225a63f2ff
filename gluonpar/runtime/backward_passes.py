"""Which backward pass wrote the gradient of a Gluon parameter on each device.

On one device, with ``grad_req='write'``, a gradient is that of the last backward pass that reached
the parameter; gradients of earlier passes are gone. On several devices the backward of one batch is
one pass or, in a loop over devices, one pass per device. With fewer samples than devices some of
these do not take place, and the gradients of an earlier batch remain there, which must not count.
MXNet's own flag, ``_fresh_grad``, does not tell them apart: it says that some backward pass has
written the gradient since the last update.

So the passes of a network have numbers here: the same after one recording (``autograd.record()``),
and if they overlap, on several threads. A network is the parameters whose gradients one pass wrote
together, and those that another pass wrote together with one of them. When pass n writes a gradient
of a parameter, the gradients on other devices are out of date

- that are sums over devices;
- of a pass of which another gradient has been used;
- of a pass with another number that computed gradients on a device of pass n;
- of pass m and later ones, if n overwrites a gradient of m, which has another number;
- of a call of backward of which n overwrites a part.

Nor do gradients count that a call of run_tasks, or a step of Towers, had computed when it failed.

A sum that several devices have is added in a further sum once. To see passes, functions of MXNet's
C interface are replaced by others that call them, from the first parameter on several devices on,
or in a job of several processes from the first parameter on. From then on passes take place one
after another: MXNet does not tell which of two has written a gradient.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import os
import threading
import weakref
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.base import _LIB

from gluonpar.runtime import interrupts, memory, private_fields

_tracked: weakref.WeakKeyDictionary[gluon.Parameter, _Writes] = weakref.WeakKeyDictionary()
_least_devices = 2  # of a parameter that is tracked as soon as it has gradients
_num_sums = 0  # of gradients, over devices and ranks
_is_running = False  # whether a pass has begun and not ended
_clock = itertools.count(1)  # it orders recordings, and the beginnings and ends of passes
_recorded = 0  # when a thread last began to record
_num_calls: collections.Counter = collections.Counter()  # of backward, by the thread's identifier
_this = threading.local()  # .program: the identifier of the thread that this one works for
_lock = threading.RLock()  # held during a pass, too
_backward, _set_recording = _LIB.MXAutogradBackwardEx, _LIB.MXAutogradSetIsRecording


class _Pass:
    """A call of backward, and the devices on which those of its number wrote gradients."""

    def __init__(self, number: int, devices: set[mx.Context]) -> None:
        self.number, self.devices = number, devices
        self.thread = threading.get_ident()
        self.call = _num_calls[self.thread]  # its number among the thread's calls, from 1
        self.used = False  # whether gradients that it wrote have been summed


class _Network:
    """The last pass of parameters whose gradients have been written together."""

    def __init__(self) -> None:
        self.programs: set[int] = set()  # the identifiers of the threads that have run its passes
        self.last = _Pass(0, set())  # the first stands for all before a parameter was tracked
        self.began, self._ended = -1, 0  # when the last one did

    def add(self, began: int, devices: set[mx.Context]) -> None:
        """Number the pass that has just ended, and that has written gradients on ``devices``."""
        if began < self._ended or _recorded < self.began:
            self.last = _Pass(self.last.number, self.last.devices)
        else:
            self.last = _Pass(next(_clock), set())
        self.last.devices.update(devices)
        self.began, self._ended = began, next(_clock)
        self.programs.add(program())


def watch() -> None:
    """Note backward passes and recordings from now on."""
    _LIB.MXAutogradBackwardEx, _LIB.MXAutogradSetIsRecording = _numbered_backward, _noted_recording


def num_calls(thread: int) -> int:
    """Return how often the thread with this identifier has called ``backward``, while watched."""
    watch()
    return _num_calls[thread]


def track(params: Iterable[gluon.Parameter]) -> None:
    """Note from now on which passes write the gradients of ``params``, which may be deferred."""
    watch()
    with _lock:
        for param in params:
            if param not in _tracked:
                _tracked[param] = writes = _Writes(param)
                if any(writes.passes()):
                    writes.follow()


def track_on_one_device() -> None:
    """Track new parameters on one device, too: in a job of several processes there are others."""
    global _least_devices
    _least_devices = 1


def fresh(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the gradient of a tracked parameter counts.

    It does if backward has written it since :func:`mark_used` and no later pass discarded it.
    """
    with _lock:
        return _tracked[param].fresh()


def summands(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the gradient of a tracked parameter is added in the next sum.

    It is if it is :func:`fresh`; of a sum that several devices have, one is added.
    """
    with _lock:
        return _tracked[param].summands()


def age(param: gluon.Parameter) -> tuple[int, int]:
    """Return when the gradient of a tracked parameter was written; (-1, 0) if none counts.

    That is after how many sums (:func:`count_sum`), and after how many batches since then whose
    gradients were lost before they were used. The age is the same on all ranks that had
    samples of a batch, and less on those that had none. Gradients that passes add to have no age:
    they are of now.
    """
    with _lock:
        writes = _tracked[param]
        if not any(writes.passes()):
            return -1, 0
        return (_num_sums, 0) if writes.adds() else (writes.time, writes.skipped)


def count_sum() -> int:
    """Count a sum of gradients, in which all ranks take part; return the number of earlier ones."""
    global _num_sums
    _num_sums += 1
    return _num_sums - 1


def mark_used(params: Iterable[gluon.Parameter]) -> None:
    """Let no gradient of ``params`` count until backward has written it again."""
    with _lock:
        for param in params:
            _tracked[param].forget()


def discard_calls(before: Mapping[int, int]) -> None:
    """Let no gradient count that a thread's calls of backward after the first ``before`` wrote.

    ``before`` has their number by the thread's identifier. Gradients added to others stay.
    """
    with _lock:
        for writes in [*_tracked.values()]:
            writes.discard_calls(before)


def mark_summed(params: Iterable[gluon.Parameter], devices: Sequence[int]) -> None:
    """Note that the gradients on ``devices`` are sums, which count, and others may be, too.

    The sums are over all ranks: on one of them ``devices`` is one device, and on the others none.
    In the next sum only the gradients on ``devices`` are added, and passes that add to them will
    find zeros on the other devices.
    """
    with _lock:
        for param in params:
            _tracked[param].mark_summed(devices)


def accumulate(params: Iterable[gluon.Parameter]) -> None:
    """Until :func:`mark_used`, have each pass add to the gradients of ``params`` that count.

    MXNet's ``grad_req='add'`` is not used: the backward of some operators writes all the same, and
    that of others to memory that is not theirs (MXNet 1.9.1: mean, clip, cumsum, linalg.det, ...).
    """
    with _lock:
        for param in params:
            _tracked[param].accumulates = True


def program() -> int:
    """Return the identifier of the thread that this one works for: itself, if no other."""
    return getattr(_this, "program", threading.get_ident())


def set_program(thread: int) -> None:
    """Let this thread's passes count as those of ``thread``, for which it works."""
    _this.program = thread


def _end_pass(watched: Sequence[_Writes], began: int) -> None:
    """Note which gradients a pass has written, and discard those that it has made out of date."""
    by_writes = [(writes, writes.written()) for writes in watched]
    devices: set[mx.Context] = set()
    networks = set()
    for writes, written in by_writes:
        if any(written):
            devices.update(itertools.compress(writes.devices, written))
            networks.add(writes.network)
    if networks:
        network = max(networks, key=lambda one: one.began)
        if len(networks) > 1:
            network.programs.update(*(one.programs for one in networks))
            for writes in [*_tracked.values()]:
                if writes.network in networks:
                    writes.network = network
        network.add(began, devices)
    for writes, written in by_writes:
        if any(written):
            writes.see(written)
        writes.end()


class _Writes:
    """By device, the pass that wrote one parameter's gradient last; None if it does not count."""

    def __init__(self, param: gluon.Parameter) -> None:
        self._param = weakref.ref(param)
        self.network = _Network()
        self._values: list[mx.nd.NDArray] | None = None  # the arrays that the other fields describe
        self._grads: list[mx.nd.NDArray] | None = None
        self.devices: list[mx.Context] = []
        self._passes: list[_Pass | None] = []
        self._adds = False  # by itself: grad_req='add'
        self._saved: dict[int, mx.nd.NDArray] = {}  # by device: to be added to the next pass's
        # Whether no pass has been seen, and whether the arrays are not the first: see follow.
        self._is_new, self._replaced = True, False
        self.accumulates = False
        self._sum_on: Sequence[int] | None = None  # as in mark_summed
        self._sum: mx.nd.NDArray | None = None  # a sum that counts, while a pass may add to it
        self._is_on_one = False  # whether the gradients on other devices than _sum_on are zero
        self.time = 0
        # How many gradients were overwritten or discarded before they were used, by device.
        self._unused: collections.Counter = collections.Counter()

    def passes(self) -> list[_Pass | None]:
        """Return the passes, after changes of the flags that no pass has made.

        One that was set before the parameter was tracked counts as of the last pass; one that has
        been cleared, as by another trainer's update, does not count any more.
        """
        param = self._param()
        if param is None:  # it is about to leave _tracked
            return []
        values, grads = private_fields.values(param), private_fields.grads(param)
        if self._values is not values or self._grads is not grads:
            # Its arrays are others: it was initialised, cast or moved, or its grad_req changed.
            self._replaced = self._values is not None
            self._values, self._grads, self._sum_on = values, grads, None
            self.devices = [value.context for value in (self._values if self._grads else ())]
            self._passes = [None] * len(self.devices)
            self._adds = param.grad_req == "add"
        if not _is_running:
            last = self.network.last
            self._passes = [
                (before or last) if written else None
                for before, written in zip(self._passes, self.written())
            ]
        return self._passes

    @property
    def skipped(self) -> int:
        """How many batches have not been used since the last sum: a batch writes a device once."""
        return max(self._unused.values(), default=0)

    def fresh(self) -> list[bool]:
        """Return by device whether the gradient counts; with grad_req='add' all do or none."""
        counting = [one is not None for one in self.passes()]
        return [any(counting)] * len(counting) if self._adds else counting

    def summands(self) -> list[bool]:
        """Return by device whether the gradient is added in the next sum."""
        counting = self.fresh()
        if self._sum_on is not None:
            counting = [counts and i in self._sum_on for i, counts in enumerate(counting)]
        return counting

    def mark_summed(self, devices: Sequence[int]) -> None:
        """Note that the gradients are sums, the next ones of which add those on ``devices``."""
        self._mark_passes_used()
        one = next(filter(None, self._passes), self.network.last)
        self._passes = [each or one for each in self._passes]
        self._set_flags()
        self._sum_on, self.time = devices, _num_sums - 1  # as old on all ranks
        self._is_on_one = False
        self._unused.clear()

    def adds(self) -> bool:
        """Return whether gradients of earlier passes count, too."""
        return self._adds or self.accumulates

    def begin(self) -> bool:
        """Clear the flags, so that those are seen which the pass sets that begins now.

        And save the gradients that count so far, if it shall add to them. Do nothing, and return
        False, for sums of a network whose passes other threads run: one may be using them.
        """
        counts = any(self.passes())
        if counts and self._sum_on is not None and program() not in self.network.programs:
            return False
        if counts:
            memory.clear_grad_flags(self._values)
        if self.adds() and (counts or self._sum_on is not None):
            with autograd.pause():
                self._prepare_to_add(counts)
        return True

    def _prepare_to_add(self, counts: bool) -> None:
        """Leave of a sum one device's gradient, and save those that the pass will overwrite."""
        grads = self._grads
        if self._sum_on is not None and not self._is_on_one:
            if counts:
                self._sum = grads[self._sum_on[0]] if self._sum_on else grads[0].copy()
            memory.zero(self._except_sum())
            self._is_on_one = not counts
        if self.accumulates and not self._adds:
            self._saved = {i: grads[i].copy() for i, one in enumerate(self._passes) if one}

    def see(self, written: Sequence[bool]) -> None:
        """Note that the network's last pass has written gradients, and discard others."""
        before, last = self._passes, self.network.last
        self._passes = [last if now else one for one, now in zip(before, written)]
        if self._is_new or self._replaced:
            self._is_new = False
            self.follow()
        added = [i for i in self._saved if written[i]]
        if added:
            with autograd.pause():
                for i in added:
                    self._grads[i] += self._saved[i]
        self._discard(before, last)

    def follow(self) -> None:
        """Have ``list_grad()`` return the arrays that backward has written.

        A graph with static memory keeps writing to those of its first pass, and MXNet gives a
        parameter others when it is moved, or when its ``grad_req`` changes.
        """
        for i, value in enumerate(self._values):
            if memory.grad_chunk(value) != memory.chunk(self._grads[i]):
                self._grads[i] = value.grad

    def _discard(self, before: list[_Pass | None], last: _Pass) -> None:
        """Discard gradients that ``last`` has made out of date."""
        is_sum, self._sum_on = self._sum_on is not None, None
        is_first = self.time != _num_sums
        if is_first:
            self.time = _num_sums
            self._unused.clear()
        if self.adds():
            return
        pairs = zip(before, self._passes)
        overwritten = {i: was for i, (was, now) in enumerate(pairs) if was and now is last}
        earlier = {i: was for i, was in overwritten.items() if was.number != last.number}
        first = min((was.number for was in earlier.values()), default=last.number)
        unused = [*earlier]
        for i, one in enumerate(self._passes):
            if one is None or one is last:
                continue
            of_other_batch = one.number != last.number and (
                one.number >= first or not one.devices.isdisjoint(last.devices)
            )
            if is_sum or one.used or one in overwritten.values() or of_other_batch:
                self._passes[i] = None
                if not is_sum and one.number != last.number:
                    unused.append(i)
        if not is_first:
            self._unused.update(unused)

    def discard_calls(self, before: Mapping[int, int]) -> None:
        """Discard the gradients that a thread's calls after the first ``before`` have written."""
        for i, one in enumerate([] if self.adds() else self.passes()):
            if one and one.call > before.get(one.thread, one.call):
                self._passes[i] = None
                memory.clear_grad_flags([self._values[i]])

    def end(self) -> None:
        """Set MXNet's flag of each gradient that counts, for other programs that read it."""
        self._saved.clear()
        if self._sum is not None and self._sum_on is not None:  # no pass has added to it
            with autograd.pause():
                for grad in self._except_sum():
                    self._sum.copyto(grad)
        self._sum = None
        self._set_flags()

    def forget(self) -> None:
        """Let no gradient count, and the next pass write."""
        self.accumulates = False
        if not self._adds:
            self._sum_on = None
        self._mark_passes_used()
        if self.passes():
            memory.clear_grad_flags(self._values)
        self._passes = [None] * len(self._passes)

    def _mark_passes_used(self) -> None:
        for one in filter(None, self._passes):
            one.used = True

    def _set_flags(self) -> None:
        for value, one in zip(self._values or (), self._passes):
            if one:
                _LIB.MXNDArraySetGradState(value.handle, 1)

    def _except_sum(self) -> list[mx.nd.NDArray]:
        return [grad for i, grad in enumerate(self._grads) if i not in self._sum_on]

    def written(self) -> list[bool]:
        """Return MXNet's flags by device."""
        return memory.grad_flags(self._values if self._passes else ())


@functools.wraps(_backward)
def _numbered_backward(*arguments: Any) -> int:
    global _is_running
    _num_calls[threading.get_ident()] += 1
    began = next(_clock)
    with interrupts.held(), _lock:
        if _is_running:  # within another pass of this thread, by an operator of the user's
            return _backward(*arguments)
        watched = [writes for writes in [*_tracked.values()] if writes.begin()]
        _is_running = True
        try:
            return _backward(*arguments)
        finally:
            _end_pass(watched, began)
            _is_running = False


@functools.wraps(_set_recording)
def _noted_recording(is_recording: ctypes.c_int, before: Any) -> int:
    global _recorded
    if is_recording.value:
        _recorded = next(_clock)
    return _set_recording(is_recording, before)


def _tracking(allocate: Callable) -> Callable:
    """Track a parameter from then on: a Trainer may be made after the first backward."""

    @functools.wraps(allocate)
    def tracked(param: gluon.Parameter) -> None:
        allocate(param)
        if len(private_fields.values(param)) >= _least_devices:
            track([param])

    return tracked


private_fields.wrap(private_fields.ALLOCATES_GRADIENTS, _tracking)
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
