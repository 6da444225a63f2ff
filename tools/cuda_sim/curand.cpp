// libcurand.so.10, simulated: the host interface. The numbers are not NVIDIA's, but a seed and an
// offset determine them.
#include <cmath>
#include <cstdint>

#include "random_bits.h"
#include "sim.h"

using cuda_sim::bytes;
using cuda_sim::enqueue;
using cuda_sim::random_bits;
using cuda_sim::uniform;

namespace {

enum Status { kSuccess = 0, kLengthNotMultiple = 105 };

struct Generator {
  uint64_t seed = 0;
  uint64_t offset = 0;  // of the next number in the seed's sequence
  void* stream = nullptr;
};

// The place in the sequence is taken at the call, the numbers are made when the stream comes to it.
template <typename T, typename Fill>
int generate(Generator* generator, const char* name, T* output, size_t count, Fill fill) {
  const Generator start = *generator;
  generator->offset += count;
  enqueue(start.stream, name, [=] {
    T* numbers = bytes(output);
    for (size_t i = 0; i < count; i++) numbers[i] = fill(start.seed, start.offset + i);
  });
  return kSuccess;
}

template <typename T>
int generate_uniform(Generator* generator, const char* name, T* output, size_t count) {
  return generate(generator, name, output, count, [](uint64_t seed, uint64_t index) {
    return uniform<T>(random_bits(seed, index));
  });
}

// Two uniform numbers make two normal ones (Box and Muller 1958), which is why cuRAND refuses odd
// lengths.
template <typename T>
int generate_normal(Generator* generator, const char* name, T* output, size_t count, T mean,
                    T deviation) {
  if (count % 2 != 0) return kLengthNotMultiple;
  return generate(generator, name, output, count, [=](uint64_t seed, uint64_t index) {
    const double first = uniform<double>(random_bits(seed, index & ~uint64_t(1)));
    const double angle = 2 * M_PI * uniform<double>(random_bits(seed, index | 1));
    const double radius = std::sqrt(-2 * std::log(first));
    const double normal = radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
    return mean + deviation * static_cast<T>(normal);
  });
}

}  // namespace

extern "C" {

int curandCreateGenerator(Generator** generator, int /*type*/) {
  *generator = new Generator;
  return kSuccess;
}

int curandDestroyGenerator(Generator* generator) {
  delete generator;
  return kSuccess;
}

int curandSetStream(Generator* generator, void* stream) {
  generator->stream = stream;
  return kSuccess;
}

int curandSetPseudoRandomGeneratorSeed(Generator* generator, unsigned long long seed) {
  generator->seed = seed;
  return kSuccess;
}

int curandSetGeneratorOffset(Generator* generator, unsigned long long offset) {
  generator->offset = offset;
  return kSuccess;
}

int curandGenerate(Generator* generator, unsigned* output, size_t count) {
  return generate(generator, "curandGenerate", output, count, [](uint64_t seed, uint64_t index) {
    return static_cast<unsigned>(random_bits(seed, index) >> 32);
  });
}

int curandGenerateUniform(Generator* generator, float* output, size_t count) {
  return generate_uniform(generator, "curandGenerateUniform", output, count);
}

int curandGenerateUniformDouble(Generator* generator, double* output, size_t count) {
  return generate_uniform(generator, "curandGenerateUniformDouble", output, count);
}

int curandGenerateNormal(Generator* generator, float* output, size_t count, float mean,
                         float deviation) {
  return generate_normal(generator, "curandGenerateNormal", output, count, mean, deviation);
}

int curandGenerateNormalDouble(Generator* generator, double* output, size_t count, double mean,
                               double deviation) {
  return generate_normal(generator, "curandGenerateNormalDouble", output, count, mean, deviation);
}

}  // extern "C"
