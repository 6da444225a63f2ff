"""DataLoader: each rank's part of every batch."""

from __future__ import annotations

import itertools
import operator
import zlib
from typing import Any, Callable, Iterator

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.data import dataloader

from gluonpar import cluster
from gluonpar.runtime import memory
from gluonpar.sharding import NESTS, items, rebuild, share_of_batch

# A sampler is taken for endless after this many times the dataset, or a dataset of this size.
_MOST_TIMES, _FEW_SAMPLES = 10, 100_000


class DataLoader(gluon.data.DataLoader):
    """``gluon.data.DataLoader`` whose batches are, in a job, this rank's part of every batch.

    It takes the arguments of ``gluon.data.DataLoader``, which mean what they mean in one process:
    a batch has ``batch_size`` samples on all ranks together, and with ``shuffle`` an epoch has
    every sample once, in another order each time. Rank 0 draws the batches from its sampler, so
    ``np.random.seed`` there determines them, and they are the same for any number of ranks. Rank i
    takes the i-th of consecutive parts of a batch, whose sizes differ by at most one sample.

    ``num_samples`` is the number of samples, on all ranks, of the batch that was returned last:
    what ``trainer.step`` takes. All ranks get equally many batches. If a batch, such as the last
    one, has fewer samples than there are ranks, some get arrays of shape (0, ...).
    :func:`split_and_load` makes no shards of them; call ``step`` all the same.

    All ranks must make and iterate it together: they exchange the order of an epoch when MXNet
    draws it, with ``num_workers`` already when the DataLoader is made, unless ``auto_reload`` is
    False. Raises ValueError on all ranks if their datasets differ in length, or if a sampler of
    your own draws other samples on each rank, as one of a rank's part does (it must draw from the
    whole dataset); ranks that have data of their own use ``gluon.data.DataLoader``. Also for a
    sampler that does not end. A DataLoader that is made inside ``cluster.local()`` loads all of
    every batch.

    >>> loader = DataLoader(np.arange(5), batch_size=3)
    >>> [(batch.asnumpy().tolist(), loader.num_samples) for batch in loader]
    [([0, 1, 2], 3), ([3, 4], 2)]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Any = None,
        last_batch: str | None = None,
        batch_sampler: Any = None,
        batchify_fn: Callable | None = None,
        num_workers: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Once for its checks and its sampler, and again with ours, and with workers.
        super().__init__(dataset, batch_size, shuffle, sampler, last_batch, batch_sampler)
        own = getattr(batch_sampler, "_sampler", batch_sampler) or sampler
        parts = _Parts(self._batch_sampler, len(dataset), own)
        if batchify_fn is None:
            by_workers = dataloader.default_mp_batchify_fn
            batchify_fn = by_workers if num_workers > 0 else dataloader.default_batchify_fn
        how = parts, operator.itemgetter(0), num_workers, *args
        self.num_samples = 0
        super().__init__(_Batches(dataset, batchify_fn), None, False, None, None, *how, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        for self.num_samples, batch, *larger in super().__iter__():
            yield _without_samples(batch, *larger) if larger else batch


class _Parts:
    """A batch sampler: of each of rank 0's ``batches``, this rank's part, one index.

    It has the number of samples on all ranks, the indices of this rank's, and that of any sample.
    """

    def __init__(self, batches: Any, length: int, sampler: Any) -> None:
        self._batches, self._length, self._cluster_scope = batches, length, cluster.scope()
        is_of_mxnet = sampler is None or type(sampler).__module__.startswith("mxnet.")
        self._sampler = None if is_of_mxnet else type(sampler).__name__  # MXNet's draw from all
        self._share = share_of_batch()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[tuple]]:
        for batch in self._drawn():
            yield [(len(batch), batch[self._share(len(batch))], batch[0])]

    @cluster.in_scope
    def _drawn(self) -> Iterator[list]:
        if cluster.size() == 1:
            return map(list, self._batches)
        # On all ranks, so that their random generators go on alike.
        own, num_drawn = [], 0
        for batch in self._batches:
            own.append([int(i) if isinstance(i, np.integer) else i for i in batch])
            num_drawn += len(batch)
            if num_drawn > _MOST_TIMES * max(self._length, _FEW_SAMPLES):
                raise ValueError(
                    "in a job of several processes a sampler must end; after "
                    f"{num_drawn:,} samples of a dataset of {self._length:,} one has not"
                )
        of_all = sorted(map(repr, itertools.chain(*own))) if self._sampler else []
        samples = zlib.crc32(repr(of_all).encode())
        mine = self._length, samples, own if cluster.is_main() else None
        lengths, of_ranks, drawn = zip(*cluster.gather(mine))
        if len({*lengths}) > 1:
            raise ValueError(
                f"all ranks must load from the same dataset, got lengths {list(lengths)}, by rank; "
                "if each has data of its own, use gluon.data.DataLoader"
            )
        if len({*of_ranks}) > 1:
            other = next(i for i, number in enumerate(of_ranks) if number != of_ranks[0])
            raise ValueError(
                f"sampler {self._sampler} draws other samples on rank {other} than on rank 0; it "
                "must draw from the whole dataset, alike on all ranks (np.random.seed), as each "
                "rank loads its part of every batch; leave it out, or use gluon.data.DataLoader"
            )
        return iter(drawn[0])


class _Batches:
    """The dataset that MXNet's DataLoader is given: its items are whole batches."""

    def __init__(self, dataset: Any, batchify: Callable) -> None:
        self._dataset, self._batchify = dataset, batchify

    def __getitem__(self, part: tuple[int, list, Any]) -> tuple:
        """Return the number of samples on all ranks, and this rank's batch.

        If this rank has no sample, a sample of another rank is in the batch, and twice in a second
        batch: what differs between their shapes is the number of samples.
        """
        num_samples, indices, other = part
        if indices:
            return num_samples, self._batchify([self._dataset[i] for i in indices])
        sample = self._dataset[other]
        return num_samples, self._batchify([sample]), self._batchify([sample, sample])


def _without_samples(batch: Any, larger: Any) -> Any:
    """Return ``batch`` with length 0 along the axes on which the ``larger`` batch is longer."""
    if isinstance(batch, NESTS) and len(batch) == len(larger):
        pairs = zip(items(batch), items(larger))
        return rebuild(batch, [_without_samples(one, two) for (_, one), (_, two) in pairs])
    if isinstance(batch, list):
        return []
    if not isinstance(batch, (np.ndarray, mx.nd.NDArray)):
        return batch
    shape = [n if n == more else 0 for n, more in zip(batch.shape, larger.shape)]
    if isinstance(batch, np.ndarray):
        return np.empty(shape, batch.dtype)
    with memory.any_shape():
        empty = mx.nd.empty(tuple(shape), batch.context, batch.dtype)
    return empty.as_np_ndarray() if isinstance(batch, mx.np.ndarray) else empty
