// Checks of the status that CUDA libraries return: functions, not macros. Internal to stages/cuda.
#pragma once

#include <cublasLt.h>

#include <source_location>
#include <string>
#include <string_view>

#if SLUICE_WITH_CUDNN
#include <cudnn.h>
#endif

namespace sluice::cuda {

// Throws Error(kDevice) "what: CUBLAS_STATUS_...", at the caller's place, unless the call
// succeeded; OutOfMemory, with what the device has left, where the library found no memory. `what`
// names the call and, where it helps, what it was to compute.
void check_cublas(cublasStatus_t status, std::string_view what,
                  std::source_location location = std::source_location::current());

#if SLUICE_WITH_CUDNN
// As above, with the library's own account of its last failure where it has one.
void check_cudnn(cudnnStatus_t status, std::string_view what,
                 std::source_location location = std::source_location::current());
// The status by name, and what the library said last on this thread.
[[nodiscard]] std::string describe(cudnnStatus_t status);
#endif

}  // namespace sluice::cuda
