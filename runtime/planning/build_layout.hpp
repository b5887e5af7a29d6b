// Makes the layout of a job: this rank's stages, verified plans, shapes and routes of every edge,
// bytes per rank.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/options.hpp>
#include <sluice/stage.hpp>

#include "runtime/group/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct BuiltLayout {
  JobLayout layout;
  std::vector<std::unique_ptr<Stage>> stages;  // of this rank, ascending
};

// Collective over the job. Makes this rank's stages, which allocate nothing yet, and exchanges what
// they describe. `compute`: what the stages will run with. `any_size`: steps may have fewer
// micro-batches than the options say. Throws Error(kUsage) for options and
// stages that cannot work, Error(kPlan) for a schedule or plan that breaks a rule.
[[nodiscard]] BuiltLayout build_layout(JobContext& job, const PipelineOptions& options,
                                       ComputeContext& compute, const StageFactory& make_stage,
                                       const DataSource& source, bool any_size);

// Refuses, on every rank alike, a layout that needs more memory than a rank may take,
// Error(kUsage), or than there is, Error(kDevice).
void require_memory(const JobContext& job, const PipelineOptions& options, const JobLayout& layout);

// Collective over the pipeline. Adds micro-batches of `shape`, which is within the largest, to the
// layout's edges, and prepares `stages`, this rank's, for them. Throws Error(kUsage) where a
// stage cannot take them.
void add_size(JobContext& job, ComputeContext& compute, const DataSource& source,
              std::span<const std::unique_ptr<Stage>> stages, UnitShape shape, JobLayout& layout);

// The samples of the largest step, over all virtual replicas.
[[nodiscard]] std::int64_t largest_batch(const PipelineOptions& options, int virtual_replicas);

// Verified plans for another number of micro-batches of a replica, in training a multiple of
// RankPlace::shares; the same on all ranks. `layout` is complete
// but for its plans. Throws Error(kUsage) where the schedule does not have that number,
// Error(kPlan) where it breaks a rule.
[[nodiscard]] Plan plan_step(const JobLayout& layout, const PipelineOptions& options,
                             int micro_batches);
[[nodiscard]] Plan plan_forward(const JobLayout& layout, int micro_batches);

}  // namespace sluice
