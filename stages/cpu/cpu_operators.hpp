// The CPU's operators, the specification of every other backend's. Their contexts have a
// CpuBackend.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cpu {

SLUICE_OPERATORS(SLUICE_DECLARE)
inline constexpr OperatorTable kOperators = {SLUICE_OPERATORS(SLUICE_ENTRY)};

}  // namespace sluice::cpu
