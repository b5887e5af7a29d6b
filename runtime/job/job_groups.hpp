// The groups of ranks that one pipeline's job talks over, and what every rank must agree on first.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sluice/communicator.hpp>

#include "comm/group/control.hpp"
#include "comm/group/topology.hpp"
#include "runtime/layout/device_choice.hpp"

namespace sluice {

struct PipelineOptions;

// Polled by every wait of a pipeline but its engines' own. Throws another rank's error or NCCL's,
// and keeps this rank's messages moving, for which the rank that is waited for may wait.
class JobWatch : public Interrupt {
 public:
  explicit JobWatch(Interrupt& control) : control_(control) {}
  // What keeps this rank's messages moving when it is polled, an engine; null: nothing any more.
  void drive(Interrupt* messages) { messages_ = messages; }
  void poll() override;

 private:
  Interrupt& control_;
  Interrupt* messages_ = nullptr;
};

// The communicators and error handling of one pipeline's job.
class JobGroups {
 public:
  // Collective over `world`. Compares options.checks.configuration and the layout's own options
  // first.
  JobGroups(Communicator& world, const PipelineOptions& options);

  // Runs `body`; an exception in it is told to every rank, and what is thrown here, on every rank,
  // is the Error that came first.
  void guarded(const std::function<void()>& body);

  // Bytes in which messages travel: smaller where some pass through a GPU's host memory, so that
  // copies and wire overlap.
  [[nodiscard]] std::size_t piece_bytes() const;
  // [pipeline rank], of this replica.
  [[nodiscard]] std::vector<RankDevice> pipeline_devices() const;

  Topology topology;
  std::vector<RankDevice> devices;      // [rank of the job]
  Device device;                        // of this rank
  std::string no_nccl;                  // as find_why_no_nccl()
  std::string no_device_messages;       // as why_no_device_messages()
  int rank = 0, replica = 0;            // pipeline rank; replica
  std::unique_ptr<Communicator> world;  // for collectives
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<JobWatch> watch;         // polled by the collectives below
  std::unique_ptr<Communicator> pipeline;  // for collectives
  std::unique_ptr<Communicator> messages;  // the same ranks, for the engine's transport
  std::unique_ptr<Communicator> replicas;
  std::unique_ptr<Collectives> in_world, in_pipeline, in_replicas;
};

// Compares named values over all ranks of `comm`; throws the same Error(kMismatch) on all of them,
// naming the first key that differs, the rank that differs from rank 0, and both values.
void require_same_configuration(Collectives& comm,
                                const std::vector<std::pair<std::string, std::string>>& values);

}  // namespace sluice
