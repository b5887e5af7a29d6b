#include "schedules/plan.hpp"

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "schedules/message_order.hpp"
#include "schedules/plan_rank.hpp"

namespace sluice {
namespace {

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
  (forward ? messages.forward : messages.backward)[static_cast<std::size_t>(from)] =
      static_cast<int>(messages.channels.size());
  messages.channels.push_back(channel);
}

PlanMessages find_messages(const Schedule& lowered) {
  const Placement& placement = lowered.placement;
  const int stages = placement.stages();
  PlanMessages messages;
  messages.forward.assign(static_cast<std::size_t>(stages), -1);
  messages.backward.assign(static_cast<std::size_t>(stages), -1);
  std::map<std::pair<int, int>, int> tags;
  for (int stage = 0; stage + 1 < stages; ++stage) {
    add_channel(placement, ActionKind::kSendForward, stage, stage + 1, messages, tags);
    if (!lowered.forward_only) {
      add_channel(placement, ActionKind::kSendBackward, stage + 1, stage, messages, tags);
    }
  }
  messages.orders.resize(messages.channels.size());
  for (auto& order : messages.orders) {
    order.reserve(static_cast<std::size_t>(lowered.micro_batches));
  }
  for (const std::vector<Step>& steps : lowered.ranks) {
    for (const Step& step : steps) {
      const Action& action = step.action;
      const bool forward = action.kind == ActionKind::kSendForward;
      if (!forward && action.kind != ActionKind::kSendBackward) continue;
      const int channel = (forward ? messages.forward : messages.backward)
                              .at(static_cast<std::size_t>(action.stage));
      if (channel >= 0) {
        messages.orders[static_cast<std::size_t>(channel)].push_back(action.micro_batch);
      }
    }
  }
  for (std::size_t i = 0; i < messages.orders.size(); ++i) {
    if (messages.orders[i].size() == static_cast<std::size_t>(lowered.micro_batches)) continue;
    throw std::invalid_argument(
        "plan of '" + lowered.name + "': stage " + std::to_string(messages.channels[i].from_stage) +
        " sends " + std::to_string(messages.orders[i].size()) + " of " +
        std::to_string(lowered.micro_batches) + " messages to stage " +
        std::to_string(messages.channels[i].to_stage) + "; pass a schedule that lower() returned");
  }
  return messages;
}

void require_legal(const Schedule& lowered, const PlanOptions& options) {
  if (options.receive_ahead < 0) {
    throw std::invalid_argument("plan: receive_ahead is " + std::to_string(options.receive_ahead) +
                                "; the nearest legal value is 0");
  }
  if (options.send_slots < 1) {
    throw std::invalid_argument("plan: send_slots is " + std::to_string(options.send_slots) +
                                "; the nearest legal value is 1");
  }
  if (lowered.ranks.size() != static_cast<std::size_t>(lowered.placement.ranks())) {
    throw std::invalid_argument("plan of '" + lowered.name +
                                "': " + std::to_string(lowered.ranks.size()) + " lists for " +
                                std::to_string(lowered.placement.ranks()) + " ranks");
  }
}

Plan assemble(const Schedule& lowered, const PlanMessages& messages,
              const std::vector<TiedStages>& tied, const PlanOptions& options) {
  Plan plan;
  plan.schedule_name = lowered.name;
  plan.placement = lowered.placement;
  plan.micro_batches = lowered.micro_batches;
  plan.forward_only = lowered.forward_only;
  plan.tied = tied;
  plan.ranks.reserve(lowered.ranks.size());
  for (int rank = 0; rank < lowered.placement.ranks(); ++rank) {
    PlannedRank planned = plan_rank(lowered, messages, tied, options, rank);
    plan.exact = plan.exact && planned.exact;
    plan.ranks.push_back(std::move(planned.plan));
  }
  plan.channels = messages.channels;
  return plan;
}

// Whether receives for what the schedule holds may be too few: a rank of several stages may block
// sending for one while the receiver waits for another. Asks verify() of such plans alone, since
// that costs as much as the plan.
bool needs_receives(const Plan& plan) {
  return plan.placement.stages() > plan.placement.ranks() &&
         !verify(plan).progresses(TransportModel::kBounded);
}

}  // namespace

Plan make_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
               const PlanOptions& options) {
  require_legal(lowered, options);
  PlanMessages messages = find_messages(lowered);
  if (options.order == MessageOrder::kGlobal) {
    messages.issues = global_issue_order(lowered, messages);
    return assemble(lowered, messages, tied, options);
  }
  Plan plan = assemble(lowered, messages, tied, options);
  if (needs_receives(plan)) {
    messages.depths = unit_time_depths(lowered, messages);
    plan = assemble(lowered, messages, tied, options);
  }
  return plan;
}

}  // namespace sluice
