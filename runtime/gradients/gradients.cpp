#include "runtime/gradients/gradients.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>
#include <sluice/options.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/engine/steady_seconds.hpp"
#include "runtime/job/guard.hpp"

namespace sluice {

namespace {

// A save has state by "kind.parameter", next to the model's parameters and buffers; a load finds it
// by the same name.
void require_savable(const std::vector<OptimizerState>& states,
                     std::span<Parameter* const> parameters, const ParameterTable& model) {
  std::set<std::string> owned, saved;
  for (const Parameter* parameter : parameters) owned.insert(parameter->name);
  for (const StageEntry& stage : model.stages) {
    for (const ParameterEntry& each : stage.parameters) saved.insert(each.name);
    for (const ParameterEntry& each : stage.buffers) saved.insert(each.name);
  }
  for (const OptimizerState& state : states) {
    const TensorSpec& spec = state.tensor.spec;
    if (!owned.contains(state.parameter)) {
      throw_usage(
          "the optimizer has state '{}' of '{}'; legal: of the {} parameters that the factory got",
          state.kind, state.parameter, parameters.size());
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

GradientSync::GradientSync(JobContext& job, const JobLayout& layout, const PipelineOptions& options,
                           ComputeContext& compute, NcclRoutes* nccl, TiedUses& ties,
                           std::vector<StageBinding> stages)
    : job_(job),
      layout_(layout),
      options_(options),
      compute_(compute),
      ties_(ties),
      stages_(std::move(stages)),
      mirror_(compute),
      square_offset_(loss_offset_ + 2 * at(options.shape.micro_batches)) {
  if (nccl != nullptr && nccl->sums()) {
    sums_.emplace(*nccl, compute, stages_, options.devices.bucket_bytes);
  }
  std::vector<OwnedParameter> owners;
  for (const StageBinding& binding : stages_) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    if (!sums_) job_.replicas.collectives->reserve_sum(set->flat_grads().size());
    const std::vector<Parameter*> parameters = set->all();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!layout_.parameters.is_owner(binding.index, static_cast<int>(i))) continue;
      owned_grads_.emplace_back(parameters[i]->grad.floats());
      owners.push_back({binding.index, parameters[i]});
    }
  }
  squares_ = HostBuffer(compute_.device(), owners.size() * sizeof(double));
  make_optimizers(owners);

  std::size_t most = 0;
  for (int rank = 0; rank < layout_.place.topology.pipeline; ++rank) {
    std::size_t count = 0;
    for (const int stage : layout_.plans.placement().stages_of(rank)) {
      count += layout_.parameters.stages[at(stage)].parameters.size();
    }
    most = std::max(most, count);
  }
  record_.resize(square_offset_ + most);
  if (job_.world.ranks->rank() == 0) {
    records_.resize(record_.size() * at(job_.world.ranks->size()));
    peaks_.resize(at(layout_.place.topology.pipeline));
    busy_.resize(at(job_.world.ranks->size()));
    next_.resize(at(layout_.place.topology.pipeline));
  }
}

std::string GradientSync::Updated::name() const {
  const std::string stages = first_stage == last_stage
                                 ? fmt::format("stage {}", first_stage)
                                 : fmt::format("stages {} to {}", first_stage, last_stage);
  return fmt::format("the optimizer of {} ({} parameter{}, the first '{}')", stages,
                     parameters.size(), parameters.size() == 1 ? "" : "s",
                     parameters.front()->name);
}

std::vector<OptimizerState> GradientSync::Updated::state() const {
  return calling([&] { return name() + ", state()"; }, [&] { return optimizer->state(); });
}

void GradientSync::make_optimizers(std::span<const OwnedParameter> owners) {
  const PipelineOptions::Training& training = options_.training;
  for (const auto& [stage, parameter] : owners) {
    const ParameterGroup* group = group_of(training.groups, parameter->name);
    frozen_.push_back(group != nullptr && group->frozen);
    if (frozen_.back()) continue;
    const double scale = group == nullptr ? 1 : group->learning_rate_scale;
    const std::optional<float> decay = group == nullptr ? std::nullopt : group->weight_decay;
    auto like = std::find_if(updated_.begin(), updated_.end(), [&](const Updated& each) {
      return each.rate_scale == scale && each.weight_decay == decay;
    });
    if (like == updated_.end()) {
      like = updated_.insert(like, {scale, decay, stage, stage, {}, nullptr});
    }
    like->last_stage = stage;
    like->parameters.push_back(parameter);
  }
  for (Updated& each : updated_) {
    if (training.make_optimizer) {
      try {
        each.optimizer = training.make_optimizer(each.parameters, compute_.memory());
      } catch (...) {
        rethrow_from("making " + each.name());
      }
      if (each.optimizer == nullptr) throw_usage("the factory made no optimizer");
      require_savable(each.state(), each.parameters, layout_.parameters);
      continue;
    }
    OptimizerConfig config = training.optimizer;
    if (each.weight_decay) {
      config.weight_decay = *each.weight_decay;
      for (Parameter* parameter : each.parameters) parameter->decay = true;
    }
    each.optimizer =
        sluice::make_optimizer(config, each.parameters, compute_.memory(), training.seed);
  }
}

std::vector<OptimizerState> GradientSync::optimizer_state() {
  std::vector<OptimizerState> all;
  for (const Updated& each : updated_) {
    std::vector<OptimizerState> states = each.state();
    std::move(states.begin(), states.end(), std::back_inserter(all));
  }
  return all;
}

void GradientSync::begin(std::uint64_t step, double started, int micro_batches, BatchEnd end,
                         const StepOutcome& outcome) {
  step_ = step;
  started_ = started;
  micro_batches_ = micro_batches;
  end_ = end;
  totals_ = {};
  outcome_ = &outcome;
}

double GradientSync::divisor(double targets) const {
  if (earlier_.divisor > 0) return earlier_.divisor;
  return targets > 0 ? targets : 1;
}

FinalGradients* GradientSync::final_gradients(int stage) {
  return sums_ && end_ != BatchEnd::kAccumulate ? sums_->final_gradients(stage) : nullptr;
}

void GradientSync::reduce_grad(int stage) {
  if (layout_.place.topology.replicas == 1 || end_ == BatchEnd::kAccumulate) return;
  if (sums_) return sums_->finish(stage);
  for (const StageBinding& binding : stages_) {
    if (binding.index != stage) continue;
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    set->settle_grads(compute_.stream());
    const std::span<float> sum = mirror_.read_back(set->flat_grads());
    job_.replicas.collectives->ordered_sum(sum, mirror_.owner(set->memory()));
    mirror_.write_back();
  }
}

void GradientSync::reduce_tied(int group) {
  if (end_ == BatchEnd::kAccumulate) return;
  if (sums_) sums_->wait_all_on_stream();
  ties_.sum_gradients(group);
}

void GradientSync::clear() {
  earlier_ = {};
  for (const StageBinding& binding : stages_) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    if (binding.stage->overwrites_gradients()) {
      set->forget_grads(compute_.stream());
    } else {
      set->zero_grads(compute_.stream());
    }
  }
}

void GradientSync::measure() {
  for (const StageBinding& binding : stages_) {
    if (ParameterSet* set = binding.parameters) set->settle_grads(compute_.stream());
  }
  if (end_ == BatchEnd::kAccumulate) return;
  if (sums_) sums_->wait_all_on_stream();
  sums_of_squares(compute_, owned_grads_, reinterpret_cast<double*>(squares_.data()));
}

void GradientSync::pack_record() {
  std::fill(record_.begin(), record_.end(), 0.0);
  for (std::size_t i = 0; i < outcome_->losses.size(); ++i) {
    record_[loss_offset_ + 2 * i] = outcome_->losses[i].sum;
    record_[loss_offset_ + 2 * i + 1] = outcome_->losses[i].weight;
  }
  if (end_ != BatchEnd::kAccumulate) {
    const auto* squares = reinterpret_cast<const double*>(squares_.data());
    for (std::size_t i = 0; i < owned_grads_.size(); ++i) {
      record_[square_offset_ + i] = frozen_[i] ? 0 : squares[i];
    }
  }
  record_[0] = steady_seconds() - started_;
  record_[1] = outcome_->busy_seconds;
  record_[2] = outcome_->peak_in_flight;
  record_[3] = flags_ ? flags_() : 0;
  record_[4] = options_.training.learning_rate.at(step_);
}

// On rank 0. Losses are added in order of batch, replica and micro-batch, whatever the number of
// the step's batches, squares in order of stage and parameter: neither order depends on the
// placement.
void GradientSync::reduce_records() {
  const auto record = [&](int replica, int rank) {
    return &records_[at(layout_.place.topology.rank_of(replica, rank)) * record_.size()];
  };
  const auto check = [&](double value, double index, double is_loss) {
    if (std::isfinite(value) || totals_.finite == 0) return;
    totals_.finite = 0;
    totals_.first_nonfinite_index = index;
    totals_.nonfinite_is_loss = is_loss;
  };
  totals_.loss_sum = earlier_.loss_sum;
  totals_.targets = earlier_.targets;
  for (int r = 0; r < layout_.place.topology.replicas; ++r) {
    for (int m = 0; m < micro_batches_; ++m) {
      const double sum = record(r, layout_.plans.last_rank())[loss_offset_ + 2 * at(m)];
      check(sum, r * micro_batches_ + m, 1);
      totals_.loss_sum += sum;
      totals_.targets += record(r, layout_.plans.last_rank())[loss_offset_ + 2 * at(m) + 1];
    }
  }
  double squares = 0;
  std::fill(next_.begin(), next_.end(), square_offset_);
  double index = 0;
  for (int s = 0; s < layout_.plans.num_stages(); ++s) {
    const int rank = layout_.plans.placement().rank_of(s);
    for (std::size_t i = 0; i < layout_.parameters.stages[at(s)].parameters.size(); ++i, ++index) {
      if (!layout_.parameters.is_owner(s, static_cast<int>(i))) continue;
      const double square = record(0, rank)[next_[at(rank)]++];
      check(square, index, 0);
      squares += square;
    }
  }
  totals_.grad_norm = std::sqrt(squares);
  std::uint32_t flags = 0;
  for (int rank = 0; rank < job_.world.ranks->size(); ++rank) {
    const double* values = &records_[at(rank) * record_.size()];
    totals_.window_seconds = std::max(totals_.window_seconds, values[0]);
    totals_.busy_seconds += values[1];
    busy_[at(rank)] = values[1];
    flags |= static_cast<std::uint32_t>(values[3]);
    if (values[4] == records_[4] || totals_.other_rate_rank >= 0) continue;
    totals_.other_rate_rank = rank;
    totals_.rate = records_[4];
    totals_.other_rate = values[4];
  }
  totals_.flags = flags;
  for (int rank = 0; rank < layout_.place.topology.pipeline; ++rank) {
    peaks_[at(rank)] = static_cast<int>(record(0, rank)[2]);
  }
}

Error GradientSync::refusal() const {
  if (totals_.other_rate_rank >= 0) {
    return {ErrorCode::kMismatch,
            fmt::format("ranks disagree about the learning rate of step {}: rank 0 has {}, rank {} "
                        "has {}; no parameter was changed",
                        step_, totals_.rate, totals_.other_rate_rank, totals_.other_rate),
            static_cast<int>(totals_.other_rate_rank)};
  }
  if (totals_.finite != 0) {
    return {ErrorCode::kData, fmt::format("step {} has no target that counts", step_), 0};
  }
  auto index = static_cast<std::size_t>(std::max(totals_.first_nonfinite_index, 0.0));
  std::string what;
  if (totals_.first_nonfinite_index < 0) {
    what = fmt::format("the {} of step {} over {} targets is not finite",
                       totals_.nonfinite_is_loss != 0 ? "mean loss" : "norm of the mean gradient",
                       step_, totals_.targets);
  } else if (totals_.nonfinite_is_loss != 0) {
    const std::size_t micro_batches = at(micro_batches_);
    what = fmt::format("the loss of step {} is not finite, first in micro-batch {} of replica {}",
                       step_, index % micro_batches, index / micro_batches);
  } else {
    auto stage = layout_.parameters.stages.begin();
    for (; index >= stage->parameters.size(); ++stage) index -= stage->parameters.size();
    what = fmt::format("the gradient of step {} is not finite, first in parameter '{}'", step_,
                       stage->parameters[index].name);
  }
  return {ErrorCode::kNumeric,
          what +
              "; no parameter was changed (a smaller learning rate or a bound on the "
              "gradient's norm may help, where the data has no such number)",
          0};
}

void GradientSync::exchange() {
  pack_record();
  job_.world.collectives->gather(std::as_bytes(std::span(record_)),
                                 std::as_writable_bytes(std::span(records_)), 0);
  if (job_.world.ranks->rank() == 0) reduce_records();
  job_.world.collectives->broadcast(std::as_writable_bytes(std::span(&totals_, 1)), 0);
}

void GradientSync::scale_gradients(double factor) {
  if (factor == 1) return;
  for (const StageBinding& binding : stages_) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    for (float& value : mirror_.read_back(set->flat_grads())) value *= static_cast<float>(factor);
    mirror_.write_back();
  }
}

