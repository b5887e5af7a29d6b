// Sums of this rank's gradients over replicas, by NCCL, bucket by bucket, concurrently with the
// rest of the step. Internal to the pipeline. One thread.
//
// A stage's flat gradients are divided into buckets of one size, starting at the end, where layers
// finish first; the bucket at the start may be smaller. The sum of a bucket starts once all of it
// is final, while the stage's last backward still runs, else at REDUCE_GRAD. The division is a
// function of sizes alone, so all replicas sum the same ranges in the same order. It does not
// change the sum of an element.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/stage.hpp>

#include "runtime/engine/engine_config.hpp"
#include "runtime/job/nccl_routes.hpp"

namespace sluice {

class BucketedSums {
 public:
  // `stages` are this rank's. `nccl`, `compute` and the stages outlive this. `bucket_bytes`, at
  // least 1, is rounded up to a multiple of kBufferAlignment.
  BucketedSums(NcclRoutes& nccl, ComputeContext& compute, std::span<const StageBinding> stages,
               std::size_t bucket_bytes);

  // What NcclRoutes must have room for.
  [[nodiscard]] static SumLoad load_of(std::span<const StageBinding> stages,
                                       std::size_t bucket_bytes);
  // The same, by the floats of each stage's gradients.
  [[nodiscard]] static SumLoad load_of(std::span<const std::size_t> floats,
                                       std::size_t bucket_bytes);

  // Takes the final gradients of the stage's last backward of a step; null where it has none.
  [[nodiscard]] FinalGradients* final_gradients(int stage);
  // Starts the stage's sums that have not started. Their input is complete after all work so far on
  // the compute stream.
  void finish(int stage);
  // Makes all later work of the compute stream run after the sums of this step. May wait until NCCL
  // has accepted them.
  void wait_all_on_stream();

 private:
  class StageSum : public FinalGradients {
   public:
    // `parameters` may be null.
    StageSum(BucketedSums& sums, int stage, ParameterSet* parameters);
    void from(std::size_t begin) override;
    [[nodiscard]] int stage() const { return stage_; }
    void begin_step() { left_ = gradients_.size(); }

   private:
    BucketedSums& sums_;
    int stage_;
    ParameterSet* parameters_;
    std::span<float> gradients_;
    std::size_t left_ = 0;  // floats whose sum has not started, from 0 on
  };

  NcclRoutes& nccl_;
  ComputeContext& compute_;
  std::size_t bucket_;  // floats
  std::vector<StageSum> stages_;
  std::vector<NcclTicket> open_;
};

}  // namespace sluice
