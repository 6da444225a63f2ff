"""Sums of numbers over devices. Each device adds its numbers when it gets there; no thread waits.

A round is a call of :func:`run_tasks`, or a pass of a plain loop. A sum belongs to a round, and is
over as many devices as the round has. The n-th sum that a layer begins in a round on one device is
its n-th on all of them. The next round has new sums, however this one ends.

In a job a sum is over the devices of all ranks. All ranks have the same name for a round, its place
and its number there, and for a sum in it, ``SumKey.name``. When all devices of a rank have added
their values, it sends these to all others. At the end of its tasks it sends their number, and how
often they called each layer. So a sum is complete when each rank has sent values or that it has no
task, and an error names ranks that differ.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
import time
import traceback
import weakref
from typing import Any, Callable, Iterable, NamedTuple

import mxnet as mx
import numpy as np

from gluonpar import cluster
from gluonpar.cluster import world
from gluonpar.runtime import device_threads, engine, tape

Name = tuple  # of a round: (where it begins, number); of a sum: see SumKey


class Tasks(NamedTuple):
    """What a rank sends at the end of its tasks, or when one has failed."""

    number: int
    calls: dict[str, int]  # how often each layer was called, by its name
    failed: str = ""


class SumKey(NamedTuple):
    """A sum, or the sum of the gradients with respect to it."""

    round: Round
    layer: Any  # has a name, a name_in_job, is_local and timeout_seconds
    of_variance: bool  # or of the mean
    number: int  # of the layer's call
    of_gradients: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether the sum is over the devices of all ranks."""
        return self.round.number > 0 and not self.layer.is_local

    @property
    def name(self) -> Name:
        """The same on all ranks."""
        return (self.layer.name_in_job, *self[2:])


