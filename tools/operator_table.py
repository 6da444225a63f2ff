"""The operators of MXNet 1.9.1 that can train a Parameter in Gluon: how the operator sweep does it.

``RECIPES`` maps an operator's own name to its cases. Aliases (``_npi_det`` for ``_linalg_det``) are
the same operator. Others have no array as input, no gradient or one that MXNet fails to compute,
are the updates of optimizers, or for inference, integers, row_sparse gradients or GPUs only.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import mxnet as mx
import numpy as np

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
    own_heads: bool = False
    devices: tuple = (1, 2)


class P(NamedTuple):
    """A Parameter with a gradient, between ``low`` and ``high``, or of these ``values``."""

    shape: tuple = (3, 5)
    low: float = -1.0
    high: float = 1.0
    values: Any = None


class C(NamedTuple):
    """Data: a constant input."""

    values: Any
    dtype: str = "float32"


RECIPES: dict[str, list[Case]] = {}


def op(names: str, *inputs: Any, **options: Any) -> None:
    """Add one case for each of these operators.

    ``inputs`` are those of the operator in its own order. Options that are fields of ``Case``:
    ``call``, a function of ``mx.nd`` or ``mx.sym`` and the inputs, in place of the operator itself;
    ``forms`` and ``grad_reqs``, with which MXNet itself trains it on one device; ``own_heads``,
    backward does not use (or not linearly) the gradients of its outputs, as that of a loss;
    ``devices``, how many. All others are attributes of the operator.
    """
    fields = {key: options.pop(key) for key in Case._fields[2:] if key in options}
    for name in names.split():
        case = Case([*inputs], options, numpy=name.startswith("_np"))
        RECIPES.setdefault(name, []).append(case._replace(**fields))


def arguments(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """The names and types of an operator's arrays, and of its attributes."""
    described = mx.operator.get_operator_arguments(name)
    types = dict(zip(described.names, described.types))
    arrays = {key: kind for key, kind in types.items() if kind.startswith(("NDArray", "Symbol"))}
    return arrays, {key: kind for key, kind in types.items() if key not in arrays}


# --- Elementwise ----------------------------------------------------------------------------------
BIG = (2, 16, 6, 6)  # takes oneDNN's path, where there is one
op("relu sigmoid tanh exp square _copy abs _npx_relu _npx_sigmoid", P(BIG))
op("arccosh _npi_arccosh", P(low=1.5, high=3))
op("clip", P(low=-2, high=2), a_min=-1, a_max=1)
for dtype in ("float64", "float16"):
    op("Cast", P(), dtype=dtype)
op("amp_cast", P(), dtype="float16")
op("amp_multicast", P(), P((4,)), num_outputs=2, grad_reqs=WRITE)
op("_copyto", P(), call=lambda F, x: x.copyto(mx.cpu(3)), forms=IMPERATIVE)
op("_npi_full_like", P(), fill_value=2)
op("elemwise_add elemwise_sub elemwise_mul elemwise_div", P(BIG), P(BIG, 1, 2))
ROW = [P((3, 1), 0.5, 2), P((1, 5), 1.1, 2.3)]  # broadcast: backward sums
TWO = "add sub mul div maximum minimum hypot power"
for pair in (ROW, [P(BIG, 0.5, 1.5), P((1, 16, 1, 1), 0.8, 1.2)]):
    op(" ".join(f"broadcast_{name}" for name in TWO.split()), *pair)
NP_TWO = "add subtract multiply true_divide power hypot arctan2 ldexp copysign"
op(" ".join(f"_npi_{name}" for name in NP_TWO.split()), *ROW)
op("add_n", P(BIG), P(BIG))
op("where", C(np.eye(3, 5)), P(), P())
op("_npi_where", C(np.eye(3, 5), "bool"), P(), P((5,)), grad_reqs=WRITE)
op("_npi_where_lscalar _npi_where_rscalar", C(np.eye(3, 5), "bool"), P(), scalar=2)
op("_npi_where_scalar2", P(), x=1, y=2)
op("_contrib_quadratic", P(), a=1.5, b=2, c=3)
op("_rnn_param_concat", P((4,)), P((7,)), dim=0)

# --- Reductions -----------------------------------------------------------------------------------
CUBE = P((3, 4, 5), 0.5, 1.5)
for axis in ({"axis": 1}, {"axis": (0, 2), "keepdims": True}):
    op("sum mean prod nansum nanprod max min", CUBE, **axis)
    op("_np_sum _np_max _np_min _np_prod _npi_mean", CUBE, **axis)
