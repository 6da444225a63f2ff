"""Sums of numbers over devices. Each device adds its numbers when it gets there; no thread waits.

A round is a call of :func:`run_tasks`, or a plain loop. A sum belongs to the round of its forward,
and is over as many devices as the round has. The n-th sum that a layer begins in a round on one
device is its n-th on all of them. The next round has new sums, however this one ends.

In a job a sum is over the devices of all ranks. All ranks have the same name for a round, its place
and its number there, and for a sum in it, ``SumKey.name``. When all devices of a rank have added
their values, it sends these to all others. At the end of its tasks it sends their number, and how
often they called each layer. So a sum is complete when every rank has sent either its values or the
message that it has no task, and an error names ranks that differ.

``_Sum.state`` alone says whether a sum will become complete.
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
from typing import Any, Callable, DefaultDict, Dict, Iterable, MutableMapping, NamedTuple

import mxnet as mx
import numpy as np

from gluonpar.cluster import world
from gluonpar.runtime import engine
from gluonpar.tasks import Round

# What ranks have sent of a round, by name and rank. A sum's name has the values, an array of shape
# (number of devices, n), while the sum is incomplete; _TASKS has Tasks.
_Sent = DefaultDict[tuple, Dict[int, Any]]
_TASKS = ()


class Tasks(NamedTuple):
    """What a rank sends at the end of its tasks, or when one has failed."""

    number: int
    calls: dict[str, int]  # how often each layer was called, by its name
    failed: str = ""


class SumKey(NamedTuple):
    """A sum, or the sum of the gradients with respect to it."""

    sums: RoundSums
    layer: Any  # has a name, a name_in_job, is_local and timeout_seconds
    of_variance: bool  # whether it serves the variance, or else the mean
    number: int  # the layer's calls are numbered
    of_gradients: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether the sum is over the devices of all ranks."""
        return self.sums.number > 0 and not self.layer.is_local

    @property
    def name(self) -> tuple:
        """The sum's name, which is the same on all ranks."""
        return (self.layer.name_in_job, *self[2:])


class RoundSums:
    """The sums that layers begin in a round, and what the ranks of a job tell each other about it.

    Outside ``cluster.local()`` all ranks of a job take part in the round, and begin the rounds of
    one ``place`` in the same order.
    """

    def __init__(self, round_: Round, place: str = "run_tasks") -> None:
        self.round, self.place, job = round_, place, world.world()
        self.messages: Any = job.messages if job else None
        self.rank = job.rank if job else 0
        self.number = 0  # of this round among the shared ones of its place; 0 before join_ranks
        self.sent: _Sent = collections.defaultdict(dict)
        # For each layer, how many sums it has begun, by (device, of_variance).
        self.begun: MutableMapping[Any, collections.Counter] = weakref.WeakKeyDictionary()

    def join_ranks(self) -> None:
        """In a job, share the round with the other ranks, if there is a layer that they share."""
        if self.messages and _num_named and not self.number:
            self.messages.start(_receive, _is_message_expected)
            with lock:
                _num_begun[self.place] += 1
                self.number = _num_begun[self.place]
                self.sent = _sent.setdefault((self.place, self.number), self.sent)
                weakref.finalize(self, _sent.pop, (self.place, self.number))

    def send(self, name: tuple, content: Any, is_shared: bool = True) -> None:
        """Send this rank's values of the sum ``name``, or its Tasks."""
        self.sent[name][self.rank] = content
        if is_shared:
            self.messages.send(((self.place, self.number), name, content))

    def send_tasks(self, failed: str = "") -> None:
        """Tell the other ranks how many tasks there were, and how often they called each layer."""
        with lock:
            if self.number:
                of_layers = self.begun.items()
                shared = [(layer.name_in_job, n) for layer, n in of_layers if not layer.is_local]
                calls = {name: max(begun.values()) for name, begun in shared}
                self.send(_TASKS, Tasks(self.round.num_devices, calls, failed))
        _go_on()

    def wait_for_tasks(self, seconds: float) -> dict[str, int]:
        """On a rank without tasks, wait for the others; return how often they called each layer.

        Raises RuntimeError if the ranks differ, if a task has failed on one, and after ``seconds``.
        """
        global _num_waiting
        with lock:
            tasks, ranks = self.sent[_TASKS], range(self.messages.size)
            _num_waiting += 1
            self.messages.look()
            try:
                lock.wait_for(lambda: self.failure() or len(tasks) == len(ranks), seconds)
            finally:
                _num_waiting -= 1
            missing = ", ".join(str(rank) for rank in ranks if rank not in tasks)
            if self.failure() or missing:
                raise RuntimeError(
                    self.failure()
                    or f"rank {self.rank}, without tasks, waited {seconds:g} s for the tasks of "
                    f"rank {missing}; all ranks must call {self.place} equally often"
                )
            return next((sent.calls for sent in tasks.values() if sent.number), {})

    def failure(self) -> str:
        """Return why sums cannot become complete: a task has failed, or the ranks differ."""
        sent = {rank: tasks for rank, tasks in sorted(self.sent[_TASKS].items()) if tasks.number}
        for rank, tasks in sent.items():
            if tasks.failed:
                return f"rank {rank}: {tasks.failed}"
        different = []
        for layer in sorted({layer for tasks in sent.values() for layer in tasks.calls}):
            calls = {rank: tasks.calls.get(layer, 0) for rank, tasks in sent.items()}
            if len({*calls.values()}) > 1:
                listed = " and ".join(f"{num} times on rank {rank}" for rank, num in calls.items())
                different.append(f"{layer} was called {listed}")
        if not different:
            return ""
        return (
            f"the ranks differ in call {self.number} of {self.place}: {'; '.join(different)}. All "
            "ranks must make the same layers, and call run_tasks equally often with the same ones, "
            "also without samples (shards [])"
        )

    def begin(self, layer: Any, ctx: mx.Context, of_variance: bool) -> SumKey:
        """Return the key of the layer's next sum on ``ctx``."""
        self.join_ranks()
        _watch(os.getpid())
        with lock:
            begun = self.begun.setdefault(layer, collections.Counter())
            begun[ctx, of_variance] += 1
            return SumKey(self, layer, of_variance, begun[ctx, of_variance])

    def check_begun(self) -> None:
        """Raise RuntimeError unless every layer has been called equally often on each device."""
        num_devices = self.round.num_devices
        for layer, begun in self.begun.items():
            if len(begun) < 2 * num_devices or len({*begun.values()}) > 1:
                calls = [f"{begun[c, False]} on {c}" for c in _in_order(c for c, _ in begun)]
                raise RuntimeError(
                    f"{layer.name} must be called equally often on all {num_devices} devices; the "
                    f"numbers of calls are {', '.join(calls)}"
                )

    def abandon(self) -> None:
        """After an error in a task, fail the sums that wait for its device; wait for all operators.

        Waiting clears the errors of the sums that fail. Sums of earlier rounds become complete,
        except sums of gradients of which a device has not called backward: that may have been the
        task that failed, as backward may be in a later round than forward.
        """
        self.round.failed = "a task failed on another device"
        self.send_tasks("a task failed")
        if not _watch.cache_info().currsize:  # no sum has begun in this process
            return
        _abandoned.append(self.round.failed)
        try:
            _go_on()
            with contextlib.suppress(mx.MXNetError):
                mx.nd.waitall()
        finally:
            _abandoned.pop()


