// The memory of a stage's micro-batches in flight: one slot each, of equal size. Internal to
// Sluice.
#pragma once

#include <cstddef>
#include <span>

#include <sluice/device.hpp>
#include <sluice/stage.hpp>

#include "comm/base/byte_sums.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice {

// The bytes of StageContext::State. Each part starts at a multiple of kBufferAlignment.
struct StateBytes {
  std::size_t until_input = 0, until_weight = 0, gradients = 0;

  // Those of a plan; one that calls backward() alone keeps no gradients.
  [[nodiscard]] StateBytes in_plan(bool split_backward) const {
    return {until_input, until_weight, split_backward ? gradients : 0};
  }
  [[nodiscard]] std::size_t slot() const {
    return sum_of_bytes({round_up(until_input, kBufferAlignment),
                         round_up(until_weight, kBufferAlignment),
                         round_up(gradients, kBufferAlignment)});
  }
  // Slot `index` of `memory`, which has slot() bytes for each; null: there are none.
  [[nodiscard]] StageContext::State cut(std::byte* memory, std::size_t index) const {
    BumpAllocator parts(memory == nullptr ? nullptr : memory + index * slot());
    const auto take = [&parts](std::size_t bytes) {
      return std::span<std::byte>(parts.bytes(bytes), bytes);
    };
    return {take(until_input), take(until_weight), take(gradients)};
  }
};

}  // namespace sluice
