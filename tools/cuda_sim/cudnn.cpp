// libcudnn.so.8, simulated: the functions that MXNet calls, but for its recurrent layers and the
// spatial transformer. Convolution, pooling and batch normalisation have files of their own.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cudnn_tensors.h"
#include "random_bits.h"

using namespace cuda_sim;
using namespace cuda_sim::cudnn;

namespace {

enum Activation { kSigmoid, kRelu, kTanh, kClippedRelu, kElu, kIdentity };
enum SoftmaxAlgorithm { kSoftmaxFast = 0, kSoftmaxAccurate = 1, kSoftmaxLog = 2 };
enum SoftmaxMode { kOverInstance = 0, kOverChannels = 1 };

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

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return 8906; }

const char* cudnnGetErrorString(int status) {
  static const char* const names[] = {
      "CUDNN_STATUS_SUCCESS",
      "CUDNN_STATUS_NOT_INITIALIZED",
      "CUDNN_STATUS_ALLOC_FAILED",
      "CUDNN_STATUS_BAD_PARAM",
      "CUDNN_STATUS_INTERNAL_ERROR",
      "CUDNN_STATUS_INVALID_VALUE",
      "CUDNN_STATUS_ARCH_MISMATCH",
      "CUDNN_STATUS_MAPPING_ERROR",
      "CUDNN_STATUS_EXECUTION_FAILED",
      "CUDNN_STATUS_NOT_SUPPORTED",
      "CUDNN_STATUS_LICENSE_ERROR",
      "CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING",
      "CUDNN_STATUS_RUNTIME_IN_PROGRESS",
      "CUDNN_STATUS_RUNTIME_FP_OVERFLOW",
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

CUDA_SIM_DESCRIPTOR(Tensor)
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
  enqueue_typed(handle, c_descriptor->type, "cudnnAddTensor", [=](auto zero) {
    using T = decltype(zero);
    const T* source = typed<T>(a);
    T* result = typed<T>(c);
    for (long image = 0; image < to.sizes[0]; image++)
      for (long channel = 0; channel < to.sizes[1]; channel++)
        for (long depth = 0; depth < to.sizes[2]; depth++)
          for (long height = 0; height < to.sizes[3]; height++)
            for (long width = 0; width < to.sizes[4]; width++)
              blend(result[to.offset(image, channel, depth, height, width)], scale,
                    SumOf<T>(source[from.offset(image, channel, depth, height, width)]), kept);
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
  enqueue_typed(handle, x_descriptor->type, "cudnnActivationForward", [=](auto zero) {
    using T = decltype(zero);
    const T* input = typed<T>(x);
    T* output = typed<T>(y);
    for (long i = 0; i < count; i++)
      blend(output[i], a, activate(copy, SumOf<T>(input[i])), b);
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
  enqueue_typed(handle, x_descriptor->type, "cudnnActivationBackward", [=](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    const T *input = typed<T>(x), *output = typed<T>(y);
    const T* gradient = typed<T>(dy);
    T* result = typed<T>(dx);
    for (long i = 0; i < count; i++)
      blend(result[i], a,
            activation_gradient(copy, Sum(input[i]), Sum(output[i]), Sum(gradient[i])), b);
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
  enqueue_typed(handle, x_descriptor->type, "cudnnSoftmaxForward", [=](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    const T* input = typed<T>(x);
    T* output = typed<T>(y);
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
  enqueue_typed(handle, y_descriptor->type, "cudnnSoftmaxBackward", [=](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    const T *output = typed<T>(y);
    const T *gradient = typed<T>(dy);
    T* result = typed<T>(dx);
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
  return kSuccess;
}

// ---- Dropout. Its reserve space has one bit per element, as MXNet counts on: whether it was kept.

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
            [=] { *typed<DropoutStates>(states) = {seed, 0}; });
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
  enqueue_typed(handle, x_descriptor->type, "cudnnDropoutForward", [=](auto zero) {
    using T = decltype(zero);
    DropoutStates& states = *bytes(static_cast<DropoutStates*>(copy.states));
    const T* input = typed<T>(x);
    T* output = typed<T>(y);
    uint8_t* kept = typed<uint8_t>(reserve);
    const SumOf<T> scale = 1 / (1 - copy.probability);
    for (long i = 0; i < count; i++) {
      const uint64_t number = random_bits(states.seed, states.position + i);
      const bool keep = uniform<float>(number) > copy.probability;
      if (i % 8 == 0) kept[i / 8] = 0;
      kept[i / 8] |= keep << i % 8;
      output[i] = keep ? static_cast<T>(scale * SumOf<T>(input[i])) : T(0);
    }
    states.position += count;
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
  enqueue_typed(handle, dy_descriptor->type, "cudnnDropoutBackward", [=](auto zero) {
    using T = decltype(zero);
    const T* gradient = typed<T>(dy);
    const uint8_t* kept = typed<uint8_t>(reserve);
    T* result = typed<T>(dx);
    const SumOf<T> scale = 1 / (1 - probability);
    for (long i = 0; i < count; i++) {
      const bool keep = kept[i / 8] >> i % 8 & 1;
      result[i] = keep ? static_cast<T>(scale * SumOf<T>(gradient[i])) : T(0);
    }
  });
  return kSuccess;
}

}  // extern "C"
