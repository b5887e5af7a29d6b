// Sums over replicas of this rank's stages over NCCL, bucket by bucket, beside the rest of the
// step. Internal to the pipeline.
//
// A stage's flat gradients are cut from their end on into buckets of one size, the first one
// smaller: layers finish in descending order. A bucket's sum starts once all of it is final, while
// the stage's last backward still runs, the others' at REDUCE_GRAD. Where the cuts lie is a
// function of sizes alone, so all replicas sum the same ranges in the same order; what the sum of
// an element is does not depend on them.
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
  // `routes` and what `stages` (this rank's) name outlive this. `bucket_bytes`, at least 1, is
  // rounded up to a multiple of kBufferAlignment.
  BucketedSums(NcclRoutes& routes, std::span<const StageBinding> stages, std::size_t bucket_bytes);

  // What all sums of a step together ask of NcclRoutes.
  [[nodiscard]] static SumLoad load_of(std::span<const StageBinding> stages,
                                       std::size_t bucket_bytes);
  // The same, by the floats of each stage's gradients.
  [[nodiscard]] static SumLoad load_of(std::span<const std::size_t> floats,
                                       std::size_t bucket_bytes);

  // For the stage's last backward of a step; null where it has no gradients.
  [[nodiscard]] FinalGradients* final_gradients(int stage);
  // Starts what is left of the stage's sum; everything on the compute stream so far is its input.
  void finish(int stage);
  // What goes on the compute stream from here on runs after the sums under way. May wait until NCCL
  // has taken them.
  void settle();

 private:
  class StageSum : public FinalGradients {
   public:
    StageSum(BucketedSums& sums, int stage, std::span<float> gradients)
        : sums_(sums), stage_(stage), gradients_(gradients), left_(gradients.size()) {}
    void from(std::size_t begin) override;
    [[nodiscard]] int stage() const { return stage_; }
    void begin_step() { left_ = gradients_.size(); }

   private:
    BucketedSums& sums_;
    int stage_;
    std::span<float> gradients_;
    std::size_t left_;  // floats whose sum has not started, from 0 on
  };

  NcclRoutes& routes_;
  std::size_t bucket_;  // floats
  std::vector<StageSum> stages_;
  std::vector<NcclTicket> open_;
};

}  // namespace sluice
