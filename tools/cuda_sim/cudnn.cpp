// libcudnn.so.8, simulated: the functions that MXNet calls, but for its recurrent layers and the
// spatial transformer. Tensors of float16, float32 and float64 with up to three spatial dimensions,
// in any layout that strides can express.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gemm.h"
#include "random_bits.h"
#include "sim.h"

using cuda_sim::bytes;
using cuda_sim::enqueue;
using cuda_sim::gemm;
using cuda_sim::Half;
using cuda_sim::Matrix;
using cuda_sim::stop;

namespace {

enum Status { kSuccess = 0, kBadParam = 3, kNotSupported = 9 };
enum DataType { kFloat = 0, kDouble = 1, kHalf = 2 };
enum TensorFormat { kChannelsFirst = 0, kChannelsLast = 1 };
enum ConvolutionMode { kConvolution = 0, kCrossCorrelation = 1 };
enum PoolingMode { kMax = 0, kAverageOfWindow = 1, kAverageOfInputs = 2, kMaxDeterministic = 3 };
enum Activation { kSigmoid, kRelu, kTanh, kClippedRelu, kElu, kIdentity };
enum SoftmaxAlgorithm { kSoftmaxFast = 0, kSoftmaxAccurate = 1, kSoftmaxLog = 2 };
enum SoftmaxMode { kOverInstance = 0, kOverChannels = 1 };
enum BatchNormMode { kPerActivation = 0, kSpatial = 1, kSpatialPersistent = 2 };
enum NanPropagation { kNotPropagateNan = 0, kPropagateNan = 1 };

constexpr int kMaxDimensions = 8;
constexpr int kSpatialDimensions = 3;

struct Handle {
  void* stream = nullptr;
};

struct TensorDescriptor {
  int type = kFloat, num_dimensions = 0;
  int sizes[kMaxDimensions] = {}, strides[kMaxDimensions] = {};
};

struct FilterDescriptor {
  int type = kFloat, format = kChannelsFirst, num_dimensions = 0;
  int sizes[kMaxDimensions] = {};
};

// Windows that move over depth, height and width. A dimension that is not there has one place.
struct Windows {
  int sizes[kSpatialDimensions] = {1, 1, 1};
  int padding[kSpatialDimensions] = {0, 0, 0};
  int strides[kSpatialDimensions] = {1, 1, 1};
  int dilations[kSpatialDimensions] = {1, 1, 1};
};

struct ConvolutionDescriptor {
  Windows windows;
  int mode = kCrossCorrelation, math_type = 0, num_groups = 1;
};

struct PoolingDescriptor {
  Windows windows;
  int mode = kMax, nan_propagation = kNotPropagateNan;
};

struct ActivationDescriptor {
  int mode = kRelu, nan_propagation = kNotPropagateNan;
  double coefficient = 0;
};

struct DropoutDescriptor {
  float probability = 0;
  void* states = nullptr;
};

// What is at a dropout descriptor's `states`, in device memory.
struct DropoutStates {
  uint64_t seed, position;
};

// cudnnConvolutionFwdAlgoPerf_t and its two siblings, which are alike.
struct AlgorithmPerformance {
  int algorithm, status;
  float milliseconds;
  size_t workspace_bytes;
  int determinism, math_type, reserved[3];
};

// float16 is computed with in float32, and so are the parameters of its batch normalisation.
template <typename T>
using SumOf = std::conditional_t<std::is_same<T, double>::value, double, float>;

// Call function(T()) for the C++ type of a cudnnDataType.
template <typename Function>
void with_type(int type, const char* name, Function function) {
  switch (type) {
    case kFloat:
      return function(float());
    case kDouble:
      return function(double());
    case kHalf:
      return function(Half());
    default:
      stop("%s of data type %d is not simulated", name, type);
  }
}

// alpha and beta are double for tensors of double, float for all others.
double factor(int type, const void* address) {
  return type == kDouble ? *static_cast<const double*>(address)
                         : *static_cast<const float*>(address);
}

// What was there is not read if beta is 0: it may be NaN in fresh memory.
template <typename T, typename Sum>
void blend(T& element, double alpha, Sum value, double beta) {
  const Sum scaled = static_cast<Sum>(alpha) * value;
  element = static_cast<T>(
      beta == 0 ? scaled : scaled + static_cast<Sum>(beta) * static_cast<Sum>(element));
}

// ---- Five dimensions: images, channels, depth, height and width.

struct Layout {
  long sizes[5] = {1, 1, 1, 1, 1}, strides[5] = {0, 0, 0, 0, 0};

