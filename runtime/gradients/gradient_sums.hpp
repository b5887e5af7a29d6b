// Sums of this rank's gradients over replicas. Internal to the pipeline. One thread.
//
// Without NCCL they are made at REDUCE_GRAD, through host memory, and the host waits for them. NCCL
// makes them bucket by bucket, concurrently with the rest of the step. A stage's flat gradients are
// divided into buckets of one size, starting at the end, where layers finish first; the bucket at
// the start may be smaller. The sum of a bucket starts once all of it is final, while the stage's
// last backward still runs, else at REDUCE_GRAD. The division is a function of sizes alone, so all
// replicas sum the same ranges in the same order. It does not change the sum of an element.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/stage.hpp>

#include "runtime/engine/stage_binding.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class GradientSums {
 public:
  // `stages` are this rank's, and have parameters. `nccl`: null where it makes no sums. All that is
  // named outlives this. `bucket_bytes`, at least 1, is rounded up to a multiple of
  // kBufferAlignment.
  GradientSums(JobContext& job, const JobLayout& layout, NcclRoutes* nccl, ComputeContext& compute,
               HostMirror& mirror, std::span<const StageBinding> stages, std::size_t bucket_bytes);

  // What NcclRoutes of a pipeline's rank must have room for.
  [[nodiscard]] static SumLoad load_of(const JobLayout& layout, int rank, std::size_t bucket_bytes);

  // Takes the final gradients of the stage's last backward of a step; null without NCCL.
  [[nodiscard]] FinalGradients* final_gradients(int stage);
  // Makes the stage's sums, with NCCL those that have not started. Their input is complete after
  // all work so far on the compute stream.
  void finish(int stage);
  // Makes all later work of the compute stream run after the sums of this step. May wait until NCCL
  // has accepted them.
  void wait_all_on_stream();

 private:
  class StageSum : public FinalGradients {
   public:
    StageSum(GradientSums& sums, int stage, ParameterSet& parameters)
        : sums_(sums), stage_(stage), parameters_(parameters) {
      begin_step();
    }
    void from(std::size_t begin) override;
    void sum_on_host();
    [[nodiscard]] int stage() const { return stage_; }
    void begin_step() { left_ = parameters_.flat_grads().size(); }

   private:
    GradientSums& sums_;
    int stage_;
    ParameterSet& parameters_;
    std::size_t left_ = 0;  // floats whose sum has not started, from 0 on
  };

  [[nodiscard]] StageSum* find(int stage);

  Collectives& replicas_;
  NcclRoutes* nccl_;
  ComputeContext& compute_;
  HostMirror& mirror_;
  std::size_t bucket_;  // floats
  std::vector<StageSum> stages_;
  std::vector<NcclTicket> open_;
};

}  // namespace sluice
