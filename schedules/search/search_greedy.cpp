#include <algorithm>
#include <array>

#include "schedules/model/index.hpp"
#include "schedules/search/search_orders.hpp"

namespace sluice::search {
namespace {

class Greedy {
 public:
  Greedy(const Problem& problem, const GreedySettings& settings)
      : problem_(problem), settings_(settings), stages_(problem.stages()) {
    lines_.resize(at(stages_));
    for (Line& line : lines_) {
      line.forward_end.reserve(at(problem.micro_batches));
      line.input_end.reserve(at(problem.micro_batches));
    }
  }

  Order run() {
    fill_ahead();
    for (int i = 1; i < problem_.micro_batches; ++i) {
      const std::vector<bool> forwards = who_forwards();
      for (int stage = 0; stage < stages_; ++stage) {
        if (!forwards[at(stage)] || !has_room(stage)) continue;
        use_gap(stage, forward_arrival(stage));
        put(stage, Part::kForward);
      }
      for (int stage = stages_; stage-- > 0;) {
        Line& line = lines_[at(stage)];
        if (stage == 0 && done(line, Part::kForward) == problem_.micro_batches) {
          put_weights(stage, done(line, Part::kInput));
        }
        use_gap(stage, input_arrival(stage));
        put(stage, Part::kInput);
      }
    }
    Order order;
    for (int stage = 0; stage < stages_; ++stage) {
      put_weights(stage, problem_.micro_batches);
      order.push_back(std::move(lines_[at(stage)].list));
    }
    return order;
  }

 private:
  struct Line {
    std::array<int, 3> count{};  // [part]
    double end = 0;              // of its last action
    double idle = 0;             // since its first
    double held = 0;
    std::vector<double> forward_end, input_end;  // [micro_batch]
    std::vector<Op> list;
  };

  static int done(const Line& line, Part part) { return line.count[at(part)]; }
  double time(Part part, int stage) const {
    return problem_.duration[at(problem_.slot(part, stage))];
  }
  double delay(Part part, int stage) const {
    return problem_.delay[at(problem_.slot(part, stage))];
  }
  bool overflows(int stage, double held) const {
    return exceeds(held + problem_.held[at(stage)], problem_.limit[at(stage)]);
  }

  // When the next forward's input, the next I's gradient is there.
  double forward_arrival(int stage) const {
    if (stage == 0) return 0;
    const auto next = at(done(lines_[at(stage)], Part::kForward));
    return lines_[at(stage - 1)].forward_end[next] + delay(Part::kForward, stage);
  }
  double input_arrival(int stage) const {
    if (stage == stages_ - 1) return 0;
    const auto next = at(done(lines_[at(stage)], Part::kInput));
    return lines_[at(stage + 1)].input_end[next] + delay(Part::kInput, stage);
  }

  void put(int stage, Part part) {
    Line& line = lines_[at(stage)];
    double start = line.end;
    if (part == Part::kForward) start = std::max(start, forward_arrival(stage));
    if (part == Part::kInput) start = std::max(start, input_arrival(stage));
    if (!line.list.empty()) line.idle += start - line.end;
    line.end = start + time(part, stage);
    if (part == Part::kForward) line.forward_end.push_back(line.end);
    if (part == Part::kInput) line.input_end.push_back(line.end);
    const std::int32_t slot = problem_.slot(part, stage);
    line.held += problem_.change(slot);
    line.list.push_back({slot, line.count[at(part)]++});
  }

  void put_weights(int stage, int count) {
    while (done(lines_[at(stage)], Part::kWeight) < count) put(stage, Part::kWeight);
  }

  bool has_weight(const Line& line) const {
    return done(line, Part::kWeight) < done(line, Part::kInput);
  }

  // Makes room for one more forward. False where the next stage or memory does not let it.
  bool has_room(int stage) {
    Line& line = lines_[at(stage)];
    const int next = done(line, Part::kForward);
    if (stage > 0 && done(lines_[at(stage - 1)], Part::kForward) <= next) return false;
    while (overflows(stage, line.held) && has_weight(line)) put(stage, Part::kWeight);
    return !overflows(stage, line.held);
  }

  // Whether idling until `arrival` makes the line the one that idles most.
  bool enlarges_idle(const Line& line, double arrival) const {
    double most_idle = 0;
    for (const Line& each : lines_) most_idle = std::max(most_idle, each.idle);
    return exceeds(line.idle + arrival - line.end, most_idle);
  }