  long num_elements() const {
    return sizes[0] * sizes[1] * num_places();
  }
  long num_places() const { return sizes[2] * sizes[3] * sizes[4]; }
  long offset(long image, long channel, long depth, long height, long width) const {
    return image * strides[0] + channel * strides[1] + depth * strides[2] + height * strides[3] +
           width * strides[4];
  }
  // The distance of two places that follow each other in depth, height and width.
  long place_stride() const {
    long stride = 0;
    for (int i = 4; i >= 2; i--) {
      if (sizes[i] == 1) continue;
      if (stride == 0) stride = strides[i];
      long inner = 1;
      for (int j = i + 1; j < 5; j++) inner *= sizes[j];
      if (strides[i] != stride * inner) stop("a convolution's output has gaps");
    }
    return stride;
  }
  // Call function(offset) for each element of a channel.
  template <typename Function>
  void each_of_channel(long channel, Function function) const {
    for (long image = 0; image < sizes[0]; image++)
      for (long depth = 0; depth < sizes[2]; depth++)
        for (long height = 0; height < sizes[3]; height++) {
          long at = offset(image, channel, depth, height, 0);
          for (long width = 0; width < sizes[4]; width++, at += strides[4]) function(at);
        }
  }
};

// The last spatial dimension is the width; where there is one only, depth and height are 1.
int place_of_dimension(int dimension, int num_dimensions) {
  return dimension < 2 ? dimension : 5 - num_dimensions + dimension;
}

Layout layout_of(const TensorDescriptor& tensor) {
  Layout layout;
  if (tensor.num_dimensions > 5) stop("cuDNN tensors of more than 5 dimensions are not simulated");
  for (int i = 0; i < tensor.num_dimensions; i++) {
    const int place = place_of_dimension(i, tensor.num_dimensions);
    layout.sizes[place] = tensor.sizes[i];
    layout.strides[place] = tensor.strides[i];
  }
  return layout;
}

Layout layout_of(const FilterDescriptor& filter) {
  Layout layout;
  if (filter.num_dimensions > 5) stop("cuDNN filters of more than 5 dimensions are not simulated");
  for (int i = 0; i < filter.num_dimensions; i++)
    layout.sizes[place_of_dimension(i, filter.num_dimensions)] = filter.sizes[i];
  const bool channels_last = filter.format == kChannelsLast;
  long stride = 1;
  if (channels_last) {
    layout.strides[1] = 1;
    stride = layout.sizes[1];
  }
  for (int i = 4; i >= 0; i--) {
    if (i == 1 && channels_last) continue;
    layout.strides[i] = stride;
    stride *= layout.sizes[i];
  }
  return layout;
}

bool same_layout(const TensorDescriptor& a, const TensorDescriptor& b) {
  if (a.type != b.type || a.num_dimensions != b.num_dimensions) return false;
  for (int i = 0; i < a.num_dimensions; i++) {
    if (a.sizes[i] != b.sizes[i]) return false;
    if (a.sizes[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

// The number of elements of tensors that have one layout and no gaps; any order will do for what is
// computed element by element.
long num_dense_elements(const char* name, const TensorDescriptor& tensor) {
  long count = 1, last = 0;
  for (int i = 0; i < tensor.num_dimensions; i++) {
    count *= tensor.sizes[i];
    last += (tensor.sizes[i] - 1L) * tensor.strides[i];
  }
  if (count > 0 && last != count - 1) stop("%s of tensors with gaps is not simulated", name);
  return count;
}

// ---- Convolution: the inputs of each window become a column, and the rest is matrix products.

struct Convolution {
  Layout input, filter, output;
  Windows windows;
  int num_groups;

  long channels_per_group() const { return filter.sizes[1]; }
  long outputs_per_group() const { return filter.sizes[0] / num_groups; }
  long num_taps() const { return filter.num_places(); }
  long num_rows() const { return channels_per_group() * num_taps(); }
  long num_columns() const { return output.num_places(); }

  // One row of the columns belongs to one number of a filter, in the filter's order in memory.
  // Call function(row, column, offset, step, begin, end) for each line of output places: outputs
  // `begin` to `end` of the line, which starts at `column`, read the input at offset + i * step,
  // and the line's others the padding.
  template <typename Function>
  void each_line(Function function) const {
    const Windows& w = windows;
    const long step = w.strides[2] * input.strides[4];
    long tap[3];
    for (long channel = 0; channel < channels_per_group(); channel++)
      for (tap[0] = 0; tap[0] < filter.sizes[2]; tap[0]++)
        for (tap[1] = 0; tap[1] < filter.sizes[3]; tap[1]++)
          for (tap[2] = 0; tap[2] < filter.sizes[4]; tap[2]++) {
            const long row = filter.offset(0, channel, tap[0], tap[1], tap[2]);
            const long first_width = tap[2] * w.dilations[2] - w.padding[2];
            const long begin = first_output(first_width, w.strides[2]);
            const long end = std::min(output.sizes[4], first_output(first_width - input.sizes[4],
                                                                    w.strides[2]));
            long column = 0;
            for (long i = 0; i < output.sizes[2]; i++)
              for (long j = 0; j < output.sizes[3]; j++, column += output.sizes[4]) {
                const long depth = i * w.strides[0] - w.padding[0] + tap[0] * w.dilations[0];
                const long height = j * w.strides[1] - w.padding[1] + tap[1] * w.dilations[1];
                const bool inside = depth >= 0 && depth < input.sizes[2] && height >= 0 &&
                                    height < input.sizes[3] && begin < end;
                function(row, column, input.offset(0, channel, depth, height, first_width), step,
                         inside ? begin : 0, inside ? end : 0);
              }
          }
  }

  // The first output whose input is at 0 or above, where output 0's is at `position`.
  static long first_output(long position, long stride) {
    return position >= 0 ? 0 : (-position + stride - 1) / stride;
  }

  template <typename T>
  void gather(const T* data, T* columns) const {
    const long line_length = output.sizes[4], row_length = num_columns();
    each_line([=](long row, long column, long offset, long step, long begin, long end) {
      T* line = columns + row * row_length + column;
      std::fill(line, line + begin, T(0));
      for (long i = begin; i < end; i++) line[i] = data[offset + i * step];
      std::fill(line + end, line + line_length, T(0));
    });
  }

  template <typename Sum>
  void scatter(const Sum* columns, Sum* data) const {
    const long row_length = num_columns();
    each_line([=](long row, long column, long offset, long step, long begin, long end) {
      const Sum* line = columns + row * row_length + column;
      for (long i = begin; i < end; i++) data[offset + i * step] += line[i];
    });
  }

  template <typename T>
  T* group_of_input(T* data, long image, long group) const {
    return data + image * input.strides[0] + group * channels_per_group() * input.strides[1];
  }

  // Outputs by places, and filters by rows of the columns.
  template <typename T>
  Matrix<T> group_of_output(T* data, long image, long group) const {
    return {data + image * output.strides[0] + group * outputs_per_group() * output.strides[1],
            output.strides[1], output.place_stride()};
  }
  template <typename T>
  Matrix<T> group_of_filter(T* data, long group) const {
    return {data + group * outputs_per_group() * num_rows(), num_rows(), 1};
  }
};

int describe(const TensorDescriptor* x, const FilterDescriptor* w, const ConvolutionDescriptor* c,
             const TensorDescriptor* y, Convolution* convolution) {
  if (c->mode != kCrossCorrelation) stop("cuDNN's flipped convolution is not simulated");
  if (x->type != w->type || x->type != y->type) return kNotSupported;
  *convolution = {layout_of(*x), layout_of(*w), layout_of(*y), c->windows, c->num_groups};
  const Layout &input = convolution->input, &filter = convolution->filter;
  const Layout& output = convolution->output;
  if (input.sizes[0] != output.sizes[0] || filter.sizes[0] != output.sizes[1] ||
      input.sizes[1] != filter.sizes[1] * c->num_groups || filter.sizes[0] % c->num_groups != 0)
    return kBadParam;
  for (int i = 0; i < kSpatialDimensions; i++) {
    const Windows& windows = c->windows;
    const long window = (filter.sizes[2 + i] - 1) * windows.dilations[i] + 1;
    const long room = input.sizes[2 + i] + 2 * windows.padding[i] - window;
    if (room < 0 || output.sizes[2 + i] != room / windows.strides[i] + 1) return kBadParam;
  }
  return kSuccess;
}

template <typename T>
void convolve_forward(const Convolution& c, double alpha, const T* x, const T* w, double beta,
                      T* y) {
  using Sum = SumOf<T>;
  std::vector<T> columns(c.num_rows() * c.num_columns());
  for (long image = 0; image < c.input.sizes[0]; image++)
    for (long group = 0; group < c.num_groups; group++) {
      c.gather(c.group_of_input(x, image, group), columns.data());
      gemm<Sum>(c.outputs_per_group(), c.num_columns(), c.num_rows(), Sum(alpha),
                c.group_of_filter(w, group), Matrix<const T>{columns.data(), c.num_columns(), 1},
                Sum(beta), c.group_of_output(y, image, group));
    }
}

template <typename T>
void convolve_backward_data(const Convolution& c, double alpha, const T* w, const T* dy,
                            double beta, T* dx) {
  using Sum = SumOf<T>;
  std::vector<Sum> columns(c.num_rows() * c.num_columns());
  // Windows overlap: their sum is formed in one image's buffer, rounded to T only at its end.
  Convolution dense = c;
  const long channels = c.channels_per_group();
  long stride = 1;
  for (int i = 4; i >= 1; i--) {
    dense.input.strides[i] = stride;
    stride *= i == 1 ? channels : c.input.sizes[i];
  }
  std::vector<Sum> sums(stride);
  for (long image = 0; image < c.input.sizes[0]; image++)
    for (long group = 0; group < c.num_groups; group++) {
      gemm<Sum>(c.num_rows(), c.num_columns(), c.outputs_per_group(), Sum(alpha),
                c.group_of_filter(w, group).transposed(), c.group_of_output(dy, image, group),
                Sum(0), Matrix<Sum>{columns.data(), c.num_columns(), 1});
      std::fill(sums.begin(), sums.end(), Sum(0));
      dense.scatter(columns.data(), sums.data());
      T* result = c.group_of_input(dx, image, group);
      const Sum* sum = sums.data();
      for (long channel = 0; channel < channels; channel++)
        for (long depth = 0; depth < c.input.sizes[2]; depth++)
          for (long height = 0; height < c.input.sizes[3]; height++)
            for (long width = 0; width < c.input.sizes[4]; width++)
              blend(result[c.input.offset(0, channel, depth, height, width)], 1, *sum++, beta);
    }
}

template <typename T>
void convolve_backward_filter(const Convolution& c, double alpha, const T* x, const T* dy,
                              double beta, T* dw) {
  using Sum = SumOf<T>;
  std::vector<T> columns(c.num_rows() * c.num_columns());
  std::vector<Sum> sums(c.filter.num_elements());
  for (long image = 0; image < c.input.sizes[0]; image++)
    for (long group = 0; group < c.num_groups; group++) {
      c.gather(c.group_of_input(x, image, group), columns.data());
      gemm<Sum>(c.outputs_per_group(), c.num_rows(), c.num_columns(), Sum(1),
                c.group_of_output(dy, image, group),
                Matrix<const T>{columns.data(), 1, c.num_columns()}, Sum(image == 0 ? 0 : 1),
                c.group_of_filter(sums.data(), group));
    }
  for (size_t i = 0; i < sums.size(); i++) blend(dw[i], alpha, sums[i], beta);
}

// ---- Pooling.

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

// ---- Activations.

template <typename Sum>
Sum activate(const ActivationDescriptor& activation, Sum x) {
  const Sum coefficient = Sum(activation.coefficient);
  const bool keeps_nan = activation.nan_propagation == kPropagateNan && std::isnan(x);
  switch (activation.mode) {
    case kSigmoid:
      return 1 / (1 + std::exp(-x));
    case kRelu:
      return x > 0 || keeps_nan ? x : 0;
    case kTanh:
      return std::tanh(x);
    case kClippedRelu:
      return keeps_nan ? x : std::min(x > 0 ? x : 0, coefficient);
    case kElu:
      return x > 0 ? x : coefficient * std::expm1(x);
    case kIdentity:
      return x;
    default:
      stop("cuDNN's activation %d is not simulated", activation.mode);
  }
}

template <typename Sum>
Sum activation_gradient(const ActivationDescriptor& activation, Sum x, Sum y, Sum dy) {
  switch (activation.mode) {
    case kSigmoid:
      return dy * y * (1 - y);
    case kRelu:
      return x > 0 ? dy : 0;
    case kTanh:
      return dy * (1 - y * y);
    case kClippedRelu:
      return x > 0 && x < Sum(activation.coefficient) ? dy : 0;
    case kElu:
      return x > 0 ? dy : dy * (y + Sum(activation.coefficient));
    case kIdentity:
      return dy;
    default:
      stop("cuDNN's activation %d is not simulated", activation.mode);
  }
}

// ---- Softmax: call function(offset of each element) for each group that sums to one.

template <typename Function>
void each_softmax(const Layout& layout, int mode, Function function) {
  std::vector<long> members, starts;
  for (long depth = 0; depth < layout.sizes[2]; depth++)
    for (long height = 0; height < layout.sizes[3]; height++)
      for (long width = 0; width < layout.sizes[4]; width++)
        starts.push_back(layout.offset(0, 0, depth, height, width));
  for (long channel = 0; channel < layout.sizes[1]; channel++) {
    const long offset = channel * layout.strides[1];
    if (mode == kOverChannels) {
      members.push_back(offset);
    } else {
      for (long start : starts) members.push_back(offset + start);
    }
  }
  if (mode == kOverInstance) starts = {0};
  std::vector<long> offsets(members.size());
  for (long image = 0; image < layout.sizes[0]; image++)
    for (long start : starts) {
      for (size_t i = 0; i < members.size(); i++)
        offsets[i] = image * layout.strides[0] + start + members[i];
      function(offsets);
    }
}

// ---- Batch normalisation over each channel.

struct Moments {
  double mean, variance;
};

template <typename T>
Moments moments_of_channel(const Layout& layout, long channel, const T* x) {
  const double count = double(layout.sizes[0] * layout.num_places());
  double mean = 0, variance = 0;
  layout.each_of_channel(channel, [&](long at) { mean += double(x[at]); });
  mean /= count;
  layout.each_of_channel(channel, [&](long at) {
    variance += (double(x[at]) - mean) * (double(x[at]) - mean);
  });
  return {mean, variance / count};
}

int check_batch_norm(int mode, const TensorDescriptor* x, const TensorDescriptor* y) {
  if (mode == kPerActivation) stop("cuDNN's batch normalisation per activation is not simulated");
  return same_layout(*x, *y) ? kSuccess : kBadParam;
}

void set_spatial(int* values, int num_spatial, const int* given) {
  for (int i = 0; i < num_spatial; i++) values[kSpatialDimensions - num_spatial + i] = given[i];
}

// ---- Choosing algorithms: there is one, which is called 1 because cuDNN's algorithms 0 of the
// gradients are not deterministic.

constexpr size_t kWorkspaceBytes = 1024;

int the_algorithm(int num_wanted, int* num_found, AlgorithmPerformance* found) {
  if (num_wanted < 1) return kBadParam;
  *num_found = 1;
  *found = {1, kSuccess, 1.0f, kWorkspaceBytes, 1, 0, {}};
  return kSuccess;
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return 8906; }

const char* cudnnGetErrorString(int status) {
  static const char* const names[] = {
      "CUDNN_STATUS_SUCCESS",          "CUDNN_STATUS_NOT_INITIALIZED",
      "CUDNN_STATUS_ALLOC_FAILED",     "CUDNN_STATUS_BAD_PARAM",
      "CUDNN_STATUS_INTERNAL_ERROR",   "CUDNN_STATUS_INVALID_VALUE",
      "CUDNN_STATUS_ARCH_MISMATCH",    "CUDNN_STATUS_MAPPING_ERROR",
      "CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_NOT_SUPPORTED",
      "CUDNN_STATUS_LICENSE_ERROR",    "CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING",
      "CUDNN_STATUS_RUNTIME_IN_PROGRESS", "CUDNN_STATUS_RUNTIME_FP_OVERFLOW",
      "CUDNN_STATUS_VERSION_MISMATCH"};
  const int count = sizeof names / sizeof *names;
  return status >= 0 && status < count ? names[status] : "CUDNN_UNKNOWN_STATUS";
}

int cudnnCreate(Handle** handle) {
  *handle = new Handle;
  return kSuccess;
}

int cudnnDestroy(Handle* handle) {
  delete handle;
  return kSuccess;
}

int cudnnSetStream(Handle* handle, void* stream) {
  handle->stream = stream;
  return kSuccess;
}

#define CUDA_SIM_DESCRIPTOR(KIND)                                   \
  int cudnnCreate##KIND##Descriptor(KIND##Descriptor** descriptor) { \
    *descriptor = new KIND##Descriptor;                             \
    return kSuccess;                                                \
  }                                                                 \
  int cudnnDestroy##KIND##Descriptor(KIND##Descriptor* descriptor) { \
    delete descriptor;                                              \
    return kSuccess;                                                \
  }
CUDA_SIM_DESCRIPTOR(Tensor)
CUDA_SIM_DESCRIPTOR(Filter)
CUDA_SIM_DESCRIPTOR(Convolution)
CUDA_SIM_DESCRIPTOR(Pooling)
CUDA_SIM_DESCRIPTOR(Activation)
CUDA_SIM_DESCRIPTOR(Dropout)

int cudnnSetTensor4dDescriptor(TensorDescriptor* tensor, int format, int type, int images,
                               int channels, int height, int width) {
  if (format > kChannelsLast) return kNotSupported;
  const bool last = format == kChannelsLast;
  const int place = last ? channels : 1;
  *tensor = {type, 4, {images, channels, height, width},
             {channels * height * width, last ? 1 : height * width, width * place, place}};
  return kSuccess;
}

int cudnnSetTensorNdDescriptor(TensorDescriptor* tensor, int type, int num_dimensions,
                               const int* sizes, const int* strides) {
  if (num_dimensions < 1 || num_dimensions > kMaxDimensions) return kBadParam;
  *tensor = {type, num_dimensions, {}, {}};
  std::copy_n(sizes, num_dimensions, tensor->sizes);
  std::copy_n(strides, num_dimensions, tensor->strides);
  return kSuccess;
}

int cudnnSetFilterNdDescriptor(FilterDescriptor* filter, int type, int format, int num_dimensions,
                               const int* sizes) {
  if (num_dimensions < 1 || num_dimensions > kMaxDimensions) return kBadParam;
  if (format > kChannelsLast) return kNotSupported;
  *filter = {type, format, num_dimensions, {}};
  std::copy_n(sizes, num_dimensions, filter->sizes);
  return kSuccess;
}

int cudnnSetFilter4dDescriptor(FilterDescriptor* filter, int type, int format, int outputs,
                               int inputs, int height, int width) {
  const int sizes[] = {outputs, inputs, height, width};
  return cudnnSetFilterNdDescriptor(filter, type, format, 4, sizes);
}

// ---- Convolution.

int cudnnSetConvolutionNdDescriptor(ConvolutionDescriptor* convolution, int num_spatial,
                                    const int* padding, const int* strides, const int* dilations,
                                    int mode, int /*compute_type*/) {
  if (num_spatial < 1 || num_spatial > kSpatialDimensions) return kNotSupported;
  convolution->windows = Windows();
  convolution->mode = mode;
  set_spatial(convolution->windows.padding, num_spatial, padding);
  set_spatial(convolution->windows.strides, num_spatial, strides);
  set_spatial(convolution->windows.dilations, num_spatial, dilations);
  return kSuccess;
}

int cudnnSetConvolution2dDescriptor(ConvolutionDescriptor* convolution, int padding_height,
                                    int padding_width, int stride_height, int stride_width,
                                    int dilation_height, int dilation_width, int mode,
                                    int compute_type) {
  const int padding[] = {padding_height, padding_width};
  const int strides[] = {stride_height, stride_width};
  const int dilations[] = {dilation_height, dilation_width};
  return cudnnSetConvolutionNdDescriptor(convolution, 2, padding, strides, dilations, mode,
                                         compute_type);
}

int cudnnSetConvolutionGroupCount(ConvolutionDescriptor* convolution, int num_groups) {
  if (num_groups < 1) return kBadParam;
  convolution->num_groups = num_groups;
  return kSuccess;
}

int cudnnSetConvolutionMathType(ConvolutionDescriptor* convolution, int math_type) {
  convolution->math_type = math_type;
  return kSuccess;
}

#define CUDA_SIM_ALGORITHMS(DIRECTION)                                                           \
  int cudnnGetConvolution##DIRECTION##AlgorithmMaxCount(Handle*, int* count) {                   \
    *count = 1;                                                                                  \
    return kSuccess;                                                                             \
  }                                                                                              \
  int cudnnGetConvolution##DIRECTION##Algorithm_v7(const Handle*, const void*, const void*,      \
                                                   const void*, const void*, int wanted,         \
                                                   int* found, AlgorithmPerformance* results) {  \
    return the_algorithm(wanted, found, results);                                                \
  }                                                                                              \
  int cudnnFindConvolution##DIRECTION##Algorithm(const Handle*, const void*, const void*,        \
                                                 const void*, const void*, int wanted,           \
                                                 int* found, AlgorithmPerformance* results) {    \
    cuda_sim::count("cudnnFindConvolution" #DIRECTION "Algorithm");                              \
    return the_algorithm(wanted, found, results);                                                \
  }                                                                                              \
  int cudnnGetConvolution##DIRECTION##WorkspaceSize(const Handle*, const void*, const void*,     \
                                                    const void*, const void*, int,               \
                                                    size_t* num_bytes) {                         \
    *num_bytes = kWorkspaceBytes;                                                                \
    return kSuccess;                                                                             \
  }
