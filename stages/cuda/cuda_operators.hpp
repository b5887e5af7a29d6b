// A GPU's operators, and the parts of their table that call libraries, each filled by the source
// that has them. The parts that are kernels alone are in stages/cuda_kernels/kernels.hpp.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cuda {

// Their contexts have a CudaBackend.
[[nodiscard]] const OperatorTable& cuda_operators();

[[nodiscard]] LinearOperators linear_operators();
[[nodiscard]] AttentionOperators attention_operators();

}  // namespace sluice::cuda
