// Slices, concatenation, transposition, and operators that read or write where an index says.
#pragma once

#include "reductions.h"

namespace mxnet {
namespace op {

// ---- Slices with a begin and a step for each axis.
template <int ndim>
using PerAxis = common::StaticArray<index_t, ndim>;

template <int ndim>
index_t place_in_slice(index_t i, const Shape<ndim>& shape, const Shape<ndim>& slice_shape,
                       const PerAxis<ndim>& begin, const PerAxis<ndim>& step) {
  const Shape<ndim> coordinate = unravel(i, slice_shape);
  index_t place = 0;
  for (int axis = 0; axis < ndim; axis++) {
    place = place * shape[axis] + begin[axis] + coordinate[axis] * step[axis];
  }
  return place;
}

template <int ndim, int req, typename Device>
struct slice_forward {
  template <typename T>
  static void Map(index_t i, T* out, const T* in, const Shape<ndim> shape,
                  const Shape<ndim> slice_shape, const PerAxis<ndim> begin,
                  const PerAxis<ndim> step) {
    assign(out[i], req, in[place_in_slice(i, shape, slice_shape, begin, step)]);
  }
};
template <int ndim, int req, typename Device>
struct slice_assign {
  template <typename T>
  static void Map(index_t i, T* out, const T* values, const Shape<ndim> shape,
                  const Shape<ndim> slice_shape, const PerAxis<ndim> begin,
                  const PerAxis<ndim> step) {
    assign(out[place_in_slice(i, shape, slice_shape, begin, step)], req, values[i]);
  }
};
// One call is for a row of the slice.
template <int ndim>
struct slice_assign_scalar {
  template <typename T>
  static void Map(index_t row, T* out, const T value, const OpReqType req,
                  const Shape<ndim> shape, const Shape<ndim> slice_shape,
                  const PerAxis<ndim> begin, const PerAxis<ndim> step) {
    const index_t row_size = slice_shape[ndim - 1];
    for (index_t i = row * row_size; i < (row + 1) * row_size; i++) {
      assign(out[place_in_slice(i, shape, slice_shape, begin, step)], req, value);
    }
  }
};

// ---- Splitting an axis at `borders` into arrays, and joining them again.

// Element i of the joined array, in its section.
template <typename T>
T& element_in_section(size_t i, T** sections, const size_t* borders, size_t num_sections,
                      size_t axis_size, size_t trailing_size) {
  const size_t lead = i / (trailing_size * axis_size), position = i / trailing_size % axis_size;
  size_t section = 0;
  while (section + 1 < num_sections && borders[section + 1] <= position) section++;
  const size_t section_size = borders[section + 1] - borders[section];
  const size_t row = lead * section_size + position - borders[section];
  return cuda_sim::bytes(sections[section])[row * trailing_size + i % trailing_size];
}

struct SplitKernel {
  template <typename T>
  static void Map(size_t i, const T* in, T** sections, const size_t* borders,
                  const size_t num_sections, const size_t axis_size,
                  const size_t trailing_size) {
    element_in_section(i, sections, borders, num_sections, axis_size, trailing_size) = in[i];
  }
};
struct ConcatenateKernel {
  template <typename T>
  static void Map(size_t i, T** sections, T* out, const size_t* borders,
                  const size_t num_sections, const size_t axis_size,
                  const size_t trailing_size) {
    out[i] = element_in_section(i, sections, borders, num_sections, axis_size, trailing_size);
  }
};

// ---- Reversal of axes, each given by its size and the size of what follows it.
struct reverse {
  template <typename T>
  static void Map(index_t i, index_t num_axes, const T* in, T* out, const index_t* sizes,
                  const index_t* trailing_sizes) {
    index_t place = i;
    for (index_t k = 0; k < num_axes; k++) {
      const index_t position = place / trailing_sizes[k] % sizes[k];
      place += (sizes[k] - 1 - 2 * position) * trailing_sizes[k];
    }
    out[place] = in[i];
  }
};

// ---- Transposition of the last two axes of a batch of matrices.
namespace cuda {
template <typename T, typename Load, bool add>
void transpose_pseudo2D(const cuda_sim::Launch& launch, T* out, T* in, const index_t num_rows,
                        const index_t num_columns, const index_t, const index_t batch_steps) {
  const index_t batch = static_cast<index_t>(launch.grid.z) * batch_steps;
  for (index_t i = 0; i < batch * num_rows * num_columns; i++) {
    const index_t column = i % num_columns, row = i / num_columns % num_rows;
    const index_t matrix = i / num_columns / num_rows;
    assign(out[(matrix * num_columns + column) * num_rows + row], add ? kAddTo : kWriteTo, in[i]);
  }
}
}  // namespace cuda

// ---- Taking rows.
template <bool clip>
struct TakeZeroAxisGPU {
  template <typename T, typename Index>
  static void Map(int i, T* out, const T* in, const Index* indices, const int64_t row_size,
                  const int64_t num_rows) {
    const int64_t row =
        index_within<clip>(static_cast<int64_t>(indices[i / row_size]), num_rows);
    out[i] = in[row * row_size + i % row_size];
  }
};

// `out_stride` and `in_stride` are those of the axis before the one that is taken from.
template <bool clip>
struct TakeNonzeroAxis {
  template <typename T, typename Index>
  static void Map(index_t i, T* out, const T* in, const Index* indices, const int out_stride,
                  const int in_stride, const int axis_stride, const int, const int, const int,
                  const int axis_size, const int) {
    const index_t within = i % out_stride;
    const int64_t position = index_within<clip>(
        static_cast<int64_t>(indices[within / axis_stride]), axis_size);
    out[i] = in[i / out_stride * in_stride + position * axis_stride + within % axis_stride];
  }
};

// The gradient of taking from an axis. The occurrences of position p of the axis are
// occurrences[starts[p]] up to occurrences[starts[p + 1]].
struct TakeGradGeneralKernel {
  template <typename T, typename Index>
  static void Map(int i, T* gradient, const T* out_gradient, const Index* starts,
                  const Index* occurrences, Shape<10> in_strides, Shape<10> out_strides,
                  const int, const int, const int, const int axis, const int axis_size) {
    const int lead = axis == 0 ? 0 : i / in_strides[axis - 1];
    const int within = axis == 0 ? i : i % in_strides[axis - 1];
    const int position = within / in_strides[axis], tail = within % in_strides[axis];
    const int start = tail + (axis == 0 ? 0 : lead * out_strides[axis - 1]);
    for (Index k = starts[position]; k < starts[position + 1]; k++) {
      const int taken = static_cast<int>(occurrences[k]);
      const int place = taken < 0 ? taken + axis_size : taken;
      gradient[i] += out_gradient[start + place * in_strides[axis]];
    }
  }
};

// Says whether an index is out of bounds; `invalid` is 0 before.
struct is_valid_check {
  template <typename Index>
  static void Map(int i, char* invalid, const Index* indices, const Index min, const Index max) {
    if (indices[i] < min || indices[i] > max) *invalid = 1;
  }
};

struct tcast_clip {
  template <typename Out, typename In>
  static void Map(int i, Out* out, const In* in, const Out size) {
    out[i] = static_cast<Out>(index_within<true>(static_cast<int64_t>(in[i]), size));
  }
};

// ---- The gradient of Embedding: where each row of the table occurs in the sorted indices.
template <typename Index>
void EmbeddingFindBounds(const Index* sorted, Index* bounds, const index_t size,
                         const index_t num_rows) {
  for (index_t row = 0; row < num_rows; row++) {
    const Index* begin = std::lower_bound(sorted, sorted + size, static_cast<Index>(row));
    const Index* end = std::upper_bound(sorted, sorted + size, static_cast<Index>(row));
    bounds[row] = begin == end ? Index(-1) : static_cast<Index>(begin - sorted);
    bounds[num_rows + row] = begin == end ? Index(-2) : static_cast<Index>(end - sorted - 1);
  }
}

template <typename Load, typename T, typename Index>
void EmbeddingGradKernel(T* gradient, const Index* original_place, const Index* bounds,
                         const T* out_gradient, const index_t row_size, const index_t num_rows,
                         const int req) {
  for (index_t row = 0; row < num_rows; row++) {
    for (index_t column = 0; column < row_size; column++) {
      T total = req == kAddTo ? gradient[row * row_size + column] : T(0);
      for (Index k = bounds[row]; k <= bounds[num_rows + row]; k++) {
        total += out_gradient[original_place[k] * row_size + column];
      }
      gradient[row * row_size + column] = total;
    }
  }
}

// The same for `take`; without `starts` the indices are read one by one.
template <int elements, typename T, typename Index>
void AddTakeGradLargeBatchKernel(T* gradient, const Index*, const int*, const Index* sorted,
                                 const Index* original_place, const T* out_gradient,
                                 int num_indices, int row_size) {
  for (int k = 0; k < num_indices; k++) {
    T* row = gradient + static_cast<int64_t>(sorted[k]) * row_size;
    const T* source = out_gradient + static_cast<int64_t>(original_place[k]) * row_size;
    for (int column = 0; column < row_size; column++) row[column] += source[column];
  }
}

// ---- One element of each row, and vectors with a single non-zero element.
template <int req>
struct batch_take {
  template <typename T>
  static void Map(int i, T* out, const T* in, const int* indices, int size) {
    assign(out[i], req, in[i * size + index_within<true>(indices[i], size)]);
  }
};
template <int req>
struct one_hot {
  template <typename T, typename Index>
  static void Map(index_t i, T* out, const Index* indices, index_t depth, T on_value) {
    const index_t position = static_cast<index_t>(indices[i]);
    if (position >= 0 && position < depth) assign(out[i * depth + position], req, on_value);
  }
};

// ---- Elements at multi-dimensional indices; column i of `indices` is the i-th index.

// Where the row of an index starts; only gather_nd takes negative indices, and gives the shape.
template <typename Index>
index_t row_start(index_t i, index_t num_indices, index_t index_size, const Shape<10>& strides,
                  const Index* indices, const Shape<10>* shape = nullptr) {
  index_t start = 0;
  for (index_t k = 0; k < index_size; k++) {
    const index_t position = static_cast<index_t>(indices[k * num_indices + i]);
    start += strides[k] * (shape ? (position + (*shape)[k]) % (*shape)[k] : position);
  }
  return start;
}

struct gather_nd {
  template <typename T, typename Index>
  static void Map(index_t i, OpReqType req, index_t num_indices, index_t index_size,
                  index_t row_size, const Shape<10> strides, const Shape<10> shape, T* out,
                  const T* in, const Index* indices) {
    const T* row = in + row_start(i, num_indices, index_size, strides, indices, &shape);
    for (index_t j = 0; j < row_size; j++) assign(out[i * row_size + j], req, row[j]);
  }
};
struct backward_gather_nd_gpu {
  template <typename T, typename Index>
  static void Map(index_t i, index_t num_indices, index_t index_size, index_t row_size,
                  const Shape<10> strides, T* gradient, const T* out_gradient,
                  const Index* indices) {
    T* row = gradient + row_start(i, num_indices, index_size, strides, indices);
    for (index_t j = 0; j < row_size; j++) row[j] += out_gradient[i * row_size + j];
  }
};
struct scatter_nd {
  template <typename T, typename Index>
  static void Map(index_t i, OpReqType req, index_t num_indices, index_t index_size,
                  index_t row_size, const Shape<10> strides, T* out, const T* in,
                  const Index* indices) {
    T* row = out + row_start(i, num_indices, index_size, strides, indices);
    for (index_t j = 0; j < row_size; j++) assign(row[j], req, in[i * row_size + j]);
  }
};
struct is_valid_check_gather_nd {
  template <typename T>
  static void Map(int axis, T* first_invalid, const T* indices, const index_t num_indices,
                  const Shape<10> shape) {
    for (index_t i = num_indices - 1; i >= 0; i--) {
      const T position = indices[axis * num_indices + i];
      if (position < T(-shape[axis]) || position > T(shape[axis] - 1)) {
        first_invalid[axis] = position;
        return;
      }
    }
  }
};

// ---- A diagonal of the last two axes, and a matrix with a given diagonal.
template <int ndim, int req, bool backward>
struct diag {
  template <typename T>
  static void Map(index_t i, T* out, const T* in, Shape<ndim> out_shape, Shape<ndim> in_shape,
                  index_t stride, index_t offset, index_t diagonal_size) {
    const index_t matrix = ravel(unravel(i / diagonal_size, out_shape), in_shape);
    const index_t place = matrix + offset + stride * (i % diagonal_size);
    if (backward) {
      assign(out[place], req, in[i]);
    } else {
      assign(out[i], req, in[place]);
    }
  }
};
template <int req, bool backward>
struct diag_gen {
  template <typename T>
  static void Map(index_t i, T* out, const T* in, Shape<2> shape, int k) {
    const index_t row = i / shape[1], column = i % shape[1];
    const index_t place = std::min(row, column);
    if (column != row + k) {
      if (!backward) assign(out[i], req, T(0));
    } else if (backward) {
      assign(out[place], req, in[i]);
    } else {
      assign(out[i], req, in[place]);
    }
  }
};

// ---- Sequences of different lengths along axis 0 or 1: what follows their end gets `value`.
template <int req, bool along_0>
struct SequenceMask {
  template <typename T, typename Length>
  static void Map(int i, T* data, const Length* lengths, index_t max_length, index_t batch_size,
                  index_t element_size, T value) {
    const index_t row = i / element_size;
    const index_t position = along_0 ? row / batch_size : row % max_length;
    const Length length = lengths[along_0 ? row % batch_size : row / max_length];
    if (position >= static_cast<index_t>(length)) assign(data[i], req, value);
  }
};
template <int req>
struct SequenceMask0GPUKernel : SequenceMask<req, true> {};
template <int req>
struct SequenceMask1GPUKernel : SequenceMask<req, false> {};

// ---- The results of topk: ones at the chosen places, or values there.
struct fill_ind_to_one {
  template <typename T>
  static void Map(int i, const index_t* indices, T* out) {
    out[indices[i]] = T(1);
  }
};
struct fill_ind {
  template <typename T>
  static void Map(int i, const index_t* indices, const T* values, int req, T* out) {
    assign(out[indices[i]], req, values[i]);
  }
};
}  // namespace op
}  // namespace mxnet
