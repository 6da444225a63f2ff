// Kernels of layers: the bias of FullyConnected, and layer normalization.
#pragma once

#include "elementwise.h"

namespace mxnet {
namespace op {

template <typename T, typename Load>
void add_bias_kernel(const cuda_sim::Launch& launch, T* out, T* bias, size_t, size_t size) {
  for (size_t row = 0; row < launch.grid.x; row++) {
    for (size_t column = 0; column < size; column++) out[row * size + column] += bias[column];
  }
}

// Sums over the rows: each row of blocks sums a part of them, then the parts are added.
template <typename Load, typename T, typename Accumulator>
void AddBiasGradKernelPhase1(const cuda_sim::Launch& launch, Accumulator* partial_sums,
                             const T* gradient, const size_t size, const size_t num_rows) {
  const size_t rows_per_block = (num_rows + launch.grid.y - 1) / launch.grid.y;
  for (size_t block = 0; block < launch.grid.y; block++) {
    const size_t end = std::min(num_rows, (block + 1) * rows_per_block);
    for (size_t column = 0; column < size; column++) {
      Accumulator total = Accumulator(0);
      for (size_t row = block * rows_per_block; row < end; row++) {
        total += Accumulator(gradient[row * size + column]);
      }
      partial_sums[block * size + column] = total;
    }
  }
}
template <typename T, typename Accumulator>
void AddBiasGradKernelPhase2(const Accumulator* partial_sums, T* out, int size, int num_blocks,
                             OpReqType req) {
  for (int column = 0; column < size; column++) {
    Accumulator total = Accumulator(0);
    for (int block = 0; block < num_blocks; block++) total += partial_sums[block * size + column];
    assign(out[column], req, T(total));
  }
}

// ---- Layer normalization of rows; `deviation` is the root of the variance plus epsilon.
template <typename Accumulator, typename T, typename Count>
void LayerNormFusedForwardKernelContig(const int num_rows, const int size,
                                       const Accumulator epsilon, const T* in, const T* gamma,
                                       const T* beta, T* out, T* means, T* deviations) {
  for (int row = 0; row < num_rows; row++) {
    const T* x = in + row * size;
    double mean = 0, variance = 0;
    for (int i = 0; i < size; i++) mean += static_cast<double>(x[i]) / size;
    for (int i = 0; i < size; i++) {
      const double difference = static_cast<double>(x[i]) - mean;
      variance += difference * difference / size;
    }
    const double deviation = std::sqrt(variance + static_cast<double>(epsilon));
    for (int i = 0; i < size; i++) {
      const T normalized = T((static_cast<double>(x[i]) - mean) / deviation);
      const T scaled = gamma ? T(gamma[i] * normalized) : normalized;
      out[row * size + i] = beta ? T(scaled + beta[i]) : scaled;
    }
    means[row] = T(mean);
    deviations[row] = T(deviation);
  }
}

template <typename Accumulator, typename T>
void LayerNormFusedBackwardKernel_PartGammaBeta(const cuda_sim::Launch& launch,
                                                const int num_rows, const int size, const T* in,
                                                const T* out_gradient, const T* means,
                                                const T* deviations, Accumulator* gamma_parts,
                                                Accumulator* beta_parts) {
  const int num_parts = static_cast<int>(launch.grid.y);
  const int rows_per_part = (num_rows + num_parts - 1) / num_parts;
  for (int part = 0; part < num_parts; part++) {
    const int end = std::min(num_rows, (part + 1) * rows_per_part);
    for (int i = 0; i < size; i++) {
      Accumulator gamma = Accumulator(0), beta = Accumulator(0);
      for (int row = part * rows_per_part; row < end; row++) {
        const Accumulator gradient = Accumulator(out_gradient[row * size + i]);
        const Accumulator difference =
            Accumulator(Accumulator(in[row * size + i]) - Accumulator(means[row]));
        gamma += Accumulator(difference / Accumulator(deviations[row]) * gradient);
        beta += gradient;
      }
      gamma_parts[part * size + i] = gamma;
      beta_parts[part * size + i] = beta;
    }
  }
}

template <bool add_gamma, bool add_beta, typename Accumulator, typename T>
void LayerNormFusedBackwardKernel_GammaBeta(const int, const int size, const int num_parts,
                                            const Accumulator* gamma_parts,
                                            const Accumulator* beta_parts, T* gamma_gradient,
                                            T* beta_gradient) {
  for (int i = 0; i < size; i++) {
    Accumulator gamma = Accumulator(0), beta = Accumulator(0);
    for (int part = 0; part < num_parts; part++) {
      gamma += gamma_parts[part * size + i];
      beta += beta_parts[part * size + i];
    }
    if (gamma_gradient) assign(gamma_gradient[i], add_gamma ? kAddTo : kWriteTo, T(gamma));
    if (beta_gradient) assign(beta_gradient[i], add_beta ? kAddTo : kWriteTo, T(beta));
  }
}

template <int unroll, bool add, typename Accumulator, typename T>
void LayerNormFusedBackwardKernel_Data(const int num_rows, const int size, const T* in,
                                       const T* out_gradient, const T* means,
                                       const T* deviations, const T* gamma, T* gradient) {
  for (int row = 0; row < num_rows; row++) {
    const double mean = static_cast<double>(means[row]);
    const double deviation = static_cast<double>(deviations[row]);
    auto normalized = [&](int i) {
      return (static_cast<double>(in[row * size + i]) - mean) / deviation;
    };
    auto scaled = [&](int i) {
      const double factor = gamma ? static_cast<double>(gamma[i]) : 1;
      return factor * static_cast<double>(out_gradient[row * size + i]) / deviation;
    };
    double total = 0, product = 0;
    for (int i = 0; i < size; i++) {
      total += scaled(i) / size;
      product += scaled(i) * normalized(i) / size;
    }
    for (int i = 0; i < size; i++) {
      assign(gradient[row * size + i], add ? kAddTo : kWriteTo,
             T(scaled(i) - total - normalized(i) * product));
    }
  }
}
}  // namespace op
}  // namespace mxnet
