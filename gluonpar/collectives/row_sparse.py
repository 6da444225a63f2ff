"""row_sparse arrays, such as the gradients of an embedding: the union of their rows, summed.

A row_sparse array holds some rows of a large array, and their indices, and each device's has other
rows. Algorithms on chunks have no use for that, and neither has the sum in the host's memory. So
the rows are copied to the first array's device, added there in the order of the list, and the sum
is copied to every device. MXNet's kvstore adds in this order, too, so the results have its bits.
Between processes each rank is sent the rows of all, and adds those that ranks have in common.
"""

from __future__ import annotations

from typing import Sequence

import mxnet as mx

from gluonpar.plans import Algorithm


def allreduce(lists: Sequence[Sequence[mx.nd.NDArray]], op: str) -> None:
    """Replace every array of a list by the sum of all: the union of their rows, in place."""
    for data in lists:
        total = mx.nd.sparse.add_n(*(array.as_in_context(data[0].context) for array in data))
        for array in data:
            total.copyto(array)


def broadcast(lists: Sequence[Sequence[mx.nd.NDArray]], root: int) -> None:
    """Replace every array of a list by that of device ``root``."""
    for data in lists:
        for array in data:
            if array is not data[root]:
                data[root].copyto(array)


# Not one to choose: nothing else takes them.
ALGORITHM = Algorithm("row_sparse", run=allreduce, broadcast=broadcast)
