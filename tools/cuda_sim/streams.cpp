// Streams: a thread each, which does its operations in the order in which they were enqueued.
//
// An event is a place in a stream (Point), and so is what the legacy default stream waits for: an
// operation waits for places before it starts. Each place was enqueued earlier, so nothing can
// wait in a circle.
#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "runtime.h"

namespace cuda_sim {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Stream>> defaults;  // by device
  std::vector<std::shared_ptr<Stream>> streams;   // the others, destroyed ones while they work
  int num_created = 0;
};

// Never destroyed: threads use it until the process has ended.
Registry& registry() {
  static Registry* result = [] {
    auto* registry = new Registry;
    for (size_t device = 0; device < options().devices.size(); device++) {
      registry->defaults.push_back(std::make_shared<Stream>(device, 0));
    }
    return registry;
  }();
  return *result;
}

// The streams of a device apart from its default stream. The registry is locked by the caller.
std::vector<std::shared_ptr<Stream>> other_streams(int device) {
  auto& all = registry().streams;
  auto gone = [](const std::shared_ptr<Stream>& stream) { return stream->closed_and_empty(); };
  all.erase(std::remove_if(all.begin(), all.end(), gone), all.end());
  std::vector<std::shared_ptr<Stream>> result;
  for (const auto& stream : all) {
    if (stream->device == device) result.push_back(stream);
  }
  return result;
}

// Mostly up to 0.1 ms, and one in 16 up to 3 ms, longer than most of what depends on it takes.
std::chrono::microseconds random_delay(std::mt19937& random) {
  return std::chrono::microseconds(random() % 16 ? random() % 100 : random() % 3000);
}

}  // namespace

bool Point::passed() const { return !stream || stream->passed(number); }

void Point::wait() const {
  if (stream) stream->wait_for(number);
}

Stream::Stream(int device, int number)
    : device(device),
      number(number),
      random_(options().seed * 1000003u + device * 1009u + number) {}

Point Stream::push(Operation operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    std::thread([self = shared_from_this()] { self->run(); }).detach();
    started_ = true;
  }
  queue_.push_back(std::move(operation));
  arrived_.notify_one();
  return {shared_from_this(), ++enqueued_};
}

Point Stream::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {shared_from_this(), enqueued_};
}

bool Stream::passed(long number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= number;
}

void Stream::wait_for(long number) {
  std::unique_lock<std::mutex> lock(mutex_);
  completed_one_.wait(lock, [&] { return completed_ >= number; });
}

void Stream::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  arrived_.notify_one();
}

bool Stream::closed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return closed_;
}

bool Stream::closed_and_empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  return closed_ && completed_ == enqueued_;
}

void Stream::run() {
  std::string name = "gpu" + std::to_string(device) + " " + std::to_string(number);
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    arrived_.wait(lock, [&] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    perform(operation);
    operation = {};  // what the work holds is freed before the operation counts as completed
    lock.lock();
    completed_++;
    completed_one_.notify_all();
  }
}

void Stream::perform(Operation& operation) {
  for (const Point& point : operation.after) point.wait();
  if (options().delays) std::this_thread::sleep_for(random_delay(random_));
  double begin = seconds();
  running_operation = operation.name;
  if (operation.work && !devices()[device]->error) operation.work();
  record(operation.name, device, number, begin, seconds());
}

std::shared_ptr<Stream> find_stream(void* handle) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  if (!handle || handle == cudaStreamLegacy) return registry().defaults.at(current_device());
  for (const auto& stream : registry().streams) {
    if (stream.get() == handle && !stream->closed()) return stream;
  }
  return nullptr;
}

Stream* create_stream(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().streams.push_back(std::make_shared<Stream>(device, ++registry().num_created));
  return registry().streams.back().get();
}

bool destroy_stream(void* handle) {
  auto stream = handle ? find_stream(handle) : nullptr;
  if (!stream || stream->number == 0) return false;
  stream->close();
  return true;
}

Point enqueue_operation(const std::shared_ptr<Stream>& stream, Operation operation) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  // Work in the default stream starts after all earlier work in the device's other streams, and
  // later work in those starts after it.
  std::vector<std::shared_ptr<Stream>> before{registry().defaults[stream->device]};
  if (stream->number == 0) before = other_streams(stream->device);
  for (const auto& other : before) {
    Point last = other->last();
    if (!last.passed()) operation.after.push_back(last);
  }
  if (options().trace) {
    fprintf(stderr, "cuda_sim: gpu %d stream %d: %s\n", stream->device, stream->number,
            operation.name);
  }
  return stream->push(std::move(operation));
}

void wait_for_device(int device) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    streams = other_streams(device);
    streams.push_back(registry().defaults[device]);
  }
  for (const auto& stream : streams) stream->last().wait();
}

void enqueue(void* handle, const char* name, Work work) {
  auto stream = find_stream(handle);
  if (!stream) stop("%s: %p is not a stream", name, handle);
  count(name);
  enqueue_operation(stream, {keep_name(name), std::move(work), {}});
}

void cross_link(double num_bytes) {
  if (!options().link_bytes_per_second) return;
  const double seconds = num_bytes / options().link_bytes_per_second;
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

int device_of_stream(void* handle) {
  auto stream = find_stream(handle);
  if (!stream) stop("%p is not a stream", handle);
  return stream->device;
}

}  // namespace cuda_sim
