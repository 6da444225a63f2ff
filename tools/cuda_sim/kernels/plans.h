// mshadow's kernels for array expressions, and its softmax, which SoftmaxOutput uses.
//
// A plan is an expression, of mshadow's headers, that can be evaluated at a row and a column.
#pragma once

#include "scalar_operations.h"

namespace mshadow {
namespace cuda {

template <typename Saver, int bits, typename Target, typename Plan>
void MapPlanKernel(Target target, index_t, Shape<2> shape, const Plan plan) {
  for (index_t row = 0; row < shape[0]; row++) {
    for (index_t column = 0; column < shape[1]; column++) {
      Saver::Save(target.REval(row, column), plan.Eval(row, column));
    }
  }
}

template <typename Saver, int bits, int grid_size, typename Target, typename Plan>
void MapPlanLargeKernel(Target target, index_t row_size, Shape<2> shape, const Plan plan, int) {
  MapPlanKernel<Saver, bits>(target, row_size, shape, plan);
}

// A reduction to one dimension: of all columns, or of all but the dimension that is kept.
template <typename Saver, typename Reducer, int bits, typename T, typename Target, typename Plan>
void MapRedKeepLowestKernel(Target target, Plan plan, T scale, Shape<2> shape) {
  for (index_t column = 0; column < shape[1]; column++) {
    T result;
    Reducer::SetInitValue(result);
    for (index_t row = 0; row < shape[0]; row++) {
      Reducer::Reduce(result, T(plan.Eval(row, column)));
    }
    Saver::Save(target.REval(0, column), T(result * scale));
  }
}

template <typename Saver, typename Reducer, int bits, typename T, typename Target, typename Plan>
void MapReduceKeepDim1Kernel(Target target, Plan plan, T scale, Shape<4> shape) {
  for (index_t kept = 0; kept < shape[1]; kept++) {
    T result;
    Reducer::SetInitValue(result);
    for (index_t n = 0; n < shape[0]; n++) {
      for (index_t y = 0; y < shape[2]; y++) {
        for (index_t x = 0; x < shape[3]; x++) {
          const index_t row = (n * shape[1] + kept) * shape[2] + y;
          Reducer::Reduce(result, T(plan.Eval(row, x)));
        }
      }
    }
    Saver::Save(target.REval(0, kept), T(result * scale));
  }
}

// Adds each row of `source` to the row that its index names.
template <bool clip, int bits, typename T, typename Target, typename Indices, typename Source>
void AddTakeGradKernel(Target target, Indices indices, Source source, index_t num_indices,
                       index_t row_size, const int num_rows) {
  for (index_t k = 0; k < num_indices; k++) {
    int row = static_cast<int>(indices.Eval(0, k));
    if (clip) {
      row = std::min(std::max(row, 0), num_rows - 1);
    } else {
      row = (row % num_rows + num_rows) % num_rows;
    }
    for (index_t i = 0; i < row_size; i++) target.REval(row, i) += source.Eval(k, i);
  }
}

template <int bits, typename T, typename Target, typename Plan>
void SoftmaxKernel(const cuda_sim::Launch& launch, Target target, Plan in, index_t size) {
  for (unsigned row = 0; row < launch.grid.x; row++) {
    T largest = T(in.Eval(row, 0)), total = T(0);
    for (index_t i = 1; i < size; i++) largest = std::max(largest, T(in.Eval(row, i)));
    for (index_t i = 0; i < size; i++) {
      const T value = T(std::exp(mxnet::op::mshadow_op::real(T(in.Eval(row, i) - largest))));
      total += value;
      target.REval(row, i) = value;
    }
    for (index_t i = 0; i < size; i++) target.REval(row, i) = T(target.REval(row, i) / total);
  }
}

template <int bits, typename T, typename Target, typename Plan, typename Labels>
void SoftmaxGradKernel(const cuda_sim::Launch& launch, Target target, Plan out, Labels labels,
                       index_t size) {
  for (unsigned row = 0; row < launch.grid.x; row++) {
    const int label = static_cast<int>(labels.Eval(0, row));
    for (index_t i = 0; i < size; i++) {
      target.REval(row, i) = T(out.Eval(row, i) - T(i == label ? 1 : 0));
    }
  }
}

// With a label whose rows have no gradient.
template <int bits, typename T, typename Target, typename Plan, typename Labels>
void SoftmaxGradKernel(const cuda_sim::Launch& launch, Target target, Plan out, Labels labels,
                       index_t size, T ignored_label) {
  for (unsigned row = 0; row < launch.grid.x; row++) {
    const int label = static_cast<int>(labels.Eval(0, row));
    const bool ignored = label == static_cast<int>(ignored_label);
    for (index_t i = 0; i < size; i++) {
      target.REval(row, i) = ignored ? T(0) : T(out.Eval(row, i) - T(i == label ? 1 : 0));
    }
  }
}
}  // namespace cuda
}  // namespace mshadow
