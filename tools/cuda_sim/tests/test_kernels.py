"""MXNet's operators on a simulated GPU give what the same wheel's give on the CPU.

The kernels of the simulator are ours, and the CPU operators are their oracle: every entry of the
table is computed on both, with its gradients, for random input of each dtype.
"""

from typing import Callable, NamedTuple

import mxnet as mx
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(mx.context.num_gpus() == 0, reason="needs simulated GPUs")

FLOATS = ("float32", "float64", "float16")
INTEGERS = ("int8", "uint8", "int32", "int64")
EVERY = FLOATS + INTEGERS
TOLERANCES = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-10}


class Case(NamedTuple):
    """An operator, the shapes of its inputs, and the interval that their elements are from."""

    call: Callable
    shapes: tuple = ((3, 4),)
    dtypes: tuple = FLOATS
    low: float = -2.0
    high: float = 2.0
    differentiable: bool = True
    tolerance: float = 0.0


def two(call, dtypes=FLOATS, low=-2.0, high=2.0):
    return Case(call, ((3, 5), (3, 5)), dtypes, low, high)


nd = mx.nd
label = np.array([0, 2, 1, 3, 3], "float32")


def index(values, like, dtype="int32"):
    return nd.array(values, like.context, dtype=dtype)


# Operators of one array, by the interval of its elements.
UNARY = {
    (-2, 2): """abs square exp expm1 sin cos arctan sinh cosh tanh arcsinh degrees radians sigmoid
        softsign""",
    (0.2, 2): "sqrt rsqrt cbrt rcbrt reciprocal log log2 log10 log1p",
    (-0.9, 0.9): "tan arcsin arccos arctanh",
    (1.2, 3): "arccosh",
    (-9, 9): "round rint ceil floor trunc fix",
}
ELEMENTWISE = {
    name: Case(getattr(nd, name), low=low, high=high)
    for (low, high), names in UNARY.items()
    for name in names.split()
}
ELEMENTWISE |= {
    "sign": Case(nd.sign, dtypes=EVERY),
    "negative": Case(nd.negative, dtypes=FLOATS + ("int32", "int64")),
    "square_integers": Case(nd.square, dtypes=INTEGERS),
    "erf": Case(nd.erf, tolerance=1e-6),
    "erfinv": Case(nd.erfinv, dtypes=FLOATS[:2], low=-0.9, high=0.9),
    "gamma": Case(nd.gamma, dtypes=FLOATS[:2], low=0.3, high=4, tolerance=1e-6),
    "gammaln": Case(nd.gammaln, dtypes=FLOATS[:2], low=0.3, high=4, tolerance=1e-6),
    "relu": Case(nd.relu, dtypes=EVERY),
    "hard_sigmoid": Case(lambda x: nd.hard_sigmoid(x, alpha=0.3), tolerance=1e-6),
    "LeakyReLU": Case(lambda x: nd.LeakyReLU(x, slope=0.1)),
    "elu": Case(lambda x: nd.LeakyReLU(x, act_type="elu", slope=0.7)),
    "selu": Case(lambda x: nd.LeakyReLU(x, act_type="selu")),
    "gelu": Case(lambda x: nd.LeakyReLU(x, act_type="gelu"), tolerance=1e-6),
    "prelu": Case(lambda x, g: nd.LeakyReLU(x, g, act_type="prelu"), ((3, 4), (4,))),
    "Activation_softrelu": Case(lambda x: nd.Activation(x, "softrelu")),
    "Activation_softsign": Case(lambda x: nd.Activation(x, "softsign")),
    "smooth_l1": Case(lambda x: nd.smooth_l1(x, scalar=1.5)),
    "clip": Case(lambda x: nd.clip(x, -1, 1), dtypes=EVERY),
    "logical_not": Case(lambda x: nd.logical_not(nd.round(x)), low=-1, high=1),
    "add_n": Case(lambda a, b, c: nd.add_n(a, b, c, a, b, c), ((3, 4),) * 3),
    "add_n_2": Case(lambda a, b: nd.add_n(a, b), ((3, 4),) * 2, FLOATS + ("int32", "int64")),
    "elemwise_add": two(nd.elemwise_add, FLOATS + ("int32", "int64")),
    "elemwise_sub": two(nd.elemwise_sub),
    "elemwise_mul": two(nd.elemwise_mul, FLOATS + ("int32", "int64")),
    "elemwise_div": two(nd.elemwise_div, low=0.3),
    "identity": Case(nd.identity, dtypes=EVERY),
    "BlockGrad": Case(lambda x: nd.BlockGrad(x) * x),
    "ones_like": Case(nd.ones_like, dtypes=EVERY),
    "zeros_like": Case(nd.zeros_like, dtypes=EVERY),
    "where": Case(lambda c, x, y: nd.where(nd.round(c), x, y), ((3, 4),) * 3),
    "isfinite": Case(lambda x: nd.contrib.isfinite(1 / nd.round(x)), low=-1, high=1),
}

