#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/moves.hpp"

namespace sluice {
namespace {

void require_tied_groups(const std::vector<TiedStages>& tied, int stages) {
  for (const TiedStages& group : tied) {
    if (group.stages.empty()) {
      refuse("a tied parameter names no stage; it needs at least one");
    }
    for (std::size_t i = 0; i < group.stages.size(); ++i) {
      const int stage = group.stages[i];
      if (stage < 0 || stage >= stages) {
        refuse("a tied parameter names stage ", stage, "; legal stages are 0 to ", stages - 1);
      }
      if (i > 0 && group.stages[i - 1] >= stage) {
        refuse("a tied parameter names stage ", stage, " after stage ", group.stages[i - 1],
               "; stages must ascend without repeats");
      }
    }
  }
}

// Appends the message that brings what `action` uses (`receives`) or takes away what it makes, if
// the neighbour is on another rank.
void append_message(const Placement& placement, const Action& action, bool receives,
                    std::vector<Step>& out) {
  const bool forward = action.kind == ActionKind::kForward;
  if (!forward && !makes_gradient(action.kind)) return;
  if (!crosses(placement, action.stage, action.stage + (forward == receives ? -1 : 1))) return;
  const ActionKind kind = forward
                              ? (receives ? ActionKind::kRecvForward : ActionKind::kSendForward)
                              : (receives ? ActionKind::kRecvBackward : ActionKind::kSendBackward);
  out.push_back({make_action(kind, action.stage, action.micro_batch)});
}

bool overlaps(const LowerOptions& options, int stage) {
  return options.reduce_grad && !options.overlapped_grad_sums.empty() &&
         options.overlapped_grad_sums[at(stage)];
}

// The sums of a rank that overlap with computation: the last step, as its index, that adds to a
// stage's gradients.
std::map<int, std::size_t> last_steps(const std::vector<Step>& steps, const LowerOptions& options) {
  std::map<int, std::size_t> last;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto note = [&](const Action& action) {
      if (ends_backward(action.kind) && overlaps(options, action.stage)) last[action.stage] = i;
    };
    note(steps[i].action);
    if (steps[i].overlapped) note(*steps[i].overlapped);
  }
  return last;
}

// Appends a step with its messages, what comes before its backward, and the sums that follow it
// according to last_steps().
void append_step(const Placement& placement, const Step& step, std::size_t index,
                 const std::vector<bool>& recomputes, std::map<int, std::size_t>& last,
                 std::vector<Step>& out) {
  const auto append_sum = [&](const Action& action) {
    const auto found = last.find(action.stage);
    if (found == last.end() || found->second != index) return;
    out.push_back({make_action(ActionKind::kReduceGrad, action.stage)});
    last.erase(found);
  };
  const auto& [kind, stage, micro_batch] = step.action;
  if (makes_gradient(kind) && !step.overlapped && !recomputes.empty() && recomputes[at(stage)]) {
    out.push_back({make_action(ActionKind::kRecompute, stage, micro_batch)});
  }
  append_message(placement, step.action, true, out);
  if (step.overlapped) append_message(placement, *step.overlapped, true, out);
  out.push_back(step);
  append_sum(step.action);
  if (step.overlapped) append_sum(*step.overlapped);
  append_message(placement, step.action, false, out);
  if (step.overlapped) append_message(placement, *step.overlapped, false, out);
}

void append_reductions(const Placement& placement, int rank, const LowerOptions& options,
                       std::vector<Step>& out) {
  const std::vector<int>& own = placement.stages_of(rank);
  if (options.reduce_grad) {
    for (const int stage : own) {
      if (overlaps(options, stage)) continue;
      out.push_back({make_action(ActionKind::kReduceGrad, stage)});
    }
  }
  for (const TiedStages& group : options.tied) {
    const auto first_own = std::find_if(group.stages.begin(), group.stages.end(), [&](int stage) {
      return placement.rank_of(stage) == rank;
    });
    if (first_own != group.stages.end()) {
      out.push_back({make_action(ActionKind::kReduceTied, *first_own)});
    }
  }
  if (options.reduce_grad) {
    out.push_back({make_action(ActionKind::kOptimizer, own.front())});
  }
}

// The steps of a rank that stay; of a pair that does not, each action as a step.
std::vector<Step> kept_steps(const std::vector<Step>& all, const LowerOptions& options) {
  std::vector<Step> steps;
  steps.reserve(all.size());
  for (const Step& step : all) {
    if (is_sharding(step.action.kind) && !options.keep_sharding) continue;
    const bool apart = step.overlapped && !options.keep_pairs;
    steps.push_back(apart ? Step{step.action} : step);
    if (apart) steps.push_back({*step.overlapped});
  }
  return steps;
}

// Places UNSHARD and RESHARD around a rank's steps.
class GatherPlaces {
 public:
  // Both outlive this.
  GatherPlaces(const std::vector<Step>& steps, const std::vector<Gather>& gathers)
      : steps_(steps), gathers_(gathers) {
    for (std::size_t i = 0; i < steps.size() && !gathers.empty(); ++i) {
      for_stages(steps[i], [&](int stage) { last_[stage] = i; });
    }
  }
  void before(std::size_t step, std::vector<Step>& out) {
    if (gathers_.empty()) return;
    for_stages(steps_[step], [&](int stage) {
      if (!whole_.insert(stage).second) return;
      out.push_back({make_action(ActionKind::kUnshard, stage)});
    });
  }
  void after(std::size_t step, std::vector<Step>& out) {
    if (gathers_.empty()) return;
    for_stages(steps_[step], [&](int stage) {
      const bool ends = last_[stage] == step ||
                        (gathers_[at(stage)] == Gather::kPerUse && !uses(step + 1, stage));
      if (!ends || whole_.erase(stage) == 0) return;
      out.push_back({make_action(ActionKind::kReshard, stage)});
    });
  }

