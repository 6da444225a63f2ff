"""blocks.work: every block once, on as many threads as it is worth, and errors end it."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluonpar.collectives.host import thread_pool


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of four float32, and a thread for every byte: sizes that a test can count."""
    monkeypatch.setattr(thread_pool, "BLOCK_BYTES", 16)
    monkeypatch.setattr(thread_pool, "BYTES_A_THREAD", 1)


def increment(*arrays):
    for factor, array in enumerate(arrays, 1):
        array += factor


SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 100]


@pytest.mark.parametrize("most_threads", [None, 1, 2, 5])
@pytest.mark.parametrize("num_arrays", [1, 3])
def test_every_element_is_worked_on_exactly_once(tiny_blocks, most_threads, num_arrays):
    arrays = [[np.zeros(n, "float32") for _ in range(num_arrays)] for n in SIZES]
    tasks = [(increment, of_task) for of_task in arrays]
    assert thread_pool.work(tasks, 1 << 20, most_threads) is None
    for of_task, n in zip(arrays, SIZES):
        for factor, array in enumerate(of_task, 1):
            np.testing.assert_array_equal(array, np.full(n, factor))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * thread_pool.BLOCK_BYTES // 8), max_size=5),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_blocks_cover_each_task_without_gap_or_overlap(sizes, dtype):
    seen = [np.zeros(n, dtype) for n in sizes]
    thread_pool.work([(increment, [array]) for array in seen], num_bytes=0)
    assert all((array == 1).all() for array in seen)


@pytest.mark.parametrize(("dtype", "elements"), [("float16", 8), ("float32", 4), ("float64", 2)])
def test_blocks_have_the_bytes_asked_for_and_the_last_one_the_rest(tiny_blocks, dtype, elements):
    lengths = []
    array = np.zeros(2 * elements + 1, dtype)
    thread_pool.work([(lambda block: lengths.append(block.size), [array])], 0)
    assert lengths == [elements, elements, 1]


def test_arrays_of_a_task_are_cut_alike_whatever_their_dtypes(tiny_blocks):
    a, b = np.arange(9, dtype="float32"), np.arange(9, dtype="float64")
    seen = []
    thread_pool.work([(lambda x, y: seen.append((x.tolist(), y.tolist())), [a, b])], 0)
    assert seen == [(part, part) for part in ([0, 1, 2, 3], [4, 5, 6, 7], [8])]


def test_no_task_is_no_work():
    assert thread_pool.work([], 0) is None


