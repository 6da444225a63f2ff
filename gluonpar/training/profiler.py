"""A profile of some training steps: how long each operator takes on each device."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import tempfile
import time
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np

from gluonpar.runtime import devices

WARM_UP = 5  # steps before the window: the first steps allocate, trace and start threads
NUM_STEPS = 20  # in the window: enough for a mean
_LONGEST_NAME = 40  # the name of a traced segment is the names of its operators, joined


class Profiler:
    """Records steps ``warm_up + 1`` to ``warm_up + num_steps`` of a loop over the devices ``ctx``.

    Call :meth:`step` at the end of each step. The window of these steps, which may end earlier with
    the ``with`` block, begins and ends by waiting for all devices. Outside it nothing is recorded
    and nothing costs time.

    MXNet has one profiler per process: nothing else may use it in the window, and its settings are
    not restored. It does not record which threads wait for a processor: an operator that does so
    counts as running. Raises ValueError for more CPU contexts than processors + 2.
    """

    def __init__(
        self,
        ctx: mx.Context | Sequence[mx.Context],
        warm_up: int = WARM_UP,
        num_steps: int = NUM_STEPS,
    ) -> None:
        self.ctx, self.warm_up, self.num_steps = devices.as_list(ctx), warm_up, num_steps
        processors = len(os.sched_getaffinity(0))  # as MXNet counts them
        for context in self.ctx:
            if context.device_type == "cpu" and context.device_id >= processors + 2:
                raise ValueError(
                    f"{context} cannot be profiled: MXNet can profile at most {processors + 2} CPU "
                    "contexts on this machine; use fewer"
                )
        # A context's number in MXNet's profile, where the GPUs come after the processors.
        numbers = [c.device_id + processors * (c.device_type == "gpu") for c in self.ctx]
        self._devices = {number: i for i, number in enumerate(numbers)}
        self._num_taken = -1  # 0 once the block has begun
        self._window, self._seconds = contextlib.ExitStack(), 0.0
        self._operators: dict[str, np.ndarray] = {}  # microseconds on each device in the window

    def __enter__(self) -> Profiler:
        self.step()
        return self

    def __exit__(self, *_: Any) -> None:
        self._window.close()

    def step(self) -> None:
        """End a step of the loop; the devices may still be computing it."""
        self._num_taken += 1
        if self._num_taken == self.warm_up:
            self._window.enter_context(self._recorded())
        elif self._num_taken == self.warm_up + self.num_steps:
            self._window.close()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Add up the times of the operators that begin in the block."""
        # With aggregate_stats MXNet would run one operator at a time.
        omit = ["profile_memory", "profile_api", "continuous_dump", "aggregate_stats"]
        record = {"profile_symbolic": True, "profile_imperative": True}
        with tempfile.TemporaryDirectory(prefix="gluonpar-") as folder:
            path = pathlib.Path(folder) / "profile.json"
            mx.nd.waitall()
            mx.profiler.set_config(filename=str(path), **record, **dict.fromkeys(omit, False))
            mx.profiler.set_state("run")
            begin = time.time_ns() / 1000  # microseconds of MXNet's profiler's clock
            try:
                yield
                mx.nd.waitall()
            finally:
                end = time.time_ns() / 1000
                mx.profiler.set_state("stop")
                mx.profiler.dump()
            # All but a process's first file begin with a comma that JSON does not allow.
            content = re.sub(r"\[\s*,", "[", path.read_text(), count=1)
        self._seconds = (end - begin) / 1e6
        events = json.loads(content)["traceEvents"]
        for first, last in zip(events, events[1:]):  # an operator's two events are neighbours
            device = self._devices.get(first["pid"])
            if first["ph"] == "B" and device is not None and begin <= first["ts"] <= end:
                times = self._operators.setdefault(first["name"], np.zeros(len(self.ctx)))
                times[device] += min(last["ts"], end) - first["ts"]

    @property
    def steps(self) -> tuple[int, int]:
        """Numbers of the first and the last step in the window, counted from 1."""
        return self.warm_up + 1, min(self._num_taken, self.warm_up + self.num_steps)

    def table(self) -> str:
        """Return a table of milliseconds per step by operator and device, and their total.

        The first line has the time of a step: in the rest of it, a device waits for another one or
        for Python. Raises ValueError if no step was recorded.
        """
        first, last = self.steps
        num_steps = last - self.warm_up
        if not self._seconds or num_steps <= 0:
            raise ValueError(
                f"no step was profiled: the loop has taken {self._num_taken} steps and the first "
                f"{self.warm_up} are for warming up; give a smaller warm_up or a longer loop"
            )
        rows = sorted(self._operators.items(), key=lambda item: -item[1].sum())
        rows.append(("total", sum(self._operators.values(), np.zeros(len(self.ctx)))))
        lines = [f"steps {first} to {last}, {1e3 * self._seconds / num_steps:.1f} ms per step"]
        lines.append("ms per step".ljust(_LONGEST_NAME) + "".join(f"{c!s:>10}" for c in self.ctx))
        for name, times in rows:
            short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
            cells = "".join(f"{each:10.2f}" for each in times / num_steps / 1e3)
            lines.append(short.ljust(_LONGEST_NAME) + cells)
        return "\n".join(lines)
