#include "comm/nccl/nccl_sums.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"

namespace sluice {

namespace {

// A sum runs beside backward, and spins where replicas differ in speed. 16 blocks are 12 % of an
// H100's multiprocessors; by default NCCL takes up to 32. A small GPU gives a quarter of its
// multiprocessors. NCCL_MAX_CTAS in the environment overrides the number. Not measured.
constexpr int kMostSumBlocks = 16;
constexpr int kPartsForSums = 4;

std::size_t even_piece(std::size_t count, int ranks) {
  return round_up((count + at(ranks) - 1) / at(ranks), NcclSums::kPieceMultiple);
}

}  // namespace

NcclSums::NcclSums(NcclQueue& queue, Collectives& replicas, const DeviceMemory& memory,
                   const NcclLabel& label, Method method, std::span<const std::size_t> sizes,
                   Interrupt* interrupt)
    : queue_(queue),
      size_(replicas.communicator().size()),
      rank_(replicas.communicator().rank()),
      method_(method),
      even_pieces_(at(size_)) {
  if (size_ == 1) return;
  const Device device = memory.device();
  const int blocks = blocks_within(device, kPartsForSums, 1, kMostSumBlocks);
  nccl_stream_ =
      queue_.add(std::make_unique<NcclCommunicator>(replicas, device, label, interrupt, blocks));
  std::vector<std::size_t> first = {kPieceMultiple * at(size_)};
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
  return method == Method::kAllReduce ? 0 : scatter_workspace(even_piece(count, ranks), ranks);
}

std::size_t NcclSums::scatter_workspace(std::size_t largest_piece, int ranks) {
  return at(ranks - 1) * round_up(largest_piece, kPieceMultiple);
}

NcclTicket NcclSums::sum(std::span<float> values, std::span<float> workspace, const Event& ready) {
  if (size_ == 1 || values.empty()) return {};
  if (method_ == Method::kAllReduce) {
    queue_.begin_group();
    const NcclTicket ticket = queue_.all_reduce_sum(nccl_stream_, values, ready);
    queue_.end_group();
    return ticket;
  }
  const std::size_t most = even_piece(values.size(), size_);
  for (std::size_t begin = 0; Piece & piece : even_pieces_) {
    piece = {begin, std::min(most, values.size() - begin)};
    begin += piece.size;
  }
  NcclTicket scattered = reduce_scatter(values, even_pieces_, workspace, ready);
  queue_.drop(scattered);
  return gather(values, even_pieces_, now_);
}

void NcclSums::require_within(std::span<const float> values, std::span<const Piece> pieces) const {
  if (pieces.size() == at(size_) && std::all_of(pieces.begin(), pieces.end(), [&](Piece piece) {
        return piece.begin <= values.size() && piece.size <= values.size() - piece.begin;
      })) {
    return;
  }
  throw Error(ErrorCode::kInternal,
              fmt::format("{} pieces for {} ranks, or some not within {} values", pieces.size(),
                          size_, values.size()));
}

NcclTicket NcclSums::reduce_scatter(std::span<float> values, std::span<const Piece> pieces,
                                    std::span<float> workspace, const Event& ready) {
  require_within(values, pieces);
  if (size_ == 1) return {};
  std::size_t largest = 0;  // all ranks refuse what is too small for one
  for (const Piece& piece : pieces) largest = std::max(largest, piece.size);
  if (workspace.size() < scatter_workspace(largest, size_)) {
    throw Error(ErrorCode::kInternal,
                fmt::format("sums of up to {} values over {} ranks need a workspace of {}, got {}",
                            largest, size_, scatter_workspace(largest, size_), workspace.size()));
  }
  const Piece mine = pieces[at(rank_)];
  const std::size_t stride = round_up(mine.size, kPieceMultiple);
  NcclTicket last = scatter(values, pieces, workspace, stride, ready);
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

// Every piece to its owner. Workspace: [other ranks, stride].
NcclTicket NcclSums::scatter(std::span<float> values, std::span<const Piece> pieces,
                             std::span<float> workspace, std::size_t stride, const Event& ready) {
  const Piece mine = pieces[at(rank_)];
  NcclTicket last;
  queue_.begin_group();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    if (const Piece theirs = pieces[at(peer)]; theirs.size > 0) {
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

NcclTicket NcclSums::gather(std::span<float> values, std::span<const Piece> pieces,
                            const Event& ready, std::span<const int> among) {
  require_within(values, pieces);
  if (size_ == 1) return {};
  const Piece mine = pieces[at(rank_)];
  NcclTicket last;
  queue_.begin_group();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !(among.empty() || std::ranges::count(among, peer) > 0)) continue;
    if (mine.size > 0) {
      queue_.drop(last);
      last = queue_.send(nccl_stream_, peer, std::as_bytes(values.subspan(mine.begin, mine.size)),
                         ready);
    }
    if (const Piece theirs = pieces[at(peer)]; theirs.size > 0) {
      queue_.drop(last);
      last = queue_.recv(nccl_stream_, peer,
                         std::as_writable_bytes(values.subspan(theirs.begin, theirs.size)), ready);
    }
  }
  queue_.end_group();
  return last;
}

}  // namespace sluice
