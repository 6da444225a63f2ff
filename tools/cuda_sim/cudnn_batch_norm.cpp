// Batch normalisation of the simulated cuDNN, over each channel. Parameters and statistics are
// float32, or float64 for tensors of float64.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "cudnn_tensors.h"

using namespace cuda_sim;
using namespace cuda_sim::cudnn;

namespace {

enum BatchNormMode { kPerActivation = 0, kSpatial = 1, kSpatialPersistent = 2 };

struct Moments {
  double mean, variance;
};

template <typename T>
Moments moments_of_channel(const Layout& layout, long channel, const T* x) {
  const double count = double(layout.sizes[0] * layout.num_places());
  double mean = 0, variance = 0;
  layout.each_of_channel(channel, [&](long at) { mean += double(x[at]); });
  mean /= count;
  layout.each_of_channel(channel, [&](long at) {
    variance += (double(x[at]) - mean) * (double(x[at]) - mean);
  });
  return {mean, variance / count};
}

// y = alpha * ((x - center) * slope + shift) + beta * y, for one channel.
template <typename T>
void normalize(const Layout& layout, long channel, const T* x, T* y, double center, double slope,
               double shift, double alpha, double beta) {
  layout.each_of_channel(channel, [&](long at) {
    blend(y[at], alpha, SumOf<T>((double(x[at]) - center) * slope + shift), beta);
  });
}

void check_mode(int mode) {
  if (mode == kPerActivation) stop("cuDNN's batch normalisation per activation is not simulated");
}

// Enqueue function(T(), layout), for tensors that must have the type and layout of x.
template <typename Function>
int enqueue_batch_norm(Handle* handle, const char* name, int mode, const TensorDescriptor& x,
                       std::initializer_list<const TensorDescriptor*> others, Function function) {
  check_mode(mode);
  for (const TensorDescriptor* other : others) {
    if (!same_layout(x, *other)) return kBadParam;
  }
  const Layout layout = layout_of(x);
  enqueue_typed(handle, x.type, name, [=](auto zero) { function(zero, layout); });
  return kSuccess;
}

}  // namespace

extern "C" {

int cudnnDeriveBNTensorDescriptor(TensorDescriptor* derived, const TensorDescriptor* x, int mode) {
  check_mode(mode);
  const int channels = x->sizes[1], num_dimensions = std::max(4, x->num_dimensions);
  TensorDescriptor result;
  result.type = x->type == kDouble ? kDouble : kFloat;
  result.num_dimensions = num_dimensions;
  for (int i = 0; i < num_dimensions; i++) result.sizes[i] = result.strides[i] = 1;
  result.sizes[1] = result.strides[0] = channels;
  *derived = result;
  return kSuccess;
}

int cudnnBatchNormalizationForwardTraining(
    Handle* handle, int mode, const void* alpha, const void* beta,
    const TensorDescriptor* x_descriptor, const void* x, const TensorDescriptor* y_descriptor,
    void* y, const TensorDescriptor* /*parameters*/, const void* scale, const void* bias,
    double average_factor, void* running_mean, void* running_variance, double epsilon,
    void* saved_mean, void* saved_inverse_deviation) {
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  const auto work = [=](auto zero, const Layout& layout) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    const T* input = typed<T>(x);
    T* output = typed<T>(y);
    const double count = double(layout.sizes[0] * layout.num_places());
    const auto average = [=](void* running, long channel, double value) {
      if (running == nullptr) return;
      blend(typed<Sum>(running)[channel], average_factor, Sum(value), 1 - average_factor);
    };
    const auto save = [](void* saved, long channel, double value) {
      if (saved != nullptr) typed<Sum>(saved)[channel] = Sum(value);
    };
    for (long channel = 0; channel < layout.sizes[1]; channel++) {
      const Moments moments = moments_of_channel(layout, channel, input);
      const double inverse_deviation = 1 / std::sqrt(moments.variance + epsilon);
      const double slope = typed<Sum>(scale)[channel] * inverse_deviation;
      const double shift = typed<Sum>(bias)[channel];
      normalize(layout, channel, input, output, moments.mean, slope, shift, a, b);
      average(running_mean, channel, moments.mean);
      // cuDNN's running variance is that of the population which the batch is a sample of.
      average(running_variance, channel, moments.variance * count / std::max(1.0, count - 1));
      save(saved_mean, channel, moments.mean);
      save(saved_inverse_deviation, channel, inverse_deviation);
    }
  };
  return enqueue_batch_norm(handle, "cudnnBatchNormalizationForwardTraining", mode, *x_descriptor,
                            {y_descriptor}, work);
}

