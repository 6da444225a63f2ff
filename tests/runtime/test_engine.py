"""A Python function as an operator of MXNet's engine: order, errors, exit."""

import subprocess
import sys
import threading

import mxnet as mx
import numpy as np
import pytest

from gluonpar.runtime import engine, memory


def view(array):
    array.wait_to_read()
    return memory.view(array)


def test_push_returns_before_the_function_has_run():
    gate, array = threading.Event(), mx.nd.zeros((1,))
    memory = view(array)

    def function():
        gate.wait()
        memory[:] = 7

    engine.push(function, mx.cpu(0), writes=[array])
    gate.set()  # push is behind us and the function cannot have finished before this line
    assert array.asscalar() == 7


def test_it_runs_between_the_operators_before_and_after_it():
    array = mx.nd.zeros((1000,), ctx=mx.cpu(1))
    memory = view(array)
    for _ in range(100):
        array += 1

        def double():
            memory[:] *= 2

        engine.push(double, mx.cpu(1), writes=[array])
        array -= 1
    want = 0.0
    for _ in range(100):
        want = np.float32(np.float32((want + 1) * 2) - 1)
    np.testing.assert_array_equal(array.asnumpy(), np.full(1000, want, "float32"))


def test_a_reader_waits_for_arrays_of_other_contexts():
    source, target = mx.nd.zeros((1,), ctx=mx.cpu(1)), mx.nd.zeros((1,), ctx=mx.cpu(2))
    inputs, output = view(source), view(target)
    gate = threading.Event()
    engine.push(gate.wait, mx.cpu(1), writes=[source])
    source += 5

    def copy():
        output[:] = inputs

    engine.push(copy, mx.cpu(2), reads=[source], writes=[target])
    gate.set()
    assert target.asscalar() == 5


def test_it_runs_on_the_contexts_worker_thread():
    seen = {}
    arrays = [mx.nd.zeros((1,), ctx=mx.cpu(i)) for i in (0, 1, 1)]
    for i, array in enumerate(arrays):

        def note(i=i):
            seen[i] = threading.get_ident()

        engine.push(note, array.context, writes=[array])
    mx.nd.waitall()
    assert seen[1] == seen[2] != seen[0]
    assert threading.get_ident() not in seen.values()


class Planted(Exception):
    pass


@pytest.mark.parametrize("error", [Planted, KeyboardInterrupt, MemoryError, SystemExit])
def test_an_error_reaches_whoever_waits_with_its_traceback(error):
    array = mx.nd.zeros((3,))

    def fail_here():
        raise error("planted")

    engine.push(fail_here, mx.cpu(0), writes=[array])
    dependent = array + 1
    with pytest.raises(mx.MXNetError, match="(?s)planted.*|fail_here.*") as caught:
        dependent.wait_to_read()
    assert error.__name__ in str(caught.value)
    assert "fail_here" in str(caught.value)
    mx.nd.waitall()
    assert (array.asnumpy() == 0).all()  # and the engine goes on


def test_ten_thousand_pushes_leave_nothing_behind():
    array = mx.nd.zeros((1,))
    memory = view(array)

    def count():
        memory[:] += 1

    for _ in range(10_000):
        engine.push(count, mx.cpu(0), writes=[array])
    assert array.asscalar() == 10_000
    assert not engine._pending


