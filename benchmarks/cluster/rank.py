"""One process of bench_cluster.py, run by its path with a request (:func:`jobs.request`).

It sums arrays and trains, with the others, as it is told through the gate, and reports seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import time
import types
from typing import Any

PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def main(request: dict) -> None:
    """Join the others, then answer until the driver hangs up."""
    runtime = "gluonpar" if request["module"] == "ranks_of_ours" else "mxnet"
    if runtime == "mxnet":
        sys.modules["gluonpar"] = without_preparation()
    gate, worker = (
        importlib.import_module(f"gluonpar.{name}")
        for name in ("bench_cluster.gate", "bench_training.worker")
    )
    worker.prepare(runtime, [("cpu", 0)])
    if os.environ.get("DMLC_ROLE", "worker") != "worker":
        import mxnet  # noqa: F401  # a server of the parameter server serves while it is imported

        return
    module = importlib.import_module(f"benchmarks.cluster.{request['module']}")
    rank = module.join(request["candidate"], request["processes"], request["batch_size"])
    gate.turns(
        request["port"],
        {"rank": rank.rank, "loss": rank.loss()},
        {
            "sum": lambda n: summed(rank, n),
            "steps": lambda steps: trained(rank, steps),
            "loss": lambda _: {"loss": rank.loss()},
        },
    )
    os._exit(0)  # the driver has what it wants; libraries would wait for each other


def without_preparation() -> types.ModuleType:
    """The package, for its modules; its first lines, which prepare MXNet, are not run."""
    package = types.ModuleType("gluonpar")
    package.__path__ = [str(PACKAGE)]
    return package


def summed(rank: Any, n: int) -> dict:
    """Seconds that the all-reduce of ``n`` float32 takes this rank, and how many sums are wrong."""
    import mxnet as mx

    x = mx.nd.full((n,), rank.rank + 1)
    x.wait_to_read()
    rank.barrier()
    start = time.perf_counter()
    total = rank.allreduce(n, x)
    total.wait_to_read()
    seconds = time.perf_counter() - start
    want = rank.size * (rank.size + 1) // 2
    return {"seconds": seconds, "wrong": int((total.asnumpy() != want).sum())}


def trained(rank: Any, steps: int) -> dict:
    """Seconds that so many steps take this rank."""
    rank.barrier()
    start = time.perf_counter()
    rank.training.run(steps)
    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    # Last on the path, not first: what this file lies beside must not hide others of its names.
    sys.path[:] = [*sys.path[1:], str(PACKAGE.parent)]
    main(json.loads(sys.argv[1]))