int cudnnBatchNormalizationForwardInference(
    Handle* handle, int mode, const void* alpha, const void* beta,
    const TensorDescriptor* x_descriptor, const void* x, const TensorDescriptor* y_descriptor,
    void* y, const TensorDescriptor* /*parameters*/, const void* scale, const void* bias,
    const void* mean, const void* variance, double epsilon) {
  const double a = factor(x_descriptor->type, alpha), b = factor(x_descriptor->type, beta);
  const auto work = [=](auto zero, const Layout& layout) {
    using T = decltype(zero);
    for (long channel = 0; channel < layout.sizes[1]; channel++) {
      const auto read = [channel](const void* parameter) -> double {
        return typed<SumOf<T>>(parameter)[channel];
      };
      const double slope = read(scale) / std::sqrt(read(variance) + epsilon);
      normalize(layout, channel, typed<T>(x), typed<T>(y), read(mean), slope, read(bias), a, b);
    }
  };
  return enqueue_batch_norm(handle, "cudnnBatchNormalizationForwardInference", mode,
                            *x_descriptor, {y_descriptor}, work);
}

int cudnnBatchNormalizationBackward(
    Handle* handle, int mode, const void* alpha_data, const void* beta_data,
    const void* alpha_parameters, const void* beta_parameters, const TensorDescriptor* x_descriptor,
    const void* x, const TensorDescriptor* dy_descriptor, const void* dy,
    const TensorDescriptor* dx_descriptor, void* dx, const TensorDescriptor* /*parameters*/,
    const void* scale, void* dscale, void* dbias, double epsilon, const void* saved_mean,
    const void* saved_inverse_deviation) {
  const int type = x_descriptor->type;
  const double a = factor(type, alpha_data), b = factor(type, beta_data);
  const double a_parameters = factor(type, alpha_parameters);
  const double b_parameters = factor(type, beta_parameters);
  const auto work = [=](auto zero, const Layout& layout) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    const T* input = typed<T>(x);
    const T* gradient = typed<T>(dy);
    T* result = typed<T>(dx);
    const double count = double(layout.sizes[0] * layout.num_places());
    for (long channel = 0; channel < layout.sizes[1]; channel++) {
      double mean, inverse_deviation;
      if (saved_mean != nullptr && saved_inverse_deviation != nullptr) {
        mean = typed<Sum>(saved_mean)[channel];
        inverse_deviation = typed<Sum>(saved_inverse_deviation)[channel];
      } else {
        const Moments moments = moments_of_channel(layout, channel, input);
        mean = moments.mean;
        inverse_deviation = 1 / std::sqrt(moments.variance + epsilon);
      }
      double sum = 0, weighted_sum = 0;
      layout.each_of_channel(channel, [&](long at) {
        sum += double(gradient[at]);
        weighted_sum += double(gradient[at]) * (double(input[at]) - mean) * inverse_deviation;
      });
      const double slope = typed<Sum>(scale)[channel] * inverse_deviation;
      layout.each_of_channel(channel, [&](long at) {
        const double normalized = (double(input[at]) - mean) * inverse_deviation;
        const double centered = double(gradient[at]) - (sum + normalized * weighted_sum) / count;
        blend(result[at], a, Sum(slope * centered), b);
      });
      blend(typed<Sum>(dscale)[channel], a_parameters, Sum(weighted_sum), b_parameters);
      blend(typed<Sum>(dbias)[channel], a_parameters, Sum(sum), b_parameters);
    }
  };
  return enqueue_batch_norm(handle, "cudnnBatchNormalizationBackward", mode, *x_descriptor,
                            {dy_descriptor, dx_descriptor}, work);
}

}  // extern "C"
