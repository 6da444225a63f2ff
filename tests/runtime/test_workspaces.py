"""From when gluonpar is given several CPU contexts on, none waits for another's workspaces."""

import pytest
from processes import run_python

from gluonpar.install import compatibility

# On context 0 a function waits for `seconds`, then 100 sums for it; then there is one on context 1.
PROGRAM = """
import sys, threading
{first}
import gluonpar
import mxnet as mx
from gluonpar.runtime import engine

def sum_comes_in_time(seconds):
    held, in_time = threading.Event(), []
    x, y = (mx.nd.ones((8,), ctx=mx.cpu(i)) for i in range(2))
    mx.nd.waitall()
    engine.push(lambda: in_time.append(held.wait(seconds)), mx.cpu(0), writes=[x])
    for _ in range(100):
        mx.nd.sum(x)
    total = mx.nd.sum(y)
    engine.push(held.set, mx.cpu(1), writes=[total])
    mx.nd.waitall()
    return in_time == [True]

def give_contexts():
    gluonpar.split_and_load(mx.nd.ones((2, 1)), [mx.cpu(0), mx.cpu(1)])
{then}
"""
BOTH = """
before = sum_comes_in_time(0.2)
give_contexts()
print(before, sum_comes_in_time(60))
"""
ON_A_THREAD = """
give_contexts()
printed = []
def work():
    mx.random.uniform(shape=(3,)).wait_to_read()
    give_contexts()
    printed.append(sum_comes_in_time(60))
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(*printed)
"""
# gluonpar's module that lets MXNet be imported, without the rest of gluonpar.
LATE = f"import runpy; runpy.run_path({compatibility.__file__!r})['install']()\n"
LATE += "import mxnet; mxnet.random.uniform(shape=(3,)).asnumpy()"
READ = "import ctypes; print(ctypes.CDLL(None).getenv(b'MXNET_CPU_TEMP_COPY') or None)"
FEW = {"MXNET_CPU_TEMP_COPY": "7"}


@pytest.mark.parametrize(
    ("first", "then", "variables", "printed"),
    [
        ("", BOTH, {}, "False True"),
        (LATE, BOTH, {}, "False True"),
        ("", ON_A_THREAD, {}, "True"),
        ("", BOTH.replace("60", "0.2"), FEW, "False False"),
        ("", BOTH + READ, {}, "None"),
    ],
    ids=["import", "after operators", "another thread", "set by the user", "environment"],
)
def test_contexts_share_workspaces_until_gluonpar_is_given_several(first, then, variables, printed):
    done = run_python(PROGRAM.format(first=first, then=then), **variables)
    assert done.splitlines()[-1] == printed
