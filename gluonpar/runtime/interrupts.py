"""Delays signal handlers wherever an exception raised by one would do harm.

Python calls signal handlers between any two bytecodes of the main thread, and the handler's
exception (KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM) is raised there. If that is in
a function that the engine calls, the operator never ends, and a wait for its arrays never returns.
If it is between two operators of an all-reduce, only some devices get the sum.

So the functions behind ``signal.signal`` and ``signal.getsignal`` are replaced, and each handler
written in Python is wrapped in one of ours; the program still sees its own. Ours calls the
program's handler at once or, inside :class:`held`, on leaving that. In a destructor, and in a
function that is :func:`whole`, it sends the signal again after a millisecond instead.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, Callable, NamedTuple

import mxnet as mx

_signal: Any = sys.modules["_signal"]  # the module signal calls its functions
_MAIN = threading.main_thread().ident
_depth = 0  # how many held() the main thread is in
_waits_at = 0  # _depth in held_while_waiting(); 0 outside
_received: list[tuple] = []  # calls of handlers to be made: (handler, signal, frame)
_codes: set = set()  # the code objects of functions that are whole
_set, _get = _signal.signal, _signal.getsignal


class _Waiting(NamedTuple):
    """Calls a handler when its exception does no harm."""

    handler: Callable

    def __call__(self, number: int, frame: Any) -> None:
        for code in (each.f_code for each, _ in traceback.walk_stack(frame)):
            if code.co_name == "__del__" or code in _codes:  # Python drops a destructor's exception
                _thread.start_new_thread(_send_again, (number,))
                return
        _received.append((self.handler, number, frame))
        _call_if_due()


def _send_again(number: int) -> None:
    time.sleep(1e-3)
    os.kill(os.getpid(), number)


def whole(function: Callable) -> Callable:
    """Return ``function``, which must be short; no handler is called inside it from now on."""
    _codes.add(function.__code__)
    return function


def _call_if_due() -> None:
    """Unless they must wait, call the handlers of the received signals, once for each signal."""
    if not _depth or (_depth == _waits_at and len(_received) > 1):
        while _received:
            handler, number, frame = _received[0]
            _received[:] = [call for call in _received if call[1] != number]
            handler(number, frame)


@functools.wraps(_set)
def _set_waiting(number: int, handler: Any) -> Any:
    is_function = callable(handler) and not isinstance(handler, _Waiting)
    return _own(_set(number, _Waiting(handler) if is_function else handler))


@functools.wraps(_get)
def _get_own(number: int) -> Any:
    return _own(_get(number))


def _own(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Waiting) else handler


class held(contextlib.ContextDecorator):
    """Call no signal handler inside this context, or inside a function decorated with it.

    On leaving, the handlers of the received signals are called, once each. It does nothing on
    threads other than the main thread, as Python never interrupts them. Contexts may be nested. Do
    not wait inside: Ctrl-C has no effect until the context is left.
    """

    def __enter__(self) -> None:
        global _depth
        if threading.get_ident() == _MAIN:
            _depth += 1

    def __exit__(self, *raised: object) -> None:
        global _depth, _waits_at
        if threading.get_ident() == _MAIN:
            if _depth == _waits_at:
                _waits_at = 0
            _depth -= 1
            if _received:
                _call_if_due()


class held_while_waiting(held):
    """Delay only the first signal's handler, so that code inside may wait; a second one ends it."""

    def __enter__(self) -> None:
        global _waits_at
        super().__enter__()
        if _depth == 1 and threading.get_ident() == _MAIN:
            _waits_at = 1


def _after_fork() -> None:
    """Make the thread that forked the main thread, which is then in no held()."""
    global _MAIN, _depth, _waits_at
    main, _MAIN = _MAIN, threading.get_ident()
    if main != _MAIN:
        _depth = _waits_at = 0
        _received.clear()


os.register_at_fork(after_in_child=_after_fork)
for _scope in (mx.util._NumpyShapeScope, mx.util._NumpyArrayScope, mx.Context):  # not record()'s
    whole(_scope.__enter__)
    whole(_scope.__exit__)
_signal.signal, _signal.getsignal = _set_waiting, _get_own
if threading.get_ident() == _MAIN:  # no other thread may set handlers
    for _number in signal.valid_signals():
        if callable(_get(_number)):
            _set_waiting(_number, _get(_number))


def end_at_crash() -> None:
    """From now on end the process at once at a crash (SIGSEGV), with a traceback on stderr.

    MXNet's own handler calls exit(), which may wait for what the crash has interrupted.
    """
    if signal.getsignal(signal.SIGSEGV) in (None, signal.SIG_DFL):  # the program has no handler
        faulthandler.disable()
        ctypes.CDLL(None).signal(signal.SIGSEGV, signal.SIG_DFL)
        if sys.__stderr__ is not None:  # it is open
            faulthandler.enable(sys.__stderr__, all_threads=False)
