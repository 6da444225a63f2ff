"""Threads of CPU contexts: an even share of the processors, never more than the user set."""

import os

import pytest

from tests.support.processes import run_python

PRELUDE = """
import ctypes, os, gluonpar, mxnet as mx
from gluonpar.runtime import engine, threads
threads.cores = lambda: 12
gomp = ctypes.CDLL("libgomp.so.1")
def team(i):
    found, marker = [], mx.nd.empty((1,), ctx=mx.cpu(i))
    engine.push(lambda: found.append(gomp.omp_get_max_threads()), mx.cpu(i), writes=[marker])
    marker.wait_to_read()
    return found[0]
def cpus(k):
    return [mx.cpu(i) for i in range(k)]
"""


def python(program, OMP_NUM_THREADS=None):
    """Return the words that ``program`` prints, in a process whose engine has not started."""
    return run_python(PRELUDE + program, OMP_NUM_THREADS=OMP_NUM_THREADS).split()


def test_teams_have_even_shares_shrink_when_more_contexts_come_and_never_grow():
    program = (
        "shown = []\n"
        "for k in (1, 2, 5, 12, 1):\n"
        "    threads.share(cpus(k)); shown += [team(0), team(k - 1)]\n"
        "print(*shown)"
    )
    # A worker starts with at most the machine's processors, which may be fewer than the share.
    shares = [min(share, os.cpu_count()) for share in (12, 12, 6, 6, 2, 2, 1, 1, 1, 1)]
    assert python(program) == [*map(str, shares)]


def test_a_limit_holds_also_for_contexts_that_have_had_their_share():
    """A rank learns its limit from the others, which may be after its first batch was split."""
    program = (
        "threads.share(cpus(1)); team(0); threads.limit(1); threads.cores = lambda: 1;"
        "threads.share(cpus(1)); print(team(0))"
    )
    assert python(program) == ["1"]


@pytest.mark.parametrize(
    "call",
    [
        "gluonpar.split_and_load(mx.nd.ones((12, 1)), cpus(12))",
        "gluonpar.run_tasks(mx.nd.sum, [mx.nd.ones((1,), ctx=c) for c in cpus(12)], cpus(12))",
        "gluonpar.allreduce([mx.nd.ones((1,), ctx=c) for c in cpus(12)])",
        # Before the parameters' shapes are known.
        "net = mx.gluon.nn.Dense(1); net.initialize(ctx=cpus(12));"
        "gluonpar.Trainer(net.collect_params(), 'sgd')",
    ],
)
def test_the_first_call_on_several_contexts_shares_the_processors(call):
    assert python(f"mx.nd.ones((1,)).wait_to_read(); {call}; print(team(0), team(11))") == ["1"] * 2


@pytest.mark.slow
def test_a_fork_restarts_all_workers_and_they_keep_their_share():
    """Also those of contexts that were never shared, and of new ones."""
    program = (
        "mx.nd.ones((4,)).wait_to_read(); team(20); threads.share(cpus(12));"
        "before = team(0), team(11); child = os.fork(); child or os._exit(0); os.waitpid(child, 0);"
        "print(*before, team(0), team(11), team(20), team(21))"
    )
    assert python(program) == ["1"] * 6


@pytest.mark.slow
def test_the_users_own_number_is_kept():
    assert python("threads.share(cpus(1)); print(team(0))", OMP_NUM_THREADS="3") == ["3"]


@pytest.mark.slow
def test_shrinking_between_steps_is_safe_for_cached_operators():
    """Growing a team crashes oneDNN's cached operators; what share() does must not."""
    program = (
        "import numpy as np\n"
        "for k in (1, 3, 2, 1, 4, 1):\n"
        "    params = [gluonpar.get_params(gluonpar.init_lenet(), c) for c in cpus(k)]\n"
        "    for n in (16, 9):\n"
        "        X, y = np.zeros((n, 1, 28, 28), 'float32'), np.zeros(n, 'float32')\n"
        "        gluonpar.train_batch(X, y, params, cpus(k), 0.1)\n"
        "mx.nd.waitall(); print('trained')"
    )
    assert python(program) == ["trained"]
