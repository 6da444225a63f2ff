"""A Python function as an operator of MXNet's engine: order, errors, fork, exit."""

import gc
import threading
import weakref

import mxnet as mx
import numpy as np
import pytest

from gluonpar.runtime import engine, memory
from tests.support.processes import end_fork

WAYS = {"worker": {}, "prioritized": {"prioritized": True}, "inline": {"inline": True}}
all_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
on_other_threads = pytest.mark.parametrize("way", [*WAYS.values()][:2], ids=[*WAYS][:2])


def arrays(*ids):
    """An array of one zero on each of these CPU contexts, and NumPy views of them."""
    made = [mx.nd.zeros((1,), ctx=mx.cpu(i)) for i in ids]
    mx.nd.waitall()
    return made, [memory.view(array) for array in made]


@all_ways
def test_it_runs_between_the_operators_before_and_after_it(way):
    """In turns with operators of two workers: x -> 2 (x + 1) - 1 on both, 20 times."""
    (a, b), (of_a, of_b) = arrays(0, 1)

    def double():
        of_b[:] = 2 * of_a
        of_a[:] = of_b

    for _ in range(20):
        a += 1
        engine.push(double, mx.cpu(1), writes=[a, b], **way)
        a -= 1
        b -= 1
    assert a.asscalar() == b.asscalar() == 2**20 - 1


@on_other_threads
def test_a_reader_runs_after_the_last_writer_and_before_the_next(way):
    (source, target), (of_source, of_target) = arrays(1, 2)
    pushed, seen = threading.Event(), []

    def fill():
        pushed.wait(600)
        of_source[:] = 5

    def read():
        seen.append(of_source[0])
        of_target[:] = of_source

    engine.push(fill, mx.cpu(1), writes=[source], **way)
    engine.push(read, mx.cpu(2), reads=[source], writes=[target], **way)
    source[:] = 9  # waits for the reader
    pushed.set()
    assert (target.asscalar(), source.asscalar(), seen) == (5, 9, [5])


def test_an_array_may_be_named_twice_and_be_a_view():
    """The engine itself would wait forever for a variable that it was given twice."""
    array = mx.nd.zeros((4,))
    array.wait_to_read()
    view = memory.view(array)
    engine.push(
        lambda: view.fill(3), mx.cpu(0), reads=[array, array[1:]], writes=[array, array[:2]]
    )
    np.testing.assert_array_equal(array.asnumpy(), [3] * 4)


class Planted(Exception):
    pass


@all_ways
@pytest.mark.parametrize("error", [Planted, SystemExit])
def test_an_error_reaches_the_next_wait_with_its_traceback_and_the_engine_goes_on(error, way):
    [array], [memory] = arrays(3)

    def fail_here():
        raise error("planted")

    for _ in range(6):  # more than there are threads for prioritized operators
        engine.push(fail_here, mx.cpu(3), writes=[array], **way)
        with pytest.raises(mx.MXNetError, match="planted") as caught:
            (array + 1).wait_to_read()
        assert error.__name__ in str(caught.value) and "fail_here" in str(caught.value)
    mx.nd.waitall()
    engine.push(lambda: memory.fill(3), mx.cpu(3), writes=[array], **way)
    assert array.asscalar() == 3


