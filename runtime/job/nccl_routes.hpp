// What a pipeline carries over NCCL: the messages of its NCCL edges, tied gradients and values, and
// the sums over replicas, one queue for all. Internal to the pipeline; empty where nothing is
// NCCL's.
//
// The host never waits for a device here: slots and gradients are ordered against the compute
// stream by events. It may wait until NCCL has taken a group, polling the interrupt.
#pragma once

#include <memory>
#include <span>

#include <sluice/compute.hpp>
#include <sluice/plan.hpp>

#include "comm/nccl/nccl_queue.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// Of the sums over replicas of a step: how many there are, and the floats of the largest.
struct SumLoad {
  std::size_t count = 0, largest = 0;
};

class NcclRoutes {
 public:
  // Collective over the job. `sums`: of this rank, all of which may be open at once; `open`:
  // messages open at once, over all engines. Throws as NcclCommunicator.
  NcclRoutes(JobContext& job, const JobLayout& layout, ComputeContext& compute, const SumLoad& sums,
             std::size_t open, bool all_reduce);
  ~NcclRoutes();
  NcclRoutes(const NcclRoutes&) = delete;
  NcclRoutes& operator=(const NcclRoutes&) = delete;

  // One group of sends and receives; `ready` is recorded on the compute stream before.
  void begin_group();
  [[nodiscard]] NcclTicket send(int peer, std::span<const std::byte> data, const Event& ready);
  [[nodiscard]] NcclTicket recv(int peer, std::span<std::byte> data, const Event& ready);
  void end_group();
  // What is put on the compute stream from now on runs after the message or sum.
  void wait_on_stream(NcclTicket& ticket);
  // Throws Error(kPeer | kDevice) where NCCL has failed; for waits of any kind.
  void progress();

  [[nodiscard]] bool sums() const;
  // Over this rank's replicas, in place, behind everything on the compute stream so far; one after
  // the other, whatever they are of.
  [[nodiscard]] NcclTicket sum(std::span<float> values);

  // Collective over the job: the orderly end. Waits until NCCL has done everything, on all ranks;
  // only the destructor may follow, which otherwise aborts.
  void finalize();

  // Device memory that a rank's sums take, besides NCCL's own.
  [[nodiscard]] static std::size_t sum_bytes(const SumLoad& sums, int replicas, bool all_reduce);
  // Whether any of it goes over NCCL.
  [[nodiscard]] static bool wanted(const JobLayout& layout);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