CUDA_SIM_ALGORITHMS(Forward)
CUDA_SIM_ALGORITHMS(BackwardData)
CUDA_SIM_ALGORITHMS(BackwardFilter)

int cudnnConvolutionForward(Handle* handle, const void* alpha, const TensorDescriptor* x_descriptor,
                            const void* x, const FilterDescriptor* w_descriptor, const void* w,
                            const ConvolutionDescriptor* descriptor, int /*algorithm*/,
                            void* /*workspace*/, size_t /*workspace_bytes*/, const void* beta,
                            const TensorDescriptor* y_descriptor, void* y) {
  Convolution convolution;
  const int status =
      describe(x_descriptor, w_descriptor, descriptor, y_descriptor, &convolution);
  if (status != kSuccess) return status;
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnConvolutionForward", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnConvolutionForward", [=] {
      convolve_forward(convolution, a, bytes(static_cast<const T*>(x)),
                       bytes(static_cast<const T*>(w)), b, bytes(static_cast<T*>(y)));
    });
  });
  return kSuccess;
}

int cudnnConvolutionBackwardData(Handle* handle, const void* alpha,
                                 const FilterDescriptor* w_descriptor, const void* w,
                                 const TensorDescriptor* y_descriptor, const void* dy,
                                 const ConvolutionDescriptor* descriptor, int /*algorithm*/,
                                 void* /*workspace*/, size_t /*workspace_bytes*/, const void* beta,
                                 const TensorDescriptor* x_descriptor, void* dx) {
  Convolution convolution;
  const int status =
      describe(x_descriptor, w_descriptor, descriptor, y_descriptor, &convolution);
  if (status != kSuccess) return status;
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnConvolutionBackwardData", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnConvolutionBackwardData", [=] {
      convolve_backward_data(convolution, a, bytes(static_cast<const T*>(w)),
                             bytes(static_cast<const T*>(dy)), b, bytes(static_cast<T*>(dx)));
    });
  });
  return kSuccess;
}

