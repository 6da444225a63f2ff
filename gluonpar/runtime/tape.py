"""MXNet's tape: what a backward pass will write, and in which recordings its heads were computed.

Each operator that autograd records is a node of a graph: ``node_7`` is the eighth in the process,
on any thread. An array with a gradient also has a name, such as ``var3``, and gets a new one when a
gradient is attached again. A pass writes the gradients of the arrays that are in its heads' graph.
A *recording* is all that a thread records from one ``autograd.record()`` to its end, an interval of
nodes' numbers::

    with autograd.record():          # depth 0: a recording begins, say at node_7
        with autograd.pause():       # depth 1: it goes on
            with autograd.record():  # depth 2: still the same one
                y = 2 * x            # node_8
    y.backward()                     # y is of the recording from node_7 to node_9

Where several functions are called for one batch, all their passes count as one recording
(``this_thread.joint``). To observe recordings and passes, functions of MXNet 1.9.1 are replaced by
others that call them.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import math
import os
import threading
import warnings
from typing import Any, Callable, Iterator, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, SymbolHandle

from gluonpar.runtime import interrupts

# A gradient that a pass will write: the head's recording, the array's owner, and its index there.
Written = Tuple["Recording", Any, int]

lock = threading.RLock()  # not held during a pass
owners: dict[str, tuple[Any, int]] = {}  # by the name of an array with a gradient; see own()
_MOST_RECORDINGS = 2048  # this many are kept, in one or two megabytes
_MOST_ENDED = 8  # threads that may call backward and end before a warning
_num_ended = 0
_passing: list[threading.Thread] = []  # that have called backward, and had not ended then
# Functions called before a pass that writes something, with what it writes and the handles of its
# heads. They return a function that is called after the pass.
observers: list[Callable[[Sequence[Written], Sequence[int]], Callable[[], None]]] = []
_marker: mx.nd.NDArray  # reshaping it makes a node of the graph, and computes nothing
_backward, _attach = _LIB.MXAutogradBackwardEx, _LIB.MXAutogradMarkVariables
_set_recording, _ONE = _LIB.MXAutogradSetIsRecording, (ctypes.c_int64 * 1)(1)


class Recording:
    """A thread's recording. ``part`` is for an observer's use."""

    def __init__(self, thread: int | None = None) -> None:
        self.thread, self.depth, self.end = thread, this_thread.depth, math.inf
        self.part: Any = None
        self.has_failed = False  # whether one of the tasks that it consists of has failed


class _Thread(threading.local):
    recording: Recording | None = None  # the one that has not ended
    joint: Recording | None = None  # what all passes count as, whatever computed their heads
    round: Any = None  # the round of tasks that calls this thread; it is told when a pass begins
    depth = 0  # number of autograd's scopes that have not been left
    has_passed = False  # whether it has called backward

    def __init__(self) -> None:
        self.program = threading.get_ident()  # in a device's thread, the thread that called it


this_thread = _Thread()


def own(owner: Any, arrays: Sequence[mx.nd.NDArray]) -> list[mx.sym.Symbol]:
    """Make ``owner`` the only owner of ``arrays``, and return the arrays' variables.

    From now on the observers are given ``owner`` and the array's index when a pass writes one of
    the gradients, and signal handlers wait until a pass has ended. When a gradient is attached to
    one of the arrays again, ``owner.renew()`` is called.
    """
    _watch()
    variables: list[Any] = [graph_of(array.handle) for array in arrays]
    owners.update((variable.name, (owner, i)) for i, variable in enumerate(variables))
    return variables


def disown(owner: Any, variables: Sequence[mx.sym.Symbol]) -> None:
    """Undo :func:`own` for each array that no other owner has taken since."""
    for name in [variable.name for variable in variables]:
        if owners.get(name, (None,))[0] is owner:
            owners.pop(name, None)  # the collector may have disowned it just now


def _watch() -> None:
    global _marker
    if _LIB.MXAutogradBackwardEx is _backward:
        with autograd.pause():
            _marker = mx.nd.zeros((1,), ctx=mx.cpu(0))
            _marker.attach_grad()
        _LIB.MXAutogradBackwardEx, _LIB.MXAutogradMarkVariables = _watched_pass, _watched_attach
        _LIB.MXAutogradSetIsRecording = _watched_switch


@contextlib.contextmanager
def one_recording() -> Iterator[Recording]:
    """Yield a recording, which all passes that this thread makes in the scope count as."""
    before, this_thread.joint = this_thread.joint, Recording()
    try:
        yield this_thread.joint
    finally:
        this_thread.joint = before


def graph_of(handle: int | NDArrayHandle) -> mx.sym.Symbol | None:
    """Return the graph that computed the array, its variable if it has a gradient, or None."""
    graph = SymbolHandle()
    is_none = _LIB.MXAutogradGetSymbol(NDArrayHandle.from_param(handle), ctypes.byref(graph))
    return None if is_none else mx.sym.Symbol(graph)


def _written(heads: Sequence[int]) -> list[Written]:
    """Return what a pass from these heads will write: nothing if MXNet will refuse a head."""
    by_recording: dict[Recording, list[mx.sym.Symbol]] = {}
    for graph in map(graph_of, heads):
        if graph is None:
            return []
        recording = this_thread.joint or _recording_of(graph.name)
        by_recording.setdefault(recording, []).append(graph)
    written = []
    for recording, graphs in by_recording.items():
        found = filter(None, map(owners.get, mx.sym.Group(graphs).list_arguments()))
        written += [(recording, *each) for each in found]
    return written


def _recording_of(node: str) -> Recording:
    """Return the recording a node belongs to.

    If several threads were recording: this program's, if it was, else the one that began last.
    """
    position = int(node[5:]) if node.startswith("node_") else 0
    found = None
    with lock:
        for i in range(bisect.bisect(_recordings, (position,)) - 1, -1, -1):
            recording = _recordings[i][1]
            if position <= recording.end:
                if recording.thread == this_thread.program:
                    return recording
                found = found or recording
        return found or _recordings[0][1]


def _number(argument: Any) -> int:  # an int, or one of ctypes' objects
    return getattr(argument, "value", argument)


@functools.wraps(_backward)
def _watched_pass(*arguments: Any) -> int:
    num_heads, heads, _, num_variables = arguments[:4]
    if this_thread.round:
        this_thread.round.begin_pass()
    if not this_thread.has_passed:
        _note_thread()
    if _number(num_variables):  # it is autograd.grad, which writes other arrays
        return _backward(*arguments)
    with interrupts.held():
        handles = ctypes.cast(heads, ctypes.POINTER(ctypes.c_void_p))
        of_heads = handles[: _number(num_heads)]
        written = _written(of_heads)
        ends = [begin_pass(written, of_heads) for begin_pass in observers] if written else []
        try:
            return _backward(*arguments)
        finally:
            for end_pass in ends:
                end_pass()


def _note_thread() -> None:
    """Count threads that have called backward and ended; warn once, if they are many."""
    global _num_ended
    this_thread.has_passed = True
    with lock:
        ended, before = [each for each in _passing if not each.is_alive()], _num_ended
        _passing[:] = [*({*_passing} - {*ended}), threading.current_thread()]
        _num_ended += len(ended)
    if before <= _MOST_ENDED < _num_ended:
        warnings.warn(
            f"{_num_ended} threads have called backward and ended. MXNet gives each thread a "
            "random generator that starts from seed 0, whatever mx.random.seed was given, and is "
            "never freed: all threads have drawn the same dropout masks, and 5 MB are kept for "
            "each. Call gluonpar.run_tasks instead, or keep the threads for all batches",
            RuntimeWarning,
            stacklevel=4,
        )


@functools.wraps(_attach)
def _watched_attach(num_arrays: Any, arrays: Any, *rest: Any) -> int:
    graphs = map(graph_of, arrays[: _number(num_arrays)])
    before = [graph.name for graph in graphs if graph is not None]
    result = _attach(num_arrays, arrays, *rest)
    for owner, _ in filter(None, map(owners.get, before)):
        owner.renew()
    return result


@functools.wraps(_set_recording)
def _watched_switch(is_recording: Any, before: Any) -> int:
    """Begin a recording, or end it on leaving the scope that began it."""
    is_on, recording = _number(is_recording), this_thread.recording
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
    node = NDArrayHandle()  # calling reshape in Python takes three times as long
    _LIB.MXNDArrayReshape64(_marker.handle, 1, _ONE, False, ctypes.byref(node))
    graph: Any = graph_of(node)
    _LIB.MXNDArrayFree(node)
    return int(graph.name[5:])


# Pairs of a recording's first node and the recording, in order. The first pair stands for all
# recordings that are not kept.
_recordings = [(-1, Recording())]
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
os.register_at_fork(after_in_child=_passing.clear)  # a child has none of its parent's threads
