#include "stages/cuda/check.hpp"

#include <fmt/format.h>

#include "comm/error.hpp"

namespace sluice::cuda {

void check_cublas(cublasStatus_t status, std::string_view what, std::source_location location) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorCode::kDevice, fmt::format("{}: {}", what, cublasLtGetStatusName(status)), -1,
              location);
}

}  // namespace sluice::cuda
