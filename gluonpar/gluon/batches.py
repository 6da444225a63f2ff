"""Which gradients of Gluon parameters count: the ones that their parameter's newest batch wrote.

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

MXNet's flags say which gradients count: where a batch begins, the flags of other batches' gradients
are cleared. With ``no_sync`` or ``grad_req='add'`` passes add to gradients, which are then of no
batch. Where the gradients are sums over devices, passes add to the sum on one device. A batch that
such a pass has written, too, is used when these gradients are. ``no_sync`` does without MXNet's
``'add'``: with it the backward of some operators overwrites the gradient all the same, and others
write to memory that is not theirs (MXNet 1.9.1: mean, clip, cumsum, ...).

Before the sum over devices ``list_grad()`` holds parts of the gradient. A Trainer sums them, or the
program, by :func:`gluonpar.allreduce` or ``allreduce_many``. A program may clip and update by sums,
not by parts.

A rank without samples has no pass. Its gradients are of an earlier batch, and must not be added to
other ranks' gradients. So ranks compare ages of gradients: how many sums there had been when a
gradient was written, and how often it has been written since. Both numbers are the same on all
ranks that had samples, whatever their devices, and smaller on ranks that had none.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Callable, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from gluonpar import cluster
from gluonpar.batch_norm import current_round
from gluonpar.cluster import world
from gluonpar.collectives import operations
from gluonpar.runtime import memory, private_fields, tape

# By id() of the first device's gradient; another array may have that id by now.
_by_grad: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()
tracked: weakref.WeakKeyDictionary[gluon.Parameter, Gradients] = weakref.WeakKeyDictionary()
_num_sums = 0  # of gradients, over devices and ranks


class _Batch:
    """Gradients that count together; some of ``parts`` may be of another batch by now."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number, self.is_used = next(self.numbers), False
        self.parts: set[_Part] = set()

    def use(self) -> None:
        self.is_used = True
        self.parts.clear()


class _Part:
    """The gradients of a batch that one recording has written, and on which devices."""

    def __init__(self) -> None:
        self.batch = _BEFORE
        self.devices: set[tuple[int, int]] = set()


_BEFORE = _Batch()  # of what was written before the parameter was tracked
_BEFORE.use()


