#include <algorithm>
#include <array>
#include <deque>
#include <stdexcept>
#include <tuple>

#include "schedules/model/index.hpp"
#include "schedules/search/search_orders.hpp"

namespace sluice::search {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class ListScheduler {
 public:
  ListScheduler(const Problem& problem, const ListRule& rule)
      : problem_(problem),
        rule_(rule),
        next_(problem.duration.size()),
        end_(problem.ops(), -1.0),
        lines_(at(problem.ranks())) {}

  Order run() {
    for (std::size_t left = count_ops(); left > 0;) {
      const auto line =
          std::min_element(lines_.begin(), lines_.end(),
                           [](const Line& a, const Line& b) { return a.decision < b.decision; });
      if (line->decision == kNever) throw std::logic_error("list scheduler: no rank can go on");
      const auto rank = static_cast<int>(line - lines_.begin());
      const std::optional<std::int32_t> slot = choose(rank);
      if (!slot) {
        line->decision = idle_until(rank);
        continue;
      }
      put(rank, *slot);
      --left;
    }
    Order order;
    for (Line& line : lines_) order.push_back(std::move(line.list));
    return order;
  }

 private:
  struct Line {
    double free = 0;
    double decision = 0;  // when to look at the rank again
    double held = 0;
    bool forward_last = false;
    std::deque<Op> weights;  // whose I is done, oldest first
    std::vector<Op> list;
  };

  std::size_t count_ops() const { return problem_.split ? problem_.ops() : problem_.ops() / 3 * 2; }
  std::int32_t& next(std::int32_t slot) { return next_[at(slot)]; }
  std::int32_t next(std::int32_t slot) const { return next_[at(slot)]; }
  double duration(std::int32_t slot) const { return problem_.duration[at(slot)]; }

  // When the slot's next op could start as far as its input goes; kNever: not known.
  double arrival(std::int32_t slot) const {
    const std::int32_t k = next(slot);
    if (k >= problem_.micro_batches) return kNever;
    if (problem_.part(slot) == Part::kInput && k >= next(slot - problem_.stages())) return kNever;
    const std::int32_t need = problem_.need[at(slot)];
    if (need < 0) return 0;
    const double end = end_[problem_.index({need, k})];
    return end < 0 ? kNever : end + problem_.delay[at(slot)];
  }

  // Whether the micro-batches under way could all still finish after one more forward of `stage`:
  // lowest first, each with what it and the later ones hold and what it has yet to take.
  bool has_room(int rank, int stage) const {
    const double limit = problem_.limit[at(rank)];
    const double more = problem_.held[at(stage)];
    if (exceeds(lines_[at(rank)].held + more, limit)) return false;
    const std::vector<int>& stages = problem_.placement.stages_of(rank);
    if (stages.size() == 1) return true;
    const std::int32_t from = next(problem_.slot(Part::kForward, stage));
    double held_from = more;
    for (std::int32_t k = next(problem_.slot(Part::kForward, stages.front())); k >= 0; --k) {
      double missing = 0;
      bool complete = true;
      for (const int each : stages) {
        const double part = problem_.held[at(each)];
        const bool forwarded =
            k < next(problem_.slot(Part::kForward, each)) || (each == stage && k == from);
        if (!forwarded) {
          missing += part;
          complete = false;
        } else if (!(each == stage && k == from)) {
          held_from += still_held(each, k);
        }
      }
      if (complete) return true;  // so are all before it
      if (k <= from && exceeds(held_from + missing, limit)) return false;
    }
    return true;
  }

  double still_held(int stage, std::int32_t k) const {
    const auto s = at(stage);
    if (k >= next(problem_.slot(Part::kInput, stage))) return problem_.held[s];
    const bool weight_done = !problem_.split || k < next(problem_.slot(Part::kWeight, stage));
    return weight_done ? 0 : problem_.held[s] - problem_.released_by_input[s];
  }

