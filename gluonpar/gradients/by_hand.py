"""Arrays of a program's own, one per device: copies that ``get_params`` made, or others.

Which arrays are copies of one parameter is known when they are first summed together. The passes
until then are kept for copies that :func:`gluonpar.get_params` has made, and the law is applied to
them then. For other arrays they are not known: MXNet's flags say what backward has written, and all
of that counts.
"""

from __future__ import annotations

import collections
from typing import Any, Iterable, NamedTuple, Sequence

import mxnet as mx

from gluonpar import cluster
from gluonpar.gradients import law
from gluonpar.gradients.records import Gradients, OfArrays, OfParameter, Owner, places
from gluonpar.gradients.static_graphs import adopt
from gluonpar.runtime import memory, tape

_MOST_PASSES = 256  # that are kept for one result of get_params


def follow_copies(params: Sequence[mx.nd.NDArray]) -> None:
    """Keep the passes that write the gradients of one device's ``params``, which have some."""
    Unjoined(params)


class _Pass(NamedTuple):
    number: int
    thread: int
    recording: tape.Recording
    indices: list[int]


class Unjoined(Owner):
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

    def compared(self) -> dict[str, Any]:
        """Return what ranks compare: the values, in the first sum of these gradients.

        These are arguments of :func:`gluonpar.cluster.check_equal_async`.
        """
        if cluster.size() == 1:
            return {}
        arrays = {f"value of parameter {i}": of.values[0] for i, of in enumerate(self.records)}
        has_new = not all(record.is_compared for record in self.records)
        for record in self.records:
            record.is_compared = True
        return {"arrays": arrays, "has_changed": has_new}

    def written_in(self, recording: tape.Recording) -> list[list[bool]]:
        """Return for each parameter which devices' gradients a recording has written."""
        of_records = [[part is recording.part for part in each.wrote] for each in self.records]
        return self.select(of_records)


def of(device_params: Sequence[Sequence[mx.nd.NDArray]]) -> Selected:
    """Return the records of the parameters that have a gradient on all of these devices.

    ``device_params[i]`` are the parameters on device i.
    """
    columns = [*zip(*device_params)]
    with tape.lock:
        found = [*map(_place, columns)]
        new = [arrays for arrays, place in zip(columns, found) if not place and _has_grads(arrays)]
        if new:
            _join(new)
            found = [*map(_place, columns)]
    records, indices = zip(*filter(None, found)) if any(found) else ((), ())
    of_params = [record for record in records if isinstance(record, OfParameter)]
    adopt(record.param() for record in of_params if not record.is_adopted)
    return Selected(records, indices)


def _place(arrays: Sequence[mx.nd.NDArray]) -> tuple[Gradients, list[int]] | None:
    """Return the one record that all of ``arrays`` are in, and their indices there."""
    found = [places.get(id(array.handle), (None, 0)) for array in arrays]
    record = found[0][0]
    if isinstance(record, Gradients) and all(other is record for other, _ in found):
        return record, [i for _, i in found]
    return None


def _has_grads(arrays: Sequence[mx.nd.NDArray]) -> bool:
    return None not in map(memory.grad_chunk, arrays)


def _join(columns: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Make records, each of arrays that are one parameter, and apply the law to their passes."""
    joined: dict[tuple[Unjoined, int], tuple[OfArrays, int]] = {}
    for arrays in columns:
        found = [places.get(id(array.handle), (None, 0)) for array in arrays]
        record = OfArrays(arrays)
        for i, (before, index) in enumerate(found):
            if isinstance(before, Unjoined):
                joined[before, index] = record, i
    passes: dict[tuple[int, int], list[law.Written]] = {}
    for copies in {copies for copies, _ in joined}:
        for number, thread, recording, indices in copies.passes:
            written = [joined[copies, index] for index in indices if (copies, index) in joined]
            passes.setdefault((number, thread), []).extend((recording, *each) for each in written)
    for number, thread in sorted(passes):
        if passes[number, thread]:
            law.write(passes[number, thread], thread)
