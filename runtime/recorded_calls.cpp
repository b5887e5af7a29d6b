#include "runtime/recorded_calls.hpp"

#include <fmt/format.h>

#include "comm/error.hpp"

namespace sluice {

RecordedCalls::RecordedCalls(ComputeContext& compute, std::size_t actions, bool wanted)
    : compute_(compute) {
  if (!wanted || compute.device().kind == DeviceKind::kCpu) return;
  entries_.resize(actions);
  staged_ = HostBuffer(compute.device(), sizeof(Values));
  on_device_ = compute.memory().allocate(kDeviceBytes);
}

void RecordedCalls::begin_step(std::uint64_t step, double loss_scale) {
  values_ = {step, loss_scale};
  if (entries_.empty()) return;
  *reinterpret_cast<Values*>(staged_.data()) = values_;
  copy_async(on_device_.data(), staged_.data(), kDeviceBytes, compute_.stream());
}

StepValue<std::uint64_t> RecordedCalls::step() const {
  const auto* values = reinterpret_cast<const Values*>(on_device_.data());
  return {values_.step, values == nullptr ? nullptr : &values->step};
}

StepValue<double> RecordedCalls::loss_scale() const {
  const auto* values = reinterpret_cast<const Values*>(on_device_.data());
  return {values_.loss_scale, values == nullptr ? nullptr : &values->loss_scale};
}

bool RecordedCalls::Entry::fits(const StageContext& ctx) const {
  return phase == ctx.phase && samples.first == ctx.first_sample && samples.count == ctx.samples;
}

bool RecordedCalls::replay(const Entry& entry, const StageContext& ctx) const {
  if (entry.graph.empty() || !entry.fits(ctx)) return false;
  entry.graph.launch(compute_.stream());
  return true;
}

void RecordedCalls::make(Entry& entry, const StageContext& ctx, const std::function<void()>& call) {
  if (entry.calls == 0) {
    entry.phase = ctx.phase;
    entry.samples = {ctx.first_sample, ctx.samples};
  }
  if (!entry.fits(ctx) || entry.calls++ == 0) return call();
  try {
    entry.graph = Graph::record(compute_.stream(), call);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDevice) throw;
    throw Error(ErrorCode::kDevice,
                fmt::format("stage {} on {} cannot be recorded as a CUDA graph: {}; it can train "
                            "without --cuda-graphs",
                            ctx.stage, to_string(compute_.device()), error.what()));
  }
  entry.graph.launch(compute_.stream());
}

}  // namespace sluice
