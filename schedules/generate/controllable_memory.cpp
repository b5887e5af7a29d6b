// V-Half and V-Min (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024,
// arXiv:2405.15362): V placement and split backward in a pattern that repeats every six slots. The
// distance between the ranks' offsets sets the memory: floor((p + 2) / 2) micro-batches for V-Half,
// floor((p + 4) / 3) for V-Min, twice that in chunks, against p of 1F1B and zb-v. With
// F = I = W the step is 6m long and idle slots: 3p - 7 (even p >= 4), 3p - 4 (odd p >= 5), 5 (p =
// 3) for V-Half from m = p + 2 on; 4p - 5, or 4p - 7 where 3 divides p, for V-Min (p >= 3).
//
// Three steps: the pattern, W in its holes; a warm-up whose actions move to earlier holes where the
// memory allows; and, from the last forward's entry on, all that is ready in the order of the
// pattern, W where nothing else is ready.
// clang-format off
// v-half, p = 3, m = 3:
//
//   rank 0 | 0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1     0I0 0W0     5F2 5I2 5W2 0I1 0W1         0I2 0W2
//   rank 1 |     1F0 1F1     4F0     4F1 4I0 4W0 1F2     1I0 4I1 1W0 4F2 4W1     1I1 4I2 1W1 4W2 1I2 1W2
//   rank 2 |         2F0 3F0 2F1 3F1         3I0 3W0 2I0 2W0 2F2 3F2 3I1 3W1 2I1 2W1     3I2 2I2 3W2 2W2
//
// v-min, p = 3, m = 3:
//
//   rank 0 | 0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0         5F2 5I2 0I1 0W1 5W2     0I2 0W2
//   rank 1 |     1F0 1F1     4F0     4F1 4I0 4W0     1I0 1F2 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
//   rank 2 |         2F0 3F0 2F1 3F1         3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
// clang-format on
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedules/generate/generators.hpp"
#include "schedules/model/index.hpp"

namespace sluice::generators {
namespace {

constexpr int kPeriod = 6;

// In the order a micro-batch passes a rank. The weight halves share one kind in the pattern.
enum Kind : std::uint8_t { kF0, kF1, kI1, kI0, kW0, kW1 };
constexpr std::size_t kChained = 4;  // F0, F1, I1, I0: tied to a neighbouring rank

struct Op {
  std::uint8_t kind = 0;
  std::int32_t micro_batch = -1;
  [[nodiscard]] bool empty() const { return micro_batch < 0; }
};

// Slot of micro-batch 0's chained ops on each rank; micro-batch j is j periods later.
using Offsets = std::vector<std::array<int, kChained>>;

// Where a chained op's input comes from: the same kind on a neighbour, or the kind before on this
// rank where the way turns. False for what needs nothing.
bool source_of(std::size_t kind, int rank, int ranks, std::size_t& from_kind, int& from_rank) {
  const int neighbour = kind == kF0 || kind == kI1 ? rank - 1 : rank + 1;
  if (neighbour >= 0 && neighbour < ranks) {
    from_kind = kind;
    from_rank = neighbour;
    return true;
  }
  from_kind = kind - 1;
  from_rank = rank;
  return kind != kF0;
}

class Pattern {
 public:
  Pattern(const Offsets& offsets, int micro_batches)
      : offsets_(offsets), ranks_(static_cast<int>(offsets.size())), m_(micro_batches) {}

  // Per rank the ops in the order they shall run, W included.
  std::vector<std::vector<Op>> orders() {
    fill_slots();
    const int warm = std::min(offsets_[0][kI0], width_);
    pull_ahead(warm);
    std::vector<std::vector<Op>> lists(slots_.size());
    for (std::size_t rank = 0; rank < slots_.size(); ++rank) {
      for (const Op& op : slots_[rank]) {
        if (!op.empty()) lists[rank].push_back(op);
      }
    }
    return lists;
  }
  // Most chunks a rank holds.
  [[nodiscard]] int capacity() const { return capacity_; }

 private:
  // The op that the pattern has in a slot, W aside.
  [[nodiscard]] Op chained_at(std::size_t rank, int slot) const {
    for (std::size_t kind = 0; kind < kChained; ++kind) {
      const int since = slot - offsets_[rank][kind];
      if (since >= 0 && since % kPeriod == 0 && since / kPeriod < m_) {
        return Op{static_cast<std::uint8_t>(kind), since / kPeriod};
      }
    }
    return {};
  }

