// The parts of a GPU's table of operators that call libraries, each filled by the source that has
// them; those that are kernels alone are in stages/cuda_kernels/kernels.hpp.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cuda {

[[nodiscard]] LinearOperators linear_operators();
[[nodiscard]] AttentionOperators attention_operators();

}  // namespace sluice::cuda
