// What the check of an operator's operands costs per call, beside the operator itself, which
// includes it: for the smallest sizes that somebody trains with, where it costs most.
#pragma once

#include <sluice/compute.hpp>

#include "tests/benchmarks/benchmark_report.hpp"

namespace sluice::benchmarks {

// Nanoseconds of the calling thread's processor time, medians of `rounds`; both take turns.
[[nodiscard]] Report check_costs(ComputeContext& ctx, int rounds);

}  // namespace sluice::benchmarks
