"""Laws of every collective: the exact sum, the same bits everywhere, in place, in order."""

import functools
import gc
import threading
import tracemalloc

import mxnet as mx
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd

import gluonpar
from gluonpar.collectives import ALGORITHMS, exchange, host, register_executor
from gluonpar.collectives.choice import Choice
from gluonpar.plans import partition
from gluonpar.runtime import engine
from tests.support.contexts import algorithms, device

NAMES = algorithms()
KINDS = [name for name in ("host", "star", "ring", "nccl") if name in NAMES]
ON_ONE_CONTEXT = [name for name in NAMES if name != "nccl"]  # which wants a GPU for each array
DTYPES = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8"]
SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


def payload(k, shape, dtype="float32"):
    """One array per device: small integers, different in every cell as far as the dtype allows."""
    cells = np.random.RandomState(0).permutation(k * int(np.prod(shape, dtype=int)))
    largest = 127 // k if np.dtype(dtype).itemsize == 1 else 2047 // k
    return (cells.reshape((k, *shape)) % (largest + 1)).astype(dtype)


def place(values, array=mx.nd.array):
    return [array(v, ctx=device(i), dtype=v.dtype) for i, v in enumerate(values)]


def assert_everywhere(data, want):
    for i, array in enumerate(data):
        assert array.context == device(i)
        np.testing.assert_array_equal(array.asnumpy(), want)


def test_arrays_in_the_place_of_freed_ones_are_checked():
    """Arrays that have been checked are known again; others at their addresses are not."""
    one, other = device(0), device(1)
    for _ in range(20):
        for shape, dtype in [((5,), "float32"), ((4,), "int32"), ((2, 2), "float32")]:
            data = [mx.nd.ones((4,), ctx=c) for c in (one, other)]
            for _ in range(2):
                gluonpar.allreduce(data)
            mx.nd.waitall()
            del data
            data = [mx.nd.ones((4,), ctx=one), mx.nd.ones(shape, ctx=other, dtype=dtype)]
            with pytest.raises(ValueError, match="one shape, dtype and storage type"):
                gluonpar.allreduce(data)
            del data


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("k", range(1, 10))
@settings(max_examples=10)
@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "max", "min"]),
    of_np=st.booleans(),
)
def test_every_device_ends_with_the_exact_sum_of_any_shape_and_dtype(
    algorithm, k, shape, dtype, op, of_np
):
    values = payload(k, shape, dtype)
    with mx.util.np_shape(True), mx.util.np_array(of_np):
        data = place(values, mx.np.array if of_np else mx.nd.array)
        kind = type(data[0])
        assert gluonpar.allreduce(data, algorithm, op=op) is None
        assert_everywhere(data, getattr(values, op)(axis=0).astype(dtype))
        found = {(type(array), np.dtype(array.dtype), array.shape) for array in data}
        assert found == {(kind, np.dtype(dtype), shape)}


# Means that can be represented, although the sums overflow, or halves of the values vanish.
EXTREMES = {"float16": (60000, 2**-24), "float32": (3e38, 1e-37), "float64": (1.7e308, 1e-307)}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("collective", [*NAMES, "reduce", "reduce_scatter"])
@pytest.mark.parametrize("dtype", EXTREMES)
@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_mean_is_right_wherever_it_can_be_represented(collective, dtype, k):
    for extreme in EXTREMES[dtype]:
        values = np.full((k, 7), extreme, dtype)
        values[0, 1::2], values[1, 1::2] = -values[0, 1::2], 0
        data = place(values)
        if collective in NAMES:
            gluonpar.allreduce(data, collective, op="mean")
            means = data[0]
            assert_everywhere(data, means.asnumpy())
        elif collective == "reduce":
            gluonpar.reduce(data, root=1, op="mean")
            means = data.pop(1)
            unchanged = np.delete(values, 1, axis=0)
            np.testing.assert_array_equal([array.asnumpy() for array in data], unchanged)
        else:
            gluonpar.reduce_scatter(data, op="mean")
            gluonpar.all_gather(data)
            means = data[0]
        want = (values.astype("longdouble") / k).sum(axis=0)
        # Two roundings; the least numbers of float16 are far apart.
        np.testing.assert_allclose(means.asnumpy(), want.astype(dtype), rtol=np.finfo(dtype).eps)


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_random_floats_are_close_to_float64_and_have_the_same_bits_everywhere(algorithm, k, op):
    """Also zeros of both signs and NaNs, which come first."""
    values = np.random.RandomState(k).normal(size=(k, 1000)).astype("float32")
    values[::2, :5], values[1::2, :5] = (0.0, -0.0, np.nan, 1, -0.0), (-0.0, 0.0, 1, np.nan, 0.0)
    data, again = place(values), place(values)
    for each in (data, again):
        gluonpar.allreduce(each, algorithm, op)
    want = getattr(values.astype("float64"), op)(axis=0)[5:]
    np.testing.assert_allclose(data[0].asnumpy()[5:], want, rtol=1e-6, atol=k * 3e-7)
    assert len({array.asnumpy().tobytes() for array in [*data, *again]}) == 1


