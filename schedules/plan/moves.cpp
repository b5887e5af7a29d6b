#include "schedules/plan/moves.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"

namespace sluice {
namespace {

constexpr std::ptrdiff_t kNever = -1;

// A micro-batch of a stage, by the places of its actions among all of the rank.
struct Life {
  std::ptrdiff_t forward = kNever, backward = kNever, end = kNever;  // F; B or I; B or W
  bool moves = false;

  // One whose state has left when its way back begins, or during the same action.
  [[nodiscard]] bool can_move() const { return backward - forward >= 3; }
};

// Walks the rank's actions with the states of one stage. A state takes a slot from F to the end of
// B or W. One that moves leaves it during the action after F, and takes one again during the action
// before B or I; a state that leaves and one that comes back during one action share a slot.
class StageWalk {
 public:
  explicit StageWalk(int bound) : bound_(bound) {}

  // `here`, `next`: the stage's micro-batch of this action and of the one after it; null where that
  // is another stage's.
  void visit(std::ptrdiff_t place, Life* here, const Life* next) {
    held_ += std::exchange(arrives_, 0) - std::exchange(ends_, 0);
    leaves_ = 0;
    if (left_ != nullptr && left_->can_move() && !left_->moves) {
      waiting_.emplace(left_->backward, left_);
    }
    left_ = std::exchange(made_, nullptr);
    if (here != nullptr && here->forward == place) {
      made_ = here;
      ++held_;
    }
    if (here != nullptr && here->end == place) ends_ = 1;
    if (next != nullptr && next->backward == place + 1 && next->moves) arrives_ = 1;
    while (!waiting_.empty() && waiting_.begin()->first < place + 2) {
      waiting_.erase(waiting_.begin());
    }
    while (slots() > bound_ && move_one()) continue;
    most_ = std::max(most_, slots());
  }
  // That the actions so far need.
  [[nodiscard]] int most_slots() const { return most_; }

 private:
  [[nodiscard]] int slots() const { return held_ + std::max(leaves_, arrives_); }

  // Of those that wait, the one whose backward is last; else the one that leaves where another
  // comes. False: there is none.
  bool move_one() {
    if (!waiting_.empty()) {
      const auto last = std::prev(waiting_.end());
      last->second->moves = true;
      waiting_.erase(last);
    } else if (arrives_ > leaves_ && left_ != nullptr && left_->can_move()) {
      left_->moves = true;
      leaves_ = 1;
    } else {
      return false;
    }
    --held_;
    return true;
  }

  const int bound_;
  int most_ = 0;
  // States that take a slot all the time; that leave and come back during this action; that end
  // with it.
  int held_ = 0, leaves_ = 0, arrives_ = 0, ends_ = 0;
  Life *made_ = nullptr, *left_ = nullptr;   // by this action; by the one before
  std::map<std::ptrdiff_t, Life*> waiting_;  // by the place of their backward; none moves yet
};

struct PlacedAction {
  Action action;
  std::size_t step = 0;
};

}  // namespace

std::vector<int> half_resident(const Schedule& schedule) {
  std::vector<int> resident = most_in_flight(schedule);
  for (int& each : resident) each = each > 2 ? (each + 1) / 2 : 0;
  return resident;
}

RankMoves choose_moves(const std::vector<Step>& steps, const std::vector<int>& own,
                       const std::vector<int>& resident) {
  std::vector<PlacedAction> actions;
  std::map<std::pair<int, int>, Life> lives;  // by stage and micro-batch
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto place = [&](const Action& action) {
      if (!is_compute(action.kind)) return;
      Life& life = lives[{action.stage, action.micro_batch}];
      const auto here = static_cast<std::ptrdiff_t>(actions.size());
      if (action.kind == ActionKind::kForward) life.forward = here;
      if (makes_gradient(action.kind)) life.backward = here;
      if (ends_backward(action.kind)) life.end = here;
      actions.push_back({action, i});
    };
    place(steps[i].action);
    if (steps[i].overlapped) place(*steps[i].overlapped);
  }
  for (const int stage : own) {
    if (resident[at(stage)] < 2) continue;
    const auto life_at = [&](std::size_t place) -> Life* {
      if (place == actions.size() || actions[place].action.stage != stage) return nullptr;
      return &lives.at({stage, actions[place].action.micro_batch});
    };
    // Once more with what it comes to where the bound cannot be reached: then fewer move.
    for (int bound = resident[at(stage)];;) {
      StageWalk walk(bound);
      for (std::size_t i = 0; i < actions.size(); ++i) {
        if (Life* const life = life_at(i); life != nullptr) life->moves = false;
      }
      for (std::size_t i = 0; i < actions.size(); ++i) {
        walk.visit(static_cast<std::ptrdiff_t>(i), life_at(i), life_at(i + 1));
      }
      if (walk.most_slots() <= bound) break;
      bound = walk.most_slots();
    }
  }
  RankMoves moves;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const auto& [action, step] = actions[i];
    const Life& life = lives.at({action.stage, action.micro_batch});
    if (!life.moves) continue;
    const auto here = static_cast<std::ptrdiff_t>(i);
    const auto move = [&](ActionKind kind) {
      return make_action(kind, action.stage, action.micro_batch);
    };
    if (here == life.forward) moves.offloads.push_back({step, move(ActionKind::kOffload)});
    if (here != life.backward) continue;
    moves.fetches.push_back({actions[i - 1].step, move(ActionKind::kFetch)});
  }
  return moves;
}

}  // namespace sluice
