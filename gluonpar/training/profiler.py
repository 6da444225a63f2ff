"""A profile of some training steps: how long each operator takes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from typing import Any, Sequence

import mxnet as mx

from gluonpar.sharding import as_list

WARM_UP = 5  # steps before the window: the first steps allocate, trace and start threads
NUM_STEPS = 20  # in the window: enough for a mean
_LONGEST_NAME = 40  # the name of a traced segment is the names of its operators, joined


class Profiler:
    """Records steps ``warm_up + 1`` to ``warm_up + num_steps`` of a loop over the devices ``ctx``.

    Call :meth:`step` at the end of each step. The window of these steps, which may end earlier with
    the ``with`` block, begins and ends by waiting for all devices. Outside it nothing is recorded
    and nothing costs time. In it MXNet does not join operators, other than those of static graphs.

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
        self.ctx, self.warm_up, self.num_steps = as_list(ctx), warm_up, num_steps
        most = len(os.sched_getaffinity(0)) + 2  # of CPU contexts, as MXNet counts processors
        for context in self.ctx:
            if context.device_type == "cpu" and context.device_id >= most:
                raise ValueError(
                    f"{context} cannot be profiled: MXNet can profile at most {most} CPU contexts "
                    "on this machine; use fewer"
                )
        self._num_taken = -1  # 0 once the block has begun
        self._folder: tempfile.TemporaryDirectory | None = None  # while recording
        self._begin = self._seconds = 0.0  # of the window
        self._times: dict[str, float] = {}  # milliseconds of all devices in the window

    def __enter__(self) -> Profiler:
        self.step()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def step(self) -> None:
        """End a step of the loop; the devices may still be computing it."""
        self._num_taken += 1
        if self._num_taken == self.warm_up:
            omit = dict.fromkeys(["profile_memory", "profile_api", "continuous_dump"], False)
            kinds = ["profile_symbolic", "profile_imperative", "aggregate_stats"]
            # MXNet deletes what has this name, and writes its list of events there.
            self._folder = tempfile.TemporaryDirectory(prefix="gluonpar-")
            name = os.path.join(self._folder.name, "profile.json")
            mx.nd.waitall()
            mx.profiler.set_config(filename=name, **dict.fromkeys(kinds, True), **omit)
            mx.profiler.set_state("run")
            self._begin = time.perf_counter()
        elif self._num_taken == self.warm_up + self.num_steps:
            self._end()

    def _end(self) -> None:
        """End the window, unless it has ended, and keep the operators' times."""
        if self._folder is None:
            return
        with self._folder:
            self._folder = None
            try:
                mx.nd.waitall()
            finally:
                self._seconds = time.perf_counter() - self._begin
                mx.profiler.set_state("stop")
                report = json.loads(mx.profiler.dumps(reset=True, format="json"))
        operators = report["Time"].get("operator", {})
        self._times = {name: times["Total"] for name, times in operators.items()}

    @property
    def steps(self) -> tuple[int, int]:
        """Numbers of the first and the last step in the window, counted from 1."""
        return self.warm_up + 1, min(self._num_taken, self.warm_up + self.num_steps)

    def table(self) -> str:
        """Return a table of milliseconds per step by operator, and their total.

        They are means over the devices. The first line has the time of a step: in the rest of it, a
        device waits for another one or for Python. Raises ValueError if no step was recorded.
        """
        first, last = self.steps
        num_steps = last - self.warm_up
        if not self._seconds or num_steps <= 0:
            raise ValueError(
                f"no step was profiled: the loop has taken {self._num_taken} steps and the first "
                f"{self.warm_up} are for warming up; give a smaller warm_up or a longer loop"
            )
        times = sorted(self._times.items(), key=lambda item: -item[1])
        times.append(("total", sum(self._times.values())))
        lines = [f"steps {first} to {last}, {1e3 * self._seconds / num_steps:.1f} ms per step"]
        lines.append("operator".ljust(_LONGEST_NAME) + f"    ms per step, mean of {self.ctx}")
        for name, milliseconds in times:
            short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
            mean = milliseconds / num_steps / len(self.ctx)
            lines.append(f"{short:<{_LONGEST_NAME}}{mean:10.2f}")
        return "\n".join(lines)
