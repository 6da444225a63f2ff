// Pooling of the simulated cuDNN.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cudnn_tensors.h"

using namespace cuda_sim;
using namespace cuda_sim::cudnn;

namespace {

enum PoolingMode { kMax = 0, kAverageOfWindow = 1, kAverageOfInputs = 2, kMaxDeterministic = 3 };

struct PoolingDescriptor {
  Windows windows;
  int mode = kMax, nan_propagation = kNotPropagateNan;
};

// The part of a window that lies on the input.
struct Range {
  long begin, end;
};

Range inputs_of_window(const Windows& windows, int dimension, long output, long input_size) {
  const long begin = output * windows.strides[dimension] - windows.padding[dimension];
  return {std::max(0L, begin), std::min(input_size, begin + windows.sizes[dimension])};
}

// Call function(output offset, plane's input offset, three ranges) for each window.
template <typename Function>
void each_window(const Windows& windows, const Layout& x, const Layout& y, Function function) {
  for (long image = 0; image < y.sizes[0]; image++)
    for (long channel = 0; channel < y.sizes[1]; channel++)
      for (long i = 0; i < y.sizes[2]; i++)
        for (long j = 0; j < y.sizes[3]; j++)
          for (long k = 0; k < y.sizes[4]; k++) {
            const Range depth = inputs_of_window(windows, 0, i, x.sizes[2]);
            const Range height = inputs_of_window(windows, 1, j, x.sizes[3]);
            const Range width = inputs_of_window(windows, 2, k, x.sizes[4]);
            function(y.offset(image, channel, i, j, k), x.offset(image, channel, 0, 0, 0), depth,
                     height, width);
          }
}

template <typename Function>
void each_input(const Layout& x, Range depth, Range height, Range width, Function function) {
  for (long i = depth.begin; i < depth.end; i++)
    for (long j = height.begin; j < height.end; j++)
      for (long k = width.begin; k < width.end; k++) function(x.offset(0, 0, i, j, k));
}

bool takes_maximum(const PoolingDescriptor& pooling) {
  return pooling.mode == kMax || pooling.mode == kMaxDeterministic;
}

double divisor(const PoolingDescriptor& pooling, Range depth, Range height, Range width) {
  const int* sizes = pooling.windows.sizes;
  if (pooling.mode == kAverageOfWindow) return double(sizes[0]) * sizes[1] * sizes[2];
  return double(depth.end - depth.begin) * (height.end - height.begin) * (width.end - width.begin);
}

// Whether a maximum moves on to the next candidate: either NaN is the greatest, or there is none.
template <typename T>
bool exceeds(T candidate, T best, bool propagate_nan) {
  if (std::isnan(double(best))) return !propagate_nan;
  return candidate > best || (propagate_nan && std::isnan(double(candidate)));
}

// The offset of the first maximum of a window, or -1 if the window has no input at all.
template <typename T>
long first_maximum(const PoolingDescriptor& pooling, const Layout& x, const T* plane, Range depth,
                   Range height, Range width) {
  const bool propagate_nan = pooling.nan_propagation == kPropagateNan;
  long best = -1;
  each_input(x, depth, height, width, [&](long at) {
    if (best < 0 || exceeds(plane[at], plane[best], propagate_nan)) best = at;
  });
  return best;
}

template <typename T>
void pool_forward(const PoolingDescriptor& pooling, const Layout& x_layout, const Layout& y_layout,
                  double alpha, const T* x, double beta, T* y) {
  using Sum = SumOf<T>;
  each_window(pooling.windows, x_layout, y_layout,
              [&](long output, long plane, Range depth, Range height, Range width) {
                Sum value = 0;
                if (takes_maximum(pooling)) {
                  const long at =
                      first_maximum(pooling, x_layout, x + plane, depth, height, width);
                  value = at < 0 ? std::numeric_limits<Sum>::lowest() : Sum(x[plane + at]);
                } else {
                  each_input(x_layout, depth, height, width,
                             [&](long at) { value += Sum(x[plane + at]); });
                  value /= Sum(divisor(pooling, depth, height, width));
                }
                blend(y[output], alpha, value, beta);
              });
}

template <typename T>
void pool_backward(const PoolingDescriptor& pooling, const Layout& x_layout, const Layout& y_layout,
                   double alpha, const T* dy, const T* x, double beta, T* dx) {
  using Sum = SumOf<T>;
  long last = 0;
  for (int i = 0; i < 5; i++) last += (x_layout.sizes[i] - 1) * x_layout.strides[i];
  std::vector<Sum> sums(last + 1, Sum(0));  // windows overlap: rounded to T only at the end
  each_window(pooling.windows, x_layout, y_layout,
              [&](long output, long plane, Range depth, Range height, Range width) {
                if (takes_maximum(pooling)) {
                  const long at =
                      first_maximum(pooling, x_layout, x + plane, depth, height, width);
                  if (at >= 0) sums[plane + at] += Sum(dy[output]);
                } else {
                  const Sum share =
                      Sum(dy[output]) / Sum(divisor(pooling, depth, height, width));
                  each_input(x_layout, depth, height, width,
                             [&](long at) { sums[plane + at] += share; });
                }
              });
  for (long channel = 0; channel < x_layout.sizes[1]; channel++)
    x_layout.each_of_channel(channel, [&](long at) { blend(dx[at], alpha, sums[at], beta); });
}

}  // namespace