op("_npi_norm", P(), ord=2, flag=-2, grad_reqs=WRITE)
op("moments", P(), axes=(0,))
op("_square_sum", P(), call=lambda F, x: F._internal._square_sum(
   F.cast_storage(x, "row_sparse"), axis=1), forms=IMPERATIVE)  # fmt: skip
op("softmax_cross_entropy", P(), C([0, 4, 2]))
DISTINCT = P(values=np.random.RandomState(3).permutation(15).reshape(3, 5) / 8)
op("sort", DISTINCT, axis=1)
op("topk", DISTINCT, k=2, ret_typ="both")
op("_npi_percentile", DISTINCT, C([25.0]))
op("_npi_ediff1d", P())
op("_npi_polyval", P((4,)), P((3,)))
op("_npi_bincount", C(np.arange(5), "int32"), P((5,)), has_weights=True, forms=DYNAMIC)

# --- Shapes and indices ---------------------------------------------------------------------------
op("Reshape", P(BIG), shape=(0, -1))
op("_np_reshape _npx_reshape", CUBE, newshape=(-1, 6))
op("reshape_like", CUBE, C(np.ones((6, 10))))
op("expand_dims", P(), axis=1)
op("transpose", P(BIG), axes=(0, 2, 3, 1))
op("_np_moveaxis", CUBE, source=(0,), destination=(2,), grad_reqs=WRITE)
op("depth_to_space space_to_depth", P((2, 8, 2, 4)), block_size=2)
op("reverse _npi_flip", P(), axis=(1,))
op("_npi_rot90", P(), k=1, axes=(0, 1))
op("_np_roll", P(), shift=2)
op("repeat", P(), repeats=3, axis=1)
op("tile", P(), reps=(2, 3))
op("broadcast_to _npi_broadcast_to", P((3, 1)), shape=(3, 5))
op("_np_atleast_1d _np_atleast_2d _np_atleast_3d", P((5,)), P((2, 3)))
for mode in ("constant", "edge", "reflect"):
    op("Pad", P((2, 3, 4, 5)), mode=mode, pad_width=(0, 0, 0, 0, 1, 2, 2, 1))
op("_npi_pad", P(), pad_width=((1, 2), (0, 3)))
op("Concat", P(BIG), P(BIG), dim=1)
op("_npi_concatenate", P((2, 3)), P((2, 4)), axis=1)
op("stack _npi_stack", P(), P(), axis=1)
op("_npi_hstack _npi_vstack _npi_dstack _npi_column_stack", P(), P())
op("SliceChannel", P(BIG), num_outputs=2, axis=1)
op("_split_v2 _npi_hsplit", P((3, 6)), indices=(0, 2, 3), axis=1)
op("_npi_dsplit", P((2, 3, 6)), indices=(0, 2, 3), axis=2)
op("slice", CUBE, begin=(0, 1, None), end=(2, 3, None), step=(1, 1, 2))
op("slice", P(BIG), begin=(0, 3), end=(2, 12))
op("slice_axis", CUBE, axis=1, begin=1, end=3)
op("Crop", P((2, 3, 6, 6)), C(np.ones((2, 3, 4, 4))), num_args=2)
op("take", P((40, 16)), C([[2, 0, 2], [39, 2, 1]]))
op("pick", P(), C([4, 0, 2]), axis=1)
op("gather_nd", P(), C([[2, 0, 2], [1, 1, 1]]))
op("scatter_nd", P((3,)), C([[2, 0, 1], [1, 1, 4]]), shape=(3, 5))
op("one_hot", P(values=[1.0, 3.0]), depth=5)
op("SequenceLast SequenceMask SequenceReverse", P((4, 3, 2)), C([2, 4, 1]),
   use_sequence_length=True)  # fmt: skip
