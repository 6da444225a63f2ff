"""All operators of MXNet 1.9.1: how the operator sweep trains them, or why it does not.

``RECIPES`` maps an operator's own name to its cases, ``EXCLUDED`` the names of the others to a
reason. Aliases (``_npi_det`` for ``_linalg_det``) are the same operator.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import base

ALL_FORMS = ("imperative", "hybridized", "static")
DYNAMIC = ALL_FORMS[:2]  # the shape of the output depends on the data
IMPERATIVE = ALL_FORMS[:1]
WRITE = ("write",)  # MXNet overwrites what it should add to, adds to memory of others, or refuses


class Case(NamedTuple):
    """One way to call an operator; ``inputs`` and the others are as in :func:`op`."""

    inputs: list
    attributes: dict
    call: Callable | None = None
    numpy: bool = False
    forms: tuple = ALL_FORMS
    grad_reqs: tuple = ("write", "add")
    zero: bool = False
    own_heads: bool = False
    layer: Callable | None = None
    devices: tuple = (1, 2)


class P(NamedTuple):
    """A Parameter with a gradient, between ``low`` and ``high``, or of these ``values``."""

    shape: tuple = (3, 5)
    low: float = -1.0
    high: float = 1.0
    values: Any = None
    zero: bool = False  # whether its gradient is zero by definition


class C(NamedTuple):
    """Data: a constant input."""

    values: Any
    dtype: str = "float32"


RECIPES: dict[str, list[Case]] = {}


def op(names: str, *inputs: Any, **options: Any) -> None:
    """Add one case for each of these operators.

    ``inputs`` are those of the operator in its own order. Options that are fields of ``Case``:
    ``call``, a function of ``mx.nd`` or ``mx.sym`` and the inputs, in place of the operator itself;
    ``forms`` and ``grad_reqs``, with which MXNet itself trains it on one device; ``zero``, its
    gradients are zero by definition; ``own_heads``, backward does not use (or not linearly) the
    gradients of its outputs, as that of a loss; ``devices``, how many. All others are attributes of
    the operator.
    """
    fields = {key: options.pop(key) for key in Case._fields[2:] if key in options}
    for name in names.split():
        numpy = fields.get("numpy", name.startswith("_np"))
        case = Case([*inputs], options, **{**fields, "numpy": numpy})
        RECIPES.setdefault(name, []).append(case)


def handle(name: str) -> base.OpHandle:
    operator = base.OpHandle()
    base.check_call(base._LIB.NNGetOpHandle(base.c_str(name), ctypes.byref(operator)))
    return operator


def operators() -> dict[str, list[str]]:
    """All registered operators: of each, its own name, and all its names."""
    by_handle: dict[int, list[str]] = {}
    for name in sorted(mx.operator.get_all_registered_operators()):
        by_handle.setdefault(handle(name).value, []).append(name)
    return {_own_name(names[0]): names for names in by_handle.values()}


def _own_name(alias: str) -> str:
    strings, count = [ctypes.c_char_p() for _ in range(4)], base.mx_uint()
    lists = [ctypes.POINTER(ctypes.c_char_p)() for _ in range(3)]
    name, description, variadic, returned = strings
    out = [name, description, count, *lists, variadic, returned]
    base.check_call(base._LIB.MXSymbolGetAtomicSymbolInfo(handle(alias), *map(ctypes.byref, out)))
    return base.py_str(name.value)


OPERATORS = operators()
EXCLUDED: dict[str, str] = {}


def exclude(reason: str, patterns: str) -> None:
    """Exclude the operators whose names are matched; each pattern matches one at least."""
    for pattern in patterns.split():
        matched = [name for name in OPERATORS if re.fullmatch(pattern, name)]
        assert matched, pattern
        EXCLUDED.update(dict.fromkeys(matched, reason))


# --- Elementwise: one input -----------------------------------------------------------------------
BIG = (2, 16, 6, 6)  # takes oneDNN's path, where there is one
SMOOTH = "arctan arcsinh cbrt cos cosh degrees erf exp expm1 negative radians sigmoid sin sinh "
SMOOTH += "square softsign tan tanh abs relu _copy"
op(SMOOTH, P())
op("relu sigmoid tanh exp square _copy abs", P(BIG))
POSITIVE = "sqrt rsqrt log log10 log2 log1p reciprocal rcbrt gamma gammaln"
op(POSITIVE, P(low=0.5, high=2))
op("arcsin arccos arctanh erfinv", P(low=-0.7, high=0.7))
op("arccosh", P(low=1.5, high=3))
ZERO = "sign floor ceil round rint trunc fix zeros_like ones_like logical_not BlockGrad"
op(ZERO, P(), zero=True)
op("shape_array size_array", P(), zero=True)
op("_contrib_round_ste _contrib_sign_ste _contrib_div_sqrt_dim MakeLoss make_loss", P())
op("hard_sigmoid", P())
op("_contrib_gradientmultiplier", P(), scalar=-0.5)
op("_contrib_quadratic", P(), a=1.5, b=2, c=3)
op("smooth_l1", P(low=-2, high=2), scalar=1.0)
op("clip", P(low=-2, high=2), a_min=-1, a_max=1)
op("Cast", P(), dtype="float64")
op("Cast", P(), dtype="float16")
op("amp_cast", P(), dtype="float16")
op("amp_cast", P(), dtype="float32", grad_reqs=WRITE)
op("amp_multicast", P(), P((4,)), num_outputs=2, grad_reqs=WRITE)
op("_contrib_quantize_v2", P(), zero=True)
op("_contrib_quantize", P(), P((1,), -2, -1), P((1,), 1, 2), zero=True)
op("_identity_with_attr_like_rhs", P(), C(np.ones((3, 5))))
op("_copyto", P(), call=lambda F, x: x.copyto(mx.cpu(3)), forms=IMPERATIVE)
NP_SMOOTH = "absolute arctan arcsinh cbrt cos cosh degrees exp expm1 negative radians sin sinh "
NP_SMOOTH += "square tan tanh"
op(" ".join(f"_npi_{name}" for name in NP_SMOOTH.split()), P())
op(" ".join(f"_npi_{name}" for name in "sqrt log log10 log2 log1p reciprocal".split()),
   P(low=0.5, high=2))  # fmt: skip
op("_npi_arcsin _npi_arccos _npi_arctanh", P(low=-0.7, high=0.7))
op("_npi_arccosh", P(low=1.5, high=3))
NP_ZERO = "sign floor ceil rint trunc fix around logical_not isfinite isinf isnan isneginf isposinf"
op(" ".join(f"_npi_{name}" for name in NP_ZERO.split()), P(), zero=True)
op("_npi_full_like", P(), fill_value=2, zero=True)
op("_npx_relu _npx_sigmoid _np_copy", P())
op("_npx_relu _npx_sigmoid", P(BIG))
op("_npi_nan_to_num", P())

# --- Elementwise: an input and a number -----------------------------------------------------------
LINEAR = "_plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar _scatter_plus_scalar "
LINEAR += "_scatter_minus_scalar _maximum_scalar _minimum_scalar _hypot_scalar _npi_add_scalar "
LINEAR += "_npi_subtract_scalar _npi_rsubtract_scalar _npi_multiply_scalar _npi_true_divide_scalar "
LINEAR += "_npi_arctan2_scalar _npi_rarctan2_scalar _npi_ldexp_scalar _npi_rldexp_scalar"
op(LINEAR, P(low=-1, high=1), scalar=0.375)
op("_rdiv_scalar _power_scalar _rpower_scalar _npi_power_scalar _npi_rpower_scalar "
   "_npi_rtrue_divide_scalar", P(low=0.5, high=2), scalar=1.5)  # fmt: skip
op("_mod_scalar _npi_mod_scalar _rmod_scalar _npi_rmod_scalar", P(low=2.1, high=2.9), scalar=7.0)
COMPARED = "equal greater greater_equal lesser lesser_equal not_equal"
op(" ".join(f"_{name}_scalar" for name in COMPARED.split()), P(), scalar=0.25, zero=True)
op("_logical_and_scalar _logical_or_scalar _logical_xor_scalar", P(), scalar=1.0, zero=True)
NP_COMPARED = "equal greater greater_equal less less_equal not_equal"
op(" ".join(f"_npi_{name}_scalar" for name in NP_COMPARED.split()), P(), scalar=0.25, zero=True)

# --- Elementwise: two inputs ----------------------------------------------------------------------
TWO = [P(low=0.5, high=2), P(low=1.1, high=2.3)]
op("elemwise_add elemwise_sub elemwise_mul elemwise_div _scatter_elemwise_div", *TWO)
op("elemwise_add elemwise_sub elemwise_mul elemwise_div", P(BIG), P(BIG, 1, 2))
op("_maximum _minimum _hypot _power", *TWO)
op("_mod", P(low=5.1, high=5.9), P(low=2.1, high=2.4))
op(" ".join(f"_{name}" for name in COMPARED.split()), *TWO, zero=True)
op("_logical_and _logical_or _logical_xor", *TWO, zero=True)
ROW = [P((3, 1), 0.5, 2), P((1, 5), 1.1, 2.3)]  # broadcast: backward sums
BROADCAST = "add sub mul div maximum minimum hypot power"
for pair in (TWO, ROW, [P(BIG, 0.5, 1.5), P((1, 16, 1, 1), 0.8, 1.2)]):
    op(" ".join(f"broadcast_{name}" for name in BROADCAST.split()), *pair)
op("broadcast_mod", P((3, 1), 5.1, 5.9), P((1, 5), 2.1, 2.4))
op(" ".join(f"broadcast_{name}" for name in COMPARED.split()), *ROW, zero=True)
op("broadcast_logical_and broadcast_logical_or broadcast_logical_xor", *ROW, zero=True)
NP_TWO = "add subtract multiply true_divide power hypot arctan2 ldexp copysign"
for pair in (TWO, ROW):
    op(" ".join(f"_npi_{name}" for name in NP_TWO.split() if name != "copysign"), *pair)
    op("_npi_copysign", pair[0], pair[1]._replace(zero=True))
op("_npi_mod", P((3, 1), 5.1, 5.9), P((1, 5), 2.1, 2.4))
op(" ".join(f"_npi_{name}" for name in NP_COMPARED.split()), *ROW, zero=True)
op("add_n", P(), P(), P())
op("add_n", P(BIG), P(BIG))
op("_rnn_param_concat", P((4,)), P((7,)), dim=0)
op("where", C(np.eye(3, 5)), P(), P())
op("_npi_where", C(np.eye(3, 5), "bool"), P(), P((5,)), grad_reqs=WRITE)
op("_npi_where", C(np.eye(3, 5), "bool"), P(), P())
op("_npi_where_lscalar", C(np.eye(3, 5), "bool"), P(), scalar=2)
op("_npi_where_rscalar", C(np.eye(3, 5), "bool"), P(), scalar=2)
op("_npi_where_scalar2", P(), x=1, y=2, zero=True)

# --- Reductions -----------------------------------------------------------------------------------
CUBE = P((3, 4, 5), 0.5, 1.5)
for axis in ({}, {"axis": 1}, {"axis": (0, 2), "keepdims": True}):
    op("sum mean prod nansum nanprod max min", CUBE, **axis)
    op("_np_sum _np_max _np_min _np_prod _npi_mean", CUBE, **axis)
op("_np_all _np_any", CUBE, zero=True)
op("_npi_std _npi_var", CUBE, axis=1, zero=True)
op("_npi_average", P(), P(low=1, high=2), axis=None)
op("_npi_average", P(), axis=1, weighted=False)
op("_npi_norm", P(), ord=2, flag=-2, grad_reqs=WRITE)
op("_npi_norm", P(), ord=2, axis=(1,), flag=1, grad_reqs=WRITE)
op("norm", P())
op("norm", P(), ord=1, axis=1)
op("norm", P(), ord=2, axis=1, keepdims=True)
op("moments", P(), axes=(0,))
op("_square_sum", P(), call=lambda F, x: F._internal._square_sum(
   F.cast_storage(x, "row_sparse"), axis=1), forms=IMPERATIVE)  # fmt: skip
op("_np_cumsum", P(), axis=1)
op("_np_trace", P((4, 4)))
op("softmax_cross_entropy", P(), C([0, 4, 2]))
op("argmax argmin", P(), axis=1, zero=True)
op("_npi_argmax _npi_argmin", P(), axis=1, zero=True)
op("argsort", P(), zero=True)
DISTINCT = P(values=np.random.RandomState(3).permutation(15).reshape(3, 5) / 8)
op("sort", DISTINCT, axis=1)
op("topk", DISTINCT, k=2, ret_typ="value")
op("topk", DISTINCT, k=2, ret_typ="both")
op("topk", DISTINCT, k=2, zero=True)
op("_npi_percentile", DISTINCT, C([25.0]), zero=True)
op("_npi_diff", P(), n=1)
op("_npi_ediff1d", P())
op("_npi_polyval", P((4,)), P((3,)))
op("_npi_bincount", C(np.arange(5), "int32"), P((5,)), has_weights=True, zero=True, forms=DYNAMIC)

# --- Shapes and indices ---------------------------------------------------------------------------
op("Flatten", CUBE)
op("Reshape", CUBE, shape=(-1, 6))
op("Reshape", P(BIG), shape=(0, -1))
op("_np_reshape _npx_reshape", CUBE, newshape=(-1, 6))
op("reshape_like", CUBE, C(np.ones((6, 10))))
op("expand_dims", P(), axis=1)
op("squeeze", P((3, 1, 5)))
op("_np_squeeze", P((3, 1, 5)))
op("transpose", CUBE, axes=(2, 0, 1))
op("transpose", P(BIG), axes=(0, 2, 3, 1))
op("_np_transpose", CUBE, axes=(2, 0, 1))
op("_np_moveaxis", CUBE, source=(0,), destination=(2,), grad_reqs=WRITE)
op("SwapAxis", CUBE, dim1=0, dim2=2)
op("depth_to_space", P((2, 8, 2, 3)), block_size=2)
op("space_to_depth", P((2, 2, 4, 6)), block_size=2)
op("reverse", P(), axis=(1,))
op("_npi_flip", P(), axis=(1,))
op("_npi_rot90", P(), k=1, axes=(0, 1))
op("_np_roll", P(), shift=2)
op("repeat", P(), repeats=3, axis=1)
op("tile", P(), reps=(2, 3))
op("broadcast_to", P((3, 1)), shape=(3, 5))
op("broadcast_axis", P((3, 1)), axis=1, size=5)
op("broadcast_like", P((3, 1)), C(np.ones((3, 5))))
op("_npi_broadcast_to", P((3, 1)), shape=(2, 3, 5))
op("_np_atleast_1d _np_atleast_2d _np_atleast_3d", P((5,)), P((2, 3)), zero=True)
op("Pad", P((2, 3, 4, 5)), mode="constant", pad_width=(0, 0, 0, 0, 1, 2, 2, 1))
op("Pad", P((2, 3, 4, 5)), mode="edge", pad_width=(0, 0, 0, 0, 1, 2, 2, 1))
op("Pad", P((2, 3, 4, 5)), mode="reflect", pad_width=(0, 0, 0, 0, 1, 2, 2, 1))
op("_npi_pad", P(), pad_width=((1, 2), (0, 3)))
op("Concat", P((2, 3)), P((2, 4)), dim=1)
op("Concat", P(BIG), P(BIG), dim=1)
op("_npi_concatenate", P((2, 3)), P((2, 4)), axis=1)
op("stack", P(), P(), axis=1)
op("_npi_stack", P(), P(), axis=1)
op("_npi_hstack _npi_vstack _npi_dstack _npi_column_stack", P(), P())
op("SliceChannel", P((3, 6)), num_outputs=3, axis=1)
op("SliceChannel", P(BIG), num_outputs=2, axis=1)
op("_split_v2", P((3, 6)), indices=(0, 2, 3), axis=1)
op("_npi_hsplit", P((3, 6)), indices=(0, 2, 3), axis=1)
op("_npi_dsplit", P((2, 3, 6)), indices=(0, 2, 3), axis=2)
op("slice", CUBE, begin=(0, 1, None), end=(2, 3, None), step=(1, 1, 2))
op("slice", P(BIG), begin=(0, 3), end=(2, 12))
op("slice_axis", CUBE, axis=1, begin=1, end=3)
op("slice_like", CUBE, C(np.ones((2, 2, 5))))
op("Crop", P((2, 3, 6, 6)), C(np.ones((2, 3, 4, 4))), num_args=2)
op("diag", P((4, 4)), k=1)
op("diag", P((4,)))
op("_np_diag", P((4, 4)), k=1)
op("_np_diagflat", P((4,)))
op("_np_diagonal", P((4, 4)))
op("_npi_tril", P((4, 4)))
op("take", P(), C([2, 0, 2]))
op("take", P((40, 16)), C([[2, 0, 2], [39, 2, 1]]))
op("pick", P(), C([4, 0, 2]), axis=1)
op("gather_nd", P(), C([[2, 0, 2], [1, 1, 1]]))
op("scatter_nd", P((3,)), C([[2, 0, 1], [1, 1, 4]]), shape=(3, 5))
op("Embedding", C([[1, 3], [3, 0]]), P((7, 4)), input_dim=7, output_dim=4)
op("one_hot", P(values=[1.0, 3.0]), depth=5, zero=True)
op("SequenceLast SequenceMask SequenceReverse", P((4, 3, 2)), C([2, 4, 1]),
   use_sequence_length=True)  # fmt: skip
op("_contrib_index_copy", P((5, 3)), C([1, 4]), P((2, 3)))
op("_contrib_index_array", P(), zero=True)
op("_contrib_arange_like", P(), axis=1, zero=True)
op("_contrib_boolean_mask", P((4, 3)), C([1, 0, 1, 1]), forms=DYNAMIC)
op("_npx_nonzero", P(), zero=True, forms=DYNAMIC)
op("_npi_unique", P((5,)), zero=True, forms=DYNAMIC)
op("_npi_diag_indices_from", P((4, 4)), zero=True)
op("_ravel_multi_index", P(values=[[1.0, 2.0], [3.0, 0.0]]), shape=(3, 5), zero=True)
op("_unravel_index", P(values=[3.0, 8.0]), shape=(3, 5), zero=True)
op("cast_storage", P(), stype="default")
op("cast_storage", P(), forms=IMPERATIVE, call=lambda F, x: F.cast_storage(
   F.cast_storage(x, "row_sparse"), "default"))  # fmt: skip
op("_sparse_retain", P(), call=lambda F, x: F.cast_storage(F.sparse.retain(
   F.cast_storage(x, "row_sparse"), F.array([0, 2], ctx=x.context)), "default"),
   forms=IMPERATIVE)  # fmt: skip
op("im2col", P((2, 3, 5, 5)), kernel=(3, 3))
op("col2im", P((2, 27, 9)), kernel=(3, 3), output_size=(5, 5))

# --- Matrices -------------------------------------------------------------------------------------
A, B = P((3, 4)), P((4, 5))
op("dot", A, B)
op("dot", P((4, 3)), P((5, 4)), transpose_a=True, transpose_b=True)
op("dot", P((32, 64)), P((64, 16)))
op("batch_dot", P((2, 3, 4)), P((2, 4, 5)))
op("batch_dot", P((2, 4, 3)), P((2, 5, 4)), transpose_a=True, transpose_b=True)
op("_np_dot", A, B)
op("_np_dot", P((4,)), P((4,)))
op("_npi_matmul", A, B)
op("_npi_matmul", P((2, 3, 4)), B)
op("_npi_einsum", A, B, subscripts="ij,jk->ik")
op("_npi_tensordot", A, B, a_axes_summed=(1,), b_axes_summed=(0,), grad_reqs=WRITE)
op("_npi_tensordot_int_axes", A, B, axes=1)
op("_linalg_gemm", A, B, P((3, 5)), alpha=2.0, beta=0.5, grad_reqs=WRITE)
op("_linalg_gemm2", A, B, grad_reqs=WRITE)
op("_linalg_syrk", A)
RNG = np.random.RandomState(11)
SQUARE = RNG.normal(0, 0.3, (4, 4)) + 2 * np.eye(4)
SPD = SQUARE @ SQUARE.T / 4 + np.eye(4)
LOWER = np.tril(SQUARE)
SYMMETRIC = np.diag([1.0, 2.0, 3.0, 4.0]) + 0.1 * (SPD + SPD.T)
op("_linalg_trmm _linalg_trsm", P(values=LOWER), P((4, 5)), grad_reqs=WRITE)
op("_linalg_potrf _linalg_potri", P(values=SPD))
op("_npi_cholesky", P(values=SPD))
op("_linalg_det _linalg_slogdet _linalg_inverse", P(values=SQUARE), grad_reqs=WRITE)
op("_linalg_gelqf", A)
op("_npi_eig _npi_eigvals", P(values=SYMMETRIC), zero=True)
op("_npi_pinv", A, C([1e-15]), zero=True, call=lambda F, x, r: F.numpy._internal.pinv(
   A=x, rcond=F.np.sum(r)))  # fmt: skip
op("_npi_pinv_scalar_rcond", A, zero=True)
op("_linalg_syevd", P(values=SYMMETRIC), grad_reqs=WRITE)
op("_linalg_sumlogdiag", P(values=SPD))
op("_linalg_extractdiag _linalg_extracttrian", P((4, 4)))
op("_linalg_makediag", P((4,)))
op("_linalg_maketrian", P((6,)))
op("_npi_solve", P(values=SQUARE), P((4, 2)))
op("_npi_tensorinv", P(values=SQUARE.reshape(2, 2, 2, 2)), ind=2)
op("_npi_tensorsolve", P(values=SQUARE.reshape(2, 2, 2, 2)), P((2, 2)))
op("_npi_svd", P((3, 4)))
op("_npi_eigh", P(values=SYMMETRIC), UPLO="L", zero=True)
op("_npi_eigvalsh", P(values=SYMMETRIC), UPLO="L", zero=True)
op("_contrib_interleaved_matmul_selfatt_qk", P((5, 2, 24)), heads=2)
op("_contrib_interleaved_matmul_selfatt_valatt", P((5, 2, 24)), P((4, 5, 5)), heads=2)
op("_contrib_interleaved_matmul_encdec_qk", P((5, 2, 8)), P((6, 2, 16)), heads=2)
op("_contrib_interleaved_matmul_encdec_valatt", P((6, 2, 16)), P((4, 5, 6)), heads=2)

# --- Layers ---------------------------------------------------------------------------------------
op("FullyConnected", P((2, 6)), P((5, 6)), P((5,)), num_hidden=5)
op("FullyConnected", P((2, 3, 6)), P((5, 6)), num_hidden=5, no_bias=True, flatten=False)
op("FullyConnected", P((8, 64)), P((32, 64)), P((32,)), num_hidden=32)


def gradient_penalty(F, x, w):
    """A gradient, which is trained: backward of FullyConnected's backward."""
    x = x.copy()
    x.attach_grad()
    y = F.FullyConnected(x, w, num_hidden=5, no_bias=True).square()
    return mx.autograd.grad(y, x, create_graph=True)[0]


