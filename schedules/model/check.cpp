#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <sluice/schedule.hpp>

#include "schedules/model/dataflow.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/pair_table.hpp"

namespace sluice {
namespace {

constexpr std::array kTracked = {ActionKind::kForward,       ActionKind::kBackward,
                                 ActionKind::kBackwardInput, ActionKind::kBackwardWeight,
                                 ActionKind::kSendForward,   ActionKind::kRecvForward,
                                 ActionKind::kSendBackward,  ActionKind::kRecvBackward};

// One bit per compute and message kind; they are the first eight.
constexpr std::uint8_t bit(ActionKind kind) {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(kind));
}

constexpr std::uint8_t kAnyBackward =
    bit(ActionKind::kBackward) | bit(ActionKind::kBackwardInput) | bit(ActionKind::kBackwardWeight);
constexpr std::uint8_t kGradient = bit(ActionKind::kBackward) | bit(ActionKind::kBackwardInput);

Action action_of(ActionKind kind, int stage, int micro_batch) {
  Action action;
  action.kind = kind;
  action.stage = stage;
  action.micro_batch = micro_batch;
  return action;
}

class Checker {
 public:
  explicit Checker(const Schedule& schedule)
      : schedule_(schedule),
        placement_(schedule.placement),
        stages_(schedule.placement.stages()),
        micro_batches_(schedule.micro_batches) {}

  // Each pass relies on the ones before it.
  std::optional<Violation> run() {
    if (auto found = check_shape()) return found;
    seen_ = PairTable<std::uint8_t>(stages_, micro_batches_);
    if (auto found = for_each_action<&Checker::check_alone>()) return found;
    if (has_pairs_) {
      if (auto found = check_pairs()) return found;
    }
    if (has_messages_) {
      if (auto found = for_each_action<&Checker::check_partner>()) return found;
    }
    if (auto found = check_missing()) return found;
    done_ = PairTable<std::uint8_t>(stages_, micro_batches_);
    if (auto found = for_each_action<&Checker::check_order>()) return found;
    return check_cycle();
  }

 private:
  using Objection = std::optional<std::string>;
  using Check = Objection (Checker::*)(int rank, const Action& action);

  std::optional<Violation> check_shape() const {
    const auto lists = schedule_.ranks.size();
    if (micro_batches_ < 1) {
      return Violation{-1, -1,
                       "the schedule has " + std::to_string(micro_batches_) +
                           " micro-batches; at least 1 is needed"};
    }
    if (lists != at(placement_.ranks())) {
      return Violation{-1, -1,
                       "the schedule lists " + std::to_string(lists) +
                           " ranks, its placement has " + std::to_string(placement_.ranks())};
    }
    return std::nullopt;
  }

  // The first action, rank by rank, that `check` objects to.
  template <Check check>
  std::optional<Violation> for_each_action() {
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      const std::vector<Step>& steps = schedule_.ranks[rank];
      for (std::size_t i = 0; i < steps.size(); ++i) {
        Objection objection = (this->*check)(static_cast<int>(rank), steps[i].action);
        if (!objection && steps[i].overlapped) {
          has_pairs_ = true;
          objection = (this->*check)(static_cast<int>(rank), *steps[i].overlapped);
        }
        if (objection) {
          return Violation{static_cast<int>(rank), static_cast<int>(i),
                           where(static_cast<int>(rank), static_cast<int>(i)) + *objection};
        }
      }
    }
    return std::nullopt;
  }

