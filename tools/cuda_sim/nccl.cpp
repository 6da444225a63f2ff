// libnccl.so.2, simulated: collective operations between the devices of one or several processes.
//
// The ranks of a communicator share memory in which each has a buffer. An operation is work on each
// rank's stream and goes buffer by buffer: every rank copies its part in, waits for all, reduces
// its share of the elements, waits for all, and copies the result out. Thus no rank can finish
// before the last has started, as on GPUs. Sums are added in the order of the ranks.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "sim.h"

using cuda_sim::bytes;
using cuda_sim::stop;

extern "C" int cudaGetDeviceCount(int* count);
extern "C" int cudaSetDevice(int device);

namespace {

enum Result {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5
};
enum DataType { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kFloat16, kFloat32, kFloat64,
                kBfloat16, kNumTypes };
enum Operation { kSum, kProduct, kMax, kMin, kAverage, kNumOperations };

constexpr int kVersion = 22105;  // 2.21.5
constexpr int kMaxRanks = 64;
constexpr size_t kBufferBytes = 1 << 20;

size_t element_bytes(int type) {
  static const size_t sizes[kNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[type];
}

using Half = _Float16;

struct Bfloat16 {
  uint16_t bits;
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    // Round to the nearest, ties to even; a NaN stays one.
    if (value == value) wide += 0x7fff + ((wide >> 16) & 1);
    bits = wide >> 16;
  }
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

// ---- What the ranks of a communicator share, also across processes.

// What a rank was asked to do: all ranks must be asked the same.
struct Request {
  const char* name;  // for the message only: an address of one process
  size_t count;
  int kind, type, operation, root;
  bool operator==(const Request& other) const {
    return count == other.count && kind == other.kind && type == other.type &&
           operation == other.operation && root == other.root;
  }
};

struct Member {
  bool joined;
  pid_t process;
  int device;
};

struct Shared {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int num_ranks, num_joined, num_waiting;
  unsigned num_barriers;
  Member members[kMaxRanks];
  Request requests[kMaxRanks];
};

constexpr size_t kHeaderBytes = (sizeof(Shared) + 4095) / 4096 * 4096;
constexpr size_t kSharedBytes = kHeaderBytes + (kMaxRanks + 1) * kBufferBytes;

void initialize(Shared* shared) {
  pthread_mutexattr_t mutex;
  pthread_mutexattr_init(&mutex);
  pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&shared->mutex, &mutex);
  pthread_condattr_t condition;
  pthread_condattr_init(&condition);
  pthread_condattr_setpshared(&condition, PTHREAD_PROCESS_SHARED);
  pthread_cond_init(&shared->changed, &condition);
}

// Map a file, or new memory if there is none. Pages that are never written take no memory.
std::shared_ptr<Shared> map_shared(int file) {
  const int flags = MAP_SHARED | MAP_NORESERVE | (file < 0 ? MAP_ANONYMOUS : 0);
  void* address = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (address == MAP_FAILED) return nullptr;
  return {static_cast<Shared*>(address), [](Shared* shared) { munmap(shared, kSharedBytes); }};
}

struct Lock {
  explicit Lock(Shared* shared) : shared(shared) { pthread_mutex_lock(&shared->mutex); }
  ~Lock() { pthread_mutex_unlock(&shared->mutex); }
  Shared* shared;
};

// ---- A rank of a communicator.

class Communicator {
 public:
  Communicator(std::shared_ptr<Shared> shared, int rank, int num_ranks, int device)
      : rank(rank), num_ranks(num_ranks), device(device), shared_(std::move(shared)) {}

  const int rank, num_ranks, device;

  Result join() {
    Lock lock(shared_.get());
    if (shared_->num_joined > 0 && shared_->num_ranks != num_ranks) return kInvalidArgument;
    if (shared_->members[rank].joined) return kInvalidArgument;
    for (const Member& member : shared_->members)
      if (member.joined && member.process == getpid() && member.device == device)
        return kInvalidUsage;  // NCCL refuses two ranks on one GPU
    shared_->num_ranks = num_ranks;
    shared_->members[rank] = {true, getpid(), device};
    shared_->num_joined++;
    pthread_cond_broadcast(&shared_->changed);
    return kSuccess;
  }

