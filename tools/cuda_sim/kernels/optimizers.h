// The updates of MXNet's optimizers.
#pragma once

#include "elementwise.h"

namespace mxnet {
namespace op {

// Cuts `value` to [-bound, bound]; a negative bound means no cut.
template <typename T>
T clipped(T value, T bound) {
  return bound >= T(0) ? mshadow_op::clip::Map(value, bound) : value;
}

template <typename T>
T root(T value) {
  return mshadow_op::square_root::Map(value);
}

// ---- SGD. The mixed-precision updates keep the weight in float32 beside its copy.
template <typename Real>
Real sgd(Real weight, Real gradient, Real clip, Real rate, Real decay, Real rescale) {
  const Real step = Real(rate * clipped(Real(rescale * gradient), clip));
  return Real((1.f - rate * decay) * weight - step);
}

// Returns the change of the weight, which is the new momentum.
template <typename Real>
Real sgd_momentum(Real momentum, Real weight, Real gradient, Real clip, Real factor, Real rate,
                  Real decay, Real rescale) {
  const Real step = Real(rate * clipped(Real(rescale * gradient), clip));
  return Real(factor * momentum - rate * decay * weight - step);
}

struct SGDKernel {
  template <typename T>
  static void Map(index_t i, T* out, const T* weight, const T* gradient, const T clip,
                  const T rate, const T decay, const T rescale, const OpReqType req) {
    assign(out[i], req, sgd(weight[i], gradient[i], clip, rate, decay, rescale));
  }
};

struct SGDMomKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* momentum, const T* weight, const T* gradient,
                  const T clip, const T factor, const T rate, const T decay, const T rescale,
                  const OpReqType req) {
    momentum[i] =
        sgd_momentum(momentum[i], weight[i], gradient[i], clip, factor, rate, decay, rescale);
    assign(out[i], req, T(weight[i] + momentum[i]));
  }
};

struct MP_SGDKernel {
  template <typename T>
  static void Map(index_t i, T* out, const T*, const T* gradient, float* weight,
                  const float clip, const float rate, const float decay, const float rescale,
                  const OpReqType req) {
    weight[i] = sgd(weight[i], static_cast<float>(gradient[i]), clip, rate, decay, rescale);
    assign(out[i], req, T(weight[i]));
  }
};

struct MP_SGDMomKernel {
  template <typename T>
  static void Map(index_t i, T* out, float* momentum, const T*, const T* gradient,
                  float* weight, const float clip, const float factor, const float rate,
                  const float decay, const float rescale, const OpReqType req) {
    momentum[i] = sgd_momentum(momentum[i], weight[i], static_cast<float>(gradient[i]), clip,
                               factor, rate, decay, rescale);
    weight[i] += momentum[i];
    assign(out[i], req, T(weight[i]));
  }
};

// Several weights in one kernel. `Real` is T, or float where T is float16 with float32 weights;
// the rates are in the struct, or "preloaded" in device memory.
template <typename T, typename Real, typename Rates>
struct SeveralWeights {
  int count;
  size_t max_size;
  size_t sizes[60];
  T* weights[60];
  T* grads[60];
  Real* mom[60];
  Real* weights32[60];
  T* out_data[60];
  Rates lrs;
  Rates wds;
  Real clip_gradient;
  Real rescale_grad;
  Real momentum;
};
template <typename T, typename Real>
using MultiSGDKernelParam = SeveralWeights<T, Real, Real[60]>;
template <typename T, typename Real>
using PreloadedMultiSGDKernelParam = SeveralWeights<T, Real, float*>;

template <typename Real, bool has_momentum, bool mixed_precision>
struct MultiSGDKernel {
  template <typename Parameters>
  static void Map(index_t i, const Parameters& all, OpReqType req) {
    for (int k = 0; k < all.count; k++) {
      if (static_cast<size_t>(i) >= all.sizes[k]) continue;
      const Real weight = mixed_precision ? all.weights32[k][i] : Real(all.weights[k][i]);
      const Real momentum = has_momentum ? all.mom[k][i] : Real(0);
      const Real factor = has_momentum ? all.momentum : Real(0);
      const Real change =
          sgd_momentum(momentum, weight, Real(all.grads[k][i]), all.clip_gradient, factor,
                       Real(all.lrs[k]), Real(all.wds[k]), all.rescale_grad);
      if (has_momentum) all.mom[k][i] = change;
      if (mixed_precision) all.weights32[k][i] = Real(weight + change);
      assign(all.out_data[k][i], req, Real(weight + change));
    }
  }
};
template <typename Real, bool has_momentum, bool mixed_precision>
struct PreloadedMultiSGDKernel : MultiSGDKernel<Real, has_momentum, mixed_precision> {};