int cudnnConvolutionBackwardFilter(Handle* handle, const void* alpha,
                                   const TensorDescriptor* x_descriptor, const void* x,
                                   const TensorDescriptor* y_descriptor, const void* dy,
                                   const ConvolutionDescriptor* descriptor, int /*algorithm*/,
                                   void* /*workspace*/, size_t /*workspace_bytes*/,
                                   const void* beta, const FilterDescriptor* w_descriptor,
                                   void* dw) {
  Convolution convolution;
  const int status =
      describe(x_descriptor, w_descriptor, descriptor, y_descriptor, &convolution);
  if (status != kSuccess) return status;
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnConvolutionBackwardFilter", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnConvolutionBackwardFilter", [=] {
      convolve_backward_filter(convolution, a, bytes(static_cast<const T*>(x)),
                               bytes(static_cast<const T*>(dy)), b, bytes(static_cast<T*>(dw)));
    });
  });
  return kSuccess;
}

int cudnnConvolutionBackwardBias(Handle* handle, const void* alpha,
                                 const TensorDescriptor* y_descriptor, const void* dy,
                                 const void* beta, const TensorDescriptor* bias_descriptor,
                                 void* dbias) {
  const Layout output = layout_of(*y_descriptor), bias = layout_of(*bias_descriptor);
  if (bias.sizes[1] != output.sizes[1] || bias.num_elements() != bias.sizes[1]) return kBadParam;
  const double a = factor(y_descriptor->type, alpha), b = factor(y_descriptor->type, beta);
  with_type(y_descriptor->type, "cudnnConvolutionBackwardBias", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnConvolutionBackwardBias", [=] {
      const T* gradient = bytes(static_cast<const T*>(dy));
      T* result = bytes(static_cast<T*>(dbias));
      for (long channel = 0; channel < output.sizes[1]; channel++) {
        double sum = 0;
        output.each_of_channel(channel, [&](long at) { sum += double(gradient[at]); });
        blend(result[channel * bias.strides[1]], a, SumOf<T>(sum), b);
      }
    });
  });
  return kSuccess;
}

