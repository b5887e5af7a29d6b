// Batches of the caller: what ranks pass is checked and compared before the first message, sent
// from rank 0 where all of it lies there, and cut into micro-batches without a copy.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>

#include "runtime/data/batch_loader.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/call.hpp"

namespace sluice {

// The shapes of a pipeline without a source; its inputs() and targets() throw Error(kUsage). Throws
// Error(kUsage) for a BatchSpec without inputs, or with more dimensions than a tensor may have.
[[nodiscard]] std::unique_ptr<DataSource> make_batch_shapes(const BatchSpec& spec);

// Of a BatchSpec, for the comparison of ranks.
[[nodiscard]] std::string to_text(const BatchSpec& spec);

class BatchFeed {
 public:
  // `job` and `layout` outlive it. `shapes`: the pipeline's source.
  BatchFeed(JobContext& job, const JobLayout& layout, const DataSource& shapes, Feed feed);

  // What a rank brings to a call.
  struct Asked {
    Call call = {};
    std::uint64_t step = 0;        // steps done: equal on all ranks where the call counts on
    std::int64_t argument = 0;     // equal on all ranks
    const Batch* batch = nullptr;  // null for calls without one
    // Targets that count, on the last stage's ranks; read after `check`. Null: none.
    const double* targets = nullptr;
  };
  // Collective over the job. Throws Refused for what all ranks refuse. `check` throws, in any type,
  // what this rank finds wrong by itself; it calls no other rank, and may be empty.
  void agree(const Asked& asked, const std::function<void()>& check);
  // [virtual replica] samples, after agree() of a call with a batch.
  [[nodiscard]] std::span<const std::int64_t> shares() const { return shares_; }
  // Of each sample, as UnitShape has them, after agree() of a call with a batch.
  [[nodiscard]] std::int64_t positions() const { return positions_; }
  // The share of a virtual replica, and those of this replica's together: the first sample in the
  // batch, and the number of samples.
  [[nodiscard]] SampleRange share(int number) const;
  [[nodiscard]] SampleRange share() const { return share_of_replica(layout_.place.here.replica); }
  // The samples of the replica that has most.
  [[nodiscard]] std::int64_t largest_share() const;
  // Asked::targets of the last agree(), added over virtual replicas by their tree. Ranks that share
  // the last stage count the same: the first one's.
  [[nodiscard]] double targets();

  // What this rank passes of each batch.
  [[nodiscard]] BatchShare passed() const;
  // Throws Error(kUsage) where items are unlike the samples of the pipeline.
  void require_items(const BatchSpec& items) const;
  // The same of another source.
  void require_like(const DataSource& other) const;

  // Collective over the job, after agree(): brings each replica's share to all ranks that use it.
  void distribute(const Batch& batch, bool targets);
  // Views of this rank's part of micro-batches. `first` is the number that they give the share's
  // first sample. Valid until the next call.
  [[nodiscard]] const BatchLoader::Batch& cut(std::span<const SampleRange> micro_batches,
                                              std::int64_t first);

 private:
  struct Header {
    std::int32_t call = 0;
    std::int32_t fault = 0;  // 0: none, else 1 + its ErrorCode
    std::uint64_t step = 0;
    std::int64_t argument = 0;
    UnitShape inputs = {};
    std::int64_t targets = 0;  // samples
    // Of what ranks that share a stage pass alike; else 0.
    std::uint64_t inputs_checksum = 0, targets_checksum = 0;
    double counted = 0;  // Asked::targets
  };
  // What `tensors` have, which need to be like the shapes'; throws Error(kUsage). `fewer`: they may
  // have fewer positions.
  [[nodiscard]] UnitShape shape_of(std::span<const Tensor> tensors, bool targets, bool fewer) const;
  // Counts the samples and positions that this rank passes; throws Error(kUsage) where they cannot
  // be.
  void count_samples(const Asked& asked, Header& header) const;
  // Throw Refused for what differs between all ranks' headers.
  void compare_calls(Call call) const;
  [[nodiscard]] SampleRange share_of_replica(int replica) const;
  // The rank that passes what the ranks of this place use.
  [[nodiscard]] int passer(int pipeline, int replica, int tensor) const;
  // What the first and the last stage's ranks of these coordinates pass.
  void compare_passed(Call call, int replica, int tensor) const;
  // Sets the shares and the positions.
  void compare_samples(Call call);
  // From rank 0, which has the whole batch, to rank `user`.
  void hand_share(const std::vector<Tensor>& whole, bool targets, SampleRange share, int user);
  void receive_share(bool targets);

  JobContext& job_;
  const JobLayout& layout_;
  Feed feed_;
  bool first_, last_;                               // this rank runs the stage
  std::vector<TensorSpec> one_input_, one_target_;  // of one sample
  const int dimension_;                             // that counts positions; 0: none
  std::int64_t positions_ = 0;
  std::vector<Header> headers_;  // [rank of the job]
  std::vector<std::int64_t> shares_;
  std::vector<double> counted_;  // [replica]
  // This rank's share, where it is used; views of the caller's memory, or of received_.
  std::vector<Tensor> inputs_, targets_;
  std::vector<std::vector<std::byte>> received_;  // inputs, then targets
  BatchLoader::Batch batch_;
};

}  // namespace sluice
