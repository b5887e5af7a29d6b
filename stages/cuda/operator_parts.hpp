// The parts of a GPU's table of operators that call libraries. Each source fills its part; the
// other parts are in stages/cuda_kernels/kernels.hpp.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cuda {

[[nodiscard]] LinearOperators linear_operators();
[[nodiscard]] AttentionOperators attention_operators();

}  // namespace sluice::cuda