op("_contrib_index_copy", P((5, 3)), C([1, 4]), P((2, 3)))
op("_contrib_boolean_mask", P((4, 3)), C([1, 0, 1, 1]), forms=DYNAMIC)
op("_npx_nonzero", P(), forms=DYNAMIC)
op("_npi_unique", P((5,)), forms=DYNAMIC)
op("_npi_diag_indices_from", P((4, 4)))
op("_ravel_multi_index", P(values=[[1.0, 2.0], [3.0, 0.0]]), shape=(3, 5))
op("_unravel_index", P(values=[3.0, 8.0]), shape=(3, 5))
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
op("dot _np_dot _npi_matmul", A, B)
op("dot", P((4, 3)), P((5, 4)), transpose_a=True, transpose_b=True)
op("batch_dot", P((2, 3, 4)), P((2, 4, 5)))
op("_npi_einsum", A, B, subscripts="ij,jk->ik")
op("_npi_tensordot", A, B, a_axes_summed=(1,), b_axes_summed=(0,), grad_reqs=WRITE)
op("_npi_tensordot_int_axes", A, B, axes=1)
op("_linalg_gemm", A, B, P((3, 5)), alpha=2.0, beta=0.5, grad_reqs=WRITE)
op("_linalg_gemm2", A, B, grad_reqs=WRITE)
SQUARE = np.random.RandomState(11).normal(0, 0.3, (4, 4)) + 2 * np.eye(4)
SPD = SQUARE @ SQUARE.T / 4 + np.eye(4)
SYMMETRIC = np.diag([1.0, 2.0, 3.0, 4.0]) + 0.1 * (SPD + SPD.T)
op("_linalg_trmm _linalg_trsm", P(values=np.tril(SQUARE)), P((4, 5)), grad_reqs=WRITE)
op("_linalg_potrf _linalg_potri _npi_cholesky _linalg_sumlogdiag", P(values=SPD))
op("_linalg_det _linalg_slogdet _linalg_inverse", P(values=SQUARE), grad_reqs=WRITE)
op("_linalg_gelqf _npi_svd", A)
op("_linalg_syevd", P(values=SYMMETRIC), grad_reqs=WRITE)
op("_npi_eig _npi_eigvals", P(values=SYMMETRIC))
op("_npi_eigh _npi_eigvalsh", P(values=SYMMETRIC), UPLO="L")
op("_npi_pinv", A, C([1e-15]), call=lambda F, x, r: F.numpy._internal.pinv(
   A=x, rcond=F.np.sum(r)))  # fmt: skip
op("_linalg_extractdiag _linalg_extracttrian", P((4, 4)))
op("_linalg_maketrian", P((6,)))
op("_npi_solve", P(values=SQUARE), P((4, 2)))
op("_npi_tensorinv", P(values=SQUARE.reshape(2, 2, 2, 2)), ind=2)
op("_npi_tensorsolve", P(values=SQUARE.reshape(2, 2, 2, 2)), P((2, 2)))
ATTENTION = "_contrib_interleaved_matmul_"
op(f"{ATTENTION}selfatt_qk", P((5, 2, 24)), heads=2)
op(f"{ATTENTION}selfatt_valatt", P((5, 2, 24)), P((4, 5, 5)), heads=2)
op(f"{ATTENTION}encdec_qk", P((5, 2, 8)), P((6, 2, 16)), heads=2)
op(f"{ATTENTION}encdec_valatt", P((6, 2, 16)), P((4, 5, 6)), heads=2)

# --- Layers ---------------------------------------------------------------------------------------


def gradient_penalty(F, x, w):
    """A gradient, which is trained: backward of FullyConnected's backward."""
    x = x.copy()
    x.attach_grad()
    y = F.FullyConnected(x, w, num_hidden=5, no_bias=True).square()
    return mx.autograd.grad(y, x, create_graph=True)[0]


op("FullyConnected", C(np.eye(2, 6) + 0.5), P((5, 6)), forms=IMPERATIVE, call=gradient_penalty)
for shape in ((3, 5), BIG):
    for kind in "relu sigmoid softrelu softsign tanh".split():
        op("Activation", P(shape), act_type=kind)
    for kind in "elu gelu leaky selu".split():
        op("LeakyReLU", P(shape), act_type=kind)
op("LeakyReLU", P((2, 3, 4)), P((3,)), act_type="prelu")
op("softmax log_softmax", P(BIG), axis=1)
op("softmax", P(), C([2, 5, 1], "int32"), axis=1, use_length=True)
op("SoftmaxActivation", P(BIG), mode="channel")
op("L2Normalization", P((2, 3, 4)), mode="channel")
op("LRN", P(BIG), nsize=5)

op("Convolution_v1", P((2, 16, 8, 8)), P((9, 16, 3, 3)), P((9,)), kernel=(3, 3), num_filter=9)
for kind in "max avg sum".split():
    op("Pooling Pooling_v1", P((2, 3, 5, 5)), kernel=(2, 2), stride=(2, 2), pool_type=kind)
    op("Pooling Pooling_v1", P(BIG), kernel=(3, 3), pad=(1, 1), pool_type=kind)