class Round:
    """A call of functions on ``num_devices`` devices of this process at once.

    Outside ``cluster.local()`` all ranks of a job take part in it, and begin the rounds of one
    ``place`` in the same order.
    """

    def __init__(self, num_devices: int, place: str = "run_tasks") -> None:
        self.num_devices, self.place = num_devices, place
        self.failed = ""  # why a device is missing, if one is
        job = world.world()
        self.messages: Any = job.messages if job else None
        self.number = 0  # among the shared rounds of this place; 0 before join_ranks
        self._parts: dict[Name, dict[int, np.ndarray]] = {}  # of incomplete sums, by rank
        self._tasks: dict[int, Tasks] = {}  # by rank
        # Per device that was called, how often its thread had called backward before.
        self.num_backwards: dict[mx.Context, int] = {}
        self.recording = tape.Recording()  # of all passes of its calls
        # By layer: the number of its sums, by device and whether they are of the variance.
        self.begun: dict[Any, collections.Counter[tuple[str, bool]]] = {}

    def join_ranks(self) -> None:
        """In a job, share the round with the other ranks, if there is a layer that they share."""
        if self.messages and _num_named and not self.number:
            self.messages.start(_receive, _is_message_expected)
            with lock:
                _num_begun[self.place] += 1
                self.number = _num_begun[self.place]
                _rounds[self.place, self.number] = self
                for message in _early.pop((self.place, self.number), ()):
                    self.receive(*message)

    def send(self, content: Any) -> None:
        """Send Tasks, or a sum's name and this rank's values of it, (number of devices, n)."""
        self.receive(self.messages.rank, content)
        self.messages.send(((self.place, self.number), content))

    def receive(self, rank: int, content: Any) -> None:
        """Take what a rank has sent."""
        if isinstance(content, Tasks):
            self._tasks[rank] = content
        else:
            name, values = content
            self._parts.setdefault(name, {})[rank] = values

    def send_tasks(self, failed: str = "") -> None:
        """Tell the other ranks how many tasks there were, and how often they called each layer."""
        with lock:
            if self.number:
                calls = {
                    layer.name_in_job: max(begun.values())
                    for layer, begun in self.begun.items()
                    if not layer.is_local
                }
                self.send(Tasks(self.num_devices, calls, failed))
        _go_on()

    def wait_for_tasks(self, seconds: float) -> dict[str, int]:
        """On a rank without tasks, wait for the others'; return how often they called each layer.

        Raises RuntimeError if the ranks differ, if a task has failed on one, and after ``seconds``.
        """
        global _num_waiting
        with lock:
            _num_waiting += 1
            self.messages.look()
            try:
                lock.wait_for(lambda: self.failure() or not self._without_tasks(), seconds)
            finally:
                _num_waiting -= 1
            if self.failure():
                raise RuntimeError(self.failure())
            missing = self._without_tasks()
            if missing:
                raise RuntimeError(
                    f"rank {self.messages.rank}, without tasks, waited {seconds:g} s for the tasks "
                    f"of rank {', '.join(map(str, missing))}; all ranks must call {self.place} "
                    "equally often"
                )
            return next((tasks.calls for tasks in self._tasks.values() if tasks.number), {})

    def _without_tasks(self) -> list[int]:
        return [rank for rank in range(self.messages.size) if rank not in self._tasks]

    def waits_for(self, key: SumKey) -> list[int]:
        """Return the ranks that have neither sent values of a sum nor that they have no task."""
        if not key.is_shared:
            return []
        idle = {rank for rank, tasks in self._tasks.items() if not tasks.number}
        arrived = {*self._parts.get(key.name, ())}
        return [rank for rank in range(self.messages.size) if rank not in arrived | idle]

    def take(self, key: SumKey) -> dict[int, np.ndarray]:
        """Remove the values of a sum, and return them by rank, in the order of the ranks."""
        return dict(sorted(self._parts.pop(key.name, {}).items()))

    def failure(self) -> str:
        """Return why sums cannot become complete: a task has failed, or the ranks differ."""
        said = sorted((rank, tasks) for rank, tasks in self._tasks.items() if tasks.number)
        for rank, tasks in said:
            if tasks.failed:
                return f"rank {rank}: {tasks.failed}"
        unlike = [(rank, tasks.calls) for rank, tasks in said if tasks.calls != said[0][1].calls]
        if not unlike:
            return ""
        (first, (_, ours, _)), (other, theirs) = said[0], unlike[0]
        counts = "; ".join(
            f"{layer} was called {ours.get(layer, 0)} times on rank {first} and "
            f"{theirs.get(layer, 0)} times on rank {other}"
            for layer in sorted({*ours, *theirs})
            if ours.get(layer, 0) != theirs.get(layer, 0)
        )
        return (
            f"the ranks differ in call {self.number} of {self.place}: {counts}. All ranks must "
            "make the same layers, and call run_tasks equally often with the same ones, also "
            "without samples (shards [])"
        )

    def call(self, ctx: mx.Context, function: Callable, *arguments: Any) -> Any:
        """Call ``function(*arguments)`` on the thread of ``ctx``, in this round."""
        scope = cluster.scope()

        def in_round() -> Any:
            outer, _this.round = current_round(), self
            tape.this_thread.joint = self.recording
            try:
                with scope():
                    return function(*arguments)
            finally:
                _this.round = outer
                tape.this_thread.joint = outer.recording if outer else None

        self.num_backwards.setdefault(ctx, device_threads.num_backwards(ctx))
        return device_threads.call(ctx, in_round)

    def has_begun_backward(self, ctx: mx.Context) -> bool:
        """Return whether the thread of ``ctx`` has called backward since it was first called."""
        return device_threads.num_backwards(ctx) != self.num_backwards.get(ctx)

    def begin(self, layer: Any, ctx: mx.Context, of_variance: bool) -> SumKey:
        """Return the key of the layer's next sum on ``ctx``."""
        global _is_used
        self.join_ranks()
        _watch(os.getpid())
        with lock:
            _is_used, place = True, (str(ctx), of_variance)
            begun = self.begun.setdefault(layer, collections.Counter())
            begun[place] += 1
            return SumKey(self, layer, of_variance, begun[place])

    def check_begun(self) -> None:
        """Raise RuntimeError unless every layer has been called equally often on each device."""
        for layer, begun in self.begun.items():
            if len(begun) < 2 * self.num_devices or len({*begun.values()}) > 1:
                calls = [f"{begun[device, False]} on {device}" for device in _devices(begun)]
                raise RuntimeError(
                    f"{layer.name} must be called equally often on all {self.num_devices} devices; "
                    f"the numbers of calls are {', '.join(calls)}"
                )