// `a` is repeated along the dimensions in which its size is 1.
int cudnnAddTensor(Handle* handle, const void* alpha, const TensorDescriptor* a_descriptor,
                   const void* a, const void* beta, const TensorDescriptor* c_descriptor, void* c) {
  Layout from = layout_of(*a_descriptor);
  const Layout to = layout_of(*c_descriptor);
  if (a_descriptor->type != c_descriptor->type) return kNotSupported;
  for (int i = 0; i < 5; i++) {
    if (from.sizes[i] != to.sizes[i] && from.sizes[i] != 1) return kBadParam;
    if (from.sizes[i] == 1) from.strides[i] = 0;
  }
  const double scale = factor(c_descriptor->type, alpha), kept = factor(c_descriptor->type, beta);
  with_type(c_descriptor->type, "cudnnAddTensor", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnAddTensor", [=] {
      const T* source = bytes(static_cast<const T*>(a));
      T* result = bytes(static_cast<T*>(c));
      for (long image = 0; image < to.sizes[0]; image++)
        for (long channel = 0; channel < to.sizes[1]; channel++)
          for (long depth = 0; depth < to.sizes[2]; depth++)
            for (long height = 0; height < to.sizes[3]; height++)
              for (long width = 0; width < to.sizes[4]; width++)
                blend(result[to.offset(image, channel, depth, height, width)], scale,
                      SumOf<T>(source[from.offset(image, channel, depth, height, width)]), kept);
    });
  });
  return kSuccess;
}

