// The rest of the CUDA runtime that Sluice calls: devices, memory, copies, launches.
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "tests/emulated_cuda/block.hpp"
#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/memory.hpp"
#include "tests/emulated_cuda/modules.hpp"
#include "tests/emulated_cuda/stream.hpp"

namespace sluice::emulated {

namespace {

constexpr std::size_t kSharedBytes = 232448;  // most dynamic shared memory of a block, as on sm_90
constexpr unsigned kBlockThreads = 1024;
constexpr unsigned kGridBlocks = 65535;  // in y and z
constexpr int kOldestDriver = 12000;

// A number of each device, which a test may set.
class NumberOfDevices {
 public:
  explicit NumberOfDevices(int standard) : standard_(standard) {}
  void set(int device, int number) {
    const std::lock_guard lock(mutex_);
    set_[device] = number;
  }
  int of(int device) {
    const std::lock_guard lock(mutex_);
    const auto found = set_.find(device);
    return found == set_.end() ? standard_ : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<int, int> set_;
  int standard_;
};

// Dynamic shared memory that kernels may have: what was asked for, else 48 KiB less the most
// that launch() allows a kernel to declare itself (the emulation does not know how much it does).
class SharedBytesAllowed {
 public:
  void set(int device, const void* function, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    asked_[{device, function}] = bytes;
  }
  std::size_t of(int device, const void* function) {
    const std::lock_guard lock(mutex_);
    const auto found = asked_.find({device, function});
    return found == asked_.end() ? std::size_t{28 * 1024} : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, std::size_t> asked_;
};

SharedBytesAllowed& shared_bytes_allowed() {
  static SharedBytesAllowed all;
  return all;
}

NumberOfDevices& capabilities() {
  static NumberOfDevices all(90);
  return all;
}

NumberOfDevices& multiprocessors() {
  static NumberOfDevices all(4);
  return all;
}

// A copy of `rows` rows of `bytes` bytes, or a fill where `from` is null.
struct Transfer {
  void* to;
  std::size_t to_pitch;
  const void* from;
  std::size_t from_pitch;
  std::size_t bytes;
  std::size_t rows;
  int value;

