#include "stages/tensor/stale_gradients.hpp"

#include <algorithm>
#include <utility>

namespace sluice {

namespace {

void zero(const Parameter& parameter, StreamView stream) {
  fill_zero_async(parameter.grad.data, parameter.grad.spec.bytes(), stream);
}

}  // namespace

void ParameterSet::zero_grads(StreamView stream) {
  const std::span<float> grads = flat_grads();
  if (!grads.empty()) fill_zero_async(grads.data(), grads.size_bytes(), stream);
  if (memory_->shares.size() > 0) {
    fill_zero_async(memory_->shares.data(), memory_->shares.size(), stream);
  }
  GradientAccess::set_stale(*this, false);
}

void GradientAccess::set_stale(ParameterSet& set, bool stale) {
  for (Parameter& parameter : set.parameters_) set_stale(parameter, stale);
}

void GradientAccess::mark_stale(ParameterSet& set, StreamView stream) {
  if (set.flat_grads().empty()) return;
  if (const Buffer& shares = set.memory_->shares; shares.size() > 0) {
    fill_zero_async(set.memory_->shares.data(), shares.size(), stream);
  }
  for (Parameter& parameter : set.parameters_) {
    set_stale(parameter, true);
    if (!parameter.is_stale()) zero(parameter, stream);
  }
}

void GradientAccess::zero_stale(ParameterSet& set, StreamView stream, std::size_t begin,
                                bool joined) {
  for (Parameter& parameter : set.parameters_) {
    if (!joined && !parameter.share_grads.empty()) continue;
    if (parameter.grad.as<float>() >= set.flat_grads().data() + begin) {
      zero_if_stale(parameter, stream);
    }
  }
}

// Asks as a write does: where the call is recorded, a replay zeroes too.
void zero_if_stale(Parameter& parameter, StreamView stream) {
  if (GradientAccess::next(parameter) == Write::kOverwrite) zero(parameter, stream);
}

Write next_write(std::initializer_list<Parameter*> parameters, StreamView stream) {
  bool all_stale = true;
  for (const Parameter* parameter : parameters) {
    if (parameter != nullptr && !parameter->is_stale()) all_stale = false;
  }
  for (Parameter* parameter : parameters) {
    if (parameter == nullptr) continue;
    if (GradientAccess::next(*parameter) == Write::kOverwrite && !all_stale) {
      zero(*parameter, stream);
    }
  }
  return all_stale ? Write::kOverwrite : Write::kAdd;
}

GradientsAside::GradientsAside(ParameterSet& set, const DeviceMemory& memory) {
  std::size_t bytes = 0;
  for (Parameter* parameter : set.all()) {
    if (parameter->grad.data == nullptr) continue;
    const std::vector<Tensor>& shares = parameter->share_grads;
    had_.push_back({parameter, parameter->grad.data, parameter->is_stale(), shares});
    if (parameter->is_stale() && shares.empty()) continue;
    bytes = std::max(bytes, parameter->grad.spec.bytes());
  }
  if (bytes == 0) return;
  memory_ = memory.allocate(bytes, DeviceMemory::Use::kTemporary);
  for (const Had& had : had_) {
    if (!had.stale) had.parameter->grad.data = memory_.data();
    for (Tensor& share : had.parameter->share_grads) share.data = memory_.data();
  }
}

GradientsAside::~GradientsAside() {
  for (Had& had : had_) {
    had.parameter->grad.data = had.data;
    had.parameter->share_grads = std::move(had.shares);
    GradientAccess::set_stale(*had.parameter, had.stale);
  }
}

}  // namespace sluice
