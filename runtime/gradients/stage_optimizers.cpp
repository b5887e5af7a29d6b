#include "runtime/gradients/stage_optimizers.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "comm/base/throw_error.hpp"
#include "runtime/group/guard.hpp"

namespace sluice {
namespace {

// A save has state by "kind.parameter", next to the model's parameters and buffers; a load finds it
// by the same name, and its elements by their places in the parameter.
void require_savable(const std::vector<OptimizerState>& states,
                     std::span<const ParameterSlice> slices, const ParameterTable& model) {
  std::map<std::string_view, const ParameterSlice*> owned;
  std::set<std::string> saved;
  std::set<std::string_view> divided;  // among ranks: their states make up the whole
  for (const ParameterSlice& slice : slices) owned.emplace(slice.parameter->name, &slice);
  for (const StageEntry& stage : model.stages) {
    for (const ParameterEntry& each : stage.parameters) {
      saved.insert(each.name);
      if (!each.ends.empty() || !each.slice.all()) divided.insert(each.name);
    }
    for (const ParameterEntry& each : stage.buffers) saved.insert(each.name);
  }
  for (const OptimizerState& state : states) {
    const TensorSpec& spec = state.tensor.spec;
    const auto found = owned.find(state.parameter);
    if (found == owned.end()) {
      throw_usage(
          "the optimizer has state '{}' of '{}'; legal: of the {} parameters that the factory got",
          state.kind, state.parameter, slices.size());
    }
    const ParameterSlice& slice = *found->second;
    const std::int64_t elements = spec.shape.elements(), end = slice.first + slice.count;
    const bool needs_all = divided.contains(state.parameter);
    if (state.first != slice.first ||
        (needs_all ? elements != slice.count : elements > slice.count)) {
      throw_usage(
          "the optimizer's state '{}' of '{}' has {} elements from {} on; legal: {} elements {} to "
          "below {}, which the factory got{}",
          state.kind, state.parameter, elements, state.first, needs_all ? "all of" : "of",
          slice.first, end, needs_all ? "" : ", from the first on");
    }
    if (spec.dtype != DType::kF32 && spec.dtype != DType::kBf16) {
      throw_usage("the optimizer's state '{}' of '{}' is {}; legal: f32 and bf16", state.kind,
                  state.parameter, to_string(spec));
    }
    if (state.tensor.data == nullptr && spec.bytes() > 0) {
      throw_usage("the optimizer's state '{}' of '{}' has null data; legal: memory of its own",
                  state.kind, state.parameter);
    }
    if (!saved.insert(state.kind + "." + state.parameter).second) {
      throw_usage(
          "the optimizer's state '{}' of '{}' has a name in saves, '{}.{}', that something else "
          "has too; legal: another kind",
          state.kind, state.parameter, state.kind, state.parameter);
    }
  }
}

}  // namespace

StageOptimizers::StageOptimizers(JobContext& job, const PipelineOptions& options,
                                 std::span<const OwnedParameter> owners,
                                 const ParameterTable& model, ComputeContext& compute)
    : compute_(compute), model_(model), own_(options.training.make_optimizer) {
  const PipelineOptions::Training& training = options.training;
  for (const OwnedParameter& owner : owners) add(training, owner);
  make_offloaded(job, options);
  for (Updated& each : updated_) {
    if (training.make_optimizer) {
      each.optimizer =
          calling([&] { return "making " + each.name(); },
                  [&] { return training.make_optimizer(each.slices, compute_.memory()); });
      if (each.optimizer == nullptr) throw_usage("the factory made no optimizer");
      (void)state_of(each);
      continue;
    }
    OptimizerConfig config = training.optimizer;
    if (each.weight_decay) {
      config.weight_decay = *each.weight_decay;
      for (const ParameterSlice& slice : each.slices) slice.parameter->decay = true;
    }
    each.optimizer = sluice::make_optimizer(config, each.slices, compute_.memory(), training.seed,
                                            offloaded_.get());
  }
}

void StageOptimizers::add(const PipelineOptions::Training& training, const OwnedParameter& owner) {
  const auto& [stage, parameter, part] = owner;
  const ParameterGroup* group = group_of(training.groups, parameter->name);
  const bool frozen = group != nullptr && group->frozen;
  if (frozen || (part.count == 0 && parameter->shape.elements() > 0)) return;
  const double scale = group == nullptr ? 1 : group->learning_rate_scale;
  const std::optional<float> decay = group == nullptr ? std::nullopt : group->weight_decay;
  auto like = std::find_if(updated_.begin(), updated_.end(), [&](const Updated& each) {
    return each.rate_scale == scale && each.weight_decay == decay;
  });
  if (like == updated_.end()) {
    like = updated_.insert(like, {scale, decay, stage, stage, {}, nullptr});
  }
  like->last_stage = stage;
  like->slices.push_back({parameter, part.first, part.count});
}

void StageOptimizers::make_offloaded(JobContext& job, const PipelineOptions& options) {
  if (options.offload.optimizer == PipelineOptions::Offload::To::kNowhere) return;
  std::size_t bytes = 0;
  for (const Updated& each : updated_) {
    for (const ParameterSlice& slice : each.slices) {
      bytes += optimizer_bytes(options.training.optimizer, slice.count);
    }
  }
  const auto sizes =
      OffloadedState::Sizes::of(options.training.optimizer, bytes, options.offload.pool);
  if (sizes.bytes == 0) return;
  offloaded_ = std::make_unique<OffloadedState>(sizes, options.offload, job.world.watch.get(),
                                                job.activity.get());
}

std::string StageOptimizers::Updated::name() const {
  const std::string stages = first_stage == last_stage
                                 ? fmt::format("stage {}", first_stage)
                                 : fmt::format("stages {} to {}", first_stage, last_stage);
  return fmt::format("the optimizer of {} ({} parameter{}, the first '{}')", stages, slices.size(),
                     slices.size() == 1 ? "" : "s", slices.front().parameter->name);
}

std::vector<OptimizerState> StageOptimizers::state_of(const Updated& each) const {
  std::vector<OptimizerState> states =
      calling([&] { return each.name() + ", state()"; }, [&] { return each.optimizer->state(); });
  if (own_) require_savable(states, each.slices, model_);
  return states;
}

std::vector<OptimizerState> StageOptimizers::state() const {
  std::vector<OptimizerState> all;
  for (const Updated& each : updated_) {
    std::vector<OptimizerState> states = state_of(each);
    std::move(states.begin(), states.end(), std::back_inserter(all));
  }
  return all;
}

void StageOptimizers::update(std::uint64_t step, double rate, double factor) {
  for (const Updated& each : updated_) {
    calling([&] { return fmt::format("{}, update() of step {}", each.name(), step); },
            [&] {
              each.optimizer->update(compute_, step, static_cast<float>(rate * each.rate_scale),
                                     static_cast<float>(factor));
            });
  }
}

}  // namespace sluice
