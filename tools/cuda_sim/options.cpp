// What the environment says about the simulated machine, read once.
#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "runtime.h"

namespace cuda_sim {
namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

[[noreturn]] void refuse(const char* name, const char* wanted, const std::string& got) {
  stop("%s must be %s, got '%s'", name, wanted, got.c_str());
}

long number(const char* name, const char* otherwise, long least) {
  std::string text = variable(name, otherwise);
  char* end;
  long value = strtol(text.c_str(), &end, 10);
  if (*end || value < least) refuse(name, "a whole number that is not too small", text);
  return value;
}

Version version(const char* name, const char* otherwise) {
  std::string text = variable(name, otherwise);
  Version result{};
  if (sscanf(text.c_str(), "%d.%d", &result.major, &result.minor) != 2) {
    refuse(name, "two numbers with a point between them", text);
  }
  return result;
}

bool flag(const char* name) { return variable(name, "0") != "0"; }

// CUDA_VISIBLE_DEVICES as the driver reads it: a list that ends at the first that does not exist.
std::vector<int> visible_devices(int num_devices) {
  std::vector<int> result;
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) {
    for (int i = 0; i < num_devices; i++) result.push_back(i);
    return result;
  }
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    char* end;
    long device = strtol(part.c_str(), &end, 10);
    bool repeated = std::find(result.begin(), result.end(), device) != result.end();
    if (end == part.c_str() || *end || device < 0 || device >= num_devices || repeated) break;
    result.push_back(device);
  }
  return result;
}

// The first driver of each branch, with its CUDA version. PTX 7.n came with CUDA 11.n, and
// PTX 8.n with CUDA 12.n.
struct Branch {
  int driver;
  Version cuda;
};
const Branch BRANCHES[] = {
    {560, {12, 6}}, {555, {12, 5}}, {550, {12, 4}}, {545, {12, 3}}, {535, {12, 2}},
    {530, {12, 1}}, {525, {12, 0}}, {520, {11, 8}}, {515, {11, 7}}, {510, {11, 6}},
    {495, {11, 5}}, {470, {11, 4}}, {465, {11, 3}}, {460, {11, 2}}, {455, {11, 1}},
    {450, {11, 0}}, {440, {10, 2}}, {418, {10, 1}}, {410, {10, 0}},
};

void read_driver(Options& result) {
  std::string text = variable("CUDA_SIM_DRIVER", "550.54.14");
  int branch = 0, release = 0;
  if (sscanf(text.c_str(), "%d.%d", &branch, &release) < 1) {
    refuse("CUDA_SIM_DRIVER", "a driver's version, such as 450.80.02", text);
  }
  const Branch* found = std::find_if(std::begin(BRANCHES), std::end(BRANCHES),
                                     [&](const Branch& one) { return one.driver <= branch; });
  if (found == std::end(BRANCHES)) refuse("CUDA_SIM_DRIVER", "at least 410.48", text);
  result.cuda = found->cuda;
  result.newest_ptx = {found->cuda.major - 4, std::min(found->cuda.minor, 5)};
  if (found->cuda.major == 11) result.newest_ptx = {7, found->cuda.minor};
  // Minor-version compatibility: any CUDA 11.x runs on drivers from 450.80.02.
  result.driver_too_old = branch < 450 || (branch == 450 && release < 80);
}

void read_peers(Options& result) {
  std::string text = variable("CUDA_SIM_PEERS", "all");
  result.every_peer = text == "all";
  if (text == "all" || text == "none") return;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int first, second;
    if (sscanf(part.c_str(), "%d-%d", &first, &second) != 2) {
      refuse("CUDA_SIM_PEERS", "all, none or pairs such as 0-1,2-3", text);
    }
    result.peers.push_back({first, second});
  }
}

void read_failure(Options& result) {
  std::string text = variable("CUDA_SIM_FAIL_AFTER", "");
  if (text.empty()) return;
  const char* form = "%d:%ld";
  if (sscanf(text.c_str(), form, &result.failing_device, &result.launches_before_failure) != 2) {
    refuse("CUDA_SIM_FAIL_AFTER", "device:launches, such as 1:100", text);
  }
}

Options read_options() {
  Options result{};
  result.devices = visible_devices(number("CUDA_SIM_DEVICES", "2", 0));
  result.bytes_per_device = number("CUDA_SIM_BYTES", "4294967296", 1);
  result.capability = version("CUDA_SIM_CAPABILITY", "8.6");
  result.link_bytes_per_second = number("CUDA_SIM_LINK", "0", 0);
  result.delays = !variable("CUDA_SIM_DELAYS", "").empty();
  result.seed = number("CUDA_SIM_DELAYS", "0", 0);
  result.timeline = flag("CUDA_SIM_TIMELINE");
  result.trace = flag("CUDA_SIM_TRACE");
  read_driver(result);
  read_peers(result);
  read_failure(result);
  return result;
}

}  // namespace

const Options& options() {
  static const Options* result = new Options(read_options());
  return *result;
}

bool can_access_peer(int device, int peer) {
  if (device == peer) return false;
  if (options().every_peer) return true;
  int first = options().devices[device], second = options().devices[peer];
  for (const auto& [left, right] : options().peers) {
    if ((left == first && right == second) || (left == second && right == first)) return true;
  }
  return false;
}

}  // namespace cuda_sim