op("Pooling", P((2, 3, 4, 4), 0.5, 2), kernel=(2, 2), pool_type="lp", p_value=2)
op("_contrib_AdaptiveAvgPooling2D", P((2, 3, 7, 7)), output_size=(3, 3))
op("_contrib_BilinearResize2D", P((2, 3, 4, 4)), height=7, width=6)
op("UpSampling", P((2, 3, 4, 4)), scale=2, sample_type="nearest")
op("UpSampling", P(BIG), P((16, 1, 4, 4)), scale=2, sample_type="bilinear", num_filter=16,
   num_args=2)  # fmt: skip

# --- Losses ---------------------------------------------------------------------------------------
op("SoftmaxOutput SVMOutput", P((3, 5)), C([1, 4, 0]), own_heads=True)
op("LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput", P(), C(np.eye(3, 5)),
   own_heads=True)  # fmt: skip
op("MakeLoss make_loss", P(), own_heads=True)
op("CTCLoss", P((6, 2, 4)), C([[1, 2], [3, 1]]))
op("_contrib_hawkesll", P((2, 3), 0.1, 1), P((3,), 0.1, 0.5), P((3,), 0.5, 1), P((2, 3), 0, 1),
   C(np.full((2, 4), 0.5)), C([[0, 1, 2, 1], [2, 1, 0, 0]], "int32"), C([4, 3]), C([3.0, 3.0]),
   call=lambda F, *x: F.contrib.hawkesll(*x)[0], grad_reqs=WRITE)  # fmt: skip

# --- Vision ---------------------------------------------------------------------------------------
AFFINE = P(values=[[0.9, 0.1, 0.05, -0.1, 0.8, 0.02], [1.0, 0.0, 0.1, 0.0, 0.9, -0.1]])
op("GridGenerator", AFFINE, transform_type="affine", target_shape=(4, 5))
op("BilinearSampler", P((2, 3, 5, 5)), P((2, 2, 4, 4), -0.8, 0.8))
op("SpatialTransformer", P((2, 3, 5, 5)), AFFINE, target_shape=(4, 4), transform_type="affine",
   sampler_type="bilinear")  # fmt: skip
op("Correlation", P((2, 3, 5, 5)), P((2, 3, 5, 5)), max_displacement=1, pad_size=1)
ROIS = C([[0, 0, 0, 4, 4], [1, 1, 1, 5, 4]])
op("ROIPooling _contrib_ROIAlign", P((2, 3, 6, 6)), ROIS, pooled_size=(2, 2), spatial_scale=1.0)
op("_contrib_PSROIPooling", P((2, 12, 6, 6)), ROIS, spatial_scale=1.0, output_dim=3, pooled_size=2)
op("_contrib_DeformablePSROIPooling", P((2, 12, 6, 6)), ROIS, P((2, 2, 2, 2)), spatial_scale=1.0,
   output_dim=3, group_size=2, pooled_size=2, trans_std=0.1)  # fmt: skip
op("_contrib_DeformableConvolution", P((2, 3, 5, 5)), P((2, 18, 3, 3), -0.4, 0.4),
   P((4, 3, 3, 3)), P((4,)), kernel=(3, 3), num_filter=4)  # fmt: skip
BOXES = [[0.1, 0.1, 0.4, 0.5], [0.2, 0.3, 0.7, 0.9], [0.5, 0.5, 0.8, 0.8]]
op("_contrib_box_nms", P(values=[[0, s, *box] for s, box in zip((0.9, 0.8, 0.7), BOXES)]))
op("_image_normalize", P((3, 4, 5)), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
PICTURE = P((6, 7, 3))
op("_image_to_tensor", PICTURE, forms=("hybridized", "static"))
op("_image_crop", PICTURE, x=1, y=2, width=3, height=3)
op("_image_flip_left_right _image_flip_top_bottom _image_random_lighting", PICTURE)
op("_image_random_flip_left_right _image_random_flip_top_bottom", PICTURE)
op("_image_adjust_lighting", PICTURE, alpha=(0.1, 0.2, 0.3))
op(" ".join(f"_image_random_{kind}" for kind in ("brightness", "contrast", "saturation", "hue")),
   PICTURE, min_factor=0.5, max_factor=1.5)  # fmt: skip
op("_image_random_color_jitter", PICTURE, brightness=0.5, contrast=0.5, saturation=0.5, hue=0.5)

# --- Probability ----------------------------------------------------------------------------------
op("_sample_multinomial", P((2, 3), 0.2, 0.5), forms=IMPERATIVE, call=lambda F, p:
   F.sample_multinomial(p / p.sum(1, keepdims=True), shape=4, get_prob=True)[1])  # fmt: skip
SCALE = P((3, 4), 0.5, 2)
op("_npi_normal _npi_normal_n _npi_gumbel _npi_logistic", P((3, 4)), SCALE, loc=None, scale=None,
   size=None)  # fmt: skip
op("_npi_exponential _npi_rayleigh", SCALE, scale=None, size=None)
op("_npi_pareto _npi_weibull", SCALE, a=None, size=None)

# --- Control flow and operators in Python ---------------------------------------------------------


class _Doubled(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], 2 * in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * out_grad[0])