op("FullyConnected", C(np.eye(2, 6) + 0.5), P((5, 6)), forms=IMPERATIVE, call=gradient_penalty)
for kind in "relu sigmoid softrelu softsign tanh".split():
    for shape in ((3, 5), BIG):
        op("Activation", P(shape), act_type=kind)
for kind in "elu gelu leaky selu".split():
    for shape in ((3, 5), BIG):
        op("LeakyReLU", P(shape), act_type=kind)
op("LeakyReLU", P((2, 3, 4)), P((3,)), act_type="prelu")
op("softmax log_softmax softmin", P())
op("softmax log_softmax softmin", P(), axis=0, temperature=2.0)
op("softmax log_softmax", P(BIG), axis=1)
op("softmax", P(), C([2, 5, 1], "int32"), axis=1, use_length=True)
op("SoftmaxActivation", P())
op("SoftmaxActivation", P(BIG), mode="channel")
op("Dropout", P((6, 7)), p=0.5)
op("Dropout", P((6, 7)), p=0.5, axes=(1,))
AUXILIARY = lambda n: (C(np.zeros(n)), C(np.ones(n)))  # noqa: E731
for shape in ((4, 3, 5, 5), (4, 16, 6, 6)):
    n = shape[1]
    inputs = [P(shape), P((n,), 0.5, 2), P((n,)), *AUXILIARY(n)]
    op("BatchNorm _contrib_BatchNormWithReLU", *inputs, fix_gamma=False)
    op("_contrib_SyncBatchNorm", *inputs, fix_gamma=False, key=f"sweep{n}", devices=(1,))
