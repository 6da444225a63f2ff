"""Records of what the law follows: a parameter's arrays and gradients by device.

They belong to a Gluon Parameter, or to the program itself (:mod:`gluonpar.gradients.by_hand`). A
record lives as long as the Parameter, or as long as all of the arrays do.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Iterable, NamedTuple, Sequence

import mxnet as mx
from mxnet import gluon

from gluonpar.cluster import world
from gluonpar.gradients import law
from gluonpar.gradients.ages import Age
from gluonpar.runtime import memory, private_fields, tape

tracked: weakref.WeakKeyDictionary[gluon.Parameter, OfParameter] = weakref.WeakKeyDictionary()
# By id() of an array's handle, which lives as long as the array: its owner, and its index there.
places: dict[int, tuple[Owner, int]] = {}
# By id() of the first device's gradient; by now another array may have this id.
_by_grad: weakref.WeakValueDictionary[int, OfParameter] = weakref.WeakValueDictionary()


class Owner:
    """Owns arrays with a gradient: :mod:`gluonpar.runtime.tape` tells it of passes over them."""

    _variables: Sequence[mx.sym.Symbol] = ()  # keep the memory that Gradients reads
    _keys: Sequence[int] = ()  # in places

    def own(self, arrays: Sequence[mx.nd.NDArray], handles: Sequence[Any]) -> None:
        """Have the tape tell of passes that write the gradients of ``arrays``.

        In ``places`` the owner is found by the arrays' ``handles``.
        """
        Owner.forget(self)
        self._variables, self._keys = tape.own(self, arrays), [*map(id, handles)]
        places.update((key, (self, i)) for i, key in enumerate(self._keys))

    def forget(self) -> None:
        """Undo :meth:`own`, where no other record has taken an array since."""
        tape.disown(self, self._variables)
        for key in self._keys:
            if places.get(key, (None,))[0] is self:
                places.pop(key, None)  # the collector may have done so just now

    def weak(self, objects: Iterable[Any]) -> list[weakref.ref]:
        """Return references to ``objects``; when one of them is deleted, so is the record."""
        gone = functools.partial(_forget, weakref.ref(self))
        return [weakref.ref(each, gone) for each in objects]


def _forget(record: Any, _: Any) -> None:
    if record() is not None:
        record().forget()


class Sums(NamedTuple):
    """Says of gradients that they have been summed over devices."""

    added: Sequence[int]  # the devices whose sums the next sum adds
    by_program: bool = False


class Gradients(Owner, law.Tracked):
    """The gradients of one parameter: ``values[i]`` is on device i, and its gradient ``grads[i]``.

    MXNet's flags say which gradients backward has written since gluonpar has used them, and the law
    says which of these count. Inside ``cluster.local()`` also other gradients than the job's count.
    """

    accumulates = False  # whether passes add until the next update
    num_samples = 0  # in all passes: see samples.py
    is_compared = False  # whether ranks have compared the values

    def __init__(
        self, values: Sequence[mx.nd.NDArray], handles: Sequence[Any], grads: list
    ) -> None:
        contexts = [*map(memory.context, values)]
        law.Tracked.__init__(self, [(c.device_typeid, c.device_id) for c in contexts])
        self.values, self.grads = values, grads
        self.beside: set[law.Batch] = set()  # batches of passes that have added to these gradients
        self.sums: Sums | None = None  # None while they are parts
        self.age = Age(len(values))
        # Devices where a pass in local() overwrote a gradient of the job.
        self.lost: set[int] = set()
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
        return self.among(flags, world.is_apart())

    def note_lost(self, i: int, is_local: bool) -> None:
        """Before a pass writes the gradient on device ``i``, note whether the job loses it."""
        if not is_local:
            self.lost.discard(i)
        elif self.among(memory.grad_flags(self.values))[i]:
            self.lost.add(i)

    def follow(self, i: int) -> None:
        """Set ``grads[i]`` to the array that backward has written, which may be another one.

        A graph with ``static_shape`` keeps writing to the array of its first pass, and MXNet makes
        that the gradient. MXNet does the same when a pass adds up several gradients. A parameter
        that has been moved, or whose ``grad_req`` has changed, also has another array.
        """
        written = self._written[i].value
        if written != self._chunks[i]:
            self.grads[i], self._chunks[i] = self.values[i].grad, written
            self.replaced()

    def replaced(self) -> None:
        """Do what is needed when ``grads`` has another array."""

    def adds(self) -> bool:
        """Return whether gradients of earlier passes also count."""
        return self.adds_always or self.accumulates


class OfParameter(Gradients):
    """The gradients of a Gluon Parameter.

    Every Parameter of several devices has a record, which changes nothing of the Parameter until
    gluonpar is to train it (:func:`gluonpar.gradients.adopt`).
    """

    is_adopted = False
    param: Any  # a weak reference

    def __init__(self, param: gluon.Parameter) -> None:
        [self.param] = self.weak([param])
        self.renew()

    def renew(self) -> None:
        """Look up the parameter's arrays, which may be others than before, or none."""
        param = self.param()
        self._list = private_fields.grads(param)
        values = private_fields.values(param) if self._list else []
        super().__init__(values, [value.handle for value in values], [*(self._list or ())])
        self.replaced()

    def counting(self) -> list[bool]:
        """Return by device whether the gradient counts: with grad_req='add' all do or none."""
        if self._list is not private_fields.grads(self.param()):
            self.renew()  # it has been frozen
        return super().counting()

    def adopt(self) -> None:
        """Have the Parameter's ``list_grad()`` return what backward has written, from now on."""
        self.is_adopted = True
        self.replaced()

    def is_list(self, arrays: Sequence[mx.nd.NDArray]) -> bool:
        """Return whether ``arrays`` are what the Parameter's ``list_grad()`` returns."""
        return [*map(id, arrays)] == [*map(id, self._list or ())]

    def replaced(self) -> None:
        """Be found by the first gradient; if adopted, have the Parameter return the new array."""
        if self._list:
            _by_grad.pop(id(self._list[0]), None)
            if self.is_adopted:
                self._list[:] = self.grads
            _by_grad[id(self._list[0])] = self


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


def of_grads(arrays: Sequence[mx.nd.NDArray]) -> OfParameter | None:
    """Return the record of the Parameter whose gradients these arrays are, if there is one."""
    record = _by_grad.get(id(arrays[0])) if arrays else None
    return record if record and record.is_list(arrays) else None
