#include "runtime/gradients/gradients.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/base/index.hpp"
#include "stages/compute/call_arguments.hpp"
#include "stages/compute/internal_operators.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice {

GradientSync::GradientSync(JobContext& job, const JobLayout& layout, const PipelineOptions& options,
                           ComputeContext& compute, NcclRoutes* nccl, HostMirror& mirror,
                           TiedUses& ties, StageBuffers& buffers, std::vector<StageBinding> stages,
                           StepState& step)
    : layout_(layout),
      options_(options),
      compute_(compute),
      ties_(ties),
      buffers_(buffers),
      stages_(std::move(stages)),
      step_(step),
      record_(job, layout, options),
      mirror_(mirror) {
  std::erase_if(stages_, [](const StageBinding& each) { return each.parameters == nullptr; });
  shares_.emplace(job, compute, mirror, stages_);
  folds_.emplace(compute, stages_, layout.place.shares);
  NcclRoutes* const of_sums = nccl != nullptr && nccl->sums() ? nccl : nullptr;
  sums_.emplace(job, layout, of_sums, compute, mirror, stages_, options.expert.bucket_bytes);
  if (layout.parameters.sums_each_micro_batch) {
    micro_batches_.emplace(job.group(Axis::kReplica).collectives->sums(), layout, of_sums, compute,
                           mirror, stages_, options.expert.bucket_bytes);
  }
  std::vector<OwnedParameter> owners;
  const int replica = layout_.place.here.replica;
  std::size_t bytes = 0;
  for (const StageBinding& binding : stages_) {
    const std::vector<Parameter*> parameters = binding.parameters->all();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!layout_.parameters.is_owner(binding.index, static_cast<int>(i))) continue;
      const ParameterEntry& entry = layout_.parameters.stages[at(binding.index)].parameters[i];
      for (const ElementRange& squared : RecordExchange::squared_parts(entry, replica)) {
        owned_grads_.push_back({parameters[i]->grad.as<float>() + squared.first,
                                static_cast<std::size_t>(squared.count)});
        frozen_.push_back(!entry.updated);
        bytes += block_sum_bytes(squared.count);
      }
      owners.push_back({binding.index, parameters[i], entry.part(replica)});
    }
  }
  squares_ = HostBuffer(compute_.device(), bytes);
  optimizers_.emplace(job, options, owners, layout_.parameters, compute_);
}

// Those of the last backward's virtual replica are not the step's.
FinalGradients* GradientSync::final_gradients(int stage) {
  if (micro_batches_) return micro_batches_->begin(stage);
  if (step_.end == BatchEnd::kAccumulate || layout_.place.shares > 1) return nullptr;
  return sums_->final_gradients(stage, step_.end == BatchEnd::kGradients);
}

void GradientSync::end_gradients(int stage) { micro_batches_->end(stage); }

void GradientSync::fold_forward(int stage, int leaf) {
  buffers_.fold(stage, leaf);
  folds_->fold(stage, leaf, /*by_loss=*/true);
}

void GradientSync::fold_backward(int stage, int leaf) {
  shares_->join(stage);
  folds_->fold(stage, leaf, /*by_loss=*/false);
}

void GradientSync::reduce_grad(int stage) {
  if (step_.end == BatchEnd::kAccumulate) return;
  if (layout_.place.shares == 1) shares_->join(stage);
  if (layout_.place.topology.size.replica == 1) return;
  if (micro_batches_) return micro_batches_->reduce(stage);
  sums_->finish(stage, step_.end == BatchEnd::kGradients);
}

std::optional<TimeSpan> GradientSync::end_sums(int stage) {
  if (micro_batches_) micro_batches_->end_sum(stage);
  return sums_->end(stage);
}

void GradientSync::reduce_tied(int group) {
  if (step_.end == BatchEnd::kAccumulate) return;
  sums_->wait_all_on_stream();
  ties_.sum_gradients(group, step_.end == BatchEnd::kGradients);
}

