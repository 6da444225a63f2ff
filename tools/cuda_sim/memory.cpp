// The memory of the devices, pinned host memory, and who can access whose memory.
//
// Each device has a range of addresses that nothing can read or write, and a second range of the
// same length where its bytes are. Programs get addresses of the first range. A range is much
// longer than the device's memory: an address is never handed out twice, so that the use of freed
// memory is a SIGSEGV, as is, mostly, the use of what follows an allocation.
//
// The first ranges are in the kernel's half of the address space, and the distance between the two
// is a multiple of 2^40. The reason is kernels/device.h, which translates each 8-byte word of a
// kernel's arguments that looks like a device address. So does, sometimes, a word of which only the
// first bytes were written: small integers, completed by the end of an address that was on the
// stack before. Then a translation changes only the three highest bytes, and the integers are not
// among them, unless the highest is about -28,000.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>

#include "runtime.h"

namespace cuda_sim {
namespace {

const size_t RANGE = size_t(1) << 38;
const uintptr_t FIRST = 0xffff900000000000, ALIGNMENT = uintptr_t(1) << 40;
const size_t PAGE = 4096;
const int POISON = 0xff;  // NaN in every floating-point type, and -1

struct Memory {
  std::mutex mutex;
  char* first;         // the ranges handed out, one device after the other
  size_t ranges;       // their length
  ptrdiff_t to_bytes;  // from an address handed out to where its bytes are
  std::vector<size_t> next, allocated;  // by device: offset in its range, bytes in use
  std::map<const char*, size_t> allocations, released;  // start -> bytes
  std::map<const char*, size_t> pinned;
  std::set<std::pair<int, int>> peers;  // (device, peer): the device may access the peer
};

size_t round_up(size_t number, size_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

char* reserve(size_t num_bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* result = mmap(nullptr, num_bytes, PROT_NONE, flags, -1, 0);
  if (result == MAP_FAILED) stop("cannot reserve %zu bytes of address space", num_bytes);
  return static_cast<char*>(result);
}

Memory& memory() {
  static Memory* result = [] {
    auto* memory = new Memory;
    size_t num_devices = options().devices.size();
    memory->ranges = RANGE * std::max<size_t>(num_devices, 1);
    memory->first = reinterpret_cast<char*>(FIRST);
    auto reserved = reinterpret_cast<uintptr_t>(reserve(memory->ranges + ALIGNMENT));
    memory->to_bytes = static_cast<ptrdiff_t>(round_up(reserved, ALIGNMENT) - FIRST);
    memory->next.resize(num_devices);
    memory->allocated.resize(num_devices);
    return memory;
  }();
  return *result;
}

// The entry that contains all bytes from `address` on, or end().
std::map<const char*, size_t>::iterator containing(std::map<const char*, size_t>& blocks,
                                                   const void* address, size_t num_bytes) {
  const char* start = static_cast<const char*>(address);
  auto block = blocks.upper_bound(start);
  if (block == blocks.begin()) return blocks.end();
  --block;
  size_t offset = start - block->first;
  return offset + num_bytes <= block->second ? block : blocks.end();
}

thread_local int kernels_device = -1;

}  // namespace

bool on_device(const void* address) {
  const char* start = static_cast<const char*>(address);
  return start >= memory().first && start < memory().first + memory().ranges;
}

int device_of(const void* address) {
  if (!on_device(address)) stop("%p is not an address of device memory", address);
  return (static_cast<const char*>(address) - memory().first) / RANGE;
}

void* accessible(const void* address) {
  char* start = static_cast<char*>(const_cast<void*>(address));
  if (!on_device(address)) return start;
  int device = device_of(address);
  // Left as it is, since the kernel may have it without using it.
  bool other = kernels_device >= 0 && device != kernels_device;
  if (other && !peer_enabled(kernels_device, device)) return start;
  return start + memory().to_bytes;
}

bool bytes_of_device(const void* address) {
  return on_device(static_cast<const char*>(address) - memory().to_bytes);
}

bool was_released(const void* bytes) {
  std::unique_lock<std::mutex> lock(memory().mutex, std::try_to_lock);
  const char* address = static_cast<const char*>(bytes) - memory().to_bytes;
  return lock && containing(memory().released, address, 1) != memory().released.end();
}

KernelScope::KernelScope(int device) { kernels_device = device; }
KernelScope::~KernelScope() { kernels_device = -1; }

cudaError_t allocate(int device, size_t num_bytes, void** address) {
  *address = nullptr;
  if (num_bytes == 0) return cudaSuccess;
  size_t used = round_up(num_bytes, 512), mapped = round_up(num_bytes, PAGE);
  std::lock_guard<std::mutex> lock(memory().mutex);
  size_t free = options().bytes_per_device - memory().allocated[device];
  if (num_bytes > options().bytes_per_device || used > free) return cudaErrorMemoryAllocation;
  size_t offset = memory().next[device];
  if (offset + mapped + PAGE > RANGE) stop("gpu %d: the address space is used up", device);
  char* start = memory().first + device * RANGE + offset;
  char* bytes = start + memory().to_bytes;
  if (mprotect(bytes, mapped, PROT_READ | PROT_WRITE)) return cudaErrorMemoryAllocation;
  memset(bytes, POISON, mapped);
  memory().next[device] = offset + mapped + PAGE;
  memory().allocated[device] += used;
  memory().allocations[start] = num_bytes;
  *address = start;
  return cudaSuccess;
}

cudaError_t release(void* address) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto block = memory().allocations.find(static_cast<char*>(address));
  if (block == memory().allocations.end()) return cudaErrorInvalidValue;
  char* bytes = static_cast<char*>(address) + memory().to_bytes;
  size_t mapped = round_up(block->second, PAGE);
  madvise(bytes, mapped, MADV_DONTNEED);
  mprotect(bytes, mapped, PROT_NONE);
  memory().allocated[device_of(address)] -= round_up(block->second, 512);
  memory().released.insert(memory().allocations.extract(block));
  return cudaSuccess;
}

size_t allocated_bytes(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().allocated[device];
}

bool inside_allocation(const void* address, size_t num_bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto& all = memory().allocations;
  return containing(all, address, num_bytes) != all.end();
}

cudaError_t allocate_pinned(size_t num_bytes, void** address) {
  *address = nullptr;
  if (num_bytes == 0) return cudaSuccess;
  if (posix_memalign(address, PAGE, num_bytes)) return cudaErrorMemoryAllocation;
  memset(*address, POISON, num_bytes);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned[static_cast<char*>(*address)] = num_bytes;
  return cudaSuccess;
}

cudaError_t release_pinned(void* address) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (!memory().pinned.erase(static_cast<char*>(address))) return cudaErrorInvalidValue;
  free(address);
  return cudaSuccess;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return containing(memory().pinned, address, 1) != memory().pinned.end();
}

bool enable_peer(int device, int peer) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().peers.insert({device, peer}).second;
}

bool peer_enabled(int device, int peer) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().peers.count({device, peer}) > 0;
}

}  // namespace cuda_sim
