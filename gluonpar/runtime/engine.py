"""A Python function as an operator of MXNet's engine.

The engine runs the function on the worker thread of a context. It starts when all earlier operators
that write its arrays have ended, and all later operators that use them wait for its end::

    push() --> pending --> called by a worker --> complete()        --> ended: the next ones start
                                              --> complete(message) --> its turn --> failed

:func:`push` returns after about ten microseconds. An exception in the function is raised as
``MXNetError``, with the Python traceback in its message, at the next wait for an array that the
function writes, or for an array computed from that. Operators that depend on a failed one are
ended by the engine and never called. Errors are reported to the engine one after another, each in
its *turn*: failed operators and those that depend on them use the engine's list of errors
(``global_exception_refs_`` in src/engine/threaded_engine.h) without a lock, and two that append to
it at the same time end the process, then or later.

Private to MXNet 1.9.1: ``MXEnginePushAsyncND`` (include/mxnet/c_api.h), which Horovod uses too,
and the layout of ``CallbackOnComplete`` (include/mxnet/engine.h).
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
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet.base import _LIB, check_call

from gluonpar.runtime import interrupts, memory

_ERROR_BYTES = 64  # more than a std::runtime_error, which is two pointers
# FnProperty::kCPUPrioritized, kAsync and kNoSkip
_PRIORITIZED, _ASYNC, _NO_SKIP = (ctypes.byref(ctypes.c_int(kind)) for kind in (3, 4, 7))
_NO = ctypes.c_bool(False)
_push_async = _LIB.MXEnginePushAsyncND

# ``mxnet::engine::CallbackOnComplete``: called as finish(engine, param, error or NULL).
_ON_COMPLETE = struct.Struct("QQQ")
_ON_COMPLETE_BYTES = ctypes.c_char * _ON_COMPLETE.size
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_finish_at = functools.lru_cache(None)(_CALLBACK)  # by address; MXNet has one such function

_cxx = ctypes.CDLL("libstdc++.so.6")
_new_error = _cxx["_ZNSt13runtime_errorC1EPKc"]  # std::runtime_error::runtime_error(const char*)
_delete_error = _cxx["_ZNSt13runtime_errorD1Ev"]

# The C++ guard of the engine's pool of operators: its first byte becomes 1 with the first push.
_POOL_GUARD = "_ZGVZN5mxnet6common10ObjectPoolINS_6engine11ThreadedOprEE13_GetSharedRefEvE8inst_ptr"

# Functions that have not run yet, by ticket, each with ``ends_by_call`` and ``settles``.
_pending: dict[int, tuple[Callable, bool, Sequence[mx.nd.NDArray]]] = {}
_exit_code = 0  # 1 after an error that no caller has received
_turn: list[mx.nd.NDArray] = []  # see _turn_to_fail()
_MOST_ERRORS = 256  # between two waits for all operators
_tickets = itertools.count(1)


def lock() -> threading.Condition:
    """Return a lock that is free in a forked process, which lacks the thread that held it."""
    # A fork cannot acquire it before: it waits for all operators, which may need the lock.
    made = threading.Condition()
    os.register_at_fork(after_in_child=functools.partial(threading.Condition.__init__, made))
    return made


_failing = lock()  # held while _turn is made


def _called(_context: int | None, on_complete: int, ticket: int) -> None:
    """Run a pushed function: the engine calls this, and needs ``finish`` to be called once."""
    fields = _ON_COMPLETE_BYTES.from_address(on_complete)  # finish() frees it
    address, engine, param = _ON_COMPLETE.unpack_from(fields)
    finish = _finish_at(address)
    settles: Sequence[mx.nd.NDArray] = ()
    complete = None  # made where it is needed, as most operators neither call it nor fail
    try:
        function, ends_by_call, settles = _pending.pop(ticket)
        if ends_by_call:
            complete = _ending(finish, engine, param, settles)
            function(complete)
        else:
            function()
    except BaseException:  # no caller above could catch it
        (complete or _ending(finish, engine, param, settles))(traceback.format_exc())
    else:
        if not complete:
            del function  # releases its arrays before finish() wakes threads that wait for them
            finish(engine, param, None)


def _ending(
    finish: Callable, engine: int, param: int, settles: Sequence[mx.nd.NDArray]
) -> Callable[..., None]:
    """Return ``complete``, which ends an operator when it is called first."""
    finishes = [finish]

    def complete(message: str | None = None) -> None:
        try:
            finish = finishes.pop()
        except IndexError:  # the operator has ended, and the engine has freed it
            return
        if message is None:
            finish(engine, param, None)
            return
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        # Any text is accepted: an operator whose error cannot be reported would never end.
        _new_error(error, message.encode(errors="backslashreplace").replace(b"\0", b"\\0"))

        def fail(end_turn: Callable[[], None]) -> None:
            finish(engine, param, ctypes.addressof(error))  # the engine copies it
            _delete_error(error)
            if settles:
                push(end_turn, mx.cpu(), writes=settles, skips=False)
            else:
                end_turn()

        push(fail, mx.cpu(), writes=_turn_to_fail(), inline=True, ends_by_call=True)

    return complete


def _turn_to_fail() -> list[mx.nd.NDArray]:
    """Return the array that is written by each report of an error, so that they take turns."""
    with _failing:
        if not _turn:
            array = mx.nd.empty((1,), mx.cpu())
            _turn.append(mx.nd.empty((1,), mx.cpu()))
            # Make the engine's list of errors large: reading it while it is moved ends the process.
            push_error = prepare(mx.cpu(), writes=[array], inline=True)
            for _ in range(_MOST_ERRORS):
                push_error(lambda: next(iter(())))
                with contextlib.suppress(mx.MXNetError):
                    array.wait_to_read()  # so that no later wait raises it
    return _turn


_run = _CALLBACK(_called)


def has_started() -> bool:
    """Return whether any operator has been pushed to MXNet's engine in this process."""
    return bool(ctypes.c_uint8.in_dll(_LIB, _POOL_GUARD).value)


