"""threads.run: every block once, on the number of threads that pays; errors end the work."""

import threading

import numpy as np
import pytest

from gluonpar.runtime import threads


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of four float32, and one thread per byte: sizes that a test can count."""
    monkeypatch.setattr(threads, "BLOCK_BYTES", 16)
    monkeypatch.setattr(threads, "BYTES_PER_THREAD", 1)


@pytest.fixture(scope="module")
def three_threads():
    """The pool of a machine with four processors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "cores", lambda: 4)
        return threads.pool.__wrapped__()


@pytest.fixture
def pool_of_three(monkeypatch, three_threads):
    """That pool; gives an event for each function that it is given, set when it has returned."""
    returned = []

    class Recording:
        @staticmethod
        def put(function):
            returned.append(threading.Event())
            three_threads.put(lambda event=returned[-1]: (function(), event.set()))

    monkeypatch.setattr(threads, "pool", Recording)
    return returned


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


def threads_used(num_bytes, max_threads, num_blocks=64):
    """The number of threads that take blocks: each waits for the expected others in its first."""
    expected = min(max_threads, 1 + num_bytes // threads.BYTES_PER_THREAD, num_blocks)
    barrier = threading.Barrier(expected)
    seen = set()

    def note(_block):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            barrier.wait(600)

    array = np.zeros(num_blocks * threads.BLOCK_BYTES // 4, "float32")
    threads.run([(note, [array])], num_bytes, max_threads)
    return len(seen)


@pytest.mark.parametrize(
    ("megabytes", "most", "num_blocks", "want"),
    [(15, 4, 64, 1), (16, 4, 64, 2), (47, 4, 64, 3), (500, 3, 64, 3), (500, 4, 2, 2)],
)
def test_one_thread_per_sixteen_megabytes_up_to_the_maximum(
    monkeypatch, pool_of_three, megabytes, most, num_blocks, want
):
    monkeypatch.setattr(threads, "BLOCK_BYTES", 1 << 10)
    assert threads_used(megabytes << 20, most, num_blocks) == want
    assert len(pool_of_three) == want - 1  # and no other thread was given work


class Planted(SystemExit):  # which would silently end a thread of the pool
    pass


def run_on_two(function, num_blocks=2):
    array = np.zeros(num_blocks * threads.BLOCK_BYTES // 4, "float32")
    threads.run([(function, [array])], threads.BYTES_PER_THREAD, max_threads=2)
    return array


@pytest.mark.parametrize("failing", ["the calling thread", "a pool thread"])
def test_an_error_is_raised_when_no_thread_uses_the_arrays(pool_of_three, failing):
    """One thread fails while the other is inside its block; run returns after that one left."""
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


def test_after_an_error_the_other_threads_take_no_more_blocks(pool_of_three):
    """The caller stays in its first block until the pool thread has given up."""
    caller, calls, both = threading.get_ident(), [], threading.Barrier(2)

    def fail_elsewhere(_block):
        if not calls:
            both.wait(600)
        if threading.get_ident() != caller:
            raise Planted("on a pool thread")
        calls.append(pool_of_three[0].wait(600))

    with pytest.raises(Planted):
        run_on_two(fail_elsewhere, num_blocks=8)
    assert len(calls) == 1


def test_overflow_gives_inf_and_no_warning(pool_of_three):
    both = threading.Barrier(2)

    def overflow(block):
        both.wait(600)  # so each thread does one: NumPy's settings are per thread
        block += np.float32(3e38)
        block += np.float32(3e38)

    assert np.isinf(run_on_two(overflow)).all()