SCALAR = {
    "plus": lambda x: x + 2,
    "minus": lambda x: x - 2,
    "rminus": lambda x: 2 - x,
    "mul": lambda x: x * 3,
    "maximum": lambda x: nd.maximum(x, 1),
    "minimum": lambda x: nd.minimum(x, 1),
    "equal": lambda x: x == 1,
    "not_equal": lambda x: x != 1,
    "greater": lambda x: x > 1,
    "greater_equal": lambda x: x >= 1,
    "lesser": lambda x: x < 1,
    "lesser_equal": lambda x: x <= 1,
}
ELEMENTWISE |= {f"{name}_scalar": Case(call, dtypes=EVERY) for name, call in SCALAR.items()}
ELEMENTWISE |= {
    "div_scalar": Case(lambda x: x / 4, dtypes=FLOATS),
    "rdiv_scalar": Case(lambda x: 2 / x, low=0.3),
    "power_scalar": Case(lambda x: x**3),
    "rpower_scalar": Case(lambda x: 2**x),
    "mod_scalar": Case(lambda x: x % 0.7, dtypes=FLOATS[:2]),
    "rmod_scalar": Case(lambda x: 5 % x, dtypes=FLOATS[:2], low=0.7),
    "hypot_scalar": Case(lambda x: nd._internal._hypot_scalar(x, scalar=2)),
}

# Operators of two arrays, by their dtypes.
BINARY = {
    EVERY: """add sub mul maximum minimum equal not_equal greater greater_equal lesser
        lesser_equal logical_and logical_or logical_xor""",
    FLOATS: "div power hypot",
    FLOATS[:2]: "mod",
}
BROADCAST = {
    f"broadcast_{name}": Case(
        getattr(nd, f"broadcast_{name}"),
        ((3, 1, 5), (1, 4, 5)),
        dtypes,
        low=-2.0 if dtypes is EVERY else 0.5,
    )
    for dtypes, names in BINARY.items()
    for name in names.split()
}
BROADCAST |= {
    "broadcast_rows": Case(nd.broadcast_add, ((6, 4), (1, 4))),
    "broadcast_columns": Case(nd.broadcast_mul, ((6, 4), (6, 1))),
    "broadcast_channels": Case(nd.broadcast_mul, ((2, 3, 4, 5), (1, 3, 1, 1))),
    "broadcast_channels_sub": Case(nd.broadcast_sub, ((2, 3, 4, 5), (1, 3, 1, 1))),
    "broadcast_to": Case(lambda x: nd.broadcast_to(x, (3, 4, 5)), ((3, 1, 5),), EVERY),
    "broadcast_axis": Case(lambda x: nd.broadcast_axis(x, axis=(0, 2), size=(3, 2)), ((1, 4, 1),)),
    "broadcast_like": Case(nd.broadcast_like, ((3, 1), (3, 4))),
}


def reduction(call, dtypes=FLOATS, low=-2.0):
    return Case(call, ((3, 4, 5),), dtypes, low)


