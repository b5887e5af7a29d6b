#include "stages/cuda_context/context.hpp"

#include <fmt/core.h>

#include "comm/device/device_cuda.hpp"
#include "stages/cuda_context/check.hpp"
#include "stages/cuda_context/cublas_lt.hpp"

namespace sluice::cuda {

Context::Context(const OperatorTable& operators, const DeviceMemory& memory, StreamView stream)
    : Backend(operators), memory_(memory), stream_(stream) {
  const DeviceProperties properties = properties_of(memory.device());
  compute_capability_ = 10 * properties.major + properties.minor;
  shared_memory_ = properties.shared_memory;
  check_cublas(cublas_lt().Create(&cublas_), "cublasLtCreate");
}

Context::~Context() {
#if SLUICE_WITH_CUDNN
  if (cudnn_ != nullptr) cudnnDestroy(cudnn_);
#endif
  if (cublas_ != nullptr) cublas_lt().Destroy(cublas_);
}

std::byte* Context::workspace() {
  if (workspace_.size() == 0) {
    workspace_ = memory_.allocate(kDeviceBytes);
    fill_zero_async(workspace_.data() + kWorkspaceBytes, kDeviceBytes - kWorkspaceBytes, stream_);
  }
  return workspace_.data();
}

unsigned* Context::tickets() { return reinterpret_cast<unsigned*>(workspace() + kWorkspaceBytes); }

cudnnContext* Context::cudnn() {
#if SLUICE_WITH_CUDNN
  if (cudnn_ == nullptr) {
    cudnnHandle_t made = nullptr;
    check_cudnn(cudnnCreate(&made), "cudnnCreate");
    const cudnnStatus_t bound = cudnnSetStream(made, native(stream_));
    if (bound != CUDNN_STATUS_SUCCESS) cudnnDestroy(made);
    check_cudnn(bound, "cudnnSetStream");
    cudnn_ = made;
  }
#endif
  return cudnn_;
}

std::string libraries() {
  const std::size_t version = cublas_lt().GetVersion();
  std::string text =
      fmt::format("cuBLASLt {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
#if SLUICE_WITH_CUDNN
  const std::size_t cudnn = cudnnGetVersion();
  text += fmt::format(", cuDNN {}.{}.{}", cudnn / 10000, cudnn / 100 % 100, cudnn % 100);
#endif
  return text;
}

}  // namespace sluice::cuda
