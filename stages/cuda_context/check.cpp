#include "stages/cuda_context/check.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "comm/device/device_cuda.hpp"
#include "stages/cuda_context/cublas_lt.hpp"

namespace sluice::cuda {

namespace {

[[noreturn]] void throw_out_of_memory(std::string_view what, std::string_view said,
                                      std::source_location location) {
  throw OutOfMemory(fmt::format("{}: {} ({})", what, said, free_memory_text()), location);
}

}  // namespace

void check_cublas(cublasStatus_t status, std::string_view what, std::source_location location) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const char* const name = cublas_lt().GetStatusName(status);
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw_out_of_memory(what, name, location);
  throw Error(ErrorCode::kDevice, fmt::format("{}: {}", what, name), -1, location);
}

#if SLUICE_WITH_CUDNN
std::string describe(cudnnStatus_t status) {
  std::array<char, 512> said = {};
  cudnnGetLastErrorString(said.data(), said.size());
  const std::string name = cudnnGetErrorString(status);
  // One line: the library's text may have several.
  std::string account(said.data());
  std::ranges::replace(account, '\n', ' ');
  return account.empty() || account == name ? name : fmt::format("{} ({})", name, account);
}

void check_cudnn(cudnnStatus_t status, std::string_view what, std::source_location location) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  if (status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ||
      status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED) {
    throw_out_of_memory(what, describe(status), location);
  }
  throw Error(ErrorCode::kDevice, fmt::format("{}: {}", what, describe(status)), -1, location);
}
#endif

}  // namespace sluice::cuda
