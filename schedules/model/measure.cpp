#include <algorithm>

#include <sluice/schedule.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"

namespace sluice {

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

}  // namespace sluice
