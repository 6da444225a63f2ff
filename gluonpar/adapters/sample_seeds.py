"""The random numbers of a DataLoader's samples: seeds by epoch, sample and batch.

A seed is a hash of the epoch's seed and a position in the epoch, so it depends neither on the
process that loads the sample nor on what was loaded before. An epoch's seed is a hash of
``np.random``'s state before the order of the epoch was drawn.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from typing import Any, Iterator

import numpy as np

from gluonpar.runtime import device_threads

# The hash of np.random's state for which loaders were last numbered, and the last number.
_numbered = (b"", 0)


class Epochs:
    """The seeds of one loader's epochs; ``number`` is that of the next.

    If the order of an epoch was drawn from ``np.random``, the epoch's seed depends on the state
    alone, as the order does. Otherwise the state is the same for all epochs, and for all loaders:
    then it also depends on the number of the epoch and of the loader.
    """

    def __init__(self) -> None:
        self.number = 0
        self.count = False  # whether the last seed depends on the epoch's number
        self._loader = (b"", 0)  # the state for which this loader was numbered, and its number

    def next_seed(self, before: bytes) -> bytes:
        """Return the next epoch's seed; ``before`` is :func:`state` before its order was drawn."""
        self.count, place = state() == before, ""
        if self.count:
            if self._loader[0] != before or not _is_numbered(before):
                self._loader = before, _next_loader(before)
            place = f"loader {self._loader[1]}, epoch {self.number}"
        self.number += 1
        return hashlib.blake2b(place.encode(), key=before, digest_size=16).digest()


def state() -> bytes:
    """Return a hash of the state of ``np.random``: two with one hash draw the same numbers."""
    kind, keys, position, has_gauss, gauss = _fields()
    rest = f"{kind} {position} {gauss if has_gauss else None}"
    return hashlib.blake2b(rest.encode() + keys.tobytes(), digest_size=32).digest()


def _fields() -> Any:
    return np.random.get_state()


# While ``has_gauss`` is 0, nothing reads the field ``gauss`` of np.random's state, and
# np.random.seed sets it to 0. So 1 says that it has not been called since loaders were numbered.


def _is_numbered(before: bytes) -> bool:
    has_gauss, gauss = _fields()[3:]
    return _numbered[0] == before and bool(has_gauss or gauss)


def _next_loader(before: bytes) -> int:
    global _numbered
    _numbered = before, _numbered[1] + 1 if _is_numbered(before) else 0
    fields = _fields()
    if not fields[3]:
        np.random.set_state((*fields[:4], 1.0))
    return _numbered[1]


def seed_all(epoch: bytes, place: str) -> None:
    """Seed ``np.random`` and Python's ``random`` for one place in the epoch."""
    number = _hash(epoch, place)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def seed_mxnet(epoch: bytes, place: str) -> None:
    """Seed the generators that MXNet has for this thread."""
    device_threads.seed_this(_hash(epoch, place) & 0x7FFFFFFF)


def _hash(epoch: bytes, place: str) -> int:
    return int.from_bytes(hashlib.blake2b(place.encode(), key=epoch, digest_size=8).digest(), "big")


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leave ``np.random`` and ``random`` as they were, whatever the scope draws."""
    states = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])
