#include <cuda.h>  // types alone: the driver is asked for its functions, not linked
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include <sluice/cuda.hpp>
#include <sluice/error.hpp>

#include "comm/device/device_cuda.hpp"

namespace sluice::cuda {

namespace {

struct Driver {
  decltype(&cuModuleGetLoadingMode) get_loading_mode = nullptr;
  decltype(&cuFuncGetModule) get_module = nullptr;
  decltype(&cuModuleGetFunctionCount) count_functions = nullptr;
  decltype(&cuModuleEnumerateFunctions) list_functions = nullptr;
  decltype(&cuFuncLoad) load = nullptr;

  Driver() {
    find_in_driver(get_loading_mode, "cuModuleGetLoadingMode", 11070);
    find_in_driver(get_module, "cuFuncGetModule", 11000);
    find_in_driver(count_functions, "cuModuleGetFunctionCount", 12040);
    find_in_driver(list_functions, "cuModuleEnumerateFunctions", 12040);
    find_in_driver(load, "cuFuncLoad", 12040);
  }

  [[nodiscard]] bool loads_eagerly() const {
    CUmoduleLoadingMode mode = CU_MODULE_LAZY_LOADING;
    if (get_loading_mode != nullptr) check_call(get_loading_mode(&mode), "cuModuleGetLoadingMode");
    return mode == CU_MODULE_EAGER_LOADING;
  }
  [[nodiscard]] bool loads_on_demand() const {
    return get_module != nullptr && count_functions != nullptr && list_functions != nullptr &&
           load != nullptr;
  }
  static void check_call(CUresult status, const char* what) {
    if (status == CUDA_SUCCESS) return;
    throw Error(ErrorCode::kDevice, std::string("loading kernels: ") + what +
                                        " returned CUresult " + std::to_string(status));
  }
};

void load_module_of(const void* kernel, const Driver& driver) {
  cudaFunction_t any = nullptr;
  check(cudaGetFuncBySymbol(&any, kernel), "cudaGetFuncBySymbol");
  CUmodule module = nullptr;
  Driver::check_call(driver.get_module(&module, any), "cuFuncGetModule");
  unsigned count = 0;
  Driver::check_call(driver.count_functions(&count, module), "cuModuleGetFunctionCount");
  std::vector<CUfunction> functions(count);
  Driver::check_call(driver.list_functions(functions.data(), count, module),
                     "cuModuleEnumerateFunctions");
  for (CUfunction function : functions) Driver::check_call(driver.load(function), "cuFuncLoad");
}

// Whether the kernel has no code for the GPU and none that the driver can compile for it.
bool says_no_code(cudaError_t status) {
  return status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
         status == cudaErrorUnsupportedPtxVersion || status == cudaErrorInvalidPtx ||
         status == cudaErrorJitCompilerNotFound || status == cudaErrorJitCompilationDisabled;
}

// "9.0" of 90.
std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

}  // namespace

void require_code(int index) {
  for (const KernelModule* module = KernelModule::first; module != nullptr;
       module = module->next_) {
    cudaFuncAttributes unused = {};
    const cudaError_t status = cudaFuncGetAttributes(&unused, module->kernel_);
    if (!says_no_code(status)) {
      check(status, "cudaFuncGetAttributes");
      continue;
    }
    static_cast<void>(cudaGetLastError());
    const DeviceProperties gpu = read_properties(index);
    const int capability = 10 * gpu.major + gpu.minor;
    std::string compiled;
    for (const int architecture : module->architectures_) {
      compiled += (compiled.empty() ? "" : ", ") + capability_text(architecture / 10);
    }
    throw Error(ErrorCode::kUsage,
                "device cuda:" + std::to_string(index) + " (" + gpu.name +
                    ") has compute capability " + capability_text(capability) +
                    ", for which this build has no code: its kernels were compiled for " +
                    compiled + " (" + cudaGetErrorString(status) + "; driver for CUDA " +
                    version_text(gpu.driver) + "); legal: a build with " +
                    std::to_string(capability) + " in SLUICE_CUDA_ARCHITECTURES, or cpu");
  }
}

void load_kernels() {
  const Driver driver;
  if (driver.loads_eagerly()) return;
  if (!driver.loads_on_demand()) {
    throw Error(ErrorCode::kDevice,
                "the driver cannot load kernels in advance, and loading one while NCCL waits may "
                "never end; use a driver for CUDA 12.4 or newer, CUDA_MODULE_LOADING=EAGER in the "
                "environment, or --transport mpi");
  }
  for (const KernelModule* module = KernelModule::first; module != nullptr;
       module = module->next_) {
    load_module_of(module->kernel_, driver);
  }
}

}  // namespace sluice::cuda
