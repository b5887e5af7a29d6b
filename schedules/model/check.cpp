#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/schedule.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/dataflow.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/pair_table.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

using Objection = std::optional<std::string>;

// One bit per compute and message kind; they are the first eight.
constexpr int kTrackedKinds = 8;
constexpr std::uint8_t bit(ActionKind kind) {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(kind));
}
constexpr std::uint8_t kHalves = bit(ActionKind::kBackwardInput) | bit(ActionKind::kBackwardWeight);
constexpr std::uint8_t kGradient = bit(ActionKind::kBackward) | bit(ActionKind::kBackwardInput);

// What a schedule holds.
struct Inventory {
  PairTable<std::uint8_t> seen;  // bits by kind
  bool messages = false;
  bool pairs = false;  // overlapped ones
};

// The first step whose action, or overlapped action, matches; -1: none.
template <class Match>
int find_step(const std::vector<Step>& steps, const Match& match) {
  const auto found = std::find_if(steps.begin(), steps.end(), [&](const Step& step) {
    return match(step.action) || (step.overlapped && match(*step.overlapped));
  });
  return found == steps.end() ? -1 : static_cast<int>(found - steps.begin());
}

// The first action, rank by rank, that check(rank, step, action) objects to.
template <class Check>
std::optional<Violation> first_objection(const Schedule& schedule, Check&& check) {
  for (int rank = 0; rank < schedule.placement.ranks(); ++rank) {
    const std::vector<Step>& steps = schedule.ranks[at(rank)];
    for (std::size_t i = 0; i < steps.size(); ++i) {
      Objection objection = check(rank, steps[i], steps[i].action);
      if (!objection && steps[i].overlapped) {
        objection = check(rank, steps[i], *steps[i].overlapped);
      }
      if (objection) {
        return Violation{rank, static_cast<int>(i),
                         concat("rank ", rank, ", step ", i, ": ", *objection)};
      }
    }
  }
  return std::nullopt;
}

std::optional<Violation> check_shape(const Schedule& schedule) {
  if (schedule.micro_batches < 1) {
    return Violation{-1, -1,
                     concat("the schedule has ", schedule.micro_batches,
                            " micro-batches; at least 1 is needed")};
  }
  if (schedule.ranks.size() != at(schedule.placement.ranks())) {
    return Violation{-1, -1,
                     concat("the schedule lists ", schedule.ranks.size(),
                            " ranks, its placement has ", schedule.placement.ranks())};
  }
  return std::nullopt;
}

// Checks each action by itself, and that it is the first of its kind. Fills the inventory.
class SingleActions {
 public:
  SingleActions(const Schedule& schedule, Inventory& inventory)
      : schedule_(schedule), placement_(schedule.placement), inventory_(inventory) {}

  Objection operator()(int rank, const Step& step, const Action& action) {
    if (step.overlapped) inventory_.pairs = true;
    if (action.stage < 0 || action.stage >= placement_.stages()) {
      return concat(action, " names stage ", action.stage, "; legal stages are 0 to ",
                    placement_.stages() - 1);
    }
    if (placement_.rank_of(action.stage) != rank) {
      return concat(action, " is on rank ", rank, ", but stage ", action.stage, " belongs to rank ",
                    placement_.rank_of(action.stage));
    }
    if (!has_micro_batch(action.kind)) return std::nullopt;
    if (action.micro_batch < 0 || action.micro_batch >= schedule_.micro_batches) {
      return concat(action, " names micro-batch ", action.micro_batch,
                    "; legal micro-batches are 0 to ", schedule_.micro_batches - 1);
    }
    // verify() looks at these.
    if (is_move(action.kind) || action.kind == ActionKind::kRecompute) return std::nullopt;
    std::uint8_t& seen = inventory_.seen.at(action.stage, action.micro_batch);
    if (is_message(action.kind)) {
      if (auto objection = message(action)) return objection;
    } else if (auto objection = compute(action, seen)) {
      return objection;
    }
    if ((seen & bit(action.kind)) != 0) {
      const int first = find_step(schedule_.ranks[at(rank)], [&](const Action& other) {
        return other.kind == action.kind && other.stage == action.stage &&
               other.micro_batch == action.micro_batch;
      });
      return concat(action, " appears a second time; the first is at step ", first);
    }
    seen |= bit(action.kind);
    return std::nullopt;
  }

