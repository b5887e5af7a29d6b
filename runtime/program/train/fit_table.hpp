// What makes a training take less memory: the table of --dry-run.
#pragma once

#include <string>

#include <sluice/options.hpp>
#include <sluice/transformer.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/program/train/recompute_choice.hpp"

namespace sluice {

// A line for what is given, one for each option that the training lacks, and for those together:
// the memory of the fullest rank by its plan, and what the option costs. Where a host, a control
// group or a GPU has too little for its ranks together, also what they need. No bit depends on any.
// Calls `layout_of` once for each line but the first. Empty where there is no such option.
[[nodiscard]] std::string describe_fit(const TransformerConfig& model,
                                       const PipelineOptions& options, const JobLayout& given,
                                       const LayoutOfOptions& layout_of);

}  // namespace sluice
