"""Time train_batch on a machine that others use: beside busy loops, and with a quota of processors.

python -m benchmarks.training.shared_machine
python -m benchmarks.training.shared_machine --num-gpus 1 --others 0,1 --spins "as imported,0,1000"

How long libgomp's threads wait actively, before they sleep, is its GOMP_SPINCOUNT; "as imported" is
what the import of gluonpar sets, "libgomp's" its own default of 300,000, and "one thread" is
OMP_NUM_THREADS=1. Each setting has a process, and all take turns. A busy loop is a process that
does nothing but count. A quota needs root and a cgroup: "0.5" is half of one processor's time.

Exit code: 0; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np

from benchmarks.training.workloads import WORKLOADS
from gluonpar.diagnostics import harness
from gluonpar.options import Measured, option

SETTINGS = {
    "as imported": {},
    "libgomp's": {"GOMP_SPINCOUNT": "300000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
WIDTHS = (-10, 3, -12, *[12] * 9)
V1 = pathlib.Path("/sys/fs/cgroup/cpu")
CGROUP = V1 if V1.exists() else V1.parent
PERIOD = 100_000  # microseconds: Linux's default


def train(workload, num_devices):
    """Read lines with a number of steps; answer with seconds per step."""
    import gluonpar  # noqa: F401 - sets what MXNet and libgomp read when they are loaded
    from benchmarks.training import train_batch
    from benchmarks.training.workloads import task

    devices = [("cpu", i) for i in range(num_devices)]
    made = train_batch.TrainBatch(task(workload, WORKLOADS[workload].batch_size, devices))
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            made.step()
        made.wait()
        print((time.perf_counter() - start) / int(line), flush=True)


class Row(NamedTuple):
    """Median seconds per step by setting, with so many busy loops or with a quota."""

    workload: str
    num_devices: int
    others: str
    seconds: dict[str, float]

    def as_dict(self):
        """Return all fields, for JSON."""
        return self._asdict()

    def line(self):
        """Return the figures, aligned; times in ms."""
        times = [f"{1e3 * seconds:.1f}" for seconds in self.seconds.values()]
        return harness.columns((self.workload, self.num_devices, self.others, *times), WIDTHS)


@dataclasses.dataclass(frozen=True)
class Asked(Measured):
    """The options."""

    about = __doc__.partition("\n")[0]

    workload: tuple[str, ...] = option(
        ("lenet", "mlp", "resnet18"), "what to train (%(default)s)", "A,B", choices=WORKLOADS
    )
    num_gpus: tuple[int, ...] = option((1, 2), "numbers of devices (%(default)s)", "K,...", least=1)
    others: tuple[int, ...] = option(
        (0, 1, 2, 4), "busy loops beside it (%(default)s)", "N,...", least=0
    )
    quotas: tuple[float, ...] = option(
        (), "processors that it may use, such as 0.5 (all)", "P,...", least=0.01
    )
    spins: tuple[str, ...] = option(
        ("as imported", "libgomp's", "0", "1000", "10000", "100000", "one thread"),
        "settings: names, or values of GOMP_SPINCOUNT",
        "A,B",
    )
    steps: int = option(3, "steps per sample (%(default)s)", "N", least=1)
    rounds: int = option(7, "samples, in turns (%(default)s)", "N", least=1)
    warmup: int = option(1, "samples before that do not count (%(default)s)", "N", least=1)


def prepare(options):
    """Return the loads, a name and a function that gives it; ValueError if not possible."""
    loads = [(f"{n} loops" if n else "alone", lambda pids, n=n: busy(n)) for n in options.others]
    for number in options.quotas:
        if number > len(os.sched_getaffinity(0)):
            raise ValueError(f"quotas must be at most the number of processors, got {number:g}")
        if not os.access(CGROUP, os.W_OK):
            raise ValueError(f"a quota needs root, and {CGROUP} to be writable")
        loads.append((f"quota {number:g}", lambda pids, number=number: quota(pids, number)))
    return loads


def measure(loads, console, record):
    """Print a line for each workload, number of devices and load."""
    options = record.options
    times = f"ms per step, medians of {options.rounds} rounds of {options.steps} steps, in turns"
    record.header(console, {"times": times})
    console.line("\n" + harness.columns(("workload", "K", "beside", *options.spins), WIDTHS))
    for workload in options.workload:
        for k in options.num_gpus:
            children = {name: start(name, workload, k) for name in options.spins}
            try:
                for name, load in loads:
                    with load([child.pid for child in children.values()]):
                        seconds = sample(children, f"{workload}, K={k}, {name}", options)
                    record.rows.append(Row(workload, k, name, seconds))
                    console.line(record.rows[-1].line())
                    record.write()
            finally:
                for child in children.values():
                    child.kill()
                    child.communicate()
    return []


def start(name, workload, num_devices):
    """Return a process that trains with the setting ``name``."""
    mine = SETTINGS.get(name, {"GOMP_SPINCOUNT": name})
    unset = ("OMP_", "GOMP_", "KMP_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.training.shared_machine"]
    root, pipe = pathlib.Path(__file__).resolve().parents[2], subprocess.PIPE
    of_child = {"cwd": root, "env": {**environment, **mine}, "text": True}
    arguments = ["child", workload, str(num_devices)]
    return subprocess.Popen([*command, *arguments], stdin=pipe, stdout=pipe, **of_child)


def sample(children, title, options):
    """Return the median seconds per step by setting."""
    samples = {name: [] for name in children}
    bar = harness.progress_bar(title)
    for name, counts in harness.turns(list(children), options.rounds, options.warmup, bar):
        print(options.steps, file=children[name].stdin, flush=True)
        seconds = float(children[name].stdout.readline())
        if counts:
            samples[name].append(seconds)
    return {name: float(np.median(values)) for name, values in samples.items()}


@contextlib.contextmanager
def busy(number):
    """Run ``number`` processes that only count."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def quota(pids, processors):
    """Let each of the processes use so many processors."""
    folders = [CGROUP / f"gluonpar-{pid}" for pid in pids]
    try:
        for pid, folder in zip(pids, folders):
            folder.mkdir()
            share = int(processors * PERIOD)
            if CGROUP == V1:
                (folder / "cpu.cfs_quota_us").write_text(str(share))
            else:
                (folder / "cpu.max").write_text(f"{share} {PERIOD}")
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid, folder in zip(pids, folders):
            with contextlib.suppress(OSError):
                (CGROUP / "cgroup.procs").write_text(str(pid))
                folder.rmdir()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        train(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(
            harness.conduct(Asked, None, prepare, measure, "benchmarks.training.shared_machine")
        )
