// The state of each device and of each host thread: errors, the current device, a fork.
#include <pthread.h>

#include "runtime.h"

namespace cuda_sim {
namespace {

thread_local int this_threads_device = 0;
thread_local cudaError_t this_threads_error = cudaSuccess;
bool forked = false;

}  // namespace

std::vector<std::unique_ptr<Device>>& devices() {
  static auto* result = [] {
    auto* all = new std::vector<std::unique_ptr<Device>>;
    for (size_t i = 0; i < options().devices.size(); i++) all->emplace_back(new Device);
    // A process forked from one that has used CUDA has no threads that do the streams' work.
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    explain_faults();
    return all;
  }();
  return *result;
}

int current_device() { return this_threads_device; }

void set_current_device(int device) { this_threads_device = device; }

void fail(int device, cudaError_t error, const char* why) {
  say(("cuda_sim: gpu " + std::to_string(device) + " fails: " + why + "\n").c_str());
  devices()[device]->error = error;
}

cudaError_t machine_state() {
  if (options().driver_too_old) return cudaErrorInsufficientDriver;
  if (devices().empty()) return cudaErrorNoDevice;
  return forked ? cudaErrorInitializationError : cudaSuccess;
}

cudaError_t device_state(int device) {
  cudaError_t error = machine_state();
  return error ? error : static_cast<cudaError_t>(devices()[device]->error.load());
}

cudaError_t keep_error(cudaError_t error) {
  if (error != cudaSuccess) this_threads_error = error;
  return error;
}

cudaError_t last_error(bool clear) {
  cudaError_t result = this_threads_error;
  if (clear) this_threads_error = cudaSuccess;
  if (result == cudaSuccess && !devices().empty()) result = device_state(this_threads_device);
  return result;
}

}  // namespace cuda_sim