// ---- Nesterov's momentum. The weight decay of the momentum is that of the changed weight, as
// `out` is `weight` in an optimizer, and MXNet computes the momentum last.
struct NAGMomKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* momentum, const T* weight, const T* gradient,
                  const T clip, const T factor, const T rate, const T decay, const T rescale,
                  const OpReqType req) {
    const T value = clipped(T(rescale * gradient[i]), clip);
    const T decayed = T(factor * momentum[i]);
    const T step = T(rate * (value + decay * weight[i]));
    assign(out[i], req, T(weight[i] + factor * decayed - (factor + T(1)) * step));
    momentum[i] = T(decayed - rate * (value + decay * weight[i]));
  }
};
struct MP_NAGMomKernel {
  template <typename T>
  static void Map(index_t i, T* out, float* momentum, const T*, const T* gradient,
                  float* weight, const float clip, const float factor, const float rate,
                  const float decay, const float rescale, const OpReqType req) {
    const float value = clipped(rescale * static_cast<float>(gradient[i]), clip);
    const float decayed = factor * momentum[i];
    weight[i] += factor * decayed - (factor + 1) * rate * (value + decay * weight[i]);
    momentum[i] = decayed - rate * (value + decay * weight[i]);
    assign(out[i], req, T(weight[i]));
  }
};

// ---- Signs of gradients.
struct SignSGDKernel {
  template <typename T>
  static void Map(index_t i, T* out, const T* weight, const T* gradient, const T,
                  const T rate, const T decay, const T, const OpReqType req) {
    const T direction = mshadow_op::sign::Map(gradient[i]);
    assign(out[i], req, T((1.f - rate * decay) * weight[i] - rate * direction));
  }
};
struct SignumKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* momentum, const T* weight, const T* gradient,
                  const T clip, const T factor, const T rate, const T decay, const T rescale,
                  const T direct_decay, const OpReqType req) {
    const T change = T(decay * weight[i] + clipped(T(rescale * gradient[i]), clip));
    momentum[i] = T(factor * momentum[i] - (T(1) - factor) * change);
    const T direction = mshadow_op::sign::Map(momentum[i]);
    assign(out[i], req, T((1.f - rate * direct_decay) * weight[i] + rate * direction));
  }
};

// ---- Optimizers with a rate for each element.

// Moves a running mean towards `value`.
template <typename T>
void average(T& mean, T decay, T value) {
  mean = T(decay * mean + (1.f - decay) * value);
}

struct AdamUpdateKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* mean, T* variance, const T* weight, const T* gradient,
                  const T clip, const T rescale, const T beta1, const T beta2, const T rate,
                  const T decay, const T epsilon, const OpReqType req) {
    const T value = clipped(T(gradient[i] * rescale + weight[i] * decay), clip);
    average(mean[i], beta1, value);
    average(variance[i], beta2, T(value * value));
    assign(out[i], req, T(weight[i] - rate * mean[i] / (root(variance[i]) + epsilon)));
  }
};

struct MPAdamWKernel {
  template <typename T>
  static void Map(int i, T* out, float* mean, float* variance, const T*, const T* gradient,
                  float* weight, const float clip, const float beta1, const float beta2,
                  const float schedule, const float rate, const float decay,
                  const float rescale, const float epsilon) {
    const float value = clipped(rescale * static_cast<float>(gradient[i]), clip);
    average(mean[i], beta1, value);
    average(variance[i], beta2, value * value);
    weight[i] -= schedule * (rate * mean[i] / (root(variance[i]) + epsilon) + decay * weight[i]);
    out[i] = T(weight[i]);
  }
};

struct RMSPropUpdateKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* mean_square, const T* weight, const T* gradient,
                  const T clip, const T rescale, const T gamma, const T rate, const T decay,
                  const T clip_weights, const T epsilon, const OpReqType req) {
    const T value = clipped(T(rescale * gradient[i] + decay * weight[i]), clip);
    average(mean_square[i], gamma, T(value * value));
    const T changed = T(weight[i] - rate * (value / root(T(mean_square[i] + epsilon))));
    assign(out[i], req, clipped(changed, clip_weights));
  }
};

