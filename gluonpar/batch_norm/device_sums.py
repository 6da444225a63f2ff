"""Sums of numbers over devices. Each device adds its numbers when it gets there; no thread waits.

A round is a call of :func:`run_tasks`, or a pass of a plain loop. A sum belongs to a round, and is
over as many devices as the round has. The n-th sum that a layer begins in a round on one device is
its n-th on all of them. The next round has new sums, however this one ends.

In a job a sum is over the devices of all ranks. A round has a name that is the same on all ranks:
where it begins, and how many began there before. So has each sum in it: the layer's name, and the
fields of its ``SumKey``. A rank sends the values of its devices to all others when all of them have
added theirs, and says at the end of its tasks how many it had and how often they called each layer.
So a sum is complete when each rank has sent values or said that it has no task, and ranks that
differ are named.
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
from gluonpar.runtime import device_threads, engine

Name = tuple  # of a round: (where it begins, number); of a sum: see SumKey


class Tasks(NamedTuple):
    """What a rank says at the end of its tasks, or when one has failed."""

    number: int
    calls: dict[str, int]  # of each layer, by its name
    failed: str = ""


class RankRound:
    """One round on this rank, and what has come from the others; without messages, of this only."""

    def __init__(self, place: str, messages: cluster.messages.Messages | None = None) -> None:
        self._messages, self.is_shared = messages, messages is not None
        self.rank = messages.rank if messages else 0
        self._ranks = range(messages.size if messages else 1)
        self._parts: dict[Name, dict[int, np.ndarray]] = {}  # of incomplete sums, by rank
        self._tasks: dict[int, Tasks] = {}  # by rank
        if messages is None:
            return
        _num_begun[place] += 1
        self._name: Name = (place, _num_begun[place])
        _rounds[self._name] = self
        for rank, kind, content in _early.pop(self._name, ()):
            self.receive(rank, kind, content)

    def give(self, name: Name, values: np.ndarray) -> None:
        """Send the values of this rank's devices, (number of devices, n), for a sum."""
        self._send("values", (name, values))

    def say(self, tasks: Tasks) -> None:
        """Send this rank's tasks."""
        if self.is_shared:
            self._send("tasks", tasks)

    def look(self) -> None:
        """Have messages received, because one is waited for."""
        if self._messages:
            self._messages.look()

    def take(self, name: Name) -> dict[int, np.ndarray]:
        """Return the values for a sum by rank, in their order, and keep them no longer."""
        return dict(sorted(self._parts.pop(name, {}).items()))

    def waits_for(self, name: Name) -> list[int]:
        """Return the ranks that have neither sent values for a sum nor said that they have none."""
        arrived = self._parts.get(name, {})
        without = {rank for rank, tasks in self._tasks.items() if not tasks.number}
        return [rank for rank in self._ranks if rank not in arrived and rank not in without]

    def without_word(self) -> list[int]:
        """Return the ranks that have not said what their tasks were."""
        return [rank for rank in self._ranks if rank not in self._tasks]

    def calls(self) -> dict[str, int]:
        """Return how often the ranks' tasks called each layer, when all ranks have said it."""
        return next((tasks.calls for tasks in self._tasks.values() if tasks.number), {})

    def failure(self) -> str:
        """Return why sums will not become complete: a task has failed, or the ranks differ."""
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
        place, number = self._name
        return (
            f"the ranks differ in call {number} of {place}: {counts}. All ranks must make the same "
            "layers, and call run_tasks equally often with the same ones, also without samples "
            "(shards [])"
        )

    def _send(self, kind: str, content: Any) -> None:
        self.receive(self.rank, kind, content)
        if self._messages:
            self._messages.send((self._name, kind, content))

    def receive(self, rank: int, kind: str, content: Any) -> None:
        """Take what a rank has sent."""
        if kind == "tasks":
            self._tasks[rank] = content
            return
        name, values = content
        self._parts.setdefault(name, {})[rank] = values


class SumKey(NamedTuple):
    """A sum, or the sum of the gradients with respect to it."""

    round: Round
    layer: Any  # has a name, a name_in_job, is_local and timeout_seconds
    of_variance: bool  # or of the mean
    number: int  # of the layer's call
    of_gradients: bool = False

    @property
    def over(self) -> RankRound:
        """The round of the ranks whose devices the sum is over."""
        return self.round.of_this_rank if self.layer.is_local else self.round.of_ranks

    @property
    def name(self) -> tuple:
        """The same on all ranks."""
        return (self.layer.name_in_job, *self[2:])