def threads_of(num_bytes, most_threads, num_blocks=64):
    """How many threads are at the blocks: all that come wait for each other in the first one."""
    expected = min(most_threads, 1 + num_bytes // thread_pool.BYTES_A_THREAD, num_blocks)
    barrier = threading.Barrier(expected)
    seen = set()

    def note(_block):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            barrier.wait(600)

    array = np.zeros(num_blocks * thread_pool.BLOCK_BYTES // 4, "float32")
    thread_pool.work([(note, [array])], num_bytes, most_threads)
    return len(seen)


@pytest.fixture
def pool_of_three(monkeypatch):
    """As on a machine with four processors, whatever this one has."""
    pool = thread_pool.multiprocessing.pool.ThreadPool(3)
    monkeypatch.setattr(thread_pool, "_pool", lambda: pool)
    yield
    pool.terminate()
    pool.join()


@pytest.mark.parametrize(
    ("megabytes", "most", "num_blocks", "want"),
    [(15, 4, 64, 1), (16, 4, 64, 2), (47, 4, 64, 3), (48, 4, 64, 4), (500, 4, 64, 4)]
    + [(500, 1, 64, 1), (500, 3, 64, 3), (500, 4, 2, 2), (500, 4, 1, 1)],
)
def test_a_thread_for_every_sixteen_megabytes_up_to_the_most(
    monkeypatch, pool_of_three, megabytes, most, num_blocks, want
):
    monkeypatch.setattr(thread_pool, "BLOCK_BYTES", 1 << 10)
    assert threads_of(megabytes << 20, most, num_blocks) == want


def test_small_work_and_its_preparation_start_no_thread(monkeypatch):
    monkeypatch.setattr(thread_pool, "_pool", lambda: pytest.fail("a pool for so little"))
    thread_pool.prepare(thread_pool.BYTES_A_THREAD - 1)
    array = np.zeros(thread_pool.BLOCK_BYTES, "float32")
    thread_pool.work([(increment, [array])], thread_pool.BYTES_A_THREAD - 1)
    assert (array == 1).all()


def test_prepare_makes_the_pool_before_it_is_needed(monkeypatch):
    made = []
    monkeypatch.setattr(thread_pool, "_pool", lambda: made.append("pool"))
    thread_pool.prepare(thread_pool.BYTES_A_THREAD)
    assert made == ["pool"]


class Planted(Exception):
    pass


@pytest.mark.parametrize("error", [Planted, KeyboardInterrupt, SystemExit, IndexError])
def test_an_error_ends_the_work_and_is_raised(tiny_blocks, error):
    calls = []

    def fail_at_third(_block):
        calls.append(1)
        if len(calls) == 3:
            raise error("planted")

    with pytest.raises(error, match="planted"):
        thread_pool.work([(fail_at_third, [np.zeros(400, "float32")])], 0, most_threads=1)
    assert len(calls) == 3


def test_an_error_on_another_thread_is_raised_when_no_thread_is_at_the_arrays(pool_of_three):
    """The helper fails while the caller is inside its block; work returns after the caller left."""
    caller, failed, left = threading.get_ident(), threading.Event(), []
    both = threading.Barrier(2)

    def fail_elsewhere(_block):
        both.wait(600)
        if threading.get_ident() != caller:
            failed.set()
            raise Planted("on a helper")
        assert failed.wait(600)
        left.append("caller")

    array = np.zeros(2 * thread_pool.BLOCK_BYTES // 4, "float32")
    with pytest.raises(Planted, match="on a helper"):
        thread_pool.work([(fail_elsewhere, [array])], thread_pool.BYTES_A_THREAD, most_threads=2)
    assert left == ["caller"]


def test_an_error_of_the_caller_waits_for_the_other_threads(pool_of_three):
    caller, failing, left = threading.get_ident(), threading.Event(), []
    both = threading.Barrier(2)

    def fail_here(_block):
        both.wait(600)
        if threading.get_ident() == caller:
            failing.set()
            raise Planted("on the caller")
        assert failing.wait(600)
        left.append("helper")

    array = np.zeros(2 * thread_pool.BLOCK_BYTES // 4, "float32")
    with pytest.raises(Planted, match="on the caller"):
        thread_pool.work([(fail_here, [array])], thread_pool.BYTES_A_THREAD, most_threads=2)
    assert left == ["helper"]


def test_after_an_error_the_other_threads_take_no_more_blocks(monkeypatch, pool_of_three):
    """The caller stays in its first block until the helper has given up."""
    caller, gave_up, calls = threading.get_ident(), threading.Event(), []
    both, whole = threading.Barrier(2), thread_pool._help

    def tell(queue):
        error = whole(queue)
        gave_up.set()
        return error

    def fail_elsewhere(_block):
        if not calls:
            both.wait(600)
        if threading.get_ident() != caller:
            raise Planted("on a helper")
        calls.append(gave_up.wait(600))

    monkeypatch.setattr(thread_pool, "_help", tell)
    array = np.zeros(8 * thread_pool.BLOCK_BYTES // 4, "float32")
    with pytest.raises(Planted):
        thread_pool.work([(fail_elsewhere, [array])], thread_pool.BYTES_A_THREAD, most_threads=2)
    assert calls == [True]


def test_a_last_block_that_another_thread_took_is_no_error():
    class Taken(thread_pool.deque):
        def __bool__(self):
            return True  # there was one when this thread looked

    assert thread_pool._do(Taken()) is None


def test_the_pool_goes_on_after_an_error(pool_of_three):
    for error in (Planted, KeyboardInterrupt, SystemExit):
        both = threading.Barrier(2)

        def fail(_block, both=both, error=error):
            both.wait(600)
            raise error("planted")

        array = np.zeros(2 * thread_pool.BLOCK_BYTES // 4, "float32")
        with pytest.raises(error, match="planted"):
            thread_pool.work([(fail, [array])], thread_pool.BYTES_A_THREAD, most_threads=2)
    assert threads_of(500 << 20, 4, num_blocks=8) == 4


def test_overflow_gives_inf_and_no_warning(pool_of_three):
    array = np.full(2 * thread_pool.BLOCK_BYTES // 4, 3e38, "float32")
    both = threading.Barrier(2)

    def double(block):
        both.wait(600)  # so each thread does one: NumPy's settings are a thread's own
        np.multiply(block, 2, out=block)

    thread_pool.work([(double, [array])], thread_pool.BYTES_A_THREAD, most_threads=2)
    assert np.isinf(array).all()
