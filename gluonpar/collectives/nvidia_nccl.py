"""nccl: NVIDIA's library, which chooses the way by the links between the GPUs it finds.

NCCL's function is called once per array, all calls in one group: a bucket of many arrays is one
operator, and nothing is copied together. See :mod:`gluonpar.runtime.nccl`.
"""

from gluonpar.plans import register_executor
from gluonpar.runtime import nccl

register_executor("nccl", refusal=nccl.refusal, reduce=nccl.reduce, broadcast=nccl.broadcast)(
    nccl.allreduce
)