def test_pushing_from_several_threads():
    array = mx.nd.zeros((1,))
    memory = view(array)

    def count():
        memory[:] += 1

    def push_many():
        for _ in range(500):
            engine.push(count, mx.cpu(0), writes=[array])

    threads = [threading.Thread(target=push_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert array.asscalar() == 2000


def python(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )


def test_what_is_pending_at_exit_still_runs_and_its_error_is_heard():
    done = python(
        "import gluonpar, mxnet as mx\n"
        "from gluonpar.runtime import engine\n"
        "a = mx.nd.zeros((1,))\n"
        "engine.push(lambda: print('ran', flush=True), mx.cpu(0), writes=[a])\n"
        "engine.push(lambda: 1 / 0, mx.cpu(0), writes=[a])\n"
    )
    assert (done.returncode, done.stdout) == (1, "ran\n")
    assert "ZeroDivisionError" in done.stderr


def test_what_comes_after_an_error_is_not_run_and_not_waited_for_at_exit():
    done = python(
        "import gluonpar, mxnet as mx\n"
        "from gluonpar.runtime import engine\n"
        "a = mx.nd.zeros((1,))\n"
        "engine.push(lambda: 1 / 0, mx.cpu(0), writes=[a])\n"
        "engine.push(lambda: print('ran', flush=True), mx.cpu(0), writes=[a])\n"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr


def test_large_sums_pending_at_exit_leave_in_peace():
    done = python(
        "import gluonpar, mxnet as mx\n"
        "a = [mx.nd.ones((9_000_000,), ctx=mx.cpu(i)) for i in range(2)]\n"
        "for _ in range(3): gluonpar.allreduce(a)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("function", "code"), [("sum(range(10**6))", 0), ("1 / 0", 1)])
def test_a_fork_waits_for_the_functions_of_workers_who_need_pythons_lock(function, code):
    """And an error that nobody has heard of is told."""
    done = python(
        "import gluonpar, os, sys, mxnet as mx\n"
        "from gluonpar.runtime import engine\n"
        "sys.last_type = KeyError  # of an earlier cell, as in a notebook\n"
        "a = mx.nd.zeros((1,))\n"
        "a.wait_to_read()\n"
        f"engine.push(lambda: {function}, mx.cpu(0), writes=[a])\n"
        "child = os.fork() or os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('went on')\n"
    )
    assert (done.returncode, done.stdout) == (code, "went on\n")
    assert ("ZeroDivisionError" in done.stderr) == bool(code)


def test_has_started():
    done = python(
        "import gluonpar, mxnet as mx\n"
        "from gluonpar.runtime import engine\n"
        "before = engine.has_started()\n"
        "mx.nd.zeros((1,))\n"
        "print(before, engine.has_started())\n"
    )
    assert done.stdout == "False True\n", done.stderr


class TestBeside:
    """``push(prioritized=True)``: on another thread, with the same order and the same errors."""

    def arrays(self, *ids):
        found = [mx.nd.zeros((1,), ctx=mx.cpu(i)) for i in ids]
        return found, [view(array) for array in found]

    @pytest.mark.parametrize("ctx", [mx.cpu(0), mx.cpu(3)], ids=str)
    def test_it_runs_while_the_contexts_worker_is_busy(self, ctx):
        """The worker waits for what is pushed after its operator: a queue would wait for ever."""
        (held, other), _ = self.arrays(ctx.device_id, ctx.device_id)
        released, passed = threading.Event(), []
        engine.push(lambda: passed.append(released.wait(600)), ctx, writes=[held])
        engine.push(released.set, ctx, writes=[other], prioritized=True)
        held.wait_to_read()
        assert passed == [True]

    def test_without_it_the_worker_would_come_first(self):
        """So the test above does show what it says: the same, pushed the ordinary way."""
        (held, other), _ = self.arrays(5, 5)
        released, passed = threading.Event(), []
        engine.push(lambda: passed.append(released.wait(0.3)), mx.cpu(5), writes=[held])
        engine.push(released.set, mx.cpu(5), writes=[other])
        held.wait_to_read()
        other.wait_to_read()
        assert passed == [False]

    def test_four_at_a_time_run_side_by_side(self):
        found, _ = self.arrays(0, 0, 1, 2)
        together, passed = threading.Barrier(4), []

        def meet():
            passed.append(together.wait(600))

        for array in found:
            engine.push(meet, array.context, writes=[array], prioritized=True)
        for array in found:
            array.wait_to_read()
        assert sorted(passed) == [0, 1, 2, 3]

    def test_push_returns_before_it_has_run(self):
        [array], [memory] = self.arrays(0)
        gate = threading.Event()

        def function():
            gate.wait(600)
            memory[:] = 7

        engine.push(function, mx.cpu(0), writes=[array], prioritized=True)
        gate.set()
        assert array.asscalar() == 7

    def test_it_is_ordered_by_the_arrays_it_touches(self):
        """In turns with operators of two workers: x -> (2 (x + 1) - 1) on both, 20 times."""
        (a, b), (of_a, of_b) = self.arrays(0, 1)

        def double():
            of_b[:] = 2 * of_a
            of_a[:] = of_b

        for _ in range(20):
            a += 1
            engine.push(double, mx.cpu(1), writes=[a, b], prioritized=True)
            a -= 1
            b -= 1
        want = 0
        for _ in range(20):
            want = 2 * (want + 1) - 1
        assert a.asscalar() == b.asscalar() == want == 2**20 - 1

    def test_readers_and_writers_do_not_overtake(self):
        (source, target), (of_source, of_target) = self.arrays(1, 2)
        gate, seen = threading.Event(), []

        def fill():
            gate.wait(600)
            of_source[:] = 5

        def read():
            seen.append(of_source[0])
            of_target[:] = of_source

        engine.push(fill, mx.cpu(1), writes=[source], prioritized=True)
        engine.push(read, mx.cpu(2), reads=[source], writes=[target], prioritized=True)
        source[:] = 9  # waits for the reader
        gate.set()
        assert (target.asscalar(), source.asscalar(), seen) == (5, 9, [5])

    @pytest.mark.parametrize("error", [Planted, KeyboardInterrupt, SystemExit])
    def test_an_error_reaches_whoever_waits_and_the_thread_lives_on(self, error):
        [array], [memory] = self.arrays(1)

        def fail_beside():
            raise error("planted")

        for _ in range(6):  # more than there are threads
            engine.push(fail_beside, mx.cpu(1), writes=[array], prioritized=True)
            with pytest.raises(mx.MXNetError, match="planted") as caught:
                (array + 1).wait_to_read()
            assert "fail_beside" in str(caught.value)
        engine.push(lambda: memory.fill(3), mx.cpu(1), writes=[array], prioritized=True)
        assert array.asscalar() == 3

    def test_a_thousand_leave_nothing_behind(self):
        found, views = self.arrays(*range(4))

        def count(i):
            views[i][:] += 1

        for step in range(1000):
            i = step % 4
            engine.push(lambda i=i: count(i), mx.cpu(i), writes=[found[i]], prioritized=True)
        assert [array.asscalar() for array in found] == [250] * 4
        assert not engine._pending
