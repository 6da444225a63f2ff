"""MXNet's tape: what a backward pass will write, and in which recordings its heads were computed.

While autograd records, each operator becomes a node of a graph. The nodes are numbered: ``node_7``
is the eighth operator that the process has recorded, on any thread. An array with a gradient has a
name, too, such as ``var3``, and another one when a gradient is attached again. A pass writes the
gradients of the arrays whose names are in the graph of its heads: MXNet goes through the same list.

A recording is what a thread records from one ``autograd.record()`` to its end, whatever scopes are
entered within: an interval of the nodes' numbers. To see recordings and passes, functions of
MXNet's C interface are replaced by others that call them (MXNet 1.9.1).
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import functools
import math
import os
import threading
from typing import Any, Callable, Dict, List, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, SymbolHandle

from gluonpar.runtime import interrupts, private_fields

Reached = Dict["Recording", List[str]]  # the names that a pass reaches, by recording

lock = threading.RLock()  # not held during a pass
_MOST_RECORDINGS = 2048  # that are known; it takes a megabyte or two
_begin_pass: Callable[[Reached], Callable[[], None]]  # as in watch
_renamed: Callable[[Sequence[str]], None]
_num_passes: collections.Counter = collections.Counter()  # by the thread's identifier
_marker: mx.nd.NDArray  # of which a reshape is a node, though nothing is computed
_backward, _attach = _LIB.MXAutogradBackwardEx, _LIB.MXAutogradMarkVariables
_set_recording, _ONE = _LIB.MXAutogradSetIsRecording, (ctypes.c_int64 * 1)(1)


class Recording:
    """What a thread records from one ``autograd.record()`` to its end; ``part`` is the caller's."""

    def __init__(self, thread: int | None) -> None:
        self.thread, self.depth, self.end, self.part = thread, _this.depth, math.inf, None


class _Thread(threading.local):
    program: int | None = None  # as in program()
    recording: Recording | None = None  # that has not ended
    depth = 0  # number of autograd's scopes that have not been left


_this = _Thread()


def watch(
    begin_pass: Callable[[Reached], Callable[[], None]], renamed: Callable[[Sequence[str]], None]
) -> None:
    """From now on call ``begin_pass`` before each pass, and what it returns after the pass.

    With nothing for a pass that MXNet will refuse; Ctrl-C is held back. ``renamed`` is called with
    former names of arrays that have others now.
    """
    global _begin_pass, _renamed, _marker
    if _LIB.MXAutogradBackwardEx is _backward:
        with autograd.pause():
            _marker = mx.nd.zeros((1,), ctx=mx.cpu(0))
            _marker.attach_grad()
        _begin_pass, _renamed = begin_pass, renamed
        _LIB.MXAutogradBackwardEx, _LIB.MXAutogradMarkVariables = _watched_pass, _watched_attach
        _LIB.MXAutogradSetIsRecording = _watched_switch
        for method in ("__enter__", "__exit__"):
            private_fields.wrap((method, [autograd._RecordingStateScope]), _counting)


def num_passes(thread: int) -> int:
    """Return how often the thread with this identifier has called ``backward``, while watched."""
    return _num_passes[thread]


def program() -> int:
    """Return the identifier of the thread that this one works for: itself, if no other."""
    return _this.program or threading.get_ident()


def set_program(thread: int) -> None:
    """Let what this thread records count as recorded by ``thread``, for which it works."""
    _this.program = thread


def name(array: mx.nd.NDArray) -> str:
    """Return the name of an array that has a gradient."""
    return _graph(array.handle).name


def _graph(handle: int | NDArrayHandle) -> mx.sym.Symbol | None:
    """Return the graph that computed the array, if there is one."""
    graph = SymbolHandle()
    is_none = _LIB.MXAutogradGetSymbol(NDArrayHandle.from_param(handle), ctypes.byref(graph))
    return None if is_none else mx.sym.Symbol(graph)


def _reached(heads: Sequence[int]) -> Reached:
    """Return what a pass from these handles reaches; nothing if MXNet will refuse one of them."""
    by_recording: dict[Recording, list[mx.sym.Symbol]] = {}
    for graph in map(_graph, heads):
        if graph is None:
            return {}
        by_recording.setdefault(_recording_of(graph.name), []).append(graph)
    return {key: mx.sym.Group(graphs).list_arguments() for key, graphs in by_recording.items()}


def _recording_of(node: str) -> Recording:
    """Return the recording of a node: of those that it may be of, one of this program's."""
    position, mine, found = _position(node), program(), None
    with lock:
        for i in range(bisect.bisect(_recordings, (position,)) - 1, -1, -1):
            recording = _recordings[i][1]
            if position <= recording.end:
                if recording.thread == mine:
                    return recording
                found = found or recording
        return found or _recordings[0][1]


def _position(node: str) -> int:
    return int(node[5:]) if node.startswith("node_") else 0


@functools.wraps(_backward)
def _watched_pass(num_heads: Any, heads: Any, head_grads: Any, num_variables: Any, *more) -> int:
    _num_passes[threading.get_ident()] += 1
    if getattr(num_variables, "value", num_variables):  # of autograd.grad: it writes other arrays
        return _backward(num_heads, heads, head_grads, num_variables, *more)
    with interrupts.held():
        handles = ctypes.cast(heads, ctypes.POINTER(ctypes.c_void_p))
        end_pass = _begin_pass(_reached(handles[: getattr(num_heads, "value", num_heads)]))
        try:
            return _backward(num_heads, heads, head_grads, num_variables, *more)
        finally:
            end_pass()


@functools.wraps(_attach)
def _watched_attach(num_arrays: Any, arrays: Any, *more) -> int:
    graphs = map(_graph, arrays[: getattr(num_arrays, "value", num_arrays)])
    before = [graph.name for graph in graphs if graph is not None]
    result = _attach(num_arrays, arrays, *more)
    _renamed(before)
    return result


@functools.wraps(_set_recording)
def _watched_switch(is_recording: Any, before: Any) -> int:
    """Begin a recording, or end it where it began: not within scopes that were entered in it."""
    is_on, recording = getattr(is_recording, "value", is_recording), _this.recording
    if recording and not is_on and _this.depth <= recording.depth:
        recording.end = _mark() if autograd.is_recording() else recording.end
        _this.recording = None
    result = _set_recording(is_recording, before)
    if is_on and not _this.recording:
        with lock:
            _this.recording = Recording(program())
            _recordings.append((_mark(), _this.recording))
            if len(_recordings) > _MOST_RECORDINGS:
                del _recordings[1 : _MOST_RECORDINGS // 2]
    return result


def _counting(method: Callable) -> Callable:
    """Return an ``__enter__`` or ``__exit__``, which has arguments, that counts open scopes."""

    @functools.wraps(method)
    def counted(scope: Any, *error: Any) -> None:
        _this.depth -= bool(error)
        method(scope, *error)
        _this.depth += not error

    return counted


def _mark() -> int:
    """Record a node, and return its number."""
    node = NDArrayHandle()  # by Python's reshape it takes three times as long
    _LIB.MXNDArrayReshape64(_marker.handle, 1, _ONE, False, ctypes.byref(node))
    position = _position(_graph(node).name)
    _LIB.MXNDArrayFree(node)
    return position


# With their first nodes, in order. The first stands for those that are not known, or not any more.
_recordings = [(-1, Recording(None))]
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