def _in_order(devices: Iterable[mx.Context]) -> list[mx.Context]:
    return sorted({*devices}, key=lambda ctx: (ctx.device_typeid, ctx.device_id))


def _listed(devices: Iterable[mx.Context]) -> str:
    return ", ".join(map(str, _in_order(devices)))


class _Sum:
    """The values of a sum that have arrived so far, and the operators that wait for the others."""

    def __init__(self, key: SumKey) -> None:
        self.key = key
        self.values: dict[mx.Context, np.ndarray] = {}
        self.ends: list[Callable[[Any, str], None]] = []  # they end the operators
        self.began = time.monotonic()

    def missing(self) -> list[int]:
        """Return the ranks from which neither all values nor "no task" has arrived."""
        key, sums = self.key, self.key.sums
        idle = {rank for rank, tasks in sums.sent[_TASKS].items() if not tasks.number}
        ranks = range(sums.messages.size) if key.is_shared else [sums.rank]
        return [rank for rank in ranks if rank not in {*sums.sent[key.name], *idle}]

    def state(self) -> str | None:
        """Return None while the sum waits, "" when it is complete, or why it cannot become so."""
        key, sums, round_ = self.key, self.key.sums, self.key.sums.round
        missing, devices = self.missing(), {c for c, _ in sums.begun.get(key.layer, ())}
        if not missing:
            return ""
        if len(devices) > round_.num_devices:
            return f"num_devices is {round_.num_devices}, but {_listed(devices)} take part"
        if _abandoned and key.of_gradients:
            if not all(map(round_.has_begun_backward, round_.devices)):
                return _abandoned[-1]
        if key.is_shared:
            round_.failed = round_.failed or sums.failure()
        if not round_.failed and time.monotonic() - self.began > key.layer.timeout_seconds:
            round_.failed = self._late(missing)
            if key.is_shared:
                sums.send(_TASKS, Tasks(round_.num_devices, {}, round_.failed))
        return round_.failed or None

    def _late(self, missing: list[int]) -> str:
        seconds, place = f"after {self.key.layer.timeout_seconds:g} s", self.key.sums.place
        if self.key.sums.rank in missing:
            return f"a device is missing {seconds}"
        return (
            f"rank {', '.join(map(str, missing))} has not come {seconds}. All ranks must call "
            f"{place} equally often, also without samples (shards [])"
        )

    def end(self, why: str, parts: dict[int, np.ndarray]) -> None:
        """End the operators that wait: with the sum of the ranks' ``parts``, or with an error."""
        message = self._message(why, parts)
        total = 0 if message else sum(row for _, rows in sorted(parts.items()) for row in rows)
        for end in self.ends:
            try:
                end(total, message)
            except Exception:  # of one device; the others must go on
                end(total, traceback.format_exc())

    def _message(self, why: str, parts: dict[int, np.ndarray]) -> str:
        """Return the error for the operators that wait; "" if there is none."""
        name, num_devices = self.key.layer.name, self.key.sums.round.num_devices
        if why and num_devices and self.key.sums.rank not in parts:
            return (
                f"{name}: {why}. Of {num_devices} devices only {_listed(self.values)} arrived. Run "
                "forward on all devices before reading any result, and backward likewise, on CPU "
                "contexts both in run_tasks; for a plain loop over another number of devices call "
                "set_num_devices(net, number)"
            )
        widths = {rows.shape[1]: rank for rank, rows in parts.items()}
        if len(widths) > 1 and not why:
            got = " and ".join(f"{width} numbers on rank {rank}" for width, rank in widths.items())
            return f"{name} must be the same layer on all ranks, but adds {got}"
        return why and f"{name}: {why}"


