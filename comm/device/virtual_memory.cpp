#include <cuda.h>  // types alone: the driver is asked for its functions, not linked
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/device/device_cuda.hpp"

namespace sluice::cuda {

namespace {

// CUDA's virtual memory management: "CUDA Driver API", section of that name.
struct VirtualMemoryCalls {
  decltype(&cuDeviceGet) get_device = nullptr;
  decltype(&cuDeviceGetAttribute) get_attribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) get_granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_addresses = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;

  VirtualMemoryCalls() {
    require(get_device, "cuDeviceGet", 2000);
    require(get_attribute, "cuDeviceGetAttribute", 2000);
    require(get_granularity, "cuMemGetAllocationGranularity", 10020);
    require(reserve, "cuMemAddressReserve", 10020);
    require(free_addresses, "cuMemAddressFree", 10020);
    require(create, "cuMemCreate", 10020);
    require(release, "cuMemRelease", 10020);
    require(map, "cuMemMap", 10020);
    require(unmap, "cuMemUnmap", 10020);
    require(set_access, "cuMemSetAccess", 10020);
  }
  template <typename Function>
  static void require(Function*& function, const char* name, unsigned version) {
    find_in_driver(function, name, version);
    if (function == nullptr) {
      throw Error(ErrorCode::kDevice, std::string("the driver has no ") + name);
    }
  }
};

const VirtualMemoryCalls& virtual_memory_calls() {
  static const VirtualMemoryCalls calls;
  return calls;
}

CUdeviceptr address_of(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

// Addresses of a device, mapped from the start on. What it holds goes back with it.
class MappedAddresses {
 public:
  MappedAddresses(int index, std::span<const Mapping> mappings)
      : index_(index), free_memory_(free_memory_text()) {
    std::size_t backings = 0;
    for (const Mapping& mapping : mappings) {
      bytes_ += mapping.bytes;
      if (mapping.backing != backings) continue;
      to_allocate_ += mapping.bytes;
      ++backings;
    }
    handles_.reserve(backings);
    CUdevice device = 0;
    check_call(calls_.get_device(&device, index), "cuDeviceGet");
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = device;
    // As all memory of cudaMalloc: network cards read and write it where the machine can.
    int supported = 0;
    check_call(calls_.get_attribute(
                   &supported, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device),
               "cuDeviceGetAttribute");
    properties_.allocFlags.gpuDirectRDMACapable = static_cast<unsigned char>(supported != 0);
    std::size_t unit = 0;
    check_call(calls_.get_granularity(&unit, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
               "cuMemGetAllocationGranularity");
    if (unit == 0 || kMappingUnit % unit != 0) {
      throw Error(ErrorCode::kDevice, name() + " maps memory in units of " + std::to_string(unit) +
                                          " bytes, of which " + std::to_string(kMappingUnit) +
                                          " is no multiple");
    }
    check_call(calls_.reserve(&begin_, bytes_, kMappingUnit, 0, 0), "cuMemAddressReserve");
  }
  MappedAddresses(const MappedAddresses&) = delete;
  MappedAddresses& operator=(const MappedAddresses&) = delete;
  ~MappedAddresses() {
    // Memory lives as long as a mapping of it or its handle.
    for (const CUmemGenericAllocationHandle handle : handles_) calls_.release(handle);
    if (begin_ == 0) return;
    if (mapped_ > 0) calls_.unmap(begin_, mapped_);
    calls_.free_addresses(begin_, bytes_);
  }

  void map(const Mapping& mapping) {
    if (mapping.backing == handles_.size()) {
      CUmemGenericAllocationHandle handle = 0;
      check_call(calls_.create(&handle, mapping.bytes, &properties_, 0), "cuMemCreate");
      handles_.push_back(handle);
    }
    check_call(calls_.map(begin_ + mapped_, mapping.bytes, 0, handles_[mapping.backing], 0),
               "cuMemMap");
    mapped_ += mapping.bytes;
  }

  // Opens what is mapped to the device, and gives it to the caller.
  std::byte* open() {
    CUmemAccessDesc access = {};
    access.location = properties_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check_call(calls_.set_access(begin_, bytes_, &access, 1), "cuMemSetAccess");
    auto* const data = reinterpret_cast<std::byte*>(begin_);  // NOLINT(performance-no-int-to-ptr)
    begin_ = 0;
    return data;
  }

 private:
  [[nodiscard]] std::string name() const { return "cuda:" + std::to_string(index_); }
  void check_call(CUresult status, const char* what) const {
    if (status == CUDA_SUCCESS) return;
    if (status == CUDA_ERROR_OUT_OF_MEMORY) throw_out_of_memory(index_, to_allocate_, free_memory_);
    throw Error(ErrorCode::kDevice, "mapping memory on " + name() + ": " + what +
                                        " returned CUresult " + std::to_string(status));
  }

  const VirtualMemoryCalls& calls_ = virtual_memory_calls();
  int index_;
  std::string free_memory_;  // before the first allocation
  std::size_t bytes_ = 0, to_allocate_ = 0;
  CUmemAllocationProp properties_ = {};
  CUdeviceptr begin_ = 0;
  std::size_t mapped_ = 0;                             // bytes, from the start
  std::vector<CUmemGenericAllocationHandle> handles_;  // [backing]
};

}  // namespace

std::byte* map_memory(int index, std::span<const Mapping> mappings) {
  const Selected selected(index);
  select(index);  // the driver's functions do not initialise the device
  MappedAddresses addresses(index, mappings);
  for (const Mapping& mapping : mappings) addresses.map(mapping);
  return addresses.open();
}

void unmap_memory(int index, std::byte* data, std::size_t bytes) noexcept {
  try {
    const Selected selected(index);
    static_cast<void>(cudaDeviceSynchronize());
    const VirtualMemoryCalls& calls = virtual_memory_calls();
    calls.unmap(address_of(data), bytes);
    calls.free_addresses(address_of(data), bytes);
  } catch (const Error&) {  // the process ends, and CUDA with it
  }
}

}  // namespace sluice::cuda