  void wait_for_members() {
    Lock lock(shared_.get());
    while (shared_->num_joined < num_ranks) pthread_cond_wait(&shared_->changed, &shared_->mutex);
  }

  // Operations of a rank are done in the order of the calls, whatever their streams.
  long take_turn() {
    std::lock_guard<std::mutex> lock(mutex_);
    return next_turn_++;
  }
  void wait_for_turn(long turn) {
    std::unique_lock<std::mutex> lock(mutex_);
    turn_ended_.wait(lock, [&] { return turn_ == turn; });
  }
  void end_turn() {
    std::lock_guard<std::mutex> lock(mutex_);
    turn_++;
    turn_ended_.notify_all();
  }

  void barrier() {
    Lock lock(shared_.get());
    const unsigned number = shared_->num_barriers;
    if (++shared_->num_waiting == num_ranks) {
      shared_->num_waiting = 0;
      shared_->num_barriers++;
      pthread_cond_broadcast(&shared_->changed);
      return;
    }
    while (shared_->num_barriers == number) pthread_cond_wait(&shared_->changed, &shared_->mutex);
  }

  // On GPUs, ranks that are asked different things hang or compute rubbish.
  void agree(const Request& request) {
    shared_->requests[rank] = request;
    barrier();
    for (int other = 0; other < num_ranks; other++)
      if (!(shared_->requests[other] == request))
        stop("%s: rank %d has %zu elements of type %d, operation %d, root %d; rank %d differs: %zu "
             "elements of type %d, operation %d, root %d",
             request.name, rank, request.count, request.type, request.operation, request.root,
             other, shared_->requests[other].count, shared_->requests[other].type,
             shared_->requests[other].operation, shared_->requests[other].root);
    barrier();
  }

  char* buffer(int of_rank) {
    return reinterpret_cast<char*>(shared_.get()) + kHeaderBytes + of_rank * kBufferBytes;
  }
  char* result() { return buffer(kMaxRanks); }

