// Sums of this rank's gradients over replicas after each micro-batch (GradientOrder::kMicroBatch).
// Internal to the pipeline. One thread.
//
// A stage's gradients are those of one micro-batch: each overwrites what is there. What is final of
// it is added over the replicas, each of which adds its own part to what it has of the
// micro-batches before. On a CPU it then gives the pages of all gradients back; on a GPU units
// share memory (GradientMemory). So the gradients of two units are there at once, and a replica's
// part of the sums. At the end of a step that part goes to its place in the flat gradients.
//
// A GPU's sums go over NCCL, beside later work of the compute stream, where the replicas' sums do;
// else they pass through host memory, for which the host waits.
#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/stage.hpp>

#include "comm/group/host_sums.hpp"
#include "runtime/engine/stage_binding.hpp"
#include "runtime/gradients/gradient_sums.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/layout/parameter_cut.hpp"

namespace sluice {

class MicroBatchSums {
 public:
  // `stages` are this rank's, and have parameters. `nccl`: null where it makes no sums; it takes
  // buckets of `bucket_bytes`, as GradientSums. All that is named outlives this. Takes the memory
  // of a replica's sums.
  MicroBatchSums(HostSums& sums, const JobLayout& layout, NcclRoutes* nccl, ComputeContext& compute,
                 HostMirror& mirror, std::span<const StageBinding> stages,
                 std::size_t bucket_bytes);

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
    StageSums(MicroBatchSums& sums, const JobLayout& layout, const StageBinding& binding,
              std::size_t bucket_bytes);
    void from(std::size_t begin) override;
    [[nodiscard]] int stage() const { return stage_; }
    [[nodiscard]] std::size_t most_floats() const;  // of a part
    void begin();
    void take();  // waits for what is on its way
    void reduce() { reduces_ = true; }
    void end_sum();
    void clear();

   private:
    struct Part {
      int unit = 0;
      std::span<float> range;
      std::vector<std::size_t> ends;        // CutRange::ends
      std::span<float> own, sum;            // the own part of `range`; of the micro-batches so far
      std::vector<GradientBucket> buckets;  // for NCCL
      HostSums::Ticket ticket = {};
      std::vector<NcclTicket> nccl_tickets = {};
    };
    void start(Part& part);
    void wait(Part& part);
    void take(std::size_t first);
    void find_padding();
    void give_back(std::span<float> floats) const;  // on a CPU

    MicroBatchSums& sums_;
    int stage_;
    ParameterSet& parameters_;
    Buffer memory_;                          // of the sums
    std::vector<Part> parts_;                // ascending
    std::vector<std::span<float>> padding_;  // behind gradients, in own parts
    // [next_, taken_) are on their way; those before are not final.
    std::size_t next_ = 0, taken_ = 0;
    bool begun_ = false, first_ = false, reduces_ = false;
  };
  [[nodiscard]] StageSums* find(int stage);
  [[nodiscard]] bool on_gpu() const { return compute_.device().kind != DeviceKind::kCpu; }

  HostSums& host_;
  NcclRoutes* nccl_;
  ComputeContext& compute_;
  HostMirror& mirror_;
  std::vector<int> part_of_replica_;  // ShardGroups::parts()
  std::deque<StageSums> stages_;
};

}  // namespace sluice