 private:
  Objection compute(const Action& action, std::uint8_t seen) const {
    if (action.kind == ActionKind::kForward) return std::nullopt;
    if (schedule_.forward_only) return out_of_place(action);
    const bool whole = action.kind == ActionKind::kBackward;
    if ((seen & (whole ? kHalves : bit(ActionKind::kBackward))) == 0) return std::nullopt;
    return to_string(action) +
           " comes in addition to another backward of that micro-batch; legal is " +
           "either B, or I and W";
  }

  Objection message(const Action& action) {
    inventory_.messages = true;
    const bool backward =
        action.kind == ActionKind::kSendBackward || action.kind == ActionKind::kRecvBackward;
    if (backward && schedule_.forward_only) return out_of_place(action);
    const int other = other_end(action).stage;
    if (other < 0 || other >= placement_.stages()) {
      return to_string(action) + " has no stage on its other side";
    }
    if (!crosses(placement_, action.stage, other)) {
      return concat(action, " is a message to the same rank; stage ", other,
                    " is there too and takes the tensor over locally");
    }
    return std::nullopt;
  }

  static std::string out_of_place(const Action& action) {
    return to_string(action) + " has no place in a forward-only schedule";
  }

  const Schedule& schedule_;
  const Placement& placement_;
  Inventory& inventory_;
};

// The two actions of an overlapped step compute, and neither needs the other.
Objection check_pair(const Step& step) {
  if (!step.overlapped) return std::nullopt;
  const Action& one = step.action;
  const Action& two = *step.overlapped;
  const bool computes = is_compute(one.kind) && is_compute(two.kind);
  if (computes && (one.stage != two.stage || one.micro_batch != two.micro_batch)) {
    return std::nullopt;
  }
  return to_string(step) +
         (computes ? " pairs actions of which one needs the other"
                   : " overlaps an action that does not compute") +
         "; legal are two independent actions among F, B, I and W";
}

Objection check_partner(const Placement& placement, PairTable<std::uint8_t>& seen,
                        const Action& action) {
  if (!is_message(action.kind)) return std::nullopt;
  const Action other = other_end(action);
  if ((seen.at(other.stage, other.micro_batch) & bit(other.kind)) != 0) return std::nullopt;
  return concat(action, is_send(action.kind) ? " has no receive" : " has no send", "; rank ",
                placement.rank_of(other.stage), " lacks ", other);
}

// Finds what the inventory lacks.
class MissingActions {
 public:
  MissingActions(const Schedule& schedule, const Inventory& inventory)
      : schedule_(schedule), placement_(schedule.placement), inventory_(inventory) {}

  std::optional<Violation> find() const {
    for (int rank = 0; rank < placement_.ranks(); ++rank) {
      for (const int stage : placement_.stages_of(rank)) {
        for (int micro_batch = 0; micro_batch < schedule_.micro_batches; ++micro_batch) {
          if (const auto kind = missing(stage, micro_batch)) {
            return violation(rank, make_action(*kind, stage, micro_batch));
          }
        }
      }
    }
    return std::nullopt;
  }

 private:
  // The first kind that (stage, micro-batch) lacks: B where the whole backward is missing.
  std::optional<ActionKind> missing(int stage, int micro_batch) const {
    const std::uint8_t seen = inventory_.seen.at(stage, micro_batch);
    if (!inventory_.messages && is_whole(seen)) return std::nullopt;
    for (int i = 0; i < kTrackedKinds; ++i) {
      const auto kind = static_cast<ActionKind>(i);
      if ((seen & bit(kind)) == 0 && is_required(kind, stage, seen)) return kind;
    }
    return std::nullopt;
  }

  // Without messages.
  bool is_whole(std::uint8_t seen) const {
    constexpr std::uint8_t kForward = bit(ActionKind::kForward);
    if (schedule_.forward_only) return seen == kForward;
    return seen == (kForward | bit(ActionKind::kBackward)) || seen == (kForward | kHalves);
  }

  bool is_required(ActionKind kind, int stage, std::uint8_t seen) const {
    if (kind == ActionKind::kForward) return true;
    if (is_message(kind)) {
      const bool forward = kind == ActionKind::kSendForward || kind == ActionKind::kRecvForward;
      return inventory_.messages && (forward || !schedule_.forward_only) &&
             crosses(placement_, stage, other_end(make_action(kind, stage)).stage);
    }
    const bool split = (seen & kHalves) != 0;
    return !schedule_.forward_only && (kind == ActionKind::kBackward) != split;
  }

