"""The simulated cuBLAS, cuDNN, cuRAND and NCCL: what MXNet computes with them is what its CPU says.

These tests need a process on simulated GPUs, and skip in others.
"""

import ctypes
import itertools
import subprocess
import sys
import threading

import mxnet as mx
import numpy as np
import pytest
from cuda_sim import Count, counters


def simulated_gpus():
    try:
        counters()
    except (OSError, RuntimeError):
        return 0
    return mx.context.num_gpus()


pytestmark = pytest.mark.skipif(simulated_gpus() < 4, reason="needs 4 simulated GPUs")


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def synchronize(stream=None):
    assert ctypes.CDLL("libcudart.so.11.0").cudaStreamSynchronize(stream) == 0


# Of sums in another order, relative to the largest number.
TOLERANCES = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12}


def run(function, inputs, head, ctx, dtype):
    """The outputs of ``function`` and the gradients of its inputs, as float64."""
    arrays = [mx.nd.array(one, ctx=ctx, dtype=dtype) for one in inputs]
    for array in arrays:
        array.attach_grad()
    with mx.autograd.record():
        output = function(*arrays)
    output.backward(mx.nd.array(head(output.shape), ctx=ctx, dtype=dtype))
    return [one.asnumpy().astype("float64") for one in [output, *(a.grad for a in arrays)]]


def assert_same(got, want, dtype):
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCES[dtype] * max(1, np.abs(want).max())


def compare(function, *shapes, dtype="float32", reference=None):
    """``function`` on a simulated GPU, and ``reference`` (the same by default) on the CPU.

    float16 is compared with float32 of the same numbers, which the CPU computes faster.
    """
    random = np.random.RandomState(sum(itertools.chain(*shapes)))
    inputs = [random.uniform(-1, 1, shape).astype(dtype) for shape in shapes]

    def head(shape):
        return np.random.RandomState(1).uniform(-1, 1, shape).astype(dtype)

    wider = "float32" if dtype == "float16" else dtype
    want = run(reference or function, inputs, head, mx.cpu(), wider)
    got = run(function, inputs, head, mx.gpu(0), dtype)
    for one, other in zip(got, want):
        assert_same(one, other, dtype)


every_dtype = pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
float32_and_float64 = pytest.mark.parametrize("dtype", ["float32", "float64"])


# ---- cuBLAS


