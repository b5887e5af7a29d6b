// Sums of this rank's gradients over replicas after each micro-batch (GradientOrder::kMicroBatch),
// in host memory. Internal to the pipeline. One thread.
//
// A stage's gradients are those of one micro-batch: each overwrites what is there. What is final of
// it is added over the replicas, each of which adds its own part to what it has of the
// micro-batches before, and gives the pages of all gradients back. So the gradients of two calls of
// FinalGradients::from() are there at once, and a replica's part of the sums. At the end of a step
// that part goes to its place in the flat gradients.
#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/stage.hpp>

#include "comm/group/host_sums.hpp"
#include "runtime/engine/stage_binding.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/layout/parameter_cut.hpp"

namespace sluice {

class MicroBatchSums {
 public:
  // `stages` are this rank's, and have parameters. All that is named outlives this. Takes the
  // memory of a replica's sums.
  MicroBatchSums(HostSums& sums, const JobLayout& layout, ComputeContext& compute,
                 std::span<const StageBinding> stages);

  // All but clear() are collective over the replicas, which make the same calls in the same order.
  // Before a B or W of the stage, which takes what this returns; null: the stage has no parameters.
  FinalGradients* begin(int stage);
  void end(int stage);  // after it
  // After the step's last B or W of the stage: from here on end_sum() ends its sums.
  void reduce(int stage);
  void end_sum(int stage);
  // Forgets the step.
  void clear();

 private:
  class StageSums : public FinalGradients {
   public:
    StageSums(MicroBatchSums& sums, const JobLayout& layout, const StageBinding& binding);
    void from(std::size_t begin) override;
    [[nodiscard]] int stage() const { return stage_; }
    void begin();
    void take();  // waits for what is on its way
    void reduce() { reduces_ = true; }
    void end_sum();
    void clear();

   private:
    struct Part {
      std::span<float> range;
      std::vector<std::size_t> ends;  // [replica]
      std::span<float> own, sum;      // the own part of `range`; of the micro-batches so far
    };
    void take(std::size_t first);

    MicroBatchSums& sums_;
    int stage_;
    ParameterSet& parameters_;
    Buffer memory_;            // of the sums
    std::vector<Part> parts_;  // ascending
    // [next_, taken_) are on their way; those before are not final.
    std::size_t next_ = 0, taken_ = 0;
    HostSums::Ticket ticket_;
    bool begun_ = false, first_ = false, reduces_ = false;
  };
  [[nodiscard]] StageSums* find(int stage);

  HostSums& host_;
  ComputeContext& compute_;
  std::deque<StageSums> stages_;
};

}  // namespace sluice
