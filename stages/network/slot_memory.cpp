#include "stages/network/slot_memory.hpp"

#include <algorithm>

#include "comm/base/byte_sums.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice {
namespace {

std::size_t take(BumpAllocator& allocator, std::size_t bytes) {
  const std::size_t offset = allocator.used();
  (void)allocator.bytes(bytes);
  return offset;
}

std::byte* at(const Buffer& buffer, std::size_t offset) {
  return buffer.data() == nullptr ? nullptr : buffer.data() + offset;
}

// The shared area: the largest gradients of a layer, then two gradients of outputs in turn: a layer
// reads one and writes the other.
struct Shared {
  std::size_t gradients = 0, output = 0;
};
Shared shared_of(std::span<const SlotMemory::Need> needs) {
  Shared shared;
  for (const SlotMemory::Need& need : needs) {
    shared.gradients = std::max(shared.gradients, need.layer.gradients);
    shared.output = std::max(shared.output, need.input_gradient);
  }
  return shared;
}

}  // namespace

StageDescription SlotMemory::describe(std::span<const Need> needs) {
  StageDescription description;
  for (const Need& need : needs) {
    const auto rounded = [](std::size_t bytes) { return round_up(bytes, kBufferAlignment); };
    add_bytes(description.state_bytes_until_input, rounded(need.layer.until_input));
    add_bytes(description.state_bytes_until_weight, rounded(need.layer.until_weight));
    add_bytes(description.state_bytes_until_weight, rounded(need.output));
    add_bytes(description.gradient_bytes_until_weight, rounded(need.layer.gradients));
    add_bytes(description.gradient_bytes_until_weight, rounded(need.input_gradient));
    description.workspace_bytes = std::max(description.workspace_bytes, need.layer.scratch);
  }
  const Shared shared = shared_of(needs);
  const std::size_t output = round_up(shared.output, kBufferAlignment);
  description.shared_gradient_bytes =
      sum_of_bytes({round_up(shared.gradients, kBufferAlignment), output, output});
  return description;
}

void SlotMemory::prepare(std::span<const Need> needs, int slots, bool split,
                         ComputeContext& compute) {
  slots_ = slots;
  split_ = split;
  places_.clear();
  BumpAllocator state, gradients;
  std::size_t scratch = 0;
  for (const Need& need : needs) {
    Place place{.need = need};
    place.until_input = take(state, need.layer.until_input);
    place.until_weight = take(state, need.layer.until_weight);
    place.output = take(state, need.output);
    if (split) {
      place.gradients = take(gradients, need.layer.gradients);
      place.input_gradient = take(gradients, need.input_gradient);
    }
    scratch = std::max(scratch, need.layer.scratch);
    places_.push_back(place);
  }
  if (!split) {
    const Shared shared = shared_of(needs);
    (void)take(gradients, shared.gradients);
    const std::size_t turns[] = {take(gradients, shared.output), take(gradients, shared.output)};
    for (std::size_t i = 0; i < places_.size(); ++i) places_[i].input_gradient = turns[i % 2];
  }
  slot_state_ = state.used();
  slot_gradients_ = gradients.used();
  const DeviceMemory& memory = compute.memory();
  state_ = memory.allocate(multiply_bytes(slot_state_, static_cast<std::size_t>(slots)));
  gradients_ =
      memory.allocate(multiply_bytes(slot_gradients_, split ? static_cast<std::size_t>(slots) : 1));
  scratch_ = memory.allocate(scratch);
  for (const Buffer* buffer : {&state_, &gradients_, &scratch_}) {
    fill_zero_async(buffer->data(), buffer->size(), compute.stream());
  }
}

bool SlotMemory::fits(std::size_t layer, const Need& need) const {
  const Need& had = places_[layer].need;
  return need.layer.until_input <= had.layer.until_input &&
         need.layer.until_weight <= had.layer.until_weight &&
         need.layer.gradients <= had.layer.gradients && need.layer.scratch <= had.layer.scratch &&
         need.output <= had.output && need.input_gradient <= had.input_gradient;
}

LayerCall SlotMemory::call(StageContext& ctx, std::size_t layer) const {
  const Place& place = places_[layer];
  const std::size_t state = static_cast<std::size_t>(ctx.slot) * slot_state_;
  return {.stage = ctx,
          .x = {},
          .until_input = at(state_, state + place.until_input),
          .until_weight = at(state_, state + place.until_weight),
          .gradients = at(gradients_, gradients_of(ctx.slot) + place.gradients),
          .scratch = at(scratch_, 0)};
}

std::byte* SlotMemory::output(int slot, std::size_t layer) const {
  return at(state_, static_cast<std::size_t>(slot) * slot_state_ + places_[layer].output);
}

std::byte* SlotMemory::input_gradient(int slot, std::size_t layer) const {
  return at(gradients_, gradients_of(slot) + places_[layer].input_gradient);
}

}  // namespace sluice
