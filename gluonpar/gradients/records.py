"""What the law follows: a parameter's arrays and gradients by device, whoever owns them.

They are a Gluon Parameter's, or arrays of a program's own, one per device: the copies that
:func:`gluonpar.get_params` makes, or others with a gradient. A record keeps no array alive.

Which arrays are copies of one parameter is known when they are first summed together. The passes
until then are kept for copies that ``get_params`` has made, and the law is applied to them then.
For other arrays they are not known: MXNet's flags say what has been written, and all of it counts.
"""

from __future__ import annotations

import collections
import functools
import weakref
from typing import Any, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import gluon

from gluonpar.gradients import law
from gluonpar.gradients.ages import Age
from gluonpar.runtime import memory, private_fields, tape

_MOST_PASSES = 256  # that are kept for one result of get_params
tracked: weakref.WeakKeyDictionary[gluon.Parameter, OfParameter] = weakref.WeakKeyDictionary()
# By id() of an array's handle, which lives as long as the array: its record, and its index there.
_places: dict[int, tuple[_Record, int]] = {}
# By id() of the first device's gradient; another array may have that id by now.
_by_grad: weakref.WeakValueDictionary[int, OfParameter] = weakref.WeakValueDictionary()


class _Record:
    """What is known of some arrays with a gradient."""

    _variables: Sequence[mx.sym.Symbol] = ()  # keep the memory that Gradients reads
    _keys: Sequence[int] = ()  # in _places

    def own(self, arrays: Sequence[mx.nd.NDArray], handles: Sequence[Any]) -> None:
        """Be told of passes that write the gradients of ``arrays``, and be found by ``handles``."""
        _Record.forget(self)
        self._variables, self._keys = tape.own(self, arrays), [*map(id, handles)]
        _places.update((key, (self, i)) for i, key in enumerate(self._keys))

    def forget(self) -> None:
        """Undo :meth:`own`, where no other record has taken an array since."""
        tape.disown(self, self._variables)
        for key in self._keys:
            if key in _places and _places[key][0] is self:
                del _places[key]

    def weak(self, handles: Iterable[Any]) -> list[weakref.ref]:
        """Return references to ``handles``; when an array is deleted, the record is, too."""
        gone = functools.partial(_forget, weakref.ref(self))
        return [weakref.ref(handle, gone) for handle in handles]


def _forget(record: Any, _: Any) -> None:
    if record() is not None:
        record().forget()


class Gradients(_Record, law.Tracked):
    """The gradients of one parameter: ``grads[i]`` that of ``values[i]``, which is on device i.

    MXNet's flags say which of them backward has written since a step of gluonpar's has used them,
    and the law which of these count.
    """

    accumulates = False  # whether passes add until the next update

    def __init__(
        self, values: Sequence[mx.nd.NDArray], handles: Sequence[Any], grads: list
    ) -> None:
        contexts = [*map(memory.context, values)]
        law.Tracked.__init__(self, [(c.device_typeid, c.device_id) for c in contexts])
        self.values, self.grads = values, grads
        self.beside: set[law.Batch] = set()  # batches of passes that have added to these gradients
        self.sum_on: Any = None  # if they are sums: the devices whose sums the next sum adds
        self.age = Age(len(values))
        self.own(values, handles)
        self._written = [*map(memory.grad_pointer, values)]
        self._chunks: list[int | None] = [*map(memory.chunk, grads)]
        self.adds_always = any(map(memory.adds_grads, values))
        if any(memory.grad_flags(values)):
            for i in range(len(values)):
                self.follow(i)

    def counting(self) -> list[bool]:
        """Return by device whether the gradient counts: with grad_req='add' all do or none."""
        flags = memory.grad_flags(self.values)
        if self.adds_always:
            return [any(flags)] * len(flags)
        return [*map(bool.__and__, flags, self.is_of_newest_batch())]

    def follow(self, i: int) -> None:
        """Have ``grads[i]`` be the array that backward has written, which may be another one.

        A graph with ``static_shape`` keeps writing to the array of its first pass, and MXNet makes
        that the gradient. MXNet does the same when a pass adds up several gradients. A parameter
        that has been moved, or whose ``grad_req`` has changed, has another array, too.
        """
        written = self._written[i].value
        if written != self._chunks[i]:
            self.grads[i], self._chunks[i] = self.values[i].grad, written

    def adds(self) -> bool:
        """Return whether gradients of earlier passes count, too."""
        return self.adds_always or self.accumulates