@pytest.mark.parametrize("algorithm", KINDS)
def test_large_arrays(algorithm):
    """More than one block, thread and cache: three arrays of 12 MB."""
    values = np.arange(3 * 3_000_001, dtype="float32").reshape(3, -1) % 4096
    data = place(values)
    gluonpar.allreduce(data, algorithm)
    assert_everywhere(data, values.sum(axis=0))


@pytest.mark.parametrize("algorithm", NAMES)
def test_arrays_without_dimensions_are_summed_outside_np_shape_too(algorithm):
    for op, want in {"sum": 12, "mean": 4}.items():
        with mx.util.np_shape(True):
            data = place(np.array([3, 4, 5], "float32"))
            assert data[0].shape == ()
        gluonpar.allreduce(data, algorithm, op)
        assert [array.asnumpy() for array in data] == [want] * 3


@pytest.mark.parametrize("op", ["mean", "max", "min"])
def test_an_op_is_its_own_whatever_summed_the_arrays_before(op):
    data = [mx.nd.full((3,), value, ctx=device(i)) for i, value in enumerate((1, 2))]
    gluonpar.allreduce(data)
    for _ in range(2):  # the same arrays again are known
        gluonpar.allreduce(data, op=op)
        assert_everywhere(data, np.full((3,), 3, "float32"))


@pytest.mark.parametrize("algorithm", NAMES)
def test_an_algorithm_gives_its_own_bits_whatever_summed_the_arrays_before(algorithm):
    """Their order of additions differs, and floats show it; the same arrays are used each time."""
    values = np.random.RandomState(3).normal(size=(5, 997)).astype("float32")
    alone, data = place(values), place(values)
    gluonpar.allreduce(alone, algorithm)
    for name in (*NAMES, algorithm):
        for array, value in zip(data, values):
            array[:] = mx.nd.array(value, ctx=array.context)
        gluonpar.allreduce(data, name)
    assert data[0].asnumpy().tobytes() == alone[0].asnumpy().tobytes()


@pytest.mark.parametrize("algorithm", ON_ONE_CONTEXT)
@pytest.mark.parametrize("views", [False, True])
def test_several_arrays_on_one_context_and_rows_of_one_array(algorithm, views):
    values = payload(3, (4,))
    whole = mx.nd.array(values)
    data = list(whole) if views else [mx.nd.array(row) for row in values]
    gluonpar.allreduce(data, algorithm)
    for array in [*data, *(whole if views else [])]:
        np.testing.assert_array_equal(array.asnumpy(), values.sum(axis=0))


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_autograd_records_nothing(algorithm, op):
    """The values change, but the gradient is that of what was computed before."""
    x, data = [], []
    with autograd.record():
        for i in range(2):
            x.append(mx.nd.ones((3,), ctx=device(i)))
            x[i].attach_grad()
            data.append(x[i] * (i + 1))
        gluonpar.allreduce(data, algorithm, op)
        gluonpar.broadcast(data)
    assert_everywhere(data, np.full(3, 3 if op == "sum" else 1.5))
    autograd.backward(data)
    assert [array.grad.asnumpy().tolist() for array in x] == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("algorithm", NAMES)
def test_arrays_in_one_of_onednns_layouts(algorithm):
    """A convolution's output is stored in blocks of channels until its values are read."""
    X = [mx.nd.random.uniform(shape=(2, 3, 16, 16), ctx=device(i)) for i in range(2)]
    W = [mx.nd.random.uniform(shape=(32, 3, 3, 3), ctx=device(i)) for i in range(2)]
    data, again = (
        [mx.nd.Convolution(x, w, None, (3, 3), num_filter=32, no_bias=True) for x, w in zip(X, W)]
        for _ in range(2)
    )
    gluonpar.allreduce(data, algorithm)
    assert_everywhere(data, again[0].asnumpy() + again[1].asnumpy())