@mx.operator.register("sweep_doubled")
class _DoubledProperties(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=True)

    def create_operator(self, ctx, shapes, dtypes):
        return _Doubled()


class _Tripled(mx.autograd.Function):
    def forward(self, x):
        return 3 * x

    def backward(self, dy):
        return 3 * dy


op("Custom", P(), call=lambda F, x: F.Custom(x, op_type="sweep_doubled"))
op("_CustomFunction", P(), call=lambda F, x: _Tripled()(x), forms=IMPERATIVE,
   grad_reqs=WRITE)  # fmt: skip
op("_foreach", P((4, 3)), P((3,)), call=lambda F, x, s: F.contrib.foreach(
   lambda row, state: (row * state, row + state), x, s)[0], forms=DYNAMIC)  # fmt: skip
op("_while_loop", P((3,)), C([0.0]), call=lambda F, x, i: F.contrib.while_loop(
   cond=lambda x, i: i < 3, func=lambda x, i: (x, (x * 1.5, i + 1)), loop_vars=(x, i),
   max_iterations=4)[1][0])  # fmt: skip
op("_cond", P((3,)), C([1.0]), call=lambda F, x, c: F.contrib.cond(
   c > 0, lambda: x * 2, lambda: x * 3))  # fmt: skip

# --- Any arrays, and nothing else but a number ----------------------------------------------------
ONE = P(low=0.3, high=0.7)
op("""
    BlockGrad Dropout Flatten SwapAxis _contrib_arange_like _contrib_div_sqrt_dim
    _contrib_index_array _contrib_quantize_v2 _contrib_round_ste _contrib_sign_ste _linalg_makediag
    _linalg_syrk _np_all _np_any _np_copy _np_cumsum _np_diag _np_diagflat _np_diagonal _np_squeeze
    _np_trace _np_transpose _npi_absolute _npi_arccos _npi_arcsin _npi_arcsinh _npi_arctan
    _npi_arctanh _npi_argmax _npi_argmin _npi_around _npi_cbrt _npi_ceil _npi_cos _npi_cosh
    _npi_degrees _npi_diff _npi_exp _npi_expm1 _npi_fix _npi_floor _npi_isfinite _npi_isinf
    _npi_isnan _npi_isneginf _npi_isposinf _npi_log _npi_log10 _npi_log1p _npi_log2 _npi_logical_not
    _npi_nan_to_num _npi_negative _npi_pinv_scalar_rcond _npi_radians _npi_reciprocal _npi_rint
    _npi_sign _npi_sin _npi_sinh _npi_sqrt _npi_square _npi_std _npi_tan _npi_tanh _npi_tril
    _npi_trunc _npi_var _random_exponential_like _random_gamma_like
    _random_generalized_negative_binomial_like _random_negative_binomial_like _random_normal_like
    _random_poisson_like _random_uniform_like _sample_exponential _sample_poisson arccos arcsin
    arcsinh arctan arctanh argmax argmin argsort broadcast_axis cbrt ceil cos cosh degrees diag erf
    erfinv expm1 fix floor gamma gammaln hard_sigmoid log log10 log1p log2 logical_not negative norm
    ones_like radians rcbrt reciprocal rint round rsqrt shape_array sign sin sinh size_array softmin
    softsign sqrt squeeze tan trunc zeros_like
    """, ONE)  # fmt: skip
