#include "tests/schedules/hand_made.hpp"

#include <sstream>

#include <sluice/plan.hpp>

namespace sluice::testing {

Schedule hand_made(const Placement& placement, int micro_batches,
                   const std::vector<std::string_view>& ranks) {
  Schedule schedule;
  schedule.name = "hand-made";
  schedule.placement = placement;
  schedule.micro_batches = micro_batches;
  for (const std::string_view text : ranks) {
    std::istringstream words{std::string(text)};
    std::vector<Step>& steps = schedule.ranks.emplace_back();
    for (std::string word; words >> word;) steps.push_back(parse_step(word));
  }
  return schedule;
}

Schedule v_split() {
  return hand_made(Placement::v_shape(2), 2,
                   {"0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1",
                    "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1"});
}

Schedule interleaved() {
  return hand_made(Placement::looped(2, 2), 2,
                   {"0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"});
}

Schedule v_overlapped() {
  return hand_made(
      Placement::v_shape(2), 2,
      {"0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1", "1F0 2F0 (1F1;2B0)OVERLAP_F_B 1B0 2F1 2B1 1B1"});
}

std::vector<Schedule> all_hand_made() { return {v_split(), interleaved(), v_overlapped()}; }

std::string text_of(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) {
    if (!text.empty()) text += ' ';
    text += to_string(step);
  }
  return text;
}

Plan plan_of(const Schedule& schedule, const std::vector<TiedStages>& tied,
             const PlanOptions& options) {
  LowerOptions lowering;
  lowering.tied = tied;
  return make_plan(lower(schedule, lowering), tied, options);
}

Schedule lower_with_early_sums(const Schedule& schedule) {
  LowerOptions lowering;
  lowering.overlapped_grad_sums.assign(static_cast<std::size_t>(schedule.placement.stages()), true);
  return lower(schedule, lowering);
}

Plan plan_with_early_sums(const Schedule& schedule, const PlanOptions& options) {
  return make_plan(lower_with_early_sums(schedule), {}, options);
}

int count(const Plan& plan, OpKind kind) {
  int found = 0;
  for (const RankPlan& rank : plan.ranks) {
    for (const PlanOp& op : rank.ops) found += op.kind == kind ? 1 : 0;
  }
  return found;
}

}  // namespace sluice::testing
