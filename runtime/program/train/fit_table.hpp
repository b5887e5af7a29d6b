// What makes a training take less memory: the table of --dry-run.
#pragma once

#include <functional>
#include <string>

#include <sluice/options.hpp>
#include <sluice/transformer.hpp>

#include "runtime/layout/job_layout.hpp"

namespace sluice {

// The layout of the job with this model and these options, whether or not it fits; collective over
// the ranks that plan.
using LayoutOfOptions =
    std::function<JobLayout(const TransformerConfig& model, const PipelineOptions& options)>;

// A line for what is given, one for each option that the training lacks, and for those together:
// the memory of the fullest rank by its plan, and what the option costs. No bit depends on any.
// Calls `layout_of` once for each line but the first. Empty where there is no such option.
[[nodiscard]] std::string describe_fit(const TransformerConfig& model,
                                       const PipelineOptions& options, const JobLayout& given,
                                       const LayoutOfOptions& layout_of);

}  // namespace sluice
