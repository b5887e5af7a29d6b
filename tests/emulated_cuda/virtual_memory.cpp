#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/memory.hpp"
#include "tests/emulated_cuda/stream.hpp"

namespace sluice::emulated {

namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;  // as on GPUs

struct Allocation {
  int device;
  std::size_t bytes, in_file;
  int mappings = 0;
  bool has_handle = true;
};

struct Mapping {
  std::size_t bytes;
  CUmemGenericAllocationHandle handle;
};

struct Reservation {
  int device;
  std::size_t bytes;
  std::map<CUdeviceptr, Mapping> mappings;  // [begin]
};

struct State {
  std::mutex mutex;
  int file = -1;
  std::size_t file_bytes = 0;
  CUmemGenericAllocationHandle last_handle = 0;
  std::map<CUmemGenericAllocationHandle, Allocation> allocations;
  std::map<CUdeviceptr, Reservation> reservations;  // [begin]
};

// Never destroyed, since workers outlive main().
State& state() {
  static State* const instance = [] {
    auto* made = new State;
    made->file = memfd_create("emulated mapped memory", MFD_CLOEXEC);
    if (made->file < 0) {
      std::perror("emulated cuda: no file for mapped memory");
      std::abort();
    }
    return made;
  }();
  return *instance;
}

void* pointer_to(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// The one that holds these bytes, or null.
Reservation* find_reservation(State& all, CUdeviceptr begin, std::size_t bytes) {
  const auto after = all.reservations.upper_bound(begin);
  if (after == all.reservations.begin()) return nullptr;
  const auto found = std::prev(after);
  const std::size_t offset = begin - found->first;
  const bool is_inside = bytes <= found->second.bytes && offset <= found->second.bytes - bytes;
  return is_inside ? &found->second : nullptr;
}

// Whether whole mappings, and nothing else, lie in these bytes.
bool is_mapped(const Reservation& reservation, CUdeviceptr begin, std::size_t bytes) {
  CUdeviceptr end = begin;
  for (auto each = reservation.mappings.find(begin);
       each != reservation.mappings.end() && each->first == end && end < begin + bytes; ++each) {
    end += each->second.bytes;
  }
  return bytes > 0 && end == begin + bytes;
}

void free_unused(State& all, CUmemGenericAllocationHandle handle) {
  const auto found = all.allocations.find(handle);
  const Allocation& allocation = found->second;
  if (allocation.has_handle || allocation.mappings > 0) return;
  static_cast<void>(fallocate(all.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                              static_cast<off_t>(allocation.in_file),
                              static_cast<off_t>(allocation.bytes)));
  give_back_bytes(allocation.device, allocation.bytes);
  all.allocations.erase(found);
}

bool fill_fresh(int file, std::size_t begin, std::size_t bytes) {
  static const std::vector<unsigned char> fresh(kGranularity, 0xFF);
  for (std::size_t at = 0; at < bytes; at += kGranularity) {
    if (pwrite(file, fresh.data(), kGranularity, static_cast<off_t>(begin + at)) !=
        static_cast<ssize_t>(kGranularity)) {
      return false;
    }
  }
  return true;
}

}  // namespace

VirtualMemory virtual_memory() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  VirtualMemory found;
  found.allocations = all.allocations.size();
  found.reservations = all.reservations.size();
  for (const auto& [begin, each] : all.reservations) found.mappings += each.mappings.size();
  return found;
}

CUresult device_of_ordinal(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute != CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) {
    return CUDA_ERROR_INVALID_VALUE;  // nobody asked for it so far
  }
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult memory_granularity(std::size_t* bytes, const CUmemAllocationProp* properties,
                            CUmemAllocationGranularity_flags /*option*/) {
  if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult reserve_range(CUdeviceptr* begin, std::size_t bytes, std::size_t alignment,
                       CUdeviceptr /*hint*/, unsigned long long flags) {
  if (bytes == 0 || bytes % kGranularity != 0 || kGranularity % alignment != 0 || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  State& all = state();
  const std::lock_guard lock(all.mutex);
  *begin = reserve_addresses(current_device(), bytes, kGranularity);
  if (*begin == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  all.reservations[*begin] = {current_device(), bytes, {}};
  return CUDA_SUCCESS;
}

CUresult free_range(CUdeviceptr begin, std::size_t bytes) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.reservations.find(begin);
  if (found == all.reservations.end() || found->second.bytes != bytes ||
      !found->second.mappings.empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  all.reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult create_memory(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                       const CUmemAllocationProp* properties, unsigned long long flags) {
  const CUmemLocation& where = properties->location;
  if (bytes == 0 || bytes % kGranularity != 0 || flags != 0 ||
      properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      where.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (where.id < 0 || where.id >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (!take_bytes(where.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!fill_fresh(all.file, all.file_bytes, bytes)) {
    give_back_bytes(where.id, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = ++all.last_handle;
  all.allocations[*handle] = {where.id, bytes, all.file_bytes};
  all.file_bytes += bytes;
  return CUDA_SUCCESS;
}

CUresult release_memory(CUmemGenericAllocationHandle handle) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.allocations.find(handle);
  if (found == all.allocations.end() || !found->second.has_handle) return CUDA_ERROR_INVALID_VALUE;
  found->second.has_handle = false;
  free_unused(all, handle);
  return CUDA_SUCCESS;
}

CUresult map_memory(CUdeviceptr begin, std::size_t bytes, std::size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.allocations.find(handle);
  Reservation* const reservation = find_reservation(all, begin, bytes);
  if (found == all.allocations.end() || !found->second.has_handle || reservation == nullptr ||
      bytes != found->second.bytes || offset != 0 || flags != 0 || begin % kGranularity != 0 ||
      found->second.device != reservation->device) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto next = reservation->mappings.lower_bound(begin);
  if (next != reservation->mappings.end() && next->first < begin + bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (next != reservation->mappings.begin()) {
    const auto& [before, mapping] = *std::prev(next);
    if (before + mapping.bytes > begin) return CUDA_ERROR_INVALID_VALUE;
  }
  if (mmap(pointer_to(begin), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, all.file,
           static_cast<off_t>(found->second.in_file)) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  reservation->mappings[begin] = {bytes, handle};
  ++found->second.mappings;
  return CUDA_SUCCESS;
}

CUresult unmap_memory(CUdeviceptr begin, std::size_t bytes) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  Reservation* const reservation = find_reservation(all, begin, bytes);
  if (reservation == nullptr || !is_mapped(*reservation, begin, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  close_addresses(reservation->device, begin, bytes);
  auto each = reservation->mappings.find(begin);
  while (each != reservation->mappings.end() && each->first < begin + bytes) {
    const CUmemGenericAllocationHandle handle = each->second.handle;
    each = reservation->mappings.erase(each);
    --all.allocations.at(handle).mappings;
    free_unused(all, handle);
  }
  return CUDA_SUCCESS;
}

CUresult set_memory_access(CUdeviceptr begin, std::size_t bytes, const CUmemAccessDesc* access,
                           std::size_t count) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const Reservation* const reservation = find_reservation(all, begin, bytes);
  if (reservation == nullptr || !is_mapped(*reservation, begin, bytes) || count != 1 ||
      access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      access->location.id != reservation->device ||
      access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return open_addresses(reservation->device, begin, bytes) ? CUDA_SUCCESS
                                                           : CUDA_ERROR_OUT_OF_MEMORY;
}

}  // namespace sluice::emulated
