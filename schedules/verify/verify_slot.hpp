// What verify() knows of one slot, and of one micro-batch of a stage, while it replays a list.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"

namespace sluice {

enum class ReplayState : std::uint8_t { kFree, kPosted, kFilled, kSending };
inline constexpr std::array<std::string_view, 4> kReplayStateNames = {
    "free", "posted and not waited for", "filled", "being sent"};

struct ReplaySlot {
  ReplayState state = ReplayState::kFree;
  std::int32_t micro_batch = -1;
};

[[nodiscard]] inline bool holds(const ReplaySlot& slot, ReplayState state, const PlanOp& op) {
  return slot.state == state && slot.micro_batch == op.micro_batch;
}

// "the slot is ..., it must be `wanted` with `micro_batch`", -1: whatever that is.
[[nodiscard]] inline std::string not_in(const ReplaySlot& slot, ReplayState wanted,
                                        std::int32_t micro_batch) {
  std::string text = "the slot is " + std::string(kReplayStateNames[at(slot.state)]);
  if (slot.micro_batch >= 0) text += " with micro-batch " + std::to_string(slot.micro_batch);
  text += ", it must be " + std::string(kReplayStateNames[at(wanted)]);
  if (micro_batch >= 0) text += " with micro-batch " + std::to_string(micro_batch);
  return text;
}

// What has been computed for one (stage, micro-batch), as bits.
inline constexpr std::uint8_t kForwardDone = 1, kInputDone = 2, kWeightDone = 4;

}  // namespace sluice
