"""One Python thread per context, kept for the life of the process.

MXNet gives each thread that pushes operators its own workspaces (``runtime/heap.py``) and its own
random generators, which all CPU contexts share. So an operator that is pushed from its device's
thread waits for another device's operator only to read an array that it writes.

``mx.random.seed`` seeds the generators of the calling thread. Functions of MXNet's C interface are
replaced here, so that it seeds all devices' threads, too, and each rank of a job differently. MXNet
starts a GPU's generators from the 32-bit number ``127 * seed + device_id``, and those of all CPU
contexts from ``127 * seed``. Each has 1,024 parts, which start from this and the following numbers.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import os
import queue
import threading
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB

from gluonpar.runtime import heap, tape

_CPU_STRIDE = 1 << 20  # between the seeds of CPU contexts, so that no two parts start alike
_GPU_STRIDE = pow(127, -1, 1 << 32)  # 127 times this is 1 in 32 bits: the next GPU's number

_threads: dict[mx.Context, _DeviceThread] = {}
_this = threading.local()  # .ctx: the context of a device's thread
# By context, or for "all": the number of the call that set the seed, and the seed.
_seeds: dict[Any, tuple[int, int]] = {"all": (0, 0)}
_seed_all, _seed_context = _LIB.MXRandomSeed, _LIB.MXRandomSeedContext


def _numbers() -> tuple[int, int]:  # of number_from()
    return 0, 0


def current() -> mx.Context | None:
    """Return the context whose thread calls this, or None."""
    return getattr(_this, "ctx", None)


def call(ctx: mx.Context, function: Callable, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, called on the thread of ``ctx``; waits for it.

    Inside, ``ctx`` is the current context, and autograd's and NumPy's modes are the caller's. An
    exception of the function is raised here.
    """
    if current() == ctx:
        with mx.Context(ctx):
            return function(*arguments)
    if ctx not in _threads:
        _threads[ctx] = _DeviceThread(ctx)
    # MXNet has these settings per thread.
    np_shape, np_array = mx.util.is_np_shape(), mx.util.is_np_array()
    recording, training = autograd.is_recording(), autograd.is_training()
    program, mode = tape.this_thread.program, autograd.record if recording else autograd.pause

    def in_scope_of_caller() -> Any:
        tape.this_thread.program = program
        with mode(training), mx.util.np_shape(np_shape), mx.util.np_array(np_array):
            return function(*arguments)

    future: concurrent.futures.Future = concurrent.futures.Future()
    _threads[ctx].calls.put((in_scope_of_caller, future))
    return future.result()


class _DeviceThread(threading.Thread):
    """The thread of one context; unlike an executor's, the process may end while it works."""

    def __init__(self, ctx: mx.Context) -> None:
        super().__init__(name=f"gluonpar {ctx}", daemon=True)
        self._ctx, self._seeded = ctx, -1  # the number of the call whose seed it has
        self.calls: queue.SimpleQueue[tuple[Callable, concurrent.futures.Future]]
        self.calls = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Make the calls of :func:`call`."""
        _this.ctx = self._ctx
        heap.widen()
        while True:
            function, future = self.calls.get()
            try:
                self._seed()
                with mx.Context(self._ctx):  # a copy, as one that is entered again cannot be left
                    future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future  # the arrays of a task may be large

    def _seed(self) -> None:
        """Seed this thread's generators, if a seed was set since the last time."""
        (call, seed), of_context = _seeds["all"], _seeds.get(self._ctx, (-1, 0))
        if max(call, of_context[0]) <= self._seeded:
            return
        self._seeded = max(call, of_context[0])
        if call < of_context[0]:
            _seed_context(of_context[1], self._ctx.device_typeid, self._ctx.device_id)
        else:
            _seed_apart(seed, self._ctx)


def _seed_apart(seed: int, ctx: mx.Context | None = None) -> int:
    """Seed this thread's generators; ``ctx`` is its device, or None. Returns 0 on success."""
    first, before = _numbers()
    cpu = before + ctx.device_id if ctx and ctx.device_type == "cpu" else first
    failed = _seed_all(ctypes.c_int(seed + before * _GPU_STRIDE))
    return failed or (_seed_context(ctypes.c_int(seed + cpu * _CPU_STRIDE), 1, 0) if cpu else 0)


def seed_this(seed: int) -> None:
    """Seed the generators of the calling thread, and no others."""
    _seed_all(ctypes.c_int(seed))


def number_from(numbers: Callable[[], tuple[int, int]]) -> None:
    """Seed the devices by their numbers among all ranks' devices, now and at each ``seed(value)``.

    ``numbers()`` returns the number of this rank's first device, and the difference between a
    device's number and its ``device_id``. A context with a seed of its own keeps that.
    """
    global _numbers
    _numbers = numbers
    last = max(_seeds.values())[0] + 1
    _seeds.update((where, (last + call, value)) for where, (call, value) in [*_seeds.items()])
    _seed_apart(_seeds["all"][1])
    # cuDNN's dropout takes its seed from C's rand() when a thread first uses it on a GPU.
    ctypes.CDLL(None).srand(1 + numbers()[0])  # 1 is C's own


def _seed_threads(seed: Callable) -> Callable:
    """Return a function that does as MXNet's ``seed``, and seeds the devices' threads, too."""

    @functools.wraps(seed)
    def seeded(value: ctypes.c_int, *context: int) -> int:
        if current() is None:
            where = mx.Context(mx.Context.devtype2str[context[0]], context[1]) if context else "all"
            _seeds[where] = (max(_seeds.values())[0] + 1, value.value)
            if not context:
                return _seed_apart(value.value)
        return seed(value, *context)

    return seeded


_LIB.MXRandomSeed, _LIB.MXRandomSeedContext = map(_seed_threads, (_seed_all, _seed_context))


def _after_fork() -> None:
    """Forget the devices' threads, which do not survive a fork."""
    _threads.clear()
    vars(_this).clear()


os.register_at_fork(after_in_child=_after_fork)
