#include "stages/cuda/context.hpp"

#include <fmt/format.h>

#include <utility>

#include "stages/cuda/check.hpp"
#include "stages/cuda/matmul.hpp"

namespace sluice::cuda {

Context::Context(Device device, StreamView stream)
    : device_(device),
      stream_(stream),
      workspace_(device, kWorkspaceBytes),
      matmuls_(std::make_unique<Matmuls>(*this)) {
  const DeviceProperties properties = properties_of(device);
  compute_capability_ = 10 * properties.major + properties.minor;
  check_cublas(cublasLtCreate(&cublas_), "cublasLtCreate");
}

Context::~Context() {
  matmuls_.reset();
  if (cublas_ != nullptr) cublasLtDestroy(cublas_);
}

std::shared_ptr<Context> make_context(Device device, StreamView stream) {
  return std::make_shared<Context>(device, stream);
}

std::string libraries() {
  const std::size_t version = cublasLtGetVersion();
  std::string text =
      fmt::format("cuBLASLt {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  return text;
}

}  // namespace sluice::cuda