extern "C" {

CUDA_SIM_DESCRIPTOR(Pooling)

int cudnnSetPoolingNdDescriptor(PoolingDescriptor* pooling, int mode, int nan_propagation,
                                int num_spatial, const int* sizes, const int* padding,
                                const int* strides) {
  if (num_spatial < 1 || num_spatial > kSpatialDimensions) return kNotSupported;
  *pooling = {Windows(), mode, nan_propagation};
  set_spatial(pooling->windows.sizes, num_spatial, sizes);
  set_spatial(pooling->windows.padding, num_spatial, padding);
  set_spatial(pooling->windows.strides, num_spatial, strides);
  return kSuccess;
}

int cudnnSetPooling2dDescriptor(PoolingDescriptor* pooling, int mode, int nan_propagation,
                                int height, int width, int padding_height, int padding_width,
                                int stride_height, int stride_width) {
  const int sizes[] = {height, width}, padding[] = {padding_height, padding_width};
  const int strides[] = {stride_height, stride_width};
  return cudnnSetPoolingNdDescriptor(pooling, mode, nan_propagation, 2, sizes, padding, strides);
}

int cudnnPoolingForward(Handle* handle, const PoolingDescriptor* pooling, const void* alpha,
                        const TensorDescriptor* x_descriptor, const void* x, const void* beta,
                        const TensorDescriptor* y_descriptor, void* y) {
  const PoolingDescriptor copy = *pooling;
  const Layout from = layout_of(*x_descriptor), to = layout_of(*y_descriptor);
  if (from.sizes[0] != to.sizes[0] || from.sizes[1] != to.sizes[1]) return kBadParam;
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  enqueue_typed(handle, x_descriptor->type, "cudnnPoolingForward", [=](auto zero) {
    using T = decltype(zero);
    pool_forward(copy, from, to, a, typed<T>(x), b,
                 typed<T>(y));
  });
  return kSuccess;
}

int cudnnPoolingBackward(Handle* handle, const PoolingDescriptor* pooling, const void* alpha,
                         const TensorDescriptor* y_descriptor, const void* /*y*/,
                         const TensorDescriptor* dy_descriptor, const void* dy,
                         const TensorDescriptor* x_descriptor, const void* x, const void* beta,
                         const TensorDescriptor* dx_descriptor, void* dx) {
  if (!same_layout(*y_descriptor, *dy_descriptor) || !same_layout(*x_descriptor, *dx_descriptor))
    return kBadParam;
  const PoolingDescriptor copy = *pooling;
  const Layout from = layout_of(*x_descriptor), to = layout_of(*y_descriptor);
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  enqueue_typed(handle, x_descriptor->type, "cudnnPoolingBackward", [=](auto zero) {
    using T = decltype(zero);
    pool_backward(copy, from, to, a, typed<T>(dy),
                  typed<T>(x), b, typed<T>(dx));
  });
  return kSuccess;
}

}  // extern "C"
