// The context of one pipeline's job on this rank: its groups of ranks with their collectives, its
// place, the devices of the job, and error handling.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/group/collectives.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/control.hpp"
#include "comm/group/topology.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct PipelineOptions;

// What the waits of a pipeline share.
struct JobWaits {
  Interrupt* control = nullptr;
  ActivityBoard* activity = nullptr;
  // Polled by all waits outside of engines; null: none. It outlives its use here.
  Interrupt* engine = nullptr;
};

// The Interrupt of every wait of a pipeline. poll() throws another rank's error, NCCL's, or what
// the watchdog has found. Outside of engines it also keeps this rank's messages moving: the rank
// that is waited for may need them. The subjects of waits go to the board of activities.
class JobWatch : public Interrupt {
 public:
  // `job_ranks`: of the group along `axis`, or of the whole job, whose peers the subjects name.
  // `waits` outlives this.
  JobWatch(JobWaits& waits, std::optional<Axis> axis, std::vector<int> job_ranks,
           bool in_engine = false)
      : waits_(waits), axis_(axis), job_ranks_(std::move(job_ranks)), in_engine_(in_engine) {}
  void poll() override;
  void begin_wait(const WaitSubject& subject) noexcept override;
  void end_wait() noexcept override { waits_.activity->end_wait(); }

 private:
  JobWaits& waits_;
  std::optional<Axis> axis_;
  std::vector<int> job_ranks_;  // [rank of the group]
  bool in_engine_;
};

// The whole job, or a group along an axis. The collectives poll `watch`; other messages have
// communicators of their own, duplicates or parts of this one.
struct RankGroup {
  RankGroup() = default;
  RankGroup(std::unique_ptr<Communicator> communicator, std::unique_ptr<JobWatch> polled);

  std::unique_ptr<JobWatch> watch;
  std::unique_ptr<Communicator> ranks;
  std::unique_ptr<Collectives> collectives;
};

// The devices of the job, and how they can reach each other.
struct JobDevices {
  std::vector<RankDevice> ranks;   // [rank of the job]
  std::string no_nccl;             // as find_why_no_nccl()
  std::string no_device_messages;  // as why_no_device_messages()
};

enum class JobSize {
  kStarted,  // the ranks of the communicator
  kPlanned,  // pipeline x replicas x tensor, as the options say: the communicator has one rank,
             // which stands for each of them. For layouts alone.
};

class JobContext {
 public:
  // Collective over `comm`, of which it duplicates its own communicators. Compares the ranks'
  // options first. Throws Error(kMismatch) where they differ, Error(kUsage) for options, a topology
  // or a device that cannot work. Planned ranks compute on a device each like the one of this rank,
  // on hosts whose memory is not known.
  JobContext(Communicator& comm, const PipelineOptions& options,
             JobSize job_size = JobSize::kStarted);

  // Collective. Runs `body`. An exception in it is reported to every rank, and every rank throws
  // the Error that came first. Where the watchdog has found that a rank is gone, every rank that is
  // left throws the watchdog's Error, without a report.
  void guarded(const std::function<void()>& body);

  // Bytes per piece of a message. Pieces are smaller where some pass through a GPU's host memory,
  // so that copies and transfers overlap.
  [[nodiscard]] std::size_t piece_bytes() const;

  // Null: nothing.
  void set_progress_engine(Interrupt* engine) { waits->engine = engine; }

  // Whether a stage is made here. Of a planned job all are.
  [[nodiscard]] bool makes(int stage, const Placement& placement) const {
    return planned || placement.rank_of(stage) == place.here.pipeline;
  }

  // This rank's group along `axis`; its rank there is the coordinate of its place.
  [[nodiscard]] const RankGroup& group(Axis axis) const {
    return groups_[static_cast<std::size_t>(axis)];
  }

  // The replicas that divide a copy of the parameters with this one, and, of several copies, those
  // that have the same part (ShardGroups). Its ranks there are its place and its group.
  [[nodiscard]] const RankGroup& sharers() const {
    return sharers_.ranks == nullptr ? group(Axis::kReplica) : sharers_;
  }
  [[nodiscard]] const RankGroup& copies() const { return copies_; }

  bool planned = false;
  RankPlace place;
  JobDevices devices;
  Placement stage_places = Placement::linear(1);
  std::vector<std::string> hosts;           // [rank of the job]
  std::unique_ptr<ActivityBoard> activity;  // of this rank in this pipeline
  std::unique_ptr<JobWaits> waits;
  RankGroup world;
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<Communicator> messages;  // the pipeline's ranks, for the engines' transports
  std::unique_ptr<JobWatch> engine_watch;  // polled by the engines

 private:
  RankGroup make_group(Axis axis, int color, const std::vector<int>& members);
  void make_groups();
  void join(const PipelineOptions& options);
  void plan(const PipelineOptions& options);
  void divide(const PipelineOptions::Shape& shape);
  void group_shards(const PipelineOptions& options);

  std::array<RankGroup, kAxes.size()> groups_;  // [Axis]
  RankGroup sharers_, copies_;
};

}  // namespace sluice
