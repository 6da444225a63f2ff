"""Signal handlers wait while code runs that must not be interrupted.

Python calls a signal's handler between any two bytecodes of the main thread, and an exception that
it raises (KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM) is raised there. In a function
that the engine calls, the operator would then never end, and its arrays could be waited for in
vain. Between two operators of an all-reduce, some devices would have the sum, and others not.

So each of the program's handlers that is written in Python is wrapped in one of ours. It calls the
handler at once, or on leaving :class:`held`; in a destructor or a function that is :func:`whole` it
has the signal sent again a millisecond later. To wrap handlers, the functions behind
``signal.signal`` and ``signal.getsignal`` are replaced. The program still sees its own handlers.
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
from typing import Any, Callable

import mxnet as mx

_signal: Any = sys.modules["_signal"]  # the module signal calls its functions
_MAIN = threading.main_thread().ident
_depth = 0  # of contexts that the main thread has entered
_waits_at = 0  # the depth at which it waits, and the second signal does not; 0: at none
_received: list[tuple] = []  # the calls of handlers that wait: (handler, signal, frame)
_codes: set = set()  # of functions that are never interrupted
_set, _get = _signal.signal, _signal.getsignal


class _Waiting:
    """Calls a handler when it does no harm."""

    def __init__(self, handler: Callable) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        inside = frame
        while inside is not None:  # in a destructor, Python would drop the handler's exception
            if inside.f_code.co_name == "__del__" or inside.f_code in _codes:
                _thread.start_new_thread(_send_again, (number,))
                return
            inside = inside.f_back
        _received.append((self.handler, number, frame))
        _call_if_due()


def _send_again(number: int) -> None:
    time.sleep(1e-3)
    os.kill(os.getpid(), number)


def whole(function: Callable) -> Callable:
    """Have no handler called from the first instruction of a short ``function`` to its last."""
    _codes.add(function.__code__)
    return function


def _call_if_due() -> None:
    """Call the handlers that wait, unless they must wait longer, once for each signal.

    If a handler raises, the remaining ones go on waiting.
    """
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
    """Call no signal handler within this context, or a function that is decorated with it.

    On leaving, the handlers of the signals that have come are called, once each. Only the main
    thread is ever interrupted, so on others this does nothing. Contexts may be nested. Do not wait
    inside one: until it is left, Ctrl-C has no effect.
    """

    def __enter__(self) -> None:
        global _depth
        if threading.get_ident() == _MAIN:
            _depth += 1

    def __exit__(self, *raised: object) -> None:
        global _depth, _waits_at
        if threading.get_ident() == _MAIN:
            _waits_at = 0 if _depth == _waits_at else _waits_at
            _depth -= 1
            if _received:
                _call_if_due()


class held_while_waiting(held):
    """As held(), for code that waits: a second signal is not held back."""

    def __enter__(self) -> None:
        global _waits_at
        super().__enter__()
        if _depth == 1 and threading.get_ident() == _MAIN:
            _waits_at = 1


def _after_fork() -> None:
    """Make the thread that forked the main thread, which is in none of the parent's contexts."""
    global _MAIN, _depth, _waits_at
    main, _MAIN = _MAIN, threading.get_ident()
    if main != _MAIN:
        _depth = _waits_at = 0
        _received.clear()


os.register_at_fork(after_in_child=_after_fork)
for _scope in (mx.util._NumpyShapeScope, mx.util._NumpyArrayScope, mx.Context):  # and see tape
    whole(_scope.__enter__)
    whole(_scope.__exit__)
_signal.signal, _signal.getsignal = _set_waiting, _get_own
if threading.get_ident() == _MAIN:  # another thread may not
    for _number in signal.valid_signals():
        if callable(_get(_number)):
            _set_waiting(_number, _get(_number))


def end_at_crash() -> None:
    """From now on a crash (SIGSEGV) ends the process at once, and stderr shows the program's place.

    MXNet's own handler calls exit(), which may wait for what the crash has interrupted.
    """
    if signal.getsignal(signal.SIGSEGV) in (None, signal.SIG_DFL):  # the program has set none
        faulthandler.disable()
        ctypes.CDLL(None).signal(signal.SIGSEGV, signal.SIG_DFL)
        if sys.__stderr__ is not None:  # it is open
            faulthandler.enable(sys.__stderr__, all_threads=False)
