// Random numbers by seed and index, for curand.cpp and cudnn.cpp.
#pragma once

#include <cmath>
#include <cstdint>

namespace cuda_sim {

// Number `index` of a seed's sequence (SplitMix64: Steele, Lea and Flood 2014).
inline uint64_t random_bits(uint64_t seed, uint64_t index) {
  uint64_t bits = seed * 0xd1342543de82ef95u + (index + 1) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// In (0, 1], like cuRAND's, which excludes zero and includes one. float has 24 digits, double 53.
template <typename T>
T uniform(uint64_t bits) {
  constexpr int digits = sizeof(T) == sizeof(float) ? 24 : 53;
  return std::ldexp(static_cast<T>((bits >> (64 - digits)) + 1), -digits);
}

}  // namespace cuda_sim
