"""Exchange: decides how arrays are summed over all devices of all processes.

A *list* holds one array per device. A *bucket* holds lists that are summed together. An Exchange,
made for a list of contexts, decides three things:

- how to sum *inside* the process: on CPU contexts in the host's memory, on GPUs by NCCL or by a
  plan (:mod:`gluonpar.collectives.choice`), or by the algorithm that the caller names;
- how to sum *between* processes: by MPI or by NCCL (:mod:`gluonpar.cluster`);
- what to *add*: the arrays themselves, or copies of them. Copies are scaled for a mean, or rounded
  to float16 if the sums are sent to other processes in float16.

With several processes an all-reduce is hierarchical: each process sums a bucket onto one device,
the bucket's *root*; the arrays on the roots are summed between processes; each process broadcasts
from its root. So the network carries one array per process, however many devices the process has.

All methods work in place and asynchronously, on arrays that ``operations.py`` has checked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
from typing import Callable, Iterator, NamedTuple, Sequence, TypeVar

import mxnet as mx
import numpy as np
from mxnet import autograd

from gluonpar import cluster
from gluonpar.collectives import executor
from gluonpar.collectives.choice import check_algorithm, choose
from gluonpar.collectives.executor import Lists
from gluonpar.collectives.host import on_host
from gluonpar.plans import partition
from gluonpar.runtime import devices, interrupts, memory, threads

T = TypeVar("T")

# Large enough for an all-reduce to be bandwidth-bound, small enough for the first buckets of a
# model's gradients to be summed while backward still computes the others.
BUCKET_BYTES = 4 << 20

pushing = threading.RLock()
os.register_at_fork(
    before=pushing.acquire, after_in_parent=pushing.release, after_in_child=pushing.release
)


@contextlib.contextmanager
def atomic() -> Iterator[None]:
    """Let neither other threads nor Ctrl-C come between the operators of a function.

    Another thread's call waits until all operators of this one have been pushed, and Ctrl-C is
    raised after that. Autograd records none of them, and arrays may have 0 dimensions.
    """
    with interrupts.held(), pushing, autograd.pause(), memory.any_shape():
        yield


class Bucket(NamedTuple):
    """Lists that are summed together, and the device that gets the sum; with None all get it.

    ``counts[j][i]`` is whether the array of list j on device i counts. The others are set to zero
    before the sum. An empty list means that all count.
    """

    lists: Lists
    root: int | None = 0
    counts: Sequence[Sequence[bool]] = ()


def _stale(bucket: Bucket) -> list[mx.nd.NDArray]:
    """Return the arrays that do not count."""
    pairs = [zip(data, counts) for data, counts in zip(bucket.lists, bucket.counts)]
    return [array for of_list in pairs for array, counts in of_list if not counts]


def grouped(
    items: Sequence[T], array_of: Callable[[T], mx.nd.NDArray], most_bytes: int
) -> list[list[T]]:
    """Return groups of consecutive items whose arrays have one dtype and at most ``most_bytes``.

    An array that is larger, or row_sparse, is a group. Arrays without elements are left out.
    """
    groups: list[list[T]] = []
    held, last = 0, None
    for item in items:
        shape, dtype, stype = memory.kind(array_of(item))
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            continue
        alone = stype != "default"
        if last is None or dtype != last or held + num_bytes > most_bytes or alone:
            groups.append([])
            held, last = 0, None if alone else dtype
        groups[-1].append(item)
        held += num_bytes
    return groups


def in_buckets(lists: Lists, root: int = 0) -> list[Bucket]:
    """Return the lists in buckets of at most BUCKET_BYTES per device."""
    return [Bucket(group, root) for group in grouped(lists, lambda data: data[0], BUCKET_BYTES)]


class Exchange:
    """The collectives over ``ctx``, and over other processes' devices.

    ``op`` is as in :func:`gluonpar.allreduce`; an exchange with ``op`` None only copies, arrays of
    any dtype. ``algorithm`` names the all-reduce inside the process; None leaves the choice to
    :mod:`gluonpar.collectives.choice`. NCCL sums between processes only if ``algorithm`` is None or
    'nccl'. With ``compression='fp16'`` values are rounded to float16. An exchange that is made
    inside ``cluster.local()`` is between this process's devices only. Raises ValueError for an
    algorithm that is not registered, or that cannot be used on these contexts.
    """

    def __init__(
        self,
        ctx: Sequence[mx.Context],
        algorithm: str | None = None,
        compression: str | None = None,
        op: str | None = "sum",
    ) -> None:
        check_algorithm(algorithm, ctx)
        self.ctx, self.algorithm = list(ctx), algorithm
        self.op, self._compression = op, compression
        # A mean is a sum of scaled copies.
        self._combine = "sum" if op is None or op == "mean" else op
        self.num_processes = cluster.size()
        self.num_arrays = len(ctx) * self.num_processes  # of all processes, which have equally many
        # On CPU contexts the choice depends on nothing else.
        self._name = algorithm or ("host" if on_host(ctx) else None)
        # Whether a pass over the host's memory that reads the arrays may compute their sum, too.
        self.may_fuse = self._name == "host" and compression is None
        threads.share(ctx)
        devices.enable_peers(ctx)

    @functools.cached_property
    def inside(self) -> Exchange:
        """The exchange between this process's devices only, without compression."""
        with cluster.local():
            return Exchange(self.ctx, self.algorithm)

    @atomic()
    def allreduce(self, buckets: Sequence[Bucket]) -> None:
        """Replace every array of each list by the sum, or another ``op``, over all devices."""
        if self.num_processes == 1:
            self.reduce([bucket._replace(root=None) for bucket in buckets])
        else:
            self.reduce(buckets)
            self.inside.broadcast(buckets)

    @atomic()
    def reduce(self, buckets: Sequence[Bucket], name: str = "allreduce") -> None:
        """Replace the root's array of each list, in every process, by the sum over all devices.

        Other arrays are left as they are, unless the algorithm can only give all devices the sum.
        In a bucket without a root all arrays become the sum; with several processes these must be
        row_sparse. ``name`` is the name of the call in errors.
        """
        memory.zero([*itertools.chain.from_iterable(map(_stale, buckets))])
        by_nccl = self.algorithm in (None, "nccl")
        for lists, root, _ in buckets:
            summands = self._summands(lists)
            by = self.chosen(summands)
            if len(self.ctx) > 1 and root is None:
                by.allreduce(summands, self._combine)
            elif len(self.ctx) > 1:
                by.reduce(summands, root, self._combine)
            if summands is not lists:
                self._write_back(lists, summands, root)
            if self.num_processes == 1:
                continue
            if root is None or memory.kind(lists[0][0])[2] == "row_sparse":
                self._reduce_rows(lists, root, name)
            elif self.op == "mean":
                self._average([data[root] for data in lists], name)
            else:
                arrays = [data[root] for data in lists]
                cluster.allreduce(arrays, self._compression, by_nccl, self._combine, name)

    @atomic()
    def broadcast(self, buckets: Sequence[Bucket], rank: int = 0, name: str = "broadcast") -> None:
        """Replace every array of each list by the root's array of process ``rank``.

        Buckets without a root are left as they are.
        """
        for lists, root, _ in buckets:
            if root is None:
                continue
            if self.num_processes > 1:
                cluster.broadcast([data[root] for data in lists], rank, name)
            if len(self.ctx) > 1:
                self.chosen(lists).broadcast(lists, root)

    @atomic()
    def reduce_scatter(self, data: Sequence[mx.nd.NDArray]) -> None:
        """Replace part i of the array at position i by the sum of part i of all arrays.

        Positions count the arrays of all processes, in the order of the ranks.
        """
        parts, flat = self._parts(data), executor.flattened(data)
        if self.num_processes == 1:
            self.reduce([Bucket([[array[part] for array in flat]], i) for i, part in parts])
        elif data[0].size:
            total = data[0].copy()
            name = f"reduce-scatter of {self.num_arrays} arrays"
            self.reduce(in_buckets([[total, *data[1:]]]), name)
            [flat_total] = executor.flattened([total])
            for i, part in parts:
                flat_total[part].copyto(flat[i][part])

    @atomic()
    def all_gather(self, data: Sequence[mx.nd.NDArray]) -> None:
        """Replace part i of every array by part i of the array at position i."""
        parts, flat = self._parts(data), executor.flattened(data)
        if self.num_processes == 1:
            self.broadcast([Bucket([[array[part] for array in flat]], i) for i, part in parts])
        elif data[0].size:
            for i, part in parts[1:]:
                flat[i][part].copyto(flat[0][part])
            k, sizes = len(data), partition.sizes(data[0].size, self.num_arrays)
            of_ranks = [sum(sizes[i : i + k]) for i in range(0, len(sizes), k)]
            cluster.all_gather(data[0], of_ranks, f"all-gather of {self.num_arrays} arrays")
            self.inside.broadcast(in_buckets([data]))

    def _parts(self, data: Sequence[mx.nd.NDArray]) -> list[tuple[int, slice]]:
        """Return the parts of this process's arrays that have elements, with their positions."""
        first = cluster.rank() * len(data) if self.num_processes > 1 else 0
        parts = partition.slices(data[0].size, self.num_arrays)[first : first + len(data)]
        return [(i, part) for i, part in enumerate(parts) if part.start < part.stop]

    def _summands(self, lists: Lists) -> Lists:
        """Return the arrays to add, or to combine by another op: ``lists`` itself, or copies."""
        if self.op == "mean":
            wider = np.promote_types(memory.kind(lists[0][0])[1], "float32")
            return [[a.astype(wider, copy=False) * self._scale for a in data] for data in lists]
        if self._compression is not None:
            return [[a.astype("float16").astype("float32") for a in data] for data in lists]
        return lists

    def _write_back(self, lists: Lists, sums: Lists, root: int | None) -> None:
        """Write the results of copies into the lists: on device ``root``, or with None on all.

        A compressed sum is rounded to the 11 binary digits of float16, and infinite above 65504.
        """
        k = len(self.ctx)
        for data, copies in zip(lists, sums):
            for i in range(k) if root is None else [root]:
                total = copies[i] / (k * self._scale) if self.op == "mean" else copies[i]
                total = total if self._compression is None else total.astype("float16")
                total.astype(data[i].dtype, copy=False).copyto(data[i])

    @property
    def _scale(self) -> float:
        """The factor of a mean's summands: a power of two of at most 1 / k.

        So no sum is larger than the largest value, and a mean is finite although the sum of the
        values may overflow. Scaling changes no digit, unless a value is very small (1e-38 k in
        float32; float16 is converted before).
        """
        return 0.5 ** (len(self.ctx) - 1).bit_length()

    def chosen(self, lists: Lists) -> executor.Executor:
        """Return the executor of the algorithm for a bucket."""
        if memory.kind(lists[0][0])[2] == "row_sparse":
            return executor.ROW_SPARSE
        if self._name is not None:
            return executor.named(self._name)
        num_bytes = sum(memory.num_bytes(data[0]) for data in lists)
        return executor.named(choose(self.ctx, num_bytes).algorithm)

    def _reduce_rows(self, lists: Lists, root: int | None, name: str) -> None:
        """Replace sums, or means, over this process's devices by sums over all processes."""
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