 private:
  std::shared_ptr<Shared> shared_;
  std::mutex mutex_;
  std::condition_variable turn_ended_;
  long next_turn_ = 0, turn_ = 0;
};

// A program's ncclComm_t. Work on streams may outlive it.
struct Handle {
  std::shared_ptr<Communicator> communicator;
};

// ---- Arithmetic.

template <typename Sum>
Sum combine(int operation, Sum a, Sum b) {
  switch (operation) {
    case kProduct:
      return a * b;
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// Reduce elements [begin, end) of all ranks' buffers into the result.
template <typename T, typename Sum>
void reduce(Communicator& communicator, int operation, size_t begin, size_t end) {
  T* result = reinterpret_cast<T*>(communicator.result());
  std::vector<const T*> parts;
  for (int rank = 0; rank < communicator.num_ranks; rank++)
    parts.push_back(reinterpret_cast<const T*>(communicator.buffer(rank)));
  for (size_t i = begin; i < end; i++) {
    Sum value = static_cast<Sum>(parts[0][i]);
    for (size_t rank = 1; rank < parts.size(); rank++)
      value = combine<Sum>(operation, value, static_cast<Sum>(parts[rank][i]));
    if (operation == kAverage) value /= static_cast<Sum>(parts.size());
    result[i] = static_cast<T>(value);
  }
}

// Add one to an element: a test that passes with this has not looked at it.
template <typename T, typename Sum>
void plant_error(Communicator& communicator) {
  T* result = reinterpret_cast<T*>(communicator.result());
  *result = static_cast<T>(static_cast<Sum>(*result) + Sum(1));
}

bool wrong_on_purpose() {
  const char* value = getenv("CUDA_SIM_NCCL_WRONG");
  return value != nullptr && strcmp(value, "1") == 0;
}

template <typename T, typename Sum = T>
void reduce_share(Communicator& communicator, int operation, size_t count, bool holds_first) {
  const size_t begin = count * communicator.rank / communicator.num_ranks;
  const size_t end = count * (communicator.rank + 1) / communicator.num_ranks;
  reduce<T, Sum>(communicator, operation, begin, end);
  if (holds_first && begin == 0 && end > 0 && wrong_on_purpose())
    plant_error<T, Sum>(communicator);
}

void reduce_share(Communicator& communicator, int type, int operation, size_t count,
                  bool holds_first) {
  switch (type) {
    case kInt8:
      return reduce_share<int8_t, int>(communicator, operation, count, holds_first);
    case kUint8:
      return reduce_share<uint8_t, int>(communicator, operation, count, holds_first);
    case kInt32:  // unsigned sums and products wrap around
      return reduce_share<int32_t, int64_t>(communicator, operation, count, holds_first);
    case kUint32:
      return reduce_share<uint32_t>(communicator, operation, count, holds_first);
    case kInt64:
      return reduce_share<int64_t>(communicator, operation, count, holds_first);
    case kUint64:
      return reduce_share<uint64_t>(communicator, operation, count, holds_first);
    case kFloat16:
      return reduce_share<Half, float>(communicator, operation, count, holds_first);
    case kFloat32:
      return reduce_share<float>(communicator, operation, count, holds_first);
    case kFloat64:
      return reduce_share<double>(communicator, operation, count, holds_first);
    case kBfloat16:
      return reduce_share<Bfloat16, float>(communicator, operation, count, holds_first);
  }
}

// ---- Two steps of which all operations consist. `receive` is null where no result is wanted.

void reduce_step(Communicator& communicator, int type, int operation, const char* send,
                 char* receive, size_t count) {
  const size_t size = element_bytes(type), at_a_time = kBufferBytes / size;
  for (size_t begin = 0; begin < count; begin += at_a_time) {
    const size_t part = std::min(at_a_time, count - begin);
    memcpy(communicator.buffer(communicator.rank), send + begin * size, part * size);
    communicator.barrier();
    reduce_share(communicator, type, operation, part, begin == 0);
    communicator.barrier();
    // The next part's result is written when all ranks have come to its first barrier.
    if (receive != nullptr) memcpy(receive + begin * size, communicator.result(), part * size);
  }
}

void broadcast_step(Communicator& communicator, int root, const char* send, char* receive,
                    size_t num_bytes) {
  for (size_t begin = 0; begin < num_bytes; begin += kBufferBytes) {
    const size_t part = std::min(kBufferBytes, num_bytes - begin);
    if (communicator.rank == root) memcpy(communicator.buffer(root), send + begin, part);
    communicator.barrier();
    memcpy(receive + begin, communicator.buffer(root), part);
    communicator.barrier();
  }
}

// ---- Calls.

enum Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter };

struct Call {
  std::shared_ptr<Communicator> communicator;
  Request request;
  const void* send;
  void* receive;
  void* stream;
};

void perform(const Call& call) {
  Communicator& communicator = *call.communicator;
  const Request& request = call.request;
  const size_t size = element_bytes(request.type), block = request.count * size;
  const char* send = static_cast<const char*>(bytes(call.send));
  char* receive = static_cast<char*>(bytes(call.receive));
  communicator.agree(request);
  const double others = double(communicator.num_ranks - 1) / communicator.num_ranks;
  cuda_sim::cross_link(block * others * (request.kind == kAllReduce ? 2 : 1));
  switch (request.kind) {
    case kAllReduce:
      return reduce_step(communicator, request.type, request.operation, send, receive,
                         request.count);
    case kReduce:
      return reduce_step(communicator, request.type, request.operation, send,
                         communicator.rank == request.root ? receive : nullptr, request.count);
    case kBroadcast:
      return broadcast_step(communicator, request.root, send, receive, block);
    case kAllGather:
      for (int root = 0; root < communicator.num_ranks; root++)
        broadcast_step(communicator, root, send, receive + root * block, block);
      return;
    case kReduceScatter:
      for (int root = 0; root < communicator.num_ranks; root++)
        reduce_step(communicator, request.type, request.operation, send + root * block,
                    communicator.rank == root ? receive : nullptr, request.count);
      return;
  }
}

// Makes a device current for as long as it lives: the null stream is the current device's.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : before_(cuda_sim::current_device()) {
    cudaSetDevice(device);
  }
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  const int before_;
};