void GradientSync::clear() {
  step_.forget_batches();
  for (const StageBinding& binding : stages_) {
    if (binding.stage->overwrites_gradients()) {
      GradientAccess::mark_stale(*binding.parameters, compute_.stream());
    } else {
      binding.parameters->zero_grads(compute_.stream());
    }
  }
  if (micro_batches_) micro_batches_->clear();
}

void GradientSync::measure() {
  for (const StageBinding& binding : stages_)
    GradientAccess::zero_stale(*binding.parameters, compute_.stream());
  if (step_.end != BatchEnd::kAccumulate) square_gradients();
}

void GradientSync::square_gradients() {
  sums_->wait_all_on_stream();
  sums_of_squares(compute_, owned_grads_, reinterpret_cast<double*>(squares_.data()));
}

std::span<const double> GradientSync::squares() {
  auto* const squares = reinterpret_cast<double*>(squares_.data());
  double* next = squares;
  for (std::size_t i = 0; i < owned_grads_.size(); ++i) {
    double* const end = next + sum_blocks(std::ssize(owned_grads_[i]));
    if (frozen_[i]) std::fill(next, end, 0.0);
    next = end;
  }
  return {squares, next};
}

void GradientSync::scale_gradients(double factor) {
  if (factor == 1) return;
  for (const StageBinding& binding : stages_) {
    for (float& value : mirror_.read_back(binding.parameters->flat_grads())) {
      value *= static_cast<float>(factor);
    }
    mirror_.write_back();
  }
}

void GradientSync::check_means() {
  StepTotals& totals = step_.totals;
  if (totals.finite == 0 || totals.targets <= 0) return;
  const bool loss = std::isfinite(totals.loss) && std::isfinite(totals.targets);
  const bool factor = std::isfinite(static_cast<float>(step_.factor));
  if (loss && std::isfinite(totals.grad_norm) && factor) return;
  totals.finite = 0;
  totals.nonfinite_is_loss = loss ? 0 : 1;
}

// The gradients are sums of 1/divisor of each loss. Once all batches are known, they are multiplied
// by divisor/targets. That is 1 for a single batch.
void GradientSync::optimizer() {
  record_.exchange(step_, *outcome_,
                   step_.end == BatchEnd::kAccumulate ? std::span<const double>() : squares());
  StepTotals& totals = step_.totals;
  StepState::Earlier& earlier = step_.earlier;
  const double divisor = step_.divisor(totals.targets);
  earlier.loss_sum = totals.loss_sum;
  earlier.targets = totals.targets;
  earlier.window_seconds += totals.window_seconds;
  earlier.busy_seconds += totals.busy_seconds;
  earlier.divisor = divisor;
  totals.loss = totals.loss_sum / totals.targets;
  totals.window_seconds = earlier.window_seconds;
  totals.busy_seconds = earlier.busy_seconds;
  step_.factor = totals.targets > 0 ? divisor / totals.targets : 1;
  totals.grad_norm *= step_.factor;
  check_means();
  if (step_.refused()) return;
  if (step_.end == BatchEnd::kUpdate) return apply();
  if (step_.end == BatchEnd::kGradients) scale_gradients(std::exchange(step_.factor, 1));
}

void GradientSync::update(double started) {
  const StepTotals before = step_.totals;
  step_.begin_batch(started, 0, BatchEnd::kUpdate);
  square_gradients();
  compute_.wait();
  record_.exchange(step_, *outcome_, squares());
  StepTotals& totals = step_.totals;
  totals.loss = before.loss;
  totals.targets = before.targets;
  totals.window_seconds += before.window_seconds;
  totals.busy_seconds = before.busy_seconds;
  if (!step_.refused()) apply();
}

void GradientSync::apply() {
  const double factor = clip_factor(step_.totals.grad_norm, options_.training.clip);
  ties_.mark_values_changed();  // then optimizers say which copies they have written
  optimizers_->update(step_.number, record_.learning_rate(), factor * step_.factor);
  sums_->gather_values();
  ties_.broadcast_tied_values();
}

}  // namespace sluice