@every_dtype
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_dot(dtype, transpose_a, transpose_b):
    a, b = (23, 70)[:: -1 if transpose_a else 1], (70, 41)[:: -1 if transpose_b else 1]
    compare(lambda x, y: mx.nd.dot(x, y, transpose_a, transpose_b), a, b, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("transpose_b", [False, True])
def test_batch_dot(dtype, transpose_b):
    b = (3, 5, 9) if transpose_b else (3, 9, 5)
    compare(lambda x, y: mx.nd.batch_dot(x, y, transpose_b=transpose_b), (3, 7, 9), b, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("no_bias", [False, True])
def test_fully_connected(dtype, no_bias):
    shapes = [(6, 4, 5), (13, 20)] + ([] if no_bias else [(13,)])
    compare(
        lambda *a: mx.nd.FullyConnected(*a, num_hidden=13, no_bias=no_bias), *shapes, dtype=dtype
    )


def assert_same_output(function, *shapes, dtype):
    """As compare, without gradients, for which some kernels are not written."""
    random = np.random.RandomState(0)
    inputs = [random.uniform(-1, 1, shape) for shape in shapes]
    got, want = (
        function(*(mx.nd.array(one, ctx=ctx, dtype=dtype) for one in inputs)).asnumpy()
        for ctx in (mx.gpu(0), mx.cpu())
    )
    assert_same(got, want, dtype)


@float32_and_float64
def test_linalg_gemm(dtype):
    options = {"transpose_a": True, "alpha": 0.5, "beta": -2.0}
    shapes = (2, 6, 4), (2, 6, 3), (2, 4, 3)
    assert_same_output(lambda *a: mx.nd.linalg.gemm(*a, **options), *shapes, dtype=dtype)


@float32_and_float64
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rightside", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("operator", [mx.nd.linalg.trmm, mx.nd.linalg.trsm])
def test_triangular_matrices(operator, lower, rightside, transpose, dtype):
    """The triangle that must not be read is not zero."""
    options = {"transpose": transpose, "rightside": rightside, "lower": lower, "alpha": 0.5}

    def computed(a, b):
        return operator(a + 4 * mx.nd.eye(5, ctx=a.context, dtype=dtype), b, **options)

    assert_same_output(computed, (5, 5), (3, 5) if rightside else (5, 3), dtype=dtype)


@every_dtype
def test_a_dot_product(dtype):
    compare(mx.nd.dot, (9,), (9,), dtype=dtype)


# ---- cuDNN

CONVOLUTIONS = {
    "LeNet": ((2, 3, 12, 11), {"kernel": (5, 5), "num_filter": 6}),
    "1x1": ((2, 5, 7, 6), {"kernel": (1, 1), "num_filter": 4}),
    "stride, pad": (
        (2, 3, 9, 8),
        {"kernel": (3, 2), "num_filter": 4, "stride": (2, 3), "pad": (1, 2)},
    ),
    "dilation": (
        (1, 2, 11, 12),
        {"kernel": (3, 3), "num_filter": 5, "dilate": (2, 3), "pad": (2, 1)},
    ),
    "groups": ((2, 6, 7, 7), {"kernel": (3, 3), "num_filter": 9, "num_group": 3, "pad": (1, 1)}),
    "no bias": ((3, 2, 5, 5), {"kernel": (2, 2), "num_filter": 3, "no_bias": True}),
    "wide pad": ((1, 1, 3, 3), {"kernel": (3, 3), "num_filter": 2, "pad": (4, 5)}),
    "1D": ((2, 3, 15), {"kernel": (4,), "num_filter": 5, "stride": (2,), "pad": (1,)}),
    "3D": (
        (2, 2, 5, 6, 7),
        {"kernel": (2, 3, 2), "num_filter": 3, "stride": (1, 2, 1), "pad": (1, 0, 2)},
    ),
    "3D, dilation": ((1, 2, 6, 7, 8), {"kernel": (2, 2, 2), "num_filter": 3, "dilate": (3, 2, 1)}),
}


def convolution_shapes(data, options, inputs_first=False):
    groups, filters = options.get("num_group", 1), options["num_filter"]
    weight = (data[1], filters // groups) if inputs_first else (filters, data[1] // groups)
    bias = [] if options.get("no_bias") else [(filters,)]
    return [data, (*weight, *options["kernel"]), *bias]


@every_dtype
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, dtype):
    data, options = CONVOLUTIONS[name]
    compare(
        lambda *a: mx.nd.Convolution(*a, **options),
        *convolution_shapes(data, options),
        dtype=dtype,
    )


@pytest.mark.parametrize("name", ["stride, pad", "groups", "LeNet"])
def test_convolution_with_channels_last(name):
    data, options = CONVOLUTIONS[name]
    first = convolution_shapes(data, options)
    last = [(shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape for shape in first]

    def reference(x, weight, bias):
        x, weight = x.transpose((0, 3, 1, 2)), weight.transpose((0, 3, 1, 2))
        return mx.nd.Convolution(x, weight, bias, **options).transpose((0, 2, 3, 1))

    compare(lambda *a: mx.nd.Convolution(*a, layout="NHWC", **options), *last, reference=reference)


@every_dtype
def test_deconvolution(dtype):
    options = {"kernel": (3, 2), "num_filter": 4, "stride": (2, 3), "pad": (1, 0), "no_bias": True}
    compare(
        lambda *a: mx.nd.Deconvolution(*a, **options),
        *convolution_shapes((2, 3, 5, 4), options, inputs_first=True),
        dtype=dtype,
    )


def test_gradients_of_a_convolution_add_up():
    data, options = CONVOLUTIONS["stride, pad"]
    random = np.random.RandomState(0)
    inputs = [random.uniform(-1, 1, one) for one in convolution_shapes(data, options)]
    gradients = []
    for ctx in (mx.gpu(0), mx.cpu()):
        arrays = [mx.nd.array(one, ctx=ctx) for one in inputs]
        for array in arrays:
            array.attach_grad("add")
        for _ in range(3):
            with mx.autograd.record():
                output = mx.nd.Convolution(*arrays, **options)
            output.backward()
        gradients.append([array.grad.asnumpy() for array in arrays])
    for got, want in zip(*gradients):
        assert_same(got, want, "float32")


@every_dtype
@pytest.mark.parametrize("kind", ["max", "avg", "avg without padding"])
@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 3, 8, 6), {"kernel": (2, 2), "stride": (2, 2)}),
        ((1, 2, 9, 10), {"kernel": (3, 4), "stride": (2, 3), "pad": (1, 2)}),
        ((2, 2, 7, 7), {"kernel": (3, 3), "stride": (1, 1), "pad": (1, 1)}),
        ((2, 3, 5, 4), {"kernel": (1, 1), "global_pool": True}),
        ((1, 2, 5, 6, 7), {"kernel": (2, 3, 2), "stride": (2, 1, 2), "pad": (1, 1, 0)}),
    ],
    ids=["LeNet", "stride, pad", "overlapping", "global", "3D"],
)
def test_pooling(kind, shape, options, dtype):
    options = {"pool_type": kind[:3], **options}
    if kind == "avg without padding":
        options["count_include_pad"] = False
    compare(lambda x: mx.nd.Pooling(x, **options), shape, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("kind", ["relu", "sigmoid", "tanh"])
def test_activation(kind, dtype):
    compare(lambda x: mx.nd.Activation(x, act_type=kind), (5, 7, 3), dtype=dtype)


@pytest.mark.parametrize("mode, shape", [("instance", (4, 5)), ("channel", (4, 5, 3, 2))])
def test_softmax_activation(mode, shape):
    compare(
        lambda x: mx.nd.SoftmaxActivation(x, mode=mode),
        shape,
        reference=lambda x: mx.nd.softmax(x, axis=1),
    )


def batch_norm(x, gamma, beta, mean, variance, **options):
    return mx.nd.BatchNorm(
        x, gamma, beta, mean, variance, fix_gamma=False, eps=1e-3, momentum=0.75, **options
    )


@every_dtype
@pytest.mark.parametrize("shape", [(6, 4, 5, 3), (8, 4), (3, 4, 5)], ids=str)
def test_batch_norm_in_training(shape, dtype):
    parameters = "float64" if dtype == "float64" else "float32"
    channels = (shape[1],)

    def normalize(x, gamma, beta):
        gamma, beta = gamma.astype(parameters), beta.astype(parameters)
        mean, variance = (f(channels, ctx=x.context, dtype=parameters) for f in STATISTICS)
        return batch_norm(x, gamma, beta, mean, variance)

    compare(normalize, shape, channels, channels, dtype=dtype)


STATISTICS = (mx.nd.zeros, mx.nd.ones)


def test_batch_norm_keeps_running_statistics():
    """The running variance is the unbiased one, which the CPU's is not."""
    x = np.random.RandomState(0).normal(3, 2, (5, 2, 3, 1)).astype("float32")
    ctx = mx.gpu(0)
    mean, variance = mx.nd.array([1, -1], ctx=ctx), mx.nd.array([2, 5], ctx=ctx)
    ones, zeros = mx.nd.ones(2, ctx=ctx), mx.nd.zeros(2, ctx=ctx)
    with mx.autograd.record():
        batch_norm(mx.nd.array(x, ctx=ctx), ones, zeros, mean, variance)
    axes = (0, 2, 3)
    want_mean = 0.75 * np.array([1, -1]) + 0.25 * x.mean(axes)
    want_variance = 0.75 * np.array([2, 5]) + 0.25 * x.var(axes, ddof=1)
    assert np.allclose(mean.asnumpy(), want_mean, rtol=1e-5)
    assert np.allclose(variance.asnumpy(), want_variance, rtol=1e-5)


@every_dtype
def test_batch_norm_in_prediction(dtype):
    random = np.random.RandomState(0)
    x, gamma, beta, mean = (random.normal(0, 1, s) for s in ((4, 3, 2, 5), 3, 3, 3))
    variance = random.uniform(0.5, 2, 3)
    parameters = "float64" if dtype == "float64" else "float32"
    arrays = [mx.nd.array(x, ctx=mx.gpu(0), dtype=dtype)]
    for one in (gamma, beta, mean, variance):
        arrays.append(mx.nd.array(one, ctx=mx.gpu(0), dtype=parameters))
    gamma, beta, mean, variance = (v.reshape(1, 3, 1, 1) for v in (gamma, beta, mean, variance))
    want = gamma * (x - mean) / np.sqrt(variance + 1e-3) + beta
    assert_same(batch_norm(*arrays).asnumpy().astype("float64"), want, dtype)


@every_dtype
def test_dropout_keeps_what_its_gradient_keeps(dtype):
    x = mx.nd.ones((100, 200), ctx=mx.gpu(0), dtype=dtype)
    x.attach_grad()
    masks = []
    for _ in range(2):
        with mx.autograd.record():
            y = mx.nd.Dropout(x, p=0.3)
        y.backward()
        masks.append(y.asnumpy().astype("float64"))
        assert np.allclose(np.unique(masks[-1]), [0, 1 / 0.7], rtol=1e-3)
        assert np.array_equal(masks[-1], x.grad.asnumpy().astype("float64"))
        # Five standard deviations of the number kept.
        assert abs((masks[-1] > 0).mean() - 0.7) < 5 * (0.21 / x.size) ** 0.5
    assert not np.array_equal(*masks)
    assert np.array_equal(mx.nd.Dropout(x, p=0.3).asnumpy(), x.asnumpy())


def test_a_compiled_dropout_draws_anew():
    x = mx.nd.ones((100, 20), ctx=mx.gpu(0))
    block = mx.gluon.nn.Dropout(0.5)
    block.hybridize()
    masks = []
    for _ in range(3):
        with mx.autograd.record():
            masks.append(block(x).asnumpy())
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).mean() < 0.6


