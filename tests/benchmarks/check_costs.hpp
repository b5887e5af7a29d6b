// What the check of an operator's operands costs per call: the public operator's time less that of
// the backend's, which checks nothing. Of the smallest sizes in use, where checks cost most.
#pragma once

#include <sluice/compute.hpp>

#include "tests/benchmarks/benchmark_report.hpp"

namespace sluice::benchmarks {

// Nanoseconds of the calling thread's processor time, medians of `rounds`; both take turns.
[[nodiscard]] Report check_costs(ComputeContext& ctx, int rounds);

}  // namespace sluice::benchmarks
