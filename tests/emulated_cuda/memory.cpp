#include "tests/emulated_cuda/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "tests/emulated_cuda/control.hpp"

namespace sluice::emulated {

namespace {

// Addresses of one device; fewer where the process has not as many (thread sanitizer).
constexpr std::size_t kMostRangeBytes = std::size_t{1} << 38;
constexpr std::size_t kLeastRangeBytes = std::size_t{1} << 33;
constexpr std::size_t kAlignment = 256;  // of what cudaMalloc returns
constexpr std::size_t kPageBytes = 4096;
constexpr int kMostKeys = 12;  // of the 15 a process has
constexpr std::size_t kFreshBytes = std::size_t{2} << 20;

std::atomic<std::size_t> most_host_memory = SIZE_MAX;

std::size_t number_from_environment(const char* name, std::size_t standard) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return standard;
  char* end = nullptr;
  const std::size_t value = std::strtoull(text, &end, 10);
  if (*end != 0) {
    std::fprintf(stderr, "emulated cuda: %s=%s is not a number\n", name, text);
    std::abort();
  }
  return value;
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

void* pointer_to(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

using Ranges = std::map<std::uintptr_t, std::size_t>;  // begin -> bytes

// The allocation that holds `address`, or end().
Ranges::const_iterator find(const Ranges& ranges, std::uintptr_t address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return ranges.end();
  --after;
  return address - after->first < std::max<std::size_t>(after->second, 1) ? after : ranges.end();
}

struct DeviceRange {
  std::uintptr_t begin = 0;
  std::size_t reached = 0;  // first address never given out, from begin
  std::size_t used = 0;
  Ranges allocations;
  Ranges mapped;                  // and open
  std::vector<std::size_t> made;  // bytes of all allocations ever
  int key = -1;                   // of memory protection
};

// All of it, for the life of the process: never destroyed, since workers outlive main().
struct Memories {
  std::mutex mutex;
  std::vector<DeviceRange> devices;
  std::size_t capacity = 0;
  std::size_t range_bytes = kMostRangeBytes;
  Ranges page_locked;  // ours and registered
  int fresh = -1;      // file of kFreshBytes bytes 0xFF
  std::vector<int> keys;
};

struct sigaction previous_action;  // NOLINT: what the handler hands over to
std::uintptr_t guarded_begin = 0, guarded_end = 0;
std::size_t guarded_bytes_each = 1;  // per device
thread_local int opened = -1;        // device whose memory the thread may touch; kMostDevices: all

// Only calls that a signal handler may make, and snprintf on numbers.
void explain_fault(int signal_number, siginfo_t* info, void* /*context*/) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (address >= guarded_begin && address < guarded_end) {
    const auto device = static_cast<int>((address - guarded_begin) / guarded_bytes_each);
    const char* who = opened < 0 ? "host code" : "device code";
    const char* what = info->si_code == SEGV_PKUERR
                           ? "touched emulated device memory"
                           : "touched freed emulated device memory or the end of an allocation";
    char line[200];
    const int length = std::snprintf(
        line, sizeof line, "emulated cuda: %s %s at %p of device %d%s\n", who, what, info->si_addr,
        device, opened >= 0 && opened != device && opened != kMostDevices ? " from another" : "");
    if (length > 0) {
      [[maybe_unused]] const auto written = write(2, line, static_cast<std::size_t>(length));
    }
  }
  // The same access again, under whoever handled it before.
  sigaction(signal_number, &previous_action, nullptr);
}

void explain_faults_in(std::uintptr_t begin, std::size_t devices, std::size_t bytes_each) {
  guarded_begin = begin;
  guarded_end = begin + devices * bytes_each;
  guarded_bytes_each = bytes_each;
  struct sigaction action {};
  action.sa_sigaction = explain_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_action);
}

int make_fresh_file() {
  const std::vector<unsigned char> bytes(kFreshBytes, 0xFF);
  const int file = memfd_create("emulated device memory", MFD_CLOEXEC);
  if (file < 0 || write(file, bytes.data(), kFreshBytes) != static_cast<ssize_t>(kFreshBytes)) {
    std::perror("emulated cuda: no file for the memory of the devices");
    std::abort();
  }
  return file;
}

Memories* make_memories() {
  auto* made = new Memories;
  const std::size_t count = number_from_environment("SLUICE_EMULATED_DEVICES", 8);
  if (count > kMostDevices) {
    std::fprintf(stderr, "emulated cuda: SLUICE_EMULATED_DEVICES is at most %d\n", kMostDevices);
    std::abort();
  }
  made->capacity = number_from_environment("SLUICE_EMULATED_DEVICE_MEMORY", std::size_t{2} << 30);
  if (count == 0) return made;
  made->fresh = make_fresh_file();
  void* addresses = MAP_FAILED;
  for (std::size_t bytes = kMostRangeBytes; addresses == MAP_FAILED && bytes >= kLeastRangeBytes;
       bytes /= 2) {
    made->range_bytes = bytes;
    addresses =
        mmap(nullptr, count * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (addresses == MAP_FAILED) {
    std::perror("emulated cuda: no addresses for the memory of the devices");
    std::abort();
  }
  for (int i = 0; i < std::min(static_cast<int>(count), kMostKeys); ++i) {
    const int key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    if (key < 0) break;
    made->keys.push_back(key);
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(addresses);
  for (std::size_t i = 0; i < count; ++i) {
    DeviceRange& device = made->devices.emplace_back();
    device.begin = begin + i * made->range_bytes;
    if (!made->keys.empty()) device.key = made->keys[i % made->keys.size()];
  }
  explain_faults_in(begin, count, made->range_bytes);
  return made;
}

Memories& memories() {
  static Memories* const instance = make_memories();
  return *instance;
}

int device_of(const Memories& all, std::uintptr_t address) {
  if (all.devices.empty() || address < all.devices.front().begin) return -1;
  const std::size_t index = (address - all.devices.front().begin) / all.range_bytes;
  return index < all.devices.size() ? static_cast<int>(index) : -1;
}

// Bytes 0xFF, of which only those that are touched take memory and time.
bool map_fresh(const Memories& all, std::uintptr_t begin, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kFreshBytes) {
    if (mmap(pointer_to(begin + at), std::min(kFreshBytes, bytes - at), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, all.fresh, 0) == MAP_FAILED) {
      return false;
    }
  }
  return true;
}

void give_back_pages(std::uintptr_t begin, std::size_t bytes) {
  const std::uintptr_t first = begin / kPageBytes * kPageBytes;
  static_cast<void>(mmap(pointer_to(first), round_up(begin + bytes, kPageBytes) - first, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0));
}

}  // namespace

int device_count() { return static_cast<int>(memories().devices.size()); }

std::size_t device_memory() { return memories().capacity; }

std::size_t free_memory(int device) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  return all.capacity - all.devices[static_cast<std::size_t>(device)].used;
}

std::vector<std::size_t> allocations(int device) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  return all.devices[static_cast<std::size_t>(device)].made;
}