void launch(const Call& call) {
  const CurrentDevice current(call.communicator->device);
  const long turn = call.communicator->take_turn();
  cuda_sim::count("nccl", double(call.request.count * element_bytes(call.request.type)));
  cuda_sim::enqueue(call.stream, call.request.name, [call, turn] {
    call.communicator->wait_for_turn(turn);
    perform(call);
    call.communicator->end_turn();
  });
}

// What a thread has called since ncclGroupStart; it is done at the outermost ncclGroupEnd.
struct Group {
  int depth = 0;
  int error = kSuccess;
  std::vector<std::shared_ptr<Communicator>> joined;
  std::vector<Call> calls;
};
thread_local Group group;

int end_group() {
  Group ended = std::move(group);
  group = Group();
  if (ended.error != kSuccess) return ended.error;
  for (const auto& communicator : ended.joined) communicator->wait_for_members();
  for (const Call& call : ended.calls) launch(call);
  return kSuccess;
}

int fail(int error) {
  if (group.depth > 0 && group.error == kSuccess) group.error = error;
  return error;
}

bool elsewhere(const void* address, int device) {
  return cuda_sim::on_device(address) && cuda_sim::device_of(address) != device;
}

int call(const char* name, Kind kind, const void* send, void* receive, size_t count, int type,
         int operation, int root, Handle* handle, void* stream) {
  if (handle == nullptr) return fail(kInvalidArgument);
  const std::shared_ptr<Communicator>& communicator = handle->communicator;
  if (type < 0 || type >= kNumTypes || operation < 0 || operation >= kNumOperations || root < 0 ||
      root >= communicator->num_ranks)
    return fail(kInvalidArgument);
  const bool sends = kind != kBroadcast || communicator->rank == root;
  const bool receives = kind != kReduce || communicator->rank == root;
  if ((sends && count > 0 && send == nullptr) || (receives && count > 0 && receive == nullptr))
    return fail(kInvalidArgument);
  if ((sends && elsewhere(send, communicator->device)) ||
      (receives && elsewhere(receive, communicator->device)))
    return fail(kInvalidArgument);
  if (stream != nullptr && cuda_sim::device_of_stream(stream) != communicator->device)
    return fail(kUnhandledCudaError);
  const Request request = {name, count, kind, type, operation, root};
  const Call whole = {communicator, request, send, receive, stream};
  if (group.depth > 0)
    group.calls.push_back(whole);
  else
    launch(whole);
  return kSuccess;
}

// A file name: processes find the shared memory by it.
struct UniqueId {
  char name[128];
};

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  static const char* const texts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  const int count = sizeof texts / sizeof *texts;
  return result >= 0 && result < count ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(Handle*) { return ""; }

// ---- Communicators.

int ncclCommInitAll(Handle** handles, int num_devices, const int* given_devices) {
  int available = 0;
  cudaGetDeviceCount(&available);
  if (handles == nullptr || num_devices < 1 || num_devices > kMaxRanks) return kInvalidArgument;
  std::vector<int> devices;
  for (int i = 0; i < num_devices; i++) {
    const int device = given_devices == nullptr ? i : given_devices[i];
    if (device < 0 || device >= available) return kUnhandledCudaError;
    if (std::count(devices.begin(), devices.end(), device) > 0) return kInvalidUsage;
    devices.push_back(device);
  }
  const std::shared_ptr<Shared> shared = map_shared(-1);
  if (shared == nullptr) return kSystemError;
  initialize(shared.get());
  for (int rank = 0; rank < num_devices; rank++) {
    handles[rank] =
        new Handle{std::make_shared<Communicator>(shared, rank, num_devices, devices[rank])};
    handles[rank]->communicator->join();
  }
  cuda_sim::count("ncclCommInitAll");
  return kSuccess;
}

