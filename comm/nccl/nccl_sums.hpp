// NcclSums: sums over the GPUs of a replica group.
//
// Each element is the sum over ranks by the tree of comm/base/sum_tree.hpp, in fp32: bit for bit
// what Collectives::ordered_sum computes from the same values on the host, for any division of the
// range. The owner of a piece receives it from all others (reduce-scatter by owner), a kernel adds,
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

  // Floats of the values that belong to one rank.
  struct Piece {
    std::size_t begin = 0, size = 0;
  };
  // The kernel reads 16 bytes at a time where pieces begin and end at multiples of so many floats.
  static constexpr std::size_t kPieceMultiple = 32;

  // Most groups of the queue that one sum uses.
  static constexpr std::size_t kGroupsPerSum = 3;

  // Collective over `replicas`, or any other ranks: adds a communicator to `queue`, which must
  // outlive this, and connects its ranks by first sums in temporary `memory`. An all-reduce
  // connects depending on its size, so there is a first sum of each of the `sizes` of later ones,
  // in floats. One rank makes no communicator. `label` as for NcclCommunicator, whose errors it
  // throws.
  NcclSums(NcclQueue& queue, Collectives& replicas, const DeviceMemory& memory,
           const NcclLabel& label, Method method, std::span<const std::size_t> sizes,
           Interrupt* interrupt);

  // Floats of workspace that a sum of `count` values needs, and a reduce-scatter of pieces of up to
  // `largest_piece`.
  [[nodiscard]] std::size_t workspace(std::size_t count) const {
    return workspace(count, size_, method_);
  }
  [[nodiscard]] static std::size_t workspace(std::size_t count, int ranks, Method method);
  [[nodiscard]] static std::size_t scatter_workspace(std::size_t largest_piece, int ranks);

  // Sums this rank's `values` over all ranks, in place; sizes are equal on all ranks. `workspace`
  // has at least workspace(values.size()) floats; all sums of this object may share it. Both are
  // device memory, used after the event `ready`, as in NcclQueue::send(). The ticket is the end of
  // the whole sum; with one rank nothing happens, and it is done. Throws Error(kInternal) if the
  // workspace is too small, and what NcclQueue throws.
  [[nodiscard]] NcclTicket sum(std::span<float> values, std::span<float> workspace,
                               const Event& ready);
  // The two halves of an ordered sum, by themselves, of one piece of `values` a rank: disjoint,
  // anywhere, of any sizes. All ranks pass the same pieces. Else as sum(), Error(kInternal) also
  // for pieces that do not lie in the values. The sum of each piece, for its rank alone: other
  // elements stay as they are.
  [[nodiscard]] NcclTicket reduce_scatter(std::span<float> values, std::span<const Piece> pieces,
                                          std::span<float> workspace, const Event& ready);
  // Each rank's piece, to all ranks; or among some, this one too, which pass the same pieces.
  [[nodiscard]] NcclTicket gather(std::span<float> values, std::span<const Piece> pieces,
                                  const Event& ready, std::span<const int> among = {});

  // Of the queue, for what else these ranks exchange; -1 of one rank.
  [[nodiscard]] int nccl_stream() const { return nccl_stream_; }

 private:
  void connect(const DeviceMemory& memory, std::span<const std::size_t> sizes,
               Interrupt* interrupt);
  void require_within(std::span<const float> values, std::span<const Piece> pieces) const;
  [[nodiscard]] NcclTicket scatter(std::span<float> values, std::span<const Piece> pieces,
                                   std::span<float> workspace, std::size_t stride,
                                   const Event& ready);

  NcclQueue& queue_;
  int size_;
  int rank_;
  Method method_;
  int nccl_stream_ = -1;
  Event now_;                       // done
  std::vector<Piece> even_pieces_;  // [rank] of the last ordered sum()
};

}  // namespace sluice
