"""A profile of some training steps: how long each part takes on each device, and why."""

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
from gluonpar.sharding import as_list
from gluonpar.training import timeline
from gluonpar.training.timeline import DATA, Span, Timeline

WARM_UP = 5  # steps before the window: the first steps allocate, trace and start threads
NUM_STEPS = 20  # in the window: enough for a mean, few enough to look at in a trace


class Profiler:
    """Records steps ``warm_up + 1`` to ``warm_up + num_steps`` of a loop over the devices ``ctx``.

    Call :meth:`step` at the end of each step. The window of these steps, which may end earlier with
    the ``with`` block, begins and ends by waiting for all devices. Outside it nothing is recorded
    and nothing costs time.

    Records MXNet's operators on every device and, of Python's work, :meth:`loading` a batch and the
    copies of NumPy arrays to devices (``memory.from_numpy``, which is replaced in the window). It
    does not record which threads wait for a processor. MXNet has one profiler per process: nothing
    else may use it in the window, and its settings are not restored. Raises ValueError for more CPU
    contexts than processors + 2.

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
        warm_up: int = WARM_UP,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self.ctx, self.warm_up, self.num_steps = as_list(ctx), warm_up, num_steps
        self._devices = device_of_process(self.ctx) if num_steps else {}
        self._python: list[Span] = []
        self._ends: list[float] = []  # the window's begin, then the ends of its steps
        self._end, self._steps = 0.0, 0
        self._window: contextlib.ExitStack | None = None

    def __enter__(self) -> Profiler:
        if self.warm_up == 0 and self.num_steps:
            self._open()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._window is not None:
            self._close(wait=kind is None)

    def step(self) -> None:
        """End a step of Python's loop; the devices may still be computing it."""
        self._steps += 1
        if self._window is not None:
            self._ends.append(_now())
            if len(self._ends) > self.num_steps:
                self._close()
        elif self._steps == self.warm_up and self.num_steps:
            self._open()

    def loading(self, batches: Iterable) -> Iterator:
        """Yield ``batches``; the time to get each of them counts as data."""
        batches, end = iter(batches), object()
        while True:
            with self._timed("batch"):
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    @property
    def steps(self) -> tuple[int, int]:
        """Numbers of the first and the last step in the window, counted from 1."""
        return self.warm_up + 1, self.warm_up + len(self._ends) - 1

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The recorded steps. Raises ValueError if the loop ended before one of them."""
        if self._window is not None or len(self._ends) < 2:
            raise ValueError(
                f"no step was profiled: the loop has taken {self._steps} steps and the first "
                f"{self.warm_up} are for warming up; give a smaller warm_up or a longer loop"
            )
        window = self._ends[0], self._end
        operators = timeline.read(self._profile[0], self._devices, *window)
        spans = [*timeline.classify(operators, len(self.ctx)), *self._python]
        processors = threads.cores() if self.ctx[0].device_type == "cpu" else None
        return Timeline([*map(str, self.ctx)], window, len(self._ends) - 1, spans, processors)

    def table(self) -> str:
        """Return milliseconds per step by part and device.

        This, :meth:`sentence` and :meth:`save` raise ValueError if no step was recorded.
        """
        return self.timeline.table()

    def sentence(self) -> str:
        """Return a sentence that explains why K devices are not K times as fast as one."""
        return self.timeline.sentence()

    def save(self, path: str | os.PathLike) -> None:
        """Write the window as JSON for ui.perfetto.dev and chrome://tracing.

        It has rows for each device, for Python's thread with its steps, and for the exchange.
        Raises OSError, with an earlier file unchanged, if it cannot be written.
        """
        thread = threading.main_thread().ident
        numbered = enumerate(zip(self._ends, self._ends[1:]), self.steps[0])
        steps = [Span(f"step {i}", None, thread, *both, "step") for i, both in numbered]
        content = {"traceEvents": self.timeline.trace_events(steps), "displayTimeUnit": "ms"}
        with files.atomic_write(path) as file:
            file.write(json.dumps(content).encode())

    def _open(self) -> None:
        from_numpy = memory.from_numpy

        def timed(values: Any, ctx: mx.Context) -> mx.nd.NDArray:
            with self._timed(f"copy to {ctx}"):
                return from_numpy(values, ctx)

        mx.nd.waitall()
        with contextlib.ExitStack() as undo:
            self._profile = undo.enter_context(_recording())
            undo.callback(setattr, memory, "from_numpy", from_numpy)
            memory.from_numpy = timed
            self._ends.append(_now())
            self._window = undo.pop_all()

    def _close(self, wait: bool = True) -> None:
        window, self._window = self._window, None
        with window:
            window.callback(lambda: setattr(self, "_end", _now()))
            if wait:
                mx.nd.waitall()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = _now()
        yield
        if self._window is not None:
            self._python.append(Span(name, None, threading.get_ident(), start, _now(), DATA))


def device_of_process(ctx: Sequence[mx.Context]) -> dict[int, int]:
    """Return the index in ``ctx`` by the number of the process that the profile has for it.

    Raises ValueError if a profile has no process for one of them.
    """
    names = _processes()
    cpus, gpus = ([i for i, name in enumerate(names) if name[:4] == k] for k in ("cpu/", "gpu/"))
    # A CPU build never uses the last two processes, pinned and shared memory, for these.
    available = {"cpu": cpus if gpus else range(len(names)), "gpu": gpus}
    for c in ctx:
        if c.device_id >= len(available.get(c.device_type, ())):
            most = f"{len(available['cpu'])} CPU contexts and {len(gpus)} GPUs on this machine"
            raise ValueError(f"{c} cannot be profiled: MXNet can profile at most {most}; use fewer")
    return {available[c.device_type][c.device_id]: index for index, c in enumerate(ctx)}


@functools.lru_cache(None)
def _processes() -> list[str]:
    """Return the names of a profile's processes, which only a process's first profile has.

    If other code has written that one, they are those of the CPU build: one per processor.
    """
    with _recording() as profile:
        pass
    events = timeline.events(profile[0])
    named = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    expected = [f"cpu/{i}" for i in range(threads.cores())] + ["cpu pinned/", "cpu shared/"]
    return [named[pid] for pid in range(len(named))] if 0 in named else expected


@contextlib.contextmanager
def _recording() -> Iterator[list[str]]:
    """Record operators in the block; after it the list has the text of MXNet's file."""
    profile: list[str] = []
    record = {"profile_symbolic": True, "profile_imperative": True}
    # With aggregate_stats MXNet would run one operator at a time.
    omit = ["profile_memory", "profile_api", "continuous_dump", "aggregate_stats"]
    with tempfile.TemporaryDirectory(prefix="gluonpar-") as folder:
        path = pathlib.Path(folder) / "profile.json"
        mx.profiler.set_config(filename=str(path), **record, **dict.fromkeys(omit, False))
        mx.profiler.set_state("run")
        try:
            yield profile
        finally:
            mx.profiler.set_state("stop")
            mx.profiler.dump()
            profile.append(path.read_text())


def _now() -> float:
    """Return microseconds of the system's clock, which MXNet's profiler uses."""
    return time.time_ns() / 1000
