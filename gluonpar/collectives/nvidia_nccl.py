"""nccl: NVIDIA's library, which chooses the way by the links between the GPUs it finds.

``ncclAllReduce`` is called once per array, all calls in one group: a bucket of many arrays is one
operator, and nothing is copied together. See :mod:`gluonpar.runtime.nccl`.
"""

from __future__ import annotations

import contextlib

from gluonpar.collectives import executor
from gluonpar.plans.registry import register_executor
from gluonpar.runtime import nccl


@register_executor("nccl", nccl.refusal, whole_buckets=True)
def allreduce(lists, op: str = "sum", accumulate: str | None = None) -> None:
    """All-reduce with NCCL the arrays of different GPUs."""
    with contextlib.ExitStack() as stack:
        flat = [stack.enter_context(executor.flattened(data, accumulate, op)) for data in lists]
        nccl.allreduce(flat, "sum" if op == "mean" else op)  # its own mean multiplies by 1 / K
