"""One Python thread per context, kept for the life of the process.

MXNet gives each thread that pushes operators its own workspaces (``runtime/heap.py``) and its
own random generators, shared by all CPU contexts. So an operator that is pushed from its device's
thread waits for an operator of another device only if it reads an array which that one writes.

``mx.random.seed`` seeds the generators of the thread that calls it. Here it seeds all devices'
threads, too, and each rank of a job differently: functions of MXNet's C interface are replaced by
functions that call them. MXNet starts a GPU's generators from the 32-bit number ``127 * seed +
device_id``, and the generators of all CPU contexts from ``127 * seed``. Each has 1,024 parts, which
start from that number and the following ones.
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
_GPU_STRIDE = pow(127, -1, 1 << 32)  # 127 times this is 1, the distance to the next GPU's start

_threads: dict[mx.Context, _DeviceThread] = {}
_this = threading.local()  # .ctx: the context of a device's thread
# By context, or for "all": which call it was, and the seed.
_seeds: dict[Any, tuple[int, int]] = {"all": (0, 0)}
_seed_all, _seed_context = _LIB.MXRandomSeed, _LIB.MXRandomSeedContext


def _numbers() -> tuple[int, int]:  # of number_from()
    return 0, 0


def current() -> mx.Context | None:
    """Return the context whose thread calls this, if any."""
    return getattr(_this, "ctx", None)


def num_backwards(ctx: mx.Context) -> int:
    """Return how often the thread of ``ctx`` has called ``backward``."""
    return tape.num_passes[_threads[ctx].ident] if ctx in _threads else 0


def call(ctx: mx.Context, function: Callable, *arguments: Any) -> Any:
    """Call ``function(*arguments)`` on the thread of ``ctx`` and return its result; waits for it.

    Inside, ``ctx`` is the current context, and autograd's and NumPy's modes are the caller's. An
    exception is raised here. On the thread of ``ctx`` itself the function is simply called.
    """
    if current() == ctx:
        with mx.Context(ctx):
            return function(*arguments)
    if ctx not in _threads:
        _threads[ctx] = _DeviceThread(ctx)
    return _threads[ctx].call(_in_scope_of_caller(functools.partial(function, *arguments)))


def _in_scope_of_caller(function: Callable) -> Callable:
    """Return ``function`` with this thread's settings, which MXNet keeps per thread."""
    np_shape, np_array = mx.util.is_np_shape(), mx.util.is_np_array()
    recording, training = autograd.is_recording(), autograd.is_training()
    program, mode = tape.this_thread.program, autograd.record if recording else autograd.pause

    def scoped() -> Any:
        tape.this_thread.program = program
        with mode(training), mx.util.np_shape(np_shape), mx.util.np_array(np_array):
            return function()

    return scoped


class _DeviceThread:
    """The thread of one context. Unlike an executor's, it does not keep the process from ending."""

    def __init__(self, ctx: mx.Context) -> None:
        self._ctx, self._seeded = ctx, -1  # the latest seeding that has been done
        self._calls: queue.SimpleQueue[tuple[Callable, concurrent.futures.Future]]
        self._calls = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name=f"gluonpar {ctx}", daemon=True)
        thread.start()
        self.ident = thread.ident

    def call(self, function: Callable) -> Any:
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._calls.put((function, future))
        return future.result()

    def _run(self) -> None:
        _this.ctx = self._ctx
        heap.widen()
        while True:
            function, future = self._calls.get()
            try:
                self._seed()
                with mx.Context(self._ctx):  # a copy: entered twice, one does not restore the outer
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
    """Seed this thread's generators; ``ctx`` is its device, if any. Returns 0 on success."""
    first, before = _numbers()
    cpu = before + ctx.device_id if ctx and ctx.device_type == "cpu" else first
    failed = _seed_all(ctypes.c_int(seed + before * _GPU_STRIDE))
    return failed or (_seed_context(ctypes.c_int(seed + cpu * _CPU_STRIDE), 1, 0) if cpu else 0)


def number_from(numbers: Callable[[], tuple[int, int]]) -> None:
    """Seed the devices by their numbers among all ranks' devices, now and at each seed of all.

    ``numbers()`` returns the first device's number, and what to add to a context's ``device_id`` to
    get its own. A context that was given its own seed keeps that.
    """
    global _numbers
    _numbers = numbers
    last = max(_seeds.values())[0] + 1
    _seeds.update((where, (last + call, value)) for where, (call, value) in [*_seeds.items()])
    _seed_apart(_seeds["all"][1])
    # cuDNN's dropout takes its seed from C's rand() when a thread first uses it on a GPU.
    ctypes.CDLL(None).srand(1 + numbers()[0])  # 1 is C's own


def _seed_threads(seed: Callable) -> Callable:
    """Return MXNet's function ``seed``, but seeding the devices' threads, too."""

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
