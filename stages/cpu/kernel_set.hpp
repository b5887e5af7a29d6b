// Which kernel set runs.
#pragma once

#include "stages/cpu_kernels/kernels.hpp"

namespace sluice {

// The widest set this machine can run, or the one SLUICE_KERNELS names. Throws Error(kUsage) for a
// name that is none or that this machine cannot run.
[[nodiscard]] const Kernels& choose_kernels();

}  // namespace sluice