# ---- NCCL, as MXNet's kvstore calls it


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kvstore_sums_over_devices(num_devices, dtype):
    store = mx.kv.create("nccl")
    contexts = [mx.gpu(i) for i in range(num_devices)]
    random = np.random.RandomState(0)
    arrays = [random.randint(-99, 99, (31, 7)) for _ in contexts]
    values = [mx.nd.array(one, ctx=ctx, dtype=dtype) for one, ctx in zip(arrays, contexts)]
    results = [mx.nd.zeros_like(one) for one in values]
    store.init("0", values[0])
    for _ in range(2):
        store.pushpull("0", values, out=results)
        for result in results:
            assert np.array_equal(result.asnumpy(), sum(arrays))


# ---- NCCL by its own functions

NCCL_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
}
REDUCTIONS = {
    "sum": (0, lambda values: values.sum(0)),
    "product": (1, lambda values: values.prod(0)),
    "maximum": (2, lambda values: values.max(0)),
    "minimum": (3, lambda values: values.min(0)),
    "average": (4, lambda values: values.mean(0)),
}


class Ranks:
    """Communicators of the first devices, a stream on each, and memory there."""

    def __init__(self, num_devices):
        self.cuda = ctypes.CDLL("libcudart.so.11.0")
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.size = num_devices
        self.communicators = (ctypes.c_void_p * num_devices)()
        assert self.nccl.ncclCommInitAll(self.communicators, num_devices, None) == 0
        self.streams = []
        for rank in range(num_devices):
            stream = ctypes.c_void_p()
            assert self.cuda.cudaSetDevice(rank) == 0
            assert self.cuda.cudaStreamCreate(ctypes.byref(stream)) == 0
            self.streams.append(stream)

    def handle(self, rank):
        return ctypes.c_void_p(self.communicators[rank])

    def allocate(self, rank, num_bytes):
        memory = ctypes.c_void_p()
        assert self.cuda.cudaSetDevice(rank) == 0
        assert self.cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(num_bytes)) == 0
        return memory

    def to_device(self, rank, array):
        memory = self.allocate(rank, array.nbytes)
        size = ctypes.c_size_t(array.nbytes)
        assert self.cuda.cudaMemcpy(memory, pointer(array), size, 1) == 0
        return memory

    def to_host(self, rank, memory, count, dtype):
        array = np.empty(count, dtype)
        synchronize(self.streams[rank])
        assert self.cuda.cudaMemcpy(pointer(array), memory, ctypes.c_size_t(array.nbytes), 2) == 0
        return array

    def each(self, function, sends, num_results, *arguments):
        """Call a function of NCCL for all ranks in a group; return the array that each receives."""
        dtype = sends[0].dtype
        count = ctypes.c_size_t(min(num_results, sends[0].size))
        received = []
        assert self.nccl.ncclGroupStart() == 0
        for rank in range(self.size):
            send = self.to_device(rank, sends[rank])
            received.append(self.allocate(rank, num_results * dtype.itemsize))
            ours = (send, received[rank], count, NCCL_TYPES[dtype.name], *arguments)
            assert getattr(self.nccl, function)(*ours, self.handle(rank), self.streams[rank]) == 0
        assert self.nccl.ncclGroupEnd() == 0
        return [self.to_host(r, received[r], num_results, dtype) for r in range(self.size)]