REDUCTIONS = {
    f"{name}_{axis}": reduction(lambda x, f=call, a=axis: f(x, axis=a))
    for name, call in (("sum", nd.sum), ("mean", nd.mean), ("max", nd.max), ("min", nd.min))
    for axis in (None, 0, 1, 2, (0, 2), (1, 2))
}
REDUCTIONS |= {
    "sum_integers": reduction(lambda x: nd.sum(x, axis=1), INTEGERS),
    "max_integers": reduction(lambda x: nd.max(x, axis=0), INTEGERS),
    "sum_excluded": reduction(lambda x: nd.sum(x, axis=1, exclude=True)),
    "sum_large": Case(lambda x: nd.sum(x), ((300, 70),), FLOATS[:2]),
    "mean_large": Case(lambda x: nd.mean(x, axis=0), ((700, 7),), FLOATS[:2]),
    "sum_one": Case(lambda x: nd.sum(x, axis=1), ((4, 1, 3),)),
    "prod": reduction(lambda x: nd.prod(x, axis=1), FLOATS[:2], low=0.5),
    "nansum": reduction(lambda x: nd.nansum(x, axis=1), FLOATS[:2]),
    "nanprod": reduction(lambda x: nd.nanprod(x, axis=1), FLOATS[:2], low=0.5),
    "norm": reduction(nd.norm, FLOATS[:2]),
    "norm_axis": reduction(lambda x: nd.norm(x, axis=1), FLOATS[:2]),
    "norm_1": reduction(lambda x: nd.norm(x, ord=1, axis=(0, 2)), FLOATS[:2]),
    "square_sum": reduction(lambda x: nd.sum(nd.square(x), axis=0)),
    "argmax": reduction(lambda x: nd.argmax(x, axis=1), FLOATS[:2]),
    "argmin": reduction(lambda x: nd.argmin(x, axis=2), FLOATS[:2]),
    "argmax_channel": Case(nd.argmax_channel, ((5, 4),), FLOATS[:2], differentiable=False),
    "L2Normalization": Case(nd.L2Normalization, ((5, 4),), FLOATS[:2]),
    "moments": Case(lambda x: nd.moments(x, axes=(0,)), ((5, 4),), FLOATS[:2]),
}

SOFTMAX = {
    "softmax": Case(nd.softmax, ((5, 4),)),
    "softmax_axis": Case(lambda x: nd.softmax(x, axis=1), ((5, 4, 3),)),
    "softmax_temperature": Case(lambda x: nd.softmax(x, temperature=2.5), ((5, 4),)),
    "log_softmax": Case(nd.log_softmax, ((5, 4),)),
    "log_softmax_axis": Case(lambda x: nd.log_softmax(x, axis=1), ((5, 4, 3),)),
    "softmin": Case(nd.softmin, ((5, 4),)),
    "SoftmaxOutput": Case(
        lambda x: nd.SoftmaxOutput(x, nd.array(label, x.context, x.dtype)), ((5, 4),), FLOATS[:2]
    ),
    "softmax_cross_entropy": Case(
        lambda x: nd.softmax_cross_entropy(x, nd.array(label, x.context, x.dtype)),
        ((5, 4),),
        FLOATS[:2],
    ),
    "pick": Case(lambda x: nd.pick(x, nd.array(label, x.context)), ((5, 4),)),
    "pick_int64": Case(lambda x: nd.pick(x, index(label, x, "int64")), ((5, 4),)),
    "pick_uint8": Case(lambda x: nd.pick(x, index(label, x, "uint8")), ((5, 4),)),
    "pick_same": Case(lambda x: nd.pick(x, nd.array(label, x.context, x.dtype), axis=1), ((5, 4),)),
    "pick_axis": Case(
        lambda x: nd.pick(x, nd.array([[2, 0, 4, 3]], x.context), axis=0, keepdims=True), ((5, 4),)
    ),
}

