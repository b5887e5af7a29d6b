// The memory of a stage's micro-batches in flight: one slot each, of equal size. Internal to
// Sluice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <sluice/device.hpp>
#include <sluice/stage.hpp>

#include "comm/base/byte_sums.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice {

// The bytes of StageContext::State. Each part starts at a multiple of kBufferAlignment.
struct StateBytes {
  std::size_t until_input = 0, until_weight = 0, gradients = 0;
  std::size_t alignment = kBufferAlignment;  // of slots: a multiple of kBufferAlignment

  // Those of a plan; one that calls backward() alone keeps no gradients.
  [[nodiscard]] StateBytes in_plan(bool split_backward) const {
    return {until_input, until_weight, split_backward ? gradients : 0, alignment};
  }
  [[nodiscard]] std::size_t slot() const {
    return round_up(sum_of_bytes({round_up(until_input, kBufferAlignment),
                                  round_up(until_weight, kBufferAlignment),
                                  round_up(gradients, kBufferAlignment)}),
                    alignment);
  }
  // What has to last between forward and backward, from the slot's start on.
  [[nodiscard]] std::size_t kept() const {
    return round_up(sum_of_bytes({round_up(until_input, kBufferAlignment), until_weight}),
                    alignment);
  }
  // The memory of so many slots.
  [[nodiscard]] std::size_t memory(std::size_t slots) const {
    return sum_of_bytes({multiply_bytes(slot(), slots), alignment - kBufferAlignment});
  }
  // Slot `index` of what memory() says; null: there are none.
  [[nodiscard]] std::byte* place(std::byte* memory, std::size_t index) const {
    if (memory == nullptr) return nullptr;
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    return memory + (round_up(address, alignment) - address) + index * slot();
  }
  [[nodiscard]] StageContext::State cut(std::byte* memory, std::size_t index) const {
    BumpAllocator parts(place(memory, index));
    const auto take = [&parts](std::size_t bytes) {
      return std::span<std::byte>(parts.bytes(bytes), bytes);
    };
    return {take(until_input), take(until_weight), take(gradients)};
  }
};

}  // namespace sluice