def _devices(begun: Iterable[tuple[str, bool]]) -> list[str]:
    return sorted({device for device, _ in begun})


class _Sum:
    """The values that have arrived so far, and the callbacks of each device."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.callbacks: list[tuple[Callable, Callable]] = []
        self.began = time.monotonic()
        self.is_complete_here = False  # all devices of this process have arrived

    def in_order(self) -> list[np.ndarray]:
        """Return the values in the order of the devices, cpu(10) after cpu(2)."""
        names = sorted(self.values, key=lambda name: (len(name), name))
        return [self.values[name] for name in names]

    def end(self, values: list[np.ndarray], message: str) -> None:
        """Call every ``done`` with the sum of ``values``, or ``failed`` if there is a message."""
        total = 0 if message else sum(values)  # in this order
        for done, failed in self.callbacks:
            if message:
                failed(message)
                continue
            try:
                done(total)
            except Exception:  # of one device; the others must go on
                failed(traceback.format_exc())


lock = engine.lock()  # also notified of other ranks' messages
_num_begun: collections.Counter[str] = collections.Counter()  # rounds, by place
# Those that some operator may still add to; messages for others come too late.
_rounds: weakref.WeakValueDictionary[Name, Round] = weakref.WeakValueDictionary()
_early: dict[Name, list[tuple]] = {}  # messages, by the name of a round that has not begun here
_num_waiting = 0  # for tasks of other ranks
_incomplete: dict[SumKey, _Sum] = {}
_is_used = False  # whether a sum has begun in this process
_num_named: collections.Counter[str] = collections.Counter()  # layers of all ranks, by name
_abandoned = ""  # why, while the operators of a failed round end
_this = threading.local()  # .round


def current_round() -> Round | None:
    """Return the round that this thread was called in, if it was."""
    return getattr(_this, "round", None)


def name_in_job(name: str) -> str:
    """Return a new layer's name on all ranks: a layer's number tells it from others of its name.

    Ranks share the rounds that begin from now on.
    """
    _num_named[name] += 1
    return name if _num_named[name] == 1 else f"{name} (number {_num_named[name]})"


def add(
    key: SumKey, device: str, values: np.ndarray | None, done: Callable, failed: Callable
) -> None:
    """Add ``values`` to the sum ``key``; None on a rank without tasks. Returns at once.

    When all devices' values are there, every ``done`` is called with the float64 sum, on the thread
    that has added the last ones, or has received them from another rank. Values are added in the
    order of the ranks and their devices, so the order in which they arrive does not change a bit.
    If a device has not arrived after ``timeout_seconds``, or the round has failed, the ``failed``
    of those that have arrived is called with a message.
    """
    with lock:
        current = _incomplete.setdefault(key, _Sum())
        if values is not None:
            current.values[device] = np.asarray(values, dtype=np.float64)
        current.callbacks.append((done, failed))
        if len(current.values) == key.round.num_devices and not _why_lost(key):
            current.is_complete_here, current.began = True, time.monotonic()
            if key.is_shared:
                if current.values:
                    key.round.send((key.name, np.stack(current.in_order())))
                key.round.messages.look()
    _go_on()


def _go_on() -> None:
    """End the sums that have all values, and those that cannot become complete."""
    ended = []
    with lock:
        for key, current in [*_incomplete.items()]:
            is_complete = current.is_complete_here and not key.round.waits_for(key)
            why = "" if is_complete else _why_lost(key)
            if is_complete or why:
                parts = key.round.take(key) if key.is_shared else {0: current.in_order()}
                ended.append((key, _incomplete.pop(key), parts, why))
    for key, current, parts, why in ended:
        widths = {len(row): rank for rank, rows in parts.items() for row in rows}
        message = f"{key.layer.name}: {why}" if why else ""
        if why and not current.is_complete_here:
            message += (
                f". Of {key.round.num_devices} devices only {', '.join(sorted(current.values))} "
                "arrived. Run forward on all devices before reading any result, and backward "
                "likewise, on CPU contexts both in run_tasks; for a plain loop over another number "
                "of devices call set_num_devices(net, number)"
            )
        elif len(widths) > 1 and not why:
            got = " and ".join(f"{width} numbers on rank {rank}" for width, rank in widths.items())
            message = f"{key.layer.name} must be the same layer on all ranks, but adds {got}"
        current.end([row for rows in parts.values() for row in rows], message)


def _receive(rank: int, message: Any) -> None:
    """Take a message of another rank."""
    with lock:
        name, content = message
        if name in _rounds:
            _rounds[name].receive(rank, content)
        elif name[1] > _num_begun[name[0]]:  # it will begin here later
            _early.setdefault(name, []).append((rank, content))
        lock.notify_all()
    _go_on()


def _is_message_expected() -> bool:
    with lock:
        shared = [current for key, current in _incomplete.items() if key.is_shared]
        return _num_waiting > 0 or any(current.is_complete_here for current in shared)


def abandon(round_: Round) -> None:
    """After an error in a task, fail the sums that wait for its device; wait for all operators.

    Waiting clears the errors of the sums that fail. Sums of earlier rounds become complete, unless
    they are of gradients and a device has not called backward, which may be in a later round than
    forward.
    """
    global _abandoned
    round_.failed = "a task failed on another device"
    round_.send_tasks("a task failed")
    if not _is_used:
        return
    _abandoned = round_.failed
    try:
        _go_on()
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()
    finally:
        _abandoned = ""


def _why_lost(key: SumKey) -> str:
    """Return why a sum cannot become complete; an empty string if it can."""
    num_devices, devices = key.round.num_devices, _devices(key.round.begun.get(key.layer, ()))
    if len(devices) > num_devices:
        return f"num_devices is {num_devices}, but {', '.join(devices)} take part"
    if _abandoned and key.of_gradients:
        if not all(map(key.round.has_begun_backward, list(key.round.num_backwards))):
            return _abandoned
    if key.is_shared:
        key.round.failed = key.round.failed or key.round.failure()
    return key.round.failed


def _fail_late() -> None:
    """Every second, fail the sums that have waited for more than ``timeout_seconds``.

    If an operator fails on one device after run_tasks has returned, only a clock can tell that the
    other devices wait for it.
    """
    while True:
        time.sleep(1)
        with lock:
            for key, current in _incomplete.items():
                seconds = key.layer.timeout_seconds
                if time.monotonic() - current.began > seconds:
                    failed = f"a device is missing after {seconds:g} s"
                    if current.is_complete_here:
                        ranks = ", ".join(map(str, key.round.waits_for(key)))
                        failed = (
                            f"rank {ranks} has not come after {seconds:g} s. All ranks must call "
                            f"{key.round.place} equally often, also without samples (shards [])"
                        )
                    key.round.failed = failed
                    if key.is_shared:
                        key.round.send(Tasks(key.round.num_devices, {}, failed))
        _go_on()


@functools.lru_cache(None)
def _watch(_pid: int) -> None:
    """Start this process's thread that fails late sums."""
    threading.Thread(target=_fail_late, name="gluonpar.late_sums", daemon=True).start()
