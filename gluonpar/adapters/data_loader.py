"""DataLoader: each rank's part of every batch."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import threading
import zlib
from multiprocessing.dummy import DummyProcess  # a thread of a pool of threads
from typing import Any, Callable, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.data import dataloader

from gluonpar import cluster
from gluonpar.adapters import sample_seeds
from gluonpar.runtime import memory, private_fields
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

    The numbers that a sample draws in the dataset's own code, such as a transform, by ``np.random``
    and ``random``, depend on the seed, the epoch and the sample's position in it: they are the same
    for any number of workers and ranks, and none are drawn twice. The seed follows from
    ``np.random.seed`` on rank 0, as the order does. A ``batchify_fn`` draws the same on all ranks,
    and MXNet's generator is seeded in workers. The guide has the
    [details](../guide.md#random-numbers).

    All ranks must make and iterate it together: they exchange the order of an epoch when MXNet
    draws it, with ``auto_reload`` and ``num_workers`` already when the DataLoader is made. Raises
    ValueError on all ranks if their datasets differ in length, or if a sampler of your own draws
    other samples on each rank, as one of a rank's part does (it must draw from the whole dataset);
    ranks that have data of their own use ``gluon.data.DataLoader``. Also for a sampler that does
    not end. A DataLoader that is made inside ``cluster.local()`` loads all of every batch.

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
        draws = private_fields.runs_own_code(dataset), batchify_fn is not None
        parts = _Parts(self._batch_sampler, len(dataset), own, any(draws))
        if batchify_fn is None:
            by_workers = dataloader.default_mp_batchify_fn
            batchify_fn = by_workers if num_workers > 0 else dataloader.default_batchify_fn
        how = parts, operator.itemgetter(0), num_workers, *args
        self.num_samples = 0
        batches = _Batches(dataset, batchify_fn, draws)
        super().__init__(batches, None, False, None, None, *how, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        for self.num_samples, batch, *larger in super().__iter__():
            yield _without_samples(batch, *larger) if larger else batch

    def set_epoch(self, epoch: int) -> None:
        """Give the next epoch the number ``epoch``, at least 0; the later ones count on from it.

        A run that goes on after a checkpoint calls it on all ranks. The number matters where the
        order of the samples is not drawn from ``np.random``.
        """
        if operator.index(epoch) < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        epochs = self._batch_sampler.epochs
        # auto_reload may have begun to load the next epoch, with a seed that depends on its number.
        has_begun = epochs.count and self._num_workers > 0 and self._iter is not None
        if has_begun and epoch == epochs.number - 1:
            return
        epochs.number = epoch
        if has_begun:
            self.refresh()


class _Part(NamedTuple):
    """This rank's part of a batch, and what its random numbers depend on."""

    num_samples: int  # on all ranks
    indices: list  # of this rank's samples
    other: Any  # the index of any sample of the batch
    batch: int  # the number of the batch in the epoch
    position: int  # in the epoch, of the first of the samples
    rank: int
    seed: bytes | None  # of the epoch; None if nothing draws


class _Parts:
    """A batch sampler: of each of rank 0's ``batches``, this rank's part, as a single index."""

    def __init__(self, batches: Any, length: int, sampler: Any, draws: bool) -> None:
        self._batches, self._length, self._cluster_scope = batches, length, cluster.scope()
        self.epochs = sample_seeds.Epochs()
        self._draws, self._rank = draws, cluster.rank()
        is_of_mxnet = sampler is None or type(sampler).__module__.startswith("mxnet.")
        self._sampler = None if is_of_mxnet else type(sampler).__name__  # MXNet's draw from all
        self._share = share_of_batch()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[_Part]]:
        seed, batches = self._drawn()
        start = 0
        for number, batch in enumerate(batches):
            share = self._share(len(batch))
            position = start + (share.start if batch[share] else 0)
            yield [_Part(len(batch), batch[share], batch[0], number, position, self._rank, seed)]
            start += len(batch)

    @cluster.in_scope
    def _drawn(self) -> tuple[bytes | None, Iterator[list]]:
        """Return the seed of the next epoch, and its batches."""
        before = sample_seeds.state() if self._draws else b""
        if cluster.size() == 1:
            batches = map(list, self._batches)
            first = [*itertools.islice(batches, 1)]  # which draws an order, if one is drawn
            return self._seed(before), itertools.chain(first, batches)
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
        mine = self._length, samples, (self._seed(before), own if cluster.is_main() else None)
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
        seed, batches = drawn[0]
        return seed, iter(batches)

    def _seed(self, before: bytes) -> bytes | None:
        return self.epochs.next_seed(before) if self._draws else None


class _Batches:
    """The dataset that MXNet's DataLoader is given: its items are whole batches."""

    def __init__(self, dataset: Any, batchify: Callable, draws: tuple[bool, bool]) -> None:
        self._dataset, self._batchify = dataset, batchify
        self._samples_draw, self._batchify_draws = draws
        self._process = os.getpid()

    def __getitem__(self, part: _Part) -> tuple:
        """Return the number of samples on all ranks, and this rank's batch.

        If this rank has no sample, a sample of another rank is in the batch, and twice in a second
        batch: what differs between their shapes is the number of samples.
        """
        if part.seed is None:
            return self._load(part, None)
        is_worker = os.getpid() != self._process
        in_thread = not is_worker and threading.current_thread() is not threading.main_thread()
        if is_worker or isinstance(threading.current_thread(), DummyProcess):
            sample_seeds.seed_mxnet(part.seed, f"batch {part.batch}, rank {part.rank}")
        if in_thread:  # other threads may draw from np.random and random at the same time
            return self._load(part, None)
        with contextlib.nullcontext() if is_worker else sample_seeds.kept():
            return self._load(part, part.seed)

    def _load(self, part: _Part, seed: bytes | None) -> tuple:
        samples = []
        for position, i in enumerate(part.indices or [part.other], part.position):
            if seed and self._samples_draw:
                sample_seeds.seed_all(seed, f"sample {position}")
            samples.append(self._dataset[i])
        batches = [samples] if part.indices else [samples, samples * 2]
        joined = []
        for batch in batches:
            if seed and self._batchify_draws:
                sample_seeds.seed_all(seed, f"batch {part.batch}")
            joined.append(self._batchify(batch))
        return part.num_samples, *joined


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
