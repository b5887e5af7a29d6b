#include "comm/device/device_cuda.hpp"

#include <string>

#include <sluice/error.hpp>

#include "comm/device/hardware_queues.hpp"

namespace sluice {

bool built_with_cuda() { return true; }

namespace cuda {

namespace {

constexpr int kOldestMajor = 8;  // of compute capabilities: earlier ones do not know bf16
// The oldest driver that takes kernels with more than 4 KiB of parameters
// (stages/cuda_kernels/update.cu).
constexpr int kOldestDriver = 12010;

}  // namespace

void check(cudaError_t status, std::string_view what, std::source_location location) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // clears an error that is not sticky
  const std::string message = std::string(what) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(message, location);
  throw Error(ErrorCode::kDevice, message, -1, location);
}

std::string free_memory_text() {
  std::size_t free = 0, total = 0;
  static_cast<void>(cudaMemGetInfo(&free, &total));
  return std::to_string(free) + " of " + std::to_string(total) + " bytes are free";
}

void throw_out_of_memory(int index, std::size_t bytes, const std::string& free_memory) {
  throw OutOfMemory("cannot allocate " + std::to_string(bytes) + " bytes on cuda:" +
                    std::to_string(index) + ": out of memory (" + free_memory + ")");
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int count_devices(std::string* why_none) {
  ask_for_hardware_queues();
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    count = 0;
  }
  int driver = 0, runtime = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  const bool too_old = driver / 1000 < runtime / 1000;
  if (count > 0 && driver >= kOldestDriver) return count;
  if (why_none == nullptr) return 0;
  if (driver == 0) {
    *why_none = "no NVIDIA driver";
  } else if (too_old || driver < kOldestDriver) {
    *why_none = "the driver speaks CUDA " + version_text(driver) + ", this build needs " +
                version_text(too_old ? runtime : kOldestDriver);
  } else {
    *why_none = status == cudaSuccess ? "no GPU" : cudaGetErrorString(status);
  }
  return 0;
}

DeviceProperties read_properties(int index) {
  const Selected selected(index);
  cudaDeviceProp found = {};
  check(cudaGetDeviceProperties(&found, index), "cudaGetDeviceProperties");
  DeviceProperties properties;
  properties.name = found.name;
  char address[32] = {};
  check(cudaDeviceGetPCIBusId(address, sizeof address, index), "cudaDeviceGetPCIBusId");
  properties.identity = address;
  check(cudaMemGetInfo(&properties.free_memory, &properties.memory), "cudaMemGetInfo");
  properties.major = found.major;
  properties.minor = found.minor;
  properties.multiprocessors = found.multiProcessorCount;
  properties.shared_memory = found.sharedMemPerMultiprocessor;
  check(cudaDriverGetVersion(&properties.driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&properties.runtime), "cudaRuntimeGetVersion");
  return properties;
}

void require_usable(int index) {
  std::string why;
  const int count = count_devices(&why);
  const std::string wanted = "device cuda:" + std::to_string(index);
  if (count == 0) {
    throw Error(ErrorCode::kUsage, wanted + " cannot be used: " + why + "; legal: cpu");
  }
  if (index >= count) {
    throw Error(ErrorCode::kUsage, wanted + " does not exist; legal: cuda:0" +
                                       (count > 1 ? " to cuda:" + std::to_string(count - 1) : "") +
                                       ", or cpu");
  }
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index),
        "cudaDeviceGetAttribute");
  if (major < kOldestMajor) {
    throw Error(ErrorCode::kUsage, wanted + " has compute capability " + std::to_string(major) +
                                       "." + std::to_string(minor) + "; legal: " +
                                       std::to_string(kOldestMajor) + ".0 and newer, or cpu");
  }
}

void select(int index) {
  check(cudaSetDevice(index), "cudaSetDevice(" + std::to_string(index) + ")");
}

void* make_stream(int index, StreamPriority priority) {
  const Selected selected(index);
  int lowest = 0, highest = 0;  // smaller numbers are higher priorities
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                     priority == StreamPriority::kHigh ? highest : lowest),
        "cudaStreamCreateWithPriority");
  return stream;
}

void destroy_stream(void* stream) noexcept {
  static_cast<void>(cudaStreamDestroy(static_cast<cudaStream_t>(stream)));
}

void synchronize(void* stream) {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
}

void wait(void* stream, void* event) {
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0),
        "cudaStreamWaitEvent");
}

void* make_event(int index, bool timed) {
  const Selected selected(index);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags");
  return event;
}

double seconds_between(void* earlier, void* later) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(earlier),
                             static_cast<cudaEvent_t>(later)),
        "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

void destroy_event(void* event) noexcept {
  static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
}

void record(void* event, void* stream) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)),
        "cudaEventRecord");
}

bool done(void* event) {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // else a user's stage sees it next
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

std::byte* allocate(int index, std::size_t bytes) {
  const Selected selected(index);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw_out_of_memory(index, bytes, free_memory_text());
  }
  check(status, "cudaMalloc(" + std::to_string(bytes) + ")");
  return static_cast<std::byte*>(data);
}

void release(std::byte* data) noexcept { static_cast<void>(cudaFree(data)); }

std::byte* allocate_host(int index, std::size_t bytes) {
  const Selected selected(index);
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable),
        "cannot allocate " + std::to_string(bytes) +
            " bytes of page-locked host memory for cuda:" + std::to_string(index));
  return static_cast<std::byte*>(data);
}

void release_host(std::byte* data) noexcept { static_cast<void>(cudaFreeHost(data)); }

void copy(void* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}

void fill_zero(void* to, std::size_t bytes, void* stream) {
  check(cudaMemsetAsync(to, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

void copy_blocking(int index, void* to, const void* from, std::size_t bytes) {
  const Selected selected(index);
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  // From pageable memory the call returns before the last bytes arrive, and Sluice's streams do not
  // wait for the default stream.
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

}  // namespace cuda

}  // namespace sluice
