// Matrix products for cublas.cpp and cudnn.cpp, on addresses that can be read and written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

namespace cuda_sim {

using Half = _Float16;

// The elements of a matrix, by the distance of its rows and of its columns: a transposed matrix is
// the same elements with the two distances exchanged.
template <typename T>
struct Matrix {
  T* data;
  std::ptrdiff_t row_step, column_step;

  T& operator()(std::ptrdiff_t row, std::ptrdiff_t column) const {
    return data[row * row_step + column * column_step];
  }
  Matrix transposed() const { return {data, column_step, row_step}; }
};

namespace gemm_detail {

// A tile of the product is kRows rows of two vectors each, which fit the 16 registers that
// every x86-64 processor has.
constexpr int kRows = 4;
constexpr int kVectorBytes = 16;
template <typename Sum>
constexpr int kLanes = 2 * kVectorBytes / sizeof(Sum);

typedef float FloatVector __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef double DoubleVector __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
typedef int32_t IntVector __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

template <typename Vector, typename Sum>
void multiply(int depth, const Sum* left, const Sum* right, Sum* tile) {
  Vector sums[kRows][2] = {};
  for (int k = 0; k < depth; k++, left += kRows, right += kLanes<Sum>) {
    const Vector* elements = reinterpret_cast<const Vector*>(right);
    const Vector low = elements[0], high = elements[1];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; row++) {
      sums[row][0] += left[row] * low;
      sums[row][1] += left[row] * high;
    }
  }
  Vector* result = reinterpret_cast<Vector*>(tile);
#pragma GCC unroll 4
  for (int row = 0; row < kRows; row++) {
    result[2 * row] = sums[row][0];
    result[2 * row + 1] = sums[row][1];
  }
}

inline void multiply_tile(int depth, const float* left, const float* right, float* tile) {
  multiply<FloatVector>(depth, left, right, tile);
}

inline void multiply_tile(int depth, const double* left, const double* right, double* tile) {
  multiply<DoubleVector>(depth, left, right, tile);
}

inline void multiply_tile(int depth, const int32_t* left, const int32_t* right, int32_t* tile) {
  multiply<IntVector>(depth, left, right, tile);
}

// CUDA_SIM_TF32=1, unless NVIDIA_TF32_OVERRIDE=0 was set when the library was loaded.
inline const bool kRoundsToTf32 = [] {
  const char *tf32 = getenv("CUDA_SIM_TF32"), *allowed = getenv("NVIDIA_TF32_OVERRIDE");
  return tf32 && atoi(tf32) && !(allowed && strcmp(allowed, "0") == 0);
}();

// A factor in the type that it is summed in. TF32 has ten bits after the leading one.
template <typename Sum, typename T>
Sum rounded_factor(T value) {
  if constexpr (std::is_same_v<std::remove_cv_t<T>, float>) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + (1 << 12)) & ~((1u << 13) - 1);
    if (kRoundsToTf32 && std::isfinite(value)) memcpy(&value, &bits, sizeof bits);
  }
  return static_cast<Sum>(value);
}

// Copy rows [begin, begin + width) of a matrix, column after column and padded with zeros, so that
// a tile reads consecutive numbers of the type that it sums in.
template <int width, typename Sum, typename T>
void pack(Matrix<const T> matrix, int begin, int num_rows, int num_columns, Sum* packed) {
  const int filled = std::min(width, num_rows - begin);
  for (int column = 0; column < num_columns; column++, packed += width) {
    for (int i = 0; i < filled; i++) packed[i] = rounded_factor<Sum>(matrix(begin + i, column));
    for (int i = filled; i < width; i++) packed[i] = Sum(0);
  }
}

}  // namespace gemm_detail

// result = alpha * left @ right + beta * result, with sums of type Sum. What `result` held is not
// read if beta is 0, so that NaN in fresh memory has no effect.
template <typename Sum, typename Scale, typename In, typename Out>
void gemm(int rows, int columns, int depth, Scale alpha, Matrix<const In> left,
          Matrix<const In> right, Scale beta, Matrix<Out> result) {
  using namespace gemm_detail;
  constexpr int lanes = kLanes<Sum>;
  // As many columns at a time as leave the packed right matrix in the second-level cache.
  constexpr int cached_elements = 1 << 16;
  const int tiles_at_a_time = std::max(1, cached_elements / std::max(1, depth) / lanes);
  const int block = std::min((columns + lanes - 1) / lanes, tiles_at_a_time) * lanes;
  std::vector<Sum> packed_right(static_cast<size_t>(block) * depth);
  std::vector<Sum> packed_left(static_cast<size_t>(kRows) * depth);
  Sum tile[kRows * lanes];
  for (int first = 0; first < columns; first += block) {
    const int last = std::min(columns, first + block);
    for (int column = first; column < last; column += lanes) {
      pack<lanes>(right.transposed(), column, columns, depth,
                  packed_right.data() + static_cast<size_t>(column - first) * depth);
    }
    for (int row = 0; row < rows; row += kRows) {
      pack<kRows>(left, row, rows, depth, packed_left.data());
      for (int column = first; column < last; column += lanes) {
        multiply_tile(depth, packed_left.data(),
                      packed_right.data() + static_cast<size_t>(column - first) * depth, tile);
        const int height = std::min(kRows, rows - row), width = std::min(lanes, last - column);
        for (int i = 0; i < height; i++) {
          for (int j = 0; j < width; j++) {
            Out& element = result(row + i, column + j);
            const Scale product = alpha * static_cast<Scale>(tile[i * lanes + j]);
            element = static_cast<Out>(
                beta == Scale(0) ? product : product + beta * static_cast<Scale>(element));
          }
        }
      }
    }
  }
}

}  // namespace cuda_sim