@pytest.fixture(scope="module", params=[1, 3, 4])
def ranks(request):
    return Ranks(request.param)


def payloads(ranks, count, dtype):
    """Numbers of which sums and products are exact, and that differ between ranks."""
    random = np.random.RandomState(count)
    return [random.randint(1, 4, count).astype(dtype) * (1 + r % 2) for r in range(ranks.size)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", NCCL_TYPES)
def test_all_reduce(ranks, dtype, reduction):
    number, expected = REDUCTIONS[reduction]
    sends = [one.astype(dtype) for one in payloads(ranks, 1001, dtype)]
    want = expected(np.stack(sends).astype("float64")).astype(dtype)
    for got in ranks.each("ncclAllReduce", sends, 1001, number):
        assert np.allclose(got, want, rtol=1e-3) if reduction == "average" else (got == want).all()


@pytest.mark.parametrize("count", [0, 1, 2, 262144, 600001])
def test_all_reduce_of_any_size(ranks, count):
    sends = payloads(ranks, count, "float32")
    for got in ranks.each("ncclAllReduce", sends, count, 0):
        assert np.array_equal(got, sum(sends))


def test_other_collectives(ranks):
    root = ranks.size - 1
    block = 90000  # more than a buffer of 1 MiB for 3 ranks
    sends = payloads(ranks, block * ranks.size, "float32")
    assert np.array_equal(ranks.each("ncclReduce", sends, sends[0].size, 0, root)[root], sum(sends))
    for got in ranks.each("ncclBroadcast", sends, sends[0].size, root):
        assert np.array_equal(got, sends[root])
    for got in ranks.each("ncclAllGather", sends, sends[0].size * ranks.size):
        assert np.array_equal(got, np.concatenate(sends))
    parts = np.split(sum(sends), ranks.size)
    for got, want in zip(ranks.each("ncclReduceScatter", sends, block, 0), parts):
        assert np.array_equal(got, want)


def test_an_all_reduce_waits_for_every_device():
    ranks = Ranks(2)
    memory = [ranks.to_device(rank, np.full(10, rank + 1, "float32")) for rank in range(2)]

    def launch(rank):
        arguments = (memory[rank], memory[rank], ctypes.c_size_t(10), NCCL_TYPES["float32"], 0)
        assert not ranks.nccl.ncclAllReduce(*arguments, ranks.handle(rank), ranks.streams[rank])

    launch(0)
    waiting = threading.Thread(target=synchronize, args=(ranks.streams[0],))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    launch(1)
    waiting.join(600)
    assert not waiting.is_alive()
    for rank in range(2):
        assert (ranks.to_host(rank, memory[rank], 10, "float32") == 3).all()


def test_nccl_counts_calls_and_bytes():
    ranks = Ranks(2)
    before = counters()
    ranks.each("ncclAllReduce", payloads(ranks, 50, "float32"), 50, 0)
    after = counters()
    nothing = Count(0, 0)
    assert after["ncclAllReduce"].times - before.get("ncclAllReduce", nothing).times == 2
    assert after["nccl"].num_bytes - before.get("nccl", nothing).num_bytes == 2 * 200


def test_nccl_refuses_what_is_wrong():
    ranks = Ranks(2)
    memory = ranks.allocate(0, 40)
    success, cuda_error, invalid_argument, invalid_usage = 0, 1, 4, 5
    devices = (ctypes.c_int * 2)(1, 1)
    communicators = (ctypes.c_void_p * 2)()
    assert ranks.nccl.ncclCommInitAll(communicators, 2, devices) == invalid_usage
    devices[1] = 99
    assert ranks.nccl.ncclCommInitAll(communicators, 2, devices) == cuda_error

    def all_reduce(rank, stream, dtype=7, operation=0):
        count = ctypes.c_size_t(10)
        arguments = (memory, memory, count, dtype, operation, ranks.handle(rank), stream)
        return ranks.nccl.ncclAllReduce(*arguments)

    assert all_reduce(0, ranks.streams[0], dtype=10) == invalid_argument
    assert all_reduce(0, ranks.streams[0], operation=5) == invalid_argument
    assert all_reduce(1, ranks.streams[1]) == invalid_argument  # memory of another device
    assert all_reduce(0, ranks.streams[1]) == cuda_error
    # A group with a wrong call does nothing, and says so at its end.
    assert ranks.nccl.ncclGroupStart() == success
    assert all_reduce(0, ranks.streams[0]) == success
    assert all_reduce(1, ranks.streams[1]) == invalid_argument
    assert ranks.nccl.ncclGroupEnd() == invalid_argument
    synchronize(ranks.streams[0])
    ranks.nccl.ncclGetErrorString.restype = ctypes.c_char_p
    assert ranks.nccl.ncclGetErrorString(success) == b"no error"
    assert b"invalid argument" in ranks.nccl.ncclGetErrorString(invalid_argument)


# A process per rank: it gets the unique id on its standard input, and prints what it received.
RANK_PROGRAM = """
import ctypes, sys
cuda, nccl = ctypes.CDLL("libcudart.so.11.0"), ctypes.CDLL("libnccl.so.2")
class UniqueId(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 128)]
rank, size = map(int, sys.argv[1:])
name = sys.stdin.read()
unique_id = UniqueId(name.encode())
if not name:
    assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
    print(unique_id.name.decode(), flush=True)
communicator, stream, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cudaSetDevice(rank % 2) == 0
nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
assert nccl.ncclCommInitRank(ctypes.byref(communicator), size, unique_id, rank) == 0
numbers = (ctypes.c_float * 300000)(*(rank + i for i in range(300000)))
num_bytes = ctypes.c_size_t(ctypes.sizeof(numbers))
assert cuda.cudaStreamCreate(ctypes.byref(stream)) == 0
assert cuda.cudaMalloc(ctypes.byref(memory), num_bytes) == 0
assert cuda.cudaMemcpy(memory, numbers, num_bytes, 1) == 0
assert nccl.ncclAllReduce(memory, memory, ctypes.c_size_t(300000), 7, 0, communicator, stream) == 0
assert cuda.cudaStreamSynchronize(stream) == 0
assert cuda.cudaMemcpy(numbers, memory, num_bytes, 2) == 0
assert all(value == size * i + sum(range(size)) for i, value in enumerate(numbers))
"""


def test_all_reduce_between_processes():
    size = 3
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    programs[0].stdin.close()
    name = programs[0].stdout.readline().strip()
    for program in programs[1:]:
        program.stdin.write(name)
        program.stdin.close()
    assert [program.wait(timeout=600) for program in programs] == [0] * size
    for program in programs:
        program.stdout.close()
