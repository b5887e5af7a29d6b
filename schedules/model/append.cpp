#include <sluice/schedule.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"

namespace sluice {

void append(Schedule& schedule, ActionKind kind, int stage, int micro_batch) {
  require_stage(schedule.placement, stage);
  const std::size_t rank = at(schedule.placement.rank_of(stage));
  if (rank >= schedule.ranks.size()) {
    refuse("schedule '", schedule.name, "' has lists of ", schedule.ranks.size(), " ranks; stage ",
           stage, " needs that of rank ", rank);
  }
  schedule.ranks[rank].push_back({make_action(kind, stage, micro_batch)});
}

}  // namespace sluice
