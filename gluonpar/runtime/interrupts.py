"""Ctrl-C is held back while MXNet's engine, or replicas that are half changed, depend on this code.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In a function that the
engine calls there, the operator would never end, and all that waits for its arrays neither; between
two operators of an all-reduce some devices would have the sum, and others not.
"""

from __future__ import annotations

import _signal  # the module signal converts numbers to enumerations, which takes microseconds
import contextlib
import os
import threading
from typing import Iterator

_MAIN = threading.main_thread().ident
_is_held = False  # on the main thread
_received: list = []  # while held: the arguments of the handler's calls
_replaced: list = []  # the handlers that the contexts that are entered will set again


def _receive(*arguments: object) -> None:
    _received.append(arguments)


class held:
    """Within this context SIGINT's handler is not called.

    If SIGINT came, the handler is called once on leaving, and raises KeyboardInterrupt there. Other
    threads than the main thread are never interrupted, and nothing is done there. Contexts may be
    nested. Do not wait within: until it is left, Ctrl-C has no effect.
    """

    __slots__ = ("_handler",)

    def __enter__(self) -> None:
        global _received, _is_held
        self._handler = None
        if _is_held or threading.get_ident() != _MAIN:
            return
        handler = _signal.getsignal(_signal.SIGINT)
        if callable(handler):
            _received = []
            _signal.signal(_signal.SIGINT, _receive)  # from here on nothing is interrupted
            _is_held, self._handler = True, handler
            _replaced.append(handler)

    def __exit__(self, *raised: object) -> None:
        global _is_held
        if self._handler is not None:
            _is_held = False
            _replaced.pop()
            _signal.signal(_signal.SIGINT, self._handler)
            if _received:
                self._handler(*_received[0])


@contextlib.contextmanager
def held_while_waiting() -> Iterator[None]:
    """As held(), for code that waits: a second Ctrl-C has its effect at once."""
    handler = _signal.getsignal(_signal.SIGINT)
    if not callable(handler) or threading.get_ident() != _MAIN:
        yield
        return
    received: list[tuple] = []

    def receive(*arguments: object) -> None:
        received.append(arguments)
        if len(received) > 1:
            _signal.signal(_signal.SIGINT, handler)
            handler(*arguments)

    _replaced.append(handler)
    _signal.signal(_signal.SIGINT, receive)
    try:
        yield
    finally:
        _replaced.pop()
        _signal.signal(_signal.SIGINT, handler)
        if len(received) == 1:
            handler(*received[0])


def _after_fork() -> None:
    """Set Python's handler again if the parent's main thread, which would have done, is not here.

    The thread that forked is this process's main thread.
    """
    global _MAIN, _is_held
    main, _MAIN = _MAIN, threading.get_ident()
    if main != _MAIN:
        if _replaced:
            _signal.signal(_signal.SIGINT, _replaced[0])
        _replaced.clear()
        _is_held = False


os.register_at_fork(after_in_child=_after_fork)
