"""A Python function as an operator of MXNet's engine.

The engine runs it on the worker thread of a context, after everything pushed earlier that writes
the arrays named, and before everything pushed later that uses them. :func:`push` returns at once,
after about ten microseconds. An exception in the function is raised as ``MXNetError``, with the
Python traceback in its message, where the caller next waits for an array that the function writes,
or for one computed from it.

Private to MXNet 1.9.1: ``MXEnginePushAsyncND`` (include/mxnet/c_api.h), which Horovod uses too, and
the layout of ``CallbackOnComplete`` (include/mxnet/engine.h).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet.base import _LIB, check_call

from gluonpar.runtime import interrupts, memory

_ERROR_BYTES = 64  # more than a std::runtime_error, which is two pointers
# FnProperty::kCPUPrioritized and kAsync
_PRIORITIZED, _ASYNC = ctypes.byref(ctypes.c_int(3)), ctypes.byref(ctypes.c_int(4))
_NO = ctypes.c_bool(False)
_push_async = _LIB.MXEnginePushAsyncND

# ``mxnet::engine::CallbackOnComplete``: called as finish(engine, param, error or NULL).
_ON_COMPLETE = struct.Struct("QQQ")
_ON_COMPLETE_BYTES = ctypes.c_char * _ON_COMPLETE.size
_FINISH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_finish_at = functools.lru_cache(None)(_FINISH)  # by address, of which there is one

_cxx = ctypes.CDLL("libstdc++.so.6")
_new_error = _cxx["_ZNSt13runtime_errorC1EPKc"]  # std::runtime_error::runtime_error(const char*)
_new_error.argtypes, _new_error.restype = [ctypes.c_void_p, ctypes.c_char_p], None
_delete_error = _cxx["_ZNSt13runtime_errorD1Ev"]
_delete_error.argtypes, _delete_error.restype = [ctypes.c_void_p], None

# The C++ guard of the engine's pool of operators: its first byte turns 1 with the first one pushed.
_POOL_GUARD = "_ZGVZN5mxnet6common10ObjectPoolINS_6engine11ThreadedOprEE13_GetSharedRefEvE8inst_ptr"

_pending: dict[int, tuple[Callable, bool]] = {}  # by ticket: (function, ends_by_call), not run yet
_exit_code = 0  # 1 after an error that reached no caller
_at_exit: list[Callable[[], None]] = []
_failing = threading.RLock()  # held while the engine is told of an error
_list_has_grown = False
_MOST_ERRORS = 256  # between two waits for all operators
_tickets = itertools.count(1)


def _called(_context, on_complete, ticket):
    """Run a pushed function; the engine calls this, and ``finish`` must be called exactly once."""
    fields = _ON_COMPLETE_BYTES.from_address(on_complete)  # finish() frees it
    address, engine, param = _ON_COMPLETE.unpack_from(fields)
    finishes = [_finish_at(address)]

    def complete(message: str | None = None) -> None:
        try:
            finish = finishes.pop()
        except IndexError:  # it has ended, and the engine has freed it
            return
        if message is None:
            finish(engine, param, None)
            return
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        # Whatever is in the text: an operator whose error cannot be told would never end.
        _new_error(error, message.encode(errors="backslashreplace").replace(b"\0", b"\\0"))
        with _failing:
            _grow_list_of_errors()
            finish(engine, param, ctypes.addressof(error))  # the engine copies it
        _delete_error(error)

    try:
        function, ends_by_call = _pending.pop(ticket)
        if ends_by_call:
            function(complete)
        else:
            function()
    except BaseException:  # no caller above could catch it
        complete(traceback.format_exc())
    else:
        if not ends_by_call:
            del function  # and its arrays, before anyone who waits goes on
            complete()


def _grow_list_of_errors() -> None:
    """Before the first error, have the engine's list of errors grow, while no other thread uses it.

    Operators that fail, and those that depend on them, use the list (``global_exception_refs_`` in
    src/engine/threaded_engine.h) without a lock: two that append to it at the same time, or one
    that reads it while it is moved to grow, end the process. It never shrinks.
    """
    global _list_has_grown
    if _list_has_grown:
        return
    _list_has_grown = True
    array = mx.nd.empty((1,), mx.cpu())
    push_error = prepare(mx.cpu(), writes=[array], inline=True, ends_by_call=True)
    for _ in range(_MOST_ERRORS):
        push_error(lambda complete: complete("grows the list of errors"))
        with contextlib.suppress(mx.MXNetError):
            array.wait_to_read()  # it is no longer an error that reached no caller


_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_run = _RUN(_called)


def has_started() -> bool:
    """Return whether any operator has been pushed to MXNet's engine in this process."""
    return bool(ctypes.c_uint8.in_dll(_LIB, _POOL_GUARD).value)


