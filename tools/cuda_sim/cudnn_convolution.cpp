// Convolution of the simulated cuDNN: the inputs of each window become a column, and the rest is
// matrix products.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "cudnn_tensors.h"

using namespace cuda_sim;
using namespace cuda_sim::cudnn;

namespace {

enum ConvolutionMode { kConvolution = 0, kCrossCorrelation = 1 };

struct FilterDescriptor {
  int type = kFloat, format = kChannelsFirst, num_dimensions = 0;
  int sizes[kMaxDimensions] = {};
};

struct ConvolutionDescriptor {
  Windows windows;
  int mode = kCrossCorrelation, math_type = 0, num_groups = 1;
};

// cudnnConvolutionFwdAlgoPerf_t and its two siblings, which are alike.
struct AlgorithmPerformance {
  int algorithm, status;
  float milliseconds;
  size_t workspace_bytes;
  int determinism, math_type, reserved[3];
};

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
                              double beta, T* dw, bool any_order) {
  using Sum = SumOf<T>;
  std::vector<T> columns(c.num_rows() * c.num_columns());
  std::vector<Sum> sums(c.filter.num_elements());
  std::vector<long> images(c.input.sizes[0]);
  std::iota(images.begin(), images.end(), 0);
  if (any_order) std::shuffle(images.begin(), images.end(), std::random_device());
  for (long image : images)
    for (long group = 0; group < c.num_groups; group++) {
      c.gather(c.group_of_input(x, image, group), columns.data());
      gemm<Sum>(c.outputs_per_group(), c.num_rows(), c.num_columns(), Sum(1),
                c.group_of_output(dy, image, group),
                Matrix<const T>{columns.data(), 1, c.num_columns()}, Sum(1),
                c.group_of_filter(sums.data(), group));
    }
  for (size_t i = 0; i < sums.size(); i++) blend(dw[i], alpha, sums[i], beta);
}

// ---- Choosing algorithms. Algorithm 1 is deterministic. With CUDA_SIM_ATOMICS=1 algorithm 0, which
// as cuDNN's is not for gradients, seems to be faster.

constexpr size_t kWorkspaceBytes = 1024;
enum Algorithm { kWithAtomics = 0, kDeterministic = 1 };

int algorithms(int num_wanted, int* num_found, AlgorithmPerformance* found) {
  static const char* atomics = getenv("CUDA_SIM_ATOMICS");
  *num_found = 0;
  for (int algorithm : {kWithAtomics, kDeterministic}) {
    if (algorithm == kWithAtomics && !(atomics && atoi(atomics))) continue;
    if (*num_found == num_wanted) break;
    const int determinism = algorithm == kDeterministic;
    found[(*num_found)++] = {algorithm, kSuccess, 1.0f, kWorkspaceBytes, determinism, 0, {}};
  }
  return num_wanted < 1 ? kBadParam : kSuccess;
}

// Enqueue work(T(), convolution, alpha, beta), whatever its direction.
template <typename Work>
int enqueue_convolution(Handle* handle, const char* name, const TensorDescriptor* x,
                        const FilterDescriptor* w, const ConvolutionDescriptor* descriptor,
                        const TensorDescriptor* y, const void* alpha, const void* beta, Work work) {
  Convolution convolution;
  const int status = describe(x, w, descriptor, y, &convolution);
  if (status != kSuccess) return status;
  const double a = factor(x->type, alpha), b = factor(x->type, beta);
  enqueue_typed(handle, x->type, name, [=](auto zero) { work(zero, convolution, a, b); });
  return kSuccess;
}

}  // namespace