SHAPES = {
    "concat": Case(lambda a, b: nd.concat(a, b, a, dim=1), ((3, 4), (3, 2)), EVERY),
    "concat_rows": Case(lambda a, b: nd.concat(a, b, dim=0), ((3, 4), (2, 4)), EVERY),
    "concat_middle": Case(lambda a, b: nd.concat(a, b, dim=1), ((2, 3, 4), (2, 1, 4))),
    "stack": Case(lambda a, b: nd.stack(a, b, axis=1), ((3, 4), (3, 4)), FLOATS),
    "split": Case(lambda x: nd.split(x, 2, axis=1), ((3, 4),)),
    "split_v2": Case(lambda x: nd.split_v2(x, (1, 3), axis=1), ((3, 4),)),
    "slice": Case(lambda x: nd.slice(x, (1, 0), (3, 4), (1, 2)), ((4, 5),), EVERY),
    "slice_reversed": Case(lambda x: nd.slice(x, (3, None), (0, None), (-1, 1)), ((4, 5),)),
    "slice_3": Case(lambda x: nd.slice(x, (1, 0, 1), (3, 4, 3)), ((4, 5, 3),)),
    "slice_axis": Case(lambda x: nd.slice_axis(x, axis=1, begin=1, end=3), ((4, 5, 3),), EVERY),
    "slice_like": Case(nd.slice_like, ((4, 5), (3, 2))),
    "indexed": Case(lambda x: x[1:3, 2], ((4, 5),)),
    "indexed_by_arrays": Case(lambda x: x[index([0, 2, 2], x), index([1, 0, 4], x)], ((4, 5),)),
    "transpose": Case(nd.transpose, ((3, 4),), EVERY),
    "transpose_3": Case(lambda x: nd.transpose(x, (2, 0, 1)), ((3, 4, 5),), EVERY),
    "transpose_4": Case(lambda x: nd.transpose(x, (0, 2, 3, 1)), ((2, 3, 4, 5),)),
    "transpose_mixed": Case(lambda x: nd.transpose(x, (2, 1, 0)), ((3, 4, 5),)),
    "swapaxes": Case(lambda x: nd.swapaxes(x, 0, 2), ((3, 4, 5),)),
    "reshape": Case(lambda x: nd.reshape(x, (-1, 2)), ((3, 4),), EVERY),
    "flatten": Case(nd.flatten, ((3, 4, 5),), EVERY),
    "expand_dims": Case(lambda x: nd.expand_dims(x, 1), ((3, 4),), EVERY),
    "flip": Case(lambda x: nd.flip(x, axis=1), ((3, 4),), EVERY),
    "tile": Case(lambda x: nd.tile(x, (2, 3)), ((3, 4),)),
    "repeat": Case(lambda x: nd.repeat(x, 2, axis=1), ((3, 4),)),
    "take": Case(lambda x: nd.take(x, index([3, 0, 3], x)), ((4, 5),)),
    "take_axis": Case(lambda x: nd.take(x, index([[4, 0, 1], [1, 3, 1]], x), axis=1), ((4, 5, 2),)),
    "take_wrapped": Case(lambda x: nd.take(x, index([-1, 5], x), mode="wrap"), ((4, 5),)),
    "Embedding": Case(lambda w: nd.Embedding(index([1, 0, 1], w), w, 4, 5), ((4, 5),), FLOATS[:2]),
    "batch_take": Case(
        lambda x: nd.batch_take(x, index([1, 0, 4], x)), ((3, 5),), FLOATS[:2], differentiable=False
    ),
    "one_hot": Case(
        lambda x: nd.one_hot(index([1, 0, 3], x), 4, dtype=x.dtype), ((3,),), differentiable=False
    ),
    "gather_nd": Case(lambda x: nd.gather_nd(x, index([[1, 1], [0, 3]], x)), ((4, 5),), FLOATS[:2]),
    "scatter_nd": Case(
        lambda x: nd.scatter_nd(x, index([[1, 0], [0, 3]], x), (2, 4)), ((2,),), FLOATS[:2]
    ),
    "diag": Case(nd.diag, ((4, 4),)),
    "SequenceMask": Case(
        lambda x: nd.SequenceMask(x, index([1, 2, 3], x, "float32"), True), ((4, 3),), FLOATS[:1]
    ),
    "FullyConnected_9": Case(
        lambda x, w, b: nd.FullyConnected(x, w, b, num_hidden=9),
        ((70, 4), (9, 4), (9,)),
        FLOATS[:2],
    ),
    "LayerNorm": Case(nd.LayerNorm, ((5, 4), (4,), (4,)), FLOATS[:2]),
    "LayerNorm_axis": Case(
        lambda x, g, b: nd.LayerNorm(x, g, b, axis=1), ((5, 4, 3), (4,), (4,)), FLOATS[:2]
    ),
    "GroupNorm": Case(
        lambda x, g, b: nd.GroupNorm(x, g, b, num_groups=2), ((3, 4, 5), (2,), (2,)), FLOATS[:1]
    ),
    "InstanceNorm": Case(nd.InstanceNorm, ((3, 4, 5), (4,), (4,)), FLOATS[:1]),
    "UpSampling": Case(
        lambda x: nd.UpSampling(x, scale=2, sample_type="nearest"), ((2, 3, 4, 5),), FLOATS[:1]
    ),
}

CASES = {**ELEMENTWISE, **BROADCAST, **REDUCTIONS, **SOFTMAX, **SHAPES}