  // W's before an action whose input arrives at `arrival`.
  void use_gap(int stage, double arrival) {
    Line& line = lines_[at(stage)];
    const double weight = time(Part::kWeight, stage);
    while (has_weight(line) && !exceeds(line.end + weight, arrival)) put(stage, Part::kWeight);
    if (!has_weight(line) || !exceeds(arrival, line.end)) return;
    if (settings_.fill_small_gaps || enlarges_idle(line, arrival)) put(stage, Part::kWeight);
  }

  // The first micro-batch, and as many forwards ahead of its I as there is time and memory for;
  // fewer than the stage before.
  void fill_ahead() {
    for (int stage = 0; stage < stages_; ++stage) put(stage, Part::kForward);
    std::vector<int> ahead(at(stages_));
    double input_end = 0;
    for (int stage = stages_; stage-- > 0;) {
      const Line& line = lines_[at(stage)];
      const double forward = time(Part::kForward, stage);
      const double arrival =
          stage == stages_ - 1 ? line.end : input_end + delay(Part::kInput, stage);
      double held = line.held;
      double end = line.end;
      int& count = ahead[at(stage)];
      while (stage < stages_ - 1 && 1 + count < problem_.micro_batches && !overflows(stage, held)) {
        const double latest = settings_.delay_first_input ? end : end + forward;
        if (settings_.delay_first_input ? !exceeds(arrival, latest) : exceeds(latest, arrival))
          break;
        held += problem_.held[at(stage)];
        end += forward;
        ++count;
      }
      input_end = std::max(end, arrival) + time(Part::kInput, stage);
    }
    for (int stage = 1; stage < stages_; ++stage) {
      int& count = ahead[at(stage)];
      count = std::min(count, std::max(0, ahead[at(stage - 1)] - 1));
    }
    for (int stage = 0; stage < stages_; ++stage) {
      for (int i = 0; i < ahead[at(stage)]; ++i) put(stage, Part::kForward);
    }
    for (int stage = stages_; stage-- > 0;) put(stage, Part::kInput);
  }

  // Which stages forward once more before their next I; none that a later one keeps from it.
  std::vector<bool> who_forwards() const {
    std::vector<bool> forwards(at(stages_));
    for (int stage = stages_; stage-- > 0;) {
      const Line& line = lines_[at(stage)];
      bool wanted = done(line, Part::kForward) < problem_.micro_batches && !skips(stage);
      if (stage + 1 < stages_ &&
          done(lines_[at(stage + 1)], Part::kForward) < problem_.micro_batches) {
        wanted = wanted && forwards[at(stage + 1)];
      }
      // Whoever has nothing left for its next I has to.
      forwards[at(stage)] = wanted || done(line, Part::kForward) <= done(line, Part::kInput);
    }
    return forwards;
  }

  // A stage that is two micro-batches or more ahead of the next one can delay a forward until the
  // next stage has done one F and one I more. It does so if idling until then does not enlarge the
  // largest idle time.
  bool skips(int stage) const {
    if (!settings_.skip_forwards || stage + 1 >= stages_) return false;
    const Line& line = lines_[at(stage)];
    const Line& next = lines_[at(stage + 1)];
    if (done(line, Part::kForward) < done(next, Part::kForward) + 2) return false;
    const double arrival = next.end + time(Part::kForward, stage + 1) +
                           time(Part::kInput, stage + 1) + delay(Part::kInput, stage);
    double held = line.held;
    double end = line.end + time(Part::kForward, stage);
    for (int w = done(line, Part::kWeight); overflows(stage, held) && w < done(line, Part::kInput);
         ++w) {
      held += problem_.change(problem_.slot(Part::kWeight, stage));
      end += time(Part::kWeight, stage);
    }
    if (!exceeds(arrival, line.end)) return true;
    if (!exceeds(end, arrival)) return false;
    return !enlarges_idle(line, arrival);
  }

  const Problem& problem_;
  const GreedySettings& settings_;
  const int stages_;
  std::vector<Line> lines_;  // [stage]
};

}  // namespace

Order greedy_insertion(const Problem& problem, const GreedySettings& settings) {
  return Greedy(problem, settings).run();
}

}  // namespace sluice::search
