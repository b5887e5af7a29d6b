// A GPU's operators.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cuda {

// Their contexts have a CudaBackend.
[[nodiscard]] const OperatorTable& cuda_operators();

}  // namespace sluice::cuda
