// Random numbers: repeatable by their seed, but not those of cuRAND.
#pragma once

#include <random>

#include "elementwise.h"

// cuRAND's state of 64 bytes, which MXNet allocates for each thread. Here it is a counter.
struct curandStatePhilox4_32_10 {
  uint64_t state;
  char unused[56];
};

namespace mxnet {
namespace common {
namespace random {

// SplitMix64 (Steele, Lea and Flood 2014): the output is a hash of a counter.
inline uint64_t next_random(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

inline void rand_generator_seed_kernel(curandStatePhilox4_32_10* states, const int size,
                                       uint32_t seed) {
  for (int i = 0; i < size; i++) {
    uint64_t state = (static_cast<uint64_t>(seed) << 32) + static_cast<uint64_t>(i);
    states[i].state = next_random(state);
  }
}

// Distributions of the standard library draw from a generator with this interface.
struct Bits {
  using result_type = uint64_t;
  uint64_t& state;
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t(0); }
  uint64_t operator()() { return next_random(state); }
};

template <typename Device, typename T>
struct RandGenerator {
  curandStatePhilox4_32_10* states_;
};
}  // namespace random
}  // namespace common

namespace op {
using common::random::Bits;
using common::random::RandGenerator;

// Thread `id` draws the numbers from id * step on, with a state of its own.
template <typename Generator, typename Draw>
void draw_all(index_t id, Generator generator, index_t size, index_t step, Draw draw) {
  Bits bits{generator.states_[id].state};
  for (index_t i = id * step; i < std::min(size, (id + 1) * step); i++) draw(i, bits);
}

inline double uniform(Bits& bits) { return (bits() >> 11) * 0x1p-53; }

inline double normal(Bits& bits) {
  return std::sqrt(-2 * std::log(1 - uniform(bits))) *
         std::cos(2 * mshadow_op::kPi * uniform(bits));
}

// Samples of `num_parameters` distributions, num_samples in all; draw(k, bits) is one of the k-th.
template <typename Generator, typename Out, typename Draw>
void draw_samples(index_t id, Generator generator, index_t size, index_t step,
                  index_t num_parameters, index_t num_samples, Out* out, Draw draw) {
  draw_all(id, generator, size, step, [&](index_t i, Bits& bits) {
    out[i] = Out(draw(i / (1 + (num_samples - 1) / num_parameters), bits));
  });
}

#define SAMPLE_OF_TWO(name, expression)                                                       \
  template <typename Device>                                                                  \
  struct name {                                                                               \
    template <typename Generator, typename Parameter, typename Out>                           \
    static void Map(index_t id, Generator generator, const index_t size, const index_t step,  \
                    index_t num_parameters, index_t num_samples, const Parameter* first,      \
                    const Parameter* second, Out* out) {                                      \
      auto draw = [&](index_t k, Bits& bits) {                                                \
        const Parameter a = first[k], b = second[k];                                          \
        return expression;                                                                    \
      };                                                                                      \
      draw_samples(id, generator, size, step, num_parameters, num_samples, out, draw);        \
    }                                                                                         \
  };
#define SAMPLE_OF_ONE(name, expression)                                                       \
  template <typename Device>                                                                  \
  struct name {                                                                               \
    template <typename Generator, typename Parameter, typename Out>                           \
    static void Map(index_t id, Generator generator, const index_t size, const index_t step,  \
                    index_t num_parameters, index_t num_samples, const Parameter* first,      \
                    Out* out) {                                                               \
      auto draw = [&](index_t k, Bits& bits) {                                                \
        const double a = static_cast<double>(first[k]);                                       \
        return expression;                                                                    \
      };                                                                                      \
      draw_samples(id, generator, size, step, num_parameters, num_samples, out, draw);        \
    }                                                                                         \
  };

// The probability of success `p` gives the number of failures before `count` successes.
inline double negative_binomial(double count, double p, Bits& bits) {
  const double mean = std::gamma_distribution<double>(count, (1 - p) / p)(bits);
  return static_cast<double>(std::poisson_distribution<int64_t>(mean)(bits));
}

SAMPLE_OF_TWO(SampleUniformKernel, a + (b - a) * uniform(bits))
SAMPLE_OF_TWO(SampleRandIntKernel,
              a + static_cast<int64_t>((bits() >> 1) % static_cast<uint64_t>(b - a)))
SAMPLE_OF_TWO(SampleNormalKernel, a + b * normal(bits))
SAMPLE_OF_TWO(SampleGammaKernel, std::gamma_distribution<double>(a, b)(bits))
SAMPLE_OF_TWO(SampleNegativeBinomialKernel, negative_binomial(a, b, bits))
SAMPLE_OF_TWO(SampleGeneralizedNegativeBinomialKernel,
              b == 0 ? std::poisson_distribution<int64_t>(a)(bits)
                     : negative_binomial(1. / b, 1. / (1. + b * a), bits))
SAMPLE_OF_ONE(SampleExponentialKernel, -std::log(1 - uniform(bits)) / a)
SAMPLE_OF_ONE(SamplePoissonKernel, std::poisson_distribution<int64_t>(a)(bits))

#undef SAMPLE_OF_TWO
#undef SAMPLE_OF_ONE

// Dropout keeps an element with probability `keep`, and multiplies it by 1 / keep.
template <typename Device, typename T>
class DropoutOp {
 public:
  struct DropoutKernel {
    template <typename Generator>
    static void Map(index_t id, Generator generator, const index_t size, const index_t step,
                    T* out, T* mask, const T* in, const float keep) {
      draw_all(id, generator, size, step, [&](index_t i, Bits& bits) {
        mask[i] = T(uniform(bits) < keep ? 1 / keep : 0);
        out[i] = T(in[i] * mask[i]);
      });
    }
  };
  struct BernoulliKernel {
    template <typename Generator>
    static void Map(index_t id, Generator generator, const index_t size, const index_t step,
                    T* mask, const float keep) {
      draw_all(id, generator, size, step, [&](index_t i, Bits& bits) {
        mask[i] = T(uniform(bits) < keep ? 1 / keep : 0);
      });
    }
  };
};

// ---- mx.np.random's uniform and normal: `noise`, between 0 and 1 or of the standard normal
// distribution, is scaled by two parameters, each an array or a number. The gradient of normal
// needs the unscaled number.
namespace mxnet_op {
struct ScaledUniform {
  template <typename T>
  static auto Map(T low, T high, float noise) {
    return low + (high - low) * noise;
  }
};
struct ScaledNormal {
  template <typename T>
  static auto Map(T mean, T deviation, float noise) {
    return mean + noise * deviation;
  }
};

template <typename Scale>
struct ScaledNoise {
  template <int ndim, typename In, typename Out>
  static void Map(index_t i, Shape<ndim> stride_1, Shape<ndim> stride_2, Shape<ndim> shape,
                  In* parameter_1, In* parameter_2, float* noise, Out* out) {
    const Shape<ndim> place = unravel(i, shape);
    out[i] = Out(Scale::Map(parameter_1[dot(place, stride_1)], parameter_2[dot(place, stride_2)],
                            noise[i]));
  }
  template <typename Out>
  static void Map(index_t i, float parameter_1, float parameter_2, float* noise, Out* out) {
    out[i] = Out(Scale::Map(parameter_1, parameter_2, noise[i]));
  }
  template <int ndim, typename In, typename Out>
  static void Map(index_t i, int scalar_position, Shape<ndim> stride, Shape<ndim> shape,
                  In* array, float scalar, float* noise, Out* out) {
    const float value = static_cast<float>(array[dot(unravel(i, shape), stride)]);
    out[i] = Out(scalar_position == 0 ? Scale::Map(scalar, value, noise[i])
                                      : Scale::Map(value, scalar, noise[i]));
  }
};

template <int ndim, typename In, typename Out>
struct uniform_kernel : ScaledNoise<ScaledUniform> {};
template <int ndim, typename In, typename Out>
struct uniform_one_scalar_kernel : ScaledNoise<ScaledUniform> {};
template <typename Out>
struct uniform_two_scalar_kernel : ScaledNoise<ScaledUniform> {};
template <int ndim, typename In, typename Out>
struct normal_kernel : ScaledNoise<ScaledNormal> {};
template <int ndim, typename In, typename Out>
struct normal_one_scalar_kernel : ScaledNoise<ScaledNormal> {};
template <typename Out>
struct normal_two_scalar_kernel : ScaledNoise<ScaledNormal> {};

template <typename In>
struct check_legal_scale_kernel {
  static void Map(index_t i, In* deviation, float* negative) {
    if (deviation[i] < In(0)) *negative = -1;
  }
};
}  // namespace mxnet_op
}  // namespace op
}  // namespace mxnet
