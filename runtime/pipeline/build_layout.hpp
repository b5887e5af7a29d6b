// Makes the layout of a job: this rank's stages, verified plans, shapes and routes of every edge,
// bytes per rank.
#pragma once

#include <memory>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/options.hpp>
#include <sluice/stage.hpp>

#include "runtime/job/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct BuiltLayout {
  JobLayout layout;
  std::vector<std::unique_ptr<Stage>> stages;  // of this rank, ascending
};

// Collective over the job. Makes this rank's stages, which allocate nothing yet, and exchanges what
// they describe. `compute`: what the stages will run with. Throws Error(kUsage) for options and
// stages that cannot work, Error(kPlan) for a schedule or plan that breaks a rule, Error(kDevice)
// where the memory is not enough.
[[nodiscard]] BuiltLayout build_layout(JobContext& job, const PipelineOptions& options,
                                       ComputeContext& compute, const StageFactory& make_stage,
                                       const DataSource& source);

}  // namespace sluice