bool is_device_memory_guarded() { return !memories().keys.empty(); }

void open_device(int device) {
  const Memories& all = memories();
  opened = device;
  for (const int key : all.keys) {
    const bool is_open = device == kMostDevices ||
                         (device >= 0 && all.devices[static_cast<std::size_t>(device)].key == key);
    pkey_set(key, is_open ? 0 : PKEY_DISABLE_ACCESS);
  }
}

AllDevicesOpen::AllDevicesOpen() : before_(opened) { open_device(kMostDevices); }

AllDevicesOpen::~AllDevicesOpen() { open_device(before_); }

cudaError_t allocate_device(int device, std::size_t bytes, void** address) {
  if (address == nullptr) return cudaErrorInvalidValue;
  *address = nullptr;
  if (bytes == 0) return cudaSuccess;
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  DeviceRange& range = all.devices[static_cast<std::size_t>(device)];
  const std::size_t rounded = round_up(bytes, kAlignment);
  const std::size_t pages = round_up(rounded, kPageBytes);
  if (rounded < bytes || rounded > all.capacity - range.used ||
      pages + kPageBytes > all.range_bytes - range.reached) {
    return cudaErrorMemoryAllocation;
  }
  void* first = pointer_to(range.begin + range.reached);
  if (!map_fresh(all, range.begin + range.reached, pages)) return cudaErrorMemoryAllocation;
  if (range.key >= 0 && pkey_mprotect(first, pages, PROT_READ | PROT_WRITE, range.key) != 0) {
    return cudaErrorMemoryAllocation;
  }
  const std::uintptr_t begin = range.begin + range.reached + pages - rounded;
  range.reached += pages + kPageBytes;
  range.used += rounded;
  range.allocations.emplace(begin, bytes);
  range.made.push_back(bytes);
  *address = pointer_to(begin);
  return cudaSuccess;
}