def random_arrays(shapes, dtype, low=-2.0, high=2.0, seed=7):
    random = np.random.RandomState(seed)
    if dtype in INTEGERS:
        return [random.randint(0 if dtype == "uint8" else -4, 5, s).astype(dtype) for s in shapes]
    return [random.uniform(low, high, shape).astype(dtype) for shape in shapes]


def results(call, arrays, ctx, grad_req=None):
    """Return the outputs, and the gradients of the inputs for outputs' gradients 0.5, 1.5, ..."""
    inputs = [nd.array(array, ctx, dtype=array.dtype) for array in arrays]
    if grad_req is None:
        outputs = call(*inputs)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        return [output.asnumpy() for output in outputs]
    for one in inputs:
        one.attach_grad(grad_req)
        one.grad[:] = 3
    with mx.autograd.record():
        outputs = call(*inputs)
        outputs = outputs if isinstance(outputs, list) else [outputs]
    heads = []
    for output in outputs:
        head = (np.arange(output.size) % 5 + 0.5).reshape(output.shape).astype(output.dtype)
        heads.append(nd.array(head, ctx, dtype=output.dtype))
    mx.autograd.backward(outputs, heads)
    return [one.asnumpy() for one in [*outputs, *(one.grad for one in inputs)]]


def assert_same(got, want, tolerance=0.0):
    assert len(got) == len(want)
    for ours, oracle in zip(got, want):
        assert ours.dtype == oracle.dtype
        allowed = max(tolerance, TOLERANCES.get(oracle.dtype.name, 0))
        np.testing.assert_allclose(ours, oracle, rtol=allowed, atol=allowed)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, case in CASES.items() for dtype in case.dtypes],
)
def test_an_operator(name, dtype):
    case = CASES[name]
    arrays = random_arrays(case.shapes, dtype, case.low, case.high)
    differentiable = case.differentiable and dtype in FLOATS
    for grad_req in ("write", "add") if differentiable else (None,):
        want = results(case.call, arrays, mx.cpu(), grad_req)
        assert_same(results(case.call, arrays, mx.gpu(0), grad_req), want, case.tolerance)


@pytest.mark.parametrize("source", EVERY)
@pytest.mark.parametrize("target", EVERY)
def test_casts(source, target):
    (array,) = random_arrays([(3, 4)], source, low=0, high=9)
    cast = nd.array(array, mx.gpu(0), dtype=source).astype(target)
    assert_same([cast.asnumpy()], [nd.array(array, dtype=source).astype(target).asnumpy()])


@pytest.mark.parametrize("dtype", EVERY)
def test_filling_and_assigning(dtype):
    def filled(ctx):
        array = nd.full((4, 5), 3, ctx, dtype=dtype)
        array[1] = 2
        array[2:4, 1:3] = nd.ones((2, 2), ctx, dtype=dtype)
        array[:, 4] = 5
        made = [nd.zeros((2, 3), ctx, dtype=dtype), nd.ones((2,), ctx, dtype=dtype)]
        made += [nd.arange(1, 7, 2, ctx=ctx, dtype=dtype), nd.eye(3, ctx=ctx, dtype=dtype)]
        return [one.asnumpy() for one in (array, *made)]

    assert_same(filled(mx.gpu(0)), filled(mx.cpu()))


OPTIMIZERS = sorted(set(mx.optimizer.Optimizer.opt_registry) - {"test", "sgld"})  # sgld is random