// RMSProp with the variance instead of the mean square, and a momentum.
struct RMSPropAlexUpdateKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* mean_square, T* mean, T* change, const T* weight,
                  const T* gradient, const T clip, const T rescale, const T gamma1,
                  const T gamma2, const T rate, const T decay, const T clip_weights,
                  const T epsilon, const OpReqType req) {
    const T value = clipped(T(rescale * gradient[i] + decay * weight[i]), clip);
    average(mean_square[i], gamma1, T(value * value));
    average(mean[i], gamma1, value);
    const T variance = T(mean_square[i] - mean[i] * mean[i] + epsilon);
    change[i] = T(gamma2 * change[i] - rate * value / root(variance));
    assign(out[i], req, clipped(T(weight[i] + change[i]), clip_weights));
  }
};

struct FTMLKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* weight, T* gradient, T* d, T* v, T* z, const T rate,
                  const T beta1, const T beta2, const T epsilon, const T step, const T decay,
                  const T rescale, const T clip, const OpReqType req) {
    using mshadow_op::power;
    const T value = clipped(T(rescale * gradient[i] + decay * weight[i]), clip);
    average(v[i], beta2, T(value * value));
    const T corrected = root(T(v[i] / (T(1) - power::Map(beta2, step))));
    const T next = T((T(1) - power::Map(beta1, step)) / rate * (corrected + epsilon));
    z[i] = T(beta1 * z[i] + (T(1) - beta1) * value - (next - beta1 * d[i]) * weight[i]);
    d[i] = next;
    assign(out[i], req, T(-z[i] / next));
  }
};

struct FtrlUpdateKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* n, T* z, const T* weight, const T* gradient,
                  const T clip, const T rescale, const T beta, const T lambda1, const T rate,
                  const T decay, const OpReqType req) {
    const T value = clipped(T(gradient[i] * rescale), clip);
    const T next = T(n[i] + value * value);
    z[i] += T(value - (root(next) - root(n[i])) * weight[i] / rate);
    n[i] = next;
    const T shrunk = T(mshadow_op::sign::Map(z[i]) * lambda1 - z[i]);
    const bool zero = !(mshadow_op::abs::Map(z[i]) > lambda1);
    assign(out[i], req, zero ? T(0) : T(shrunk / ((beta + root(next)) / rate + decay)));
  }
};

// ---- LAMB: an Adam step, whose length then follows the norm of the weight.
template <typename Real>
Real lamb_step(Real& mean, Real& variance, Real weight, Real gradient, Real clip, Real rescale,
               Real beta1, Real beta1_power, Real beta2, Real beta2_power, Real decay,
               Real epsilon, bool bias_correction) {
  const Real value = clipped(Real(gradient * rescale), clip);
  average(mean, beta1, value);
  average(variance, beta2, Real(value * value));
  const Real first = bias_correction ? Real(mean / (Real(1) - beta1_power)) : mean;
  const Real second = bias_correction ? Real(variance / (Real(1) - beta2_power)) : variance;
  return Real(first / (root(second) + epsilon) + decay * weight);
}

struct LambUpdatePhaseOneKernel {
  template <typename T>
  static void Map(index_t i, T* out, T* mean, T* variance, const T* weight, const T* gradient,
                  const T clip, const T rescale, const T beta1, const T beta1_power,
                  const T beta2, const T beta2_power, const T decay, const T epsilon,
                  const int, bool bias_correction, const OpReqType req) {
    assign(out[i], req,
           lamb_step(mean[i], variance[i], weight[i], gradient[i], clip, rescale, beta1,
                     beta1_power, beta2, beta2_power, decay, epsilon, bias_correction));
  }
};
// Here MXNet passes each power before its base.
struct MPLambUpdatePhaseOneKernel {
  template <typename T>
  static void Map(index_t i, float* out, float* mean, float* variance, const T*,
                  const T* gradient, const float* weight, const float clip,
                  const float rescale, const float beta1_power, const float beta1,
                  const float beta2_power, const float beta2, const float decay,
                  const float epsilon, const int, bool bias_correction, const OpReqType req) {
    assign(out[i], req,
           lamb_step(mean[i], variance[i], weight[i], static_cast<float>(gradient[i]), clip,
                     rescale, beta1, beta1_power, beta2, beta2_power, decay, epsilon,
                     bias_correction));
  }
};

