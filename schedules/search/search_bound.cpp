// Lower bounds of what a problem's orders take, memory counted.
//
// One stage alone: the k-th forward waits for its input, for the forward before it, and where
// memory is full for the end of an earlier micro-batch. All stages together give a recursion over
// micro-batches, in which each entry is the k-th smallest time of any order, not that of a certain
// micro-batch: if y_j >= x_j + c for all j, then the k-th smallest y is at least the k-th smallest
// x plus c. A rank runs one action at a time, so that what it must have done before also counts.
// Ranks with several stages share their memory: the chunks held, times how long each is held at
// least, fit into the limit times the time the rank has.
//
// Not counted: messages that queue on a link.
#include <algorithm>
#include <limits>
#include <vector>

#include "schedules/model/index.hpp"
#include "schedules/search/search_problem.hpp"

namespace sluice::search {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// How many micro-batches fit, at least one; -1: any number.
int slots_of(double limit, double held, int micro_batches) {
  if (!(held > 0) || limit == kUnlimited) return -1;
  const double count = (limit + kTolerance * limit) / held;
  return count >= micro_batches ? -1 : std::max(static_cast<int>(count), 1);
}

// One stage: its costs, and what the recursion knows of it.
struct Line {
  double forward = 0, input = 0, weight = 0;
  double forward_delay = 0, input_delay = 0;  // of what it waits for
  double reduce = 0;
  int slots = -1;        // micro-batches between F and W; -1: any number
  int slots_whole = -1;  // between F and I, which hold more
  double head = 0;       // before its first forward can start
  double tail = 0;       // after the end of an I
  // [micro-batch] the k-th smallest of any order.
  std::vector<double> forward_start, input_start, end;

  [[nodiscard]] double work() const { return forward + input + weight; }
};

std::vector<Line> lines_of(const Problem& problem) {
  std::vector<Line> lines(at(problem.stages()));
  for (int stage = 0; stage < problem.stages(); ++stage) {
    const auto slot = [&](Part part) { return at(problem.slot(part, stage)); };
    const auto s = at(stage);
    const int rank = problem.placement.rank_of(stage);
    Line& line = lines[s];
    line.forward = problem.duration[slot(Part::kForward)];
    line.input = problem.duration[slot(Part::kInput)];
    line.weight = problem.duration[slot(Part::kWeight)];
    line.forward_delay = problem.delay[slot(Part::kForward)];
    line.input_delay = problem.delay[slot(Part::kInput)];
    line.reduce = problem.reduce[at(rank)];
    const double limit = problem.limit[at(rank)];
    const double after_input = problem.split ? problem.held[s] - problem.released_by_input[s] : 0;
    line.slots_whole = slots_of(limit, problem.held[s], problem.micro_batches);
    line.slots = slots_of(limit, after_input, problem.micro_batches);
    if (s > 0) line.head = lines[s - 1].head + lines[s - 1].forward + line.forward_delay;
  }
  for (std::size_t s = 0; s < lines.size(); ++s) {
    lines[s].tail = lines[s].weight + lines[s].reduce;
    if (s == 0) continue;
    const Line& before = lines[s - 1];
    lines[s].tail = std::max(lines[s].tail, before.input_delay + before.input + before.tail);
  }
  return lines;
}

// Of earlier micro-batches, `slots` before the k-th; 0: none had to end.
double freed(const std::vector<double>& ends, int k, int slots) {
  return slots < 0 || k < slots ? 0 : ends[at(k - slots)];
}

// The k-th micro-batch of every stage, and then what must follow it.
class Recursion {
 public:
  Recursion(const Problem& problem, std::vector<Line> lines)
      : problem_(problem), lines_(std::move(lines)) {
    for (Line& line : lines_) {
      line.forward_start.resize(at(problem.micro_batches));
      line.input_start.resize(at(problem.micro_batches));
      line.end.resize(at(problem.micro_batches));
    }
  }

  double run() {
    for (int k = 0; k < problem_.micro_batches; ++k) {
      for (std::size_t s = 0; s < lines_.size(); ++s) forward(s, k);
      for (std::size_t s = lines_.size(); s-- > 0;) input(s, k);
    }
    double bound = 0;
    for (const Line& line : lines_) {
      for (int k = 0; k < problem_.micro_batches; ++k) {
        const double left = problem_.micro_batches - k;
        bound = std::max({bound, line.forward_start[at(k)] + left * line.work() + line.reduce,
                          line.input_start[at(k)] + left * (line.input + line.weight) + line.reduce,
                          line.input_start[at(k)] + left * line.input + line.tail,
                          line.end[at(k)] + (left - 1) * line.weight + line.reduce});
      }
    }
    return bound;
  }