 private:
  template <typename Visit>
  void for_stages(const Step& step, const Visit& visit) const {
    const auto take = [&](const Action& action) {
      if (is_compute(action.kind) && gathers_[at(action.stage)] != Gather::kNever) {
        visit(action.stage);
      }
    };
    take(step.action);
    if (step.overlapped) take(*step.overlapped);
  }
  [[nodiscard]] bool uses(std::size_t step, int stage) const {
    bool used = false;
    if (step < steps_.size()) {
      for_stages(steps_[step], [&](int other) { used = used || other == stage; });
    }
    return used;
  }

  const std::vector<Step>& steps_;
  const std::vector<Gather>& gathers_;
  std::map<int, std::size_t> last_;  // [stage] step
  std::set<int> whole_;              // stages
};

// Throws Error(kUsage) where the list says something of some stages alone.
void require_entries(std::size_t entries, std::size_t stages, const char* what) {
  if (entries == 0 || entries == stages) return;
  refuse("lower: ", entries, " entries say ", what, "; legal are 0 and ", stages,
         ", one per stage");
}

// Those of the places that are at this step, which come in order.
void append_moves(const std::vector<MovePlace>& places, std::size_t step, std::size_t& next,
                  std::vector<Step>& out) {
  for (; next < places.size() && places[next].step == step; ++next) {
    out.push_back({places[next].action});
  }
}

}  // namespace

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  require_tied_groups(options.tied, schedule.placement.stages());
  const auto stages = at(schedule.placement.stages());
  require_entries(options.overlapped_grad_sums.size(), stages,
                  "which sums overlap with computation");
  require_entries(options.recomputes.size(), stages, "which stages recompute");
  require_entries(options.gathers.size(), stages, "when parameters are gathered");
  require_entries(options.resident.size(), stages, "how many states stay");
  if (options.keep_sharding && !options.gathers.empty()) {
    refuse(
        "lower: the schedule's own UNSHARD and RESHARD beside those of gathers; legal: one of "
        "the two");
  }
  Schedule lowered = empty_schedule(schedule.name, schedule.placement, schedule.micro_batches);
  lowered.forward_only = schedule.forward_only;
  lowered.ranks.resize(schedule.ranks.size());
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const std::vector<Step> steps = kept_steps(schedule.ranks[rank], options);
    const std::vector<int>& own = schedule.placement.stages_of(static_cast<int>(rank));
    std::size_t size = steps.size() + options.tied.size() + 1 + own.size();
    for_each_action(steps, [&](const Action& action) {
      if (has_micro_batch(action.kind) && !is_compute(action.kind)) {
        refuse("schedule '", schedule.name, "' already has ",
               is_message(action.kind) ? "messages" : name_of(action.kind), " (", action,
               " on rank ", rank, "); lower takes compute actions only");
      }
      if (action.kind == ActionKind::kBackwardWeight) return;
      size += crosses(schedule.placement, action.stage, action.stage - 1) ? 1U : 0U;
      size += crosses(schedule.placement, action.stage, action.stage + 1) ? 1U : 0U;
    });
    std::vector<Step>& out = lowered.ranks[rank];
    out.reserve(size);
    std::map<int, std::size_t> last = last_steps(steps, options);
    RankMoves moves;
    if (!options.resident.empty() && !schedule.forward_only) {
      moves = choose_moves(steps, own, options.resident);
    }
    GatherPlaces gathers(steps, options.gathers);
    std::size_t offloads = 0, fetches = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      append_moves(moves.fetches, i, fetches, out);
      gathers.before(i, out);
      append_step(schedule.placement, steps[i], i, options.recomputes, last, out);
      gathers.after(i, out);
      append_moves(moves.offloads, i, offloads, out);
    }
    if (!schedule.forward_only) {
      append_reductions(schedule.placement, static_cast<int>(rank), options, out);
    }
  }
  return lowered;
}

}  // namespace sluice
