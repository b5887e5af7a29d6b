// The messages of traced steps, as arrows between what made a tensor and what used it.
#pragma once

#include <vector>

#include "runtime/files/trace.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// `traces`: [rank of the job], each with the compute events of the same steps in their order. An
// arrow for each message of the layout's training plan, replica and step: from F of a stage to F of
// the next one, and from B or I of a stage to B or I of the one before. Stages of one rank exchange
// no message, nor does an edge without gradients on the way back. Arrows need not be in order of
// time.
[[nodiscard]] std::vector<TraceArrow> message_arrows(const std::vector<RankTrace>& traces,
                                                     const JobLayout& layout);

}  // namespace sluice
