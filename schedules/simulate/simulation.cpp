#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <sluice/simulate.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/dataflow.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/pair_table.hpp"
#include "schedules/model/text.hpp"
#include "schedules/simulate/simulation_costs.hpp"

namespace sluice {
namespace {

constexpr std::uint8_t kRelease = 0, kTake = 1, kReleaseAtOnce = 2;

// The bytes each rank holds over time, from the actions and messages of a simulation in any order.
class MemoryRecorder {
 public:
  // Both outlive this.
  MemoryRecorder(const Schedule& schedule, const SimulationTimes& times)
      : schedule_(schedule), times_(times), changes_(schedule.ranks.size()) {
    for (std::size_t rank = 0; rank < changes_.size(); ++rank) {
      changes_[rank].reserve(schedule.ranks[rank].size());
    }
  }

  // What the action itself takes and releases on its rank.
  void compute(int rank, const Action& action, double start, double end) {
    const StageBytes& bytes = of_stage(times_.bytes, action.stage);
    const std::int64_t held = (action.kind == ActionKind::kBackwardWeight ? 0 : bytes.until_input) +
                              (action.kind == ActionKind::kBackwardInput ? 0 : bytes.until_weight);
    const bool forward = action.kind == ActionKind::kForward;
    if (forward) take(rank, start, held);
    if (!forward || schedule_.forward_only) release(rank, end, held, end > start);
  }
  // What the micro-batch's state gives back when it has left, or takes when it comes.
  void move(int rank, const Action& action, double start, double end) {
    const std::int64_t held = held_in(action.stage);
    if (action.kind == ActionKind::kFetch) return take(rank, start, held);
    release(rank, end, held, end > start);
  }
  [[nodiscard]] std::int64_t held_in(int stage) const {
    const StageBytes& bytes = of_stage(times_.bytes, stage);
    return bytes.until_input + bytes.until_weight;
  }
  // The tensor that the action from `start` on produces and whose bytes leave from `leaves` to
  // `left`; on a shared rank, which keeps it until received(), nothing leaves.
  void produced(const Handover& handover, double start, double leaves, double left) {
    if (handover.bytes == 0) return;
    take(handover.from, start, handover.bytes);
    if (handover.link < 0) return;
    release(handover.from, left, handover.bytes, left > start);
    take(handover.to, leaves, handover.bytes);
  }
  // The action that uses it ran from `start` to `end`.
  void received(const Handover& handover, double start, double end) {
    release(handover.to, end, handover.bytes, end > start);
  }

  // Sets peak_bytes, and `memory` where asked for. Sorts what came out of order.
  void finish(Simulation& result, bool curves) {
    const auto earlier = [](const Change& a, const Change& b) {
      return std::tie(a.time, a.turn) < std::tie(b.time, b.turn);
    };
    result.peak_bytes.resize(changes_.size());
    if (curves) result.memory.resize(changes_.size());
    for (std::size_t rank = 0; rank < changes_.size(); ++rank) {
      std::vector<Change> changes = std::move(changes_[rank]);
      if (!std::is_sorted(changes.begin(), changes.end(), earlier)) {
        std::sort(changes.begin(), changes.end(), earlier);
      }
      std::int64_t held = 0;
      for (const int stage : schedule_.placement.stages_of(static_cast<int>(rank))) {
        held += of_stage(times_.bytes, stage).resident;
      }
      std::int64_t peak = held;
      std::vector<MemoryStep> curve{{0, held}};
      for (const Change& change : changes) {
        held += change.bytes;
        peak = std::max(peak, held);
        if (!curves) continue;
        if (curve.back().time < change.time) curve.push_back({change.time, held});
        curve.back().bytes = held;
      }
      result.peak_bytes[rank] = peak;
      if (curves) result.memory[rank] = std::move(curve);
    }
  }

 private:
  struct Change {
    double time = 0;
    std::int64_t bytes = 0;
    // Of changes at one time, releases go before what is taken, unless they end a holding that
    // takes no time at all.
    std::uint8_t turn = 0;
  };

  void take(int rank, double time, std::int64_t bytes) {
    if (bytes > 0) changes_[at(rank)].push_back({time, bytes, kTake});
  }
  // `held`: since before `time`.
  void release(int rank, double time, std::int64_t bytes, bool held) {
    if (bytes == 0) return;
    changes_[at(rank)].push_back({time, -bytes, held ? kRelease : kReleaseAtOnce});
  }

