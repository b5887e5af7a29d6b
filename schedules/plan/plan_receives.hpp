// What a rank receives: which channels end there, and how many slots each needs.
#pragma once

#include <cstddef>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/plan/plan_messages.hpp"

namespace sluice {

// Receives of one channel, in the sender's order.
struct Inbound {
  int channel = -1;
  ActionKind action = ActionKind::kRecvForward;
  BufferKind kind = BufferKind::kInput;
  int stage = -1;
  const std::vector<int>* order = nullptr;  // micro-batches, of PlanMessages
  std::size_t posted = 0;                   // for the walk: how many of them
  int slots = 0;                            // as many as must be posted at once, and receive_ahead
};

struct RankReceives {
  std::vector<Inbound> inbound;
  std::size_t ops = 0;  // the rank's whole list becomes
};

// A receive can be waited for only when all before it in the channel are posted too, and where the
// order is global, all before it in that order. So a pool needs, at each wait, a slot for every
// message up to the furthest one that must be posted and is not released. Throws
// std::invalid_argument for receives that are not all there.
[[nodiscard]] RankReceives find_receives(const Schedule& lowered, const PlanMessages& messages,
                                         const PlanOptions& options, int rank);

}  // namespace sluice
