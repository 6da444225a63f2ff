"""MXNet's tape: what a backward pass will write, and in which recordings its heads were computed.

Each operator that autograd records is a node of a graph: ``node_7`` is the eighth that the process
has recorded, on any thread. An array with a gradient has a name, too, such as ``var3``, and another
one when a gradient is attached again. A pass writes the gradients of the arrays whose names are in
the graph of its heads. What a thread records from one ``autograd.record()`` to its end, whatever
scopes are entered within, is an interval of the nodes' numbers, a recording.

To see recordings and passes, functions of MXNet 1.9.1 are replaced by others that call them.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import functools
import math
import os
import threading
from typing import Any, Callable, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, SymbolHandle

from gluonpar.runtime import interrupts

# A gradient that a pass will write: the recording of its head, the array's owner, its index there.
Written = Tuple["Recording", Any, int]

lock = threading.RLock()  # not held during a pass
owners: dict[str, tuple[Any, int]] = {}  # by name, with indices; renew() of one looks names up anew
num_passes: collections.Counter = collections.Counter()  # while watched, by thread's identifier
_MOST_RECORDINGS = 2048  # that are known; it takes a megabyte or two
_begin_pass: Callable[[Sequence[Written]], Callable[[], None]]  # as in watch
_marker: mx.nd.NDArray  # of which a reshape is a node, though nothing is computed
_backward, _attach = _LIB.MXAutogradBackwardEx, _LIB.MXAutogradMarkVariables
_set_recording, _ONE = _LIB.MXAutogradSetIsRecording, (ctypes.c_int64 * 1)(1)


class Recording:
    """What a thread records from one ``autograd.record()`` to its end; ``part`` is the caller's."""

    def __init__(self, thread: int | None) -> None:
        self.thread, self.depth, self.end = thread, this_thread.depth, math.inf
        self.part: Any = None


class _Thread(threading.local):
    recording: Recording | None = None  # that has not ended
    depth = 0  # number of autograd's scopes that have not been left

    def __init__(self) -> None:
        self.program = threading.get_ident()  # the thread for which this one records


this_thread = _Thread()


def watch(begin_pass: Callable[[Sequence[Written]], Callable[[], None]]) -> None:
    """From now on call ``begin_pass`` before each pass, and what it returns after the pass.

    Its argument is what the pass will write of ``owners``. Signals' handlers wait until the end.
    """
    global _begin_pass, _marker
    if _LIB.MXAutogradBackwardEx is _backward:
        with autograd.pause():
            _marker = mx.nd.zeros((1,), ctx=mx.cpu(0))
            _marker.attach_grad()
        _begin_pass = begin_pass
        _LIB.MXAutogradBackwardEx, _LIB.MXAutogradMarkVariables = _watched_pass, _watched_attach
        _LIB.MXAutogradSetIsRecording = _watched_switch


def graph_of(handle: int | NDArrayHandle) -> mx.sym.Symbol | None:
    """Return the graph that computed the array, or the variable, with its name, that it is."""
    graph = SymbolHandle()
    is_none = _LIB.MXAutogradGetSymbol(NDArrayHandle.from_param(handle), ctypes.byref(graph))
    return None if is_none else mx.sym.Symbol(graph)


def _written(heads: Sequence[int]) -> list[Written]:
    """Return what a pass from these handles writes; nothing if MXNet will refuse one of them."""
    by_recording: dict[Recording, list[mx.sym.Symbol]] = {}
    for graph in map(graph_of, heads):
        if graph is None:
            return []
        by_recording.setdefault(_recording_of(graph.name), []).append(graph)
    written = []
    for recording, graphs in by_recording.items():
        found = filter(None, map(owners.get, mx.sym.Group(graphs).list_arguments()))
        written += [(recording, *each) for each in found]
    return written


def _recording_of(node: str) -> Recording:
    """Return the recording of a node: of those that it may be of, one of this program's."""
    position = int(node[5:]) if node.startswith("node_") else 0
    mine, found = this_thread.program, None
    with lock:
        for i in range(bisect.bisect(_recordings, (position,)) - 1, -1, -1):
            recording = _recordings[i][1]
            if position <= recording.end:
                if recording.thread == mine:
                    return recording
                found = found or recording
        return found or _recordings[0][1]


@functools.wraps(_backward)
def _watched_pass(num_heads: Any, heads: Any, head_grads: Any, num_variables: Any, *more) -> int:
    num_passes[threading.get_ident()] += 1
    if getattr(num_variables, "value", num_variables):  # of autograd.grad: it writes other arrays
        return _backward(num_heads, heads, head_grads, num_variables, *more)
    with interrupts.held():
        handles = ctypes.cast(heads, ctypes.POINTER(ctypes.c_void_p))
        end_pass = _begin_pass(_written(handles[: getattr(num_heads, "value", num_heads)]))
        try:
            return _backward(num_heads, heads, head_grads, num_variables, *more)
        finally:
            end_pass()


@functools.wraps(_attach)
def _watched_attach(num_arrays: Any, arrays: Any, *more) -> int:
    graphs = map(graph_of, arrays[: getattr(num_arrays, "value", num_arrays)])
    before = [graph.name for graph in graphs if graph is not None]
    result = _attach(num_arrays, arrays, *more)
    for owner, _ in filter(None, map(owners.get, before)):
        owner.renew()
    return result


@functools.wraps(_set_recording)
def _watched_switch(is_recording: Any, before: Any) -> int:
    """Begin a recording, or end it where it began: not within scopes that were entered in it."""
    is_on, recording = getattr(is_recording, "value", is_recording), this_thread.recording
    if recording and not is_on and this_thread.depth <= recording.depth:
        recording.end = _mark() if autograd.is_recording() else recording.end
        this_thread.recording = None
    result = _set_recording(is_recording, before)
    if is_on and not this_thread.recording:
        with lock:
            this_thread.recording = Recording(this_thread.program)
            _recordings.append((_mark(), this_thread.recording))
            if len(_recordings) > _MOST_RECORDINGS:
                del _recordings[1 : _MOST_RECORDINGS // 2]
    return result


class _Scope(autograd._RecordingStateScope):  # what record() and pause() return
    @interrupts.whole
    def __enter__(self) -> None:
        super().__enter__()
        this_thread.depth += 1

    @interrupts.whole
    def __exit__(self, *error: Any) -> None:
        this_thread.depth -= 1
        super().__exit__(*error)


autograd._RecordingStateScope = _Scope


def _mark() -> int:
    """Record a node, and return its number."""
    node = NDArrayHandle()  # by Python's reshape it takes three times as long
    _LIB.MXNDArrayReshape64(_marker.handle, 1, _ONE, False, ctypes.byref(node))
    position = int(graph_of(node).name[5:])
    _LIB.MXNDArrayFree(node)
    return position


# With their first nodes, in order. The first stands for those that are not known, or not any more.
_recordings = [(-1, Recording(None))]
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