cudaError_t free_device(void* address) {
  if (address == nullptr) return cudaSuccess;
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const int device = device_of(all, begin);
  if (device < 0) return cudaErrorInvalidValue;
  DeviceRange& range = all.devices[static_cast<std::size_t>(device)];
  const auto found = range.allocations.find(begin);
  if (found == range.allocations.end()) return cudaErrorInvalidValue;
  const std::size_t rounded = round_up(found->second, kAlignment);
  range.used -= rounded;
  range.allocations.erase(found);
  give_back_pages(begin, rounded);
  return cudaSuccess;
}

std::uintptr_t reserve_addresses(int device, std::size_t bytes, std::size_t alignment) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  DeviceRange& range = all.devices[static_cast<std::size_t>(device)];
  const std::uintptr_t begin = round_up(range.begin + range.reached, alignment);
  const std::size_t skipped = begin - range.begin;
  if (skipped > all.range_bytes || bytes >= all.range_bytes - skipped) return 0;
  range.reached = skipped + bytes + kPageBytes;
  return begin;
}

bool take_bytes(int device, std::size_t bytes) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  std::size_t& used = all.devices[static_cast<std::size_t>(device)].used;
  if (bytes > all.capacity - used) return false;
  used += bytes;
  return true;
}

void give_back_bytes(int device, std::size_t bytes) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  all.devices[static_cast<std::size_t>(device)].used -= bytes;
}

bool open_addresses(int device, std::uintptr_t begin, std::size_t bytes) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  DeviceRange& range = all.devices[static_cast<std::size_t>(device)];
  // Key -1 is mprotect().
  if (pkey_mprotect(pointer_to(begin), bytes, PROT_READ | PROT_WRITE, range.key) != 0) return false;
  range.mapped[begin] = bytes;
  return true;
}

void close_addresses(int device, std::uintptr_t begin, std::size_t bytes) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  Ranges& mapped = all.devices[static_cast<std::size_t>(device)].mapped;
  mapped.erase(mapped.lower_bound(begin), mapped.lower_bound(begin + bytes));
  give_back_pages(begin, bytes);
}

void set_most_host_memory(std::size_t bytes) { most_host_memory = bytes; }

cudaError_t allocate_host(std::size_t bytes, void** address) {
  if (address == nullptr) return cudaErrorInvalidValue;
  *address = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > most_host_memory) return cudaErrorMemoryAllocation;
  *address = ::operator new(bytes, std::align_val_t(kPageBytes), std::nothrow);
  if (*address == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*address, 0xFF, bytes);
  return register_host(*address, bytes);
}

cudaError_t free_host(void* address) {
  if (address == nullptr) return cudaSuccess;
  if (const cudaError_t status = unregister_host(address); status != cudaSuccess) {
    return cudaErrorInvalidValue;
  }
  ::operator delete(address, std::align_val_t(kPageBytes));
  return cudaSuccess;
}

cudaError_t register_host(void* address, std::size_t bytes) {
  if (address == nullptr || bytes == 0) return cudaErrorInvalidValue;
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const auto next = all.page_locked.lower_bound(begin);
  if (find(all.page_locked, begin) != all.page_locked.end() ||
      (next != all.page_locked.end() && next->first < begin + bytes)) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  all.page_locked.emplace(begin, bytes);
  return cudaSuccess;
}

cudaError_t unregister_host(void* address) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  return all.page_locked.erase(reinterpret_cast<std::uintptr_t>(address)) == 1
             ? cudaSuccess
             : cudaErrorHostMemoryNotRegistered;
}

Memory memory_of(const void* address, std::size_t bytes) {
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const auto look_up = [&](const Ranges& ranges, MemoryKind kind, int device) {
    const auto found = find(ranges, begin);
    if (found == ranges.end()) return Memory{kind, device, false, nullptr};
    const bool is_inside = begin + bytes <= found->first + found->second;
    return Memory{kind, device, is_inside, pointer_to(found->first)};
  };
  if (const int device = device_of(all, begin); device >= 0) {
    const DeviceRange& range = all.devices[static_cast<std::size_t>(device)];
    const Memory mapped = look_up(range.mapped, MemoryKind::kDevice, device);
    return mapped.allocation != nullptr ? mapped
                                        : look_up(range.allocations, MemoryKind::kDevice, device);
  }
  const Memory locked = look_up(all.page_locked, MemoryKind::kPageLocked, -1);
  return locked.allocation == nullptr ? Memory{} : locked;
}

}  // namespace sluice::emulated
