"""One Python thread per context, kept for the life of the process.

MXNet gives each thread that pushes operators workspaces (:mod:`gluonpar.runtime.heap`) and random
generators of its own, which all CPU contexts share. So an operator that is pushed from its device's
thread waits for another device's operator only to read an array that it writes.

``mx.random.seed`` seeds the generators of the calling thread. Functions of MXNet's C interface are
replaced here, so that it also seeds all devices' threads, and each rank of a job differently. MXNet
starts a GPU's generators from the 32-bit number ``127 * seed + device_id``, and the generators of
all CPU contexts from ``127 * seed``. Each generator has 1,024 parts, which start from this number
and the following ones.
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

from gluonpar.runtime import heap, tape, threads

_CPU_STRIDE = 1 << 20  # between the seeds of CPU contexts, so that no two parts start alike
_GPU_STRIDE = pow(127, -1, 1 << 32)  # 127 times this is 1 in 32 bits: the next GPU's number

_threads: dict[mx.Context, queue.SimpleQueue] = {}  # what each device's thread is to call
_this = threading.local()  # in a device's thread .ctx, and .seed, which it has used
# The last seed for all contexts, and the seeds that single contexts were given since. A seed is a
# list of one number; each call makes a new list, by which a thread knows that it must seed again.
_seeds: dict[Any, list[int]] = {"all": [0]}
_seed_all, _seed_context = _LIB.MXRandomSeed, _LIB.MXRandomSeedContext
_numbers: Callable[[], tuple[int, int]] | None = None  # see number_from()


def current() -> mx.Context | None:
    """Return the context whose thread calls this, or None."""
    return getattr(_this, "ctx", None)


def call(ctx: mx.Context, function: Callable, *arguments: Any) -> Any:
    """Call ``function(*arguments)`` on the thread of ``ctx``, and return or raise what it does.

    Inside, ``ctx`` is the current context, and autograd's and NumPy's modes are the caller's.
    """
    if current() == ctx:
        with mx.Context(ctx):
            return function(*arguments)
    if ctx not in _threads:
        _threads[ctx] = threads.serve(1, f"gluonpar {ctx}")
    np_shape, np_array = mx.util.is_np_shape(), mx.util.is_np_array()  # MXNet has them per thread
    recording, training = autograd.is_recording(), autograd.is_training()
    program, mode = tape.this_thread.program, autograd.record if recording else autograd.pause
    future: concurrent.futures.Future = concurrent.futures.Future()

    def on_thread() -> None:
        try:
            _this.ctx, tape.this_thread.program = ctx, program
            heap.widen()
            heap.follow_step()
            _seed()
            # The context is a new object, because one that is entered twice cannot be left.
            with mx.Context(ctx), mode(training), mx.util.np_shape(np_shape):
                with mx.util.np_array(np_array):
                    future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    _threads[ctx].put(on_thread)
    return future.result()


def _seed() -> None:
    """Seed this device's generators, if a seed was set since the last time."""
    ctx, seeds = _this.ctx, _seeds  # which another thread may replace
    seed = seeds.get(ctx, seeds["all"])
    if seed is getattr(_this, "seed", None):
        return
    _this.seed = seed
    if ctx in seeds:
        _seed_context(seed[0], ctx.device_typeid, ctx.device_id)
    else:
        _seed_apart(seed[0], ctx)


def _seed_apart(seed: int, ctx: mx.Context | None = None) -> int:
    """Seed this thread's generators as those of the device ``ctx``. Return 0 on success."""
    first, before = _numbers() if _numbers else (0, 0)
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
    global _numbers, _seeds
    _numbers, _seeds = numbers, {where: [*seed] for where, seed in _seeds.items()}
    _seed_apart(_seeds["all"][0])
    # cuDNN's dropout takes its seed from C's rand() when a thread first uses it on a GPU.
    ctypes.CDLL(None).srand(1 + numbers()[0])  # C's own seed is 1


def _seed_threads(seed: Callable) -> Callable:
    """Return a function that does what MXNet's ``seed`` does, and seeds the devices' threads."""

    @functools.wraps(seed)
    def seeded(value: ctypes.c_int, *context: int) -> int:
        global _seeds
        if current() is None and context:
            _seeds[mx.Context(mx.Context.devtype2str[context[0]], context[1])] = [value.value]
        elif current() is None:
            _seeds = {"all": [value.value]}
            return _seed_apart(value.value)
        return seed(value, *context)

    return seeded


_LIB.MXRandomSeed, _LIB.MXRandomSeedContext = map(_seed_threads, (_seed_all, _seed_context))


def _after_fork() -> None:
    """Forget the devices' threads, which do not survive a fork."""
    _threads.clear()
    vars(_this).clear()


os.register_at_fork(after_in_child=_after_fork)