  // Every rank's slots, W in the holes in the order of I, and how much each slot holds.
  void fill_slots() {
    slots_.resize(offsets_.size());
    held_.resize(offsets_.size());
    std::vector<Op> open;
    for (std::size_t rank = 0; rank < slots_.size(); ++rank) {
      open.clear();
      std::size_t closed = 0;
      int held = 0;
      const std::size_t total = at(m_) * kPeriod;
      slots_[rank].reserve(total);
      for (std::size_t placed = 0; placed < total;) {
        Op op = chained_at(rank, static_cast<int>(slots_[rank].size()));
        if (op.empty() && closed < open.size()) op = open[closed++];
        if (op.kind == kI0 && !op.empty()) open.push_back(Op{kW0, op.micro_batch});
        if (op.kind == kI1) open.push_back(Op{kW1, op.micro_batch});
        held += !op.empty() && op.kind <= kF1 ? 1 : 0;
        capacity_ = std::max(capacity_, held);
        held_[rank].push_back(held);
        held -= op.kind >= kW0 ? 1 : 0;
        slots_[rank].push_back(op);
        placed += op.empty() ? 0U : 1U;
      }
      width_ = std::max(width_, static_cast<int>(slots_[rank].size()));
    }
  }

  // Moves the ops before slot `warm`, in order, to the earliest hole after their input and after
  // their predecessor of the same kind. No slot may come to hold more than the capacity.
  void pull_ahead(int warm) {
    const std::size_t micro_batches = at(std::min(m_, warm / kPeriod + 1));
    std::array<std::vector<int>, kChained> end;  // [kind][rank * micro_batches + micro_batch]
    for (auto& each : end) each.assign(slots_.size() * micro_batches, 0);
    std::vector<std::array<int, kChained + 1>> last(slots_.size());
    const auto cell = [&](int rank, int micro_batch) {
      return at(rank) * micro_batches + at(micro_batch);
    };
    for (int slot = 0; slot < warm; ++slot) {
      for (int rank = 0; rank < ranks_; ++rank) {
        auto& row = slots_[at(rank)];
        if (slot >= static_cast<int>(row.size())) continue;
        const Op op = row[at(slot)];
        if (op.empty()) continue;
        const std::size_t kind = std::min<std::size_t>(op.kind, kW0);
        int& before = last[at(rank)][kind];
        int earliest = before;
        std::size_t from_kind = op.kind == kW1 ? kI1 : kI0;
        int from_rank = rank;
        if (op.kind >= kW0 || source_of(kind, rank, ranks_, from_kind, from_rank)) {
          earliest = std::max(earliest, end[from_kind][cell(from_rank, op.micro_batch)]);
        }
        const int to = move(at(rank), slot, earliest);
        before = to + 1;
        if (op.kind < kChained) end[kind][cell(rank, op.micro_batch)] = to + 1;
      }
    }
  }

  // Moves the op of a slot to the first hole from `earliest` on that the memory allows.
  int move(std::size_t rank, int slot, int earliest) {
    auto& row = slots_[rank];
    auto& held = held_[rank];
    const Op op = row[at(slot)];
    int to = op.kind <= kF1 ? slot : earliest;
    while (to > earliest && held[at(to - 1)] < capacity_) --to;
    while (to < slot && !row[at(to)].empty()) ++to;
    row[at(slot)] = {};
    row[at(to)] = op;
    if (op.kind <= kF1) {
      for (int i = to; i < slot; ++i) ++held[at(i)];
    } else if (op.kind >= kW0) {
      for (int i = to + 1; i <= slot; ++i) --held[at(i)];
    }
    return to;
  }

  const Offsets& offsets_;
  const int ranks_;
  const int m_;
  std::vector<std::vector<Op>> slots_;  // [rank][slot]
  std::vector<std::vector<int>> held_;  // [rank][slot] chunks
  int capacity_ = 0;
  int width_ = 0;
};

// Runs the orders slot by slot. A rank follows its list up to the pattern's slot of rank 0's last
// forward. From there on it considers its next forward and its next I of each chunk, and takes the
// first in list order that is ready and that the memory allows, otherwise the oldest W. Forwards
// keep their order and no list holds more than the capacity, so the first unfinished op of all can
// always run.
class Runner {
 public:
  Runner(const Offsets& offsets, const std::vector<std::vector<Op>>& lists, int capacity,
         int micro_batches, Schedule& schedule)
      : lists_(lists),
        capacity_(capacity),
        schedule_(schedule),
        ranks_(static_cast<int>(lists.size())),
        states_(lists.size()) {
    const int last_entry = kPeriod * (micro_batches - 1);
    for (std::size_t rank = 0; rank < lists.size(); ++rank) {
      State& state = states_[rank];
      for (std::size_t i = 0; i < lists[rank].size(); ++i) {
        const Op& op = lists[rank][i];
        if (op.kind >= kChained) continue;
        const int slot = offsets[rank][op.kind] + kPeriod * op.micro_batch;
        if (slot <= last_entry) state.fixed = i + 1;
      }
      state.next.fill(state.fixed);
    }
  }

  void run() {
    std::size_t left = 0;
    for (const auto& list : lists_) left += list.size();
    std::vector<Op> chosen(lists_.size());
    while (left > 0) {
      for (int rank = 0; rank < ranks_; ++rank) chosen[at(rank)] = choose(rank);
      for (int rank = 0; rank < ranks_; ++rank) {
        const Op& op = chosen[at(rank)];
        if (op.empty()) continue;
        finish(rank, op);
        --left;
      }
    }
  }

