// NcclSums: sums over the GPUs of a replica group.
//
// Each element is ((g0 + g1) + g2) + ... in the order of ranks, in fp32: bit for bit what
// Collectives::ordered_sum computes from the same values on the host, for any division of the
// range. The owner of a part receives it from all others (reduce-scatter by owner), a kernel adds,
// and every owner sends its sum to all (gather), all through NCCL's sends and receives. NCCL's own
// all-reduce is the other method of whole sums; its bits depend on NCCL.
//
// Asynchronous, with the rules and threading of NcclQueue. A sum takes its turn in the queue, so
// all ranks of the group must pass the same ranges in the same order. It can run concurrently with
// computation that does not use its range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

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

  // Floats of workspace that a sum of `count` values needs, and a reduce-scatter of parts of up to
  // `largest_part`.
  [[nodiscard]] std::size_t workspace(std::size_t count) const {
    return workspace(count, size_, method_);
  }
  [[nodiscard]] static std::size_t workspace(std::size_t count, int ranks, Method method);
  [[nodiscard]] static std::size_t scatter_workspace(std::size_t largest_part, int ranks);

  // Sums this rank's `values` over all ranks, in place; sizes are equal on all ranks. `workspace`
  // has at least workspace(values.size()) floats; all sums of this object may share it. Both are
  // device memory, used after the event `ready`, as in NcclQueue::send(). The ticket is the end of
  // the whole sum; with one rank nothing happens, and it is done. Throws Error(kInternal) if the
  // workspace is too small, and what NcclQueue throws.
  [[nodiscard]] NcclTicket sum(std::span<float> values, std::span<float> workspace,
                               const Event& ready);
  // The two halves of an ordered sum, by themselves. `values` are divided into parts, one of each
  // rank: that of rank r is [ends[r - 1], ends[r]), from 0 on, and may be empty; the last one ends
  // with the values. All ranks pass the same ends. The kernel is fastest where parts begin at
  // multiples of 16 bytes. Else as sum(), Error(kInternal) also for ends that are not so.
  // The sum of each part, for its rank alone: other elements stay as they are.
  [[nodiscard]] NcclTicket reduce_scatter(std::span<float> values,
                                          std::span<const std::size_t> ends,
                                          std::span<float> workspace, const Event& ready);
  // Each rank's part, to all ranks.
  [[nodiscard]] NcclTicket gather(std::span<float> values, std::span<const std::size_t> ends,
                                  const Event& ready);

 private:
  void connect(const DeviceMemory& memory, std::span<const std::size_t> sizes,
               Interrupt* interrupt);
  void require_parts(std::span<const float> values, std::span<const std::size_t> ends) const;
  [[nodiscard]] NcclTicket scatter(std::span<float> values, std::span<const std::size_t> ends,
                                   std::span<float> workspace, std::size_t stride,
                                   const Event& ready);

  NcclQueue& queue_;
  int size_;
  int rank_;
  Method method_;
  int nccl_stream_ = -1;
  Event now_;                           // done
  std::vector<std::size_t> even_ends_;  // [rank] of the last ordered sum()
};

}  // namespace sluice