lock = engine.lock()  # also notified when another rank's message has arrived
_num_begun: collections.Counter[str] = collections.Counter()  # shared rounds, by place
# By (place, number): what was sent of a round to which some operator may still add, or which has
# not begun here.
_sent: dict[tuple, _Sent] = {}
_num_waiting = 0  # threads in wait_for_tasks
_incomplete: dict[SumKey, _Sum] = {}
_num_named: collections.Counter[str] = collections.Counter()  # layers of all ranks, by name
_abandoned: list[str] = []  # why sums of gradients fail while the operators of a failed round end


def name_in_job(name: str) -> str:
    """Return a new layer's name on all ranks. Layers with the same name are numbered.

    Ranks share the rounds that begin from now on.
    """
    _num_named[name] += 1
    return name if _num_named[name] == 1 else f"{name} (number {_num_named[name]})"


def add(
    key: SumKey, ctx: mx.Context | None, values: np.ndarray | None, end: Callable[[Any, str], None]
) -> None:
    """Add the ``values`` of ``ctx`` to a sum (None on a rank without tasks). Returns at once.

    When all devices' values are there, ``end(total, "")`` is called for every device with the
    float64 sum, on the thread that has added the last values, or has received them from another
    rank. Values are added in the order of the ranks and their devices, so the order in which they
    arrive does not change a bit. If a device has not arrived after ``timeout_seconds``, or the
    round has failed, ``end`` is called with a message.
    """
    sums = key.sums
    with lock:
        current = _incomplete.setdefault(key, _Sum(key))
        current.ends.append(end)
        if values is None:
            sums.messages.look()
        else:
            current.values[ctx] = np.asarray(values, dtype=np.float64)
            if len(current.values) == sums.round.num_devices and not current.state():
                current.began = time.monotonic()
                stack = np.stack([current.values[c] for c in _in_order(current.values)])
                sums.send(key.name, stack, key.is_shared)
    _go_on()


def _go_on() -> None:
    """End the sums that are complete, and those that cannot become complete."""
    ended = []
    with lock:
        for key, current in [*_incomplete.items()]:
            state = current.state()
            if state is not None:
                del _incomplete[key]
                ended.append((current, state, key.sums.sent.pop(key.name, {})))
    for current, state, parts in ended:
        current.end(state, parts)


def _receive(rank: int, message: Any) -> None:
    """Store a message of another rank."""
    with lock:
        (place, number), name, content = message
        if (place, number) in _sent or number > _num_begun[place]:  # else it comes too late
            _sent.setdefault((place, number), collections.defaultdict(dict))[name][rank] = content
        lock.notify_all()
    _go_on()


def _is_message_expected() -> bool:
    with lock:
        shared = [current for key, current in _incomplete.items() if key.is_shared]
        return _num_waiting > 0 or any(s.key.sums.rank not in s.missing() for s in shared)


@functools.lru_cache(None)
def _watch(_pid: int) -> None:
    """Start this process's thread that every second ends the sums that are late.

    If an operator fails on one device after run_tasks has returned, only a clock can tell that the
    other devices wait for it.
    """

    def run() -> None:
        while True:
            time.sleep(1)
            _go_on()

    threading.Thread(target=run, name="gluonpar.late_sums", daemon=True).start()
