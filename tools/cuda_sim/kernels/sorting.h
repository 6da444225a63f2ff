// Sorting, prefix sums and histograms, for which MXNet uses the library CUB.
//
// The names are CUB's. Its algorithms need several kernels; here one of them does all the work, and
// the others none.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "device.h"

struct __half {
  uint16_t bits;
};

namespace cub {

struct NullType {};
struct Sum {};
struct Equality {};
template <typename Offset>
struct GridEvenShare {
  Offset unused[9];
};
template <typename Offset>
struct GridQueue {
  Offset* counters;
};
template <typename T, int size>
struct ArrayWrapper {
  T array[size];
};
template <typename T, bool>
struct ScanTileState {
  void* descriptors;
};

// Parameters of CUB's tuning, of which nothing depends here.
enum BlockLoadAlgorithm {};
enum BlockStoreAlgorithm {};
enum BlockScanAlgorithm {};
enum CacheLoadModifier {};
template <int, int, typename>
struct MemBoundScaling {};
template <int, int, typename, BlockLoadAlgorithm, CacheLoadModifier, BlockStoreAlgorithm,
          BlockScanAlgorithm, typename>
struct AgentScanPolicy {};
template <typename Key, typename Value, typename Offset>
struct DeviceRadixSortPolicy {
  struct Policy700 {};
};

// ---- Radix sort. The bits of a key, as an unsigned number that sorts as the key does.
template <typename Key>
uint64_t sortable_bits(Key key) {
  uint64_t bits = 0;
  std::memcpy(&bits, &key, sizeof key);
  const uint64_t sign = uint64_t(1) << (8 * sizeof key - 1);
  const bool real = std::is_floating_point<Key>::value || std::is_same<Key, __half>::value;
  if (real) return bits & sign ? ~bits & (sign | (sign - 1)) : bits | sign;
  return std::is_signed<Key>::value ? bits ^ sign : bits;
}

// Sorts by `num_bits` bits of the keys from `first_bit` on; equal ones keep their order.
template <bool descending, typename Key, typename Value>
void sort_by_bits(const Key* keys, Key* sorted_keys, const Value* values, Value* sorted_values,
                  int size, int first_bit, int num_bits) {
  const uint64_t mask = num_bits >= 64 ? ~uint64_t(0) : (uint64_t(1) << num_bits) - 1;
  auto digit = [&](int i) {
    const uint64_t value = sortable_bits(keys[i]) >> first_bit & mask;
    return descending ? mask - value : value;
  };
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return digit(i) < digit(j); });
  const std::vector<Key> old_keys(keys, keys + size);
  for (int i = 0; i < size; i++) sorted_keys[i] = old_keys[order[i]];
  if constexpr (!std::is_same<Value, NullType>::value) {
    const std::vector<Value> old_values(values, values + size);
    for (int i = 0; i < size; i++) sorted_values[i] = old_values[order[i]];
  }
}

template <typename Policy, bool descending, typename Key, typename Value, typename Offset>
void DeviceRadixSortSingleTileKernel(const Key* keys, Key* sorted_keys, const Value* values,
                                     Value* sorted_values, Offset size, int first_bit,
                                     int end_bit) {
  sort_by_bits<descending>(keys, sorted_keys, values, sorted_values, size, first_bit,
                           end_bit - first_bit);
}

template <typename Policy, bool, bool descending, typename Key, typename Offset>
void DeviceRadixSortUpsweepKernel(const Key*, Offset*, Offset, int, int, GridEvenShare<Offset>) {}

template <typename Policy, typename Offset>
void RadixSortScanBinsKernel(Offset*, int) {}

template <typename Policy, bool, bool descending, typename Key, typename Value, typename Offset>
void DeviceRadixSortDownsweepKernel(const Key* keys, Key* sorted_keys, const Value* values,
                                    Value* sorted_values, Offset*, Offset size, int first_bit,
                                    int num_bits, GridEvenShare<Offset>) {
  sort_by_bits<descending>(keys, sorted_keys, values, sorted_values, size, first_bit, num_bits);
}

// ---- Prefix sums: with an initial value the sum before each element, without it up to it.
template <typename State>
void DeviceScanInitKernel(State, int) {}

template <typename Policy, typename In, typename Out, typename State, typename Operator,
          typename Initial, typename Offset>
void DeviceScanKernel(In in, Out out, State, int first_tile, Operator, Initial initial,
                      Offset size) {
  if (first_tile > 0) return;  // the first launch did it
  if constexpr (std::is_same<Initial, NullType>::value) {
    std::partial_sum(in, in + size, out);
  } else {
    auto total = initial;
    for (Offset i = 0; i < size; i++) {
      const auto value = in[i];
      out[i] = total;
      total += value;
    }
  }
}

// ---- Selection: the first of each run of equal elements, and how many there are.
template <typename In, typename Flags, typename Out, typename Count, typename Select,
          typename Equal, typename Offset, bool>
struct DispatchSelectIf {
  struct PtxSelectIfPolicyT {};
};

template <typename State, typename Count>
void DeviceCompactInitKernel(State, int, Count) {}

template <typename Policy, typename In, typename Flags, typename Out, typename Count,
          typename State, typename Select, typename Equal, typename Offset, bool>
void DeviceSelectSweepKernel(In in, Flags, Out out, Count count, State, Select, Equal,
                             Offset size, int) {
  static_assert(std::is_same<Select, NullType>::value, "only runs are selected");
  *count = std::unique_copy(in, in + size, out) - out;
}

// ---- Histograms with bins of one size. "Dipatch" is CUB's own spelling.
template <int, int, typename Samples, typename Counter, typename Level, typename Offset>
struct DipatchHistogram {
  struct PtxHistogramSweepPolicy {};
  struct PassThruTransform {};
  // The order of the members was found by printing what a launch passes.
  struct ScaleTransform {
    Level max;
    Level num_levels;
    Level min;
    Level scale;
  };
};

template <int num_channels, typename Counter, typename Offset>
void DeviceHistogramInitKernel(ArrayWrapper<int, num_channels> num_bins,
                               ArrayWrapper<Counter*, num_channels> bins, GridQueue<int>) {
  for (int channel = 0; channel < num_channels; channel++) {
    Counter* first = bins.array[channel];
    std::fill(first, first + num_bins.array[channel], Counter(0));
  }
}

template <typename Policy, int, int, int, typename Samples, typename Counter, typename Scale,
          typename PassThrough, typename Offset>
void DeviceHistogramSweepKernel(Samples samples, ArrayWrapper<int, 1> num_bins,
                                ArrayWrapper<int, 1>, ArrayWrapper<Counter*, 1> bins,
                                ArrayWrapper<Counter*, 1>, ArrayWrapper<PassThrough, 1>,
                                ArrayWrapper<Scale, 1> scales, Offset row_size, Offset num_rows,
                                Offset row_stride, int, GridQueue<int>) {
  const Scale scale = scales.array[0];
  for (Offset row = 0; row < num_rows; row++) {
    for (Offset i = 0; i < row_size; i++) {
      const auto sample = samples[row * row_stride + i];
      if (sample < scale.min || sample >= scale.max) continue;
      const int bin = static_cast<int>((sample - scale.min) / scale.scale);
      if (bin < num_bins.array[0]) bins.array[0][bin]++;
    }
  }
}
}  // namespace cub
