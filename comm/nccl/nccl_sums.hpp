// NcclSums: sums over the GPUs of a replica group.
//
// Each element is ((g0 + g1) + g2) + ... in the order of ranks, in fp32: bit for bit what
// Collectives::ordered_sum computes from the same values on the host, for any division of the
// range. The owner of a shard receives it from all others (reduce-scatter by owner), a kernel adds,
// and every owner sends its sum to all (all-gather), all through NCCL's sends and receives. NCCL's
// own all-reduce is the other method; its bits depend on NCCL.
//
// Asynchronous, with the rules and threading of NcclQueue. A sum takes its turn in the queue, so
// all ranks of the group must pass the same ranges in the same order. It can run concurrently with
// computation that does not use its range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <sluice/device.hpp>

#include "comm/group/communicator.hpp"
#include "comm/nccl/nccl_queue.hpp"

namespace sluice {

class NcclSums {
 public:
  enum class Method : std::uint8_t { kOrdered, kAllReduce };

  // Most groups of the queue that one sum uses.
  static constexpr std::size_t kGroupsPerSum = 3;

  // Collective over `replicas`: adds a communicator to `queue`, which must outlive this, and
  // connects its ranks by first sums in temporary `memory`. An all-reduce connects depending on its
  // size, so there is a first sum of each of the `sizes` of later ones, in floats. One rank makes
  // no communicator. `label` as for NcclCommunicator, whose errors it throws.
  NcclSums(NcclQueue& queue, Collectives& replicas, const DeviceMemory& memory,
           const NcclLabel& label, Method method, std::span<const std::size_t> sizes,
           Interrupt* interrupt);

  // Floats of workspace that a sum of `count` values needs.
  [[nodiscard]] std::size_t workspace(std::size_t count) const {
    return workspace(count, size_, method_);
  }
  [[nodiscard]] static std::size_t workspace(std::size_t count, int ranks, Method method);

  // Sums this rank's `values` over all ranks, in place; sizes are equal on all ranks. `workspace`
  // has at least workspace(values.size()) floats; all sums of this object may share it. Both are
  // device memory, used after the event `ready`, as in NcclQueue::send(). The ticket is the end of
  // the whole sum; with one rank nothing happens, and it is done. Throws Error(kInternal) if the
  // workspace is too small, and what NcclQueue throws.
  [[nodiscard]] NcclTicket sum(std::span<float> values, std::span<float> workspace,
                               const Event& ready);

 private:
  void connect(const DeviceMemory& memory, std::span<const std::size_t> sizes,
               Interrupt* interrupt);
  struct Shard {
    std::size_t begin = 0, size = 0;
  };
  [[nodiscard]] std::size_t shard_size(std::size_t count) const { return shard_size(count, size_); }
  [[nodiscard]] static std::size_t shard_size(std::size_t count, int ranks);
  [[nodiscard]] Shard shard_of(std::size_t count, int owner) const;
  void scatter(std::span<float> values, std::span<float> workspace, const Event& ready);
  [[nodiscard]] NcclTicket gather(std::span<float> values);

  NcclQueue& queue_;
  int size_;
  int rank_;
  Method method_;
  int nccl_stream_ = -1;
  Event now_;  // done
};

}  // namespace sluice