 private:
  // Micro-batches that have left their slots when the k-th forward starts.
  static int ended_before(int slots, int k) { return slots < 0 ? 0 : std::max(k - slots + 1, 0); }

  void forward(std::size_t s, int k) {
    Line& line = lines_[s];
    const int inputs = ended_before(line.slots_whole, k), weights = ended_before(line.slots, k);
    const double before =
        k * line.forward + std::max(inputs, weights) * line.input + weights * line.weight;
    double start = line.head + before;
    if (k > 0) start = std::max(start, line.forward_start[at(k - 1)] + line.forward);
    if (s > 0) {
      const Line& previous = lines_[s - 1];
      start =
          std::max(start, previous.forward_start[at(k)] + previous.forward + line.forward_delay);
    }
    start = std::max(start, freed(line.end, k, line.slots));
    if (const int slots = line.slots_whole; slots >= 0 && k >= slots) {
      start = std::max(start, line.input_start[at(k - slots)] + line.input);
    }
    line.forward_start[at(k)] = start;
  }

  void input(std::size_t s, int k) {
    Line& line = lines_[s];
    const double before =
        (k + 1) * line.forward + k * line.input + ended_before(line.slots, k) * line.weight;
    double start = std::max(line.head + before, line.forward_start[at(k)] + line.forward);
    if (k > 0) start = std::max(start, line.input_start[at(k - 1)] + line.input);
    if (s + 1 < lines_.size()) {
      const Line& next = lines_[s + 1];
      start = std::max(start, next.input_start[at(k)] + next.input + line.input_delay);
    }
    line.input_start[at(k)] = start;
    double end = start + line.input + line.weight;
    if (k > 0) end = std::max(end, line.end[at(k - 1)] + line.weight);
    line.end[at(k)] = std::max(end, line.head + (k + 1) * line.work());
  }

  const Problem& problem_;
  std::vector<Line> lines_;
};

// The busiest rank, in which what comes before its first action and after its last counts.
double busiest_rank(const Problem& problem, const std::vector<Line>& lines) {
  double bound = 0;
  for (int rank = 0; rank < problem.ranks(); ++rank) {
    double before = kUnlimited, after = kUnlimited, passes = 0, weights = 0;
    for (const int stage : problem.placement.stages_of(rank)) {
      const Line& line = lines[at(stage)];
      before = std::min(before, line.head);
      after = std::min(after, line.tail);
      passes += line.forward + line.input;
      weights += line.weight;
    }
    const double m = problem.micro_batches;
    bound = std::max(bound,
                     before + m * passes + std::max(after, m * weights + problem.reduce[at(rank)]));
  }
  return bound;
}

// What each rank's memory is held for at least, in time: the sum over micro-batches and stages of
// what is held times how long, divided by the limit.
double fullest_rank(const Problem& problem, const std::vector<Line>& lines, bool own_span) {
  // [stage] from the start of its F to the start of its I.
  std::vector<double> away(lines.size());
  for (std::size_t s = lines.size(); s-- > 0;) {
    away[s] = lines[s].forward;
    if (s + 1 == lines.size()) continue;
    away[s] += lines[s + 1].forward_delay + away[s + 1] + lines[s + 1].input + lines[s].input_delay;
  }
  double bound = 0;
  for (int rank = 0; rank < problem.ranks(); ++rank) {
    const double limit = problem.limit[at(rank)];
    if (limit == kUnlimited || !(limit > 0)) continue;
    double before = kUnlimited, area = 0;
    for (const int stage : problem.placement.stages_of(rank)) {
      const auto s = at(stage);
      const double after_input = problem.split ? problem.held[s] - problem.released_by_input[s] : 0;
      before = std::min(before, lines[s].head);
      area += problem.held[s] * (away[s] + lines[s].input) + after_input * lines[s].weight;
    }
    const double time = problem.micro_batches * area / (limit * (1 + kTolerance));
    bound = std::max(bound, (own_span ? 0 : before) + time + problem.reduce[at(rank)]);
  }
  return bound;
}

}  // namespace

double makespan_bound(const Problem& problem) {
  const std::vector<Line> lines = lines_of(problem);
  return std::max({busiest_rank(problem, lines), fullest_rank(problem, lines, false),
                   Recursion(problem, lines).run()});
}

double span_bound(const Problem& problem) {
  const std::vector<Line> lines = lines_of(problem);
  double bound = fullest_rank(problem, lines, true);
  for (int rank = 0; rank < problem.ranks(); ++rank) {
    double busy = 0;
    for (const int stage : problem.placement.stages_of(rank)) busy += lines[at(stage)].work();
    bound = std::max(bound, busy * problem.micro_batches + problem.reduce[at(rank)]);
  }
  return bound;
}

}  // namespace sluice::search
