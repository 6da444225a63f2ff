// What nvrtc.cpp puts in front of a CUDA source, so that g++ compiles its kernels for the host.
#pragma once

#include <climits>
#include <cmath>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "sim.h"

// libmxnet's sources define it again.
#undef INT_MAX

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct double2 { double x, y; };
struct double4 { double x, y, z, w; };

static thread_local cuda_sim::Dim3 threadIdx, blockIdx, blockDim, gridDim;

// A load through the texture cache.
template <typename Value>
Value __ldg(const Value* address) {
  return *address;
}

// Newton's method from Winitzki's approximation.
inline double erfinv(double y) {
  if (!(y > -1 && y < 1)) return y == 1 || y == -1 ? y * HUGE_VAL : NAN;
  double logarithm = std::log(1 - y * y), half = 2 / (M_PI * 0.147) + logarithm / 2;
  double x = std::copysign(std::sqrt(std::sqrt(half * half - logarithm / 0.147) - half), y);
  for (int i = 0; i < 4; i++) x -= (std::erf(x) - y) * std::sqrt(M_PI) / 2 * std::exp(x * x);
  return x;
}
inline float erfinvf(float y) { return erfinv(double(y)); }

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rcbrtf(float x) { return 1 / cbrtf(x); }
inline double rcbrt(double x) { return 1 / cbrt(x); }

// Float16 is 16 bits in a struct of the source.
template <typename Bits>
void cuda_sim_to_half(Bits& bits, float value) {
  _Float16 half = value;
  memcpy(&bits, &half, 2);
}

template <typename Bits>
void cuda_sim_to_float(float& value, const Bits& bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  value = half;
}

namespace cuda_sim {

// A copy of a kernel's argument, with the addresses of device memory in it replaced by those where
// the bytes are; in a struct, each aligned word that looks like such an address is one.
template <typename Argument>
Argument taken(const void* from) {
  Argument result;
  memcpy(static_cast<void*>(&result), from, sizeof result);
  auto* start = reinterpret_cast<char*>(&result);
  for (size_t at = 0; at + sizeof(void*) <= sizeof result; at += sizeof(void*)) {
    void* address;
    memcpy(&address, start + at, sizeof address);
    address = accessible(address);
    memcpy(start + at, &address, sizeof address);
  }
  return result;
}

template <typename... Arguments, size_t... Index>
Work work_of(void (*kernel)(Arguments...), void** from, const Launch& launch,
             std::index_sequence<Index...>) {
  std::tuple<std::decay_t<Arguments>...> arguments(taken<std::decay_t<Arguments>>(from[Index])...);
  return [=] {
    gridDim = launch.grid;
    blockDim = launch.block;
    Dim3 &block = blockIdx, &thread = threadIdx;
    for (block.z = 0; block.z < gridDim.z; block.z++)
    for (block.y = 0; block.y < gridDim.y; block.y++)
    for (block.x = 0; block.x < gridDim.x; block.x++)
    for (thread.z = 0; thread.z < blockDim.z; thread.z++)
    for (thread.y = 0; thread.y < blockDim.y; thread.y++)
    for (thread.x = 0; thread.x < blockDim.x; thread.x++) std::apply(kernel, arguments);
  };
}

template <typename... Arguments>
Work work_of(void (*kernel)(Arguments...), void** from, const Launch& launch) {
  return work_of(kernel, from, launch, std::index_sequence_for<Arguments...>());
}

}  // namespace cuda_sim

#define CUDA_SIM_EXPORT(name, kernel)                                                        \
  extern "C" __attribute__((visibility("default"))) cuda_sim::Work cuda_sim_launch_##name(   \
      void** arguments, const cuda_sim::Launch& launch) {                                    \
    return cuda_sim::work_of(&kernel, arguments, launch);                                    \
  }
