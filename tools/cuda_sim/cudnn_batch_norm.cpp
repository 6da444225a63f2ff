// Batch normalisation of the simulated cuDNN, over each channel. Parameters and statistics are
// float32, or float64 for tensors of float64.
#include <algorithm>
#include <cmath>

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

int check_batch_norm(int mode, const TensorDescriptor* x, const TensorDescriptor* y) {
  if (mode == kPerActivation) stop("cuDNN's batch normalisation per activation is not simulated");
  return same_layout(*x, *y) ? kSuccess : kBadParam;
}

}  // namespace

extern "C" {

int cudnnDeriveBNTensorDescriptor(TensorDescriptor* derived, const TensorDescriptor* x, int mode) {
  if (mode == kPerActivation) stop("cuDNN's batch normalisation per activation is not simulated");
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
  const int status = check_batch_norm(mode, x_descriptor, y_descriptor);
  if (status != kSuccess) return status;
  const Layout layout = layout_of(*x_descriptor);
  const int type = x_descriptor->type;
  const double a = factor(type, alpha), b = factor(type, beta);
  enqueue_typed(handle, type, "cudnnBatchNormalizationForwardTraining", [=](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    const T* input = typed<T>(x);
    T* output = typed<T>(y);
    const double count = double(layout.sizes[0] * layout.num_places());
    const auto average = [=](void* running, long channel, double value) {
      if (running != nullptr)
        blend(typed<Sum>(running)[channel], average_factor, Sum(value),
              1 - average_factor);
    };
    const auto save = [](void* saved, long channel, double value) {
      if (saved != nullptr) typed<Sum>(saved)[channel] = Sum(value);
    };
    for (long channel = 0; channel < layout.sizes[1]; channel++) {
      const Moments moments = moments_of_channel(layout, channel, input);
      const double inverse_deviation = 1 / std::sqrt(moments.variance + epsilon);
      const double slope = typed<Sum>(scale)[channel] * inverse_deviation;
      const double shift = typed<Sum>(bias)[channel];
      layout.each_of_channel(channel, [&](long at) {
        blend(output[at], a, Sum((double(input[at]) - moments.mean) * slope + shift), b);
      });
      average(running_mean, channel, moments.mean);
      // cuDNN's running variance is that of the population which the batch is a sample of.
      average(running_variance, channel, moments.variance * count / std::max(1.0, count - 1));
      save(saved_mean, channel, moments.mean);
      save(saved_inverse_deviation, channel, inverse_deviation);
    }
  });
  return kSuccess;
}

int cudnnBatchNormalizationForwardInference(
    Handle* handle, int mode, const void* alpha, const void* beta,
    const TensorDescriptor* x_descriptor, const void* x, const TensorDescriptor* y_descriptor,
    void* y, const TensorDescriptor* /*parameters*/, const void* scale, const void* bias,
    const void* mean, const void* variance, double epsilon) {
  const int status = check_batch_norm(mode, x_descriptor, y_descriptor);
  if (status != kSuccess) return status;
  const Layout layout = layout_of(*x_descriptor);
  const int type = x_descriptor->type;
  const double a = factor(type, alpha), b = factor(type, beta);
  enqueue_typed(handle, type, "cudnnBatchNormalizationForwardInference", [=](auto zero) {
    using T = decltype(zero);
    using Sum = SumOf<T>;
    const T* input = typed<T>(x);
    T* output = typed<T>(y);
    for (long channel = 0; channel < layout.sizes[1]; channel++) {
      const auto read = [channel](const void* parameter) -> double {
        return typed<Sum>(parameter)[channel];
      };
      const double slope = read(scale) / std::sqrt(read(variance) + epsilon);
      const double center = read(mean), shift = read(bias);
      layout.each_of_channel(channel, [&](long at) {
        blend(output[at], a, Sum((double(input[at]) - center) * slope + shift), b);
      });
    }
  });
  return kSuccess;
}

int cudnnBatchNormalizationBackward(
    Handle* handle, int mode, const void* alpha_data, const void* beta_data,
    const void* alpha_parameters, const void* beta_parameters, const TensorDescriptor* x_descriptor,
    const void* x, const TensorDescriptor* dy_descriptor, const void* dy,
    const TensorDescriptor* dx_descriptor, void* dx, const TensorDescriptor* /*parameters*/,
    const void* scale, void* dscale, void* dbias, double epsilon, const void* saved_mean,
    const void* saved_inverse_deviation) {
  int status = check_batch_norm(mode, x_descriptor, dy_descriptor);
  if (status == kSuccess) status = check_batch_norm(mode, x_descriptor, dx_descriptor);
  if (status != kSuccess) return status;
  const Layout layout = layout_of(*x_descriptor);
  const int type = x_descriptor->type;
  const double a = factor(type, alpha_data), b = factor(type, beta_data);
  const double a_parameters = factor(type, alpha_parameters);
  const double b_parameters = factor(type, beta_parameters);
  enqueue_typed(handle, type, "cudnnBatchNormalizationBackward", [=](auto zero) {
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
      blend(typed<Sum>(dscale)[channel], a_parameters, Sum(weighted_sum),
            b_parameters);
      blend(typed<Sum>(dbias)[channel], a_parameters, Sum(sum), b_parameters);
    }
  });
  return kSuccess;
}

}  // extern "C"