op("BatchNorm", P((6, 5)), P((5,), 0.5, 2), P((5,)), *AUXILIARY(5))
op("BatchNorm", P((4, 5, 6, 3)), P((3,), 0.5, 2), P((3,)), *AUXILIARY(3), axis=3, fix_gamma=False)
op("BatchNorm", P((6, 5)), P((5,), 0.5, 2), P((5,)), *AUXILIARY(5), fix_gamma=False,
   use_global_stats=True)  # fmt: skip
op("LayerNorm", P((3, 8)), P((8,), 0.5, 2), P((8,)))
op("LayerNorm", P((4, 3, 32)), P((32,), 0.5, 2), P((32,)))
op("InstanceNorm", P((2, 3, 4, 4)), P((3,), 0.5, 2), P((3,)))
op("GroupNorm", P((2, 4, 3, 3)), P((2,), 0.5, 2), P((2,)), num_groups=2)
op("L2Normalization", P((2, 3, 4)))
op("L2Normalization", P((2, 3, 4)), mode="channel")
op("LRN", P((2, 5, 4, 4)), nsize=3)
op("LRN", P(BIG), nsize=5)


def convolution(names, transposed, sizes, c_in, c_out, **options):
    """Add convolutions whose kernels are of ``sizes``, of data 8 or 6 wide in each dimension."""
    groups = options.get("num_group", 1)
    weight = (c_in, c_out // groups) if transposed else (c_out, c_in // groups)
    data = P((2, c_in, *([8] * len(sizes) if len(sizes) < 3 else [6, 6, 6])), -1, 1)
    inputs = [data, P((*weight, *sizes), -0.3, 0.3), P((c_out,))]
    if options.get("no_bias"):
        inputs.pop()
    op(names, *inputs, kernel=sizes, num_filter=c_out, **{"no_bias": False, **options})


for name, transposed in (("Convolution", False), ("Deconvolution", True)):
    for c_in, c_out in ((3, 4), (16, 32)):
        convolution(name, transposed, (3,), c_in, c_out)
        convolution(name, transposed, (3, 3), c_in, c_out)
        convolution(name, transposed, (3, 3), c_in, c_out, no_bias=True, stride=(2, 2), pad=(1, 1))
        convolution(name, transposed, (3, 3, 3), c_in, c_out)
    convolution(name, transposed, (1, 1), 16, 16)
    convolution(name, transposed, (3, 3), 16, 32, num_group=2)
    convolution(name, transposed, (3, 3), 16, 16, num_group=16, no_bias=True)
    convolution(name, transposed, (2, 3), 4, 8, dilate=(2, 1), pad=(1, 0))
convolution("Deconvolution", True, (4, 4), 16, 16, stride=(2, 2), pad=(1, 1), no_bias=True)
convolution("Deconvolution", True, (3, 3), 16, 16, stride=(2, 2), adj=(1, 1))
convolution("Convolution_v1", False, (3, 3), 3, 4)
convolution("Convolution_v1", False, (3, 3), 16, 32, no_bias=True)
for names in ("Pooling", "Pooling_v1"):
    for kind in "max avg sum".split():
        for shape in ((2, 3, 5, 5), (2, 16, 8, 8)):
            op(names, P(shape), kernel=(2, 2), stride=(2, 2), pool_type=kind)
        op(names, P(BIG), kernel=(3, 3), pad=(1, 1), pool_type=kind)
        op(names, P(BIG), kernel=(2, 2), pool_type=kind, global_pool=True)
op("Pooling", P((2, 3, 4, 4), 0.5, 2), kernel=(2, 2), pool_type="lp", p_value=2)
op("Pooling", P((2, 3, 9)), kernel=(3,), pool_type="max")
op("Pooling", P((2, 16, 4, 4, 4)), kernel=(2, 2, 2), pool_type="avg")
op("_contrib_AdaptiveAvgPooling2D", P((2, 3, 7, 7)), output_size=(3, 3))
op("_contrib_BilinearResize2D", P((2, 3, 4, 4)), height=7, width=6)
op("UpSampling", P((2, 3, 4, 4)), scale=2, sample_type="nearest")
op("UpSampling", P((2, 3, 4, 4)), P((3, 1, 4, 4)), scale=2, sample_type="bilinear", num_filter=3,
   num_args=2)  # fmt: skip
op("UpSampling", P(BIG), P((16, 1, 4, 4)), scale=2, sample_type="bilinear", num_filter=16,
   num_args=2)  # fmt: skip
GATES = {"rnn_relu": 1, "rnn_tanh": 1, "gru": 3, "lstm": 4}
for (mode, gates), (inputs, hidden), directions in itertools.product(
    GATES.items(), ((3, 4), (16, 32)), (1, 2)
):
    size = directions * gates * hidden * (inputs + hidden + 2)
    state = P((directions, 2, hidden))
    op("RNN", P((5, 2, inputs)), P((size,), -0.3, 0.3), state, *([state] if mode == "lstm" else []),
       state_size=hidden, num_layers=1, mode=mode, bidirectional=directions == 2)  # fmt: skip
two_layers = 4 * 4 * (3 + 4 + 2) + 4 * 4 * (4 + 4 + 2)
op("RNN", P((5, 2, 3)), P((two_layers,), -0.3, 0.3), P((2, 2, 4)), P((2, 2, 4)), state_size=4,
   num_layers=2, mode="lstm", state_outputs=True)  # fmt: skip

# --- Losses ---------------------------------------------------------------------------------------
op("SoftmaxOutput SVMOutput", P((3, 5)), C([1, 4, 0]), own_heads=True)
op("LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput", P(), C(np.eye(3, 5)),
   own_heads=True)  # fmt: skip
RECIPES["MakeLoss"].clear()
RECIPES["make_loss"].clear()
op("MakeLoss make_loss", P(), own_heads=True)
op("CTCLoss", P((6, 2, 4)), C([[1, 2], [3, 1]]))
op("_contrib_hawkesll", P((2, 3), 0.1, 1), P((3,), 0.1, 0.5), P((3,), 0.5, 1),
   P((2, 3), 0, 1, zero=True),
   C(np.full((2, 4), 0.5)), C([[0, 1, 2, 1], [2, 1, 0, 0]], "int32"), C([4, 3]), C([3.0, 3.0]),
   call=lambda F, *x: F.contrib.hawkesll(*x)[0], grad_reqs=WRITE)  # fmt: skip

# --- Vision ---------------------------------------------------------------------------------------
AFFINE = P(values=[[0.9, 0.1, 0.05, -0.1, 0.8, 0.02], [1.0, 0.0, 0.1, 0.0, 0.9, -0.1]])
op("GridGenerator", AFFINE, transform_type="affine", target_shape=(4, 5))
op("GridGenerator", P((2, 2, 4, 5)), transform_type="warp")
op("BilinearSampler", P((2, 3, 5, 5)), P((2, 2, 4, 4), -0.8, 0.8))
op("SpatialTransformer", P((2, 3, 5, 5)), AFFINE, target_shape=(4, 4), transform_type="affine",
   sampler_type="bilinear")  # fmt: skip
op("Correlation", P((2, 3, 5, 5)), P((2, 3, 5, 5)), max_displacement=1, pad_size=1)
ROIS = C([[0, 0, 0, 4, 4], [1, 1, 1, 5, 4]])
op("ROIPooling", P((2, 3, 6, 6)), ROIS, pooled_size=(2, 2), spatial_scale=1.0)
op("_contrib_ROIAlign", P((2, 3, 6, 6)), ROIS, pooled_size=(2, 2), spatial_scale=1.0)
DEFORMED = [P((2, 3, 5, 5)), P((2, 18, 3, 3), -0.4, 0.4)]
op("_contrib_DeformableConvolution", *DEFORMED, P((4, 3, 3, 3)), P((4,)), kernel=(3, 3),
   num_filter=4)  # fmt: skip
BOXES = [[0.1, 0.1, 0.4, 0.5], [0.2, 0.3, 0.7, 0.9], [0.5, 0.5, 0.8, 0.8]]
op("_contrib_box_iou", P(values=BOXES), P(values=BOXES[:2]), zero=True)
op("_contrib_box_nms", P(values=[[0, s, *box] for s, box in zip((0.9, 0.8, 0.7), BOXES)]))
op("_contrib_bipartite_matching", P(), threshold=0.1, zero=True)
op("_contrib_MultiBoxPrior", P((1, 3, 4, 4)), zero=True)
op("_contrib_MultiBoxTarget", P(values=[BOXES]), P(values=[[[0, *BOXES[0]]]]), P((1, 2, 3)),
   zero=True)  # fmt: skip
op("_contrib_MultiBoxDetection", P((1, 2, 3), 0, 1), P((1, 12)), P(values=[BOXES]), zero=True)
PROPOSAL = dict(rpn_pre_nms_top_n=12, rpn_post_nms_top_n=4, rpn_min_size=1, feature_stride=4,
                scales=(4,), ratios=(1,))  # fmt: skip
op("_contrib_Proposal _contrib_MultiProposal", P((1, 2, 4, 4), 0, 1), P((1, 4, 4, 4)),
   P(values=[[16.0, 16.0, 1.0]]), zero=True, **PROPOSAL)  # fmt: skip
op("_image_to_tensor", P((4, 5, 3), 0, 255), forms=("hybridized", "static"))
op("_image_normalize", P((3, 4, 5)), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
op("_image_crop", P((6, 7, 3)), x=1, y=2, width=3, height=3)
op("_image_flip_left_right _image_flip_top_bottom", P((6, 7, 3)))
op("_image_random_flip_left_right _image_random_flip_top_bottom", P((6, 7, 3)))
op("_image_adjust_lighting", P((6, 7, 3)), alpha=(0.1, 0.2, 0.3))
op("_image_random_lighting", P((6, 7, 3)))
op("_image_random_brightness _image_random_contrast _image_random_saturation _image_random_hue",
   P((6, 7, 3)), min_factor=0.5, max_factor=1.5)  # fmt: skip
op("_image_random_color_jitter", P((6, 7, 3)), brightness=0.5, contrast=0.5, saturation=0.5,
   hue=0.5)  # fmt: skip
op("_contrib_PSROIPooling", P((2, 12, 6, 6)), ROIS, spatial_scale=1.0, output_dim=3, pooled_size=2)
op("_contrib_DeformablePSROIPooling", P((2, 12, 6, 6)), ROIS, P((2, 2, 2, 2)), spatial_scale=1.0,
   output_dim=3, group_size=2, pooled_size=2, trans_std=0.1)  # fmt: skip
op("_contrib_box_encode", C([[1.0, 1.0, 1.0]]), C([[0, 1, 0]]), P(values=[BOXES]),
   P(values=[BOXES]), C(np.zeros(4)), C(np.ones(4)), zero=True)  # fmt: skip
op("_contrib_box_decode", P((1, 3, 4)), P(values=[BOXES]), zero=True)

# --- Probability ----------------------------------------------------------------------------------
SAMPLES = P((2, 4), 0.2, 0.9)
op("_random_pdf_uniform", P((2, 4), 0.2, 0.9, zero=True), P((2,), -1, 0), P((2,), 1, 2))
op("_random_pdf_normal", SAMPLES, P((2,)), P((2,), 0.5, 2))
op("_random_pdf_gamma", SAMPLES, P((2,), 1, 2), P((2,), 1, 2))
op("_random_pdf_exponential", SAMPLES, P((2,), 1, 2))
COUNTS = C([[1, 2, 0, 3], [2, 1, 1, 0]])
op("_random_pdf_poisson", COUNTS, P((2,), 1, 2))
op("_random_pdf_negative_binomial", COUNTS, P((2,), 2, 3), P((2,), 0.3, 0.7))
op("_random_pdf_generalized_negative_binomial", COUNTS, P((2,), 1, 2), P((2,), 0.3, 0.7))
op("_random_pdf_dirichlet", C([[[0.2, 0.3, 0.5]], [[0.6, 0.3, 0.1]]]), P((2, 3), 1, 2))
op("_sample_multinomial", P((2, 3), 0.2, 0.5), forms=IMPERATIVE, call=lambda F, p:
   F.sample_multinomial(p / p.sum(1, keepdims=True), shape=4, get_prob=True)[1])  # fmt: skip
LOCATION, SCALE = P((3, 4)), P((3, 4), 0.5, 2)
op("_npi_normal _npi_normal_n", LOCATION, SCALE, loc=None, scale=None, size=None)
op("_npi_gumbel _npi_logistic", LOCATION, SCALE, loc=None, scale=None, size=None)
op("_npi_exponential _npi_rayleigh", SCALE, scale=None, size=None)
op("_npi_pareto _npi_weibull", SCALE, a=None, size=None)

op("_npi_uniform _npi_uniform_n", P(), P(low=1, high=2), low=None, high=None, size=None, zero=True)
op("_npi_gamma", P(low=1, high=2), P(low=1, high=2), shape=None, scale=None, size=None, zero=True)
op("_npi_bernoulli", P((3, 4), 0.1, 0.9), prob=None, logit=None, size=None, is_logit=False,
   zero=True)  # fmt: skip
op("_npi_choice", P((3,), 0.1, 0.3), a=3, size=2, replace=True, weighted=True, zero=True)
op("_npi_powerd", SCALE, a=None, size=None, zero=True)
op("_npi_multinomial", P(values=[0.2, 0.3, 0.5]), zero=True,
   forms=IMPERATIVE, call=lambda F, p: F.numpy._internal.multinomial(p, n=5, pvals=None),
   )  # fmt: skip
DISTRIBUTIONS = "exponential gamma generalized_negative_binomial negative_binomial normal poisson "
for kind in (DISTRIBUTIONS + "uniform").split():
    options = {"p": 0.5} if kind == "negative_binomial" else {}
    op(f"_random_{kind}_like", P(), zero=True, **options)
op("_sample_uniform", P((3,), 0, 1), P((3,), 1, 2), zero=True)
op("_sample_normal _sample_gamma _sample_generalized_negative_binomial", SCALE, SCALE, zero=True)
op("_sample_exponential _sample_poisson", SCALE, zero=True)
op("_sample_negative_binomial", P((3,), 1, 3), P((3,), 0.3, 0.7), zero=True)

# --- Control flow and operators in Python ---------------------------------------------------------


class Doubled(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], 2 * in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * out_grad[0])


@mx.operator.register("sweep_doubled")
class _DoubledProperties(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=True)

    def create_operator(self, ctx, shapes, dtypes):
        return Doubled()


class Tripled(mx.autograd.Function):
    def forward(self, x):
        return 3 * x

    def backward(self, dy):
        return 3 * dy


op("Custom", P(), call=lambda F, x: F.Custom(x, op_type="sweep_doubled"))
op("_CustomFunction", P(), call=lambda F, x: Tripled()(x), forms=IMPERATIVE,
   grad_reqs=WRITE)  # fmt: skip
op("_foreach", P((4, 3)), P((3,)), call=lambda F, x, s: F.contrib.foreach(
   lambda row, state: (row * state, row + state), x, s)[0], forms=DYNAMIC)  # fmt: skip
op("_while_loop", P((3,)), C([0.0]), call=lambda F, x, i: F.contrib.while_loop(
   cond=lambda x, i: i < 3, func=lambda x, i: (x, (x * 1.5, i + 1)), loop_vars=(x, i),
   max_iterations=4)[1][0])  # fmt: skip
op("_cond", P((3,)), C([1.0]), call=lambda F, x, c: F.contrib.cond(
   c > 0, lambda: x * 2, lambda: x * 3))  # fmt: skip

# --- grad_req='add': stock MXNet, on one device, does not compute twice the gradient of 'write' ---
for name in """
    Crop SpatialTransformer _contrib_DeformableConvolution _contrib_boolean_mask _contrib_box_nms
    _copyto _linalg_gelqf _np_cumsum _np_trace _npi_diff _npi_dsplit _npi_flip _npi_hsplit _npi_mean
    _npi_rot90 _npi_solve _npi_tensorinv _split_v2 clip elemwise_add mean moments reverse
    """.split():
    RECIPES[name] = [case._replace(grad_reqs=WRITE) for case in RECIPES[name]]

# --- What cannot be trained -----------------------------------------------------------------------
# Regular expressions of whole names.
exclude("an update of an optimizer, in place: no gradient", r".*_update(_phase\d)?")
exclude(
    "of an optimizer, too",
    "multi_lars reset_arrays multi_sum_sq all_finite multi_all_finite",
)
exclude(
    "no tensor input",
    """
    _NoGradient _arange _eye _full _linspace _ones _zeros _zeros_without_dtype _set_value
    _npi_arange _npi_blackman _npi_eye _npi_hamming _npi_hanning _npi_identity _npi_indices
    _npi_logspace _npi_ones _npi_zeros _sample_unique_zipfian
    _random_(exponential|gamma|(generalized_)?negative_binomial|normal|poisson|randint|uniform)""",
)
exclude(
    "MXNet has no gradient for it (FGradient is not registered)",
    r"""
    _contrib_allclose _contrib_calibrate_entropy _contrib_getnnz _slice_assign(_scalar)? _grad_add
    _histogram _npi_delete _npi_insert_(scalar|slice|tensor) _scatter_set_nd _npi_share_memory
    _shuffle _onehot_encode argmax_channel batch_take fill_element_0index khatri_rao
    _contrib_RROIAlign _contrib_edge_id _contrib_dgl_\w+""",
)
exclude(
    "quantized arithmetic, for inference",
    r"_contrib_dequantize _contrib_quantize_asym _contrib_quantized_\w+ _contrib_requantize "
    r"_sg_mkldnn_\w+",
)
exclude(
    "integers or booleans only, and a parameter is trained in floating point",
    r"_npi_bitwise_\w+ _npx_constraint_check _npi_lcm(_scalar)?",
)
exclude(
    "MXNet implements it for GPUs only",
    "_contrib_ModulatedDeformableConvolution _contrib_count_sketch _contrib_i?fft",
)
exclude("MXNet's own backward raises an error", "_npi_r?copysign_scalar _image_resize")
exclude(
    "its auxiliary arrays cannot be given in Gluon (deprecated)",
    "BatchNorm_v1 IdentityAttachKLSparseReg",
)
exclude(
    "backward is written for row_sparse gradients only (deprecated; Embedding is trained)",
    "_contrib_SparseEmbedding",
)
exclude(
    "assigns to its input in place, which autograd refuses",
    "_npi_boolean_mask_assign_(scalar|tensor)",
)
exclude("every hybridized Block of this sweep is one", "_CachedOp")
exclude("for inference", "_CachedOpThreadSafe")
exclude("of Module's executor (group2ctx), not of Gluon", "_CrossDeviceCopy")
exclude("pointers to objects of Python classes that MXNet no longer has", "_NDArray _Native")
exclude(
    "the backward of an operator that is excluded",
    """
    _backward_(BatchNorm_v1|IdentityAttachKLSparseReg|RROIAlign|SparseEmbedding|_CrossDeviceCopy)
    _backward_(_NDArray|_Native|_contrib_(ModulatedDeformableConvolution|count_sketch|i?fft))
    _backward_npi_r?copysign_scalar""",
)
exclude("used by no operator of MXNet 1.9.1", "_backward_add _backward_np_diag")
exclude(
    "the profiler lists the operators in it",
    "_backward_(CachedOp|Custom|cond|foreach|while_loop)",
)
exclude("image files and arrays of bytes", r"_cv\w+ _imdecode")


def keys(table: str, cases: dict[str, list]) -> list[tuple]:
    """Everything that there is to train in a table of cases."""
    return [
        (table, name, number, form, grad_req)
        for name, of_name in cases.items()
        for number, case in enumerate(of_name)
        for form in case.forms
        for grad_req in case.grad_reqs
    ]