void GradientSync::check_means() {
  if (totals_.finite == 0 || totals_.targets <= 0) return;
  const bool loss = std::isfinite(totals_.loss) && std::isfinite(totals_.targets);
  if (loss && std::isfinite(totals_.grad_norm) && std::isfinite(static_cast<float>(factor_)))
    return;
  totals_.finite = 0;
  totals_.nonfinite_is_loss = loss ? 0 : 1;
}

// The gradients are sums of 1/divisor of each loss. Once all batches are known, they are multiplied
// by divisor/targets. That is 1 for a single batch.
void GradientSync::optimizer() {
  exchange();
  const double divisor = this->divisor(totals_.targets);
  earlier_.loss_sum = totals_.loss_sum;
  earlier_.targets = totals_.targets;
  earlier_.window_seconds += totals_.window_seconds;
  earlier_.busy_seconds += totals_.busy_seconds;
  earlier_.divisor = divisor;
  totals_.loss = totals_.loss_sum / totals_.targets;
  totals_.window_seconds = earlier_.window_seconds;
  totals_.busy_seconds = earlier_.busy_seconds;
  factor_ = totals_.targets > 0 ? divisor / totals_.targets : 1;
  totals_.grad_norm *= factor_;
  check_means();
  if (refused()) return;
  if (end_ == BatchEnd::kUpdate) return apply();
  if (end_ == BatchEnd::kGradients) scale_gradients(std::exchange(factor_, 1));
}

void GradientSync::update(double started) {
  started_ = started;
  end_ = BatchEnd::kUpdate;
  const StepTotals before = totals_;
  totals_ = {};
  micro_batches_ = 0;
  if (sums_) sums_->wait_all_on_stream();
  sums_of_squares(compute_, owned_grads_, reinterpret_cast<double*>(squares_.data()));
  compute_.wait();
  exchange();
  totals_.loss = before.loss;
  totals_.targets = before.targets;
  totals_.window_seconds += before.window_seconds;
  totals_.busy_seconds = before.busy_seconds;
  if (!refused()) apply();
}

void GradientSync::apply() {
  const double factor = clip_factor(totals_.grad_norm, options_.training.clip);
  ties_.mark_values_changed();  // then optimizers say which copies they have written
  for (const Updated& each : updated_) {
    try {
      each.optimizer->update(compute_, step_, static_cast<float>(record_[4] * each.rate_scale),
                             static_cast<float>(factor * factor_));
    } catch (...) {
      rethrow_from(fmt::format("{}, update() of step {}", each.name(), step_));
    }
  }
  ties_.broadcast_tied_values();
}

}  // namespace sluice