class Gradients:
    """The gradients of one parameter, by device. MXNet's flags say which of them count."""

    def __init__(self, param: gluon.Parameter) -> None:
        self._names: list[str] = []  # in tape.owners
        self.param: Callable[[], Any] = weakref.ref(param, functools.partial(_forget, self._names))
        self.grads: list[mx.nd.NDArray] = []
        self.accumulates = False  # whether passes add until the next update
        self.renew()

    def renew(self) -> None:
        """Look up the parameter's arrays and their names, which may be others than before."""
        param = self.param()
        self._grads = private_fields.grads(param)
        self.grads = self._grads or []
        self.values: list[mx.nd.NDArray] = private_fields.values(param) if self.grads else []
        self.devices = [(c.device_typeid, c.device_id) for c in (v.context for v in self.values)]
        self.adds_always = param.grad_req == "add"
        self.batch = _BEFORE  # the batch that wrote last
        self.beside: set[_Batch] = set()  # batches of passes that have added to these gradients
        self.wrote: list[_Part | None] = [None] * len(self.values)  # by device, last
        self.sum_on: Any = None  # if they are sums: the devices whose sums the next sum adds
        self._time, self._num_written = 0, [0] * len(self.values)  # the age
        _forget(self._names)
        self._variables: list[Any] = [tape.graph_of(value.handle) for value in self.values]  # kept
        self._written = [*map(memory.grad_pointer, self.values)]
        self._chunks: list[int | None] = [*map(memory.chunk, self.grads)]
        self._names += [variable.name for variable in self._variables]
        tape.owners.update((name, (self, i)) for i, name in enumerate(self._names))
        _by_grad.update((id(grad), self) for grad in self.grads[:1])
        if any(memory.grad_flags(self.values)):
            for i in range(len(self.values)):
                self.follow(i)

    def fresh(self) -> list[bool]:
        """Return by device whether the gradient counts: with grad_req='add' all do or none."""
        if self._grads is not private_fields.grads(self.param()):
            self.renew()  # it has been frozen
        flags = memory.grad_flags(self.values)
        return [any(flags)] * len(flags) if self.adds_always else flags

    def summands(self) -> list[bool]:
        """Return by device whether the next sum adds the gradient: if they are sums, one does."""
        fresh, on = self.fresh(), self.sum_on  # in this order
        return [counts and (on is None or i in on) for i, counts in enumerate(fresh)]

    def follow(self, i: int) -> None:
        """Have ``list_grad()[i]`` be the array that backward has written, which may be another one.

        A graph with ``static_shape`` keeps writing to the array of its first pass, and MXNet makes
        that the gradient. So it does with a sum of several gradients in a pass. A parameter that
        has been moved, or whose ``grad_req`` has changed, has another array, too.
        """
        written = self._written[i].value
        if written != self._chunks[i]:
            _by_grad.pop(id(self.grads[0]), None)
            self.grads[i], self._chunks[i] = self.values[i].grad, written
            _by_grad[id(self.grads[0])] = self

    def adds(self) -> bool:
        """Return whether gradients of earlier passes count, too."""
        return self.adds_always or self.accumulates

    def prepare_to_add(self, i: int) -> mx.nd.NDArray | None:
        """Before a pass that adds on device ``i``, return a copy of what it will overwrite."""
        with autograd.pause():
            if self.sum_on is not None:
                memory.zero([grad for j, grad in enumerate(self.grads) if j not in self.sum_on])
                self.sum_on = None
            overwrites = not self.adds_always and any(memory.grad_flags([self.values[i]]))
            return self.grads[i].copy() if overwrites else None

    def become_sums(self, devices: Any) -> None:
        """Note that the gradients are sums now; the next sum adds only those on ``devices``."""
        self.sum_on = devices
        self._time, self._num_written = _num_sums - 1, [0] * len(self.values)

    def count(self, i: int) -> None:
        """Count that the gradient on device ``i`` is written by another recording than before."""
        if self._time != _num_sums:
            self._time, self._num_written = _num_sums, [0] * len(self.values)
        self._num_written[i] += 1

    def age(self) -> tuple[int, int]:
        """Return both counts, the first one -1 if no gradient counts; added gradients are new."""
        if not any(self.fresh()):
            return -1, 0
        return (_num_sums, 0) if self.adds() else (self._time, max(self._num_written))


def _forget(names: list[str], _: Any = None) -> None:
    for name in names:
        tape.owners.pop(name, None)
    names.clear()


def _write(written: Sequence[tape.Written]) -> _Batch:
    """Apply the law to what a pass will write, and return the batch that the pass is of."""
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
        if param not in tracked:
            tracked[param] = Gradients(param)


@private_fields.around(private_fields.ALLOCATES_GRADIENTS)
@private_fields.around(private_fields.CASTS)
def _track_changed(change: Callable, param: gluon.Parameter, *args: Any) -> None:
    """Track a parameter of several devices, or of several ranks, as soon as it has gradients."""
    change(param, *args)
    if param in tracked:
        tracked[param].renew()
    elif len(private_fields.values(param) or ()) > (not world.launched()):
        track([param])


_static_blocks: weakref.WeakSet[gluon.HybridBlock] = weakref.WeakSet()


@private_fields.around(private_fields.BUILDS_GRAPH)
def _keep_no_shared_arrays(build: Callable, block: gluon.HybridBlock, *args: Any) -> None:
    """Make a block's graph; graphs that share parameters then keep no arrays of gradients.

    In MXNet 1.9.1 a graph with ``static_shape`` keeps the arrays to which it first wrote. Two such
    graphs, of two heads on one body, may keep the same array, and write to it in turn before MXNet
    adds what both have written.
    """
    build(block, *args)
    with tape.lock:
        _static_blocks.add(block)
        params = private_fields.static_params(block)
        sharing = [one for one in _static_blocks if params & private_fields.static_params(one)]
        if len(sharing) > 1:
            for each in sharing:
                private_fields.keep_no_arrays(each)


def ran_on(param: gluon.Parameter) -> list[bool]:
    """Return by device whether the last batch that wrote the parameter's gradient ran there."""
    grads = tracked[param]
    parts = [part for part in grads.batch.parts if part.batch is grads.batch]
    return [any(device in part.devices for part in parts) for device in grads.devices]