  // Whether one more micro-batch may start its way.
  bool may_enter(int stage) const {
    return stage != 0 ||
           next(problem_.slot(Part::kForward, 0)) - next(problem_.slot(Part::kInput, 0)) <
               rule_.most_open;
  }

  // Of two ops of one part: whose turn it is.
  bool goes_before(std::int32_t a, std::int32_t b) const {
    if (rule_.latest_stage) return a > b;
    return std::tuple(next(a), -a) < std::tuple(next(b), -b);
  }

  struct Choice {
    std::int32_t slot = -1;
    double coming = kNever;    // the earliest arrival after now
    bool memory_full = false;  // a forward is there but for the memory
  };

  // The best op of one part that can start now.
  Choice best_of(int rank, Part part, double now) const {
    Choice choice;
    for (const int stage : problem_.placement.stages_of(rank)) {
      const std::int32_t slot = problem_.slot(part, stage);
      const double arrives = arrival(slot);
      if (arrives == kNever) continue;
      const bool here = !exceeds(arrives, now);
      if (part == Part::kForward) {
        if (!may_enter(stage)) continue;
        if (!has_room(rank, stage)) {
          choice.memory_full = choice.memory_full || here;
          continue;
        }
      }
      if (!here) {
        choice.coming = std::min(choice.coming, arrives);
      } else if (choice.slot < 0 || goes_before(slot, choice.slot)) {
        choice.slot = slot;
      }
    }
    return choice;
  }

  std::optional<std::int32_t> choose(int rank) const {
    const Line& line = lines_[at(rank)];
    const double now = std::max(line.free, line.decision);
    const Choice forward = best_of(rank, Part::kForward, now);
    const Choice input = best_of(rank, Part::kInput, now);
    const bool forward_first = rule_.alternate && !line.forward_last;
    if (forward.slot >= 0 && (forward_first || input.slot < 0)) return forward.slot;
    if (input.slot >= 0) return input.slot;
    if (line.weights.empty()) return std::nullopt;
    const std::int32_t weight = line.weights.front().slot;
    const double coming = std::min(forward.coming, input.coming);
    const double late = now + duration(weight) * (1 - rule_.patience);
    if (forward.memory_full || !exceeds(late, coming)) return weight;
    return std::nullopt;
  }

  // When something that cannot start now could. Never: until a neighbour brings it.
  double idle_until(int rank) const {
    const Line& line = lines_[at(rank)];
    const double now = std::max(line.free, line.decision);
    return std::min(best_of(rank, Part::kForward, now).coming,
                    best_of(rank, Part::kInput, now).coming);
  }

  void put(int rank, std::int32_t slot) {
    Line& line = lines_[at(rank)];
    const Op op = {slot, next(slot)++};
    const Part part = problem_.part(slot);
    line.free = std::max(line.free, line.decision) + duration(slot);
    line.decision = line.free;
    line.held += problem_.change(slot);
    line.list.push_back(op);
    end_[problem_.index(op)] = line.free;
    if (part == Part::kForward) {
      line.forward_last = true;
    } else if (part == Part::kInput) {
      line.forward_last = false;
      if (problem_.split) line.weights.push_back({slot + problem_.stages(), op.micro_batch});
    } else {
      line.weights.pop_front();
    }
    if (const std::int32_t fed = problem_.feeds[at(slot)]; fed >= 0) {
      const int other = problem_.placement.rank_of(problem_.stage(fed));
      Line& waiting = lines_[at(other)];
      const double arrives = line.free + problem_.delay[at(fed)];
      waiting.decision = std::min(waiting.decision, std::max(waiting.free, arrives));
    }
  }

  const Problem& problem_;
  const ListRule& rule_;
  std::vector<std::int32_t> next_;  // [slot] next micro-batch
  std::vector<double> end_;         // [index], negative: not yet
  std::vector<Line> lines_;         // [rank]
};

}  // namespace

Order list_order(const Problem& problem, const ListRule& rule) {
  return ListScheduler(problem, rule).run();
}

}  // namespace sluice::search
