// Actions: the alphabet every schedule is written in.
//
// A schedule is, per rank, a list of steps; a step is one action or an overlapped pair of two.
// The text form is `<stage><KIND>[micro_batch]`, e.g. `2F0` (stage 2 forwards micro-batch 0),
// `3SEND_B1`, `0REDUCE_GRAD`; it follows torch.distributed.pipelining's `_Action`, but is strict:
// the whole text must match and an unknown kind is refused by name. Numbers are decimal without
// sign or leading zeros. Behind it may follow `>stage` (a message's to_stage) and `@copy` (from 1).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

// kBackward is the whole backward pass; kBackwardInput ("I") and kBackwardWeight ("W") are its
// halves, for schedules that part them.
enum class ActionKind : std::uint8_t {
  kForward,         // F
  kBackward,        // B
  kBackwardInput,   // I
  kBackwardWeight,  // W
  kSendForward,     // SEND_F: activation to stage + 1
  kRecvForward,     // RECV_F: activation from stage - 1
  kSendBackward,    // SEND_B: gradient to stage - 1
  kRecvBackward,    // RECV_B: gradient from stage + 1
  kReduceGrad,      // REDUCE_GRAD: this stage's gradients summed over replicas
  kReduceTied,      // REDUCE_TIED: gradients of a tied parameter summed over its uses
  kUnshard,         // UNSHARD
  kReshard,         // RESHARD
  kRecompute,       // RECOMPUTE
  kOptimizer,       // OPTIMIZER: norm, guard, clip, update; once per rank
};

// True for F, B, I and W.
[[nodiscard]] constexpr bool is_compute(ActionKind kind) {
  return kind <= ActionKind::kBackwardWeight;
}
// True for the four message kinds.
[[nodiscard]] constexpr bool is_message(ActionKind kind) {
  return kind >= ActionKind::kSendForward && kind <= ActionKind::kRecvBackward;
}
// True where the text form carries a micro-batch (compute, message and RECOMPUTE kinds).
[[nodiscard]] bool has_micro_batch(ActionKind kind);
// "F", "SEND_B", ...
[[nodiscard]] std::string_view name_of(ActionKind kind);

struct Action {
  ActionKind kind = ActionKind::kForward;
  std::uint8_t copy = 0;          // which copy of the model, for schedules that keep two
  std::int32_t stage = 0;         // global stage index
  std::int32_t micro_batch = -1;  // -1 where the kind has none
  std::int32_t to_stage = -1;     // messages that do not go to a neighbouring stage; -1: neighbour

  friend bool operator==(const Action&, const Action&) = default;
};

// One entry of a rank's list. `overlapped` runs together with `action` (DualPipe's F and B).
struct Step {
  Action action;
  std::optional<Action> overlapped = std::nullopt;

  friend bool operator==(const Step&, const Step&) = default;
};

[[nodiscard]] std::string to_string(const Action& action);
[[nodiscard]] std::string to_string(const Step& step);  // a pair prints as (0F7;7B3)OVERLAP_F_B

// Throws std::invalid_argument naming the text, the offending part and what would be legal.
[[nodiscard]] Action parse_action(std::string_view text);
[[nodiscard]] Step parse_step(std::string_view text);

}  // namespace sluice
