// Row-sparse arrays: an array of the rows that are not zero, and their numbers. CSR arrays: an
// array of all values that are not zero, their columns, and where each row starts.
#pragma once

#include "device.h"

namespace mxnet {
namespace op {

// Marks the rows that are not zero. MXNet has one thread, warp or block per row; here the thread
// with a row's number does it.
struct MarkRspRowThreadKernel {
  template <typename T>
  static void Map(int thread, int64_t* marks, const T* dense, const int64_t num_rows,
                  const int64_t row_size) {
    if (thread >= num_rows) return;
    const T* row = dense + thread * row_size;
    marks[thread] = std::any_of(row, row + row_size, [](T value) { return value != T(0); });
  }
};
struct MarkRspRowWarpKernel : MarkRspRowThreadKernel {};
struct MarkRspRowBlockKernel : MarkRspRowThreadKernel {};

struct MarkRowFlgKernel {
  template <typename Mark, typename Row>
  static void Map(int i, Mark* marks, const Row* rows) {
    marks[static_cast<int64_t>(rows[i])] = Mark(1);
  }
};
struct MarkRspRowFlgKernel {
  template <typename Row>
  static void Map(int i, Row* marks, const Row* rows, const int64_t num_stored) {
    if (i < num_stored) MarkRowFlgKernel::Map(i, marks, rows);
  }
};

// The numbers of the marked rows, from the prefix sums of the marks.
struct FillRspRowIdxKernel {
  template <typename Row>
  static void Map(int i, Row* rows, const int64_t* sums, const int64_t num_rows) {
    const int64_t before = i == 0 ? 0 : sums[i - 1];
    if (i < num_rows && sums[i] > before) rows[before] = static_cast<Row>(i);
  }
};

// ---- Copies between dense and row-sparse.
struct CastDnsRspValsKernel {
  template <typename T, typename Row>
  static void Map(int i, T* values, const Row* rows, const T* dense, const int64_t num_stored,
                  const int64_t row_size) {
    if (i >= num_stored * row_size) return;
    values[i] = dense[static_cast<int64_t>(rows[i / row_size]) * row_size + i % row_size];
  }
};
struct CastStorageRspDnsKernel {
  template <typename T, typename Row>
  static void Map(int i, const int64_t row_size, const Row* rows, const T* values, T* dense) {
    const T* row = values + i * row_size;
    std::copy(row, row + row_size, dense + static_cast<int64_t>(rows[i]) * row_size);
  }
};

// A dense array combined with a row-sparse one, in the rows of the latter.
template <int req, typename OP>
struct ElemwiseDnsRspDnsKernel {
  template <typename T, typename Row>
  static void Map(int i, T* out, const T* dense, const T* values, const Row* rows,
                  const int64_t num_rows, const int64_t num_stored, const int64_t row_size) {
    if (i >= num_stored * row_size) return;
    const int64_t at = static_cast<int64_t>(rows[i / row_size]) * row_size + i % row_size;
    assign(out[at], req, OP::Map(dense[at], values[i]));
  }
};

// ---- The row-sparse gradient of Embedding: where each row is stored, and the sums of what its
// occurrences, which are neighbours in `sorted`, have as gradients. MXNet has one thread for all
// occurrences and some columns; here each occurrence is added by the threads with its number.
struct MarkLookupTable {
  template <typename Row>
  static void Map(int i, int64_t* places, const Row* rows) {
    places[static_cast<int64_t>(rows[i])] = i;
  }
};

template <int columns>
struct AddTakeGradRspDeterministicKernel {
  template <typename T>
  static void Map(int thread, T* gradient, const int64_t* places, const int64_t* sorted,
                  const int64_t, const int64_t* original_place, const T* out_gradient,
                  const int64_t row_size, const int64_t threads_per_row) {
    const int64_t k = thread / threads_per_row, first = thread % threads_per_row * columns;
    const T* source = out_gradient + original_place[k] * row_size;
    T* row = gradient + places[sorted[k]] * row_size;
    for (int64_t i = first; i < std::min(first + columns, row_size); i++) row[i] += source[i];
  }
};

// ---- Dense to CSR. First each row's number of values, which prefix sums then turn into
// starts[row + 1]. As for row-sparse arrays, the thread with a row's number does it.
struct CastDnsCsrIndPtrThreadKernel {
  template <typename T>
  static void Map(int row, int64_t* starts, const T* dense, const int64_t num_rows,
                  const int64_t num_columns) {
    if (row == 0) starts[0] = 0;
    if (row >= num_rows) return;
    const T* first = dense + row * num_columns;
    starts[row + 1] =
        std::count_if(first, first + num_columns, [](T value) { return value != T(0); });
  }
};
struct CastDnsCsrIndPtrWarpKernel : CastDnsCsrIndPtrThreadKernel {};
struct CastDnsCsrIndPtrBlockKernel : CastDnsCsrIndPtrThreadKernel {};

struct CastDnsCsrColIdxAndValsThreadKernel {
  template <typename T>
  static void Map(int row, T* values, int64_t* columns, const int64_t* starts, const T* dense,
                  const int64_t num_rows, const int64_t num_columns) {
    if (row >= num_rows) return;
    int64_t place = starts[row];
    for (int64_t column = 0; column < num_columns; column++) {
      const T value = dense[row * num_columns + column];
      if (value == T(0)) continue;
      values[place] = value;
      columns[place++] = column;
    }
  }
};
struct CastDnsCsrColIdxAndValsWarpKernel : CastDnsCsrColIdxAndValsThreadKernel {};
struct CastDnsCsrColIdxAndValsBlockKernel : CastDnsCsrColIdxAndValsThreadKernel {};

struct CopyCsrDataToDns {
  template <typename T>
  static void Map(int row, T* dense, const int64_t* columns, const int64_t* starts,
                  const T* values, const int64_t num_columns) {
    for (int64_t k = starts[row]; k < starts[row + 1]; k++) {
      dense[row * num_columns + columns[k]] = values[k];
    }
  }
};
}  // namespace op

namespace ndarray {
// Adds a row-sparse array to the sum of several, whose rows are numbered by `sums`, the prefix sums
// of their marks.
struct ElementWiseRspAdditionKernel {
  template <typename T, typename Row>
  static void Map(int i, T* total, const Row* sums, const Row* rows, const T* values,
                  const int64_t num_stored, const int64_t row_size) {
    if (i >= num_stored * row_size) return;
    total[(sums[rows[i / row_size]] - 1) * row_size + i % row_size] += values[i];
  }
};
}  // namespace ndarray
}  // namespace mxnet