 private:
  struct State {
    std::array<std::int32_t, 6> done{};  // by kind
    std::size_t position = 0;            // in the list, while it is followed
    std::size_t fixed = 0;               // where that ends
    std::array<std::size_t, 3> next{};   // after it: the next forward, I1, I0
    int held = 0;
  };

  [[nodiscard]] bool ready(int rank, const Op& op) const {
    if (op.kind >= kChained) return true;
    std::size_t kind = 0;
    int from = 0;
    if (!source_of(op.kind, rank, ranks_, kind, from)) return true;
    return states_[at(from)].done[kind] > op.micro_batch;
  }

  // Which of State::next the kind belongs to; W to none.
  static std::size_t lane_of(std::uint8_t kind) {
    return kind <= kF1 ? 0 : kind == kI1 ? 1 : kind == kI0 ? 2 : 3;
  }

  Op choose(int rank) {
    const auto& list = lists_[at(rank)];
    State& state = states_[at(rank)];
    if (state.position < state.fixed) {
      const Op& op = list[state.position];
      if (!ready(rank, op)) return {};
      ++state.position;
      return op;
    }
    std::size_t* best = nullptr;
    for (std::size_t lane = 0; lane < state.next.size(); ++lane) {
      std::size_t& i = state.next[lane];
      while (i < list.size() && lane_of(list[i].kind) != lane) ++i;
      if (i == list.size() || (best != nullptr && *best < i)) continue;
      if (lane == 0 && state.held >= capacity_) continue;
      if (ready(rank, list[i])) best = &i;
    }
    return best != nullptr ? list[(*best)++] : oldest_weight(state);
  }

  static Op oldest_weight(const State& state) {
    const bool one = state.done[kI1] > state.done[kW1];
    const bool zero = state.done[kI0] > state.done[kW0];
    if (one && (!zero || state.done[kW1] <= state.done[kW0])) return Op{kW1, state.done[kW1]};
    return zero ? Op{kW0, state.done[kW0]} : Op{};
  }

  void finish(int rank, const Op& op) {
    State& state = states_[at(rank)];
    ++state.done[op.kind];
    state.held += op.kind <= kF1 ? 1 : op.kind >= kW0 ? -1 : 0;
    if (op.micro_batch >= schedule_.micro_batches) return;
    constexpr std::array kKinds = {ActionKind::kForward, ActionKind::kBackwardInput,
                                   ActionKind::kBackwardWeight};
    const bool back = op.kind == kF1 || op.kind == kI1 || op.kind == kW1;
    append(schedule_, kKinds[op.kind / 2U], back ? 2 * ranks_ - 1 - rank : rank, op.micro_batch);
  }

  const std::vector<std::vector<Op>>& lists_;
  const int capacity_;
  Schedule& schedule_;
  const int ranks_;
  std::vector<State> states_;
};

// Between what the memory holds at once and `steady_from` micro-batches the steps get in each
// other's way: such schedules are those for `steady_from`, the micro-batches beyond left out.
Schedule from_pattern(std::string_view name, const ScheduleShape& shape, const Offsets& offsets,
                      int memory, int steady_from) {
  const int micro_batches = shape.micro_batches <= memory
                                ? shape.micro_batches
                                : std::max(shape.micro_batches, steady_from);
  Schedule schedule = empty_schedule(name, Placement::v_shape(shape.ranks), shape.micro_batches,
                                     kPeriod * shape.micro_batches);
  Pattern pattern(offsets, micro_batches);
  const std::vector<std::vector<Op>> orders = pattern.orders();
  Runner(offsets, orders, pattern.capacity(), micro_batches, schedule).run();
  return schedule;
}

}  // namespace

// The way there takes two slots per rank, all others one.
Schedule v_half(const ScheduleShape& shape) {
  const int p = shape.ranks;
  const int shift = p % 2 == 0 ? 3 : 0;  // keeps the four ops of a rank in different slots
  Offsets offsets;
  for (int r = 0; r < p; ++r) {
    offsets.push_back({2 * r, 3 * p - r - 2, 3 * p + shift + 2 * r - 1, 6 * p + shift - r - 2});
  }
  return from_pattern("v-half", shape, offsets, (p + 2) / 2, p + 2);
}

// Every way takes one slot per rank.
Schedule v_min(const ScheduleShape& shape) {
  const int p = shape.ranks;
  const int shift = p % 3 == 0 ? 2 : 0;
  Offsets offsets;
  for (int r = 0; r < p; ++r) {
    offsets.push_back({r, 2 * p - r - 1, 2 * p + shift + r, 4 * p + shift - r - 1});
  }
  return from_pattern("v-min", shape, offsets, (p + 4) / 3, (2 * p + 2) / 3 + 1);
}

}  // namespace sluice::generators