// ---- Pooling.

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
  with_type(x_descriptor->type, "cudnnPoolingForward", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnPoolingForward", [=] {
      pool_forward(copy, from, to, a, bytes(static_cast<const T*>(x)), b,
                   bytes(static_cast<T*>(y)));
    });
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
  with_type(x_descriptor->type, "cudnnPoolingBackward", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnPoolingBackward", [=] {
      pool_backward(copy, from, to, a, bytes(static_cast<const T*>(dy)),
                    bytes(static_cast<const T*>(x)), b, bytes(static_cast<T*>(dx)));
    });
  });
  return kSuccess;
}

// ---- Activation.

int cudnnSetActivationDescriptor(ActivationDescriptor* activation, int mode, int nan_propagation,
                                 double coefficient) {
  *activation = {mode, nan_propagation, coefficient};
  return kSuccess;
}

int cudnnActivationForward(Handle* handle, const ActivationDescriptor* activation,
                           const void* alpha, const TensorDescriptor* x_descriptor, const void* x,
                           const void* beta, const TensorDescriptor* y_descriptor, void* y) {
  if (!same_layout(*x_descriptor, *y_descriptor)) return kBadParam;
  const ActivationDescriptor copy = *activation;
  const long count = num_dense_elements("cudnnActivationForward", *x_descriptor);
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnActivationForward", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnActivationForward", [=] {
      const T* input = bytes(static_cast<const T*>(x));
      T* output = bytes(static_cast<T*>(y));
      for (long i = 0; i < count; i++)
        blend(output[i], a, activate(copy, SumOf<T>(input[i])), b);
    });
  });
  return kSuccess;
}

int cudnnActivationBackward(Handle* handle, const ActivationDescriptor* activation,
                            const void* alpha, const TensorDescriptor* y_descriptor, const void* y,
                            const TensorDescriptor* dy_descriptor, const void* dy,
                            const TensorDescriptor* x_descriptor, const void* x, const void* beta,
                            const TensorDescriptor* dx_descriptor, void* dx) {
  if (!same_layout(*y_descriptor, *dy_descriptor) || !same_layout(*y_descriptor, *x_descriptor) ||
      !same_layout(*y_descriptor, *dx_descriptor))
    return kBadParam;
  const ActivationDescriptor copy = *activation;
  const long count = num_dense_elements("cudnnActivationBackward", *x_descriptor);
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnActivationBackward", [&](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    enqueue(handle->stream, "cudnnActivationBackward", [=] {
      const T *input = bytes(static_cast<const T*>(x)), *output = bytes(static_cast<const T*>(y));
      const T* gradient = bytes(static_cast<const T*>(dy));
      T* result = bytes(static_cast<T*>(dx));
      for (long i = 0; i < count; i++)
        blend(result[i], a,
              activation_gradient(copy, Sum(input[i]), Sum(output[i]), Sum(gradient[i])), b);
    });
  });
  return kSuccess;
}

// ---- Softmax.

int cudnnSoftmaxForward(Handle* handle, int algorithm, int mode, const void* alpha,
                        const TensorDescriptor* x_descriptor, const void* x, const void* beta,
                        const TensorDescriptor* y_descriptor, void* y) {
  if (!same_layout(*x_descriptor, *y_descriptor)) return kBadParam;
  const Layout layout = layout_of(*x_descriptor);
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnSoftmaxForward", [&](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    enqueue(handle->stream, "cudnnSoftmaxForward", [=] {
      const T* input = bytes(static_cast<const T*>(x));
      T* output = bytes(static_cast<T*>(y));
      each_softmax(layout, mode, [&](const std::vector<long>& offsets) {
        Sum largest = -std::numeric_limits<Sum>::infinity(), sum = 0;
        for (long at : offsets) largest = std::max(largest, Sum(input[at]));
        for (long at : offsets) sum += std::exp(Sum(input[at]) - largest);
        for (long at : offsets) {
          const Sum shifted = Sum(input[at]) - largest;
          blend(output[at], a,
                algorithm == kSoftmaxLog ? shifted - std::log(sum) : std::exp(shifted) / sum, b);
        }
      });
    });
  });
  return kSuccess;
}