// The rate, scaled by the ratio of the two norms unless one is 0; negative bounds do not count.
template <typename T>
T lamb_rate(T rate, T weight_norm, T step_norm, T lower, T upper) {
  if (lower >= T(0)) weight_norm = std::max(weight_norm, lower);
  if (upper >= T(0)) weight_norm = std::min(weight_norm, upper);
  return weight_norm == T(0) || step_norm == T(0) ? rate : T(rate * weight_norm / step_norm);
}

struct LambUpdatePhaseTwoKernel {
  template <typename T>
  static void Map(index_t i, T* out, const T* weight, const T* step, const T* weight_norm,
                  const T* step_norm, T rate, const T lower, const T upper,
                  const OpReqType req) {
    rate = lamb_rate(rate, weight_norm[0], step_norm[0], lower, upper);
    assign(out[i], req, T(weight[i] - rate * step[i]));
  }
};
struct MPLambUpdatePhaseTwoKernel {
  template <typename T>
  static void Map(index_t i, T* out, const T*, const float* step, const float* weight_norm,
                  const float* step_norm, const float* weight, float rate,
                  const float lower, const float upper, const OpReqType req) {
    rate = lamb_rate(rate, weight_norm[0], step_norm[0], lower, upper);
    assign(out[i], req, T(weight[i] - rate * step[i]));
  }
};

template <typename T, typename Real>
struct MultiLAMBKernelParam {
  static const int N = 45;
  size_t ntensors;
  size_t max_size;
  size_t total_size;
  size_t sizes[N];
  size_t tensor2temp_g[N];
  T* weights[N];
  T* grads[N];
  Real* mean[N];
  Real* var[N];
  Real* weights32[N];
  T* out_data[N];
  int step_count[N];
  Real learning_rates[N];
  Real wds[N];
  int chunk_size;
  int nchunks;
};

template <bool mixed_precision, typename Real, typename T>
void KernelStep1(const MultiLAMBKernelParam<T, Real> parameters, const float beta1,
                 const float beta2, const Real rest1, const Real rest2, const float epsilon,
                 const float clip, const bool bias_correction, const float rescale, float* steps,
                 int*, int*) {
  for (size_t k = 0; k < parameters.ntensors; k++) {
    const double count = parameters.step_count[k];
    const Real correction1 = bias_correction ? Real(1 - Real(std::pow(beta1, count))) : Real(1);
    const Real correction2 = bias_correction ? Real(1 - Real(std::pow(beta2, count))) : Real(1);
    for (size_t i = 0; i < parameters.sizes[k]; i++) {
      const Real weight =
          mixed_precision ? parameters.weights32[k][i] : Real(parameters.weights[k][i]);
      const Real value = clipped(Real(Real(parameters.grads[k][i]) * Real(rescale)), Real(clip));
      Real& mean = parameters.mean[k][i];
      Real& variance = parameters.var[k][i];
      mean = Real(Real(beta1) * mean + rest1 * value);
      variance = Real(Real(beta2) * variance + rest2 * value * value);
      const Real corrected = root(Real(variance / correction2));
      const Real step = Real(mean / correction1 / (corrected + Real(epsilon)));
      steps[parameters.tensor2temp_g[k] + i] =
          static_cast<float>(step + parameters.wds[k] * weight);
    }
  }
}

template <bool mixed_precision, typename Real, typename T>
void KernelStep2(const MultiLAMBKernelParam<T, Real> parameters, const float* weight_squares,
                 const float* step_squares, const float* steps, const float lower,
                 const float upper, int*, int*, const OpReqType req) {
  for (size_t k = 0; k < parameters.ntensors; k++) {
    const Real rate = lamb_rate(parameters.learning_rates[k], Real(std::sqrt(weight_squares[k])),
                                Real(std::sqrt(step_squares[k])), Real(lower), Real(upper));
    for (size_t i = 0; i < parameters.sizes[k]; i++) {
      Real weight =
          mixed_precision ? parameters.weights32[k][i] : Real(parameters.weights[k][i]);
      weight = Real(weight - rate * Real(steps[parameters.tensor2temp_g[k] + i]));
      if (mixed_precision) parameters.weights32[k][i] = weight;
      assign(parameters.out_data[k][i], req, weight);
    }
  }
}

