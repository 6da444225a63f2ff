"""nccl: NVIDIA's library, which chooses the way by the links between the GPUs it finds.

NCCL's function is called once per array, all calls in one group: a bucket of many arrays is one
operator, and nothing is copied together. See :mod:`gluonpar.runtime.nccl`.
"""

from __future__ import annotations

import contextlib
from typing import Iterator, Sequence

from gluonpar.collectives import executor
from gluonpar.plans.registry import register_executor
from gluonpar.runtime import nccl


@contextlib.contextmanager
def _flattened(lists, op, accumulate, writes: Sequence[int] | None = None) -> Iterator[tuple]:
    """Give the lists, and the operation: NCCL's own mean multiplies by 1 / K."""
    with contextlib.ExitStack() as stack:
        flat = [executor.flattened(data, accumulate, op, writes) for data in lists]
        yield [*map(stack.enter_context, flat)], "sum" if op == "mean" else op


def reduce(lists, root: int, op: str = "sum", accumulate: str | None = None) -> None:
    """Sum the arrays of different GPUs on one of them with NCCL."""
    with _flattened(lists, op, accumulate, [root]) as (flat, nccl_op):
        nccl.reduce(flat, root, nccl_op)


@register_executor(
    "nccl", nccl.refusal, whole_buckets=True, reduce=reduce, broadcast=nccl.broadcast
)
def allreduce(lists, op: str = "sum", accumulate: str | None = None) -> None:
    """All-reduce with NCCL the arrays of different GPUs."""
    with _flattened(lists, op, accumulate) as (flat, nccl_op):
        nccl.allreduce(flat, nccl_op)
