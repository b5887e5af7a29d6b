// The CPU's operators: the specification of every other backend's.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice {

// Their contexts have a CpuBackend.
[[nodiscard]] const OperatorTable& cpu_operators();

}  // namespace sluice
