"""threads.run: every block once; an error is raised when no thread uses the arrays."""

import threading

import numpy as np
import pytest

from gluonpar.runtime import threads


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of four float32, and one thread per byte: sizes that a test can count."""
    monkeypatch.setattr(threads, "BLOCK_BYTES", 16)
    monkeypatch.setattr(threads, "BYTES_PER_THREAD", 1)


@pytest.fixture
def pool_of_three(monkeypatch):
    """The pool of a machine with four processors."""
    monkeypatch.setattr(threads, "cores", lambda: 4)
    made = threads.pool.__wrapped__()
    monkeypatch.setattr(threads, "pool", lambda: made)


def increment(*blocks):
    assert blocks[0].nbytes <= threads.BLOCK_BYTES
    assert len({block.size for block in blocks}) == 1  # cut in the same places
    for factor, block in enumerate(blocks, 1):
        block += factor


@pytest.mark.parametrize("max_threads", [None, 1, 2, 5])
@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "float64", "int8"]], ids=len)
def test_every_element_is_processed_exactly_once(tiny_blocks, max_threads, dtypes):
    sizes = [0, 1, 3, 4, 5, 7, 8, 9, 100]
    arrays = [[np.zeros(n, dtype) for dtype in dtypes] for n in sizes]
    threads.run([(increment, of_task) for of_task in arrays], 1 << 20, max_threads)
    for of_task, n in zip(arrays, sizes):
        for factor, array in enumerate(of_task, 1):
            np.testing.assert_array_equal(array, np.full(n, factor))


class Planted(SystemExit):  # which would silently end a thread of the pool
    pass


def run_on_two(function):
    array = np.zeros(2 * threads.BLOCK_BYTES // 4, "float32")
    threads.run([(function, [array])], threads.BYTES_PER_THREAD, max_threads=2)
    return array


@pytest.mark.parametrize("failing", ["the calling thread", "a pool thread"])
def test_an_error_is_raised_when_no_thread_uses_the_arrays(pool_of_three, failing):
    """One thread fails while the other is inside its block; run returns after the other."""
    caller, failed, left = threading.get_ident(), threading.Event(), []
    both = threading.Barrier(2)

    def fail_on_one(_block):
        both.wait(600)
        here = "the calling thread" if threading.get_ident() == caller else "a pool thread"
        if here == failing:
            failed.set()
            raise Planted(here)
        assert failed.wait(600)
        left.append(here)

    with pytest.raises(Planted, match=failing):
        run_on_two(fail_on_one)
    assert len(left) == 1


def test_overflow_gives_inf_and_no_warning(pool_of_three):
    both = threading.Barrier(2)

    def overflow(block):
        both.wait(600)  # so each thread does one: NumPy's settings are per thread
        block += np.float32(3e38)
        block += np.float32(3e38)

    assert np.isinf(run_on_two(overflow)).all()
