"""Arrays of a program's own, one per device: copies that ``get_params`` made, or others.

Which arrays are copies of one parameter is known when they are first summed together. Until then,
passes that write copies made by :func:`gluonpar.get_params` are kept, to apply the law to them. For
other arrays earlier passes are not known: all counts that backward has written by MXNet's flags.
"""

from __future__ import annotations

import collections
from typing import Any, Iterable, NamedTuple, Sequence, Tuple

import mxnet as mx

from gluonpar import cluster
from gluonpar.gradients import law
from gluonpar.gradients.records import Gradients, OfArrays, OfParameter, Owner, places
from gluonpar.gradients.static_graphs import adopt
from gluonpar.runtime import memory, tape

_MOST_PASSES = 256  # that are kept for one result of get_params
# A gradient that a pass wrote: the pass's number and thread, its recording, the array's index.
_Written = Tuple[int, int, tape.Recording, int]


def follow_copies(params: Sequence[mx.nd.NDArray]) -> None:
    """Keep the passes that write one device's ``params``, which have gradients."""
    Unjoined(params)


class Unjoined(Owner):
    """Keeps the last passes that wrote one device's ``arrays``, which are in no record yet."""

    def __init__(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        most = _MOST_PASSES * len(arrays)
        self.written: collections.deque[_Written] = collections.deque(maxlen=most)
        self._handles = self.weak(array.handle for array in arrays)
        self.renew()

    def renew(self) -> None:
        """Look up the names of the arrays, to which gradients may have been attached again."""
        handles = [handle() for handle in self._handles]
        self.own([*map(memory.alias, handles)], handles)


class Selected(NamedTuple):
    """The records of parameters, and for each the indices of some devices' arrays in it."""

    records: Sequence[Gradients]
    indices: Sequence[Sequence[int]]

    def select(self, of_records: Iterable[Sequence[bool]]) -> list[list[bool]]:
        """Return for each record the values of these devices among the values of all devices."""
        pairs = zip(of_records, self.indices)
        return [[by_device[i] for i in indices] for by_device, indices in pairs]

    def counting(self) -> list[list[bool]]:
        """Return for each parameter which devices' gradients count."""
        return self.select(record.counting() for record in self.records)

    def compared(self) -> dict[str, Any]:
        """Return what ranks compare, as arguments of :func:`gluonpar.cluster.check_equal_async`.

        Ranks compare the parameters' values in the first sum of their gradients.
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


def _owners(arrays: Sequence[mx.nd.NDArray]) -> list[tuple[Owner | None, int]]:
    return [places.get(id(array.handle), (None, 0)) for array in arrays]


def _place(arrays: Sequence[mx.nd.NDArray]) -> tuple[Gradients, list[int]] | None:
    """Return the one record that all of ``arrays`` are in, and their indices there."""
    found = _owners(arrays)
    record = found[0][0]
    if isinstance(record, Gradients) and all(other is record for other, _ in found):
        return record, [i for _, i in found]
    return None


def _has_grads(arrays: Sequence[mx.nd.NDArray]) -> bool:
    return None not in map(memory.grad_chunk, arrays)


def _join(columns: Sequence[Sequence[mx.nd.NDArray]]) -> None:
    """Make a record of each column, the copies of one parameter; apply the law to their passes.

    Of a column with an array whose passes have not been kept, all gradients count.
    """
    joined: dict[tuple[Any, int], tuple[OfArrays, int]] = {}
    for arrays in columns:
        before, record = _owners(arrays), OfArrays(arrays)
        if all(isinstance(copies, Unjoined) for copies, _ in before):
            joined.update((place, (record, i)) for i, place in enumerate(before))
    passes: dict[tuple[int, int], list[law.Written]] = {}
    for copies in {copies for copies, _ in joined}:
        for number, thread, recording, index in copies.written:
            if (copies, index) in joined:
                written = passes.setdefault((number, thread), [])
                written.append((recording, *joined[copies, index]))
    for number, thread in sorted(passes):
        law.write(passes[number, thread], thread)
