"""A forked process computes as its parent does, and reports none of its parent's errors."""

from tests.support.processes import end_fork, run_fork

START = """
import os, signal, sys, threading
import gluonpar
import mxnet as mx

CTX = [mx.cpu(0), mx.cpu(1)]

def of(value):
    return [mx.nd.full((4 << 20,), value + i, ctx=c) for i, c in enumerate(CTX)]  # 16 MiB each

def total(data):
    gluonpar.allreduce(data)
    return [array[-1].asscalar() for array in data]

def forked(function, code=0):
    child = os.fork()
    if not child:
        signal.alarm(60)
        function()
        sys.exit(code)  # through what is done at the end of a process
    assert os.waitpid(child, 0)[1] == code << 8, "the child failed"
"""


def succeeds(program):
    assert run_fork(START + program + "\nprint('done')") == "done\n"


def test_large_sums_are_right_in_a_fork_in_a_fork_of_it_and_in_the_parent_again():
    succeeds("""
data = of(1)
assert total(data) == [3, 3]

def again(fork=lambda: None):
    assert total(data) == [6, 6] and total(of(4)) == [9, 9]  # known arrays, and new ones
    tasks = gluonpar.run_tasks(lambda a: a.sum(), [a[:3] for a in data], CTX)
    assert [t.asscalar() for t in tasks] == [18, 18]
    for array in data:
        array[:] = 3
    fork()
    gluonpar.allreduce(data)  # under way when the process ends

forked(lambda: again(lambda: forked(again, 7)), 3)
again()
""")


def test_a_fork_made_while_another_thread_holds_ctrl_c_back_can_be_interrupted():
    succeeds("""
from gluonpar.runtime import interrupts

def child():
    for _ in range(2):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            with interrupts.held():
                pass
        else:
            raise AssertionError("Ctrl-C was lost")
    os._exit(0)  # the thread that forked would not end the process

gluonpar.run_tasks(lambda _: forked(child), [0], CTX)  # on its device's thread
for held in (interrupts.held(), interrupts.held_while_waiting()):
    with held:
        thread = threading.Thread(target=forked, args=[child])
        thread.start()
        thread.join()
""")


def test_a_fork_computes_and_fails_though_another_thread_holds_locks():
    succeeds("""
from gluonpar.batch_norm import device_sums
from gluonpar.runtime import engine

held, go_on = threading.Event(), threading.Event()
def hold():
    with engine._failing, device_sums.lock:
        held.set()
        go_on.wait()

def child():
    tasks = gluonpar.run_tasks(lambda i: mx.nd.ones((1,)) * i, [1, 2], CTX)
    a = mx.nd.zeros((1,))
    engine.push(lambda: 1 / 0, mx.cpu(0), writes=[a])
    try:
        a.wait_to_read()
    except mx.MXNetError:
        os._exit(0)

threading.Thread(target=hold).start()
held.wait()
forked(child)
go_on.set()
""")


def test_an_error_that_reached_no_caller_is_printed_once_and_the_parents_exit_code():
    program = """
from gluonpar.runtime import engine
sys.last_type = KeyError  # of an earlier cell, as in a notebook
a = mx.nd.zeros((1,))
a.wait_to_read()
engine.push(lambda: 1 / 0, mx.cpu(0), writes=[a])
forked(lambda: None)
print("went on")
"""
    done = end_fork(START + program)
    assert (done.returncode, done.stdout) == (1, "went on\n")
    assert done.stderr.count("ZeroDivisionError: ") == 1
