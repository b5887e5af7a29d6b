#include "comm/nccl/nccl_sums.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"

namespace sluice {

namespace {

// Shards begin at multiples of this many floats, so that the kernel can read 16 bytes at a time.
constexpr std::size_t kShardMultiple = 32;

// A sum runs beside backward, and spins where replicas differ in speed. 16 blocks are 12 % of an
// H100's multiprocessors; by default NCCL takes up to 32. A small GPU gives a quarter of its
// multiprocessors. NCCL_MAX_CTAS in the environment overrides the number. Not measured.
constexpr int kMostSumBlocks = 16;
constexpr int kPartsForSums = 4;

}  // namespace

NcclSums::NcclSums(NcclQueue& queue, Collectives& replicas, const DeviceMemory& memory,
                   const NcclLabel& label, Method method, std::span<const std::size_t> sizes,
                   Interrupt* interrupt)
    : queue_(queue),
      size_(replicas.communicator().size()),
      rank_(replicas.communicator().rank()),
      method_(method) {
  if (size_ == 1) return;
  const Device device = memory.device();
  const int blocks = blocks_within(device, kPartsForSums, 1, kMostSumBlocks);
  nccl_stream_ =
      queue_.add(std::make_unique<NcclCommunicator>(replicas, device, label, interrupt, blocks));
  std::vector<std::size_t> first = {kShardMultiple * at(size_)};
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

std::size_t NcclSums::shard_size(std::size_t count, int ranks) {
  const auto owners = at(ranks);
  return round_up((count + owners - 1) / owners, kShardMultiple);
}

NcclSums::Shard NcclSums::shard_of(std::size_t count, int owner) const {
  const std::size_t begin = std::min(count, shard_size(count) * at(owner));
  return {begin, std::min(shard_size(count), count - begin)};
}

std::size_t NcclSums::workspace(std::size_t count, int ranks, Method method) {
  if (method == Method::kAllReduce) return 0;
  return at(ranks - 1) * shard_size(count, ranks);
}

NcclTicket NcclSums::sum(std::span<float> values, std::span<float> workspace, const Event& ready) {
  if (size_ == 1 || values.empty()) return {};
  if (method_ == Method::kAllReduce) {
    queue_.begin_group();
    const NcclTicket ticket = queue_.all_reduce_sum(nccl_stream_, values, ready);
    queue_.end_group();
    return ticket;
  }
  if (workspace.size() < this->workspace(values.size())) {
    throw Error(
        ErrorCode::kInternal,
        fmt::format("a sum of {} values over {} replicas needs a workspace of {}, got {}",
                    values.size(), size_, this->workspace(values.size()), workspace.size()));
  }
  scatter(values, workspace, ready);
  const Shard mine = shard_of(values.size(), rank_);
  if (mine.size > 0) {
    queue_.begin_group();
    NcclTicket added = queue_.add_shards(nccl_stream_, {.own = values.data() + mine.begin,
                                                        .others = workspace.data(),
                                                        .stride = shard_size(values.size()),
                                                        .count = mine.size,
                                                        .ranks = size_,
                                                        .rank = rank_});
    queue_.drop(added);
    queue_.end_group();
  }
  return gather(values);
}

// Every rank's part of each shard to the shard's owner. Workspace: [other ranks, shard].
void NcclSums::scatter(std::span<float> values, std::span<float> workspace, const Event& ready) {
  const Shard mine = shard_of(values.size(), rank_);
  queue_.begin_group();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (const Shard theirs = shard_of(values.size(), peer); theirs.size > 0) {
      NcclTicket sent = queue_.send(
          nccl_stream_, peer, std::as_bytes(values.subspan(theirs.begin, theirs.size)), ready);
      queue_.drop(sent);
    }
    if (mine.size > 0) {
      const auto slot = at(peer < rank_ ? peer : peer - 1);
      NcclTicket received = queue_.recv(
          nccl_stream_, peer,
          std::as_writable_bytes(workspace.subspan(slot * shard_size(values.size()), mine.size)),
          ready);
      queue_.drop(received);
    }
  }
  queue_.end_group();
}

// Every owner's shard to all.
NcclTicket NcclSums::gather(std::span<float> values) {
  const Shard mine = shard_of(values.size(), rank_);
  NcclTicket last;
  queue_.begin_group();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (mine.size > 0) {
      queue_.drop(last);
      last = queue_.send(nccl_stream_, peer, std::as_bytes(values.subspan(mine.begin, mine.size)),
                         now_);
    }
    if (const Shard theirs = shard_of(values.size(), peer); theirs.size > 0) {
      queue_.drop(last);
      last = queue_.recv(nccl_stream_, peer,
                         std::as_writable_bytes(values.subspan(theirs.begin, theirs.size)), now_);
    }
  }
  queue_.end_group();
  return last;
}

}  // namespace sluice
