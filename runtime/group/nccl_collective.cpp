#include "runtime/group/nccl_collective.hpp"

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/index.hpp"
#include "runtime/group/group_collective.hpp"

namespace sluice {
namespace {

constexpr NcclSums::Method kByTree = NcclSums::Method::kOrdered;

}  // namespace

NcclCollective::NcclCollective(NcclQueue& queue, Collectives& ranks, ComputeContext& compute,
                               const NcclLabel& label, std::span<float> workspace,
                               Interrupt& interrupt)
    : queue_(queue),
      compute_(compute),
      interrupt_(interrupt),
      ranks_(at(ranks.communicator().size())),
      me_(at(ranks.communicator().rank())),
      sums_(queue, ranks, compute.memory(), label, kByTree, {}, &interrupt),
      workspace_(workspace),
      ready_(compute.device()) {}

std::size_t NcclCollective::workspace(const PlannedCollective& collective, int ranks) {
  const std::size_t values = collective.bytes / sizeof(float);
  switch (collective.kind) {
    case CollectiveKind::kSum:
      return NcclSums::workspace(values, ranks, kByTree);
    case CollectiveKind::kReduceScatter:
      return NcclSums::scatter_workspace(values / at(ranks), ranks);
    case CollectiveKind::kAllGather:
    case CollectiveKind::kAllToAll:
      break;
  }
  return 0;
}

void NcclCollective::make(const CollectiveCall& call) {
  GroupCollective::require_legal(call, ranks_, me_);
  start(call);
  finish();
}

void NcclCollective::start(const CollectiveCall& call) {
  if (call.in.empty()) return;
  if (call.kind != CollectiveKind::kSum) {
    open_ = exchange(call);
    return;
  }
  const StreamView stream = compute_.stream();
  auto* const values = reinterpret_cast<float*>(call.out.data());
  if (call.in.data() != call.out.data()) {
    copy_async(call.out.data(), call.in.data(), call.in.size(), stream);
  }
  ready_.record(stream);
  open_ = sums_.sum({values, call.out.size() / sizeof(float)}, workspace_, ready_);
}

void NcclCollective::finish() {
  queue_.wait_issued(open_, &interrupt_);
  queue_.wait_on(compute_.stream(), open_);
}

// Pieces lie in order of segments; where there is one for each rank, of ranks within a segment.
NcclTicket NcclCollective::exchange(const CollectiveCall& call) {
  const bool adds = call.kind == CollectiveKind::kReduceScatter;
  const bool one_in = call.kind == CollectiveKind::kAllGather;
  const std::size_t part = one_in ? call.in.size() : call.in.size() / ranks_;
  const std::size_t piece = part / call.segments, values = part / sizeof(float);
  const std::size_t stride = round_up(values, NcclSums::kPieceMultiple);
  if (adds && workspace_.size() < (ranks_ - 1) * stride) {
    throw Error(ErrorCode::kInternal, "a collective is larger than was planned");
  }
  const auto place = [&](bool one, std::size_t segment, std::size_t rank) {
    return (one ? segment : segment * ranks_ + rank) * piece;
  };
  for (std::size_t s = 0; s < call.segments; ++s) {
    const std::byte* const from = call.in.data() + place(one_in, s, me_);
    std::byte* const to = call.out.data() + place(adds, s, me_);
    if (from != to) copy_async(to, from, piece, compute_.stream());
  }
  ready_.record(compute_.stream());
  NcclTicket last;
  queue_.begin_group();
  for (std::size_t peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    const std::size_t slot = peer < me_ ? peer : peer - 1;
    const std::span<std::byte> received =
        adds ? std::as_writable_bytes(workspace_.subspan(slot * stride, values)) : call.out;
    for (std::size_t s = 0; s < call.segments; ++s) {
      const auto there = static_cast<int>(peer);
      queue_.drop(last);
      last = queue_.send(sums_.nccl_stream(), there, call.in.subspan(place(one_in, s, peer), piece),
                         ready_);
      queue_.drop(last);
      last = queue_.recv(sums_.nccl_stream(), there, received.subspan(place(adds, s, peer), piece),
                         ready_);
    }
  }
  queue_.end_group();
  if (!adds) return last;
  queue_.drop(last);
  queue_.begin_group();
  last = queue_.add_shards(sums_.nccl_stream(), {.own = reinterpret_cast<float*>(call.out.data()),
                                                 .others = workspace_.data(),
                                                 .stride = stride,
                                                 .count = values,
                                                 .ranks = static_cast<int>(ranks_),
                                                 .rank = static_cast<int>(me_)});
  queue_.end_group();
  return last;
}

}  // namespace sluice
