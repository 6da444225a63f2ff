// What was called how often and with how many bytes, the timeline of the streams, and the end of a
// program that needs what is not simulated.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "runtime.h"

// One operation of a stream, as tests read it.
struct cuda_sim_Operation {
  const char* name;
  int device, stream;
  double begin, end;  // in seconds since the first use of the simulator
};

namespace cuda_sim {
namespace {

struct Counter {
  long times = 0;
  double num_bytes = 0;
};

struct Records {
  std::mutex mutex;
  std::map<std::string, Counter> counters;
  std::set<std::string> names;  // their texts stay where they are
  std::vector<cuda_sim_Operation> timeline;
};

Records& records() {
  static Records* result = new Records;
  return *result;
}

}  // namespace

void count(const char* name, double num_bytes) {
  std::lock_guard<std::mutex> lock(records().mutex);
  Counter& counter = records().counters[name];
  counter.times++;
  counter.num_bytes += num_bytes;
}

void say(const char* text) {
  size_t length = strlen(text);
  if (write(STDERR_FILENO, text, length) < 0) return;
  const char* path = getenv("CUDA_SIM_LOG");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
  if (file >= 0 && write(file, text, length) >= 0) close(file);
}

void stop(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vector<char> text(1 << 16);  // names of kernels are long
  vsnprintf(text.data(), text.size(), format, arguments);
  say(("\ncuda_sim: " + std::string(text.data()) + "\n").c_str());
  abort();
}

const char* keep_name(const std::string& name) {
  std::lock_guard<std::mutex> lock(records().mutex);
  return records().names.insert(name).first->c_str();
}

double seconds() {
  using Clock = std::chrono::steady_clock;
  static const Clock::time_point start = Clock::now();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void record(const char* name, int device, int stream, double begin, double end) {
  if (!options().timeline) return;
  std::lock_guard<std::mutex> lock(records().mutex);
  records().timeline.push_back({name, device, stream, begin, end});
}

}  // namespace cuda_sim

using namespace cuda_sim;

// ---- For tests, by ctypes; environment.py calls these.

EXPORTED long cuda_sim_count(const char* name) {
  std::lock_guard<std::mutex> lock(records().mutex);
  return records().counters[name].times;
}

EXPORTED double cuda_sim_bytes(const char* name) {
  std::lock_guard<std::mutex> lock(records().mutex);
  return records().counters[name].num_bytes;
}

EXPORTED void cuda_sim_reset() {
  std::lock_guard<std::mutex> lock(records().mutex);
  records().counters.clear();
  records().timeline.clear();
}

// Write the counters' names, one a line, as far as they fit; return the length of all.
EXPORTED size_t cuda_sim_names(char* text, size_t capacity) {
  std::lock_guard<std::mutex> lock(records().mutex);
  std::string all;
  for (const auto& [name, counter] : records().counters) {
    if (counter.times) all += name + "\n";
  }
  if (capacity) snprintf(text, capacity, "%s", all.c_str());
  return all.size();
}

// Write the operations in the order in which they ended, as far as they fit; return their number.
EXPORTED size_t cuda_sim_timeline(cuda_sim_Operation* operations, size_t capacity) {
  std::lock_guard<std::mutex> lock(records().mutex);
  const auto& all = records().timeline;
  std::copy_n(all.begin(), std::min(capacity, all.size()), operations);
  return all.size();
}