# Whose states MXNet makes in float32, or which round to float32 on the way.
FLOAT32_STATES = {"adadelta", "adagrad", "ftrl", "groupadagrad", "lamb", "rmsprop"}


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("clip", [None, 0.2], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [*FLOATS, "mixed"])
@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "centered rmsprop"])
def test_an_optimizer(name, momentum, dtype, clip):
    name, options = name.split()[-1], {"centered": True} if " " in name else {}
    options.update(learning_rate=0.05, wd=0.0 if name == "groupadagrad" else 0.01)
    options.update(clip_gradient=clip, rescale_grad=0.7, multi_precision=dtype == "mixed")
    if "momentum" in mx.optimizer.Optimizer.opt_registry[name].__init__.__code__.co_varnames:
        options["momentum"] = momentum
    if momentum and (name == "dcasgd" or "momentum" not in options):
        pytest.skip("has no momentum that works")
    if dtype in ("float64", "float16") and name in FLOAT32_STATES:
        pytest.skip("its states are float32")
    dtype = "float16" if dtype == "mixed" else dtype

    def updated(ctx):
        updater = mx.optimizer.get_updater(mx.optimizer.create(name, **options))
        arrays = random_arrays([(3, 4), (2, 5)] * 2, dtype)
        weights = [nd.array(one, ctx, dtype=dtype) for one in arrays[:2]]
        for _ in range(2):
            for i in range(2):
                updater(i, nd.array(arrays[i + 2], ctx, dtype=dtype), weights[i])
        return [weight.asnumpy() for weight in weights]

    assert_same(updated(mx.gpu(0)), updated(mx.cpu()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_arrays_at_once(dtype):
    def computed(ctx):
        shapes = [(3, 4), (40000,), (7,)]
        weights = [nd.array(one, ctx, dtype=dtype) for one in random_arrays(shapes, dtype)]
        gradients = [
            nd.array(one, ctx, dtype=dtype) for one in random_arrays(shapes, dtype, seed=8)
        ]
        pairs = [one for pair in zip(weights, gradients) for one in pair]
        nd.multi_sgd_update(
            *pairs, out=weights, lrs=(0.1, 0.2, 0.3), wds=(0.01, 0.02, 0), num_weights=3
        )
        finite = nd.multi_all_finite(*weights, num_arrays=3)
        weights[1][5] = np.inf
        outputs = [
            finite,
            nd.multi_all_finite(*weights, num_arrays=3),
            nd.all_finite(weights[0]),
            nd.all_finite(weights[1]),
            weights[0],
            weights[2],
        ]
        outputs.append(nd.multi_sum_sq(weights[0], gradients[1], num_arrays=2))
        return [output.asnumpy() for output in outputs]

    got, want = computed(mx.gpu(0)), computed(mx.cpu())
    assert_same(got[:-1], want[:-1])
    np.testing.assert_allclose(got[-1], want[-1], rtol=1e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("storage", ["csr", "row_sparse"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 4), (300, 7), (4, 700)], ids=str)
def test_dense_to_sparse_and_back(storage, dtype, shape):
    (array,) = random_arrays([shape], dtype)
    array[array < 1] = 0
    array[1] = 0

    def cast(ctx):
        sparse = nd.array(array, ctx, dtype=dtype).tostype(storage)
        parts = [sparse.data, sparse.indices, *([sparse.indptr] if storage == "csr" else [])]
        return [one.asnumpy() for one in (*parts, sparse.tostype("default"))]

    assert_same(cast(mx.gpu(0)), cast(mx.cpu()))


def row_sparse(rows, ctx, dtype, row_size=5):
    """An array of eight rows, of which all but these are zero."""
    if not rows:
        return nd.sparse.zeros("row_sparse", (8, row_size), ctx, dtype)
    (values,) = random_arrays([(len(rows), row_size)], dtype, seed=len(rows))
    return nd.sparse.row_sparse_array((values, rows), (8, row_size), ctx, dtype)


def rows_and_values(array):
    return [array.indices.asnumpy(), array.asnumpy()]


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_row_sparse_arrays(dtype):
    def summed(ctx):
        arrays = [row_sparse(rows, ctx, dtype) for rows in ([1, 4], [], [0, 1, 7], [4])]
        sums = [nd.sparse.add_n(*arrays), nd.sparse.add_n(*arrays[:2])]
        assert not nd.sparse.add_n(arrays[1], arrays[1]).asnumpy().any()
        return [one for total in sums for one in rows_and_values(total)]

    assert_same(summed(mx.gpu(0)), summed(mx.cpu()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index_dtype", ["float32", "int32", "int64"])
def test_the_sparse_gradient_of_embedding(index_dtype, dtype):
    def gradient(ctx, dtype, words=((5, 1, 5), (7, 5, 0))):
        weight, grad = nd.ones((8, 9), ctx, dtype), row_sparse([], ctx, dtype, 9)
        mx.autograd.mark_variables([weight], [grad])  # attach_grad would make one on the CPU
        words = index(words, weight, index_dtype)
        with mx.autograd.record():
            output = nd.Embedding(words, weight, 8, 9, dtype=dtype, sparse_grad=True)
        (head,) = random_arrays([output.shape], dtype)
        output.backward(nd.array(head, ctx, dtype=dtype))
        return rows_and_values(grad)

    # On the CPU MXNet has none in float16.
    rows, values = gradient(mx.cpu(), "float32" if dtype == "float16" else dtype)
    assert_same(gradient(mx.gpu(0), dtype), [rows, values.astype(dtype)])
    with pytest.raises(mx.MXNetError, match="out of bound"):
        gradient(mx.gpu(0), dtype, [[8]])


LAZY, FULL = {"wd": 0.02, "lazy_update": True}, {"wd": 0.02, "lazy_update": False}
SPARSE_UPDATES = {
    "sgd": (nd.sparse.sgd_update, 0, LAZY),
    "sgd_full": (nd.sparse.sgd_update, 0, FULL),
    "sgd_mom": (nd.sparse.sgd_mom_update, 1, {"momentum": 0.9, **LAZY}),
    "sgd_mom_full": (nd.sparse.sgd_mom_update, 1, {"momentum": 0.9, **FULL}),
    "adam": (nd.sparse.adam_update, 2, LAZY),
    "adam_full": (nd.sparse.adam_update, 2, FULL),
    "adagrad": (nd.sparse.adagrad_update, 1, {"epsilon": 1e-3}),
    "ftrl": (nd.sparse.ftrl_update, 2, {"wd": 0.02, "lamda1": 0.01, "beta": 1.0}),
}


@pytest.mark.parametrize("clip", [-1, 0.2], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SPARSE_UPDATES)
def test_an_update_by_a_row_sparse_gradient(name, dtype, clip):
    update, num_states, options = SPARSE_UPDATES[name]
    options = {"lr": 0.1, "rescale_grad": 0.7, "clip_gradient": clip, **options}

    def updated(ctx):
        weight = random_arrays([(8, 5)], dtype)
        states = random_arrays([(8, 5)] * num_states, dtype, low=0.5, high=1.0)
        arrays = [nd.array(one, ctx, dtype=dtype) for one in weight + states]
        if name == "ftrl":  # which MXNet has for row_sparse weights only
            arrays = [one.tostype("row_sparse") for one in arrays]
        for rows in ([1, 4], [], [0, 1, 7]):
            gradient = row_sparse(rows, ctx, dtype)
            update(arrays[0], gradient, *arrays[1:], out=arrays[0], **options)
        return [array.asnumpy() for array in arrays]

    assert_same(updated(mx.gpu(0)), updated(mx.cpu()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_random_numbers_have_their_distribution_and_follow_the_seed(dtype):
    def drawn(seed):
        mx.random.seed(seed, ctx=mx.gpu(0))
        uniform = nd.random.uniform(2, 5, (40000,), dtype=dtype, ctx=mx.gpu(0)).asnumpy()
        normal = nd.random.normal(1, 3, (40000,), dtype=dtype, ctx=mx.gpu(0)).asnumpy()
        return uniform.astype("float64"), normal.astype("float64")

    uniform, normal = drawn(3)
    assert 2 <= uniform.min() < 2.01 and 4.99 < uniform.max() <= 5
    assert abs(uniform.mean() - 3.5) < 0.02 and abs(uniform.var() - 0.75) < 0.02
    assert abs(normal.mean() - 1) < 0.06 and abs(normal.std() - 3) < 0.06
    assert all(np.array_equal(a, b) for a, b in zip(drawn(3), (uniform, normal)))
    assert not np.array_equal(drawn(4)[0], uniform)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("arrays", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_numpys_random_numbers_take_arrays_and_numbers(kind, arrays):
    """uniform(low, high), normal(mean, deviation): rows with parameters of their own."""
    first = np.array([[-1.0], [2.0]]) if arrays[0] else np.array([[1.0]])
    second = np.array([[3.0], [5.0]]) if arrays[1] else np.array([[4.0]])
    mx.random.seed(3, ctx=mx.gpu(0))
    with mx.util.np_shape(True), mx.util.np_array(True):
        given = [
            mx.np.array(value, ctx=mx.gpu(0)) if value.size > 1 else value.item()
            for value in (first, second)
        ]
        draw = getattr(mx.np.random, kind)
        drawn = draw(*given, size=(2, 20000), ctx=mx.gpu(0)).asnumpy()
    mean = first if kind == "normal" else (first + second) / 2
    deviation = second if kind == "normal" else (second - first) / 12**0.5
    assert abs(drawn.mean(axis=1, keepdims=True) - mean).max() < 0.15
    assert abs(drawn.std(axis=1, keepdims=True) / deviation - 1).max() < 0.03
