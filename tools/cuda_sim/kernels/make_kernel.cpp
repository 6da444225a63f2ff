// libcuda_sim_kernels.so: compiles an emulated kernel when MXNet launches it for the first time.
//
// precompile.py does the compiling; it leaves libraries in a folder of the cache, named after the
// headers that they were compiled from. With CUDA_SIM_RECORD set nothing is compiled, only listed.
#include <dlfcn.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../sim.h"

namespace {

namespace fs = std::filesystem;

const fs::path kSources = fs::path(__FILE__).parent_path();

std::string fnv1a(const std::string& data) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char byte : data) hash = (hash ^ byte) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016lx", static_cast<unsigned long>(hash));
  return digits;
}

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

fs::path cache() {
  if (const char* folder = std::getenv("CUDA_SIM_CACHE")) return folder;
  const char* home = std::getenv("HOME");
  return fs::path(home ? home : "/tmp") / ".cache" / "cuda_sim";
}

// The folder of the libraries that were compiled from the headers as they are now.
fs::path libraries() {
  std::vector<fs::path> headers;
  for (const auto& entry : fs::directory_iterator(kSources)) {
    if (entry.path().extension() == ".h") headers.push_back(entry.path());
  }
  std::sort(headers.begin(), headers.end());
  std::string all = contents(kSources.parent_path() / "sim.h");
  for (const fs::path& header : headers) all += contents(header);
  return cache() / fnv1a(all);
}

// MXNet's headers are beside the libmxnet.so that is loaded.
std::string mxnet_include() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        const fs::path path = info->dlpi_name;
        if (path.filename() != "libmxnet.so") return 0;
        *static_cast<std::string*>(result) = (path.parent_path() / "include").string();
        return 1;
      },
      &found);
  return found;
}

// What kernels.txt should have: `precompile.py --add-requested` adds these names to it.
void record(const std::string& name) {
  fs::create_directories(cache());
  std::ofstream(cache() / "requested.txt", std::ios::app) << name + "\n";
}

cuda_sim::Work no_work(void**, const cuda_sim::Launch&) {
  return [] {};
}

bool compile(const std::string& name) {
  const std::string script = (kSources / "precompile.py").string();
  const std::string folder = cache().string(), include = mxnet_include();
  const char* arguments[] = {"python3",   script.c_str(),  "--cache",    folder.c_str(),
                             "--include", include.c_str(), name.c_str(), nullptr};
  // Without these variables: a library that is preloaded here has no business in a compiler.
  std::vector<char*> environment;
  for (char** variable = environ; *variable; variable++) {
    if (std::strncmp(*variable, "LD_", 3) != 0) environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  pid_t process;
  int status;
  return posix_spawnp(&process, arguments[0], nullptr, nullptr,
                      const_cast<char* const*>(arguments), environment.data()) == 0 &&
         waitpid(process, &status, 0) == process && status == 0;
}

std::set<std::string>& registered() {
  static auto* names = new std::set<std::string>;
  return *names;
}

// Loading a library registers its kernels.
void load(const fs::path& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    std::fprintf(stderr, "cuda_sim: %s\n", dlerror());
    return;
  }
  auto names = static_cast<const char* const*>(dlsym(handle, "cuda_sim_kernel_names"));
  for (; names && *names; names++) registered().insert(*names);
}

}  // namespace

// Registers the emulation of a kernel. False, with a message, if there is none.
extern "C" bool cuda_sim_make_kernel(const char* mangled_name) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  static fs::path folder;
  if (folder.empty()) {
    folder = libraries();
    if (fs::exists(folder)) {
      for (const auto& entry : fs::directory_iterator(folder)) {
        const fs::path path = entry.path();
        const bool many = path.filename().string().rfind("many-", 0) == 0;
        if (many && path.extension() == ".so") load(path);
      }
    }
  }
  if (registered().count(mangled_name)) return true;
  record(mangled_name);
  // To list the kernels of a program in less time than compiling them one by one takes. What it
  // computes is wrong.
  if (std::getenv("CUDA_SIM_RECORD")) {
    cuda_sim::register_kernel(mangled_name, &no_work);
    return true;
  }
  const fs::path library = folder / (fnv1a(mangled_name) + ".so");
  if (!fs::exists(library) && !compile(mangled_name)) return false;
  load(library);
  return registered().count(mangled_name) > 0;
}
