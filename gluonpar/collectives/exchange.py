"""Exchange: how arrays become their sum on all devices of all processes. All of it is decided here.

A *list* holds one array per device; lists that are summed together are a *bucket*. When an Exchange
is made for a set of contexts it decides

- how a sum is computed *inside* the process: on CPU contexts in the host's memory, on GPUs by NCCL
  or by a plan of copies (:mod:`gluonpar.collectives.choice`), or by the algorithm that is named;
- how it is computed *between* processes: not at all, by MPI, or by NCCL (:mod:`gluonpar.cluster`);
- which arrays are *added*: the given ones, or copies: of a wider dtype; scaled, for a mean; rounded
  to float16, in which other processes are sent the sums.

With several processes, an all-reduce is hierarchical: each process sums its bucket onto one device,
the bucket's *root*; the roots' arrays are summed between processes; each process broadcasts from
the root. So the network carries one array per process, however many devices there are.

Everything is done in place and asynchronously; arrays have been checked (``operations.py``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster
from gluonpar.collectives import executor, host, row_sparse
from gluonpar.collectives.choice import check_algorithm, choose, on_host
from gluonpar.collectives.executor import Lists
from gluonpar.plans import partition, registry
from gluonpar.plans.algorithms import balanced
from gluonpar.runtime import devices, interrupts, memory, threads

# Large enough for an all-reduce to be bandwidth-bound, small enough for the first buckets of a
# model's gradients to be summed while backward still computes the others.
BUCKET_BYTES = 4 << 20

pushing = threading.RLock()
os.register_at_fork(
    before=pushing.acquire, after_in_parent=pushing.release, after_in_child=pushing.release
)


def as_one(function: Callable) -> Callable:
    """Push the operators of a call without those of other threads' calls, or Ctrl-C, in between.

    Autograd records none of them, and arrays of 0 dimensions are arrays with one element.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        with interrupts.held(), pushing, autograd.pause(), mx.util.np_shape(True):
            function(*args, **kwargs)

    return called


class Bucket(NamedTuple):
    """Lists of arrays that are summed together, and the device that gets the sum; None: all do."""

    lists: Lists
    root: int | None = 0


def groups(arrays: Sequence[mx.nd.NDArray], most_bytes: int) -> list[list[int]]:
    """Return the positions of neighbours that form a bucket: one dtype, at most ``most_bytes``.

    A larger array and a row_sparse one have a group to themselves, arrays without elements none.
    """
    grouped: list[list[int]] = []
    held, last = 0, None
    for i, array in enumerate(arrays):
        shape, dtype, stype = memory.kind(array)
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            continue
        alone = stype != "default"
        if last is None or dtype != last or held + num_bytes > most_bytes or alone:
            grouped.append([])
            held, last = 0, None if alone else dtype
        grouped[-1].append(i)
        held += num_bytes
    return grouped


def in_buckets(lists: Lists, most_bytes: int = BUCKET_BYTES, root: int = 0) -> list[Bucket]:
    """Return the lists in buckets of at most ``most_bytes`` per device."""
    firsts = [data[0] for data in lists]
    return [Bucket([lists[j] for j in group], root) for group in groups(firsts, most_bytes)]