@pytest.mark.cpu("views of memory are of CPU contexts")
def test_a_known_list_is_summed_where_its_memory_is_when_that_is_due():
    """A convolution, which leaves one array in another layout, runs only after the call."""
    data = [mx.nd.zeros((2, 32, 14, 14), ctx=device(i)) for i in range(2)]
    X = mx.nd.random.uniform(shape=(2, 3, 16, 16), ctx=device(0))
    W = mx.nd.random.uniform(shape=(32, 3, 3, 3), ctx=device(0))
    convolve = functools.partial(mx.nd.Convolution, kernel=(3, 3), num_filter=32, no_bias=True)
    for _ in range(2):
        gluonpar.allreduce(data)
    data[1][:] = mx.nd.random.uniform(shape=data[1].shape, ctx=device(1))
    want = convolve(X, W, None).asnumpy() + data[1].asnumpy()
    called = threading.Event()
    engine.push(called.wait, device(0), writes=[X])
    try:
        convolve(X, W, None, out=data[0])
        gluonpar.allreduce(data)
    finally:
        called.set()
    assert_everywhere(data, want)


@pytest.fixture(params=["host", "hops"])
def path(request, monkeypatch):
    """Both ways that the other collectives are executed: in the host's memory and as a plan."""
    if request.param == "hops":
        monkeypatch.setattr(exchange, "on_host", lambda ctx: False)
        monkeypatch.setattr(exchange, "choose", lambda ctx, num_bytes: Choice("tree", ""))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
class TestOtherCollectives:
    @pytest.mark.parametrize("root", [0, 1, 4])
    def test_broadcast_copies_the_root(self, k, root):
        for values in (payload(k, (4, 2)), payload(k, (3,), "int32")):
            data = place(values)
            assert gluonpar.broadcast(data, root % k) is None
            assert_everywhere(data, values[root % k])

    def test_what_is_only_copied_may_have_any_dtype(self, k):
        values = payload(k, (k + 1,)) % 2
        data = [array.astype("bool") for array in place(values)]
        gluonpar.all_gather(data)
        parts = partition.slices(k + 1, k)
        assert_everywhere(data, np.concatenate([values[i][p] for i, p in enumerate(parts)]) == 1)
        data = [array.astype("bool") for array in place(values)]
        gluonpar.broadcast(data, k - 1)
        assert_everywhere(data, values[k - 1] == 1)
        if k > 1:
            mx.kv.create("gluonpar").broadcast("key", data[0], data[1:])
            assert_everywhere(data, values[k - 1] == 1)

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
    @pytest.mark.parametrize("op", ["sum", "mean", "min"])
    def test_reduce_scatter_changes_each_devices_own_part_only(self, k, shape, op):
        values = payload(k, shape)
        data = place(values)
        assert gluonpar.reduce_scatter(data, op) is None
        want, total = values.reshape(k, -1).copy(), getattr(values.reshape(k, -1), op)(axis=0)
        for i, part in enumerate(partition.slices(total.size, k)):
            want[i, part] = total[part]
        for array, w in zip(data, want):
            np.testing.assert_array_equal(array.asnumpy().ravel(), w)

    def test_empty_arrays(self, k):
        with mx.util.np_shape(True):
            data = [mx.nd.zeros((0,), ctx=device(i)) for i in range(k)]
            for name in ("reduce", "broadcast", "reduce_scatter", "all_gather"):
                assert getattr(gluonpar, name)(data) is None


@pytest.mark.parametrize("algorithm", NAMES)
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


