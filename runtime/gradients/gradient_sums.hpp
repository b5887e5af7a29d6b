// Sums of this rank's gradients over replicas, and values to all replicas. Internal to the
// pipeline. One thread.
//
// NCCL, or on CPUs HostSums, makes them bucket by bucket, concurrently with the rest of the step. A
// stage's flat gradients are divided into buckets of one size, starting at the end, where layers
// finish first; the bucket at the start may be smaller. The sum of a bucket starts once all of it
// is final, while the stage's last backward still runs, else at REDUCE_GRAD. Gradients that have
// shares (Parameter::shares) are final once these are joined, at REDUCE_GRAD; their buckets are the
// last. The division is a function of the parameters alone, so all replicas make the same sums in
// the same order. It does not change the sum of an element. Where a GPU's sums pass through host
// memory, they start at REDUCE_GRAD, and the host waits for them there.
//
// Where each replica updates its own parts of parameters (ParameterEntry::ends), a step that ends
// with the update makes the sum of a part for its replica alone, and gathers the values after it:
// the two halves of a whole sum. A bucket then has the same share of every replica's part of a
// range (CutRange), so that all replicas receive at a time, and starts once all of that range is
// final. HostSums divides a range itself: it is one bucket. Where replicas keep parts of gradients
// alone (ParameterTable::gradients_in_parts), the end of a stage's sums gives the others back.
// Where they have parts of the values alone at rest, those that have the same one (ShardGroups)
// gather that after the update.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <sluice/stage.hpp>

#include "comm/base/steady_seconds.hpp"
#include "comm/group/host_sums.hpp"
#include "runtime/engine/stage_binding.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/layout/parameter_cut.hpp"

namespace sluice {

// The gradients of a sum. They lie in the stage's flat gradients, from `begin` on.
struct GradientBucket {
  std::size_t begin = 0;                // floats
  std::vector<NcclSums::Piece> pieces;  // [replica] what it gets; one where each gets all
};
// A stage's sums of parts, in order, those of each range one after the other: as few as have up to
// `bucket` floats, and less than NcclSums::kPieceMultiple a replica more, and the same share of
// every replica's part. Borders within parts are multiples of kPieceMultiple.
[[nodiscard]] std::vector<GradientBucket> part_buckets(std::span<const CutRange> ranges,
                                                       std::size_t bucket);

// Of a bucket of so many bytes, rounded as GradientSums says.
[[nodiscard]] std::size_t bucket_floats(std::size_t bucket_bytes);

class GradientSums {
 public:
  // `stages` are this rank's, and have parameters. `nccl`: null where it makes no sums. All that is
  // named outlives this. `bucket_bytes`, at least 1, is rounded up to a multiple of
  // kBufferAlignment; HostSums takes at most 1 MiB at a time.
  GradientSums(JobContext& job, const JobLayout& layout, NcclRoutes* nccl, ComputeContext& compute,
               HostMirror& mirror, std::span<const StageBinding> stages, std::size_t bucket_bytes);

  // What NcclRoutes of a pipeline's rank must have room for.
  [[nodiscard]] static SumLoad load_of(const JobLayout& layout, int rank, std::size_t bucket_bytes);

  // Both take `whole`, equal for all sums of a step: every replica gets the sum of all gradients.
  // Else, of a parameter that is updated in parts, a replica gets that of its part alone, and
  // others' parts of the gradient have any content.
  // Takes the final gradients of the stage's last backward of a step; null where sums start at
  // REDUCE_GRAD.
  [[nodiscard]] FinalGradients* final_gradients(int stage, bool whole);
  // Starts those of the stage's sums that have not started. Their input is complete after all work
  // so far on the compute stream; shares are joined.
  void finish(int stage, bool whole);
  // After finish(): waits for the stage's sums in host memory; when they ran, or none where there
  // were none.
  [[nodiscard]] std::optional<TimeSpan> end(int stage);
  // Makes all later work of the compute stream run after the sums of this step. Waits for HostSums,
  // and may wait until NCCL has accepted its own.
  void wait_all_on_stream();
  // Collective over the replicas, after the update: the values of parameters that are updated in
  // parts, from the replicas that updated them to all that have them at rest. Later work of the
  // compute stream runs after it.
  void gather_values();

 private:
  class StageSum : public FinalGradients {
   public:
    StageSum(GradientSums& sums, const JobLayout& layout, const StageBinding& binding);
    void from(std::size_t begin) override;
    void gather_values();
    [[nodiscard]] int stage() const { return stage_; }
    [[nodiscard]] StageSum& with(bool whole) {
      whole_ = whole || !cut_;
      return *this;
    }
    void begin_step() {
      next_ = 0;
      joined_ = false;
    }

   private:
    friend class GradientSums;
    struct Buckets {
      std::vector<GradientBucket> all;
      std::size_t early;  // the first ones, without gradients that have shares
    };
    [[nodiscard]] Buckets in_order(std::vector<GradientBucket> buckets) const;
    [[nodiscard]] const Buckets& buckets() const { return whole_ ? whole_buckets_ : part_buckets_; }
    void start(const GradientBucket& bucket, std::span<float> grads);
    void give_back_others();

    GradientSums& sums_;
    int stage_;
    ParameterSet& parameters_;
    bool cut_;          // replicas update parts
    bool keeps_parts_;  // of gradients
    int replica_;
    std::vector<CutRange> ranges_;  // of these parts
    Buckets whole_buckets_, part_buckets_;
    bool whole_ = true, joined_ = false;
    std::size_t next_ = 0;  // bucket whose sum has not started
    HostSums::Ticket last_;
    double started_ = 0, ended_ = 0;  // in steady_seconds(), of the sums in host memory
  };

  [[nodiscard]] StageSum* find(int stage);

  HostSums& host_;
  bool at_rest_;                      // replicas have parts of the values alone
  std::vector<int> part_of_replica_;  // ShardGroups::parts()
  std::vector<int> copies_;           // replicas with the same values at rest; empty: all
  HostSums& gathers_;                 // over these
  NcclRoutes* nccl_;
  ComputeContext& compute_;
  HostMirror& mirror_;
  bool overlaps_;
  std::size_t bucket_;  // floats
  std::vector<StageSum> stages_;
  std::vector<NcclTicket> open_;
  HostSums::Ticket last_, last_gather_;  // of host_, of gathers_
};

}  // namespace sluice