  const Schedule& schedule_;
  const SimulationTimes& times_;
  std::vector<std::vector<Change>> changes_;  // [rank]
};

// The schedule without messages, which lower() adds.
Schedule compute_of(const Schedule& schedule) {
  Schedule compute = schedule;
  for (std::vector<Step>& steps : compute.ranks) {
    std::erase_if(steps, [](const Step& step) { return !is_compute(step.action.kind); });
  }
  return compute;
}

class Simulator {
 public:
  Simulator(const Schedule& schedule, const SimulationTimes& times, const SimulationDetail& detail)
      : schedule_(schedule),
        placement_(schedule.placement),
        times_(times),
        detail_(detail),
        handovers_(handovers_of(times, placement_)),
        link_free_(at(handovers_.links)),
        activation_there_(placement_.stages(), schedule.micro_batches),
        gradient_there_(schedule.forward_only ? 0 : placement_.stages(), schedule.micro_batches),
        ranks_(schedule.ranks.size()),
        weights_done_(at(placement_.stages())),
        recomputed_(weights_done_.size()),
        gathered_(weights_done_.size()) {
    if (!times.bytes.empty()) memory_.emplace(schedule, times);
    if (times.queues != MessageQueues::kNone) lanes_ = lane_times(compute_of(schedule), times);
  }

  Simulation run() {
    result_.busy.resize(schedule_.ranks.size());
    result_.peak_in_flight = peak_in_flight(schedule_);
    if (detail_.timeline) reserve_timeline();
    Dataflow dataflow(schedule_);
    const bool finished =
        dataflow.run([this](int rank, int, const Step& step) { visit(at(rank), step); });
    if (!finished) {
      refuse("simulation of '", schedule_.name,
             "': the schedule cannot run to its end; check() says why");
    }
    if (!schedule_.forward_only) reduce();
    if (memory_) memory_->finish(result_, detail_.memory);
    summarise();
    return std::move(result_);
  }

 private:
  struct RankState {
    double first = -1;      // start of its first action; negative: none yet
    double free = 0;        // end of its last one so far, reductions at the end too
    double store_free = 0;  // end of its last move so far
    // Ends of what it offloaded before the last action, and since.
    double left_before = 0, left_since = 0;
  };

  // Room that is not used is never touched, so that it takes no memory.
  void reserve_timeline() {
    const std::size_t most = (schedule_.forward_only ? 1U : 3U) * at(schedule_.micro_batches);
    result_.timeline.resize(schedule_.ranks.size());
    for (int rank = 0; rank < placement_.ranks(); ++rank) {
      result_.timeline[at(rank)].reserve(placement_.stages_of(rank).size() * most);
    }
  }

  // Where the tensor that `action` uses comes from; null where it comes from no other stage.
  const Handover* source(const Action& action) const {
    const auto stage = at(action.stage);
    if (action.kind == ActionKind::kForward) {
      return action.stage == 0 ? nullptr : &handovers_.forward[stage - 1];
    }
    const bool from_next =
        action.kind != ActionKind::kBackwardWeight && action.stage + 1 < placement_.stages();
    return from_next ? &handovers_.backward[stage + 1] : nullptr;
  }

  // Where what `action` makes goes to; null where no other stage uses it.
  const Handover* target(const Action& action) const {
    const auto stage = at(action.stage);
    if (action.kind == ActionKind::kForward) {
      return action.stage + 1 == placement_.stages() ? nullptr : &handovers_.forward[stage];
    }
    const bool to_last = action.kind != ActionKind::kBackwardWeight && action.stage > 0;
    return to_last ? &handovers_.backward[stage] : nullptr;
  }

  // When the tensor that `action` uses is there.
  double arrival(const Action& action) {
    if (source(action) == nullptr) return 0;
    const bool forward = action.kind == ActionKind::kForward;
    return (forward ? activation_there_ : gradient_there_).at(action.stage, action.micro_batch);
  }

