"""One process of bench_cluster.py: ``rank.py KIND SIZES ROUNDS``; rank 0 prints a line of JSON.

KIND is gluonpar, horovod or dist_sync. The all-reduce of arrays of so many float32 on all ranks,
each from a barrier on; of gluonpar the LeNet step on 128 images a process, too.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

IMAGES, STEPS = 128, 10


def main(kind: str, sizes: list[int], rounds: int) -> None:
    """Measure; the first rank prints."""
    rank, size, barrier, allreduce, mx = KINDS[kind]()
    found: dict = {"kind": kind, "processes": size, "seconds": {}, "wrong": 0}
    for n in sizes:
        seconds = []
        for _ in range(rounds + 2):
            x = mx.nd.full((n,), rank + 1)
            x.wait_to_read()
            barrier()
            start = time.perf_counter()
            total = allreduce(n, x)
            total.wait_to_read()
            seconds.append(time.perf_counter() - start)
            found["wrong"] += int((total.asnumpy() != size * (size + 1) / 2).sum())
        found["seconds"][n] = seconds[2:]
    if kind == "gluonpar":
        found["step_seconds"] = lenet_steps(mx, barrier, rank, size, rounds)
    if rank == 0:
        print(json.dumps(found), flush=True)
    barrier()


def lenet_steps(mx, barrier, rank: int, size: int, rounds: int) -> list[float]:
    """Mean seconds of a step, in each of ``rounds`` rounds."""
    import gluonpar
    from gluonpar.learners import pixel_lenet

    ctx = [mx.cpu()]
    device_params = [gluonpar.get_params(gluonpar.init_lenet(0.05), c) for c in ctx]
    random = np.random.RandomState(rank)
    X = random.randint(0, 256, (IMAGES, 1, 28, 28)).astype("uint8")
    y, found = random.randint(0, 10, IMAGES).astype("uint8"), []
    for _ in range(rounds + 1):
        barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            gluonpar.train_batch(
                X, y, device_params, ctx, 0.05, pixel_lenet, batch_size=size * IMAGES
            )
        mx.nd.waitall()
        found.append((time.perf_counter() - start) / STEPS)
    return found[1:]


def _gluonpar():
    from gluonpar import cluster  # it prepares MXNet, so it comes first

    import mxnet as mx  # isort: skip

    def allreduce(n, x):
        cluster.allreduce([x])
        return x

    return cluster.rank(), cluster.size(), lambda: cluster.gather(0), allreduce, mx


def _bare_mxnet():
    if "bool" not in vars(np):
        np.bool = bool  # MXNet 1.9.1 cannot be imported otherwise
    import mxnet as mx

    return mx


def _horovod():
    mx = _bare_mxnet()
    import horovod.mxnet as hvd

    hvd.init()

    def barrier():
        hvd.allreduce(mx.nd.ones((1,)), name="barrier").wait_to_read()

    def allreduce(n, x):
        return hvd.allreduce_(x, average=False, name=str(n))

    return hvd.rank(), hvd.size(), barrier, allreduce, mx


def _dist_sync():
    mx = _bare_mxnet()
    store, known = mx.kv.create("dist_sync"), set()

    def allreduce(n, x):
        total = mx.nd.empty((n,))
        store.push(n, x)
        store.pull(n, total)
        return total

    def first(n, x):
        if n not in known:
            known.add(n)
            store.init(n, mx.nd.zeros((n,)))
        return allreduce(n, x)

    return store.rank, store.num_workers, store._barrier, first, mx


KINDS = {"gluonpar": _gluonpar, "horovod": _horovod, "dist_sync": _dist_sync}


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
