// libnvToolsExt.so.1: marks in a profiler's timeline, of which only the number is kept.
#include <atomic>
#include <cstdint>

#include "sim.h"

extern "C" uint64_t nvtxRangeStartA(const char*) {
  static std::atomic<uint64_t> last{0};
  cuda_sim::count("nvtxRangeStartA");
  return ++last;
}

extern "C" void nvtxRangeEnd(uint64_t) {}
