#include "tests/emulated_cuda/modules.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "tests/emulated_cuda/memory.hpp"
#include "tests/emulated_cuda/stream.hpp"

namespace sluice::emulated {

namespace {

std::atomic<int> driver_version = CUDART_VERSION;
std::mutex mutex;                              // over what follows
std::set<std::pair<int, const void*>> loaded;  // device and kernel
std::set<std::string> launched;
std::map<int, cudaError_t> kernel_statuses;  // [device] what a test has set

// --- the driver's functions; a handle is the kernel's address ---
CUresult loading_mode(CUmoduleLoadingMode* mode) {
  const char* const wanted = std::getenv("CUDA_MODULE_LOADING");
  *mode = wanted != nullptr && std::string_view(wanted) == "EAGER" ? CU_MODULE_EAGER_LOADING
                                                                   : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}
CUresult module_of(CUmodule* module, CUfunction function) {
  *module = reinterpret_cast<CUmodule>(function);
  return CUDA_SUCCESS;
}
CUresult count_functions(unsigned* count, CUmodule module) {
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult list_functions(CUfunction* functions, unsigned count, CUmodule module) {
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (count > 0) *functions = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}
CUresult load(CUfunction function) {
  const std::lock_guard lock(mutex);
  loaded.emplace(current_device(), reinterpret_cast<const void*>(function));
  return CUDA_SUCCESS;
}

struct Entry {
  std::string_view name;
  int since;
  void* function;
};

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

bool is_loaded(const void* kernel, int device) {
  const std::lock_guard lock(mutex);
  return loaded.contains({device, kernel});
}

int count_loaded(int device) {
  const std::lock_guard lock(mutex);
  return static_cast<int>(std::count_if(
      loaded.begin(), loaded.end(), [device](const auto& each) { return each.first == device; }));
}

void unload_all() {
  const std::lock_guard lock(mutex);
  loaded.clear();
}

void forget_launches() {
  const std::lock_guard lock(mutex);
  launched.clear();
}

std::set<std::string> launched_kernels() {
  const std::lock_guard lock(mutex);
  return launched;
}

void note_launch(const char* name) {
  const std::lock_guard lock(mutex);
  launched.emplace(name);
}

void set_kernel_status(int device, cudaError_t status) {
  const std::lock_guard lock(mutex);
  kernel_statuses[device] = status;
}

cudaError_t kernel_status(int device) {
  const std::lock_guard lock(mutex);
  const auto found = kernel_statuses.find(device);
  return found == kernel_statuses.end() ? cudaSuccess : found->second;
}

void set_driver_version(int version) { driver_version = version; }

}  // namespace sluice::emulated

using namespace sluice::emulated;  // NOLINT(google-build-using-namespace): the C functions below

cudaError_t cudaDriverGetVersion(int* version) {
  *version = device_count() == 0 ? 0 : driver_version.load();
  return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  if (device_count() == 0) return note(cudaErrorNoDevice);
  if (symbol == nullptr) return note(cudaErrorInvalidDeviceFunction);
  *function = static_cast<cudaFunction_t>(const_cast<void*>(symbol));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  static const Entry entries[] = {
      {"cuFuncGetModule", 11000, address(&module_of)},
      {"cuModuleGetLoadingMode", 11070, address(&loading_mode)},
      {"cuModuleGetFunctionCount", 12040, address(&count_functions)},
      {"cuModuleEnumerateFunctions", 12040, address(&list_functions)},
      {"cuFuncLoad", 12040, address(&load)},
      {"cuDeviceGet", 2000, address(&device_of_ordinal)},
      {"cuDeviceGetAttribute", 2000, address(&device_attribute)},
      {"cuMemGetAllocationGranularity", 10020, address(&memory_granularity)},
      {"cuMemAddressReserve", 10020, address(&reserve_range)},
      {"cuMemAddressFree", 10020, address(&free_range)},
      {"cuMemCreate", 10020, address(&create_memory)},
      {"cuMemRelease", 10020, address(&release_memory)},
      {"cuMemMap", 10020, address(&map_memory)},
      {"cuMemUnmap", 10020, address(&unmap_memory)},
      {"cuMemSetAccess", 10020, address(&set_memory_access)}};
  *function = nullptr;
  *result = cudaDriverEntryPointSymbolNotFound;
  for (const Entry& entry : entries) {
    if (entry.name != symbol || entry.since > driver_version) continue;
    if (static_cast<int>(version) < entry.since) {
      *result = cudaDriverEntryPointVersionNotSufficent;
    } else {
      *function = entry.function;
      *result = cudaDriverEntryPointSuccess;
    }
  }
  return cudaSuccess;
}