  // Hands on what the action made; `start` and `end` are those of its step.
  void finish(std::size_t rank, const Action& action, double start, double end) {
    if (ends_backward(action.kind)) weights_done_[at(action.stage)] = end;
    if (memory_) {
      memory_->compute(static_cast<int>(rank), action, start, end);
      if (const Handover* from = source(action)) memory_->received(*from, start, end);
    }
    const Handover* to = target(action);
    if (to == nullptr) return;
    const double there = to->link < 0 ? end : transfer(*to, action, start, end);
    if (memory_ && to->link < 0) memory_->produced(*to, start, end, end);
    if (detail_.messages && to->link >= 0) {
      result_.transfers.push_back({action, to->from, to->to, end, there});
    }
    if (action.kind == ActionKind::kForward) {
      activation_there_.at(action.stage + 1, action.micro_batch) = there;
    } else {
      gradient_there_.at(action.stage - 1, action.micro_batch) = there;
    }
  }

  // Returns when the tensor arrives that was made from `start` to `end`.
  double transfer(const Handover& handover, const Action& action, double start, double end) {
    ++result_.messages;
    if (lanes_) {
      const bool forward = action.kind == ActionKind::kForward;
      const double left = (forward ? lanes_->activation_left : lanes_->gradient_left)
                              .at(action.stage, action.micro_batch);
      if (memory_) memory_->produced(handover, start, end, left);
      return left;
    }
    double& free = link_free_[at(handover.link)];
    const double leaves = std::max(end, free);
    free = leaves + handover.seconds;
    if (memory_) memory_->produced(handover, start, leaves, free);
    return free + handover.latency;
  }

  void visit(std::size_t rank, const Step& step) {
    if (is_move(step.action.kind)) return move(rank, step.action);
    if (step.action.kind == ActionKind::kRecompute) return recompute(rank, step.action);
    if (!is_compute(step.action.kind)) return;
    const auto together = step.overlapped && !lanes_
                              ? pair_time(times_, step.action, *step.overlapped)
                              : std::nullopt;
    if (together) {
      compute_pair(rank, step, *together);
      return;
    }
    compute(rank, step.action);
    if (step.overlapped) compute(rank, *step.overlapped);
  }

  // Beside the rank's actions, after its other moves.
  void move(std::size_t rank, const Action& action) {
    RankState& state = ranks_[rank];
    const double start = std::max(state.store_free, state.free);
    double time = 0;
    if (!lanes_) {
      const std::int64_t bytes = memory_ ? memory_->held_in(action.stage) : 0;
      time = times_.move_link.latency + transfer_seconds(times_.move_link, bytes);
    }
    state.store_free = start + time;
    if (memory_) memory_->move(static_cast<int>(rank), action, start, state.store_free);
    if (action.kind == ActionKind::kOffload) {
      state.left_since = state.store_free;
    } else {
      fetched_[{action.stage, action.micro_batch}] = state.store_free;
    }
  }

  // When the moves that the action needs have ended.
  double moved(const RankState& state, const Action& action) const {
    if (action.kind == ActionKind::kForward) return state.left_before;
    const auto found = fetched_.find({action.stage, action.micro_batch});
    return found == fetched_.end() ? 0 : found->second;
  }

  // With in-order queues its time stays with the backward.
  void recompute(std::size_t rank, const Action& action) {
    RankState& state = ranks_[rank];
    recomputed_[at(action.stage)] = lanes_ ? 0 : duration_of(times_, action);
    state.free =
        place(rank, action, begin(rank, moved(state, action)), recomputed_[at(action.stage)]);
  }

  // Once a step, before the stage's first action.
  void gather(RankState& state, int stage) {
    if (times_.gather != Gather::kPerStep || gathered_[at(stage)]) return;
    gathered_[at(stage)] = true;
    state.free += gather_time(times_, stage);
  }

  void compute(std::size_t rank, const Action& action) {
    RankState& state = ranks_[rank];
    gather(state, action.stage);
    const double there = lanes_
                             ? lanes_->starts_of(action.kind).at(action.stage, action.micro_batch)
                             : arrival(action);
    const double start = begin(rank, std::max(there, moved(state, action)));
    state.left_before = state.left_since;
    double time = duration_of(times_, action);
    if (makes_gradient(action.kind)) time -= std::exchange(recomputed_[at(action.stage)], 0);
    const double end = place(rank, action, start, time);
    finish(rank, action, start, end);
    state.free = end;
  }

