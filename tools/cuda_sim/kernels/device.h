// How an emulated kernel becomes something that the simulator can launch.
//
// An emulated kernel is a function `void kernel(arguments...)` that does the work of the whole
// grid.
// One that depends on its grid takes a `const cuda_sim::Launch&` first.
#pragma once

// The wheel of MXNet was built with 32-bit sizes; with other values its structs have other layouts.
#define MSHADOW_INT64_TENSOR_SIZE 0
#define MSHADOW_USE_CUDA 0
#define MSHADOW_USE_MKL 0
#define MSHADOW_USE_CBLAS 0
#define MSHADOW_STAND_ALONE 1
#define MXNET_USE_CUDA 0
#define MXNET_USE_MKLDNN 0

#include <mshadow/tensor.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../sim.h"

namespace cuda_sim {

// The argument at `address`, with every device address inside it replaced by one that can be read.
// Pointers are 8-byte words of a struct, so each such word is looked at. Padding is cleared before:
// half an old address in it would make an address of the integer beside it. (memory.cpp says why
// that does no harm in members that are not written.)
template <typename T>
T translated(const void* address) {
  T value = *static_cast<const T*>(address);
  __builtin_clear_padding(&value);
  char* start = reinterpret_cast<char*>(&value);
  for (size_t offset = 0; offset + sizeof(void*) <= sizeof(T); offset += sizeof(void*)) {
    void* word;
    std::memcpy(&word, start + offset, sizeof word);
    if (on_device(word)) {
      word = bytes(word);
      std::memcpy(start + offset, &word, sizeof word);
    }
  }
  return value;
}

template <typename... Arguments, size_t... index>
auto translated_all(void** arguments, std::index_sequence<index...>) {
  return std::make_shared<std::tuple<std::decay_t<Arguments>...>>(
      translated<std::decay_t<Arguments>>(arguments[index])...);
}

template <typename Function>
struct Emulation;

template <typename... Arguments>
struct Emulation<void (*)(Arguments...)> {
  template <void (*kernel)(Arguments...)>
  static Work work(void** arguments, const Launch&) {
    auto copies =
        translated_all<Arguments...>(arguments, std::index_sequence_for<Arguments...>());
    return [copies] { std::apply(kernel, *copies); };
  }
};

template <typename... Arguments>
struct Emulation<void (*)(const Launch&, Arguments...)> {
  template <void (*kernel)(const Launch&, Arguments...)>
  static Work work(void** arguments, const Launch& launch) {
    auto copies =
        translated_all<Arguments...>(arguments, std::index_sequence_for<Arguments...>());
    return [copies, launch] {
      std::apply([&](auto&... values) { kernel(launch, values...); }, *copies);
    };
  }
};

// The kernel, if it has the parameters that MXNet passes: a missing one is a compile error.
template <typename... Arguments>
struct Parameters {};

template <typename... Arguments>
constexpr auto checked(Parameters<Arguments...>, void (*kernel)(Arguments...)) {
  return kernel;
}
template <typename... Arguments>
constexpr auto checked(Parameters<Arguments...>, void (*kernel)(const Launch&, Arguments...)) {
  return kernel;
}

// Static objects of this type register a kernel when the library that holds them is loaded.
template <auto kernel>
struct Registration {
  explicit Registration(const char* mangled_name) {
    register_kernel(mangled_name, &Emulation<decltype(kernel)>::template work<kernel>);
  }
};

}  // namespace cuda_sim

namespace mxnet {

using mshadow::index_t;
using mshadow::Shape;

enum OpReqType { kNullOp, kWriteTo, kWriteInplace, kAddTo };

namespace common {
template <typename T, int size>
struct StaticArray {
  T array_[size];
  T& operator[](int i) { return array_[i]; }
  const T& operator[](int i) const { return array_[i]; }
};
}  // namespace common

namespace op {
using mshadow::cpu;
using mshadow::gpu;
using mshadow::half::half_t;
using mshadow::half::half2_t;

// What an operator does with its result: overwrite, add, or nothing.
template <typename Out, typename Value>
inline void assign(Out& out, int req, Value value) {
  if (req == kAddTo) {
    out += Out(value);
  } else if (req != kNullOp) {
    out = Out(value);
  }
}

// Multi-dimensional indices. A dimension of size 1 is broadcast: its coordinate counts as 0.
template <int ndim>
Shape<ndim> unravel(index_t index, const Shape<ndim>& shape) {
  Shape<ndim> coordinate;
  for (int axis = ndim - 1; axis >= 0; axis--) {
    coordinate[axis] = index % shape[axis];
    index /= shape[axis];
  }
  return coordinate;
}

template <int ndim>
index_t ravel(const Shape<ndim>& coordinate, const Shape<ndim>& shape) {
  index_t index = 0;
  for (int axis = 0; axis < ndim; axis++) {
    index = index * shape[axis] + (shape[axis] > 1 ? coordinate[axis] : 0);
  }
  return index;
}

template <int ndim>
index_t dot(const Shape<ndim>& coordinate, const Shape<ndim>& stride) {
  index_t sum = 0;
  for (int axis = 0; axis < ndim; axis++) sum += coordinate[axis] * stride[axis];
  return sum;
}

// Place in a smaller array, whose reduced dimensions have size 1, of element `index` of a larger.
template <typename Dimensions>
index_t broadcast_index(index_t index, const Dimensions& shape, const Dimensions& small, int ndim) {
  index_t place = 0, stride = 1;
  for (int axis = ndim - 1; axis >= 0; axis--) {
    if (small[axis] != 1) place += index % shape[axis] * stride;
    index /= shape[axis];
    stride *= small[axis];
  }
  return place;
}

// ---- The loop that most operators use: OP::Map for each element.
namespace mxnet_op {
template <typename OP, typename... Arguments>
void mxnet_generic_kernel(int size, Arguments... arguments) {
  for (int i = 0; i < size; i++) OP::Map(i, arguments...);
}

// The same for operators whose Map handles several elements: here always one.
template <typename OP, typename... Arguments>
void mxnet_generic_kernel_ex(int size, Arguments... arguments) {
  for (int i = 0; i < size; i++) OP::Map(i, 1, arguments...);
}
}  // namespace mxnet_op
}  // namespace op
}  // namespace mxnet