  // The two actions of an overlapped step compute, and neither needs the other.
  std::optional<Violation> check_pairs() const {
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      const std::vector<Step>& steps = schedule_.ranks[rank];
      for (std::size_t i = 0; i < steps.size(); ++i) {
        if (!steps[i].overlapped) continue;
        const Action& one = steps[i].action;
        const Action& two = *steps[i].overlapped;
        const bool computes = is_compute(one.kind) && is_compute(two.kind);
        if (computes && (one.stage != two.stage || one.micro_batch != two.micro_batch)) continue;
        return Violation{static_cast<int>(rank), static_cast<int>(i),
                         where(static_cast<int>(rank), static_cast<int>(i)) + to_string(steps[i]) +
                             (computes ? " pairs actions of which one needs the other"
                                       : " overlaps an action that does not compute") +
                             "; legal are two independent actions among F, B, I and W"};
      }
    }
    return std::nullopt;
  }

  // What can be said of an action by itself, and that it is the first of its kind.
  Objection check_alone(int rank, const Action& action) {
    if (action.stage < 0 || action.stage >= stages_) {
      return to_string(action) + " names stage " + std::to_string(action.stage) +
             "; legal stages are 0 to " + std::to_string(stages_ - 1);
    }
    if (placement_.rank_of(action.stage) != rank) {
      return to_string(action) + " is on rank " + std::to_string(rank) + ", but stage " +
             std::to_string(action.stage) + " belongs to rank " +
             std::to_string(placement_.rank_of(action.stage));
    }
    if (action.copy != 0) {
      return to_string(action) + " names copy " + std::to_string(action.copy) +
             " of the model; this placement keeps one copy";
    }
    if (!is_compute(action.kind) && !is_message(action.kind)) return std::nullopt;
    if (action.micro_batch < 0 || action.micro_batch >= micro_batches_) {
      return to_string(action) + " names micro-batch " + std::to_string(action.micro_batch) +
             "; legal micro-batches are 0 to " + std::to_string(micro_batches_ - 1);
    }
    if (is_message(action.kind)) {
      if (auto objection = check_message_alone(action)) return objection;
    } else if (auto objection = check_compute_alone(action)) {
      return objection;
    }
    std::uint8_t& seen = seen_.at(action.stage, action.micro_batch);
    if ((seen & bit(action.kind)) != 0) {
      return to_string(action) + " appears a second time; the first is at step " +
             std::to_string(find(rank, action));
    }
    seen |= bit(action.kind);
    return std::nullopt;
  }

  Objection check_compute_alone(const Action& action) const {
    if (action.kind == ActionKind::kForward) return std::nullopt;
    if (schedule_.forward_only) {
      return to_string(action) + " has no place in a forward-only schedule";
    }
    const std::uint8_t seen = seen_.at(action.stage, action.micro_batch);
    const std::uint8_t halves = kAnyBackward & ~bit(ActionKind::kBackward);
    if ((action.kind == ActionKind::kBackward && (seen & halves) != 0) ||
        (action.kind != ActionKind::kBackward && (seen & bit(ActionKind::kBackward)) != 0)) {
      return to_string(action) + " comes beside another backward of that micro-batch; legal is " +
             "either B, or I and W";
    }
    return std::nullopt;
  }

  Objection check_message_alone(const Action& action) {
    has_messages_ = true;
    const bool backward =
        action.kind == ActionKind::kSendBackward || action.kind == ActionKind::kRecvBackward;
    if (backward && schedule_.forward_only) {
      return to_string(action) + " has no place in a forward-only schedule";
    }
    const int other = partner(action).stage;
    if (other < 0 || other >= stages_) {
      return to_string(action) + " has no stage on its other side";
    }
    if (action.to_stage >= 0 && action.to_stage != other) {
      return to_string(action) + " names stage " + std::to_string(action.to_stage) +
             " as its other side; messages go between neighbours, here stage " +
             std::to_string(other);
    }
    if (!crosses(action.stage, other)) {
      return to_string(action) + " is a message to the same rank; stage " + std::to_string(other) +
             " is there too and takes the tensor over locally";
    }
    return std::nullopt;
  }

  Objection check_partner(int, const Action& action) {
    if (!is_message(action.kind)) return std::nullopt;
    const Action other = partner(action);
    if ((seen_.at(other.stage, other.micro_batch) & bit(other.kind)) != 0) return std::nullopt;
    const bool sends =
        action.kind == ActionKind::kSendForward || action.kind == ActionKind::kSendBackward;
    return to_string(action) + (sends ? " has no receive" : " has no send") + "; rank " +
           std::to_string(placement_.rank_of(other.stage)) + " lacks " + to_string(other);
  }

  std::optional<Violation> check_missing() const {
    for (int rank = 0; rank < placement_.ranks(); ++rank) {
      for (const int stage : placement_.stages_of(rank)) {
        for (int micro_batch = 0; micro_batch < micro_batches_; ++micro_batch) {
          if (const auto kind = missing(stage, micro_batch)) {
            return missing_violation(rank, action_of(*kind, stage, micro_batch));
          }
        }
      }
    }
    return std::nullopt;
  }

  // The first kind that (stage, micro-batch) lacks. Of a backward that is quite absent: B.
  std::optional<ActionKind> missing(int stage, int micro_batch) const {
    const std::uint8_t seen = seen_.at(stage, micro_batch);
    if (!has_messages_ && is_whole(seen)) return std::nullopt;
    for (const ActionKind kind : kTracked) {
      if ((seen & bit(kind)) == 0 && is_required(kind, stage, seen)) return kind;
    }
    return std::nullopt;
  }

  // Without messages.
  bool is_whole(std::uint8_t seen) const {
    constexpr std::uint8_t kForward = bit(ActionKind::kForward);
    if (schedule_.forward_only) return seen == kForward;
    return seen == (kForward | bit(ActionKind::kBackward)) ||
           seen == (kForward | bit(ActionKind::kBackwardInput) | bit(ActionKind::kBackwardWeight));
  }

  bool is_required(ActionKind kind, int stage, std::uint8_t seen) const {
    const bool backward = !schedule_.forward_only;
    const bool split = (seen & (kAnyBackward & ~bit(ActionKind::kBackward))) != 0;
    switch (kind) {
      case ActionKind::kForward:
        return true;
      case ActionKind::kBackward:
        return backward && !split;
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        return backward && split;
      case ActionKind::kSendForward:
        return has_messages_ && crosses(stage, stage + 1);
      case ActionKind::kRecvForward:
        return has_messages_ && crosses(stage, stage - 1);
      case ActionKind::kSendBackward:
        return has_messages_ && backward && crosses(stage, stage - 1);
      case ActionKind::kRecvBackward:
        return has_messages_ && backward && crosses(stage, stage + 1);
      default:
        return false;
    }
  }

  // Points at the first action of the same stage and micro-batch, where there is one.
  Violation missing_violation(int rank, const Action& action) const {
    const std::vector<Step>& steps = schedule_.ranks[at(rank)];
    const auto related = [&](const Action& other) {
      return other.stage == action.stage && other.micro_batch == action.micro_batch &&
             (is_compute(other.kind) || is_message(other.kind));
    };
    int position = -1;
    for (std::size_t i = 0; i < steps.size() && position < 0; ++i) {
      if (related(steps[i].action) || (steps[i].overlapped && related(*steps[i].overlapped))) {
        position = static_cast<int>(i);
      }
    }
    const bool message = is_message(action.kind);
    return Violation{rank, position,
                     "rank " + std::to_string(rank) + ": " + to_string(action) +
                         " is missing; each stage needs " +
                         (message ? "a message to and from each neighbour on another rank"
                          : schedule_.forward_only ? "F"
                                                   : "F, and B or I and W,") +
                         " for each of micro-batches 0 to " + std::to_string(micro_batches_ - 1)};
  }

  // Order within a stage: forward, backward input, backward weight, and messages around them.
  Objection check_order(int, const Action& action) {
    if (!is_compute(action.kind) && !is_message(action.kind)) return std::nullopt;
    const std::uint8_t seen = seen_.at(action.stage, action.micro_batch);
    std::uint8_t& done = done_.at(action.stage, action.micro_batch);
    const unsigned lacking = prerequisites(action) & seen & ~unsigned{done};
    if (lacking != 0) {
      auto kind = kTracked.begin();
      while ((lacking & bit(*kind)) == 0) ++kind;
      return to_string(action) + " comes before " +
             to_string(action_of(*kind, action.stage, action.micro_batch)) + ", which it needs";
    }
    done |= bit(action.kind);
    return std::nullopt;
  }

  // Bits of the kinds of the same stage and micro-batch that come first, where they exist.
  static std::uint8_t prerequisites(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward:
        return bit(ActionKind::kRecvForward);
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        return bit(ActionKind::kForward) | bit(ActionKind::kRecvBackward);
      case ActionKind::kBackwardWeight:
        return bit(ActionKind::kBackwardInput);
      case ActionKind::kSendForward:
        return bit(ActionKind::kForward);
      case ActionKind::kSendBackward:
        return kGradient;
      default:
        return 0;
    }
  }

  std::optional<Violation> check_cycle() const {
    Dataflow dataflow(schedule_);
    if (dataflow.run([](int, int, const Step&) {})) return std::nullopt;
    // Every action exists once, so each stuck rank waits for another stuck rank (or itself).
    std::vector<bool> visited(schedule_.ranks.size());
    int rank = 0;
    while (!dataflow.waits_for(rank)) ++rank;
    while (!visited[at(rank)]) {
      visited[at(rank)] = true;
      rank = placement_.rank_of(dataflow.waits_for(rank)->stage);
    }
    std::vector<int> cycle;
    int first = rank;
    do {
      cycle.push_back(rank);
      if (rank < first) first = rank;
      rank = placement_.rank_of(dataflow.waits_for(rank)->stage);
    } while (rank != cycle.front());
    return Violation{first, dataflow.position(first), describe_cycle(dataflow, cycle, first)};
  }

  std::string describe_cycle(const Dataflow& dataflow, const std::vector<int>& cycle,
                             int first) const {
    std::string text = "the order deadlocks: ";
    std::size_t start = 0;
    while (cycle[start] != first) ++start;
    for (std::size_t i = 0; i < cycle.size(); ++i) {
      const int rank = cycle[(start + i) % cycle.size()];
      const int position = dataflow.position(rank);
      Action awaited = *dataflow.waits_for(rank);
      if (awaited.kind == ActionKind::kBackward &&
          (seen_.at(awaited.stage, awaited.micro_batch) & bit(awaited.kind)) == 0) {
        awaited.kind = ActionKind::kBackwardInput;
      }
      text += (i == 0 ? "rank " : "; rank ") + std::to_string(rank) + " at step " +
              std::to_string(position) + " (" + to_string(schedule_.ranks[at(rank)][at(position)]) +
              ") waits for " + to_string(awaited) + " of rank " +
              std::to_string(placement_.rank_of(awaited.stage));
    }
    return text;
  }

  // The other end of a message.
  static Action partner(const Action& action) {
    switch (action.kind) {
      case ActionKind::kSendForward:
        return action_of(ActionKind::kRecvForward, action.stage + 1, action.micro_batch);
      case ActionKind::kRecvForward:
        return action_of(ActionKind::kSendForward, action.stage - 1, action.micro_batch);
      case ActionKind::kSendBackward:
        return action_of(ActionKind::kRecvBackward, action.stage - 1, action.micro_batch);
      default:
        return action_of(ActionKind::kSendBackward, action.stage + 1, action.micro_batch);
    }
  }

  bool crosses(int stage, int other) const {
    return other >= 0 && other < stages_ && placement_.rank_of(other) != placement_.rank_of(stage);
  }

  std::size_t find(int rank, const Action& action) const {
    const std::vector<Step>& steps = schedule_.ranks[at(rank)];
    std::size_t i = 0;
    const auto same = [&](const Action& other) {
      return other.kind == action.kind && other.stage == action.stage &&
             other.micro_batch == action.micro_batch;
    };
    while (!same(steps[i].action) && !(steps[i].overlapped && same(*steps[i].overlapped))) ++i;
    return i;
  }

  static std::string where(int rank, int position) {
    return "rank " + std::to_string(rank) + ", step " + std::to_string(position) + ": ";
  }

  const Schedule& schedule_;
  const Placement& placement_;
  const int stages_;
  const int micro_batches_;
  bool has_messages_ = false;
  bool has_pairs_ = false;
  PairTable<std::uint8_t> seen_;  // bits by kind
  PairTable<std::uint8_t> done_;
};

}  // namespace

std::optional<Violation> check(const Schedule& schedule) { return Checker(schedule).run(); }

}  // namespace sluice