  // Both fill the pair's time, which counts as busy once.
  void compute_pair(std::size_t rank, const Step& step, double time) {
    const double start = begin(rank, std::max(arrival(step.action), arrival(*step.overlapped)));
    place(rank, step.action, start, time);
    result_.busy[rank] -= time;
    const double end = place(rank, *step.overlapped, start, time);
    finish(rank, *step.overlapped, start, end);
    finish(rank, step.action, start, end);
    ranks_[rank].free = end;
  }

  // When the rank starts what has its inputs at `there`.
  double begin(std::size_t rank, double there) {
    RankState& state = ranks_[rank];
    const double start = std::max(state.free, there);
    if (state.first < 0) state.first = start;
    return start;
  }

  double place(std::size_t rank, const Action& action, double start, double time) {
    if (detail_.timeline) {
      result_.timeline[rank].push_back(SimulatedAction{action, start, start + time});
      __builtin_prefetch(&result_.timeline[rank].back() + 3, 1);  // written at the next turn
    }
    result_.busy[rank] += time;
    return start + time;
  }

  double reduction(int stage) const {
    const double time = of_stage(times_.stages, stage).reduce;
    if (times_.bytes.empty()) return time;
    const std::int64_t bytes = of_stage(times_.bytes, stage).reduced;
    if (bytes == 0) return time;
    return time + times_.reduce_link.latency + transfer_seconds(times_.reduce_link, bytes);
  }

  void reduce() {
    double longest = 0;
    for (int stage = 0; stage < placement_.stages(); ++stage) {
      longest = std::max(longest, reduction(stage));
    }
    if (!(longest > 0)) return;
    result_.reductions.resize(ranks_.size());
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      std::vector<int> stages = placement_.stages_of(static_cast<int>(rank));
      const auto done = [this](int stage) { return weights_done_[at(stage)]; };
      if (times_.reduce_overlap) {
        std::stable_sort(stages.begin(), stages.end(),
                         [&](int a, int b) { return done(a) < done(b); });
      }
      double free = times_.reduce_overlap ? 0 : ranks_[rank].free;
      for (const int stage : stages) {
        const double start = std::max(free, done(stage));
        free = start + reduction(stage);
        result_.reductions[rank].push_back(
            {make_action(ActionKind::kReduceGrad, stage), start, free});
      }
      ranks_[rank].free = std::max(ranks_[rank].free, free);
    }
  }

  void summarise() {
    double idle = 0;
    for (const RankState& rank : ranks_) result_.makespan = std::max(result_.makespan, rank.free);
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      idle += result_.makespan - result_.busy[rank];
      const double span = ranks_[rank].first < 0 ? 0 : ranks_[rank].free - ranks_[rank].first;
      result_.waiting.push_back(std::max(0.0, span - result_.busy[rank]));
      if (span > result_.span) {
        result_.span = span;
        result_.bubble_span = (span - result_.busy[rank]) / span;
      }
    }
    if (result_.makespan > 0) {
      result_.bubble_makespan = idle / (result_.makespan * static_cast<double>(ranks_.size()));
    }
  }

  const Schedule& schedule_;
  const Placement& placement_;
  const SimulationTimes& times_;
  const SimulationDetail detail_;
  const Handovers handovers_;
  std::vector<double> link_free_;       // [link]
  PairTable<double> activation_there_;  // when the input of the stage arrives
  PairTable<double> gradient_there_;    // when the gradient from the next stage arrives
  std::vector<RankState> ranks_;
  std::vector<double> weights_done_;  // [stage] end of its last W or B so far
  std::vector<double> recomputed_;    // [stage] what RECOMPUTE took of its next B or I
  std::vector<bool> gathered_;        // [stage]
  std::optional<MemoryRecorder> memory_;
  std::optional<LaneTimes> lanes_;                 // with in-order queues
  std::map<std::pair<int, int>, double> fetched_;  // by stage and micro-batch
  Simulation result_;
};

}  // namespace

Simulation simulate(const Schedule& lowered, const SimulationTimes& times,
                    const SimulationDetail& detail) {
  if (lowered.ranks.size() != at(lowered.placement.ranks())) {
    refuse("simulation of '", lowered.name, "': ", lowered.ranks.size(), " lists for ",
           lowered.placement.ranks(), " ranks");
  }
  require_costs(times, lowered);
  const SimulationTimes whole =
      with_collectives(times, lowered.placement.stages(), lowered.forward_only);
  return Simulator(lowered, whole, detail).run();
}

}  // namespace sluice
