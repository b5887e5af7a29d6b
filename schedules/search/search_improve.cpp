#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "schedules/model/index.hpp"
#include "schedules/search/search_orders.hpp"

namespace sluice::search {
namespace {

constexpr double kPartOfMean = 0.05;
constexpr std::size_t kLongestJump = 12;

// splitmix64: the same numbers on every machine, which the standard's distributions do not promise.
class Random {
 public:
  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31U);
  }
  // [0, count)
  std::size_t below(std::size_t count) { return at(next() % count); }
  // [0, 1)
  double real() { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }

 private:
  std::uint64_t state_ = 20240121;
};

double objective_of(const Clock& clock, const Goal& goal) {
  return goal.objective == Objective::kSpan ? clock.span() : clock.makespan();
}

struct Place {
  std::size_t rank = 0, position = 0;
};

class Annealing {
 public:
  Annealing(const Problem& problem, Order order, const Goal& goal)
      : problem_(problem),
        goal_(goal),
        order_(std::move(order)),
        clocks_{Clock(problem), Clock(problem)} {
    double sum = 0;
    for (const double each : problem.duration) sum += each;
    unit_ = sum / static_cast<double>(problem.duration.size());
  }

  Order run(std::int64_t plays) {
    constexpr double kHeat = 0.05;
    if (!current().play(order_)) return order_;
    Order best = order_;
    double best_value = value_of(current(), goal_);
    double value = best_value;
    double best_objective = objective_of(current(), goal_);
    for (std::int64_t i = 0; i < plays && exceeds(best_objective, goal_.bound); ++i) {
      const double cooled = 1 - static_cast<double>(i) / static_cast<double>(plays);
      if (!try_move()) continue;
      const double moved = value_of(trial(), goal_);
      const double heat = kHeat * unit_ * cooled * cooled;
      if (moved > value && random_.real() >= std::exp((value - moved) / std::max(heat, 1e-12))) {
        undo();
        continue;
      }
      value = moved;
      now_ = 1 - now_;
      const double objective = objective_of(current(), goal_);
      if (objective > best_objective || (objective == best_objective && value >= best_value)) {
        continue;
      }
      best_objective = objective;
      best_value = value;
      best = order_;
    }
    return best;
  }

 private:
  Clock& current() { return clocks_[now_]; }
  Clock& trial() { return clocks_[1 - now_]; }

  Place place_of(Op op) { return {at(problem_.rank_of_slot[at(op.slot)]), current().position(op)}; }

  // A random place on a longest path that ends at the rank the goal looks at.
  Place critical_place() {
    std::size_t last = 0;
    double most = -1;
    for (std::size_t rank = 0; rank < order_.size(); ++rank) {
      double end = current().end_of_rank(rank);
      if (goal_.objective == Objective::kSpan) end -= current().start(order_[rank].front());
      if (exceeds(end, most)) {
        most = end;
        last = rank;
      }
    }
    Place place = {last, order_[last].size() - 1};
    path_.clear();
    while (true) {
      path_.push_back(place);
      const std::vector<Op>& list = order_[place.rank];
      const Op op = list[place.position];
      const double start = current().start(op);
      const std::int32_t need = problem_.need[at(op.slot)];
      const bool behind = place.position > 0 && current().end(list[place.position - 1]) >= start;
      const bool fed =
          need >= 0 && current().end({need, op.micro_batch}) + problem_.delay[at(op.slot)] >= start;
      if (behind && (!fed || random_.below(2) == 0)) {
        --place.position;
      } else if (fed) {
        place = place_of({need, op.micro_batch});
      } else {
        return path_[random_.below(path_.size())];
      }
    }
  }

  // Must `before` stay before `after` in their list?
  bool ordered(Op before, Op after) const {
    if (before.slot == after.slot) return true;
    return before.micro_batch == after.micro_batch && before.slot + problem_.stages() == after.slot;
  }

  // Moves one action and plays the result. False, with nothing changed, where that is not legal.
  bool try_move() {
    const Place from = random_.below(4) == 0 ? random_place() : critical_place();
    std::vector<Op>& list = order_[from.rank];
    const std::size_t jump = 1 + random_.below(1 + random_.below(kLongestJump));
    const bool later = random_.below(2) == 0;
    std::size_t to = from.position;
    for (std::size_t i = 0; i < jump; ++i) {
      if (later) {
        if (to + 1 >= list.size() || ordered(list[from.position], list[to + 1])) break;
        ++to;
      } else {
        if (to == 0 || ordered(list[to - 1], list[from.position])) break;
        --to;
      }
    }
    if (to == from.position) return false;
    moved_ = {from.rank, from.position, to};
    shift(from.position, to);
    if (!exceeds(peak_memory(problem_, list), problem_.limit[from.rank]) && trial().play(order_)) {
      return true;
    }
    undo();
    return false;
  }

  Place random_place() {
    const std::size_t rank = random_.below(order_.size());
    return {rank, random_.below(order_[rank].size())};
  }

  void shift(std::size_t from, std::size_t to) {
    const auto begin = order_[moved_.rank].begin();
    const auto place = [&](std::size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
    if (from < to) {
      std::rotate(place(from), place(from + 1), place(to + 1));
    } else {
      std::rotate(place(to), place(from), place(from + 1));
    }
  }
  void undo() { shift(moved_.to, moved_.from); }

  struct Move {
    std::size_t rank = 0, from = 0, to = 0;
  };

  const Problem& problem_;
  const Goal& goal_;
  Order order_;
  std::array<Clock, 2> clocks_;  // of the order as it is, and of the move on trial
  std::size_t now_ = 0;
  double unit_ = 1;
  Random random_;
  Move moved_;
  std::vector<Place> path_;
};

}  // namespace

double value_of(const Clock& clock, const Goal& goal) {
  return goal.objective == Objective::kSpan ? clock.span() + kPartOfMean * clock.mean_span()
                                            : clock.makespan() + kPartOfMean * clock.mean_end();
}

Order improved(const Problem& problem, Order order, const Goal& goal, std::int64_t plays) {
  return Annealing(problem, std::move(order), goal).run(plays);
}

}  // namespace sluice::search