@on_other_threads
def test_two_thousand_functions_pushed_from_four_threads_all_run_and_are_freed(way):
    made, views = arrays(*range(4))
    functions = []

    def push_many():
        for step in range(500):
            i = step % 4

            def count(i=i):
                views[i][:] += 1

            functions.append(weakref.ref(count))
            engine.push(count, mx.cpu(i), writes=[made[i]], **way)

    threads = [threading.Thread(target=push_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [array.asscalar() for array in made] == [500] * 4
    del threads
    gc.collect()
    assert len(functions) == 2000 and not any(function() for function in functions)


@pytest.mark.parametrize("ctx", [mx.cpu(0), mx.cpu(3)], ids=str)
def test_a_prioritized_function_does_not_queue_behind_the_contexts_operators(ctx):
    """The context's worker waits for what is pushed after its operator."""
    (held, other), _ = arrays(ctx.device_id, ctx.device_id)
    released, passed = threading.Event(), []
    engine.push(lambda: passed.append(released.wait(60)), ctx, writes=[held])
    engine.push(released.set, ctx, writes=[other], prioritized=True)
    held.wait_to_read()
    assert passed == [True]


def python(program):
    start = "import gluonpar, os, sys, mxnet as mx\nfrom gluonpar.runtime import engine\n"
    return end_fork(start + program)


def test_functions_pending_at_exit_run_and_errors_are_printed():
    done = python(
        "a = mx.nd.zeros((1,))\n"
        "engine.push(lambda: print('ran', flush=True), mx.cpu(0), writes=[a])\n"
        "engine.push(lambda: 1 / 0, mx.cpu(0), writes=[a])\n"
        "engine.push(lambda: print('after the error', flush=True), mx.cpu(0), writes=[a])\n"
    )
    assert (done.returncode, done.stdout) == (1, "ran\n")
    assert "ZeroDivisionError" in done.stderr


FAIL = """
    try:
        mx.nd.waitall()
    except mx.MXNetError as error:
        assert 'planted' in str(error)
    else:
        raise AssertionError('no error')
print('whole')
"""
ARRAYS = """
import concurrent.futures, queue
for _ in range(40):
    arrays = [mx.nd.zeros((1,), ctx=mx.cpu(i % 4)) for i in range(250)]
    begun = queue.Queue()
    for array in arrays:
        engine.push(begun.put, array.context, writes=[array], ends_by_call=True)
    results = [array + 1 for array in arrays for _ in range(8)]
    completes = [begun.get() for _ in arrays]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for i in range(4):
            threads.submit(lambda part: [complete('planted') for complete in part], completes[i::4])
"""
CUSTOM = """
import queue

class Operator(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        where, self.kept = mx.cpu(int(in_data[1].asnumpy()[0])), out_data
        how = {'prioritized': True, 'ends_by_call': True, 'settles': out_data}
        engine.push(begun.put, where, writes=out_data, **how)

@mx.operator.register('planted')
class Properties(mx.operator.CustomOpProp):
    def list_arguments(self):
        return ['values', 'number']

    def create_operator(self, ctx, shapes, dtypes):
        return Operator()

begun = queue.Queue()
inputs = [(mx.nd.ones((4,), c), mx.nd.full((4,), c.device_id, c)) for c in map(mx.cpu, range(8))]
for _ in range(1000):
    results = [mx.nd.Custom(*arrays, op_type='planted') for arrays in inputs]
    completes = [begun.get() for _ in inputs]
    for complete in completes:
        complete('planted')
"""
QUEUED = """
import queue
begun, kept, go_on = queue.Queue(), [mx.nd.zeros((1,), mx.cpu(i)) for i in range(2)], queue.Queue()
for _ in range(1):
    how = {'ends_by_call': True, 'settles': kept}
    engine.push(begun.put, mx.cpu(0), writes=[kept[0]], **how)
    engine.push(lambda: go_on.get(), mx.cpu(1), writes=[kept[1]])  # before the next error is told
    others = [mx.nd.zeros((1,)) for _ in range(3000)]
    for other in others:
        engine.push(begun.put, mx.cpu(0), writes=[other], ends_by_call=True)
    for complete in [begun.get() for _ in range(3001)]:
        complete('planted')
    go_on.put(None)
"""


@pytest.mark.parametrize(
    "program",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (ARRAYS, CUSTOM)), QUEUED],
    ids=["arrays", "custom operators, which list errors of their own", "many behind one"],
)
def test_operators_that_fail_at_the_same_time_leave_the_process_whole(program):
    """MXNet lists errors without a lock; operators that depend on a failed one look there, too."""
    done = python(program + FAIL[1:])
    assert done.stdout == "whole\n", done.stderr


def test_a_function_that_raises_after_it_has_ended_the_operator_ends_it_once():
    """The engine has freed the operator by then."""
    done = python("""
def end_and_raise(complete):
    complete()
    raise ValueError

array = mx.nd.zeros((1,))
for _ in range(100):
    engine.push(end_and_raise, mx.cpu(), writes=[array], ends_by_call=True)
    array += 1
print(array.asscalar())
""")
    assert (done.returncode, done.stdout) == (0, "100.0\n"), done.stderr


def test_an_error_whose_text_is_not_utf8_is_raised_and_the_operator_ends():
    done = python("""
import signal
signal.alarm(100)

def fail():
    raise OSError("cannot read \\udcff\\0.rec")  # os.fsdecode() of such a file's name

for way in ({}, {"prioritized": True}, {"inline": True}):
    array = mx.nd.zeros((1,))
    array.wait_to_read()
    engine.push(fail, mx.cpu(0), writes=[array], **way)
    try:
        array.wait_to_read()
    except mx.MXNetError as error:
        print(str(error).splitlines()[-1])
""")
    assert done.stdout == "OSError: cannot read \\udcff\\0.rec\n" * 3, done.stderr


def test_processes_are_started_while_functions_need_the_gil():
    """Up to Python 3.9 subprocess forks, as os.fork does."""
    done = python(
        "import gluonpar, subprocess\n"
        "data = [mx.nd.ones((300_000,), mx.cpu(i)) for i in range(2)]\n"
        "for _ in range(20):\n"
        "    for _ in range(40):\n"
        "        gluonpar.allreduce(data, op='max')\n"
        "    subprocess.run(['true'], check=True)\n"
        "print('went on')\n"
    )
    assert done.stdout == "went on\n", done.stderr
