// The functions of libcudart.so.11.0 that libmxnet imports, apart from launches (launch.cpp), and
// those of its neighbours that tests want. What each must do is in NVIDIA's documentation of the
// CUDA Runtime API; "API synchronization behavior" says which copies wait for what.
#include <cstdio>
#include <cstring>

#include "runtime.h"

using namespace cuda_sim;

// Leave the function with an error, kept for cudaGetLastError.
#define RETURN_ERROR(expression) \
  if (cudaError_t error = (expression)) return keep_error(error)

// ---- Devices

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  RETURN_ERROR(machine_state());
  *count = devices().size();
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGetDevice(int* device) {
  RETURN_ERROR(machine_state());
  *device = current_device();
  return cudaSuccess;
}

static cudaError_t check_device(int device) {
  if (cudaError_t error = machine_state()) return error;
  return device >= 0 && device < int(devices().size()) ? cudaSuccess : cudaErrorInvalidDevice;
}

EXPORTED cudaError_t cudaSetDevice(int device) {
  RETURN_ERROR(check_device(device));
  set_current_device(device);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = options().cuda.major * 1000 + options().cuda.minor * 10;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceSynchronize() {
  count("cudaDeviceSynchronize");
  RETURN_ERROR(device_state(current_device()));
  wait_for_device(current_device());
  RETURN_ERROR(device_state(current_device()));
  return cudaSuccess;
}

// A GPU of the Ampere generation but for the number of its multiprocessors, by which MXNet chooses
// how much work to start at once.
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  RETURN_ERROR(check_device(device));
  *properties = {};
  snprintf(properties->name, sizeof properties->name, "Simulated GPU %d",
           options().devices[device]);
  properties->totalGlobalMem = options().bytes_per_device;
  properties->major = options().capability.major;
  properties->minor = options().capability.minor;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 101376;
  properties->sharedMemPerMultiprocessor = 102400;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 1536;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->asyncEngineCount = 2;
  properties->cooperativeLaunch = 1;
  properties->pciBusID = options().devices[device] + 1;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  RETURN_ERROR(cudaGetDeviceProperties(&properties, device));
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = properties.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = properties.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = properties.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = properties.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[2]; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrCooperativeLaunch: *value = properties.cooperativeLaunch; break;
    case cudaDevAttrUnifiedAddressing: *value = properties.unifiedAddressing; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = properties.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = properties.sharedMemPerBlockOptin;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = properties.sharedMemPerMultiprocessor;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = properties.regsPerMultiprocessor;
      break;
    default: stop("cudaDeviceGetAttribute: attribute %d is not simulated", attribute);
  }
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  cudaDeviceProp properties;
  RETURN_ERROR(cudaGetDeviceProperties(&properties, device));
  snprintf(text, length, "%04x:%02x:00.0", properties.pciDomainID, properties.pciBusID);
  return cudaSuccess;
}

// ---- Peer access

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  RETURN_ERROR(check_device(device));
  RETURN_ERROR(check_device(peer));
  *can = can_access_peer(device, peer);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int device,
                                               int peer) {
  RETURN_ERROR(check_device(device));
  RETURN_ERROR(check_device(peer));
  if (device == peer) return keep_error(cudaErrorInvalidDevice);
  bool rank = attribute == cudaDevP2PAttrPerformanceRank;  // 0 is the best
  *value = rank ? 0 : can_access_peer(device, peer);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  RETURN_ERROR(device_state(current_device()));
  RETURN_ERROR(check_device(peer));
  if (peer == current_device()) return keep_error(cudaErrorInvalidDevice);
  if (!can_access_peer(current_device(), peer)) return keep_error(cudaErrorPeerAccessUnsupported);
  if (!enable_peer(current_device(), peer)) return keep_error(cudaErrorPeerAccessAlreadyEnabled);
  return cudaSuccess;
}

// ---- Errors

EXPORTED cudaError_t cudaGetLastError() { return last_error(true); }

EXPORTED cudaError_t cudaPeekAtLastError() { return last_error(false); }

EXPORTED const char* cudaGetErrorName(cudaError_t error) { return error_name(error); }

EXPORTED const char* cudaGetErrorString(cudaError_t error) { return error_text(error); }

// ---- Memory

EXPORTED cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  RETURN_ERROR(device_state(current_device()));
  RETURN_ERROR(allocate(current_device(), num_bytes, address));
  count("cudaMalloc", num_bytes);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMallocPitch(void** address, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(address, *pitch * height);
}