op("""
    _contrib_gradientmultiplier _div_scalar _equal_scalar _greater_equal_scalar _greater_scalar
    _hypot_scalar _lesser_equal_scalar _lesser_scalar _logical_and_scalar _logical_or_scalar
    _logical_xor_scalar _maximum_scalar _minimum_scalar _minus_scalar _mod_scalar _mul_scalar
    _not_equal_scalar _npi_add_scalar _npi_arctan2_scalar _npi_equal_scalar
    _npi_greater_equal_scalar _npi_greater_scalar _npi_ldexp_scalar _npi_less_equal_scalar
    _npi_less_scalar _npi_mod_scalar _npi_multiply_scalar _npi_not_equal_scalar _npi_power_scalar
    _npi_rarctan2_scalar _npi_rldexp_scalar _npi_rmod_scalar _npi_rpower_scalar
    _npi_rsubtract_scalar _npi_rtrue_divide_scalar _npi_subtract_scalar _npi_true_divide_scalar
    _plus_scalar _power_scalar _rdiv_scalar _rminus_scalar _rmod_scalar _rpower_scalar
    _scatter_minus_scalar _scatter_plus_scalar smooth_l1
    """, ONE, scalar=0.375)  # fmt: skip
op("""
    _equal _greater _greater_equal _hypot _identity_with_attr_like_rhs _lesser _lesser_equal
    _logical_and _logical_or _logical_xor _maximum _minimum _mod _not_equal _npi_average _npi_equal
    _npi_greater _npi_greater_equal _npi_less _npi_less_equal _npi_mod _npi_not_equal _power
    _random_pdf_dirichlet _random_pdf_exponential _random_pdf_poisson _sample_gamma
    _sample_generalized_negative_binomial _sample_negative_binomial _sample_normal _sample_uniform
    _scatter_elemwise_div broadcast_equal broadcast_greater broadcast_greater_equal broadcast_lesser
    broadcast_lesser_equal broadcast_like broadcast_logical_and broadcast_logical_or
    broadcast_logical_xor broadcast_mod broadcast_not_equal slice_like
    """, ONE, ONE)  # fmt: skip
op("""
    _random_pdf_gamma _random_pdf_generalized_negative_binomial _random_pdf_negative_binomial
    _random_pdf_normal _random_pdf_uniform
    """, ONE, ONE, ONE)  # fmt: skip

# --- Layers ---------------------------------------------------------------------------------------
FEW, MANY = P((2, 3, 8, 8)), P((2, 16, 8, 8))
op("Convolution", FEW, P((4, 3, 3, 3)), P((4,)), kernel=(3, 3), num_filter=4)
op("Convolution", MANY, P((32, 16, 3, 3)), kernel=(3, 3), num_filter=32, stride=(2, 2),
   no_bias=True)  # fmt: skip
op("Deconvolution", FEW, P((3, 4, 3, 3)), kernel=(3, 3), num_filter=4)
op("Deconvolution", MANY, P((16, 16, 4, 4)), kernel=(4, 4), num_filter=16)
PER_CHANNEL = P((16,)), P((16,))
op("BatchNorm", P(BIG), *PER_CHANNEL, C(np.zeros(16)), C(np.ones(16)), fix_gamma=False)
op("InstanceNorm", P(BIG), *PER_CHANNEL)
op("GroupNorm", P(BIG), P((1,)), P((1,)))
op("LayerNorm", P((4, 16)), *PER_CHANNEL)
op("Embedding", C([[1, 3], [3, 0]]), P((7, 4)), input_dim=7, output_dim=4)
STATE = P((1, 2, 4))
for mode, gates, states in (("rnn_tanh", 1, 1), ("gru", 3, 1), ("lstm", 4, 2)):
    op("RNN", P((5, 2, 3)), P((36 * gates,)), *[STATE] * states, mode=mode, state_size=4,
       num_layers=1)  # fmt: skip

# --- grad_req='add': stock MXNet, on one device, does not compute twice the gradient of 'write' ---
for name in """
    Crop SpatialTransformer _contrib_DeformableConvolution _contrib_boolean_mask _contrib_box_nms
    _copyto _linalg_gelqf _np_cumsum _np_trace _npi_diff _npi_dsplit _npi_flip _npi_hsplit _npi_mean
    _npi_rot90 _npi_solve _npi_tensorinv _split_v2 clip elemwise_add mean moments reverse
    """.split():
    RECIPES[name] = [case._replace(grad_reqs=WRITE) for case in RECIPES[name]]


def keys() -> list[tuple]:
    """Everything that there is to train."""
    return [
        (name, number, form, grad_req)
        for name, of_name in RECIPES.items()
        for number, case in enumerate(of_name)
        for form in case.forms
        for grad_req in case.grad_reqs
    ]
