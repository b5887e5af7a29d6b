#include "runtime/gradients/stage_buffers.hpp"

#include <cstddef>
#include <functional>

namespace sluice {

StageBuffers::StageBuffers(JobContext& job, ComputeContext& compute, HostMirror& mirror,
                           std::span<const StageBinding> stages)
    : job_(job), compute_(compute), mirror_(mirror) {
  for (const StageBinding& binding : stages) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr || set->flat_buffers().empty()) continue;
    kept_.push_back({set, compute.memory().allocate(set->flat_buffers().size_bytes())});
  }
}

void StageBuffers::keep() {
  for (const Kept& kept : kept_) {
    const std::span<float> now = kept.set->flat_buffers();
    copy_async(kept.copy.data(), now.data(), now.size_bytes(), compute_.stream());
  }
}

void StageBuffers::restore() {
  for (const Kept& kept : kept_) {
    const std::span<float> now = kept.set->flat_buffers();
    copy_async(now.data(), kept.copy.data(), now.size_bytes(), compute_.stream());
  }
}

Tensor StageBuffers::kept(const Tensor& value) const {
  const auto* const data = value.as<const std::byte>();
  for (const Kept& kept : kept_) {
    const std::span<const std::byte> now = std::as_bytes(kept.set->flat_buffers());
    if (std::less<>()(data, now.data()) || !std::less<>()(data, now.data() + now.size())) continue;
    Tensor copy = value;
    copy.data = static_cast<std::byte*>(kept.copy.data()) + (data - now.data());
    return copy;
  }
  return value;
}

void StageBuffers::join() {
  Collectives& replicas = *job_.replicas.collectives;
  const int count = job_.place.topology.replicas;
  if (count == 1) return;
  for (const Kept& kept : kept_) {
    for (Parameter* buffer : kept.set->buffers()) {
      if (buffer->across == Across::kNothing) continue;
      const std::span<float> values = mirror_.read_back(buffer->value.floats());
      if (buffer->across == Across::kFirst) {
        replicas.broadcast(std::as_writable_bytes(values), 0);
      } else {
        replicas.ordered_sum(values, mirror_.owner(buffer->memory));
        for (float& value : values) value /= static_cast<float>(count);
      }
      mirror_.write_back();
    }
  }
}

}  // namespace sluice