int cudnnSoftmaxBackward(Handle* handle, int algorithm, int mode, const void* alpha,
                         const TensorDescriptor* y_descriptor, const void* y,
                         const TensorDescriptor* dy_descriptor, const void* dy, const void* beta,
                         const TensorDescriptor* dx_descriptor, void* dx) {
  if (!same_layout(*y_descriptor, *dy_descriptor) || !same_layout(*y_descriptor, *dx_descriptor))
    return kBadParam;
  const Layout layout = layout_of(*y_descriptor);
  const double a = factor(y_descriptor->type, alpha), b = factor(y_descriptor->type, beta);
  with_type(y_descriptor->type, "cudnnSoftmaxBackward", [&](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    enqueue(handle->stream, "cudnnSoftmaxBackward", [=] {
      const T *output = bytes(static_cast<const T*>(y));
      const T *gradient = bytes(static_cast<const T*>(dy));
      T* result = bytes(static_cast<T*>(dx));
      const bool log = algorithm == kSoftmaxLog;
      each_softmax(layout, mode, [&](const std::vector<long>& offsets) {
        Sum sum = 0;
        for (long at : offsets) sum += Sum(gradient[at]) * (log ? Sum(1) : Sum(output[at]));
        for (long at : offsets) {
          const Sum g = Sum(gradient[at]), o = Sum(output[at]);
          blend(result[at], a, log ? g - std::exp(o) * sum : o * (g - sum), b);
        }
      });
    });
  });
  return kSuccess;
}

// ---- Batch normalisation. Its parameters and statistics are float32, or float64 for float64.

int cudnnDeriveBNTensorDescriptor(TensorDescriptor* derived, const TensorDescriptor* x, int mode) {
  if (mode == kPerActivation) stop("cuDNN's batch normalisation per activation is not simulated");
  const int channels = x->sizes[1], num_dimensions = std::max(4, x->num_dimensions);
  TensorDescriptor result;
  result.type = x->type == kDouble ? kDouble : kFloat;
  result.num_dimensions = num_dimensions;
  for (int i = 0; i < num_dimensions; i++) result.sizes[i] = result.strides[i] = 1;
  result.sizes[1] = result.strides[0] = channels;
  *derived = result;
  return kSuccess;
}

int cudnnBatchNormalizationForwardTraining(
    Handle* handle, int mode, const void* alpha, const void* beta,
    const TensorDescriptor* x_descriptor, const void* x, const TensorDescriptor* y_descriptor,
    void* y, const TensorDescriptor* /*parameters*/, const void* scale, const void* bias,
    double average_factor, void* running_mean, void* running_variance, double epsilon,
    void* saved_mean, void* saved_inverse_deviation) {
  const int status = check_batch_norm(mode, x_descriptor, y_descriptor);
  if (status != kSuccess) return status;
  const Layout layout = layout_of(*x_descriptor);
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnBatchNormalizationForwardTraining", [&](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    enqueue(handle->stream, "cudnnBatchNormalizationForwardTraining", [=] {
      const T* input = bytes(static_cast<const T*>(x));
      T* output = bytes(static_cast<T*>(y));
      const double count = double(layout.sizes[0] * layout.num_places());
      const auto average = [=](void* running, long channel, double value) {
        if (running != nullptr)
          blend(bytes(static_cast<Sum*>(running))[channel], average_factor, Sum(value),
                1 - average_factor);
      };
      const auto save = [](void* saved, long channel, double value) {
        if (saved != nullptr) bytes(static_cast<Sum*>(saved))[channel] = Sum(value);
      };
      for (long channel = 0; channel < layout.sizes[1]; channel++) {
        const Moments moments = moments_of_channel(layout, channel, input);
        const double inverse_deviation = 1 / std::sqrt(moments.variance + epsilon);
        const double slope = bytes(static_cast<const Sum*>(scale))[channel] * inverse_deviation;
        const double shift = bytes(static_cast<const Sum*>(bias))[channel];
        layout.each_of_channel(channel, [&](long at) {
          blend(output[at], a, Sum((double(input[at]) - moments.mean) * slope + shift), b);
        });
        average(running_mean, channel, moments.mean);
        // cuDNN's running variance is that of the population which the batch is a sample of.
        average(running_variance, channel, moments.variance * count / std::max(1.0, count - 1));
        save(saved_mean, channel, moments.mean);
        save(saved_inverse_deviation, channel, inverse_deviation);
      }
    });
  });
  return kSuccess;
}

int cudnnBatchNormalizationForwardInference(
    Handle* handle, int mode, const void* alpha, const void* beta,
    const TensorDescriptor* x_descriptor, const void* x, const TensorDescriptor* y_descriptor,
    void* y, const TensorDescriptor* /*parameters*/, const void* scale, const void* bias,
    const void* mean, const void* variance, double epsilon) {
  const int status = check_batch_norm(mode, x_descriptor, y_descriptor);
  if (status != kSuccess) return status;
  const Layout layout = layout_of(*x_descriptor);
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  with_type(x_descriptor->type, "cudnnBatchNormalizationForwardInference", [&](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    enqueue(handle->stream, "cudnnBatchNormalizationForwardInference", [=] {
      const T* input = bytes(static_cast<const T*>(x));
      T* output = bytes(static_cast<T*>(y));
      for (long channel = 0; channel < layout.sizes[1]; channel++) {
        const auto read = [channel](const void* parameter) -> double {
          return bytes(static_cast<const Sum*>(parameter))[channel];
        };
        const double slope = read(scale) / std::sqrt(read(variance) + epsilon);
        const double center = read(mean), shift = read(bias);
        layout.each_of_channel(channel, [&](long at) {
          blend(output[at], a, Sum((double(input[at]) - center) * slope + shift), b);
        });
      }
    });
  });
  return kSuccess;
}