def push(function: Callable[..., None], ctx: mx.Context, **how: Any) -> None:
    """Have the engine run ``function()``, once; the arguments are those of :func:`prepare`."""
    prepare(ctx, **how)(function)


def prepare(
    ctx: mx.Context,
    reads: Sequence[mx.nd.NDArray] = (),
    writes: Sequence[mx.nd.NDArray] = (),
    name: str = "gluonpar",
    inline: bool = False,
    prioritized: bool = False,
    ends_by_call: bool = False,
) -> Callable[[Callable[..., None]], None]:
    """Return ``push``: ``push(function)`` has the engine run a function on the worker of ``ctx``.

    It is ordered by the arrays that it uses, and must not wait for an MXNet array or operator,
    which may need the same worker. ``reads`` and ``writes`` are arrays or views on any context;
    duplicates are allowed. They are not kept alive: hold them until ``push`` has returned. ``name``
    is its name in MXNet's profiles. With ``inline`` the engine may run the function on the calling
    thread, inside ``push``, if it need not wait for an array: for functions that take less time
    than waking a worker (about 0.1 ms). With ``prioritized`` it runs on one of the four threads for
    urgent operators that all CPU contexts share, in parallel with the contexts' workers.

    With ``ends_by_call`` the engine calls ``function(complete)``, and the operator ends, without
    keeping a worker, when any thread calls ``complete()``, or ``complete(message)`` if it failed.
    It must do so, unless ``function`` raises; further calls have no effect.
    """
    # One array per engine variable: given one twice, the engine would wait for itself.
    written = {memory.chunk(array): array.handle.value for array in writes}
    read = {memory.chunk(array): array.handle.value for array in reads}
    inputs = [handle for key, handle in read.items() if key not in written]
    arrays = struct.pack(f"{len(inputs)}P", *inputs), len(inputs)
    arrays += struct.pack(f"{len(written)}P", *written.values()), len(written)
    where = (ctypes.c_int * 2)(ctx.device_typeid, ctx.device_id)
    kind = _ASYNC if inline else _PRIORITIZED if prioritized else None
    rest = (None, where, *arrays, kind, 0, name.encode(), _NO)  # 0 is the priority

    def push_function(function: Callable[..., None]) -> None:
        ticket = next(_tickets)
        with interrupts.held():  # the engine may call the function now, on this thread
            _pending[ticket] = function, ends_by_call
            try:
                check_call(_push_async(_run, ctypes.c_void_p(ticket), *rest))
            except BaseException:
                _pending.pop(ticket, None)
                raise

    return push_function


def _wait_for_all(report: bool = True) -> None:
    """Wait; with ``report``, print an error that reached no caller and set the exit code to 1."""
    global _exit_code
    try:
        mx.nd.waitall()
    except mx.MXNetError:
        if report:
            traceback.print_exc()
            _exit_code = 1


def drain(report: bool = True) -> None:
    """Wait for all operators, and forget those that will not be run.

    An error that reached no caller is printed, unless ``report`` is False, and the exit code is 1.
    """
    running = has_started()
    while running:
        pushed = list(_pending)
        _wait_for_all(report)
        for ticket in pushed:  # functions that depend on a failed one are never run
            _pending.pop(ticket, None)
        running = bool(_pending)


@atexit.register
def _end() -> None:
    """Wait for all operators: a function that ran after the interpreter has ended would crash.

    After an uncaught exception errors of operators, which may follow from it, are not reported.
    """
    drain(report=not hasattr(sys, "last_type"))
    for function in _at_exit:
        function()
    if _exit_code:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_exit_code)  # an exception would no longer change the exit code


def _before_fork() -> None:
    """Wait until no worker runs Python code.

    MXNet ends its workers before a fork, and Python forks holding the GIL: a worker that needs the
    GIL, to run a function or to return from one, would never end.
    """
    if has_started():
        _wait_for_all()
        while any(map(_called_by_engine, sys._current_frames().values())):
            time.sleep(1e-4)


def _called_by_engine(frame: types.FrameType) -> bool:
    while frame.f_back:
        frame = frame.f_back
    return frame.f_code is _called.__code__


def _after_fork() -> None:
    """Leave to the parent its functions for the exit, and the errors that it has printed."""
    global _exit_code, _failing
    _at_exit.clear()
    _exit_code, _failing = 0, threading.RLock()  # another thread of the parent may hold it


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _audit(event: str, _: tuple) -> None:
    if event == "subprocess.Popen":
        _before_fork()


if sys.version_info < (3, 10):  # where subprocess forks, and calls nothing that is registered
    sys.addaudithook(_audit)


def at_exit(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of this process, after the engine's last operator.

    Not at the end of a process that is forked from it.
    """
    _at_exit.append(function)