class Round:
    """A call of functions on ``num_devices`` devices of this process at once.

    Outside ``cluster.local()`` all ranks of a job take part in it, and begin the rounds of one
    ``place`` in the same order.
    """

    def __init__(self, num_devices: int, place: str = "run_tasks") -> None:
        self.num_devices, self.failed = num_devices, ""  # why a device is missing, if one is
        job = world.world()
        self.place, self._messages = place, job.messages if job else None
        self.spans = job is not None
        self.of_this_rank = self.of_ranks = RankRound(place)
        # Per device that was called, how often its thread had called backward before.
        self.num_backwards: dict[mx.Context, int] = {}
        self.after_failure: list[Callable[[], None]] = []  # to be called then
        # By layer: the number of its sums, by device and whether they are of the variance.
        self.begun: dict[Any, collections.Counter[tuple[str, bool]]] = {}

    def join_ranks(self) -> None:
        """In a job, begin the round on this rank, if any layer may add to it."""
        if self._messages and _layers_in_job and not self.of_ranks.is_shared:
            self._messages.start(_receive, _is_message_expected)
            with lock:
                self.of_ranks = RankRound(self.place, self._messages)

    def say_tasks(self, failed: str = "") -> None:
        """Tell the other ranks how many tasks there were, and how often they called each layer."""
        with lock:
            calls = {
                layer.name_in_job: max(begun.values())
                for layer, begun in self.begun.items()
                if not layer.is_local
            }
            self.of_ranks.say(Tasks(self.num_devices, calls, failed))
        _go_on()

    def call(self, ctx: mx.Context, function: Callable, *arguments: Any) -> Any:
        """Call ``function(*arguments)`` on the thread of ``ctx``, in this round."""
        scope = cluster.scope()

        def in_round() -> Any:
            outer, _this.round = current_round(), self
            try:
                with scope():
                    return function(*arguments)
            finally:
                _this.round = outer

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
_rounds: weakref.WeakValueDictionary[Name, RankRound] = weakref.WeakValueDictionary()
_early: dict[Name, list[tuple]] = {}  # messages, by the name of a round that has not begun here
_num_waiting = 0  # for tasks of other ranks
_incomplete: dict[SumKey, _Sum] = {}
_is_used = False  # whether a sum has begun in this process
_layers_in_job = False  # whether there are any whose sums are over the devices of all ranks
_abandoned = ""  # why, while the operators of a failed round end
_this = threading.local()  # .round


def current_round() -> Round | None:
    """Return the round that this thread was called in, if it was."""
    return getattr(_this, "round", None)


def join_job() -> None:
    """Begin rounds with the other ranks from now on: a layer has been made on all of them."""
    global _layers_in_job
    _layers_in_job = True


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
            if current.values:
                key.over.give(key.name, np.stack(current.in_order()))
            key.over.look()
    _go_on()


def wait_for_tasks(round_: Round, seconds: float) -> dict[str, int]:
    """On a rank without tasks, wait for the others' tasks; return their calls of each layer.

    Raises RuntimeError if the ranks differ, if a task has failed on one, and after ``seconds``.
    """
    global _num_waiting
    over, end = round_.of_ranks, time.monotonic() + seconds
    with lock:
        _num_waiting += 1
        try:
            while not over.failure() and over.without_word() and time.monotonic() < end:
                over.look()
                lock.wait(1)
        finally:
            _num_waiting -= 1
        if over.failure():
            raise RuntimeError(over.failure())
        if over.without_word():
            raise RuntimeError(
                f"rank {over.rank}, without tasks, waited {seconds:g} s for the tasks of rank "
                f"{', '.join(map(str, over.without_word()))}; all ranks must call {round_.place} "
                "equally often"
            )
        return over.calls()


def _go_on() -> None:
    """End the sums that have all values, and those that will not have them."""
    ended = []
    with lock:
        for key, current in [*_incomplete.items()]:
            is_complete = current.is_complete_here and not key.over.waits_for(key.name)
            why = "" if is_complete else _why_lost(key)
            if is_complete or why:
                ended.append((key, _incomplete.pop(key), key.over.take(key.name), why))
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
        name, kind, content = message
        if name in _rounds:
            _rounds[name].receive(rank, kind, content)
        elif name[1] > _num_begun[name[0]]:  # it will begin here later
            _early.setdefault(name, []).append((rank, kind, content))
        lock.notify_all()
    _go_on()


def _is_message_expected() -> bool:
    with lock:
        sums = _incomplete.items()
        waits = any(each.is_complete_here and key.over.is_shared for key, each in sums)
        return bool(_num_waiting) or waits


def abandon(round_: Round) -> None:
    """After an error in a task: let nothing wait for its device, and wait for all operators.

    Waiting clears the errors of the sums that fail. Sums of earlier rounds are completed, unless
    they are of gradients and the error came before a device's backward, which need not be in the
    round of its forward.
    """
    global _abandoned
    round_.failed = "a task failed on another device"
    round_.say_tasks("a task failed")
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
    """Return why a sum will not become complete; an empty string if it may."""
    num_devices, devices = key.round.num_devices, _devices(key.round.begun.get(key.layer, ()))
    if len(devices) > num_devices:
        return f"num_devices is {num_devices}, but {', '.join(devices)} take part"
    if _abandoned and key.of_gradients:
        if not all(map(key.round.has_begun_backward, list(key.round.num_backwards))):
            return _abandoned
    key.round.failed = key.round.failed or key.over.failure()
    return key.round.failed


def _fail_late() -> None:
    """Fail the sums that have waited for more than ``timeout_seconds``.

    If an operator fails on one device after run_tasks has returned, only a clock can tell that the
    other devices wait for it.
    """
    with lock:
        for key, current in _incomplete.items():
            seconds = key.layer.timeout_seconds
            if time.monotonic() - current.began > seconds:
                failed = f"a device is missing after {seconds:g} s"
                if current.is_complete_here:
                    ranks = ", ".join(map(str, key.over.waits_for(key.name)))
                    failed = (
                        f"rank {ranks} has not come after {seconds:g} s. All ranks must call "
                        f"{key.round.place} equally often, also without samples (shards [])"
                    )
                key.round.failed = failed
                key.over.say(Tasks(key.round.num_devices, {}, failed))
    _go_on()


@functools.lru_cache(None)
def _watch(_pid: int) -> None:
    """Start this process's thread that looks every second for sums that have waited too long."""

    def watch() -> None:
        while True:
            time.sleep(1)
            _fail_late()

    threading.Thread(target=watch, name="gluonpar.late_sums", daemon=True).start()
