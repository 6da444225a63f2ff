"""Memory does not grow with the number of shapes that were summed."""

import pytest
from contexts import algorithms
from processes import run_python

MB = 1e6
PROGRAM = """
import sys, gluonpar, mxnet as mx, numpy as np, psutil
sizes = np.random.RandomState(0).randint(1, 100_000, size=900)
for i, size in enumerate(sizes, 1):
    gluonpar.allreduce([mx.nd.ones((int(size),), ctx=mx.cpu(j)) for j in range(4)], sys.argv[1])
    mx.nd.waitall()
    if i % 300 == 0:
        print(psutil.Process().memory_info().rss)
"""


@pytest.mark.slow
@pytest.mark.cpu("the memory of CPU contexts is the process's")
@pytest.mark.parametrize("algorithm", algorithms())
def test_changing_shapes_keep_no_memory(algorithm):
    first, _, last = map(int, run_python(PROGRAM, algorithm).split())
    assert last - first < 20 * MB  # 600 arrays of four devices are 480 MB