def push(function: Callable[..., None], ctx: mx.Context, **how: Any) -> None:
    """Have the engine call ``function()`` once; for the other arguments see :func:`prepare`."""
    prepare(ctx, **how)(function)


def prepare(
    ctx: mx.Context,
    reads: Sequence[mx.nd.NDArray] = (),
    writes: Sequence[mx.nd.NDArray] = (),
    name: str = "gluonpar",
    inline: bool = False,
    prioritized: bool = False,
    ends_by_call: bool = False,
    settles: Sequence[mx.nd.NDArray] = (),
    skips: bool = True,
) -> Callable[[Callable[..., None]], None]:
    """Return ``push``: ``push(function)`` has the engine call ``function()`` on ``ctx``'s worker.

    The function must not wait for an MXNet array or operator, which may need the same worker.
    ``reads`` and ``writes`` are arrays or views on any context; duplicates are allowed. Keep them
    until ``push`` has returned. MXNet's profiles show ``name``. With ``inline`` the engine may run
    the function inside ``push``, if no array is in use: for functions that take less time than
    waking a worker (about 0.1 ms). With ``prioritized`` the function runs on one of the four
    threads for urgent operators, which all CPU contexts share. Without ``skips`` it runs also if an
    operator that it depends on has failed.

    With ``ends_by_call`` the engine calls ``function(complete)``. The operator ends when any thread
    calls ``complete()``, or ``complete(message)`` for an error; until then it occupies no worker.
    One of the two must be called unless ``function`` raises; further calls have no effect. A custom
    operator, whose failure adds an error of its own to the engine's list, gives arrays that only it
    uses as ``settles``: the next error waits for the operators that it has pushed on these arrays.
    """
    # Once per engine variable: given one twice, the engine would wait for itself.
    written = {memory.chunk(array): array.handle.value for array in writes}
    read = {memory.chunk(array): array.handle.value for array in reads}
    read = {key: handle for key, handle in read.items() if key not in written}
    inputs = struct.pack(f"{len(read)}P", *read.values()), len(read)
    outputs = struct.pack(f"{len(written)}P", *written.values()), len(written)
    where = (ctypes.c_int * 2)(ctx.device_typeid, ctx.device_id)
    kind = _ASYNC if inline else _PRIORITIZED if prioritized else None if skips else _NO_SKIP
    rest = (None, where, *inputs, *outputs, kind, 0, name.encode(), _NO)  # 0 is the priority
    return lambda function: _push((function, ends_by_call, settles), rest)


def _push(pending: tuple, rest: tuple) -> None:
    ticket = next(_tickets)
    with interrupts.held():  # the engine may call the function now, on this thread
        _pending[ticket] = pending
        try:
            check_call(_push_async(_run, ctypes.c_void_p(ticket), *rest))
        except BaseException:
            _pending.pop(ticket, None)
            raise


def drain(report: bool = True) -> None:
    """Wait for all operators; forget functions that depend on a failed one, as they never run.

    With ``report`` an error that no caller has received is printed, and the exit code becomes 1.
    """
    global _exit_code
    while has_started():
        pushed = list(_pending)
        try:
            mx.nd.waitall()
        except mx.MXNetError:
            if report:
                traceback.print_exc()
                _exit_code = 1
        for ticket in pushed:
            _pending.pop(ticket, None)
        if not _pending:
            return


@atexit.register
def _end() -> None:
    """Wait for all operators: a function that runs after the interpreter's end would crash."""
    # After an uncaught exception errors of operators are not printed: they may follow from it.
    drain(report=not hasattr(sys, "last_type"))
    _wait_for_callbacks()  # a worker that needs the GIL later would never end, from Python 3.14 on
    if _exit_code:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_exit_code)  # an exception would no longer change the exit code


def _before_fork() -> None:
    """Wait until no worker runs Python code."""
    # MXNet ends its workers before a fork, and Python holds the GIL during a fork: a worker that
    # needs the GIL, to run a function or to return from one, would never end.
    drain()
    _wait_for_callbacks()


def _wait_for_callbacks() -> None:
    """Wait until no thread of the engine is inside a pushed function."""
    while _called.__code__ in map(_outermost_code, sys._current_frames().values()):
        time.sleep(1e-4)


def _outermost_code(frame: Any) -> Any:
    return [each.f_code for each, _ in traceback.walk_stack(frame)][-1]


def _after_fork() -> None:
    """Forget the parent's exit code: the parent reports its errors itself."""
    global _exit_code
    _exit_code = 0


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


if sys.version_info < (3, 10):  # there subprocess forks without calling what is registered
    sys.addaudithook(lambda event, _: _before_fork() if event == "subprocess.Popen" else None)
