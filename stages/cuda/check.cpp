#include "stages/cuda/check.hpp"

#include <fmt/format.h>

#include <array>

#include "comm/error.hpp"

namespace sluice::cuda {

void check_cublas(cublasStatus_t status, std::string_view what, std::source_location location) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorCode::kDevice, fmt::format("{}: {}", what, cublasLtGetStatusName(status)), -1,
              location);
}

#if SLUICE_WITH_CUDNN
std::string describe(cudnnStatus_t status) {
  std::array<char, 512> said = {};
  cudnnGetLastErrorString(said.data(), said.size());
  const std::string name = cudnnGetErrorString(status);
  // One line: the library's account may hold several.
  std::string account(said.data());
  for (char& letter : account) {
    if (letter == '\n') letter = ' ';
  }
  return account.empty() || account == name ? name : fmt::format("{} ({})", name, account);
}

void check_cudnn(cudnnStatus_t status, std::string_view what, std::source_location location) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(ErrorCode::kDevice, fmt::format("{}: {}", what, describe(status)), -1, location);
}
#endif

}  // namespace sluice::cuda
