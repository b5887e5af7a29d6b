#include <algorithm>
#include <iterator>
#include <span>
#include <string>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

void require_tied_groups(const std::vector<TiedStages>& tied, int stages) {
  for (const TiedStages& group : tied) {
    if (group.stages.empty()) {
      throw Error(ErrorCode::kUsage, "a tied parameter names no stage; it needs at least one");
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

// Appends the step with its messages; `sums` are the stages whose gradients are summed after it.
void append_step(const Placement& placement, const Step& step, std::span<const int> sums,
                 std::vector<Step>& out) {
  append_message(placement, step.action, true, out);
  if (step.overlapped) append_message(placement, *step.overlapped, true, out);
  out.push_back(step);
  for (const int stage : sums) out.push_back({make_action(ActionKind::kReduceGrad, stage)});
  append_message(placement, step.action, false, out);
  if (step.overlapped) append_message(placement, *step.overlapped, false, out);
}

bool overlaps(const LowerOptions& options, int stage) {
  return options.reduce_grad && !options.overlapped_grad_sums.empty() &&
         options.overlapped_grad_sums[at(stage)];
}

// The sums of a rank that overlap with computation, each right after the last action that adds to
// its stage's gradients.
class OverlappedSums {
 public:
  OverlappedSums(const std::vector<Step>& steps, const std::vector<int>& own,
                 const LowerOptions& options) {
    std::vector<int> open;
    std::copy_if(own.begin(), own.end(), std::back_inserter(open),
                 [&](int stage) { return overlaps(options, stage); });
    for (std::size_t i = steps.size(); i-- > 0 && !open.empty();) {
      if (steps[i].overlapped) take(i, *steps[i].overlapped, open);
      take(i, steps[i].action, open);
    }
    std::reverse(stages_.begin(), stages_.end());
    std::reverse(places_.begin(), places_.end());
  }

  // The stages whose sums follow the step. Call it for each step in turn.
  std::span<const int> after(std::size_t step) {
    const std::size_t first = next_;
    while (next_ < places_.size() && places_[next_] == step) ++next_;
    return std::span(stages_).subspan(first, next_ - first);
  }

 private:
  void take(std::size_t step, const Action& action, std::vector<int>& open) {
    if (!ends_backward(action.kind) || std::erase(open, action.stage) == 0) return;
    stages_.push_back(action.stage);
    places_.push_back(step);
  }

  std::vector<int> stages_;
  std::vector<std::size_t> places_;  // [as stages_] ascending indices of steps
  std::size_t next_ = 0;
};

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

bool has_pairs(const std::vector<Step>& steps) {
  return std::any_of(steps.begin(), steps.end(),
                     [](const Step& step) { return step.overlapped.has_value(); });
}

void split_pairs(const std::vector<Step>& steps, std::vector<Step>& apart) {
  apart.clear();
  for (const Step& step : steps) {
    apart.push_back({step.action});
    if (step.overlapped) apart.push_back({*step.overlapped});
  }
}

}  // namespace

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  require_tied_groups(options.tied, schedule.placement.stages());
  const auto stages = at(schedule.placement.stages());
  if (!options.overlapped_grad_sums.empty() && options.overlapped_grad_sums.size() != stages) {
    refuse("lower: ", options.overlapped_grad_sums.size(),
           " entries say which sums overlap with computation; legal are 0 and ", stages,
           ", one per stage");
  }
  Schedule lowered;
  lowered.name = schedule.name;
  lowered.placement = schedule.placement;
  lowered.micro_batches = schedule.micro_batches;
  lowered.forward_only = schedule.forward_only;
  lowered.ranks.resize(schedule.ranks.size());
  std::vector<Step> apart;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const bool whole = options.keep_pairs || !has_pairs(schedule.ranks[rank]);
    if (!whole) split_pairs(schedule.ranks[rank], apart);
    const std::vector<Step>& steps = whole ? schedule.ranks[rank] : apart;
    const std::vector<int>& own = schedule.placement.stages_of(static_cast<int>(rank));
    std::size_t size = steps.size() + options.tied.size() + 1 + own.size();
    for_each_action(steps, [&](const Action& action) {
      if (is_message(action.kind)) {
        refuse("schedule '", schedule.name, "' already has messages (", action, " on rank ", rank,
               "); lower takes compute actions only");
      }
      if (action.kind == ActionKind::kBackwardWeight) return;
      size += crosses(schedule.placement, action.stage, action.stage - 1) ? 1U : 0U;
      size += crosses(schedule.placement, action.stage, action.stage + 1) ? 1U : 0U;
    });
    std::vector<Step>& out = lowered.ranks[rank];
    out.reserve(size);
    OverlappedSums sums(steps, own, options);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (is_sharding(steps[i].action.kind)) {
        if (options.keep_sharding) out.push_back(steps[i]);
        continue;
      }
      append_step(schedule.placement, steps[i], sums.after(i), out);
    }
    if (!schedule.forward_only) {
      append_reductions(schedule.placement, static_cast<int>(rank), options, out);
    }
  }
  return lowered;
}

}  // namespace sluice