int cudnnBatchNormalizationBackward(
    Handle* handle, int mode, const void* alpha_data, const void* beta_data,
    const void* alpha_parameters, const void* beta_parameters, const TensorDescriptor* x_descriptor,
    const void* x, const TensorDescriptor* dy_descriptor, const void* dy,
    const TensorDescriptor* dx_descriptor, void* dx, const TensorDescriptor* /*parameters*/,
    const void* scale, void* dscale, void* dbias, double epsilon, const void* saved_mean,
    const void* saved_inverse_deviation) {
  int status = check_batch_norm(mode, x_descriptor, dy_descriptor);
  if (status == kSuccess) status = check_batch_norm(mode, x_descriptor, dx_descriptor);
  if (status != kSuccess) return status;
  const Layout layout = layout_of(*x_descriptor);
  const int type = x_descriptor->type;
  const double a = factor(type, alpha_data), b = factor(type, beta_data);
  const double a_parameters = factor(type, alpha_parameters);
  const double b_parameters = factor(type, beta_parameters);
  with_type(type, "cudnnBatchNormalizationBackward", [&](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    enqueue(handle->stream, "cudnnBatchNormalizationBackward", [=] {
      const T* input = bytes(static_cast<const T*>(x));
      const T* gradient = bytes(static_cast<const T*>(dy));
      T* result = bytes(static_cast<T*>(dx));
      const double count = double(layout.sizes[0] * layout.num_places());
      for (long channel = 0; channel < layout.sizes[1]; channel++) {
        double mean, inverse_deviation;
        if (saved_mean != nullptr && saved_inverse_deviation != nullptr) {
          mean = bytes(static_cast<const Sum*>(saved_mean))[channel];
          inverse_deviation = bytes(static_cast<const Sum*>(saved_inverse_deviation))[channel];
        } else {
          const Moments moments = moments_of_channel(layout, channel, input);
          mean = moments.mean;
          inverse_deviation = 1 / std::sqrt(moments.variance + epsilon);
        }
        double sum = 0, weighted_sum = 0;
        layout.each_of_channel(channel, [&](long at) {
          sum += double(gradient[at]);
          weighted_sum += double(gradient[at]) * (double(input[at]) - mean) * inverse_deviation;
        });
        const double slope = bytes(static_cast<const Sum*>(scale))[channel] * inverse_deviation;
        layout.each_of_channel(channel, [&](long at) {
          const double normalized = (double(input[at]) - mean) * inverse_deviation;
          const double centered = double(gradient[at]) - (sum + normalized * weighted_sum) / count;
          blend(result[at], a, Sum(slope * centered), b);
        });
        blend(bytes(static_cast<Sum*>(dscale))[channel], a_parameters, Sum(weighted_sum),
              b_parameters);
        blend(bytes(static_cast<Sum*>(dbias))[channel], a_parameters, Sum(sum), b_parameters);
      }
    });
  });
  return kSuccess;
}

// ---- Dropout. Its reserve space holds one bit per element, as MXNet counts on: whether the element
// was kept.

int cudnnDropoutGetStatesSize(Handle*, size_t* num_bytes) {
  *num_bytes = sizeof(DropoutStates);
  return kSuccess;
}

int cudnnDropoutGetReserveSpaceSize(const TensorDescriptor* x, size_t* num_bytes) {
  *num_bytes = (num_dense_elements("cudnnDropoutGetReserveSpaceSize", *x) + 7) / 8;
  return kSuccess;
}

// Keep the states that are there: a descriptor that shares them goes on in their sequence.
int cudnnRestoreDropoutDescriptor(DropoutDescriptor* dropout, Handle*, float probability,
                                  void* states, size_t state_bytes, unsigned long long /*seed*/) {
  if (states != nullptr && state_bytes < sizeof(DropoutStates)) return kBadParam;
  *dropout = {probability, states};
  return kSuccess;
}

int cudnnSetDropoutDescriptor(DropoutDescriptor* dropout, Handle* handle, float probability,
                              void* states, size_t state_bytes, unsigned long long seed) {
  const int status =
      cudnnRestoreDropoutDescriptor(dropout, handle, probability, states, state_bytes, seed);
  if (status == kSuccess && states != nullptr) {
    enqueue(handle->stream, "cudnnSetDropoutDescriptor",
            [=] { *bytes(static_cast<DropoutStates*>(states)) = {seed, 0}; });
  }
  return status;
}

int cudnnDropoutForward(Handle* handle, const DropoutDescriptor* dropout,
                        const TensorDescriptor* x_descriptor, const void* x,
                        const TensorDescriptor* y_descriptor, void* y, void* reserve,
                        size_t reserve_bytes) {
  const long count = num_dense_elements("cudnnDropoutForward", *x_descriptor);
  if (!same_layout(*x_descriptor, *y_descriptor) || reserve_bytes * 8 < size_t(count))
    return kBadParam;
  const DropoutDescriptor copy = *dropout;
  with_type(x_descriptor->type, "cudnnDropoutForward", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnDropoutForward", [=] {
      DropoutStates& states = *bytes(static_cast<DropoutStates*>(copy.states));
      const T* input = bytes(static_cast<const T*>(x));
      T* output = bytes(static_cast<T*>(y));
      uint8_t* kept = bytes(static_cast<uint8_t*>(reserve));
      const SumOf<T> scale = 1 / (1 - copy.probability);
      for (long i = 0; i < count; i++) {
        const uint64_t number = cuda_sim::random_bits(states.seed, states.position + i);
        const bool keep = cuda_sim::uniform<float>(number) > copy.probability;
        if (i % 8 == 0) kept[i / 8] = 0;
        kept[i / 8] |= keep << i % 8;
        output[i] = keep ? static_cast<T>(scale * SumOf<T>(input[i])) : T(0);
      }
      states.position += count;
    });
  });
  return kSuccess;
}

int cudnnDropoutBackward(Handle* handle, const DropoutDescriptor* dropout,
                         const TensorDescriptor* dy_descriptor, const void* dy,
                         const TensorDescriptor* dx_descriptor, void* dx, const void* reserve,
                         size_t reserve_bytes) {
  const long count = num_dense_elements("cudnnDropoutBackward", *dy_descriptor);
  if (!same_layout(*dy_descriptor, *dx_descriptor) || reserve_bytes * 8 < size_t(count))
    return kBadParam;
  const float probability = dropout->probability;
  with_type(dy_descriptor->type, "cudnnDropoutBackward", [&](auto zero) {
    using T = decltype(zero);
    enqueue(handle->stream, "cudnnDropoutBackward", [=] {
      const T* gradient = bytes(static_cast<const T*>(dy));
      const uint8_t* kept = bytes(static_cast<const uint8_t*>(reserve));
      T* result = bytes(static_cast<T*>(dx));
      const SumOf<T> scale = 1 / (1 - probability);
      for (long i = 0; i < count; i++) {
        const bool keep = kept[i / 8] >> i % 8 & 1;
        result[i] = keep ? static_cast<T>(scale * SumOf<T>(gradient[i])) : T(0);
      }
    });
  });
  return kSuccess;
}

}  // extern "C"