EXPORTED cudaError_t cudaFree(void* address) {
  RETURN_ERROR(device_state(current_device()));
  if (!address) return cudaSuccess;
  count("cudaFree");
  if (!inside_allocation(address, 1)) return keep_error(cudaErrorInvalidValue);
  wait_for_device(device_of(address));
  RETURN_ERROR(release(address));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  RETURN_ERROR(device_state(current_device()));
  *total = options().bytes_per_device;
  *free = *total - allocated_bytes(current_device());
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
  RETURN_ERROR(device_state(current_device()));
  RETURN_ERROR(allocate_pinned(num_bytes, address));
  count("cudaHostAlloc", num_bytes);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFreeHost(void* address) {
  RETURN_ERROR(machine_state());
  if (!address) return cudaSuccess;
  count("cudaFreeHost");
  for (size_t device = 0; device < devices().size(); device++) wait_for_device(device);
  RETURN_ERROR(release_pinned(address));
  return cudaSuccess;
}

// ---- Copies

namespace {

// A rectangle: `height` rows of `width` bytes, each a pitch after the one before.
struct Copy {
  char* to;
  size_t to_pitch;
  const char* from;
  size_t from_pitch, width, height;

  size_t num_bytes() const { return width * height; }

  void perform() const {
    char* to_bytes = bytes(to);
    const char* from_bytes = bytes(from);
    for (size_t row = 0; row < height; row++) {
      memcpy(to_bytes + row * to_pitch, from_bytes + row * from_pitch, width);
    }
  }
};

bool in_bounds(const void* address, size_t pitch, size_t width, size_t height) {
  return !on_device(address) || inside_allocation(address, pitch * (height - 1) + width);
}

bool between_devices(const Copy& copy) {
  return on_device(copy.to) && on_device(copy.from) && device_of(copy.to) != device_of(copy.from);
}

// What the counters and the timeline call a copy.
const char* kind_of(const Copy& copy) {
  if (between_devices(copy)) {
    int to = device_of(copy.to), from = device_of(copy.from);
    return peer_enabled(to, from) || peer_enabled(from, to) ? "peer direct" : "peer staged";
  }
  if (on_device(copy.to) && on_device(copy.from)) return "D2D";
  if (on_device(copy.to)) return is_pinned(copy.from) ? "H2D pinned" : "H2D pageable";
  if (on_device(copy.from)) return is_pinned(copy.to) ? "D2H pinned" : "D2H pageable";
  return "H2H";
}

bool direction_is(const Copy& copy, cudaMemcpyKind direction) {
  if (direction == cudaMemcpyDefault) return true;
  bool to_device = direction == cudaMemcpyHostToDevice || direction == cudaMemcpyDeviceToDevice;
  bool from_device = direction == cudaMemcpyDeviceToHost || direction == cudaMemcpyDeviceToDevice;
  return to_device == on_device(copy.to) && from_device == on_device(copy.from);
}

// Pageable memory that is read is copied before the call returns, and pageable memory that is
// written has been written when the call returns; with pinned memory, and between devices, the
// call returns at once. A synchronous call also waits for pinned memory.
cudaError_t start(const Copy& copy, cudaMemcpyKind direction, cudaStream_t handle, bool wait) {
  if (cudaError_t error = machine_state()) return error;
  auto stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (cudaError_t error = device_state(stream->device)) return error;
  if (copy.num_bytes() == 0) return cudaSuccess;
  if (!direction_is(copy, direction)) return cudaErrorInvalidValue;
  if (!in_bounds(copy.to, copy.to_pitch, copy.width, copy.height) ||
      !in_bounds(copy.from, copy.from_pitch, copy.width, copy.height)) {
    return cudaErrorInvalidValue;
  }
  const char* kind = kind_of(copy);
  count(kind, copy.num_bytes());
  Work work = [copy] {
    if (between_devices(copy)) cross_link(copy.num_bytes());
    copy.perform();
  };
  bool from_pageable = !on_device(copy.from) && !is_pinned(copy.from);
  if (from_pageable) {
    auto staged = std::make_shared<std::vector<char>>(copy.num_bytes());
    Copy{staged->data(), copy.width, copy.from, copy.from_pitch, copy.width, copy.height}.perform();
    Copy rest{copy.to, copy.to_pitch, staged->data(), copy.width, copy.width, copy.height};
    work = [staged, rest] { rest.perform(); };
  }
  Point end = enqueue_operation(stream, {kind, std::move(work), {}});
  bool to_pageable = !on_device(copy.to) && !is_pinned(copy.to);
  bool touches_pinned = is_pinned(copy.to) || is_pinned(copy.from);
  if (to_pageable || (wait && touches_pinned)) end.wait();
  return device_state(stream->device);
}

Copy row(void* to, const void* from, size_t num_bytes) {
  return {static_cast<char*>(to), num_bytes, static_cast<const char*>(from), num_bytes, num_bytes,
          1};
}

}  // namespace

EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes,
                                cudaMemcpyKind direction) {
  count("cudaMemcpy");
  return keep_error(start(row(to, from, num_bytes), direction, cudaStreamLegacy, true));
}

EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes,
                                     cudaMemcpyKind direction, cudaStream_t stream) {
  return keep_error(start(row(to, from, num_bytes), direction, stream, false));
}

EXPORTED cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                       size_t from_pitch, size_t width, size_t height,
                                       cudaMemcpyKind direction, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return keep_error(cudaErrorInvalidPitchValue);
  Copy copy{static_cast<char*>(to), to_pitch, static_cast<const char*>(from), from_pitch, width,
            height};
  return keep_error(start(copy, direction, stream, false));
}

EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from,
                                         int from_device, size_t num_bytes, cudaStream_t stream) {
  RETURN_ERROR(check_device(to_device));
  RETURN_ERROR(check_device(from_device));
  bool right = on_device(to) && on_device(from) && device_of(to) == to_device &&
               device_of(from) == from_device;
  if (!right) return keep_error(cudaErrorInvalidValue);
  RETURN_ERROR(device_state(to_device));
  RETURN_ERROR(device_state(from_device));
  return keep_error(start(row(to, from, num_bytes), cudaMemcpyDefault, stream, false));
}

EXPORTED cudaError_t cudaMemsetAsync(void* address, int value, size_t num_bytes,
                                     cudaStream_t handle) {
  RETURN_ERROR(machine_state());
  auto stream = find_stream(handle);
  if (!stream) return keep_error(cudaErrorInvalidResourceHandle);
  RETURN_ERROR(device_state(stream->device));
  if (num_bytes == 0) return cudaSuccess;
  if (!inside_allocation(address, num_bytes)) return keep_error(cudaErrorInvalidValue);
  count("memset", num_bytes);
  enqueue_operation(stream, {"memset", [=] { memset(bytes(address), value, num_bytes); }, {}});
  return cudaSuccess;
}

// ---- Streams and events

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  RETURN_ERROR(device_state(current_device()));
  count("cudaStreamCreate");
  *stream = reinterpret_cast<cudaStream_t>(create_stream(current_device()));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  RETURN_ERROR(machine_state());
  return keep_error(destroy_stream(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  count("cudaStreamSynchronize");
  RETURN_ERROR(machine_state());
  auto stream = find_stream(handle);
  if (!stream) return keep_error(cudaErrorInvalidResourceHandle);
  RETURN_ERROR(device_state(stream->device));
  stream->last().wait();
  RETURN_ERROR(device_state(stream->device));
  return cudaSuccess;
}

namespace {

struct Event {
  int device;
  std::mutex mutex;
  Point recorded;

  Point point() {
    std::lock_guard<std::mutex> lock(mutex);
    return recorded;
  }
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

}  // namespace

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  RETURN_ERROR(device_state(current_device()));
  *event = reinterpret_cast<cudaEvent_t>(new Event{current_device(), {}, {}});
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  RETURN_ERROR(machine_state());
  delete event_of(event);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  RETURN_ERROR(machine_state());
  auto stream = find_stream(handle);
  if (!stream || stream->device != event_of(event)->device) {
    return keep_error(cudaErrorInvalidResourceHandle);
  }
  RETURN_ERROR(device_state(stream->device));
  count("cudaEventRecord");
  std::lock_guard<std::mutex> lock(event_of(event)->mutex);
  event_of(event)->recorded = enqueue_operation(stream, {"cudaEventRecord", nullptr, {}});
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  RETURN_ERROR(machine_state());
  auto stream = find_stream(handle);
  if (!stream) return keep_error(cudaErrorInvalidResourceHandle);
  RETURN_ERROR(device_state(stream->device));
  count("cudaStreamWaitEvent");
  Point point = event_of(event)->point();
  enqueue_operation(stream, {"cudaStreamWaitEvent", nullptr, {point}});
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_ERROR(device_state(event_of(event)->device));
  return event_of(event)->point().passed() ? cudaSuccess : cudaErrorNotReady;
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  count("cudaEventSynchronize");
  RETURN_ERROR(machine_state());
  event_of(event)->point().wait();
  RETURN_ERROR(device_state(event_of(event)->device));
  return cudaSuccess;
}
