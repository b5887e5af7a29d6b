#include <array>
#include <map>
#include <utility>

#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/collectives.hpp"
#include "schedules/plan/plan_parts.hpp"

namespace sluice {
namespace {

constexpr std::array<std::string_view, 14> kOpNames = {
    "post",        "wait",        "send",      "wait-sent", "compute",    "release", "fold",
    "reduce-grad", "reduce-tied", "optimizer", "move",      "wait-moved", "unshard", "reshard"};
constexpr std::array<std::string_view, kBufferKinds> kBufferNames = {
    "input", "output", "grad-output", "grad-input", "state", "stored"};

void add_channel(const Placement& placement, ActionKind kind, int from, int to,
                 PlanMessages& messages, std::map<std::pair<int, int>, int>& tags) {
  Channel channel;
  channel.kind = kind;
  channel.from_stage = from;
  channel.to_stage = to;
  channel.from_rank = placement.rank_of(from);
  channel.to_rank = placement.rank_of(to);
  if (channel.from_rank == channel.to_rank) return;
  channel.tag = tags[{channel.from_rank, channel.to_rank}]++;
  const bool forward = kind == ActionKind::kSendForward;
  (forward ? messages.forward : messages.backward)[at(from)] =
      static_cast<int>(messages.channels.size());
  messages.channels.push_back(channel);
}

void require_legal(const Schedule& lowered, const PlanOptions& options) {
  if (options.receive_ahead < 0) {
    refuse("plan: receive_ahead is ", options.receive_ahead, "; the nearest legal value is 0");
  }
  if (options.send_slots < 1) {
    refuse("plan: send_slots is ", options.send_slots, "; the nearest legal value is 1");
  }
  if (!options.collectives.empty() &&
      options.collectives.size() != at(lowered.placement.stages())) {
    refuse("plan: collectives of ", options.collectives.size(), " stages, there are ",
           lowered.placement.stages());
  }
  const int every = options.fold_every;
  if (every < 0 || (every > 0 && (lowered.forward_only || lowered.micro_batches % every != 0))) {
    refuse("plan: folds every ", every, " of ", lowered.micro_batches,
           lowered.forward_only ? " forward-only" : "",
           " micro-batches; legal are 0, and in training divisors of their number");
  }
  if (lowered.ranks.size() != at(lowered.placement.ranks())) {
    refuse("plan of '", lowered.name, "': ", lowered.ranks.size(), " lists for ",
           lowered.placement.ranks(), " ranks");
  }
}

}  // namespace

std::string_view name_of(BufferKind kind) { return kBufferNames[at(kind)]; }

std::string to_string(const PlanOp& op) {
  std::string text(kOpNames[at(op.kind)]);
  text += ' ' + to_string(make_action(op.action, op.stage, op.micro_batch));
  if (op.kind == OpKind::kReduceTied) {
    text += concat(" group ", op.channel);
  } else if (op.channel >= 0) {
    text += concat(" channel ", op.channel);
  }
  if (op.with_previous) text += " with-previous";
  if (op.collectives != 0) text += concat(" collectives ", op.collectives);
  for (std::size_t kind = 0; kind < op.slots.size(); ++kind) {
    if (op.slots[kind] < 0) continue;
    text += concat(' ', kBufferNames[kind], '[', op.slots[kind], ']');
  }
  return text;
}

std::string to_string(const Plan& plan, const PlanOp& op) {
  std::string text = to_string(op);
  const char* before = ", collectives: ";
  for (const PlannedCollective& each : collectives_of(plan, op)) {
    text += concat(std::exchange(before, "; "), each);
  }
  return text;
}

PlanMessages find_messages(const Schedule& lowered) {
  const Placement& placement = lowered.placement;
  const int stages = placement.stages();
  PlanMessages messages;
  messages.forward.assign(at(stages), -1);
  messages.backward.assign(at(stages), -1);
  std::map<std::pair<int, int>, int> tags;
  for (int stage = 0; stage + 1 < stages; ++stage) {
    add_channel(placement, ActionKind::kSendForward, stage, stage + 1, messages, tags);
    if (!lowered.forward_only) {
      add_channel(placement, ActionKind::kSendBackward, stage + 1, stage, messages, tags);
    }
  }
  messages.orders.resize(messages.channels.size());
  for (auto& order : messages.orders) {
    order.reserve(at(lowered.micro_batches));
  }
  for (const std::vector<Step>& steps : lowered.ranks) {
    for (const Step& step : steps) {
      const Action& action = step.action;
      const bool forward = action.kind == ActionKind::kSendForward;
      if (!forward && action.kind != ActionKind::kSendBackward) continue;
      const int channel = (forward ? messages.forward : messages.backward).at(at(action.stage));
      if (channel >= 0) {
        messages.orders[at(channel)].push_back(action.micro_batch);
      }
    }
  }
  for (std::size_t i = 0; i < messages.orders.size(); ++i) {
    if (messages.orders[i].size() == at(lowered.micro_batches)) continue;
    refuse("plan of '", lowered.name, "': stage ", messages.channels[i].from_stage, " sends ",
           messages.orders[i].size(), " of ", lowered.micro_batches, " messages to stage ",
           messages.channels[i].to_stage, "; pass a schedule that lower() returned");
  }
  return messages;
}

Plan assemble_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
                   const PlanOptions& options) {
  require_legal(lowered, options);
  PlanMessages messages = find_messages(lowered);
  if (options.order == MessageOrder::kGlobal) {
    messages.issues = global_issue_order(lowered, messages);
  } else if (options.unit_time_depths) {
    messages.depths = unit_time_depths(lowered, messages);
  }
  Plan plan;
  plan.schedule_name = lowered.name;
  plan.placement = lowered.placement;
  plan.micro_batches = lowered.micro_batches;
  plan.forward_only = lowered.forward_only;
  plan.fold_every = options.fold_every;
  plan.tied = tied;
  const CollectiveLists collectives(options.collectives, lowered.forward_only, plan.collectives);
  plan.ranks.reserve(lowered.ranks.size());
  for (int rank = 0; rank < lowered.placement.ranks(); ++rank) {
    PlannedRank planned = plan_rank(lowered, messages, tied, options, collectives, rank);
    plan.exact = plan.exact && planned.exact;
    plan.ranks.push_back(std::move(planned.plan));
  }
  plan.channels = std::move(messages.channels);
  return plan;
}

}  // namespace sluice
