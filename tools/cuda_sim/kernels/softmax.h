// Softmax and log-softmax, with their gradients.
#pragma once

#include "reductions.h"

namespace mxnet {
namespace op {
namespace mxnet_op {

// From a shifted input and the sum of the exponentials.
struct softmax_fwd {
  template <typename A, typename B>
  static auto Map(A input, B total) {
    return std::exp(mshadow_op::real(input)) / mshadow_op::real(total);
  }
};
struct log_softmax_fwd {
  template <typename A, typename B>
  static auto Map(A input, B total) {
    return mshadow_op::real(input) - std::log(mshadow_op::real(total));
  }
};

// From the output, its gradient, and a sum over the row.
struct softmax_bwd {
  template <typename T, typename Sum>
  static Sum Map(T gradient, T out, Sum total) {
    return Sum(out * (gradient - total));
  }
};
struct log_softmax_bwd {
  template <typename T, typename Sum>
  static Sum Map(T gradient, T out, Sum total) {
    return Sum(gradient - std::exp(mshadow_op::real(out)) * total);
  }
};

// One row of `size` elements, `stride` apart, of which the first `length` count.
template <typename OP, bool negate, typename Accumulator, typename In, typename Out>
void softmax_row(const In* in, Out* out, index_t size, index_t length, index_t stride,
                 double temperature) {
  auto input = [&](index_t i) { return negate ? In(-in[i * stride]) : in[i * stride]; };
  auto shifted = [&](index_t i, In shift) {
    return In(In(input(i) - shift) / In(temperature));
  };
  In largest;
  mshadow::red::maximum::SetInitValue(largest);
  for (index_t i = 0; i < length; i++) largest = std::max(largest, input(i));
  Accumulator total = Accumulator(0);
  for (index_t i = 0; i < length; i++) {
    total += Accumulator(std::exp(mshadow_op::real(shifted(i, largest))));
  }
  for (index_t i = 0; i < size; i++) {
    out[i * stride] = i < length ? Out(OP::Map(shifted(i, largest), total)) : Out(0);
  }
}

template <typename OP1, typename OP2, int req, bool negate, typename Accumulator, typename Out,
          typename In>
void softmax_row_gradient(const Out* out, const Out* out_gradient, In* gradient, index_t size,
                          index_t length, index_t stride, double temperature) {
  Accumulator total = Accumulator(0);
  for (index_t i = 0; i < length; i++) {
    total += Accumulator(OP1::Map(out_gradient[i * stride], out[i * stride]));
  }
  for (index_t i = 0; i < size; i++) {
    const In value = In(OP2::Map(out_gradient[i * stride], out[i * stride], total));
    const In scaled = In((negate ? In(-value) : value) / In(temperature));
    assign(gradient[i * stride], req, i < length ? scaled : In(0));
  }
}

// The kernels for rows that lie in one piece, and those for any axis.
template <typename OP, bool negate, typename Accumulator, typename Load, typename In,
          typename Out, typename Length>
void softmax_stride1_compute_kernel(const In* in, Out* out, Length* lengths, const index_t size,
                                    const double temperature, const int, const index_t rows) {
  for (index_t row = 0; row < rows; row++) {
    const index_t length = lengths ? static_cast<index_t>(lengths[row]) : size;
    const size_t start = static_cast<size_t>(row) * size;
    softmax_row<OP, negate, Accumulator>(in + start, out + start, size, length, 1, temperature);
  }
}

template <int bits, typename OP, bool negate, typename Accumulator, int ndim, typename In,
          typename Out, typename Length>
void softmax_compute_kernel(const cuda_sim::Launch& launch, In* in, Out* out, Length* lengths,
                            index_t size, int axis, Shape<ndim> row_shape, Shape<ndim> stride,
                            const double temperature) {
  for (unsigned row = 0; row < launch.grid.x; row++) {
    const index_t length = lengths ? static_cast<index_t>(lengths[row]) : size;
    const index_t start = dot(unravel(row, row_shape), stride);
    softmax_row<OP, negate, Accumulator>(in + start, out + start, size, length, stride[axis],
                                         temperature);
  }
}

template <typename OP1, typename OP2, int req, bool negate, typename Accumulator, typename Load,
          typename In, typename Out, typename Length>
void softmax_stride1_grad_kernel(const Out* out, const Out* out_gradient, In* gradient,
                                 const Length* lengths, const index_t size,
                                 const double temperature, const int, const index_t rows) {
  for (index_t row = 0; row < rows; row++) {
    const index_t length = lengths ? static_cast<index_t>(lengths[row]) : size;
    const size_t start = static_cast<size_t>(row) * size;
    softmax_row_gradient<OP1, OP2, req, negate, Accumulator>(
        out + start, out_gradient + start, gradient + start, size, length, 1, temperature);
  }
}

template <int bits, typename OP1, typename OP2, int req, bool negate, typename Accumulator,
          int ndim, typename In, typename Out, typename Length>
void softmax_grad_kernel(const cuda_sim::Launch& launch, Out* out, Out* out_gradient,
                         In* gradient, const Length* lengths, index_t size, int axis,
                         Shape<ndim> row_shape, Shape<ndim> stride, const double temperature) {
  for (unsigned row = 0; row < launch.grid.x; row++) {
    const index_t length = lengths ? static_cast<index_t>(lengths[row]) : size;
    const index_t start = dot(unravel(row, row_shape), stride);
    softmax_row_gradient<OP1, OP2, req, negate, Accumulator>(
        out + start, out_gradient + start, gradient + start, size, length, stride[axis],
        temperature);
  }
}
}  // namespace mxnet_op
}  // namespace op
}  // namespace mxnet
