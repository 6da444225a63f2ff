"""The parts of a report that use devices, each in a process of its own, which tells the figures.

    python -m gluonpar.diagnostics.report.parts '{"part": "steps", "devices": [["gpu", 0]], ...}'

A candidate that fails may end the process, or hang: "candidate" is told before one is first used,
then about once per second, and if an exception is raised.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import time
from typing import Callable, Sequence

import mxnet as mx

from gluonpar import collectives
from gluonpar.collectives import probing
from gluonpar.diagnostics import self_test
from gluonpar.diagnostics.benchmark import allreduce, harness, steps
from gluonpar.diagnostics.benchmark.harness import Candidate
from gluonpar.diagnostics.child_process import perform, tell
from gluonpar.install import cuda_libraries, driver
from gluonpar.runtime import peers, threads

COPY_BYTES = 64 << 20
ALLREDUCE_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUNDS, WARMUP = 20, 2
SILENCE_SECONDS = 1.0

_told: dict[str, float] = {}  # when each candidate was told; the last is the one whose turn it is


def devices(ctx: Sequence[mx.Context]) -> None:
    """Tell the CUDA libraries' versions, the GPUs among ``ctx``, and the pairs with peer access."""
    for library in cuda_libraries.versions().items():
        tell({"libraries": library})
    ids = [context.device_id for context in ctx if context.device_type == "gpu"]
    if ids:
        tell({"libraries": ("CUDA of the driver", driver.version(driver.cuda_version()))})
    if driver.release():
        tell({"libraries": ("driver", driver.release())})
    for gpu in driver.gpus() if ids else ():
        if gpu.index in ids:
            _, num_bytes = mx.context.gpu_memory_info(gpu.index)
            tell({"gpus": {**gpu._asdict(), "memory_bytes": num_bytes}})
    for pair in sorted(peers.enable(ctx)):
        tell({"peers": pair})


def check(ctx: Sequence[mx.Context]) -> None:
    """Tell the lines of the self test, and its failures."""
    for failure in self_test.run(ctx, lambda line: tell({"lines": line})):
        tell({"failures": failure})


def copy(ctx: Sequence[mx.Context], deadline: float, without: Sequence[str]) -> None:
    """Tell the times of copies between each two devices, one at a time, and GB/s (1e9 bytes)."""
    messages = probing.Messages(ctx, COPY_BYTES)
    pairs = [*itertools.permutations(range(len(ctx)), 2)]
    seconds: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    rounds = harness.until(deadline, lambda: tell({}))
    for pair, counts in harness.turns(pairs, ROUNDS, 1, rounds):
        sample = messages.one(*pair)
        if counts:
            seconds[pair].append(sample)
    for (src, dst), values in seconds.items():
        samples = harness.Samples(tuple(values))
        row = {"src": src, "dst": dst, "num_bytes": COPY_BYTES}
        tell({"rows": {**row, "algbw": COPY_BYTES / samples.median / 1e9, **samples.as_dict()}})


def reduce(ctx: Sequence[mx.Context], deadline: float, without: Sequence[str]) -> None:
    """Tell, size by size, which all-reduce is chosen, and the times of all."""
    setting = allreduce.Setting(ctx, rounds=ROUNDS, warmup=WARMUP)
    threads.share(ctx)
    makers = allreduce.makers(ctx, collectives.usable(ctx))
    makers.pop(allreduce.FLOOR, None)
    found = {n: functools.partial(_announced, n, makers[n]) for n in makers if n not in without}
    for num_bytes, end in harness.shares(ALLREDUCE_BYTES if found else (), deadline):
        size = num_bytes // 4
        choice = collectives.explain(setting.zeros(size))
        tell({"choices": {"num_bytes": num_bytes, **choice._asdict()}})
        for result in allreduce.measure_size(found, setting, size, harness.until(end)):
            tell({"rows": result.as_dict()})


def step(
    ctx: Sequence[mx.Context],
    deadline: float,
    without: Sequence[str],
    workload: str,
    batch_size: int | None,
) -> None:
    """Tell the times of a workload's step."""
    names = [name for name in steps.candidates(ctx) if name not in without]
    samples = batch_size or steps.BATCH_SIZES[workload]
    how = (ROUNDS, harness.until(deadline), _announce)
    for times in steps.measure(workload, ctx, names, samples, *how) if names else ():
        tell({"rows": times.as_dict()})


def _announced(
    name: str, maker: allreduce.Maker, arrays: Sequence[mx.nd.NDArray], op: str
) -> Candidate:
    _announce(name)
    candidate = maker(arrays, op)

    def prepare() -> None:
        _announce(name)
        candidate.prepare()

    return dataclasses.replace(candidate, prepare=prepare)


def _announce(name: str) -> None:
    """Tell whose turn it is, but not each time: a message before each sample would cost time."""
    now, last = time.monotonic(), max(_told.values(), default=0.0)
    told = _told.pop(name, None)
    if told is None or now - last > SILENCE_SECONDS:
        tell({"candidate": name})
        told = now
    _told[name] = told  # at the end


PARTS: dict[str, Callable] = {
    "devices": devices,
    "self test": check,
    "copies": copy,
    "all-reduce": reduce,
    "steps": step,
}


def main(argument: str) -> None:
    """Do one part, whose name and arguments are the fields of a JSON object."""
    given = json.loads(argument)
    part = PARTS[given.pop("part")]
    ctx = [mx.Context(kind, i) for kind, i in given.pop("devices")]

    def work() -> None:
        try:
            part(ctx, **given)
        except Exception:
            if _told:
                tell({"candidate": list(_told)[-1]})
            raise

    perform(work)


if __name__ == "__main__":
    main(sys.argv[1])
