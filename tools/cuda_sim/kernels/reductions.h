// Reductions over axes, their gradients, and broadcasting an array along axes.
#pragma once

#include "elementwise.h"

namespace mxnet {
namespace op {

// Axes of arrays whose number of axes is known at run time only.
constexpr int kMaxAxes = 5;

namespace broadcast {

// Reduces `count` values, value(0) and so on, in the type of the accumulator.
template <typename Reducer, typename Accumulator, typename Value>
Accumulator reduce(int first, int end, Value value) {
  Accumulator result, residual;
  Reducer::SetInitValue(result, residual);
  for (int k = first; k < end; k++) Reducer::Reduce(result, Accumulator(value(k)), residual);
  Reducer::Finalize(result, residual);
  return result;
}

// A large reduction is split into `num_parts`, which reduce_lines_kernel reduces afterwards.
inline int part_begin(int count, int part, int num_parts) {
  return static_cast<int>(static_cast<int64_t>(count) * part / num_parts);
}

// `reduced_shape` and `reduced_stride` are those of the axes that the reduction removes.
template <typename Reducer, int ndim, typename Accumulator, typename In, typename Out,
          typename OP, int unroll>
void reduce_kernel(const int size, const int count, const bool add, const In* in, Out* out,
                   const Shape<ndim> in_shape, const Shape<ndim> out_shape,
                   const Shape<ndim> reduced_shape, const Shape<ndim> reduced_stride,
                   const int num_parts, const bool) {
  for (int part = 0; part < num_parts; part++) {
    for (int i = 0; i < size; i++) {
      const In* start = in + ravel(unravel(i, out_shape), in_shape);
      auto value = [&](int k) {
        return In(OP::Map(start[dot(unravel(k, reduced_shape), reduced_stride)]));
      };
      const Accumulator result = reduce<Reducer, Accumulator>(
          part_begin(count, part, num_parts), part_begin(count, part + 1, num_parts), value);
      assign(out[i + part * size], add ? kAddTo : kWriteTo, Out(result));
    }
  }
}

// The same for OP1(in, OP2(lhs, rhs)), of three arrays with shapes of their own.
template <typename Reducer, int ndim, typename T, typename OP1, typename OP2, int unroll>
void reduce_kernel(const int size, const int count, const bool add, const T* in, const T* lhs,
                   const T* rhs, T* out, const Shape<ndim> in_shape,
                   const Shape<ndim> lhs_shape, const Shape<ndim> rhs_shape,
                   const Shape<ndim> out_shape, const Shape<ndim> in_reduced,
                   const Shape<ndim> lhs_reduced, const Shape<ndim> rhs_reduced,
                   const Shape<ndim> in_stride, const Shape<ndim> lhs_stride,
                   const Shape<ndim> rhs_stride, const int num_parts, const bool) {
  for (int part = 0; part < num_parts; part++) {
    for (int i = 0; i < size; i++) {
      const Shape<ndim> place = unravel(i, out_shape);
      const T* in_start = in + ravel(place, in_shape);
      const T* lhs_start = lhs + ravel(place, lhs_shape);
      const T* rhs_start = rhs + ravel(place, rhs_shape);
      auto value = [&](int k) {
        return OP1::Map(in_start[dot(unravel(k, in_reduced), in_stride)],
                        OP2::Map(lhs_start[dot(unravel(k, lhs_reduced), lhs_stride)],
                                 rhs_start[dot(unravel(k, rhs_reduced), rhs_stride)]));
      };
      const T result = reduce<Reducer, T>(part_begin(count, part, num_parts),
                                          part_begin(count, part + 1, num_parts), value);
      assign(out[i + part * size], add ? kAddTo : kWriteTo, result);
    }
  }
}

template <typename Reducer, typename T>
void reduce_lines_kernel(const int size, const int count, const bool add, const int stride,
                         const T* in, T* out) {
  for (int i = 0; i < size; i++) {
    auto value = [&](int k) { return in[i + k * stride]; };
    assign(out[i], add ? kAddTo : kWriteTo, reduce<Reducer, T>(0, count, value));
  }
}

// Reductions of one element each.
template <typename Reducer, int ndim, typename Accumulator, typename In, typename Out,
          typename OP>
void reduce_kernel_M1(const int size, const bool add, const In* in, Out* out,
                      const Shape<ndim> in_shape, const Shape<ndim> out_shape) {
  for (int i = 0; i < size; i++) {
    const index_t place = ravel(unravel(i, out_shape), in_shape);
    auto value = [&](int) { return OP::Map(in[place]); };
    assign(out[i], add ? kAddTo : kWriteTo, Out(reduce<Reducer, Accumulator>(0, 1, value)));
  }
}

template <typename Reducer, int ndim, typename T, typename OP1, typename OP2>
void reduce_kernel_M1(const int size, const bool add, const T* in, const T* lhs, const T* rhs,
                      T* out, const Shape<ndim> in_shape, const Shape<ndim> lhs_shape,
                      const Shape<ndim> rhs_shape, const Shape<ndim> out_shape) {
  for (int i = 0; i < size; i++) {
    const Shape<ndim> place = unravel(i, out_shape);
    auto value = [&](int) {
      return OP1::Map(in[ravel(place, in_shape)], OP2::Map(lhs[ravel(place, lhs_shape)],
                                                           rhs[ravel(place, rhs_shape)]));
    };
    assign(out[i], add ? kAddTo : kWriteTo, reduce<Reducer, T>(0, 1, value));
  }
}
}  // namespace broadcast

// The gradient of a reduction, by the derivative OP of the result by each reduced element.
template <int req, typename OP>
struct reduce_axes_backward_broadcast {
  template <typename T, typename Out>
  static void Map(index_t i, T* in, Out* out, T* gradient, Out* out_gradient,
                  Shape<kMaxAxes> in_shape, Shape<kMaxAxes> out_shape, const uint32_t ndim) {
    const index_t place = broadcast_index(i, in_shape, out_shape, static_cast<int>(ndim));
    assign(gradient[i], req, T(out_gradient[place]) * OP::Map(in[i], T(out[place])));
  }
};

// The gradient of the norm of order 1.
template <int req>
struct norm_backward_broadcast {
  template <typename T, typename Out>
  static void Map(index_t i, T* gradient, Out* out_gradient, T* in, Shape<kMaxAxes> in_shape,
                  Shape<kMaxAxes> out_shape, const uint32_t ndim) {
    const index_t place = broadcast_index(i, in_shape, out_shape, static_cast<int>(ndim));
    assign(gradient[i], req, out_gradient[place] * mshadow_op::sign::Map(in[i]));
  }
};

// broadcast_to, broadcast_axis and the gradient of a sum. MXNet passes the shapes in a struct.
struct ShapeAndStride {
  index_t in_stride[kMaxAxes];
  index_t out_stride[kMaxAxes];
  index_t input_shape[kMaxAxes];
  index_t output_shape[kMaxAxes];
  index_t axes[kMaxAxes];
  int num_broadcast_axes;
  bool shape_changed;
};

template <typename OP>
struct broadcast_kernel_gpu {
  template <typename In, typename Out>
  static void Map(index_t i, In* in, Out* out, const ShapeAndStride& shapes,
                  const OpReqType req, const int ndim) {
    const index_t place = broadcast_index(i, shapes.output_shape, shapes.input_shape, ndim);
    assign(out[i], req, OP::Map(in[place]));
  }
};

template <typename OP>
struct direct_copy {
  template <typename In, typename Out>
  static void Map(index_t i, In* in, Out* out, const OpReqType req) {
    assign(out[i], req, OP::Map(in[i]));
  }
};

// The element of each row that an index names; indices outside are clipped or wrapped.
template <bool clip>
index_t index_within(int64_t index, int64_t size) {
  if (clip) return static_cast<index_t>(std::min(std::max<int64_t>(index, 0), size - 1));
  index %= size;
  return static_cast<index_t>(index < 0 ? index + size : index);
}

template <int ndim, bool clip>
struct pick {
  template <typename T, typename Index>
  static void Map(index_t i, T* out, const T* in, const Index* indices, index_t size,
                  int stride, Shape<ndim> in_shape, Shape<ndim> out_shape) {
    const index_t row = ravel(unravel(i, out_shape), in_shape);
    out[i] = in[row + index_within<clip>(static_cast<index_t>(indices[i]), size) * stride];
  }
};
template <int ndim, bool clip>
struct pick_grad {
  template <typename T, typename Index>
  static void Map(index_t i, T* gradient, const T* out_gradient, const Index* indices,
                  index_t size, int stride, Shape<ndim> in_shape, Shape<ndim> out_shape) {
    const index_t row = ravel(unravel(i, out_shape), in_shape);
    gradient[row + index_within<clip>(static_cast<index_t>(indices[i]), size) * stride] +=
        out_gradient[i];
  }
};

// Mean and variance over axes: the squared difference of each element, and its gradient.
constexpr int kMomentAxes = 6;

struct VarBroadcastKernel {
  template <typename T>
  static void Map(int i, T* out, const T* in, const T* mean, Shape<kMomentAxes> shape,
                  Shape<kMomentAxes> mean_shape) {
    const T difference = T(in[i] - mean[broadcast_index(i, shape, mean_shape, kMomentAxes)]);
    out[i] = T(difference * difference);
  }
};
template <int req>
struct VarBackwardKernel {
  template <typename T>
  static void Map(int i, T* gradient, const T* out_gradient, const T* in, const T* mean,
                  Shape<kMomentAxes> shape, Shape<kMomentAxes> mean_shape, const float count,
                  const float lost_degrees = 0) {
    const index_t place = broadcast_index(i, shape, mean_shape, kMomentAxes);
    assign(gradient[i], req,
           T(out_gradient[place] * (in[i] - mean[place]) * 2 / (count - lost_degrees)));
  }
};
}  // namespace op
}  // namespace mxnet
