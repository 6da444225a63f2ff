"""Profiler: some steps of a training loop, watched by MXNet's own profiler."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import tempfile
import threading
import time
from typing import Any, Iterable, Iterator, Sequence

import mxnet as mx

from gluonpar.checkpoint import files
from gluonpar.runtime import memory, threads
from gluonpar.runtime.devices import as_list
from gluonpar.training.profiler import operators
from gluonpar.training.profiler.operators import DATA, EXCHANGE, UPDATE, Span
from gluonpar.training.profiler.timeline import Timeline

WARM_UP = 5  # steps before the window: the first ones allocate, trace and start threads
NUM_STEPS = 20  # in the window: enough for a mean, few enough for a trace that can be looked at


class Profiler:
    """Watches steps ``warm_up + 1`` to ``warm_up + num_steps`` of a loop over the devices ``ctx``.

    :meth:`step` ends a step. The window closes by itself, at its last step or with the ``with``
    block, also if that raises; before and after it nothing is watched and nothing costs time. Then
    :meth:`table` and :meth:`sentence` say where the time went, and :meth:`save` writes it down.
    ``num_bytes`` are the bytes of one device's gradients: with them the table has the bytes that
    are exchanged and updated, K times as many.

    It waits for all devices where the window begins and where it ends, so both ends are idle for a
    moment. Results stay the same, bit for bit. Seen are MXNet's operators on every device, and what
    Python's thread does to the data: :meth:`loading` a batch, and ``memory.from_numpy``, by which
    ``split_and_load`` copies NumPy arrays (for the window, that function is replaced by one that
    takes the time). Not seen are the rest of Python's work, and which threads wait for a processor.

    MXNet has one profiler a process: nothing else may use it in the window, and its settings are
    not put back. It has no room for more CPU contexts than processors + 2. ``num_steps=0`` watches
    nothing. Raises ValueError for devices that there is no room for, and negative numbers of steps.

    >>> import mxnet as mx
    >>> ctx = [mx.cpu(0), mx.cpu(1)]
    >>> with Profiler(ctx, warm_up=1, num_steps=2) as profiled:
    ...     for batch in profiled.loading(range(4)):
    ...         arrays = [mx.nd.full((2,), batch, ctx=c) for c in ctx]
    ...         profiled.step()
    >>> profiled.steps
    (2, 3)
    """

    def __init__(
        self,
        ctx: mx.Context | Sequence[mx.Context],
        num_bytes: int = 0,
        warm_up: int = WARM_UP,
        num_steps: int = NUM_STEPS,
    ) -> None:
        if min(warm_up, num_steps) < 0:
            raise ValueError(f"warm_up={warm_up}, num_steps={num_steps}; give 0 or more steps")
        self.ctx, self.warm_up, self.num_steps = as_list(ctx), warm_up, num_steps
        self._devices = check(self.ctx) if num_steps else {}
        k = len(self.ctx)
        self._num_bytes = {EXCHANGE: k * num_bytes if k > 1 else 0, UPDATE: k * num_bytes}
        self._python: list[Span] = []
        self._copied = 0
        self._ends: list[float] = []  # of the steps in the window, and before them its begin
        self._text, self._end = "", 0.0
        self._steps = 0
        self._window: contextlib.ExitStack | None = None

    def __enter__(self) -> Profiler:
        if self.warm_up == 0 and self.num_steps:
            self._open()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._window is not None:
            self._close(wait=kind is None)

    def step(self) -> None:
        """Say that Python has come to the end of a step; the devices may still be at it."""
        self._steps += 1
        if self._window is not None:
            self._ends.append(_now())
            if len(self._ends) > self.num_steps:
                self._close()
        elif self._steps == self.warm_up and self.num_steps:
            self._open()

    def loading(self, batches: Iterable) -> Iterator:
        """Yield ``batches``; the time that each takes to come counts as data."""
        batches, nothing = iter(batches), object()
        while True:
            with self._watched("batch"):
                batch = next(batches, nothing)
            if batch is nothing:
                return
            yield batch

    @property
    def steps(self) -> tuple[int, int]:
        """Numbers of the first and the last step in the window, counted from 1."""
        return self.warm_up + 1, self.warm_up + len(self._ends) - 1

    @functools.cached_property
    def timeline(self) -> Timeline:
        """What was seen. Raises ValueError if the loop ended before a step of the window had."""
        if self._window is not None or len(self._ends) < 2:
            raise ValueError(
                f"no step was profiled: the loop has taken {self._steps} and the first "
                f"{self.warm_up} are for warming up; give a smaller warm_up or a longer loop"
            )
        window, num_steps = (self._ends[0], self._end), len(self._ends) - 1
        found = operators.read(self._text, self._devices, *window)
        spans = [*operators.classify(found, len(self.ctx)), *self._python]
        num_bytes = {DATA: self._copied / num_steps, **self._num_bytes}
        names, on_cpu = [str(c) for c in self.ctx], self.ctx[0].device_type == "cpu"
        processors = threads.cores() if on_cpu else None
        return Timeline(names, window, num_steps, spans, num_bytes, processors)

    def table(self) -> str:
        """Milliseconds a step of every part on every device, bytes, and the overlap in percent.

        Raises ValueError if no step of the window was taken; so do :meth:`sentence`, :meth:`save`.
        """
        return self.timeline.table()

    def sentence(self) -> str:
        """Why the devices are not as many times as fast as there are of them."""
        return self.timeline.sentence()

    def save(self, path: str | os.PathLike) -> None:
        """Write the window as JSON that ui.perfetto.dev and chrome://tracing show.

        A row for each device, for Python's thread with its steps, and for the exchange. Written
        under a temporary name and renamed, so that ``path`` never holds half a file. Raises OSError
        where the disk refuses.
        """
        content = {"traceEvents": self.timeline.trace(self._marks()), "displayTimeUnit": "ms"}
        with files.atomic_write(pathlib.Path(path)) as file:
            file.write(json.dumps(content).encode())

    def _marks(self) -> list[Span]:
        """The steps, as Python went through them."""
        first, thread = self.steps[0], threading.main_thread().ident
        ends = zip(self._ends, self._ends[1:])
        return [
            Span(f"step {i}", None, thread, *both, "step") for i, both in enumerate(ends, first)
        ]

    def _open(self) -> None:
        mx.nd.waitall()
        with contextlib.ExitStack() as undo:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="gluonpar-"))
            path = pathlib.Path(folder) / "profile.json"
            _start(path)
            undo.callback(self._stop, path)
            undo.callback(setattr, memory, "from_numpy", memory.from_numpy)
            memory.from_numpy = self._timed(memory.from_numpy)
            self._ends.append(_now())
            self._window = undo.pop_all()

    def _close(self, wait: bool = True) -> None:
        window, self._window = self._window, None
        with window:
            try:
                if wait:
                    mx.nd.waitall()
            finally:
                self._end = _now()

    def _stop(self, path: pathlib.Path) -> None:
        self._text = _stop(path)

    def _timed(self, from_numpy):
        @functools.wraps(from_numpy)
        def timed(values: Any, ctx: mx.Context) -> mx.nd.NDArray:
            with self._watched(f"copy to {ctx}"):
                array = from_numpy(values, ctx)
            self._copied += values.nbytes
            return array

        return timed

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        start = _now()
        yield
        if self._window is not None:
            self._python.append(Span(name, None, threading.get_ident(), start, _now(), DATA))


def check(ctx: Sequence[mx.Context]) -> dict[int, int]:
    """Number of the device of each process of a profile. ValueError if there is no room for one.

    MXNet's profiler numbers its devices: the CPU contexts, the GPUs, and two kinds of shared
    memory. A CPU build has no GPUs and never uses those two, so they serve as CPU contexts too.
    """
    names = _processes()
    num_cpus = sum(name.startswith("cpu/") for name in names)
    num_gpus = sum(name.startswith("gpu/") for name in names)
    room = {"cpu": num_cpus if num_gpus else len(names), "gpu": num_gpus}
    for c in ctx:
        if c.device_id >= room.get(c.device_type, 0):
            raise ValueError(
                f"{c} cannot be profiled: on this machine MXNet's profiler has room for "
                f"{room['cpu']} CPU contexts and {room['gpu']} GPUs; profile with fewer devices"
            )
    first = {"cpu": 0, "gpu": num_cpus}
    return {first[c.device_type] + c.device_id: device for device, c in enumerate(ctx)}


@functools.lru_cache(None)
def _processes() -> list[str]:
    """What the processes of a profile are called. Only the first file of an MXNet process says so.

    If that has been written by somebody else, it is as in the CPU build: a process a processor.
    """
    with tempfile.TemporaryDirectory(prefix="gluonpar-") as folder:
        path = pathlib.Path(folder) / "profile.json"
        _start(path)
        events = operators.events(_stop(path))
    named = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    expected = [f"cpu/{i}" for i in range(threads.cores())] + ["cpu pinned/", "cpu shared/"]
    return [named[pid] for pid in range(len(named))] if 0 in named else expected


def _start(path: pathlib.Path) -> None:
    mx.profiler.set_config(
        filename=str(path),
        profile_symbolic=True,
        profile_imperative=True,
        profile_memory=False,
        profile_api=False,
        continuous_dump=False,
        aggregate_stats=False,  # else MXNet runs every operator by itself
    )
    mx.profiler.set_state("run")


def _stop(path: pathlib.Path) -> str:
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    return path.read_text()


def _now() -> float:
    """Microseconds of the system's clock, which is MXNet's profiler's."""
    return time.time_ns() / 1000
