// Visits the steps of a schedule in an order that respects every dependency between ranks. Each
// rank's steps come in list order, a forward after the previous stage's forward of that
// micro-batch, a backward (B or I) after the next stage's, a receive after its send. Linear in the
// number of steps: a blocked rank is visited again only when the one thing it waits for happens.
//
// Requires: every compute and message action has its stage and micro-batch in range.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include <sluice/schedule.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/pair_table.hpp"

namespace sluice {

// How a tensor moves between stages at an action of one kind. An event is the end of an action that
// another rank may wait for, as a bit: F, B (I serves as well), SEND_F and SEND_B, 1 << kind.
struct Flow {
  std::uint8_t makes = 0, needs = 0;  // events
  std::int8_t direction = 0;          // to stage + direction
};
// Indexed by ActionKind: compute and messages. Other kinds have no flow.
inline constexpr std::array<Flow, 8> kFlows = {Flow{1, 1, 1},   Flow{2, 2, -1}, Flow{2, 2, -1},
                                               Flow{},          Flow{16, 0, 1}, Flow{0, 16, 1},
                                               Flow{64, 0, -1}, Flow{0, 64, -1}};
constexpr Flow flow_of(ActionKind kind) {
  return at(kind) < kFlows.size() ? kFlows[at(kind)] : Flow{};
}

class Dataflow {
 public:
  explicit Dataflow(const Schedule& schedule)
      : schedule_(schedule),
        happened_(schedule.placement.stages(), schedule.micro_batches),
        cursors_(schedule.ranks.size()) {}

  // Calls visit(rank, position, step) once per step. Returns false where some rank never reaches
  // the end of its list; position() and waits_for() then say where and why.
  template <class Visit>
  bool run(const Visit& visit) {
    for (std::size_t rank = cursors_.size(); rank-- > 0;) ready_.push_back(rank);
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      advance(rank, visit);
    }
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      if (cursors_[rank].position < schedule_.ranks[rank].size()) return false;
    }
    return true;
  }

  // The position of `rank`: the index of the step it has not run, or the length of its list.
  [[nodiscard]] int position(int rank) const {
    return static_cast<int>(cursors_[at(rank)].position);
  }
  // The action whose end `rank` waits for. A wait for a gradient says kBackward, though I serves.
  [[nodiscard]] std::optional<Action> waits_for(int rank) const {
    const Need& need = cursors_[at(rank)].need;
    if (need.event == 0) return std::nullopt;
    return make_action(static_cast<ActionKind>(std::countr_zero(need.event)), need.stage,
                       need.micro_batch);
  }

 private:
  // Ranks take turns after few steps; what the next turn reads is fetched in this one.
  static constexpr std::size_t kStepsAhead = 4;

  struct Need {
    std::int32_t stage = -1, micro_batch = -1;
    std::uint8_t event = 0;  // 0: none
    friend bool operator==(const Need&, const Need&) = default;
  };

  struct Cursor {
    std::size_t position = 0;
    Need need;
  };

  [[nodiscard]] Need need_of(const Action& action) const {
    const Flow flow = flow_of(action.kind);
    const int source = action.stage - flow.direction;
    if (flow.needs == 0 || source < 0 || source >= schedule_.placement.stages()) return {};
    return {source, action.micro_batch, flow.needs};
  }

  bool met(const Action& action, Need& need) {
    need = need_of(action);
    return need.event == 0 || (happened_.at(need.stage, need.micro_batch) & need.event) != 0;
  }

  // Marks the action's event and wakes the one rank that may wait for it.
  void finish(const Action& action) {
    const Flow flow = flow_of(action.kind);
    if (flow.makes == 0) return;
    happened_.at(action.stage, action.micro_batch) |= flow.makes;
    const int consumer = action.stage + flow.direction;
    if (consumer < 0 || consumer >= schedule_.placement.stages()) return;
    const auto rank = at(schedule_.placement.rank_of(consumer));
    if (cursors_[rank].need == Need{action.stage, action.micro_batch, flow.makes}) {
      cursors_[rank].need = {};
      ready_.push_back(rank);
    }
  }

  template <class Visit>
  void advance(std::size_t rank, const Visit& visit) {
    const std::vector<Step>& steps = schedule_.ranks[rank];
    Cursor& cursor = cursors_[rank];
    for (; cursor.position < steps.size(); ++cursor.position) {
      const Step& step = steps[cursor.position];
      __builtin_prefetch(&step + kStepsAhead);
      if (!met(step.action, cursor.need)) return;
      if (step.overlapped && !met(*step.overlapped, cursor.need)) return;
      cursor.need = {};
      visit(static_cast<int>(rank), static_cast<int>(cursor.position), step);
      finish(step.action);
      if (step.overlapped) finish(*step.overlapped);
    }
  }

  const Schedule& schedule_;
  PairTable<std::uint8_t> happened_;  // events so far
  std::vector<Cursor> cursors_;
  std::vector<std::size_t> ready_;
};

}  // namespace sluice
