#include "comm/nccl/nccl_sums.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"

namespace sluice {

namespace {

// Even parts begin at multiples of this many floats, and parts in the workspace too, so that the
// kernel can read 16 bytes at a time.
constexpr std::size_t kPartMultiple = 32;

// A sum runs beside backward, and spins where replicas differ in speed. 16 blocks are 12 % of an
// H100's multiprocessors; by default NCCL takes up to 32. A small GPU gives a quarter of its
// multiprocessors. NCCL_MAX_CTAS in the environment overrides the number. Not measured.
constexpr int kMostSumBlocks = 16;
constexpr int kPartsForSums = 4;

struct Range {
  std::size_t begin = 0, size = 0;
};

// The part of `rank` of the values that are divided at `ends`.
Range part_of(std::span<const std::size_t> ends, int rank) {
  const std::size_t begin = rank == 0 ? 0 : ends[at(rank) - 1];
  return {begin, ends[at(rank)] - begin};
}

std::size_t even_part(std::size_t count, int ranks) {
  return round_up((count + at(ranks) - 1) / at(ranks), kPartMultiple);
}

}  // namespace

NcclSums::NcclSums(NcclQueue& queue, Collectives& replicas, const DeviceMemory& memory,
                   const NcclLabel& label, Method method, std::span<const std::size_t> sizes,
                   Interrupt* interrupt)
    : queue_(queue),
      size_(replicas.communicator().size()),
      rank_(replicas.communicator().rank()),
      method_(method),
      even_ends_(at(size_)) {
  if (size_ == 1) return;
  const Device device = memory.device();
  const int blocks = blocks_within(device, kPartsForSums, 1, kMostSumBlocks);
  nccl_stream_ =
      queue_.add(std::make_unique<NcclCommunicator>(replicas, device, label, interrupt, blocks));
  std::vector<std::size_t> first = {kPartMultiple * at(size_)};
  if (method == Method::kAllReduce) first.insert(first.end(), sizes.begin(), sizes.end());
  connect(memory, first, interrupt);
}

// NCCL connects two ranks at their first exchange, and a collective at the first use of the
// algorithm that it chooses for a size. That takes long, so not within a step.
void NcclSums::connect(const DeviceMemory& memory, std::span<const std::size_t> sizes,
                       Interrupt* interrupt) {
  const Device device = memory.device();
  const std::size_t largest = *std::max_element(sizes.begin(), sizes.end());
  const Buffer room = memory.allocate((largest + workspace(largest)) * sizeof(float),
                                      DeviceMemory::Use::kTemporary);
  auto* floats = reinterpret_cast<float*>(room.data());
  const Stream stream(device);
  fill_zero_async(floats, room.size(), stream.view());
  Event filled(device);
  filled.record(stream.view());
  try {
    for (const std::size_t count : sizes) {
      NcclTicket ticket = sum({floats, count}, {floats + largest, workspace(count)}, filled);
      queue_.wait(ticket, interrupt);
    }
  } catch (...) {
    queue_.abort();  // its kernels may wait for a lost peer, and freeing memory waits for them
    throw;
  }
}

std::size_t NcclSums::workspace(std::size_t count, int ranks, Method method) {
  return method == Method::kAllReduce ? 0 : scatter_workspace(even_part(count, ranks), ranks);
}

std::size_t NcclSums::scatter_workspace(std::size_t largest_part, int ranks) {
  return at(ranks - 1) * round_up(largest_part, kPartMultiple);
}

NcclTicket NcclSums::sum(std::span<float> values, std::span<float> workspace, const Event& ready) {
  if (size_ == 1 || values.empty()) return {};
  if (method_ == Method::kAllReduce) {
    queue_.begin_group();
    const NcclTicket ticket = queue_.all_reduce_sum(nccl_stream_, values, ready);
    queue_.end_group();
    return ticket;
  }
  const std::size_t part = even_part(values.size(), size_);
  for (std::size_t rank = 0; rank < even_ends_.size(); ++rank) {
    even_ends_[rank] = std::min(values.size(), (rank + 1) * part);
  }
  NcclTicket scattered = reduce_scatter(values, even_ends_, workspace, ready);
  queue_.drop(scattered);
  return gather(values, even_ends_, now_);
}

void NcclSums::require_parts(std::span<const float> values,
                             std::span<const std::size_t> ends) const {
  if (ends.size() == at(size_) && std::is_sorted(ends.begin(), ends.end()) &&
      ends.back() == values.size()) {
    return;
  }
  throw Error(ErrorCode::kInternal,
              fmt::format("{} values in parts that end at {}; legal: {} ends that ascend to {}",
                          values.size(), joined(ends, ", "), size_, values.size()));
}

NcclTicket NcclSums::reduce_scatter(std::span<float> values, std::span<const std::size_t> ends,
                                    std::span<float> workspace, const Event& ready) {
  require_parts(values, ends);
  if (size_ == 1 || values.empty()) return {};
  std::size_t largest = 0;  // all ranks refuse what is too small for one
  for (int rank = 0; rank < size_; ++rank) {
    largest = std::max(largest, part_of(ends, rank).size);
  }
  if (workspace.size() < scatter_workspace(largest, size_)) {
    throw Error(
        ErrorCode::kInternal,
        fmt::format("a sum of {} values over {} replicas needs a workspace of {}, got {}",
                    values.size(), size_, scatter_workspace(largest, size_), workspace.size()));
  }
  const Range mine = part_of(ends, rank_);
  const std::size_t stride = round_up(mine.size, kPartMultiple);
  NcclTicket last = scatter(values, ends, workspace, stride, ready);
  if (mine.size == 0) return last;
  queue_.drop(last);
  queue_.begin_group();
  last = queue_.add_shards(nccl_stream_, {.own = values.data() + mine.begin,
                                          .others = workspace.data(),
                                          .stride = stride,
                                          .count = mine.size,
                                          .ranks = size_,
                                          .rank = rank_});
  queue_.end_group();
  return last;
}

// Every rank's part of the values to the part's owner. Workspace: [other ranks, stride].
NcclTicket NcclSums::scatter(std::span<float> values, std::span<const std::size_t> ends,
                             std::span<float> workspace, std::size_t stride, const Event& ready) {
  const Range mine = part_of(ends, rank_);
  NcclTicket last;
  queue_.begin_group();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (const Range theirs = part_of(ends, peer); theirs.size > 0) {
      queue_.drop(last);
      last = queue_.send(nccl_stream_, peer,
                         std::as_bytes(values.subspan(theirs.begin, theirs.size)), ready);
    }
    if (mine.size > 0) {
      queue_.drop(last);
      const auto slot = at(peer < rank_ ? peer : peer - 1);
      last =
          queue_.recv(nccl_stream_, peer,
                      std::as_writable_bytes(workspace.subspan(slot * stride, mine.size)), ready);
    }
  }
  queue_.end_group();
  return last;
}

NcclTicket NcclSums::gather(std::span<float> values, std::span<const std::size_t> ends,
                            const Event& ready) {
  require_parts(values, ends);
  if (size_ == 1) return {};
  const Range mine = part_of(ends, rank_);
  NcclTicket last;
  queue_.begin_group();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (mine.size > 0) {
      queue_.drop(last);
      last = queue_.send(nccl_stream_, peer, std::as_bytes(values.subspan(mine.begin, mine.size)),
                         ready);
    }
    if (const Range theirs = part_of(ends, peer); theirs.size > 0) {
      queue_.drop(last);
      last = queue_.recv(nccl_stream_, peer,
                         std::as_writable_bytes(values.subspan(theirs.begin, theirs.size)), ready);
    }
  }
  queue_.end_group();
  return last;
}

}  // namespace sluice
