// The context of one pipeline's job on this rank: its groups of ranks with their collectives, its
// place, the devices of the job, and error handling.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sluice/communicator.hpp>

#include "comm/group/collectives.hpp"
#include "comm/group/control.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct PipelineOptions;

// The Interrupt of every wait of a pipeline, except the waits inside its engines. poll() throws
// another rank's error or NCCL's. It also keeps this rank's messages moving: the rank that is
// waited for may need them.
class JobWatch : public Interrupt {
 public:
  explicit JobWatch(Interrupt& control) : control_(control) {}
  // The engine that poll() polls as well; null: none. It outlives its use here.
  void set_progress_engine(Interrupt* engine) { engine_ = engine; }
  void poll() override;

 private:
  Interrupt& control_;
  Interrupt* engine_ = nullptr;
};

// A communicator that is used for collectives alone.
struct RankGroup {
  RankGroup() = default;
  RankGroup(std::unique_ptr<Communicator> communicator, Interrupt* interrupt);

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
  kPlanned,  // pipeline x replicas, as the options say: the communicator has one rank, which stands
             // for each of them. For layouts alone.
};

class JobContext {
 public:
  // Collective over `comm`, of which it duplicates its own communicators. Compares the ranks'
  // options first. Throws Error(kMismatch) where they differ, Error(kUsage) for a topology or a
  // device that cannot work. Planned ranks compute on a device each like the one of this rank, on
  // hosts whose memory is not known.
  JobContext(Communicator& comm, const PipelineOptions& options,
             JobSize job_size = JobSize::kStarted);

  // Collective. Runs `body`. An exception in it is reported to every rank, and every rank throws
  // the Error that came first.
  void guarded(const std::function<void()>& body);

  // Bytes per piece of a message. Pieces are smaller where some pass through a GPU's host memory,
  // so that copies and transfers overlap.
  [[nodiscard]] std::size_t piece_bytes() const;

  // Whether a stage is made here. Of a planned job all are.
  [[nodiscard]] bool makes(int stage, const Placement& placement) const {
    return planned || placement.rank_of(stage) == place.rank;
  }

  bool planned = false;
  RankPlace place;
  JobDevices devices;
  RankGroup world;
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<JobWatch> watch;  // polled by the collectives of all three groups
  RankGroup pipeline, replicas;
  std::unique_ptr<Communicator> messages;  // the pipeline's ranks, for the engines' transports

 private:
  void join(const PipelineOptions& options);
  void plan(const PipelineOptions& options);
};

}  // namespace sluice
