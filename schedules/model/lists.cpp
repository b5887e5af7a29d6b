#include <algorithm>

#include <sluice/schedule.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"

namespace sluice {

Schedule empty_schedule(std::string_view name, const Placement& placement, int micro_batches,
                        int steps_per_rank) {
  Schedule schedule = {.name = std::string(name),
                       .placement = placement,
                       .micro_batches = micro_batches,
                       .ranks = std::vector<std::vector<Step>>(at(placement.ranks()))};
  for (std::vector<Step>& steps : schedule.ranks) {
    steps.reserve(at(steps_per_rank));
  }
  return schedule;
}

void append(Schedule& schedule, ActionKind kind, int stage, int micro_batch) {
  require_stage(schedule.placement, stage);
  const std::size_t rank = at(schedule.placement.rank_of(stage));
  if (rank >= schedule.ranks.size()) {
    refuse("schedule '", schedule.name, "' has lists of ", schedule.ranks.size(), " ranks; stage ",
           stage, " needs that of rank ", rank);
  }
  schedule.ranks[rank].push_back({make_action(kind, stage, micro_batch)});
}

bool is_exact(const Schedule& schedule) {
  std::vector<int> last(at(schedule.placement.stages()), -1);
  bool ascending = true;
  for (const std::vector<Step>& steps : schedule.ranks) {
    for_each_action(steps, [&](const Action& action) {
      if (!ends_backward(action.kind)) return;
      require_stage(schedule.placement, action.stage);
      int& before = last[at(action.stage)];
      ascending = ascending && action.micro_batch > before;
      before = action.micro_batch;
    });
  }
  return ascending;
}

std::vector<int> peak_in_flight(const Schedule& schedule) {
  std::vector<int> peaks;
  peaks.reserve(schedule.ranks.size());
  for (const std::vector<Step>& steps : schedule.ranks) {
    int held = 0;
    int peak = 0;
    for_each_action(steps, [&](const Action& action) {
      if (action.kind == ActionKind::kForward) peak = std::max(peak, ++held);
      if (ends_backward(action.kind) ||
          (schedule.forward_only && action.kind == ActionKind::kForward)) {
        --held;
      }
    });
    peaks.push_back(peak);
  }
  return peaks;
}

std::vector<int> most_in_flight(const Schedule& schedule) {
  std::vector<int> most(at(schedule.placement.stages())), held(most.size());
  for (const std::vector<Step>& steps : schedule.ranks) {
    for_each_action(steps, [&](const Action& action) {
      require_stage(schedule.placement, action.stage);
      int& now = held[at(action.stage)];
      int& peak = most[at(action.stage)];
      if (action.kind == ActionKind::kForward) peak = std::max(peak, ++now);
      if (ends_backward(action.kind)) --now;
    });
  }
  return most;
}

}  // namespace sluice