class Exchange:
    """The collectives over ``ctx``, and over other processes' devices.

    ``op`` and ``accumulate`` are those of :func:`gluonpar.allreduce`; with ``op`` None nothing is
    added, and arrays may have any dtype. ``algorithm`` names the all-reduce inside the process
    (None: by the rule); another than 'nccl' keeps NCCL from summing between processes, too. With
    ``compression='fp16'`` values are rounded. ``num_processes`` is 1 for this process's devices
    only, or by default ``cluster.size()``. Raises ValueError for an algorithm that is not
    registered, or that cannot be used on these contexts.
    """

    def __init__(
        self,
        ctx: Sequence[mx.Context],
        algorithm: str | None = None,
        compression: str | None = None,
        num_processes: int | None = None,
        op: str | None = "sum",
        accumulate: str | None = None,
    ) -> None:
        check_algorithm(algorithm, ctx)
        self.ctx, self.algorithm = list(ctx), algorithm
        self.op, self.accumulate, self._compression = op, accumulate, compression
        self._combine = "sum" if op == "mean" else op  # a mean is a sum of scaled copies
        self.num_processes = num_processes or cluster.size()
        # On CPU contexts the choice depends on nothing else.
        self._name = algorithm or ("host" if on_host(ctx) else None)
        # Whether a pass over the host's memory that reads the arrays may compute their sum, too.
        self.may_fuse = self._name == "host" and compression is None
        threads.share(ctx)
        devices.enable_peers(ctx)

    @property
    def num_arrays(self) -> int:
        """The number of arrays of one list, those of all processes; equally many in each."""
        return len(self.ctx) * self.num_processes

    @functools.cached_property
    def inside(self) -> Exchange:
        """The exchange between this process's devices only; sums are not compressed."""
        if self.num_processes == 1:
            return self
        return Exchange(self.ctx, self.algorithm, num_processes=1)

    @as_one
    def allreduce(self, buckets: Sequence[Bucket]) -> None:
        """Replace every array of each list by the sum, or another ``op``, over all devices."""
        if self.num_processes > 1:
            self.reduce(buckets)
            self.inside.broadcast([each for each in buckets if each.root is not None])
            return
        for lists, _ in buckets:
            self._sum_inside(lists, root=None)

    @as_one
    def reduce(self, buckets: Sequence[Bucket], name: str = "allreduce") -> None:
        """Replace the root's array of each list, in every process, by that of :meth:`allreduce`.

        Other arrays are left as they are, or hold a sum, too, if the algorithm has no reduce. In a
        bucket without a root, which in a job is one of row_sparse arrays, all become the sum.
        ``name`` is its name in errors.
        """
        by_nccl = self.algorithm in (None, "nccl")
        for lists, root in buckets:
            self._sum_inside(lists, root)
            if self.num_processes == 1:
                continue
            if memory.kind(lists[0][0])[2] == "row_sparse":
                self._reduce_rows(lists, root, name)
                continue
            arrays = [data[root] for data in lists]
            if self.op == "mean":
                self._average(arrays, name)
            else:
                cluster.allreduce(arrays, self._compression, by_nccl, self.op, name)

    @as_one
    def broadcast(self, buckets: Sequence[Bucket], rank: int = 0, name: str = "broadcast") -> None:
        """Replace every array of each list by the root's array of process ``rank``."""
        for lists, root in buckets:
            if self.num_processes > 1:
                cluster.broadcast([data[root] for data in lists], rank, name)
            if len(self.ctx) > 1:
                executor.broadcast(self.chosen(lists), lists, root)

    @as_one
    def reduce_scatter(self, data: Sequence[mx.nd.NDArray]) -> None:
        """Replace part i of the array at position i by the sum of part i of all arrays.

        Positions count the arrays of all processes, in the order of the ranks.
        """
        if not data[0].size:
            return
        parts = self._parts(data)
        if self.num_processes > 1 or self.op == "mean":  # a mean is computed of copies
            total = data[0].copy()
            name = f"reduce-scatter of {self.num_arrays} arrays"
            self.reduce(in_buckets([[total, *data[1:]]]), name)
            total, *flat = executor.flattened([total, *data])
            for part, array in zip(parts, flat):
                if part.start < part.stop:
                    total[part].copyto(array[part])
        elif self._name == "host":
            sums = [(part, host.starting_with(i, len(data)), []) for i, part in enumerate(parts)]
            host.run([data], sums, self.op)
        else:
            hops, own = balanced.reduce_scatter(len(data)), [(i, i) for i in range(len(data))]
            executor.run(hops, executor.flattened(data), self.op, own)

    @as_one
    def all_gather(self, data: Sequence[mx.nd.NDArray]) -> None:
        """Replace part i of every array by part i of the array at position i."""
        if not data[0].size:
            return
        k, parts = len(data), self._parts(data)
        if self.num_processes > 1:
            first, *others = executor.flattened(data)
            for part, array in zip(parts[1:], others):
                if part.start < part.stop:
                    array[part].copyto(first[part])
            sizes = partition.sizes(data[0].size, self.num_arrays)
            of_ranks = [sum(sizes[i : i + k]) for i in range(0, len(sizes), k)]
            cluster.all_gather(data[0], of_ranks, f"all-gather of {self.num_arrays} arrays")
            self.inside.broadcast(in_buckets([data]))
        elif self._name == "host":
            copies = [(part, [i], host.starting_with(i, k)[1:]) for i, part in enumerate(parts)]
            host.run([data], copies)
        else:
            executor.run(balanced.all_gather(k), executor.flattened(data))

    def _parts(self, data: Sequence[mx.nd.NDArray]) -> list[slice]:
        """Return the parts of this process's arrays."""
        parts = partition.slices(data[0].size, self.num_arrays)
        return parts[cluster.rank() * len(data) :][: len(data)] if self.num_processes > 1 else parts

    def _sum_inside(self, lists: Lists, root: int | None) -> None:
        """Sum a bucket over this process's devices, on the device ``root`` or on all."""
        with self._summands(lists, root) as summands:
            if len(self.ctx) == 1:
                return
            if root is None:
                executor.allreduce(self.chosen(summands), summands, self._combine)
            else:
                executor.reduce(self.chosen(summands), summands, root, self._combine)

    @contextlib.contextmanager
    def _summands(self, lists: Lists, root: int | None) -> Iterator[Lists]:
        """Give the arrays to add, or to combine by another op, and write the result back.

        They are the arrays themselves, or copies: scaled, for a mean; rounded, if they are to be
        compressed, to the 11 binary digits of float16, and so is the sum, infinite above 65504; of
        the wider dtype in which they are to be added.
        """
        k, compressed = len(self.ctx), self._compression is not None
        scale = _scale_of_mean(k)
        if self.op == "mean":
            wider = np.promote_types(memory.kind(lists[0][0])[1], "float32")
            copies = [[a.astype(wider, copy=False) * scale for a in data] for data in lists]
        elif compressed:
            copies = [[a.astype("float16").astype("float32") for a in data] for data in lists]
        elif self.accumulate is not None:
            copies = [[array.astype(self.accumulate) for array in data] for data in lists]
        else:
            yield lists
            return
        yield copies
        for data, sums in zip(lists, copies):
            for i in range(k) if root is None else [root]:
                total = sums[i] / (k * scale) if self.op == "mean" else sums[i]
                total = total.astype("float16") if compressed else total
                total.astype(data[i].dtype, copy=False).copyto(data[i])

    def chosen(self, lists: Lists) -> registry.Algorithm:
        """Return the algorithm for a bucket."""
        if memory.kind(lists[0][0])[2] == "row_sparse":
            return row_sparse.ALGORITHM
        if self._name is not None:
            return registry.named(self._name)
        num_bytes = sum(memory.num_bytes(data[0]) for data in lists)
        return registry.named(choose(self.ctx, num_bytes).algorithm)

    def _reduce_rows(self, lists: Lists, root: int | None, name: str) -> None:
        """Replace sums, or means, over this process's devices by those over all processes'."""
        num_devices = len(self.ctx) if self.op == "mean" else None
        for data in lists:
            first, *others = data if root is None else [data[root]]
            cluster.allreduce_rows(first, self._compression, num_devices, name)
            for array in others:
                first.copyto(array)

    def _average(self, arrays: Sequence[mx.nd.NDArray], name: str) -> None:
        """Replace means over this process's devices by the means over all processes' devices."""
        num_devices, (_, dtype, _) = len(self.ctx), memory.kind(arrays[0])
        wider = "float32" if dtype == np.float16 else "float64"  # a sum may be too large for dtype
        flat = executor.flattened(arrays)
        sums = [array.astype(wider) * num_devices for array in flat]
        count = mx.nd.full((1,), num_devices, arrays[0].context, wider)
        shapes = ", ".join(str(memory.kind(array)[0]) for array in arrays)
        cluster.allreduce([*sums, count], name=f"mean by {name} of shapes {shapes}")
        for array, total in zip(flat, sums):
            average = mx.nd.broadcast_div(total, count.as_in_context(total.context))
            average.astype(dtype).copyto(array)


def exchange_over(ctx: tuple, algorithm: str | None = None, op: str | None = "sum") -> Exchange:
    """Return the exchange for these arguments, made when it is asked for first."""
    return _made(ctx, algorithm, num_processes=cluster.size(), op=op)


_made = functools.lru_cache(256)(Exchange)


def _scale_of_mean(count: int) -> float:
    """Return the power of two s by which ``count`` values are multiplied before they are added.

    Their sum is then divided by ``count * s``, and the mean is finite wherever it can be
    represented, although the sum of the values may overflow: s is at most 1 / ``count``, so no sum
    of scaled values is larger than the largest value. Scaling by a power of two changes no digit:
    the result has the bits of sum / ``count``, if no value is so small (1e-38 ``count`` in float32)
    that it loses digits. float16 ends at 6e-8, so its mean is computed in float32.

    >>> _scale_of_mean(3), _scale_of_mean(4)
    (0.25, 0.25)
    """
    return 0.5 ** (count - 1).bit_length()
