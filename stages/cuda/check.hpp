// Checks of the status that CUDA libraries return: functions, not macros. Internal to stages/cuda.
#pragma once

#include <cublasLt.h>

#include <source_location>
#include <string_view>

namespace sluice::cuda {

// Throws Error(kDevice) "what: CUBLAS_STATUS_...", at the caller's place, unless the call
// succeeded. `what` names the call and, where it helps, what it was to compute.
void check_cublas(cublasStatus_t status, std::string_view what,
                  std::source_location location = std::source_location::current());

}  // namespace sluice::cuda