// ---- LARS: rates from sums of squares, which other kernels compute for many arrays at once.
struct MultiLARSKernel {
  static void Map(int i, float* out, const float* rates, const float* weight_squares,
                  const float* gradient_squares, const float* decays, const float eta,
                  const float epsilon, const float rescale, const OpReqType req) {
    const float weight_norm = std::sqrt(weight_squares[i]);
    const float gradient_norm = std::sqrt(gradient_squares[i]) * rescale;
    float rate = rates[i];
    if (weight_norm > 0 && gradient_squares[i] > 0) {
      rate *= eta * weight_norm / (gradient_norm + decays[i] * weight_norm + epsilon);
    }
    assign(out[i], req, rate);
  }
};

template <typename T>
struct MultiSumSqKernelParam {
  T* addresses[110];
  int sizes[110];
  unsigned char block_to_tensor[320];
  int block_to_chunk[320];
  int max_chunks_per_tensor;
};

template <typename T>
void MultiSumSqKernel(const cuda_sim::Launch& launch, int chunk_size,
                      MultiSumSqKernelParam<T> parameters, float* partial_sums,
                      int first_tensor) {
  for (unsigned block = 0; block < launch.grid.x; block++) {
    const int tensor = parameters.block_to_tensor[block];
    const int chunk = parameters.block_to_chunk[block];
    const int end = std::min(parameters.sizes[tensor], (chunk + 1) * chunk_size);
    float total = 0;
    for (int i = chunk * chunk_size; i < end; i++) {
      const float value = static_cast<float>(parameters.addresses[tensor][i]);
      total += value * value;
    }
    partial_sums[(first_tensor + tensor) * parameters.max_chunks_per_tensor + chunk] = total;
  }
}

template <typename T>
void GlobalReductionKernel(const cuda_sim::Launch& launch, MultiSumSqKernelParam<T> parameters,
                           float* partial_sums, float* out) {
  for (unsigned tensor = 0; tensor < launch.grid.x; tensor++) {
    out[tensor] = 0;
    for (int chunk = 0; chunk < parameters.max_chunks_per_tensor; chunk++) {
      out[tensor] += partial_sums[tensor * parameters.max_chunks_per_tensor + chunk];
    }
  }
}

// ---- Whether arrays hold only finite numbers; `out` is 1 before.
template <typename T>
void AllFiniteGPUKernel(const int size, const T* in, float* out) {
  for (int i = 0; i < size; i++) {
    if (!std::isfinite(static_cast<float>(in[i]))) out[0] = 0;
  }
}

template <typename T>
struct MultiAllFiniteKernelParam {
  static const int N = 200;
  int count;
  size_t max_size;
  size_t sizes[N];
  T* arrays[N];
};

template <typename T>
void MultiAllFiniteGPUKernel(const MultiAllFiniteKernelParam<T> parameters, float* out) {
  for (int k = 0; k < parameters.count; k++) {
    AllFiniteGPUKernel(static_cast<int>(parameters.sizes[k]), parameters.arrays[k], out);
  }
}

// ---- Row-sparse gradients: only the rows that `rows` names are updated ("lazy" updates).

// Where element i of the stored rows is in the dense array.
template <typename Row>
int64_t dense_place(int64_t i, const Row* rows, int64_t row_size) {
  return static_cast<int64_t>(rows[i / row_size]) * row_size + i % row_size;
}

template <typename Device>
struct GroupAdagradDnsRspKernel {
  template <typename T, typename Index>
  static void Map(int i, const index_t row_size, T* out, T* state, T* weight, const Index* rows,
                  const T* gradient, const T clip, const T rescale, const T rate,
                  const T epsilon) {
    const T* row_gradient = gradient + static_cast<int64_t>(i) * row_size;
    const int64_t start = static_cast<int64_t>(rows[i]) * row_size;
    T squares = T(0);
    for (index_t j = 0; j < row_size; j++) {
      const T value = clipped(T(row_gradient[j] * rescale), clip);
      squares += T(value * value);
    }
    T& row_state = state[static_cast<int64_t>(rows[i])];
    row_state += T(squares / row_size);
    for (index_t j = 0; j < row_size; j++) {
      const T value = clipped(T(row_gradient[j] * rescale), clip);
      out[start + j] = T(weight[start + j] - rate * value / root(T(row_state + epsilon)));
    }
  }
};