@pytest.mark.parametrize("algorithm", NAMES)
def test_sums_of_several_threads_are_those_of_one_after_another(algorithm):
    data = place(np.ones((2, 1000), "float32"))
    sets = [place(payload(3, (1000,))) for _ in range(8)]

    def add(other):
        gluonpar.allreduce(other, algorithm)
        for name in (algorithm, None) * 5:  # of which one is prepared
            gluonpar.allreduce(data, name)

    threads = [threading.Thread(target=add, args=(other,)) for other in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_everywhere(data, np.full((1000,), 2.0**80))
    for other in sets:
        assert_everywhere(other, payload(3, (1000,)).sum(axis=0))


@pytest.mark.parametrize("algorithm", NAMES)
def test_it_returns_before_the_sum_is_there_and_keeps_no_list_of_the_callers(algorithm):
    """Gluon's ``param.list_grad()`` is the parameter's own list, and may get other arrays."""
    gate = threading.Event()
    data, others = place(payload(2, (10,))), place(np.full((2, 10), 5, "float32"))
    engine.push(lambda: gate.wait(600), device(1), writes=data)  # as a long operator
    given = list(data)
    gluonpar.allreduce(given, algorithm)
    given[:] = others
    gate.set()  # only now can the sum be computed, and allreduce has returned
    assert_everywhere(data, payload(2, (10,)).sum(axis=0))
    assert_everywhere(others, np.full(10, 5, "float32"))


@pytest.mark.parametrize("algorithm", KINDS)
def test_memory_is_constant_over_many_calls(algorithm):
    data = place(payload(2, (1000,)) * 0)

    def resident():
        mx.nd.waitall()
        return psutil.Process().memory_info().rss

    def call(times):
        for i in range(times):
            gluonpar.allreduce(data, algorithm)
            if i % 100 == 0:
                data[0].wait_to_read()

    call(1000)
    before = resident()
    call(3000)
    assert resident() - before < 1 << 20


@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_memory_is_constant_over_many_lists_and_shapes(algorithm):
    """What is prepared for a list, or a shape, is kept for the last of them only."""

    def call(sizes):
        for n in sizes:
            data = [mx.nd.ones((n,), ctx=c) for c in (device(0), device(1))]
            gluonpar.allreduce(data, algorithm)
        mx.nd.waitall()

    call(range(1, 500))
    tracemalloc.start()
    try:
        call(range(1000, 1700))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1 << 19
    finally:
        tracemalloc.stop()


@pytest.mark.cpu("'host' sums in the memory of CPU contexts")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ZeroDivisionError])
@pytest.mark.parametrize("size", [4, 3_000_000])  # on the calling thread, and on several
def test_an_error_inside_is_raised_at_the_next_wait_with_its_traceback(monkeypatch, error, size):
    def fail_here(*_, **__):
        raise error("planted")

    data = place(np.ones((2, size), "float32"))
    mx.nd.waitall()  # a wait for one array ends a moment before the engine is done with it
    with monkeypatch.context() as patch:
        patch.setitem(host.COMBINE, "sum", fail_here)
        gluonpar.allreduce(data, "host")
        dependent = data[1] * 2
        with pytest.raises(mx.MXNetError, match=r"(?s)fail_here") as caught:
            dependent.wait_to_read()
    assert f"{error.__name__}: planted" in str(caught.value)
    mx.nd.waitall()
    for array in data:
        array[:] = 1
    gluonpar.allreduce(data, "host")
    assert_everywhere(data, np.full(size, 2, "float32"))


class TestMany:
    LISTS = [((3,), "float32"), ((2, 5), "float32"), ((4,), "float64"), ((1,), "float32")]

    def lists(self, k=3):
        rng = np.random.RandomState(0)
        return [place(rng.normal(size=(k, *shape)).astype(dtype)) for shape, dtype in self.LISTS]

    @pytest.mark.parametrize("algorithm", NAMES)
    @pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 20])
    def test_the_results_are_those_of_separate_calls(self, algorithm, bucket_bytes, monkeypatch):
        """To rounding for algorithms that cut arrays into chunks: they add in another order."""
        monkeypatch.setattr(exchange, "BUCKET_BYTES", bucket_bytes)
        rounding = 0 if algorithm in KINDS and algorithm != "ring" else 1e-6
        together, separate = self.lists(), self.lists()
        gluonpar.allreduce_many(together, algorithm)
        for data, alone in zip(together, separate):
            gluonpar.allreduce(alone, algorithm)
            one, other = data[0].asnumpy(), alone[0].asnumpy()
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)
            assert_everywhere(data, one)

    @pytest.mark.parametrize(
        "bucket_bytes, sizes",
        [
            (1, [[3], [10], [4], [1]]),
            (51, [[3], [10], [4], [1]]),
            (52, [[3, 10], [4], [1]]),
            (1 << 20, [[3, 10], [4], [1]]),
        ],
    )
    def test_a_bucket_has_neighbours_of_one_dtype_up_to_its_bytes(
        self, bucket_bytes, sizes, monkeypatch
    ):
        """The first two lists have 52 bytes."""
        monkeypatch.setattr(exchange, "BUCKET_BYTES", bucket_bytes)
        messages = []

        @register_executor("note sizes")
        def note(lists, op):
            messages.append([data[0].size for data in lists])

        try:
            gluonpar.allreduce_many(self.lists(), "note sizes")
        finally:
            del ALGORITHMS["note sizes"]
        assert messages == sizes

    def test_views_of_one_array_per_device(self):
        flat = [mx.nd.array(np.arange(6) + i, ctx=device(i)) for i in range(2)]
        lists = [[array[:2] for array in flat], [array[2:] for array in flat]]
        gluonpar.allreduce_many(lists)
        assert_everywhere(flat, 2 * np.arange(6) + 1)

    def test_the_lists_may_come_from_a_generator(self):
        values = payload(3, (4,))
        data = place(values)
        assert gluonpar.allreduce_many(each for each in [data]) is None
        assert_everywhere(data, values.sum(axis=0))
        assert gluonpar.allreduce_many([]) is None

    def test_bad_input_changes_nothing(self):
        lists = self.lists()
        before = lists[0][0].asnumpy()
        with pytest.raises(ValueError, match=r"lists\[4\] .* empty list"):
            gluonpar.allreduce_many([*lists, []])
        for others in (lists[1][::-1], lists[1][:2]):
            with pytest.raises(ValueError, match=r"lists\[1\] on .*1\).* but lists\[0\] on"):
                gluonpar.allreduce_many([lists[0], others])
        with pytest.raises(ValueError, match="more than once"):
            gluonpar.allreduce_many([lists[0], lists[1], lists[0]])
        with pytest.raises(ValueError, match="'sun'"):
            gluonpar.allreduce_many(lists, "sun")
        np.testing.assert_array_equal(lists[0][0].asnumpy(), before)


