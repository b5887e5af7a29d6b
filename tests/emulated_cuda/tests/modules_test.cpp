// Lazy loading of the emulated CUDA: what the driver is asked for by name.
#include "tests/emulated_cuda/modules.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace sluice::emulated {
namespace {

template <typename Function>
cudaDriverEntryPointQueryResult find(const char* name, unsigned version, Function** function) {
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSuccess;
  void* found = nullptr;
  EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result),
            cudaSuccess);
  *function = reinterpret_cast<Function*>(found);
  return result;
}

TEST(EmulatedModulesTest, LoadsTheKernelOfAModuleOnTheCurrentDevice) {
  static const int kernel = 0;
  decltype(cuFuncGetModule)* get_module = nullptr;
  decltype(cuModuleGetFunctionCount)* count_functions = nullptr;
  decltype(cuModuleEnumerateFunctions)* list_functions = nullptr;
  decltype(cuFuncLoad)* load = nullptr;
  ASSERT_EQ(find("cuFuncGetModule", 12040, &get_module), cudaDriverEntryPointSuccess);
  ASSERT_EQ(find("cuModuleGetFunctionCount", 12040, &count_functions), cudaDriverEntryPointSuccess);
  ASSERT_EQ(find("cuModuleEnumerateFunctions", 12040, &list_functions),
            cudaDriverEntryPointSuccess);
  ASSERT_EQ(find("cuFuncLoad", 12040, &load), cudaDriverEntryPointSuccess);

  unload_all();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaFunction_t function = nullptr;
  ASSERT_EQ(cudaGetFuncBySymbol(&function, &kernel), cudaSuccess);
  CUmodule module = nullptr;
  ASSERT_EQ(get_module(&module, function), CUDA_SUCCESS);
  unsigned count = 0;
  ASSERT_EQ(count_functions(&count, module), CUDA_SUCCESS);
  ASSERT_EQ(count, 1U);
  CUfunction listed = nullptr;
  ASSERT_EQ(list_functions(&listed, count, module), CUDA_SUCCESS);
  EXPECT_FALSE(is_loaded(&kernel, 1));
  ASSERT_EQ(load(listed), CUDA_SUCCESS);
  EXPECT_TRUE(is_loaded(&kernel, 1));
  EXPECT_FALSE(is_loaded(&kernel, 0));
  EXPECT_EQ(count_loaded(1), 1);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST(EmulatedModulesTest, ADriverHasTheFunctionsOfItsVersion) {
  decltype(cuFuncLoad)* load = nullptr;
  EXPECT_EQ(find("cuFuncLoad", 12030, &load), cudaDriverEntryPointVersionNotSufficent);
  set_driver_version(12030);
  EXPECT_EQ(find("cuFuncLoad", 12040, &load), cudaDriverEntryPointSymbolNotFound);
  EXPECT_EQ(load, nullptr);
  int version = 0;
  EXPECT_EQ(cudaDriverGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version, 12030);
  set_driver_version(CUDART_VERSION);
}

}  // namespace
}  // namespace sluice::emulated