def _use(grads: Gradients) -> None:
    for batch in (grads.batch, *grads.beside):
        batch.use()
    grads.beside.clear()


def mark_used(params: Iterable[gluon.Parameter]) -> None:
    """Let no gradient of ``params`` count until backward has written it again."""
    with tape.lock:
        for grads in map(tracked.__getitem__, params):
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
        for grads in map(tracked.__getitem__, params):
            _use(grads)
            memory.set_grad_flags(grads.values, True)
            grads.become_sums(devices)


def _discard(written: Iterable[tape.Written]) -> None:
    """After tasks that failed, let the gradients that their passes have written not count."""
    for _, grads, i in written:
        grads.batch.use()
        memory.set_grad_flags(grads.values[i : i + 1], False)


def param_of(arrays: Sequence[mx.nd.NDArray]) -> gluon.Parameter | None:
    """Return the tracked parameter whose gradients these arrays are, if there is one."""
    grads = _by_grad.get(id(arrays[0])) if arrays else None
    if grads and [*map(id, arrays)] == [*map(id, grads.grads)]:
        return grads.param()
    return None


def _note_sums(lists: Iterable[Sequence[mx.nd.NDArray]]) -> None:
    """Note that a program has summed gradients over all devices: the next sum adds each again."""
    for param in filter(None, map(param_of, lists)):
        grads = tracked[param]
        grads.sum_on = range(len(grads.values))


operations.after_sums.append(_note_sums)


def are_sums(params: Sequence[gluon.Parameter]) -> bool:
    """Return whether some gradients of tracked ``params`` are sums, and all that count."""
    of_params = [tracked[param] for param in params]
    parts = [grads for grads in of_params if grads.sum_on is None]
    return len(parts) < len(params) and not any(any(grads.fresh()) for grads in parts)


def check_summed(params: Iterable[gluon.Parameter]) -> None:
    """Raise ValueError if gradients of ``params`` have been written since they were summed."""
    for param in filter(tracked.__contains__, params):
        grads = tracked[param]
        is_sum = len(grads.values) * cluster.size() == 1 or grads.sum_on is not None
        if not is_sum and any(grads.fresh()):
            raise ValueError(
                f"backward has written the gradient of {param.name} since the last sum over "
                "devices; call allreduce_grads() before update(), or step() instead of both"
            )


def summands(
    params: Sequence[gluon.Parameter],
    num_processes: int,
    of: str,
    facts: dict[str, Any] | None = None,
) -> tuple[list[list[bool]], list[bool]]:
    """Return per parameter which devices' gradients the next sum adds, and whether it adds any.

    The former is for this rank, the latter for all. All ranks call this before each sum, with the
    same Trainer's name ``of`` and the same ``facts``; gradients that are older than other ranks'
    are not added. A rank that has new gradients of all parameters does not wait.
    """
    global _num_sums
    of_params = [tracked[param] for param in params]
    counting = [grads.summands() for grads in of_params]
    on_some_rank = [*map(any, counting)]
    if num_processes > 1 and (params or facts):
        ages = np.array([grads.age() for grads in of_params]).reshape(-1, 2)
        of_ranks = cluster.PendingGather(ages, f"gradients of {of}", _check_ages, facts)
        _num_sums += 1
        if (ages[:, 0] != _num_sums - 1).any():  # some may be old
            newest = np.max(of_ranks.wait(), axis=0)[:, 0]
            on_some_rank = (newest >= 0).tolist()
            for i in np.flatnonzero(ages[:, 0] < newest):
                counting[i] = [False] * len(counting[i])
    return counting, on_some_rank


def _check_ages(of_ranks: Sequence[np.ndarray]) -> None:
    """Raise ValueError if it cannot be told which ranks had samples of the last batch."""
    sums, written = np.array(of_ranks).transpose(2, 0, 1)
    newest = sums == sums.max(axis=0)
    most = np.where(newest, written, -1).max(axis=0)
    least = np.where(newest, written, np.iinfo("int64").max).min(axis=0)
    if (most != least).any():
        raise ValueError(
            "since the last step, ranks ran backward for different numbers of batches, so which "
            "gradients are of the last batch cannot be told; call step() or allreduce_grads() on "
            "all ranks for each batch, also on ranks without samples"
        )
