#include "runtime/engine/recorded_calls.hpp"

#include <algorithm>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {

RecordedCalls::RecordedCalls(ComputeContext& compute, std::size_t actions, bool wanted)
    : compute_(compute) {
  if (!wanted || compute.device().kind == DeviceKind::kCpu) return;
  entries_.resize(actions);
  to_record_ = true;
  staged_ = HostBuffer(compute.device(), sizeof(Values));
  on_device_ = compute.memory().allocate(kDeviceBytes);
  const auto* values = reinterpret_cast<const Values*>(on_device_.data());
  step_.on_device = &values->step;
  loss_scale_.on_device = &values->loss_scale;
}

void RecordedCalls::begin_step(std::uint64_t step, double loss_scale) {
  step_.value = step;
  loss_scale_.value = loss_scale;
  if (entries_.empty()) return;
  *reinterpret_cast<Values*>(staged_.data()) = {step, loss_scale};
  copy_async(on_device_.data(), staged_.data(), kDeviceBytes, compute_.stream());
}

bool RecordedCalls::Entry::fits(const StageContext& ctx) const {
  return phase == ctx.phase && shape == UnitShape{ctx.samples, ctx.positions} &&
         first_sample == ctx.first_sample && first_position == ctx.first_position &&
         std::all_of(gradients.begin(), gradients.end(), [](const Written& each) {
           return each.parameter->is_stale() == each.overwritten;
         });
}

bool RecordedCalls::replay(const Entry& entry, const StageContext& ctx) const {
  if (entry.graph.empty() || !entry.fits(ctx)) return false;
  if (entry.workspace != ContextAccess::workspace_place(compute_)) return false;
  entry.graph.launch(compute_.stream());
  for (const Entry::Written& each : entry.gradients)
    GradientAccess::set_stale(*each.parameter, false);
  return true;
}

void RecordedCalls::note(Entry& entry, const StageContext& ctx) {
  if (entry.is_made) return;
  entry.is_made = true;
  entry.phase = ctx.phase;
  entry.shape = {ctx.samples, ctx.positions};
  entry.first_sample = ctx.first_sample;
  entry.first_position = ctx.first_position;
}

void RecordedCalls::record(std::size_t action, Stage& stage, const StageContext& ctx,
                           const std::function<void()>& call) {
  Entry& entry = entries_[action];
  if (!stage.graph_capturable() || !entry.is_made || !entry.fits(ctx)) return;
  entry.workspace = ContextAccess::workspace_place(compute_);
  std::vector<Parameter*> parameters;
  if (ParameterSet* set = stage.parameters()) parameters = set->all();
  for (Parameter* each : parameters) {
    (void)GradientAccess::take_asked(*each);
    entry.gradients.push_back({each, each->is_stale()});
  }
  try {
    entry.graph = Graph::record(compute_.stream(), call);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDevice) throw;
    throw_error(ErrorCode::kDevice,
                "cannot be recorded as a CUDA graph on {}: {}; it can train without --cuda-graphs",
                to_string(compute_.device()), error.what());
  }
  std::erase_if(entry.gradients, [](const Entry::Written& each) {
    return !GradientAccess::take_asked(*each.parameter);
  });
}

}  // namespace sluice
