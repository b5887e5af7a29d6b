#include <algorithm>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"

namespace sluice {
namespace {

Action make_action(ActionKind kind, int stage, int micro_batch = -1) {
  Action action;
  action.kind = kind;
  action.stage = stage;
  action.micro_batch = micro_batch;
  return action;
}

void require_tied_groups(const std::vector<TiedStages>& tied, int stages) {
  for (const TiedStages& group : tied) {
    if (group.stages.empty()) {
      throw std::invalid_argument("a tied parameter names no stage; it needs at least one");
    }
    for (std::size_t i = 0; i < group.stages.size(); ++i) {
      const int stage = group.stages[i];
      if (stage < 0 || stage >= stages) {
        throw std::invalid_argument("a tied parameter names stage " + std::to_string(stage) +
                                    "; legal stages are 0 to " + std::to_string(stages - 1));
      }
      if (i > 0 && group.stages[i - 1] >= stage) {
        throw std::invalid_argument("a tied parameter names stage " + std::to_string(stage) +
                                    " after stage " + std::to_string(group.stages[i - 1]) +
                                    "; stages must ascend without repeats");
      }
    }
  }
}

// Adds the messages of one rank's list.
class RankLowering {
 public:
  RankLowering(const Placement& placement, std::vector<Step>& out)
      : placement_(placement), out_(out) {}

  // `sums`: the stages whose gradients are summed behind the step.
  void add(const Step& step, std::span<const int> sums) {
    receive_for(step.action);
    if (step.overlapped) receive_for(*step.overlapped);
    out_.push_back(step);
    for (const int stage : sums) {
      out_.push_back(Step{make_action(ActionKind::kReduceGrad, stage), std::nullopt});
    }
    send_after(step.action);
    if (step.overlapped) send_after(*step.overlapped);
  }

  // How many messages add() would put around the action.
  [[nodiscard]] std::size_t messages(const Action& action) const {
    const bool forward = action.kind == ActionKind::kForward;
    if (!forward && !is_backward(action.kind)) return 0;
    return (crosses(action.stage, -1) ? 1U : 0U) + (crosses(action.stage, 1) ? 1U : 0U);
  }

 private:
  static bool is_backward(ActionKind kind) {
    return kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput;
  }

  [[nodiscard]] bool crosses(int stage, int direction) const {
    const int neighbour = stage + direction;
    return neighbour >= 0 && neighbour < placement_.stages() &&
           placement_.rank_of(neighbour) != placement_.rank_of(stage);
  }

  void message(ActionKind kind, const Action& around) {
    out_.push_back(Step{make_action(kind, around.stage, around.micro_batch), std::nullopt});
  }

  void receive_for(const Action& action) {
    if (action.kind == ActionKind::kForward && crosses(action.stage, -1)) {
      message(ActionKind::kRecvForward, action);
    }
    if (is_backward(action.kind) && crosses(action.stage, 1)) {
      message(ActionKind::kRecvBackward, action);
    }
  }

  void send_after(const Action& action) {
    if (action.kind == ActionKind::kForward && crosses(action.stage, 1)) {
      message(ActionKind::kSendForward, action);
    }
    if (is_backward(action.kind) && crosses(action.stage, -1)) {
      message(ActionKind::kSendBackward, action);
    }
  }

  const Placement& placement_;
  std::vector<Step>& out_;
};

bool overlapped_grad_sums(const LowerOptions& options, int stage) {
  return options.reduce_grad && !options.overlapped_grad_sums.empty() &&
         options.overlapped_grad_sums[at(stage)];
}

// The sums of a rank that run beside computation, each behind the last action that adds to its
// stage's gradients.
class EarlySums {
 public:
  EarlySums(const std::vector<Step>& steps, const std::vector<int>& own,
            const LowerOptions& options) {
    std::vector<int> wanted;
    std::copy_if(own.begin(), own.end(), std::back_inserter(wanted),
                 [&](int stage) { return overlapped_grad_sums(options, stage); });
    for (std::size_t i = steps.size(); i-- > 0 && !wanted.empty();) {
      if (steps[i].overlapped) take(i, *steps[i].overlapped, wanted);
      take(i, steps[i].action, wanted);
    }
    std::reverse(stages_.begin(), stages_.end());
    std::reverse(places_.begin(), places_.end());
  }

  // To be asked for each step in turn.
  std::span<const int> behind(std::size_t step) {
    const std::size_t first = next_;
    while (next_ < places_.size() && places_[next_] == step) ++next_;
    return std::span(stages_).subspan(first, next_ - first);
  }

 private:
  void take(std::size_t step, const Action& action, std::vector<int>& wanted) {
    if (action.kind != ActionKind::kBackward && action.kind != ActionKind::kBackwardWeight) return;
    if (std::erase(wanted, action.stage) == 0) return;
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
      if (overlapped_grad_sums(options, stage)) continue;
      out.push_back(Step{make_action(ActionKind::kReduceGrad, stage), std::nullopt});
    }
  }
  for (const TiedStages& group : options.tied) {
    const auto first_own = std::find_if(group.stages.begin(), group.stages.end(), [&](int stage) {
      return placement.rank_of(stage) == rank;
    });
    if (first_own != group.stages.end()) {
      out.push_back(Step{make_action(ActionKind::kReduceTied, *first_own), std::nullopt});
    }
  }
  if (options.reduce_grad) {
    out.push_back(Step{make_action(ActionKind::kOptimizer, own.front()), std::nullopt});
  }
}

}  // namespace

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  require_tied_groups(options.tied, schedule.placement.stages());
  const auto stages = at(schedule.placement.stages());
  if (!options.overlapped_grad_sums.empty() && options.overlapped_grad_sums.size() != stages) {
    throw std::invalid_argument("lower: " + std::to_string(options.overlapped_grad_sums.size()) +
                                " entries say which sums run beside computation; legal are 0 and " +
                                std::to_string(stages) + ", one per stage");
  }
  Schedule lowered;
  lowered.name = schedule.name;
  lowered.placement = schedule.placement;
  lowered.micro_batches = schedule.micro_batches;
  lowered.forward_only = schedule.forward_only;
  lowered.ranks.resize(schedule.ranks.size());
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    std::vector<Step>& out = lowered.ranks[rank];
    RankLowering lowering(schedule.placement, out);
    std::size_t size = schedule.ranks[rank].size() + options.tied.size() + 1 +
                       schedule.placement.stages_of(static_cast<int>(rank)).size();
    for (const Step& step : schedule.ranks[rank]) {
      if (is_message(step.action.kind)) {
        throw std::invalid_argument("schedule '" + schedule.name + "' already has messages (" +
                                    to_string(step.action) + " on rank " + std::to_string(rank) +
                                    "); lower takes compute actions only");
      }
      size += lowering.messages(step.action);
      if (step.overlapped) size += lowering.messages(*step.overlapped);
    }
    out.reserve(size);
    EarlySums sums(schedule.ranks[rank], schedule.placement.stages_of(static_cast<int>(rank)),
                   options);
    for (std::size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
      lowering.add(schedule.ranks[rank][i], sums.behind(i));
    }
    if (!schedule.forward_only) {
      append_reductions(schedule.placement, static_cast<int>(rank), options, out);
    }
  }
  return lowered;
}

}  // namespace sluice
