// What the files of libcudart and libcuda share, beyond what sim.h gives to every library.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sim.h"

// What programs call, and find by its name.
#define EXPORTED extern "C"

namespace cuda_sim {

// ---- options.cpp: what the environment says; environment.py describes the variables.

struct Version {
  int major, minor;
  bool operator<(const Version& other) const {
    return std::make_pair(major, minor) < std::make_pair(other.major, other.minor);
  }
};

struct Options {
  std::vector<int> devices;  // index seen by the program -> number in the machine
  size_t bytes_per_device;
  Version capability;
  bool every_peer;
  std::vector<std::pair<int, int>> peers;  // with numbers in the machine, if not every_peer
  double link_bytes_per_second;  // between devices; 0 is no limit
  bool delays;
  unsigned seed;
  int failing_device = -1;  // number in the machine
  long launches_before_failure = 0;
  Version cuda;        // the newest CUDA that the driver supports
  Version newest_ptx;  // the newest PTX that the driver translates
  bool driver_too_old; // for CUDA 11.x with minor-version compatibility
  bool timeline;
  bool trace;
};

const Options& options();
bool can_access_peer(int device, int peer);  // in hardware; indices seen by the program

// ---- streams.cpp

class Stream;

// A place in a stream: everything up to the operation of this number.
struct Point {
  std::shared_ptr<Stream> stream;
  long number = 0;
  bool passed() const;
  void wait() const;
};

struct Operation {
  const char* name = "";      // for the timeline; lives as long as the process
  Work work;                  // not done if the device has failed
  std::vector<Point> after;   // waits for these first
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(int device, int number);
  const int device, number;  // number 0 is the device's legacy default stream

  Point push(Operation operation);
  Point last();  // the operation enqueued last
  bool passed(long number);
  void wait_for(long number);
  void close();  // the thread ends after the work enqueued so far
  bool closed();
  bool closed_and_empty();

 private:
  void run();
  void perform(Operation& operation);

  std::mutex mutex_;
  std::condition_variable arrived_, completed_one_;
  std::deque<Operation> queue_;
  long enqueued_ = 0, completed_ = 0;
  bool started_ = false, closed_ = false;
  std::mt19937 random_;
};

// A null handle is the current device's legacy default stream; nullptr for what is no stream.
std::shared_ptr<Stream> find_stream(void* handle);
Stream* create_stream(int device);
bool destroy_stream(void* handle);

// Enqueue with the order that the legacy default stream has to the device's other streams.
Point enqueue_operation(const std::shared_ptr<Stream>& stream, Operation operation);
void wait_for_device(int device);

// ---- devices.cpp: the state of each device

struct Device {
  std::atomic<int> error{0};  // sticky, as after an illegal address
  std::atomic<long> launches{0};
};

std::vector<std::unique_ptr<Device>>& devices();
void set_current_device(int device);
void fail(int device, cudaError_t error, const char* why);

// cudaSuccess, or why nothing works: no device, a driver too old, a fork, a failed device.
cudaError_t machine_state();
cudaError_t device_state(int device);

cudaError_t keep_error(cudaError_t error);  // for cudaGetLastError; returns it
cudaError_t last_error(bool clear);

// ---- memory.cpp

cudaError_t allocate(int device, size_t num_bytes, void** address);
cudaError_t release(void* address);
size_t allocated_bytes(int device);
bool inside_allocation(const void* address, size_t num_bytes);
cudaError_t allocate_pinned(size_t num_bytes, void** address);
cudaError_t release_pinned(void* address);
bool is_pinned(const void* address);

bool enable_peer(int device, int peer);  // false if it was enabled before
bool peer_enabled(int device, int peer);

// Whether the simulator has bytes of device memory there, or would have if more were allocated.
bool bytes_of_device(const void* address);
bool was_released(const void* bytes);  // false, too, if another thread is just at it

// While a kernel's work runs, bytes() does not give memory of devices that its own cannot access.
class KernelScope {
 public:
  explicit KernelScope(int device);
  ~KernelScope();
};

// ---- faults.cpp

extern thread_local const char* running_operation;  // by this thread; nullptr in host code
void explain_faults();

// ---- launch.cpp

// Check, count and enqueue a kernel; `make` returns the work, as Kernel does.
cudaError_t launch(void* stream, const char* name, const Launch& launch,
                   const std::function<Work()>& make);
bool has_machine_code(Version capability);

// ---- counters.cpp

const char* keep_name(const std::string& name);  // the same text, for the rest of the process
double seconds();
void record(const char* name, int device, int stream, double begin, double end);

// Write to standard error, and to the file CUDA_SIM_LOG; can be called in a signal's handler.
void say(const char* text);

// ---- errors.cpp

const char* error_name(int code);
const char* error_text(int code);

}  // namespace cuda_sim