extern "C" {

CUDA_SIM_DESCRIPTOR(Filter)
CUDA_SIM_DESCRIPTOR(Convolution)

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
    *count = 2;                                                                                  \
    return kSuccess;                                                                             \
  }                                                                                              \
  int cudnnGetConvolution##DIRECTION##Algorithm_v7(const Handle*, const void*, const void*,      \
                                                   const void*, const void*, int wanted,         \
                                                   int* found, AlgorithmPerformance* results) {  \
    return algorithms(wanted, found, results);                                                   \
  }                                                                                              \
  int cudnnFindConvolution##DIRECTION##Algorithm(const Handle*, const void*, const void*,        \
                                                 const void*, const void*, int wanted,           \
                                                 int* found, AlgorithmPerformance* results) {    \
    count("cudnnFindConvolution" #DIRECTION "Algorithm");                              \
    return algorithms(wanted, found, results);                                                   \
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
  const auto work = [=](auto zero, const Convolution& convolution, double a, double b) {
    using T = decltype(zero);
    convolve_forward(convolution, a, typed<T>(x), typed<T>(w), b, typed<T>(y));
  };
  return enqueue_convolution(handle, "cudnnConvolutionForward", x_descriptor, w_descriptor,
                             descriptor, y_descriptor, alpha, beta, work);
}

int cudnnConvolutionBackwardData(Handle* handle, const void* alpha,
                                 const FilterDescriptor* w_descriptor, const void* w,
                                 const TensorDescriptor* y_descriptor, const void* dy,
                                 const ConvolutionDescriptor* descriptor, int /*algorithm*/,
                                 void* /*workspace*/, size_t /*workspace_bytes*/, const void* beta,
                                 const TensorDescriptor* x_descriptor, void* dx) {
  const auto work = [=](auto zero, const Convolution& convolution, double a, double b) {
    using T = decltype(zero);
    convolve_backward_data(convolution, a, typed<T>(w), typed<T>(dy), b, typed<T>(dx));
  };
  return enqueue_convolution(handle, "cudnnConvolutionBackwardData", x_descriptor, w_descriptor,
                             descriptor, y_descriptor, alpha, beta, work);
}

int cudnnConvolutionBackwardFilter(Handle* handle, const void* alpha,
                                   const TensorDescriptor* x_descriptor, const void* x,
                                   const TensorDescriptor* y_descriptor, const void* dy,
                                   const ConvolutionDescriptor* descriptor, int algorithm,
                                   void* /*workspace*/, size_t /*workspace_bytes*/,
                                   const void* beta, const FilterDescriptor* w_descriptor,
                                   void* dw) {
  const auto work = [=](auto zero, const Convolution& convolution, double a, double b) {
    using T = decltype(zero);
    convolve_backward_filter(convolution, a, typed<T>(x), typed<T>(dy), b, typed<T>(dw),
                             algorithm == kWithAtomics);
  };
  return enqueue_convolution(handle, "cudnnConvolutionBackwardFilter", x_descriptor, w_descriptor,
                             descriptor, y_descriptor, alpha, beta, work);
}

int cudnnConvolutionBackwardBias(Handle* handle, const void* alpha,
                                 const TensorDescriptor* y_descriptor, const void* dy,
                                 const void* beta, const TensorDescriptor* bias_descriptor,
                                 void* dbias) {
  const Layout output = layout_of(*y_descriptor), bias = layout_of(*bias_descriptor);
  if (bias.sizes[1] != output.sizes[1] || bias.num_elements() != bias.sizes[1]) return kBadParam;
  const double a = factor(y_descriptor->type, alpha), b = factor(y_descriptor->type, beta);
  enqueue_typed(handle, y_descriptor->type, "cudnnConvolutionBackwardBias", [=](auto zero) {
    using T = decltype(zero);
    const T* gradient = typed<T>(dy);
    T* result = typed<T>(dbias);
    for (long channel = 0; channel < output.sizes[1]; channel++) {
      double sum = 0;
      output.each_of_channel(channel, [&](long at) { sum += double(gradient[at]); });
      blend(result[channel * bias.strides[1]], a, SumOf<T>(sum), b);
    }
  });
  return kSuccess;
}

}  // extern "C"
