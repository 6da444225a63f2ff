"""join: a loop over batches if some ranks have more batches than others."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, TypeVar

from gluonpar.cluster.process_collectives import gather

T = TypeVar("T")


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch: of an array, or of the first in a list or DataBatch."""
    first = getattr(batch, "data", batch)
    while isinstance(first, (list, tuple)):
        first = first[0]
    return len(first)


def join(
    batches: Iterable[T], num_samples: Callable[[T], int] = num_rows
) -> Iterator[tuple[T | None, int]]:
    """Yield this rank's batches, each with the number of samples of all ranks, while any has one.

    A rank whose ``batches`` have ended gets None for a batch, and takes the step without samples.
    So all ranks take equally many steps, and no sample is left out, whatever loads the batches: a
    list, a DataLoader, an iterator of ``mx.io``. ``num_samples(batch)`` is the number of this
    rank's samples in a batch. All ranks must call this, and a ``break`` must be taken on all. Each
    batch waits for the sums of the step before. Compare ``join`` in Horovod and in PyTorch's DDP.

    >>> import numpy as np
    >>> [num_samples for _, num_samples in join([np.ones((3, 2)), np.ones((1, 2))])]
    [3, 1]
    """
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        mine = -1 if batch is None else num_samples(batch)
        of_ranks = gather(mine, "numbers of samples, by join")
        if max(of_ranks) < 0:
            return
        yield batch, sum(max(number, 0) for number in of_ranks)
