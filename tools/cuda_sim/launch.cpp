// Kernels: libmxnet registers its own by their mangled names while it is loaded; the library of
// simulated kernels registers those that it has. A launch brings the two together.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <unordered_map>

#include "runtime.h"

namespace cuda_sim {
namespace {

const char* const KERNELS = "libcuda_sim_kernels.so";

struct Function {
  const char* mangled_name;
  const char* shown = nullptr;  // the demangled name, once the function was launched
  Kernel kernel = nullptr;
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const void*, Function> functions;  // by the address that launches it
  std::unordered_map<std::string, Kernel> kernels;      // by mangled name
};

Table& table() {
  static Table* result = new Table;
  return *result;
}

Kernel registered(const char* mangled_name) {
  std::lock_guard<std::mutex> lock(table().mutex);
  auto found = table().kernels.find(mangled_name);
  return found == table().kernels.end() ? nullptr : found->second;
}

// Load the kernels' library, which lies beside this one; return why not, or "".
std::string load_kernels(void** library) {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&load_kernels), &here);
  std::string path = here.dli_fname;
  path = path.substr(0, path.rfind('/') + 1) + KERNELS;
  *library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  return *library ? "" : dlerror();
}

std::string demangled(const char* name) {
  int status;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = text ? text : name;
  free(text);
  return result;
}

// The simulated kernel; compiled now, which may take seconds, if nobody registered it before.
Kernel find_kernel(const char* mangled_name) {
  static std::mutex loading;
  std::lock_guard<std::mutex> lock(loading);
  static void* library;
  static const std::string why_not_loaded = load_kernels(&library);
  if (Kernel kernel = registered(mangled_name)) return kernel;
  using Make = bool (*)(const char*);
  Make make = nullptr;
  if (library) make = reinterpret_cast<Make>(dlsym(library, "cuda_sim_make_kernel"));
  if (make && make(mangled_name)) {
    if (Kernel kernel = registered(mangled_name)) return kernel;
  }
  stop("a kernel that is not simulated:\n%s\n%s\n%s", mangled_name,
       demangled(mangled_name).c_str(), why_not_loaded.c_str());
}

const Function& find_function(const void* address) {
  std::unique_lock<std::mutex> lock(table().mutex);
  auto found = table().functions.find(address);
  if (found == table().functions.end()) stop("%p is launched, but not a kernel", address);
  Function& function = found->second;
  if (function.kernel) return function;
  lock.unlock();
  Kernel kernel = find_kernel(function.mangled_name);
  const char* shown = keep_name(demangled(function.mangled_name));
  lock.lock();
  function.shown = shown;
  function.kernel = kernel;
  return function;
}

bool possible(const Launch& launch) {
  const Dim3 &grid = launch.grid, &block = launch.block;
  size_t threads = size_t(block.x) * block.y * block.z;
  bool block_fits = threads >= 1 && threads <= 1024 && block.z <= 64;
  bool grid_fits = grid.x >= 1 && grid.x <= 2147483647u && grid.y >= 1 && grid.y <= 65535 &&
                   grid.z >= 1 && grid.z <= 65535;
  return block_fits && grid_fits;
}

bool fails_now(int device) {
  bool chosen = options().devices[device] == options().failing_device;
  return devices()[device]->launches++ >= options().launches_before_failure && chosen;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

void register_kernel(const char* mangled_name, Kernel kernel) {
  std::lock_guard<std::mutex> lock(table().mutex);
  table().kernels[mangled_name] = kernel;
}

// The wheel has machine code for 5.0, 6.0, 7.0, 8.0 and 8.6, which later minor versions run, and
// no PTX that a driver could translate for others.
bool has_machine_code(Version capability) {
  return capability.major >= 5 && capability.major <= 8;
}

cudaError_t launch(void* handle, const char* name, const Launch& launch,
                   const std::function<Work()>& make) {
  int device = launch.device;
  if (cudaError_t error = machine_state()) return error;
  auto stream = find_stream(handle);
  if (!stream || stream->device != device) return cudaErrorInvalidResourceHandle;
  if (cudaError_t error = device_state(device)) return error;
  if (!possible(launch)) return cudaErrorInvalidConfiguration;
  count("kernel");
  Work work;
  if (fails_now(device)) {
    work = [device] { fail(device, cudaErrorIllegalAddress, "CUDA_SIM_FAIL_AFTER says so"); };
  } else {
    KernelScope scope(device);
    work = make();
  }
  Work in_scope = [device, work = std::move(work)] {
    KernelScope scope(device);
    work();
  };
  enqueue_operation(stream, {name, std::move(in_scope), {}});
  return cudaSuccess;
}

}  // namespace cuda_sim

using namespace cuda_sim;

// ---- What the host code that nvcc generates calls.

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}

EXPORTED void __cudaUnregisterFatBinary(void**) {}

EXPORTED char __cudaInitModule(void**) { return 1; }

// Variables in device memory: libmxnet registers some, and no simulated kernel reads them.
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORTED void __cudaRegisterFunction(void**, const char* address, char*, const char* mangled_name,
                                     int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(table().mutex);
  table().functions[address] = {mangled_name};
}

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                              cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchKernel(const void* address, dim3 grid, dim3 block, void** arguments,
                                      size_t shared_bytes, cudaStream_t stream) {
  if (cudaError_t error = device_state(current_device())) return keep_error(error);
  if (!has_machine_code(options().capability)) {
    return keep_error(cudaErrorNoKernelImageForDevice);
  }
  const Function& function = find_function(address);
  Launch how{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes,
             current_device()};
  auto make = [&] { return function.kernel(arguments, how); };
  return keep_error(launch(stream, function.shown, how, make));
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (cudaError_t error = device_state(current_device())) return keep_error(error);
  Version capability = options().capability;
  if (!has_machine_code(capability)) return keep_error(cudaErrorNoKernelImageForDevice);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = capability.major * 10 + capability.minor;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* num_blocks, const void*, int, size_t, unsigned) {
  *num_blocks = 2;
  return cudaSuccess;
}