  void run() const {
    const AllDevicesOpen open;
    for (std::size_t row = 0; row < rows; ++row) {
      auto* target = static_cast<char*>(to) + row * to_pitch;
      if (from == nullptr) {
        std::memset(target, value, bytes);
      } else {
        std::memcpy(target, static_cast<const char*>(from) + row * from_pitch, bytes);
      }
    }
  }
};

bool fits(cudaMemcpyKind kind, MemoryKind to, MemoryKind from) {
  const bool is_to_device = to == MemoryKind::kDevice, is_from_device = from == MemoryKind::kDevice;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !is_to_device && !is_from_device;
    case cudaMemcpyHostToDevice:
      return is_to_device && !is_from_device;
    case cudaMemcpyDeviceToHost:
      return !is_to_device && is_from_device;
    case cudaMemcpyDeviceToDevice:
      return is_to_device && is_from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

std::array<std::atomic<std::size_t>, kMostDevices> bytes_to_host{};  // [device]

// As on a GPU, a copy from or to pageable memory has read or written it when the call returns.
cudaError_t transfer(const Transfer& work, cudaMemcpyKind kind, cudaStream_t stream, bool blocks) {
  cudaStream_t real = resolve(stream);
  if (device_count() == 0) return cudaErrorNoDevice;
  if (real == nullptr) return cudaErrorInvalidResourceHandle;
  if (work.bytes == 0 || work.rows == 0) return cudaSuccess;
  const Memory to = memory_of(work.to, (work.rows - 1) * work.to_pitch + work.bytes);
  if (work.to == nullptr || !to.is_inside) return cudaErrorInvalidValue;
  bool is_pageable = to.kind == MemoryKind::kPageable;
  if (work.from != nullptr) {
    const Memory from = memory_of(work.from, (work.rows - 1) * work.from_pitch + work.bytes);
    if (!from.is_inside || !fits(kind, to.kind, from.kind)) return cudaErrorInvalidValue;
    is_pageable = is_pageable || from.kind == MemoryKind::kPageable;
    if (from.kind == MemoryKind::kDevice && to.kind != MemoryKind::kDevice) {
      bytes_to_host[static_cast<std::size_t>(from.device)] += work.bytes * work.rows;
    }
  } else if (to.kind == MemoryKind::kPageable) {
    return cudaErrorInvalidValue;
  }
  if (const cudaError_t status = enqueue(real, [work] { work.run(); }); status != cudaSuccess) {
    return status;
  }
  return blocks || (is_pageable && !is_capturing(real)) ? wait_for(real) : cudaSuccess;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t stream, bool blocks) {
  if (bytes > 0 && from == nullptr) return note(cudaErrorInvalidValue);
  return note(transfer({to, bytes, from, bytes, bytes, 1, 0}, kind, stream, blocks));
}

cudaError_t has_device() { return device_count() == 0 ? cudaErrorNoDevice : unsafe_call_status(); }

// A process that sees some of the machine's GPUs: the number of those before them.
int first_bus() {
  static const int first = [] {
    const char* text = std::getenv("SLUICE_EMULATED_FIRST_BUS");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  return first;
}

bool is_device(int device) { return device >= 0 && device < device_count(); }

}  // namespace

void set_compute_capability(int device, int capability) { capabilities().set(device, capability); }

void set_multiprocessors(int device, int number) { multiprocessors().set(device, number); }

std::size_t copied_to_host(int device) { return bytes_to_host[static_cast<std::size_t>(device)]; }

cudaError_t enqueue_kernel(const Launch& launch, cudaStream_t stream,
                           std::function<void()> run_thread) {
  cudaStream_t real = resolve(stream);
  if (device_count() == 0) return cudaErrorNoDevice;
  if (real == nullptr || device_of(real) != current_device()) {
    return cudaErrorInvalidResourceHandle;
  }
  const auto volume = [](const dim3& size) { return std::size_t{size.x} * size.y * size.z; };
  if (volume(launch.grid) == 0 || volume(launch.block) == 0 ||
      volume(launch.block) > kBlockThreads || launch.block.z > 64 || launch.grid.x > 0x7FFFFFFF ||
      launch.grid.y > kGridBlocks || launch.grid.z > kGridBlocks) {
    return cudaErrorInvalidConfiguration;
  }
  if (launch.shared_bytes > shared_bytes_allowed().of(current_device(), launch.function)) {
    return cudaErrorInvalidValue;
  }
  if (const cudaError_t status = kernel_status(current_device()); status != cudaSuccess) {
    return status;
  }
  note_launch(launch.name);
  return enqueue(real,
                 [launch, run_thread = std::move(run_thread)] { run_blocks(launch, run_thread); });
}

}  // namespace sluice::emulated

using namespace sluice::emulated;  // NOLINT(google-build-using-namespace): the C functions below

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  if (*count == 0) return note(cudaErrorNoDevice);
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  if (driver >= kOldestDriver) return cudaSuccess;
  *count = 0;
  return note(cudaErrorInsufficientDriver);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  if (!is_device(device)) return note(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Emulated CUDA device");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = device_memory();
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = kSharedBytes;
  properties->sharedMemPerMultiprocessor = kSharedBytes + 1024;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = kBlockThreads;
  properties->maxThreadsPerMultiProcessor = 2 * kBlockThreads;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kBlockThreads;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7FFFFFFF;
  properties->maxGridSize[1] = properties->maxGridSize[2] = kGridBlocks;
  properties->regsPerBlock = 65536;
  const int capability = capabilities().of(device);
  properties->major = capability / 10;
  properties->minor = capability % 10;
  properties->multiProcessorCount = multiprocessors().of(device);
  properties->asyncEngineCount = 2;
  properties->unifiedAddressing = 1;
  properties->canMapHostMemory = 1;
  properties->concurrentKernels = 1;
  properties->pciBusID = first_bus() + device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const cudaError_t status = cudaGetDeviceProperties(&properties, device);
      status != cudaSuccess) {
    return status;
  }
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = 1;
      break;
    case cudaDevAttrPciBusId:
      *value = properties.pciBusID;
      break;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrIntegrated:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 0;
      break;
    default:
      return note(cudaErrorInvalidValue);  // an attribute nobody asked for so far
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  if (!is_device(device)) return note(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02x:00.0", first_bus() + device + 1);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  *free = free_memory(current_device());
  *total = device_memory();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  if (const cudaError_t status = has_device(); status != cudaSuccess) return note(status);
  return note(allocate_device(current_device(), bytes, address));
}

cudaError_t cudaFree(void* address) {
  if (const cudaError_t status = has_device(); status != cudaSuccess) return note(status);
  if (address == nullptr) return cudaSuccess;
  // Waits for the device, as the driver does before it unmaps.
  if (const Memory memory = memory_of(address, 1); memory.kind == MemoryKind::kDevice) {
    wait_for_device(memory.device);
  }
  return note(free_device(address));
}

cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned /*flags*/) {
  if (const cudaError_t status = has_device(); status != cudaSuccess) return note(status);
  return note(allocate_host(bytes, address));
}

cudaError_t cudaMallocHost(void** address, std::size_t bytes) {
  return cudaHostAlloc(address, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* address) {
  if (const cudaError_t status = has_device(); status != cudaSuccess) return note(status);
  for (int device = 0; device < device_count(); ++device) wait_for_device(device);
  return note(free_host(address));
}

cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned /*flags*/) {
  if (const cudaError_t status = has_device(); status != cudaSuccess) return note(status);
  return note(register_host(address, bytes));
}

cudaError_t cudaHostUnregister(void* address) {
  if (const cudaError_t status = has_device(); status != cudaSuccess) return note(status);
  return note(unregister_host(address));
}

cudaError_t cudaHostGetDevicePointer(void** device_address, void* host_address,
                                     unsigned /*flags*/) {
  if (memory_of(host_address, 1).kind != MemoryKind::kPageLocked) {
    return note(cudaErrorInvalidValue);
  }
  *device_address = host_address;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  *attributes = {};
  const Memory memory = memory_of(address, 1);
  auto* pointer = const_cast<void*>(address);
  switch (memory.kind) {
    case MemoryKind::kPageable:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = -1;
      attributes->hostPointer = pointer;
      break;
    case MemoryKind::kPageLocked:
      attributes->type = cudaMemoryTypeHost;
      attributes->device = current_device();
      attributes->hostPointer = attributes->devicePointer = pointer;
      break;
    case MemoryKind::kDevice:
      if (memory.allocation == nullptr) return note(cudaErrorInvalidValue);
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = memory.device;
      attributes->devicePointer = pointer;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, nullptr, true);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from, int /*from_device*/,
                                std::size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream, false);
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return note(cudaErrorInvalidPitchValue);
  if (width * height > 0 && from == nullptr) return note(cudaErrorInvalidValue);
  return note(transfer({to, to_pitch, from, from_pitch, width, height, 0}, kind, stream, false));
}

cudaError_t cudaMemsetAsync(void* address, int value, std::size_t bytes, cudaStream_t stream) {
  return note(
      transfer({address, bytes, nullptr, 0, bytes, 1, value}, cudaMemcpyDefault, stream, false));
}

cudaError_t cudaMemset(void* address, int value, std::size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (function == nullptr) return note(cudaErrorInvalidDeviceFunction);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<std::size_t>(value) > kSharedBytes) {
    return note(cudaErrorInvalidValue);
  }
  shared_bytes_allowed().set(current_device(), function, static_cast<std::size_t>(value));
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  if (function == nullptr) return note(cudaErrorInvalidDeviceFunction);
  if (const cudaError_t status = kernel_status(current_device()); status != cudaSuccess) {
    return note(status);
  }
  *attributes = {};
  attributes->maxThreadsPerBlock = kBlockThreads;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int threads, std::size_t shared_bytes) {
  if (function == nullptr) return note(cudaErrorInvalidDeviceFunction);
  if (threads <= 0 || threads > static_cast<int>(kBlockThreads)) return note(cudaErrorInvalidValue);
  *blocks = shared_bytes > kSharedBytes / 2 ? 1 : 2;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
#define SLUICE_NAME(code) \
  case code:              \
    return #code
    SLUICE_NAME(cudaSuccess);
    SLUICE_NAME(cudaErrorInvalidValue);
    SLUICE_NAME(cudaErrorMemoryAllocation);
    SLUICE_NAME(cudaErrorInvalidConfiguration);
    SLUICE_NAME(cudaErrorInvalidPitchValue);
    SLUICE_NAME(cudaErrorInvalidDeviceFunction);
    SLUICE_NAME(cudaErrorNoDevice);
    SLUICE_NAME(cudaErrorNoKernelImageForDevice);
    SLUICE_NAME(cudaErrorUnsupportedPtxVersion);
    SLUICE_NAME(cudaErrorInvalidDevice);
    SLUICE_NAME(cudaErrorInvalidResourceHandle);
    SLUICE_NAME(cudaErrorIllegalState);
    SLUICE_NAME(cudaErrorNotReady);
    SLUICE_NAME(cudaErrorHostMemoryAlreadyRegistered);
    SLUICE_NAME(cudaErrorHostMemoryNotRegistered);
    SLUICE_NAME(cudaErrorStreamCaptureUnsupported);
    SLUICE_NAME(cudaErrorStreamCaptureInvalidated);
    SLUICE_NAME(cudaErrorStreamCaptureUnmatched);
    SLUICE_NAME(cudaErrorStreamCaptureIsolation);
    SLUICE_NAME(cudaErrorCapturedEvent);
#undef SLUICE_NAME
    default:
      return "unrecognized error code";
  }
}

const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    default:
      return cudaGetErrorName(status);
  }
}
