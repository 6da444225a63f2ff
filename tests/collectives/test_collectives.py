"""Laws of every collective: the exact sum, the same bits everywhere, in place, in order."""

import threading

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd

import gluonpar
from gluonpar import collectives
from gluonpar.collectives import Choice, bucketing, checks, executor, operations, partition
from gluonpar.collectives.host import reduction, thread_pool
from gluonpar.runtime import engine

ALGORITHMS = sorted(collectives.ALGORITHMS)
DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8"]
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


def payload(k, shape, dtype="float32"):
    """One array a device; small integers, different in every cell as far as the dtype has them."""
    size = int(np.prod(shape, dtype=int))
    cells = np.arange(k * size).reshape((k, *shape))
    largest = 127 // k if np.dtype(dtype).itemsize == 1 else 2047 // k
    return (cells % (largest + 1)).astype(dtype)


def place(values, array=mx.nd.array):
    return [array(v, ctx=mx.cpu(i), dtype=v.dtype) for i, v in enumerate(values)]


def assert_everywhere(data, want):
    for i, array in enumerate(data):
        assert array.context == mx.cpu(i)
        np.testing.assert_array_equal(array.asnumpy(), want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("k", range(1, 10))
def test_every_device_ends_with_the_exact_sum(algorithm, k):
    values = payload(k, (5, 3))
    data = place(values)
    assert gluonpar.allreduce(data, algorithm) is None
    assert_everywhere(data, values.sum(axis=0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(k=st.integers(1, 8), shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_any_shape_and_dtype(algorithm, k, shape, dtype):
    values = payload(k, shape, dtype)
    with mx.util.np_shape(True):
        data = place(values)
        gluonpar.allreduce(data, algorithm)
        assert_everywhere(data, values.sum(axis=0, dtype=dtype))
    assert np.dtype(data[0].dtype) == np.dtype(dtype)
    assert data[0].shape == shape


OPS = {"mean": np.mean, "max": np.max, "min": np.min}


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "kvstore"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_other_ops(algorithm, op, k):
    values = np.random.RandomState(k).permutation(k * 64).reshape(k, 64).astype("float32")
    data = place(values)
    gluonpar.allreduce(data, algorithm, op=op)
    assert_everywhere(data, OPS[op](values.astype("float64"), axis=0).astype("float32"))


@pytest.mark.parametrize("op", ["max", "min"])
def test_ops_on_integers(op):
    for algorithm in ("host", "ring"):
        values = payload(3, (7,), "int8")
        data = place(values)
        gluonpar.allreduce(data, algorithm, op=op)
        assert_everywhere(data, OPS[op](values, axis=0))


def test_kvstore_knows_mean_and_refuses_the_rest():
    values = payload(3, (4,))
    data = place(values)
    gluonpar.allreduce(data, "kvstore", op="mean")
    assert_everywhere(data, values.mean(axis=0, dtype="float32"))
    with pytest.raises(ValueError, match="algorithm 'kvstore' has no op 'max'"):
        gluonpar.allreduce(data, "kvstore", op="max")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float16_in_float32(algorithm):
    """1000 and eight times 0.4: float16 loses each of the small ones, float32 none."""
    values = np.array([[1000.0], *[[0.2]] * 8], "float16")
    data = place(values)
    gluonpar.allreduce(data, algorithm, accumulate="float32")
    assert_everywhere(data, values.astype("float32").sum(axis=0).astype("float16"))
    assert data[0].asnumpy() > 1001
    plain = place(values)
    gluonpar.allreduce(plain, "star")
    assert plain[0].asnumpy() == 1000


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("k", [2, 3, 8])
def test_random_floats_are_close_to_float64_and_have_the_same_bits_everywhere(algorithm, k):
    values = np.random.RandomState(k).normal(size=(k, 1000)).astype("float32")
    data = place(values)
    gluonpar.allreduce(data, algorithm)
    want = values.sum(axis=0, dtype="float64")
    np.testing.assert_allclose(data[0].asnumpy(), want, rtol=1e-6, atol=k * 3e-7)
    assert_everywhere(data, data[0].asnumpy())
    again = place(values)
    gluonpar.allreduce(again, algorithm)
    assert_everywhere(again, data[0].asnumpy())


@pytest.mark.parametrize("algorithm", ["host", "kvstore", "ring"])
def test_large_arrays(algorithm):
    """More than one block, thread and cache: 3 times 12 MB and some."""
    values = np.arange(3 * 3_000_001, dtype="float32").reshape(3, -1) % 4096
    data = place(values)
    gluonpar.allreduce(data, algorithm)
    assert_everywhere(data, values.sum(axis=0))


@pytest.fixture
def numpy_world():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 1, 3, 1, 2)])
def test_numpy_arrays_of_mxnet(numpy_world, algorithm, shape):
    values = payload(3, shape)
    data = place(values, mx.np.array)
    gluonpar.allreduce(data, algorithm)
    assert_everywhere(data, values.sum(axis=0))
    assert all(type(array) is mx.np.ndarray for array in data)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_arrays_on_one_context(algorithm):
    values = payload(3, (4,))
    data = [mx.nd.array(v, ctx=mx.cpu(0)) for v in values]
    gluonpar.allreduce(data, algorithm)
    for array in data:
        np.testing.assert_array_equal(array.asnumpy(), values.sum(axis=0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_of_one_array(algorithm):
    values = payload(3, (4,))
    whole = mx.nd.array(values)
    gluonpar.allreduce([whole[0], whole[1], whole[2]], algorithm)
    np.testing.assert_array_equal(whole.asnumpy(), [values.sum(axis=0)] * 3)


def test_what_onednn_left_in_a_layout_of_its_own():
    """A convolution's output is stored in blocks of channels until somebody asks for it."""
    X = [mx.nd.random.uniform(shape=(2, 3, 16, 16), ctx=mx.cpu(i)) for i in range(2)]
    W = [mx.nd.random.uniform(shape=(32, 3, 3, 3), ctx=mx.cpu(i)) for i in range(2)]
    for algorithm in ALGORITHMS:
        data = [
            mx.nd.Convolution(x, w, None, (3, 3), num_filter=32, no_bias=True) for x, w in zip(X, W)
        ]
        again = [
            mx.nd.Convolution(x, w, None, (3, 3), num_filter=32, no_bias=True) for x, w in zip(X, W)
        ]
        gluonpar.allreduce(data, algorithm)
        assert_everywhere(data, again[0].asnumpy() + again[1].asnumpy())


@pytest.fixture(params=["host", "hops"])
def way(request, monkeypatch):
    """Both ways that a relative of allreduce can go: on the host, and by a plan's hops."""
    if request.param == "hops":
        monkeypatch.setattr(operations, "choose", lambda kind: Choice("balanced", "for the test"))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
class TestRelatives:
    @pytest.mark.parametrize("root", [0, 1, 4])
    def test_broadcast_copies_the_root(self, k, root):
        values = payload(k, (4, 2))
        data = place(values)
        assert gluonpar.broadcast(data, root % k) is None
        assert_everywhere(data, values[root % k])

    @pytest.mark.parametrize("root", [0, 1, 4])
    @pytest.mark.parametrize("op", ["sum", "mean", "max"])
    def test_reduce_changes_the_root_only(self, k, root, op):
        values, root = payload(k, (3, 3)), root % k
        data = place(values)
        assert gluonpar.reduce(data, root, op) is None
        want = values.copy()
        want[root] = getattr(values.astype("float64"), op)(axis=0)
        for array, w in zip(data, want):
            np.testing.assert_array_equal(array.asnumpy(), w)

    @pytest.mark.parametrize("shape", [(13,), (2, 1, 3), (1,)])
    @pytest.mark.parametrize("op", ["sum", "min"])
    def test_reduce_scatter_changes_ones_own_part_only(self, k, shape, op):
        values = payload(k, shape)
        data = place(values)
        assert gluonpar.reduce_scatter(data, op) is None
        want, total = values.reshape(k, -1).copy(), getattr(values.reshape(k, -1), op)(axis=0)
        for i, part in enumerate(partition.slices(total.size, k)):
            want[i, part] = total[part]
        for array, w in zip(data, want):
            np.testing.assert_array_equal(array.asnumpy().ravel(), w)

    def test_reduce_scatter_and_all_gather_are_allreduce(self, k):
        values = payload(k, (3, 5))
        data = place(values)
        gluonpar.reduce_scatter(data)
        assert gluonpar.all_gather(data) is None
        assert_everywhere(data, values.sum(axis=0))


def test_empty_arrays_have_relatives_too():
    with mx.util.np_shape(True):
        data = [mx.nd.zeros((0,), ctx=mx.cpu(i)) for i in range(2)]
        for collective in (gluonpar.reduce, gluonpar.broadcast, gluonpar.reduce_scatter):
            assert collective(data) is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [3, 200_000])  # on the calling thread, and on a worker
def test_it_is_ordered_with_the_operators_around_it(algorithm, size):
    k = 4
    data = place(payload(k, (size,)))
    want = [array.asnumpy().astype("float64") for array in data]
    for _ in range(15):
        for array in data:
            array *= 0.25
        gluonpar.allreduce(data, algorithm)
        copies = [array + 1 for array in data]
        want = [sum(w * 0.25 for w in want)] * k
    assert_everywhere(copies, data[0].asnumpy() + 1)
    np.testing.assert_allclose(data[3].asnumpy(), want[3], rtol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_threads_reduce_at_once(algorithm):
    sets = [place(payload(3, (1000,))) for _ in range(8)]
    threads = [threading.Thread(target=gluonpar.allreduce, args=(data, algorithm)) for data in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for data in sets:
        assert_everywhere(data, payload(3, (1000,)).sum(axis=0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_returns_before_the_sum_is_there(algorithm):
    gate = threading.Event()
    data = place(payload(2, (10,)))
    engine.push(gate.wait, mx.cpu(1), writes=[data[1]])  # as a long operator that writes data[1]
    gluonpar.allreduce(data, algorithm)
    gate.set()  # only now can the sum be computed, and allreduce is behind us
    assert_everywhere(data, payload(2, (10,)).sum(axis=0))


@pytest.mark.parametrize("algorithm", ["host", "star", "ring", "kvstore"])
def test_memory_is_flat_over_many_calls(algorithm):
    data = place(payload(2, (1000,)) * 0)

    def resident():
        mx.nd.waitall()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def call(times):
        for i in range(times):
            gluonpar.allreduce(data, algorithm)
            if i % 100 == 0:
                data[0].wait_to_read()

    call(1000)
    before = resident()
    call(10_000)
    assert resident() - before < 2 << 20


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_is_recorded_for_autograd(algorithm):
    x = mx.nd.ones((2,))
    x.attach_grad()
    data = [mx.nd.ones((2,)), mx.nd.ones((2,), ctx=mx.cpu(1))]
    with autograd.record():
        y = x * 3
        gluonpar.allreduce(data, algorithm)
        z = y * data[0]
    z.backward()
    np.testing.assert_array_equal(x.grad.asnumpy(), [6, 6])


class TestErrorsInside:
    """What goes wrong while the engine runs the sum reaches whoever waits, and nothing hangs."""

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ZeroDivisionError])
    @pytest.mark.parametrize("size", [4, 3_000_000])
    def test_it_is_raised_at_the_next_wait_with_its_traceback(self, monkeypatch, error, size):
        def fail_here(*_):
            raise error("planted")

        data = place(np.ones((2, size), "float32"))
        mx.nd.waitall()  # a wait for one array ends a moment before the engine is done with it
        monkeypatch.setattr(reduction, "_combine", fail_here)
        if error is KeyboardInterrupt and size == 4:  # run at once, on this thread
            with pytest.raises(KeyboardInterrupt, match="planted"):
                gluonpar.allreduce(data, "host")
        else:
            gluonpar.allreduce(data, "host")
        dependent = data[1] * 2
        with pytest.raises(mx.MXNetError, match=r"(?s)fail_here") as caught:
            dependent.wait_to_read()
        assert f"{error.__name__}: planted" in str(caught.value)
        monkeypatch.undo()
        mx.nd.waitall()
        for array in data:
            array[:] = 1
        gluonpar.allreduce(data, "host")
        assert_everywhere(data, np.full(size, 2, "float32"))

    def test_no_thread_is_at_the_arrays_any_more_when_it_is_raised(self, monkeypatch):
        whole, started, gate, ended = reduction._combine, threading.Event(), threading.Event(), []

        def combine(*arguments):
            if threading.current_thread().name.startswith("Thread-"):  # the pool's
                started.set()
                gate.wait()
                for _ in range(20):
                    whole(*arguments)
                ended.append(True)
            elif started.wait(600):
                gate.set()
                raise RuntimeError("planted")

        monkeypatch.setattr(reduction, "_combine", combine)
        monkeypatch.setattr(thread_pool.threads, "cores", lambda: 2)
        data = place(np.ones((2, 3_000_000), "float32"))
        gluonpar.allreduce(data, "host")
        with pytest.raises(mx.MXNetError, match="planted"):
            data[0].wait_to_read()
        assert ended

    def test_it_is_raised_if_only_a_helping_thread_fails(self, monkeypatch):
        whole, failed = reduction._combine, threading.Event()

        def fail_once(*arguments):
            if threading.current_thread().name.startswith("Thread-") and not failed.is_set():
                failed.set()
                raise RuntimeError("in a helper")
            whole(*arguments)

        monkeypatch.setattr(reduction, "_combine", fail_once)
        monkeypatch.setattr(thread_pool.threads, "cores", lambda: 4)
        for _ in range(50):
            data = place(np.ones((2, 3_000_000), "float32"))
            gluonpar.allreduce(data, "host")
            try:
                data[0].wait_to_read()
            except mx.MXNetError as error:
                assert "RuntimeError: in a helper" in str(error)
                break
        assert failed.is_set()


@pytest.mark.parametrize("algorithm", list(collectives.ALGORITHMS))
def test_a_list_that_is_changed_after_the_call_changes_nothing(algorithm):
    """Gluon's ``param.list_grad()`` is the parameter's own list, and may get other arrays."""
    gate = threading.Event()
    data, others = place(np.ones((2, 8), "float32")), place(np.full((2, 8), 5, "float32"))
    given = list(data)
    engine.push(lambda: gate.wait(600), data[0].context, writes=data)
    gluonpar.allreduce(given, algorithm)
    given[:] = others
    gate.set()
    assert_everywhere(data, np.full(8, 2, "float32"))
    assert_everywhere(others, np.full(8, 5, "float32"))


def test_each_executors_planted_bug_is_caught(monkeypatch):
    """host that leaves out the last device; kvstore that leaves the last device out."""
    combine = reduction._combine
    with monkeypatch.context() as patch:
        patch.setattr(
            reduction, "_combine", lambda n, *more: combine(n - 1, *more[: n + 1], *more[n + 2 :])
        )
        with pytest.raises(AssertionError):
            test_every_device_ends_with_the_exact_sum("host", 3)
    run = collectives.ALGORITHMS["kvstore"].run
    broken = collectives.registry.Algorithm(
        "kvstore", "", run=lambda lists, *more: run([data[:-1] for data in lists], *more)
    )
    with monkeypatch.context() as patch:
        patch.setitem(collectives.ALGORITHMS, "kvstore", broken)
        with pytest.raises(AssertionError):
            test_every_device_ends_with_the_exact_sum("kvstore", 3)


def test_an_executor_that_adds_where_it_should_copy_is_caught(monkeypatch):
    monkeypatch.setattr(executor.mx.nd.NDArray, "copyto", lambda self, other: self)
    with pytest.raises(AssertionError):
        test_every_device_ends_with_the_exact_sum("ring", 3)


class TestMany:
    LISTS = [((3,), "float32"), ((2, 5), "float32"), ((4,), "float64"), ((1,), "float32")]

    def lists(self, k=3):
        rng = np.random.RandomState(0)
        return [place(rng.normal(size=(k, *shape)).astype(dtype)) for shape, dtype in self.LISTS]

    @pytest.mark.parametrize("algorithm", ["host", "star", "tree", "kvstore"])
    @pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 20])
    def test_the_results_are_those_of_one_by_one(self, algorithm, bucket_bytes):
        together, one_by_one = self.lists(), self.lists()
        gluonpar.allreduce_many(together, algorithm, bucket_bytes=bucket_bytes)
        for data, alone in zip(together, one_by_one):
            gluonpar.allreduce(alone, algorithm)
            assert_everywhere(data, alone[0].asnumpy())

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_integers_are_exact_for_all(self, algorithm):
        values = [payload(4, shape) for shape in ((3,), (2, 3), (5,))]
        lists = [place(v) for v in values]
        gluonpar.allreduce_many(lists, algorithm)
        for data, v in zip(lists, values):
            assert_everywhere(data, v.sum(axis=0))

    @pytest.mark.parametrize("bucket_bytes, calls", [(1, 4), (52, 3), (1 << 20, 3)])
    def test_how_many_messages_it_takes(self, monkeypatch, bucket_bytes, calls):
        """52 bytes of float32, 32 of float64, 4 of float32: a dtype ends a bucket."""
        messages = []
        monkeypatch.setattr(bucketing, "_reduce_bucket", lambda *a: messages.append(a))
        gluonpar.allreduce_many(self.lists(), "ring", bucket_bytes=bucket_bytes)
        assert len(messages) == calls

    def test_views_of_one_array_a_device(self):
        flat = [mx.nd.array(np.arange(6) + i, ctx=mx.cpu(i)) for i in range(2)]
        lists = [[array[:2] for array in flat], [array[2:] for array in flat]]
        gluonpar.allreduce_many(lists)
        assert_everywhere(flat, 2 * np.arange(6) + 1)

    def test_nothing_to_do(self):
        assert gluonpar.allreduce_many([]) is None

    def test_bad_input_changes_nothing(self):
        lists = self.lists()
        before = lists[0][0].asnumpy()
        with pytest.raises(ValueError, match="bucket_bytes=0 holds nothing"):
            gluonpar.allreduce_many(lists, bucket_bytes=0)
        with pytest.raises(ValueError, match=r"lists\[4\] is an empty list"):
            gluonpar.allreduce_many([*lists, []])
        with pytest.raises(ValueError, match=r"lists\[1\] is on .*cpu\(1\).* but lists\[0\]"):
            gluonpar.allreduce_many([lists[0], lists[1][::-1]])
        with pytest.raises(ValueError, match="no all-reduce algorithm 'sun'"):
            gluonpar.allreduce_many(lists, "sun")
        np.testing.assert_array_equal(lists[0][0].asnumpy(), before)


class TestChoice:
    def test_cpu_contexts_are_summed_on_the_host(self):
        assert gluonpar.explain(place(payload(3, (4,)))).algorithm == "host"

    @pytest.mark.parametrize(
        "k, size, want", [(2, 10, "star"), (4, 10, "tree"), (4, 10**6, "balanced")]
    )
    @pytest.mark.parametrize("mixed", [False, True])
    def test_gpus_by_bytes_and_number(self, k, size, want, mixed):
        ctx = [mx.cpu(0) if mixed and i == 0 else mx.gpu(i) for i in range(k)]
        kind = checks.Kind((size,), np.dtype("float32"), ctx)
        assert operations.choose(kind).algorithm == want


class TestBadInput:
    def test_an_empty_list(self):
        with pytest.raises(ValueError, match="data is an empty list"):
            gluonpar.allreduce([])

    def test_no_list(self):
        with pytest.raises(TypeError, match="data is a NDArray; pass a list"):
            gluonpar.allreduce(mx.nd.ones((2,)))

    def test_no_array(self):
        with pytest.raises(TypeError, match=r"data\[1\] is a ndarray, not an MXNet array"):
            gluonpar.allreduce([mx.nd.ones((2,)), np.ones(2)])

    @pytest.mark.parametrize(
        "other, words",
        [
            (mx.nd.ones((3,), ctx=mx.cpu(1)), r"data\[1\] on cpu\(1\) is a .*shape \(3,\).*\(2,\)"),
            (mx.nd.ones((2,), dtype="float64"), r"data\[1\] .* dtype float64.*float32"),
            (mx.nd.ones((2,)).tostype("row_sparse"), "is a row_sparse array.*a default array"),
        ],
    )
    @pytest.mark.parametrize("collective", [gluonpar.allreduce, gluonpar.broadcast])
    def test_arrays_that_differ(self, collective, other, words):
        first = mx.nd.ones((2,))
        with pytest.raises(ValueError, match=words):
            collective([first, other])
        np.testing.assert_array_equal(first.asnumpy(), [1, 1])

    def test_sparse_arrays(self):
        sparse = mx.nd.ones((2, 2)).tostype("row_sparse")
        with pytest.raises(ValueError, match="row_sparse arrays; call tostype"):
            gluonpar.allreduce([sparse, sparse])

    def test_an_unknown_algorithm(self):
        with pytest.raises(ValueError, match="no all-reduce algorithm 'sun'; there are: .*star"):
            gluonpar.allreduce([mx.nd.ones((2,))], "sun")

    def test_the_same_array_twice(self):
        array = mx.nd.ones((2,))
        with pytest.raises(ValueError, match="data holds the same array more than once"):
            gluonpar.allreduce([array, array])

    @pytest.mark.parametrize(
        "options, words",
        [
            ({"op": "prod"}, "op='prod' is none of sum, mean, max, min"),
            ({"accumulate": "float64"}, "accumulate='float64'; it is None or 'float32'"),
            ({"accumulate": "float32"}, "is for float16 arrays, not float32"),
        ],
    )
    def test_options(self, options, words):
        with pytest.raises(ValueError, match=words):
            gluonpar.allreduce(place(payload(2, (3,))), **options)

    def test_the_mean_of_integers(self):
        with pytest.raises(ValueError, match="op='mean' of int32 arrays is no int32"):
            gluonpar.allreduce(place(payload(2, (3,), "int32")), op="mean")

    @pytest.mark.parametrize("root", [-1, 2])
    def test_a_root_that_is_not_there(self, root):
        with pytest.raises(ValueError, match=f"root={root} is none of the 2 arrays; use 0 to 1"):
            gluonpar.broadcast([mx.nd.ones((2,)), mx.nd.ones((2,))], root)
