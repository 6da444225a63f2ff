"""The all-reduce algorithms, one file each; importing a file registers its algorithm."""

from gluonpar.collectives.algorithms import (  # isort: skip
    star,
    balanced,
    ring,
    bidirectional_ring,
    tree,
    halving_doubling,
)
from gluonpar.collectives.host import reduction  # isort: skip
from gluonpar.collectives.algorithms import mxnet_kvstore  # isort: skip

__all__ = [
    "balanced",
    "bidirectional_ring",
    "halving_doubling",
    "mxnet_kvstore",
    "reduction",
    "ring",
    "star",
    "tree",
]
