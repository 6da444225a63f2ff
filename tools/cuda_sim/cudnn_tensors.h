// What the files of the simulated cuDNN share: tensors of float16, float32 and float64 with up to
// three spatial dimensions, in any layout that strides can express.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm.h"
#include "sim.h"

namespace cuda_sim::cudnn {

enum Status { kSuccess = 0, kBadParam = 3, kNotSupported = 9 };
enum DataType { kFloat = 0, kDouble = 1, kHalf = 2 };
enum TensorFormat { kChannelsFirst = 0, kChannelsLast = 1 };
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

// Windows that move over depth, height and width. A dimension that is not there has one place.
struct Windows {
  int sizes[kSpatialDimensions] = {1, 1, 1};
  int padding[kSpatialDimensions] = {0, 0, 0};
  int strides[kSpatialDimensions] = {1, 1, 1};
  int dilations[kSpatialDimensions] = {1, 1, 1};
};

inline void set_spatial(int* values, int num_spatial, const int* given) {
  for (int i = 0; i < num_spatial; i++) values[kSpatialDimensions - num_spatial + i] = given[i];
}

// float16 is computed with in float32, and so are the parameters of its batch normalisation.
template <typename T>
using SumOf = std::conditional_t<std::is_same<T, double>::value, double, float>;

// Enqueue work that is function(T()) for the C++ type T of a cudnnDataType.
template <typename Function>
void enqueue_typed(Handle* handle, int type, const char* name, Function function) {
  const auto enqueue_for = [=](auto zero) {
    enqueue(handle->stream, name, [=] { function(zero); });
  };
  switch (type) {
    case kFloat:
      return enqueue_for(float());
    case kDouble:
      return enqueue_for(double());
    case kHalf:
      return enqueue_for(Half());
    default:
      stop("%s of data type %d is not simulated", name, type);
  }
}

// Device addresses as work reads and writes them.
template <typename T>
T* typed(void* address) {
  return static_cast<T*>(bytes(address));
}
template <typename T>
const T* typed(const void* address) {
  return static_cast<const T*>(bytes(address));
}

// alpha and beta are double for tensors of double, float for all others.
inline double factor(int type, const void* address) {
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

  long num_elements() const { return sizes[0] * sizes[1] * num_places(); }
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
inline int place_of_dimension(int dimension, int num_dimensions) {
  return dimension < 2 ? dimension : 5 - num_dimensions + dimension;
}

inline Layout layout_of(const TensorDescriptor& tensor) {
  Layout layout;
  if (tensor.num_dimensions > 5) stop("cuDNN tensors of more than 5 dimensions are not simulated");
  for (int i = 0; i < tensor.num_dimensions; i++) {
    const int place = place_of_dimension(i, tensor.num_dimensions);
    layout.sizes[place] = tensor.sizes[i];
    layout.strides[place] = tensor.strides[i];
  }
  return layout;
}

inline bool same_layout(const TensorDescriptor& a, const TensorDescriptor& b) {
  if (a.type != b.type || a.num_dimensions != b.num_dimensions) return false;
  for (int i = 0; i < a.num_dimensions; i++) {
    if (a.sizes[i] != b.sizes[i]) return false;
    if (a.sizes[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

// The number of elements of tensors that have one layout and no gaps; any order will do for what is
// computed element by element.
inline long num_dense_elements(const char* name, const TensorDescriptor& tensor) {
  long count = 1, last = 0;
  for (int i = 0; i < tensor.num_dimensions; i++) {
    count *= tensor.sizes[i];
    last += (tensor.sizes[i] - 1L) * tensor.strides[i];
  }
  if (count > 0 && last != count - 1) stop("%s of tensors with gaps is not simulated", name);
  return count;
}

// The two functions of each kind of descriptor.
#define CUDA_SIM_DESCRIPTOR(KIND)                                    \
  int cudnnCreate##KIND##Descriptor(KIND##Descriptor** descriptor) { \
    *descriptor = new KIND##Descriptor;                              \
    return kSuccess;                                                 \
  }                                                                  \
  int cudnnDestroy##KIND##Descriptor(KIND##Descriptor* descriptor) { \
    delete descriptor;                                               \
    return kSuccess;                                                 \
  }

}  // namespace cuda_sim::cudnn
