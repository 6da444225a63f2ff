"""row_sparse arrays, such as the gradients of an embedding: the union of their rows, summed.

A row_sparse array holds some rows of a large array, and their indices. Each device has other rows.
Neither algorithms on chunks nor the sum in the host's memory can add such arrays. So the rows are
copied to the first array's device and added there, in the order of the list, and the sum is copied
to every device. MXNet's kvstore adds in this order, too, so the results have the same bits. Between
processes, every rank receives all rows, and adds rows with the same index.
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
    """Replace every array of a list by the array on device ``root``."""
    for data in lists:
        for array in data:
            if array is not data[root]:
                data[root].copyto(array)


# Not in ALGORITHMS: it takes these arrays only, and nothing else takes them.
ALGORITHM = Algorithm("row_sparse", run=allreduce, broadcast=broadcast)
