#include "schedules/plan/plan_receives.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

// While pools are sized.
struct Demand {
  std::vector<std::int32_t>
      index_of;  // [micro_batch] position in the order, where that is no count
  int needed = 0, waits = 0, released = 0, most = 0;

  void need(int posts) {
    needed = std::max(needed, posts);
    most = std::max(most, needed - released);
  }
};

class ReceiveFinder {
 public:
  ReceiveFinder(const Schedule& lowered, const PlanMessages& messages, const PlanOptions& options,
                int rank)
      : schedule_(lowered),
        steps_(lowered.ranks[at(rank)]),
        messages_(messages),
        options_(options),
        rank_(rank) {}

  RankReceives run() {
    for (const int stage : schedule_.placement.stages_of(rank_)) {
      if (stage > 0) {
        add_inbound(messages_.forward[at(stage) - 1], ActionKind::kRecvForward, BufferKind::kInput,
                    stage);
      }
      if (stage + 1 < schedule_.placement.stages()) {
        add_inbound(messages_.backward[at(stage) + 1], ActionKind::kRecvBackward,
                    BufferKind::kGradOutput, stage);
      }
    }
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      count_issues(i);
      count(steps_[i].action);
      if (steps_[i].overlapped) count(*steps_[i].overlapped);
    }
    for (std::size_t i = 0; i < demands_.size(); ++i) set_slots(result_.inbound[i], demands_[i]);
    return std::move(result_);
  }

 private:
  void add_inbound(int channel, ActionKind action, BufferKind kind, int stage) {
    if (channel < 0) return;
    const std::vector<int>& order = messages_.orders[at(channel)];
    result_.inbound.push_back({channel, action, kind, stage, &order});
    Demand& demand = demands_.emplace_back();
    if (std::is_sorted(order.begin(), order.end())) return;
    demand.index_of.resize(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      demand.index_of[at(order[i])] = static_cast<std::int32_t>(i);
    }
  }

  // Counts what the global order issues before the step.
  void count_issues(std::size_t step) {
    if (messages_.issues.empty()) return;
    const std::vector<Issue>& issues = messages_.issues[at(rank_)];
    for (; issued_ < issues.size(); ++issued_) {
      const Issue& issue = issues[issued_];
      if (at(issue.before_step) > step) return;
      if (!issue.receives) continue;
      std::size_t i = 0;
      while (result_.inbound[i].channel != issue.channel) ++i;
      demands_[i].need(demands_[i].needed + 1);
    }
  }

  // What the action asks of the pools, and how many ops it becomes: a receive is posted and waited
  // for, a send started and waited for, each micro-batch's buffers are released once.
  void count(const Action& action) {
    result_.ops += is_message(action.kind) ? 2 : 1;
    if (action.kind == ActionKind::kRecvForward || action.kind == ActionKind::kRecvBackward) {
      for (std::size_t i = 0; i < demands_.size(); ++i) {
        const Inbound& inbound = result_.inbound[i];
        if (inbound.stage != action.stage || inbound.action != action.kind) continue;
        Demand& demand = demands_[i];
        demand.need(1 + (demand.index_of.empty() ? action.micro_batch
                                                 : demand.index_of[at(action.micro_batch)]));
        ++demand.waits;
      }
      return;
    }
    if (!ends_use(action.kind, schedule_.forward_only)) return;
    ++result_.ops;
    for (std::size_t i = 0; i < demands_.size(); ++i) {
      if (result_.inbound[i].stage == action.stage) ++demands_[i].released;
    }
  }

  void set_slots(Inbound& inbound, const Demand& demand) const {
    const int micro_batches = schedule_.micro_batches;
    if (demand.waits != micro_batches) {
      refuse("plan of '", schedule_.name, "': rank ", rank_, " receives ", demand.waits, " of ",
             micro_batches, " messages for stage ", inbound.stage,
             "; pass a schedule that lower() returned");
    }
    int most = demand.most;
    if (!messages_.depths.empty()) {
      most = std::max(most, messages_.depths[at(inbound.channel)]);
    }
    inbound.slots = std::min(micro_batches, most + std::min(options_.receive_ahead, micro_batches));
  }

  const Schedule& schedule_;
  const std::vector<Step>& steps_;
  const PlanMessages& messages_;
  const PlanOptions& options_;
  const int rank_;
  std::size_t issued_ = 0;
  std::vector<Demand> demands_;  // [inbound]
  RankReceives result_;
};

}  // namespace

RankReceives find_receives(const Schedule& lowered, const PlanMessages& messages,
                           const PlanOptions& options, int rank) {
  return ReceiveFinder(lowered, messages, options, rank).run();
}

}  // namespace sluice