class OfParameter(Gradients):
    """The gradients of a Gluon Parameter."""

    def __init__(self, param: gluon.Parameter) -> None:
        self.param: Any = weakref.ref(param, functools.partial(_forget, weakref.ref(self)))
        self.renew()

    def renew(self) -> None:
        """Look up the parameter's arrays, which may be others than before, or none."""
        param = self.param()
        self._list = private_fields.grads(param)
        values = private_fields.values(param) if self._list else []
        super().__init__(values, [value.handle for value in values], self._list or [])
        _by_grad.update((id(grad), self) for grad in self.grads[:1])

    def counting(self) -> list[bool]:
        """Return by device whether the gradient counts: with grad_req='add' all do or none."""
        if self._list is not private_fields.grads(self.param()):
            self.renew()  # it has been frozen
        return super().counting()

    def follow(self, i: int) -> None:
        """Have ``grads[i]`` be the array that backward has written, which may be another one."""
        before = self.grads[0]
        super().follow(i)
        if self.grads[0] is not before:
            _by_grad.pop(id(before), None)
            _by_grad[id(self.grads[0])] = self


class OfArrays(Gradients):
    """The gradients of arrays on several devices."""

    def __init__(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        self._handles = self.weak(array.handle for array in arrays)
        self.renew()

    def renew(self) -> None:
        """Look up the arrays' gradients, which may have been attached again."""
        handles = [handle() for handle in self._handles]
        values = [*map(memory.alias, handles)]
        super().__init__(values, handles, [value.grad for value in values])

    def forget(self) -> None:
        """Free what may keep memory of the arrays."""
        super().forget()
        self.values, self.grads = [], []


class _Pass(NamedTuple):
    number: int
    thread: int
    recording: tape.Recording
    indices: list[int]


class Unjoined(_Record):
    """The last passes that wrote gradients of one device's parameters, which are in no record."""

    def __init__(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        self.passes: collections.deque[_Pass] = collections.deque(maxlen=_MOST_PASSES)
        self._handles = self.weak(array.handle for array in arrays)
        self.renew()

    def renew(self) -> None:
        """Look up the names of the arrays, to which gradients may have been attached again."""
        handles = [handle() for handle in self._handles]
        self.own([*map(memory.alias, handles)], handles)

    def note(self, number: int, thread: int, recording: tape.Recording, i: int) -> None:
        """Note that pass ``number`` writes the gradient of array i."""
        if not self.passes or self.passes[-1][:3] != (number, thread, recording):
            self.passes.append(_Pass(number, thread, recording, []))
        self.passes[-1].indices.append(i)


class Selected(NamedTuple):
    """The records of parameters, and for each the indices there of some devices' arrays."""

    records: Sequence[Gradients]
    indices: Sequence[Sequence[int]]

    def select(self, of_records: Iterable[Sequence[bool]]) -> list[list[bool]]:
        """Return, of what is said of each record by its devices, what is said of these devices."""
        pairs = zip(of_records, self.indices)
        return [[by_device[i] for i in indices] for by_device, indices in pairs]

    def counting(self) -> list[list[bool]]:
        """Return for each parameter which devices' gradients count."""
        return self.select(record.counting() for record in self.records)


def of(device_params: Sequence[Sequence[mx.nd.NDArray]]) -> Selected:
    """Return the records of the parameters that have a gradient on all of these devices.

    ``device_params[i]`` are the parameters on device i.
    """
    columns = [arrays for arrays in zip(*device_params) if _has_grads(arrays)]
    with tape.lock:
        found = [*map(_place, columns)]
        joined = iter(_join([arrays for arrays, place in zip(columns, found) if place is None]))
    all_devices = [*range(len(device_params))]
    places = [place or (next(joined), all_devices) for place in found]
    return Selected([record for record, _ in places], [indices for _, indices in places])


def _place(arrays: Sequence[mx.nd.NDArray]) -> tuple[Gradients, list[int]] | None:
    """Return the one record that all of ``arrays`` are in, and their indices there."""
    places = [_places.get(id(array.handle), (None, 0)) for array in arrays]
    record = places[0][0]
    if isinstance(record, Gradients) and all(other is record for other, _ in places):
        return record, [i for _, i in places]
    return None


def _has_grads(arrays: Sequence[mx.nd.NDArray]) -> bool:
    return None not in map(memory.grad_chunk, arrays)


def _join(columns: Sequence[Sequence[mx.nd.NDArray]]) -> list[OfArrays]:
    """Make records, each of arrays that are one parameter, and apply the law to their passes."""
    passes: dict[tuple[int, int], list[law.Written]] = {}
    made = []
    for arrays in columns:
        places = [_places.get(id(array.handle), (None, 0)) for array in arrays]
        made.append(OfArrays(arrays))
        for i, (record, index) in enumerate(places):
            for each in record.passes if isinstance(record, Unjoined) else ():
                if index in each.indices:
                    written = passes.setdefault(each[:2], [])
                    written.append((each.recording, made[-1], i))
    for number, thread in sorted(passes):
        law.write(passes[number, thread], thread)
    return made


def of_grads(arrays: Sequence[mx.nd.NDArray]) -> OfParameter | None:
    """Return the record of the Parameter whose gradients these arrays are, if there is one."""
    record = _by_grad.get(id(arrays[0])) if arrays else None
    return record if record and [*map(id, arrays)] == [*map(id, record.grads)] else None
