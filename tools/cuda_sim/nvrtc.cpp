// libnvrtc.so.11.2: compiles CUDA C++ for the host, by g++ with fused.h in front.
//
// What it gives as PTX has the lines that a driver looks at first, and instead of code the path of
// the shared library that was compiled (cuda.cpp loads it). Kernels must not use shared memory or
// __syncthreads(): the threads of a block run one after the other.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "sim.h"

#define EXPORTED extern "C"

using cuda_sim::stop;

namespace {

// As in nvrtc.h.
enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6, NO_NAME = 9 };

struct Program {
  std::string source;
  std::vector<std::string> expressions;
  std::map<std::string, std::string> lowered_names;
  std::string ptx, log;
};

// CUDA_SIM_NVRTC, which CUDA's NVRTC this is: 11.2 to 11.8.
int minor_version() {
  const char* text = getenv("CUDA_SIM_NVRTC");
  int minor = 8;
  if (text && *text && (sscanf(text, "11.%d", &minor) != 1 || minor < 2 || minor > 8)) {
    stop("CUDA_SIM_NVRTC must be 11.2 to 11.8, got '%s'", text);
  }
  return minor;
}

// The newest architecture that this NVRTC can compile for.
int newest_architecture() {
  if (minor_version() == 8) return 90;
  return minor_version() >= 4 ? 87 : 86;
}

// The number in --gpu-architecture=compute_86 or -arch=sm_86.
int architecture(int num_options, const char* const* options) {
  static const std::regex form("(--gpu-architecture|-arch)=(compute|sm)_(\\d+)");
  std::cmatch match;
  for (int i = 0; i < num_options; i++) {
    if (std::regex_match(options[i], match, form)) return std::stoi(match[3]);
  }
  return 52;
}

// The folder of this library and its neighbours.
std::string folder() {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&folder), &here);
  std::string path = here.dli_fname;
  return path.substr(0, path.rfind('/'));
}

std::string contents(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// fused.h, the source, and one exported launcher for each name expression and each kernel with C
// linkage. MXNet converts float16 by PTX instructions, which are replaced by functions of fused.h.
std::string host_source(Program& program) {
  static const std::regex to_half("asm\\s*\\([^;]*cvt\\.rn\\.f16\\.f32[^:]*:\\s*\"=h\"\\s*"
                                  "\\(([^;]*)\\)\\s*:\\s*\"f\"\\s*\\((.*)\\)\\s*\\)\\s*;");
  static const std::regex to_float("asm\\s*\\([^;]*cvt\\.f32\\.f16[^:]*:\\s*\"=f\"\\s*"
                                   "\\(([^;]*)\\)\\s*:\\s*\"h\"\\s*\\((.*)\\)\\s*\\)\\s*;");
  std::string source = std::regex_replace(program.source, to_half, "cuda_sim_to_half($1, $2);");
  source = std::regex_replace(source, to_float, "cuda_sim_to_float($1, $2);");
  std::string text = "#include \"fused.h\"\n" + source + "\n";
  for (const std::string& expression : program.expressions) {
    std::string lowered = std::regex_replace(expression, std::regex("\\W"), "_");
    program.lowered_names[expression] = lowered;
    text += "CUDA_SIM_EXPORT(" + lowered + ", (" + expression + "))\n";
  }
  static const std::regex kernel("extern\\s+\"C\"\\s+__global__\\s+void\\s+(\\w+)");
  for (std::sregex_iterator at(source.begin(), source.end(), kernel), end; at != end; ++at) {
    text += "CUDA_SIM_EXPORT(" + (*at)[1].str() + ", (" + (*at)[1].str() + "))\n";
  }
  return text;
}

// Compile once for all processes; return the library's path, or "" with the reason in `log`.
std::string compile(const std::string& text, std::string& log) {
  std::string kept = folder() + "/nvrtc";
  mkdir(kept.c_str(), 0777);
  std::string base = kept + "/" + std::to_string(std::hash<std::string>()(text));
  std::string library = base + ".so";
  if (access(library.c_str(), R_OK) == 0) return library;
  static int number = 0;
  std::string own = base + "." + std::to_string(getpid()) + "." + std::to_string(number++);
  std::ofstream(own + ".cpp") << text;
  std::string sources = __FILE__;
  sources = sources.substr(0, sources.rfind('/'));
  std::string command = "g++ -std=c++17 -O1 -w -shared -fPIC -I '" + sources + "' '" + own +
                        ".cpp' -L '" + folder() + "' -l:libcudart.so.11.0 -o '" + own +
                        ".so' 2> '" + own + ".log'";
  int status = system(command.c_str());
  log = contents(own + ".log");
  if (status == 0) rename((own + ".so").c_str(), library.c_str());
  unlink((own + ".cpp").c_str());
  unlink((own + ".log").c_str());
  return status == 0 ? library : "";
}

template <typename Text>
Result copy_out(const std::string& text, Text to) {
  memcpy(to, text.c_str(), text.size() + 1);
  return SUCCESS;
}

}  // namespace

EXPORTED Result nvrtcVersion(int* major, int* minor) {
  *major = 11;
  *minor = minor_version();
  return SUCCESS;
}

EXPORTED Result nvrtcCreateProgram(Program** program, const char* source, const char*,
                                   int num_headers, const char* const*, const char* const*) {
  if (num_headers) stop("nvrtcCreateProgram with headers is not simulated");
  *program = new Program{source, {}, {}, {}, {}};
  return SUCCESS;
}

EXPORTED Result nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return SUCCESS;
}

EXPORTED Result nvrtcAddNameExpression(Program* program, const char* expression) {
  program->expressions.push_back(expression);
  return SUCCESS;
}

EXPORTED Result nvrtcCompileProgram(Program* program, int num_options, const char* const* options) {
  int target = architecture(num_options, options);
  if (target > newest_architecture()) {
    program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
    return INVALID_OPTION;
  }
  cuda_sim::count("nvrtcCompileProgram", program->source.size());
  std::string library = compile(host_source(*program), program->log);
  if (library.empty()) return COMPILATION;
  program->ptx = "// Compiled for the host by the simulated NVRTC\n.version 7." +
                 std::to_string(minor_version()) + "\n.target sm_" + std::to_string(target) +
                 "\n.address_size 64\n// cuda_sim: " + library + "\n";
  return SUCCESS;
}

EXPORTED Result nvrtcGetLoweredName(Program* program, const char* expression, const char** name) {
  auto found = program->lowered_names.find(expression);
  if (found == program->lowered_names.end()) return NO_NAME;
  *name = found->second.c_str();
  return SUCCESS;
}

EXPORTED Result nvrtcGetPTXSize(Program* program, size_t* size) {
  *size = program->ptx.size() + 1;
  return SUCCESS;
}

EXPORTED Result nvrtcGetPTX(Program* program, char* text) { return copy_out(program->ptx, text); }

EXPORTED Result nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return SUCCESS;
}

EXPORTED Result nvrtcGetProgramLog(Program* program, char* text) {
  return copy_out(program->log, text);
}

EXPORTED const char* nvrtcGetErrorString(Result result) {
  switch (result) {
    case SUCCESS: return "NVRTC_SUCCESS";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    case NO_NAME: return "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
  }
  return "NVRTC_ERROR unknown";
}