LONG = mx.nd.ones((3,))
ONE, CSR = mx.nd.ones((2,)), mx.nd.ones((2, 2)).tostype("csr")
PLACES = r"[cg]pu\(1\) .*\(3,\).* [cg]pu\(0\) .*\(2,\)"
BAD_DATA = [
    ([], ValueError, "data .*empty list"),
    (ONE, TypeError, "data .*list of arrays.* got NDArray"),
    ([ONE, np.ones(2)], TypeError, r"data\[1\] .*got ndarray"),
    ([ONE, ONE], ValueError, "data .*more than once"),
    ([ONE, ONE.reshape((1, 2))[0]], ValueError, "data .*more than once"),
    ([LONG[:2], LONG[1:3]], ValueError, "data .*more than once"),
    ([CSR, CSR.copy()], ValueError, "csr .*tostype"),
    ([ONE, mx.nd.ones((3,), ctx=device(1))], ValueError, PLACES),
    ([ONE, ONE.astype("float64")], ValueError, r"data\[1\] .*float64.*float32"),
    ([ONE, ONE.tostype("row_sparse")], ValueError, r"data\[1\] .*row_sparse.*default"),
]


@pytest.mark.parametrize("data, error, words", BAD_DATA)
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "reduce_scatter", "explain"])
def test_bad_data_is_refused_and_unchanged(name, data, error, words):
    with pytest.raises(error, match=words):
        getattr(gluonpar, name)(data)
    np.testing.assert_array_equal(ONE.asnumpy(), [1, 1])


@pytest.mark.parametrize(
    "dtype, options, words",
    [
        ("float32", {"op": "prod"}, "sum, mean, max, min, got 'prod'"),
        ("float32", {"algorithm": "sun"}, "host, .*got 'sun'"),
        ("int32", {"op": "mean"}, "'mean' .*got int32"),
    ],
)
def test_bad_options_are_refused(dtype, options, words):
    with pytest.raises(ValueError, match=words):
        gluonpar.allreduce(place(payload(2, (3,), dtype)), **options)


@pytest.mark.cpu("MXNet has bfloat16 on CPU contexts only")
@pytest.mark.parametrize(
    "name", ["allreduce", "ring", "reduce", "reduce_scatter", "kvstore", "explain"]
)
@pytest.mark.parametrize("dtype", [[("bfloat16", "uint16")], "bool"], ids=["bfloat16", "bool"])
def test_what_is_not_added_is_refused_at_once(name, dtype):
    data = [array.astype(np.dtype(dtype)) for array in place(payload(2, (3,)))]
    call = {
        "ring": lambda data: gluonpar.allreduce(data, "ring"),
        "kvstore": lambda data: mx.kv.create("gluonpar").pushpull(0, data),
    }
    with pytest.raises(ValueError, match="(bfloat16|bool).*astype"):
        call.get(name, getattr(gluonpar, name, None))(data)


@pytest.mark.parametrize("root", [-1, 2])
@pytest.mark.parametrize("collective", [gluonpar.broadcast, gluonpar.reduce])
def test_a_root_that_does_not_exist_is_refused(root, collective):
    with pytest.raises(ValueError, match=f"0 to 1, got {root}"):
        collective(place(payload(2, (3,))), root)