template <int req, typename Device>
struct SGDDnsRspKernel {
  template <typename T, typename Index>
  static void Map(index_t i, const index_t row_size, T* out, const T* weight, const Index* rows,
                  const T* gradient, const T clip, const T rate, const T decay,
                  const T rescale) {
    const int64_t place = dense_place(i, rows, row_size);
    SGDKernel::Map(0, out + place, weight + place, gradient + i, clip, rate, decay, rescale,
                   OpReqType(req));
  }
};
template <int req, typename Device>
struct SGDMomDnsRspDnsKernel {
  template <typename T, typename Index>
  static void Map(index_t i, index_t row_size, T* out, T* momentum, const T* weight,
                  const Index* rows, const T* gradient, const T clip, const T factor,
                  const T rate, const T decay, const T rescale) {
    const int64_t place = dense_place(i, rows, row_size);
    SGDMomKernel::Map(0, out + place, momentum + place, weight + place, gradient + i, clip,
                      factor, rate, decay, rescale, OpReqType(req));
  }
};
template <int req, typename Device>
struct AdamDnsRspDnsKernel {
  template <typename T, typename Index>
  static void Map(index_t i, const int64_t row_size, T* out, T* mean, T* variance,
                  const T* weight, const Index* rows, const T* gradient, const T clip,
                  const T beta1, const T beta2, const T rate, const T decay, const T epsilon,
                  const T rescale) {
    const int64_t place = dense_place(i, rows, row_size);
    AdamUpdateKernel::Map(0, out + place, mean + place, variance + place, weight + place,
                          gradient + i, clip, rescale, beta1, beta2, rate, decay, epsilon,
                          OpReqType(req));
  }
};
template <typename Device>
struct AdagradDnsRspDnsKernel {
  template <typename T, typename Index>
  static void Map(index_t i, const index_t row_size, T* out, T* state, const T* weight,
                  const Index* rows, const T* gradient, const T clip, const T epsilon,
                  const T rate, const T rescale) {
    const int64_t place = dense_place(i, rows, row_size);
    const T value = clipped(T(gradient[i] * rescale), clip);
    state[place] += T(value * value);
    out[place] = T(weight[place] - rate * (value / root(T(state[place] + epsilon))));
  }
};
// One call is for a row.
template <int req>
struct FtrlDnsRspDnsKernel {
  template <typename T, typename Index>
  static void Map(index_t stored, const int64_t row_size, T* out, T* z, T* n, const T* weight,
                  const Index* rows, const T* gradient, const T clip, const T lambda1,
                  const T beta, const T rate, const T decay, const T rescale) {
    for (int64_t i = stored * row_size; i < (stored + 1) * row_size; i++) {
      const int64_t place = dense_place(i, rows, row_size);
      FtrlUpdateKernel::Map(0, out + place, n + place, z + place, weight + place, gradient + i,
                            clip, rescale, beta, lambda1, rate, decay, OpReqType(req));
    }
  }
};

// ---- The same for every row of the weight: rows that are not stored have gradient 0. `sums` are
// the prefix sums of the marks of the stored rows.
template <typename T>
T dense_element(int64_t i, const int64_t* sums, const T* values, int64_t row_size) {
  const int64_t row = i / row_size, before = row == 0 ? 0 : sums[row - 1];
  return sums[row] > before ? values[before * row_size + i % row_size] : T(0);
}

template <int req, typename Device>
struct SGDMomStdDnsRspDnsKernel {
  template <typename T, typename Index>
  static void Map(int i, const int64_t row_size, T* out, T* momentum, const T* weight,
                  const Index*, const T* gradient, const int64_t* sums, const T clip,
                  const T factor, const T rate, const T decay, const T rescale) {
    const T value = dense_element(i, sums, gradient, row_size);
    SGDMomKernel::Map(0, out + i, momentum + i, weight + i, &value, clip, factor, rate, decay,
                      rescale, OpReqType(req));
  }
};
template <int req, typename Device>
struct AdamStdDnsRspDnsKernel {
  template <typename T, typename Index>
  static void Map(int i, const int64_t row_size, T* out, T* mean, T* variance, const T* weight,
                  const Index*, const T* gradient, const int64_t* sums, const T clip,
                  const T beta1, const T beta2, const T rate, const T decay, const T epsilon,
                  const T rescale) {
    const T value = dense_element(i, sums, gradient, row_size);
    AdamUpdateKernel::Map(0, out + i, mean + i, variance + i, weight + i, &value, clip, rescale,
                          beta1, beta2, rate, decay, epsilon, OpReqType(req));
  }
};
}  // namespace op
}  // namespace mxnet