  // Points at the first action of the same stage and micro-batch, where there is one.
  Violation violation(int rank, const Action& action) const {
    const int position = find_step(schedule_.ranks[at(rank)], [&](const Action& other) {
      return other.stage == action.stage && other.micro_batch == action.micro_batch &&
             has_micro_batch(other.kind);
    });
    const char* needed = is_message(action.kind)
                             ? "a message to and from each neighbour on another rank"
                         : schedule_.forward_only ? "F"
                                                  : "F, and B or I and W,";
    return Violation{rank, position,
                     concat("rank ", rank, ": ", action, " is missing; each stage needs ", needed,
                            " for each of micro-batches 0 to ", schedule_.micro_batches - 1)};
  }

  const Schedule& schedule_;
  const Placement& placement_;
  const Inventory& inventory_;
};

// Bits of the kinds of the same stage and micro-batch that come first, where they exist.
constexpr std::uint8_t prerequisites(ActionKind kind) {
  switch (kind) {
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

// Order within a stage: forward, backward input, backward weight, and the messages around them.
// `done` holds the bits of what comes before the action in its list.
Objection check_order(PairTable<std::uint8_t>& seen, PairTable<std::uint8_t>& done_table,
                      const Action& action) {
  if (!has_micro_batch(action.kind)) return std::nullopt;
  std::uint8_t& done = done_table.at(action.stage, action.micro_batch);
  const unsigned lacking =
      prerequisites(action.kind) & seen.at(action.stage, action.micro_batch) & ~unsigned{done};
  if (lacking != 0) {
    const auto kind = static_cast<ActionKind>(std::countr_zero(lacking));
    return to_string(action) + " comes before " +
           to_string(make_action(kind, action.stage, action.micro_batch)) + ", which it needs";
  }
  done |= bit(action.kind);
  return std::nullopt;
}

// Every action exists once, so each stuck rank waits for another stuck rank, or itself.
std::optional<Violation> check_cycle(const Schedule& schedule,
                                     const PairTable<std::uint8_t>& seen) {
  Dataflow dataflow(schedule);
  if (dataflow.run([](int, int, const Step&) {})) return std::nullopt;
  const auto next = [&](int rank) {
    return schedule.placement.rank_of(dataflow.waits_for(rank)->stage);
  };
  int rank = 0;
  while (!dataflow.waits_for(rank)) ++rank;
  std::vector<bool> visited(schedule.ranks.size());
  for (; !visited[at(rank)]; rank = next(rank)) visited[at(rank)] = true;
  int first = rank;
  for (int other = next(rank); other != rank; other = next(other)) first = std::min(first, other);
  std::string text;
  int member = first;
  do {
    const int position = dataflow.position(member);
    Action awaited = *dataflow.waits_for(member);
    if (awaited.kind == ActionKind::kBackward &&
        (seen.at(awaited.stage, awaited.micro_batch) & bit(awaited.kind)) == 0) {
      awaited.kind = ActionKind::kBackwardInput;
    }
    text += concat(text.empty() ? "the order deadlocks: rank " : "; rank ", member, " at step ",
                   position, " (", schedule.ranks[at(member)][at(position)], ") waits for ",
                   awaited, " of rank ", next(member));
    member = next(member);
  } while (member != first);
  return Violation{first, dataflow.position(first), text};
}

}  // namespace

// Each pass relies on the ones before it.
std::optional<Violation> check(const Schedule& schedule) {
  if (auto found = check_shape(schedule)) return found;
  const Placement& placement = schedule.placement;
  Inventory inventory = {PairTable<std::uint8_t>(placement.stages(), schedule.micro_batches)};
  if (auto found = first_objection(schedule, SingleActions(schedule, inventory))) return found;
  const auto pair = [](int, const Step& step, const Action&) { return check_pair(step); };
  if (inventory.pairs) {
    if (auto found = first_objection(schedule, pair)) return found;
  }
  const auto partner = [&](int, const Step&, const Action& action) {
    return check_partner(placement, inventory.seen, action);
  };
  if (inventory.messages) {
    if (auto found = first_objection(schedule, partner)) return found;
  }
  if (auto found = MissingActions(schedule, inventory).find()) return found;
  PairTable<std::uint8_t> done(placement.stages(), schedule.micro_batches);
  const auto order = [&](int, const Step&, const Action& action) {
    return check_order(inventory.seen, done, action);
  };
  if (auto found = first_objection(schedule, order)) return found;
  return check_cycle(schedule, inventory.seen);
}

}  // namespace sluice
