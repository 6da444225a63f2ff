"""A Python function as an operator of MXNet's engine.

The engine runs the function on the worker thread of a context, after everything pushed before that
writes the arrays named, and before everything pushed later that touches them. :func:`push` returns
at once; it costs about ten microseconds. An exception in the function becomes the engine's own: it
is raised as ``MXNetError``, with the Python traceback in its message, where the caller next waits
for one of the arrays that the function was to write, or for one computed from them.

Private to MXNet 1.9.1: ``MXEnginePushAsyncND`` of its C interface (include/mxnet/c_api.h) and the
layout of ``CallbackOnComplete`` (include/mxnet/engine.h). It is the entry that Horovod's binding
uses.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import threading
import time
import traceback
import types
from typing import Callable, Iterable, Sequence

import mxnet as mx
from mxnet.base import _LIB, check_call

from gluonpar.runtime import memory

_ERROR_BYTES = 64  # more than a std::runtime_error, which is two pointers


class _Context(ctypes.Structure):
    """``mxnet::Context``."""

    _fields_ = [("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int32)]


_PRIORITIZED, _ASYNC = ctypes.c_int(3), ctypes.c_int(4)  # FnProperty::kCPUPrioritized, kAsync
_FINISH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class _OnComplete(ctypes.Structure):
    """``mxnet::engine::CallbackOnComplete``: called as ``finish(engine, param, error or NULL)``."""

    _fields_ = [("finish", _FINISH), ("engine", ctypes.c_void_p), ("param", ctypes.c_void_p)]


_cxx = ctypes.CDLL("libstdc++.so.6")
_new_error = _cxx["_ZNSt13runtime_errorC1EPKc"]  # std::runtime_error::runtime_error(const char*)
_new_error.argtypes, _new_error.restype = [ctypes.c_void_p, ctypes.c_char_p], None
_delete_error = _cxx["_ZNSt13runtime_errorD1Ev"]
_delete_error.argtypes, _delete_error.restype = [ctypes.c_void_p], None

# The C++ guard of the engine's pool of operators: its first byte turns 1 with the first one pushed.
_POOL_GUARD = "_ZGVZN5mxnet6common10ObjectPoolINS_6engine11ThreadedOprEE13_GetSharedRefEvE8inst_ptr"

_pending: dict[int, Callable[[], None]] = {}  # what the engine has not run yet, by ticket
_unheard = False  # whether an error was printed that the program has not heard of
_afterwards: list[Callable[[], None]] = []
_tickets = itertools.count(1)
_pushing = threading.local()  # the ticket being pushed by this thread, and its error if run at once


def _called(_context, on_complete, ticket):
    """What the engine calls, on a worker thread. It must call ``finish`` once, whatever happens."""
    done = on_complete.contents
    finish, engine, param = done.finish, done.engine, done.param  # *on_complete dies with finish()
    try:
        _pending.pop(ticket)()
    except BaseException as exception:  # KeyboardInterrupt too: nobody above could catch it
        if getattr(_pushing, "ticket", None) == ticket:
            _pushing.error = exception
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        _new_error(error, traceback.format_exc().encode())
        finish(engine, param, ctypes.addressof(error))  # the engine copies it
        _delete_error(error)
    else:
        finish(engine, param, None)


_run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_OnComplete), ctypes.c_void_p)(
    _called
)


def has_started() -> bool:
    """Whether MXNet's engine has been given any operator in this process."""
    return bool(ctypes.c_uint8.in_dll(_LIB, _POOL_GUARD).value)


def push(
    function: Callable[[], None],
    ctx: mx.Context,
    reads: Sequence[mx.nd.NDArray] = (),
    writes: Sequence[mx.nd.NDArray] = (),
    name: str = "gluonpar",
    priority: int = 0,
    at_once: bool = False,
    beside: bool = False,
) -> None:
    """Have the engine run ``function()`` on ``ctx``'s worker, ordered by the arrays it touches.

    ``function`` must not wait for an MXNet array or operator: it would hold the worker that they
    need. ``reads`` and ``writes`` are arrays on any context, and views of arrays; each may be there
    more than once. ``name`` is what MXNet's profiler shows. With ``at_once`` the engine may run the
    function on the calling thread, inside this call, if nothing need be waited for: right for what
    takes less time than waking a worker (about 0.1 ms). With ``beside`` it runs on
    one of the four threads that all CPU contexts share for urgent things, beside what workers
    compute.
    """
    writes = _distinct(writes)
    reads = [array for key, array in _distinct(reads).items() if key not in writes]
    writes = list(writes.values())
    ticket = next(_tickets)
    _pending[ticket] = function
    _pushing.ticket, _pushing.error = ticket, None
    try:
        check_call(
            _LIB.MXEnginePushAsyncND(
                _run,
                ctypes.c_void_p(ticket),
                None,
                ctypes.byref(_Context(ctx.device_typeid, ctx.device_id)),
                _handles(reads),
                len(reads),
                _handles(writes),
                len(writes),
                ctypes.byref(_ASYNC if at_once else _PRIORITIZED) if at_once or beside else None,
                priority,
                name.encode(),
                ctypes.c_bool(False),
            )
        )
    except BaseException:
        _pending.pop(ticket, None)
        raise
    if isinstance(_pushing.error, KeyboardInterrupt):
        raise _pushing.error  # Ctrl-C while it ran at once: what the caller would get anywhere else


def _distinct(arrays: Iterable[mx.nd.NDArray]) -> dict[int, mx.nd.NDArray]:
    """One array for each engine variable: with one twice, the engine would wait for itself."""
    return {memory.chunk(array): array for array in arrays}


def _handles(arrays: Sequence[mx.nd.NDArray]) -> ctypes.Array:
    return (ctypes.c_void_p * len(arrays))(*[array.handle for array in arrays])


def _wait_for_all(tell: bool = True) -> None:
    """Wait; an error that nobody has heard of is told: printed, and the exit code becomes 1."""
    global _unheard
    try:
        mx.nd.waitall()
    except mx.MXNetError:
        if tell:
            traceback.print_exc()  # the last chance for anybody to hear of it
            _unheard = True


@atexit.register
def _drain() -> None:
    """Wait for all: a function that ran after the interpreter has gone would crash the process.

    If the process ends with an error that has been printed already, others may well follow from
    that, and are not told.
    """
    running, tell = has_started(), not hasattr(sys, "last_type")
    while running:
        pushed = list(_pending)
        _wait_for_all(tell)
        for ticket in pushed:  # what was to come after an error is never run
            _pending.pop(ticket, None)
        running = bool(_pending)
    for function in _afterwards:
        function()
    if _unheard:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)  # an exception would not change the exit code any more


def _before_fork() -> None:
    """Let no worker be in Python.

    MXNet ends its workers before a fork, and Python forks with its lock held: a worker that wants
    the lock, to run a function or to return from one, would never end.
    """
    if has_started():
        _wait_for_all()
        while any(map(_is_workers, sys._current_frames().values())):
            time.sleep(1e-4)


def _is_workers(frame: types.FrameType) -> bool:
    """Whether the engine has called the function that a thread is in; its innermost frame."""
    while frame.f_back:
        frame = frame.f_back
    return frame.f_code is _called.__code__


os.register_at_fork(before=_before_fork)


def at_exit(function: Callable[[], None]) -> None:
    """Have ``function`` called when the process ends and nothing more will be run by the engine."""
    _afterwards.append(function)
