// Elementwise operators: of arrays of one shape, with scalars, and broadcast.
#pragma once

#include "scalar_operations.h"

namespace mxnet {
namespace op {
namespace mxnet_op {

// Element `i` of an array; a scalar operand is the same for every element.
template <typename T>
auto element(T operand, index_t i) {
  if constexpr (std::is_pointer<T>::value) {
    return operand[i];
  } else {
    return operand;
  }
}

// MXNet handles float16 in pairs. Here a pair is two elements.
inline half_t* halves(half2_t* pairs) { return reinterpret_cast<half_t*>(pairs); }
inline const half_t* halves(const half2_t* pairs) {
  return reinterpret_cast<const half_t*>(pairs);
}
inline half_t halves(half2_t scalar) { return scalar.half_t2[0]; }

// out[i] = OP(inputs[i]...), as `req` says.
template <typename OP, int req>
struct op_with_req {
  template <typename Out, typename... In>
  static void Map(index_t i, Out* out, In... inputs) {
    assign(out[i], req, OP::Map(element(inputs, i)...));
  }
  template <typename... In>
  static void Map(index_t i, half2_t* out, In... inputs) {
    Map(2 * i, halves(out), halves(inputs)...);
    Map(2 * i + 1, halves(out), halves(inputs)...);
  }
};

// The gradient of the result times a derivative.
template <typename Derivative>
struct backward_grad {
  template <typename T, typename... In>
  static T Map(T gradient, In... inputs) {
    return T(gradient * Derivative::Map(inputs...));
  }
};
template <typename Derivative>
struct backward_grad_tuned : backward_grad<Derivative> {};

template <int value>
struct set_to_int {
  template <typename T>
  static void Map(index_t i, T* out) {
    out[i] = T(value);
  }
  static int Map() { return value; }
};
template <bool value>
struct set_to_bool : set_to_int<value> {};

// out = OP(lhs, rhs), of broadcast arrays; one operand may be a scalar.
template <int ndim, typename OP>
struct binary_broadcast_kernel {
  template <typename L, typename R, typename Out>
  static void Map(index_t i, index_t, OpReqType req, Shape<ndim> lhs_stride,
                  Shape<ndim> rhs_stride, Shape<ndim> shape, L lhs, R rhs, Out* out) {
    const Shape<ndim> place = unravel(i, shape);
    assign(out[i], req,
           OP::Map(element(lhs, dot(place, lhs_stride)), element(rhs, dot(place, rhs_stride))));
  }
};
}  // namespace mxnet_op

namespace broadcast {
template <int ndim, typename T, typename OP, int unroll>
void binary_broadcast_kernel(const int size, const bool add, const T* lhs, const T* rhs, T* out,
                             const Shape<ndim> lhs_stride, const Shape<ndim> rhs_stride,
                             const Shape<ndim> shape) {
  using Operator = mxnet_op::binary_broadcast_kernel<ndim, OP>;
  for (int i = 0; i < size; i++) {
    Operator::Map(i, 1, add ? kAddTo : kWriteTo, lhs_stride, rhs_stride, shape, lhs, rhs, out);
  }
}
}  // namespace broadcast

// The sum of the arrays of elemwise_sum.
struct Sum {
  template <typename T, typename... More>
  static void Map(index_t i, T* out, OpReqType req, const T* first, More... more) {
    auto total = first[i];
    ((total = T(total + more[i])), ...);
    assign(out[i], req, total);
  }
};

// An operator with one of its operands missing (a sparse array's row of zeros).
template <typename OP, int req>
struct MissingRValueOp {
  template <typename T>
  static void Map(index_t i, T* out, const T* lhs) {
    assign(out[i], req, OP::Map(lhs[i], T(0)));
  }
};
template <typename OP, int req>
struct MissingLValueOp {
  template <typename T>
  static void Map(index_t i, T* out, const T* rhs) {
    assign(out[i], req, OP::Map(T(0), rhs[i]));
  }
};

struct clip {
  template <typename T>
  static void Map(index_t i, T* out, const T* in, float lower, float upper) {
    const T value = in[i];
    out[i] = value > upper ? T(upper) : value < lower ? T(lower) : value;
  }
};
struct clip_grad {
  template <typename T>
  static void Map(index_t i, T* out, const T* gradient, const T* in, float lower, float upper) {
    out[i] = in[i] > upper || in[i] < lower ? T(0) : gradient[i];
  }
};

// A piecewise linear sigmoid: 0 and 1 outside, alpha x + beta between.
template <int req>
struct hard_sigmoid_forward {
  template <typename T>
  static void Map(index_t i, T* out, const T* in, float alpha, float beta) {
    const float value = alpha * static_cast<float>(in[i]) + beta;
    assign(out[i], req, T(value > 1 ? 1 : value < 0 ? 0 : value));
  }
};
template <int req>
struct hard_sigmoid_backward {
  template <typename T>
  static void Map(index_t i, T* gradient, const T* in, const T* out_gradient, float alpha,
                  float beta) {
    const float value = alpha * static_cast<float>(in[i]) + beta;
    assign(gradient[i], req, value > 0 && value < 1 ? T(alpha * out_gradient[i]) : T(0));
  }
};

template <int req>
struct around_forward {
  template <typename T>
  static void Map(index_t i, T* out, const T* in, int decimals) {
    const double scale = std::pow(10., decimals);
    const double value = static_cast<double>(in[i]);
    assign(out[i], req, T(std::is_integral<T>::value && decimals >= 0
                              ? value : std::nearbyint(value * scale) / scale));
  }
};

template <int req>
struct nan_to_num_forward {
  template <typename T>
  static void Map(index_t i, T* out, const T* in, const T nan, const T positive,
                  const T negative) {
    const T value = in[i];
    const bool infinite = mshadow_op::IsInf(value);
    assign(out[i], req, mshadow_op::IsNan(value) ? nan
                            : !infinite          ? value
                            : value > T(0)       ? positive
                                                 : negative);
  }
};
template <int req>
struct nan_to_num_backward {
  template <typename T>
  static void Map(index_t i, T* gradient, const T* out_gradient, const T* in) {
    const bool finite = mshadow_op::isfinite::Map(in[i]);
    assign(gradient[i], req, finite ? out_gradient[i] : T(0));
  }
};

// ---- Selection.
template <int req>
struct where {
  template <typename T, typename Condition>
  static void Map(index_t i, T* out, const Condition* condition, const T* x, const T* y) {
    assign(out[i], req, condition[i] != Condition(0) ? x[i] : y[i]);
  }
};
template <int req>
struct where_batch {
  template <typename T, typename Condition>
  static void Map(index_t i, T* out, const Condition* condition, const T* x, const T* y,
                  index_t row_size) {
    assign(out[i], req, condition[i / row_size] != Condition(0) ? x[i] : y[i]);
  }
};
template <int req, bool is_true_branch>
struct where_backward {
  template <typename T, typename Condition>
  static void Map(index_t i, T* gradient, const T* out_gradient, const Condition* condition) {
    const bool chosen = (condition[i] != Condition(0)) == is_true_branch;
    assign(gradient[i], req, chosen ? out_gradient[i] : T(0));
  }
};
template <int req, bool is_true_branch>
struct where_batch_backward {
  template <typename T, typename Condition>
  static void Map(index_t i, T* gradient, const T* out_gradient, const Condition* condition,
                  index_t row_size) {
    const bool chosen = (condition[i / row_size] != Condition(0)) == is_true_branch;
    assign(gradient[i], req, chosen ? out_gradient[i] : T(0));
  }
};

template <int ndim>
struct numpy_where_kernel {
  template <typename Condition, typename T>
  static void Map(index_t i, OpReqType req, Shape<ndim> condition_stride, Shape<ndim> x_stride,
                  Shape<ndim> y_stride, Shape<ndim> shape, Condition* condition, T* x, T* y,
                  T* out) {
    const Shape<ndim> place = unravel(i, shape);
    const bool chosen = condition[dot(place, condition_stride)] != Condition(0);
    assign(out[i], req, chosen ? x[dot(place, x_stride)] : y[dot(place, y_stride)]);
  }
};
template <int ndim, bool is_true_branch>
struct numpy_where_backward_kernel {
  template <typename Condition, typename T>
  static void Map(index_t i, OpReqType req, Shape<ndim> condition_stride, Shape<ndim> shape,
                  Condition* condition, T* out_gradient, T* gradient) {
    const Shape<ndim> place = unravel(i, shape);
    const bool chosen = condition[dot(place, condition_stride)] != Condition(0);
    assign(gradient[i], req, chosen == is_true_branch ? out_gradient[i] : T(0));
  }
};
template <int ndim, bool scalar_is_true_branch>
struct numpy_where_scalar_kernel {
  template <typename Condition, typename T>
  static void Map(index_t i, OpReqType req, Shape<ndim> condition_stride, Shape<ndim> stride,
                  Shape<ndim> shape, Condition* condition, T scalar, T* array, T* out) {
    const Shape<ndim> place = unravel(i, shape);
    const bool chosen = condition[dot(place, condition_stride)] != Condition(0);
    assign(out[i], req, chosen == scalar_is_true_branch ? scalar : array[dot(place, stride)]);
  }
};
struct numpy_where_scalar2_kernel {
  template <typename T, typename Condition>
  static void Map(index_t i, OpReqType req, T* out, const Condition* condition, T x, T y) {
    assign(out[i], req, condition[i] != Condition(0) ? x : y);
  }
};

// ---- Arrays made from numbers.
struct range_fwd {
  template <typename T>
  static void Map(index_t i, index_t repeat, T start, T step, int req, T* out) {
    assign(out[i], req, T(start + T(i / repeat) * step));
  }
};
struct linspace_fwd {
  template <typename T>
  static void Map(index_t i, double start, double, double step, int req, T* out) {
    assign(out[i], req, T(start + step * i));
  }
};
struct logspace_fwd {
  template <typename T>
  static void Map(index_t i, double start, double, double base, double step, int req, T* out) {
    assign(out[i], req, T(std::pow(base, start + step * i)));
  }
};
template <int req>
struct eye_dns_fill {
  template <typename T>
  static void Map(int i, T* out, int64_t first_column, int64_t diagonal, int64_t num_columns) {
    const int64_t column = i + first_column;
    assign(out[(column - diagonal) * num_columns + column], req, T(1));
  }
};
template <int req>
struct identity {
  template <typename T>
  static void Map(index_t i, T* out, const int size) {
    assign(out[i], req, T(i / size == i % size ? 1 : 0));
  }
};
struct PopulateFullIdxRspKernel {
  template <typename T>
  static void Map(int i, T* out) {
    out[i] = T(i);
  }
};
}  // namespace op
}  // namespace mxnet
