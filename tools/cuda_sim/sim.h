// What the simulated CUDA libraries share: device memory, streams, kernels and counters.
//
// Everything here is in libcudart.so.11.0; the other libraries link to it.
#pragma once

#include <cstddef>
#include <functional>

namespace cuda_sim {

// ---- Memory. An address of device memory can be computed with, but not read or written: host
// code that does so gets a SIGSEGV, as on a GPU. The simulator has the bytes elsewhere.

bool on_device(const void* address);
int device_of(const void* address);
void* accessible(const void* address);

// Where the simulator finds what is at a device address. A host address is returned unchanged.
template <typename T>
T* bytes(T* address) {
  return static_cast<T*>(accessible(address));
}

// ---- Streams. A stream is a thread that does its work in the order in which it was enqueued.

using Work = std::function<void()>;

// Enqueue `work` on a stream; a null pointer is the legacy default stream of the current device.
// `name` is what the counters and the timeline call it.
void enqueue(void* stream, const char* name, Work work);
int current_device();
int device_of_stream(void* stream);

// Wait for as long as the bytes take between two devices, by the option `link`.
void cross_link(double num_bytes);

// ---- Kernels.

struct Dim3 {
  unsigned x, y, z;
};

struct Launch {
  Dim3 grid, block;
  size_t shared_bytes;
  int device;
};

// Called at the launch: copies the arguments, and returns the work for the stream.
using Kernel = Work (*)(void** arguments, const Launch& launch);

void register_kernel(const char* mangled_name, Kernel kernel);

// ---- Counters, and the end of a program that needs what nobody has written.

void count(const char* name, double num_bytes = 0);
[[noreturn]] void stop(const char* format, ...);

}  // namespace cuda_sim
