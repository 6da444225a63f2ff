// The functions of libcuda.so.1, the driver, that libmxnet imports and gluonpar calls. Devices,
// streams and errors are those of libcudart.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "runtime.h"

using namespace cuda_sim;

namespace {

// The numbers of the driver's results are those of the runtime's errors.
CUresult result_of(cudaError_t error) { return static_cast<CUresult>(error); }

CUresult check_device(CUdevice device) {
  if (cudaError_t error = machine_state()) return result_of(error);
  bool exists = device >= 0 && device < int(devices().size());
  return exists ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

// A kernel that nvrtc.cpp compiled for the host.
using Make = Work (*)(void** arguments, const Launch& launch);
struct Function {
  const char* name;
  Make make;
};

// What follows `key` on its line of the PTX, "" if there is none.
std::string after(const std::string& ptx, const std::string& key) {
  size_t start = ptx.find(key);
  if (start == std::string::npos) return "";
  start += key.size();
  return ptx.substr(start, ptx.find('\n', start) - start);
}

CUresult load_module(CUmodule* module, const std::string& ptx) {
  if (cudaError_t error = device_state(current_device())) return result_of(error);
  Version version{};
  int target = 0;
  sscanf(after(ptx, ".version ").c_str(), "%d.%d", &version.major, &version.minor);
  sscanf(after(ptx, ".target ").c_str(), "sm_%d", &target);
  std::string path = after(ptx, "// cuda_sim: ");
  if (path.empty() || target == 0) return CUDA_ERROR_INVALID_PTX;
  if (options().newest_ptx < version) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
  Version capability = options().capability;
  if (target > capability.major * 10 + capability.minor) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) stop("%s", dlerror());
  count("cuModuleLoadData", ptx.size());
  *module = reinterpret_cast<CUmodule>(library);
  return CUDA_SUCCESS;
}

}  // namespace

EXPORTED CUresult cuInit(unsigned) {
  // A driver that is too old for the runtime still answers by itself.
  return devices().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

EXPORTED CUresult cuDriverGetVersion(int* version) {
  return result_of(cudaDriverGetVersion(version));
}

EXPORTED CUresult cuDeviceGetCount(int* count) {
  *count = devices().size();
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGet(CUdevice* device, int index) {
  if (index < 0 || index >= int(devices().size())) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  snprintf(name, length, "Simulated GPU %d", options().devices.at(device));
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) {
    *value = options().capability.major;
  } else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) {
    *value = options().capability.minor;
  } else {
    auto same = static_cast<cudaDeviceAttr>(attribute);
    return result_of(cudaDeviceGetAttribute(value, same, device));
  }
  return CUDA_SUCCESS;
}

// A driver that is too old for the runtime still answers.
EXPORTED CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  const int num_devices = devices().size();
  if (device < 0 || peer < 0 || device >= num_devices || peer >= num_devices)
    return CUDA_ERROR_INVALID_DEVICE;
  *can = can_access_peer(device, peer);
  return CUDA_SUCCESS;
}

// A device's context is its number, plus one so that it is not null.
EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (CUresult result = check_device(device)) return result;
  *context = reinterpret_cast<CUcontext>(intptr_t(device + 1));
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuGetErrorString(CUresult result, const char** text) {
  *text = error_text(result);
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return load_module(module, static_cast<const char*>(image));
}

EXPORTED CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*,
                                     void**) {
  return load_module(module, static_cast<const char*>(image));
}

// The code stays loaded: a stream may have work of it that is not done yet.
EXPORTED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORTED CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  void* make = dlsym(module, (std::string("cuda_sim_launch_") + name).c_str());
  if (!make) return CUDA_ERROR_NOT_FOUND;
  auto* found = new Function{keep_name(name), reinterpret_cast<Make>(make)};
  *function = reinterpret_cast<CUfunction>(found);
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                                 unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned shared_bytes, CUstream stream,
                                 void** arguments, void**) {
  auto* function = reinterpret_cast<Function*>(handle);
  Launch how{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes,
             current_device()};
  count("kernel of NVRTC");
  auto make = [&] { return function->make(arguments, how); };
  return result_of(launch(stream, function->name, how, make));
}