// The memory is taken away by the last rank that joins.
int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->name, sizeof id->name, "/cuda_sim_nccl_%d_%08x%08x", getpid(), random(), random());
  const int file = shm_open(id->name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0) return kSystemError;
  const bool sized = ftruncate(file, kSharedBytes) == 0;
  const std::shared_ptr<Shared> shared = sized ? map_shared(file) : nullptr;
  close(file);
  if (shared == nullptr) {
    shm_unlink(id->name);
    return kSystemError;
  }
  initialize(shared.get());
  return kSuccess;
}

int ncclCommInitRank(Handle** handle, int num_ranks, UniqueId id, int rank) {
  if (handle == nullptr || num_ranks < 1 || num_ranks > kMaxRanks || rank < 0 || rank >= num_ranks)
    return fail(kInvalidArgument);
  id.name[sizeof id.name - 1] = '\0';
  const int file = shm_open(id.name, O_RDWR, 0);
  if (file < 0) return fail(kInvalidArgument);
  const std::shared_ptr<Shared> shared = map_shared(file);
  close(file);
  if (shared == nullptr) return fail(kSystemError);
  const auto communicator =
      std::make_shared<Communicator>(shared, rank, num_ranks, cuda_sim::current_device());
  const int error = communicator->join();
  if (error != kSuccess) return fail(error);
  if (shared->num_joined == num_ranks) shm_unlink(id.name);
  *handle = new Handle{communicator};
  cuda_sim::count("ncclCommInitRank");
  if (group.depth > 0)
    group.joined.push_back(communicator);
  else
    communicator->wait_for_members();
  return kSuccess;
}

int ncclCommFinalize(Handle* handle) { return handle == nullptr ? kInvalidArgument : kSuccess; }

int ncclCommDestroy(Handle* handle) {
  delete handle;
  return kSuccess;
}

int ncclCommAbort(Handle* handle) { return ncclCommDestroy(handle); }

int ncclCommGetAsyncError(Handle* handle, int* error) {
  if (handle == nullptr || error == nullptr) return kInvalidArgument;
  *error = kSuccess;
  return kSuccess;
}

int ncclCommCount(Handle* handle, int* count) {
  if (handle == nullptr || count == nullptr) return kInvalidArgument;
  *count = handle->communicator->num_ranks;
  return kSuccess;
}

int ncclCommCuDevice(Handle* handle, int* device) {
  if (handle == nullptr || device == nullptr) return kInvalidArgument;
  *device = handle->communicator->device;
  return kSuccess;
}

int ncclCommUserRank(Handle* handle, int* rank) {
  if (handle == nullptr || rank == nullptr) return kInvalidArgument;
  *rank = handle->communicator->rank;
  return kSuccess;
}

// ---- Groups and operations.

int ncclGroupStart() {
  group.depth++;
  return kSuccess;
}

int ncclGroupEnd() {
  if (group.depth == 0) return kInvalidUsage;
  return --group.depth == 0 ? end_group() : kSuccess;
}

int ncclAllReduce(const void* send, void* receive, size_t count, int type, int operation,
                  Handle* handle, void* stream) {
  return call("ncclAllReduce", kAllReduce, send, receive, count, type, operation, 0, handle,
              stream);
}

int ncclReduce(const void* send, void* receive, size_t count, int type, int operation, int root,
               Handle* handle, void* stream) {
  return call("ncclReduce", kReduce, send, receive, count, type, operation, root, handle, stream);
}

int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, Handle* handle,
                  void* stream) {
  return call("ncclBroadcast", kBroadcast, send, receive, count, type, kSum, root, handle, stream);
}

int ncclBcast(void* buffer, size_t count, int type, int root, Handle* handle, void* stream) {
  return call("ncclBcast", kBroadcast, buffer, buffer, count, type, kSum, root, handle, stream);
}

int ncclAllGather(const void* send, void* receive, size_t count, int type, Handle* handle,
                  void* stream) {
  return call("ncclAllGather", kAllGather, send, receive, count, type, kSum, 0, handle, stream);
}

int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int operation,
                      Handle* handle, void* stream) {
  return call("ncclReduceScatter", kReduceScatter, send, receive, count, type, operation, 0, handle,
              stream);
}

}  // extern "C"
