#include "stages/layers/residual.hpp"

#include <algorithm>

#include "comm/base/throw_error.hpp"

namespace sluice::nn {

TensorSpec ResidualLayer::output(const TensorSpec& input) const {
  require_stream(input, options_.stream, options_.width, options_.context);
  return input;
}

void ResidualLayer::add_parameters(ParameterSet& set, const std::string& name) {
  norm_.emplace(options_.norm, name + options_.norm_name, options_.width, options_.norm_epsilon,
                set, options_.shards);
  branch_ = make_(options_, name, set);
}

ResidualLayer::Kept ResidualLayer::allocate(const BlockShape& shape,
                                            LayerAllocators& memory) const {
  const std::int64_t rows = shape.rows(), width = options_.width;
  const DType precision = options_.precision, result = options_.result().alone;
  Kept kept;
  kept.normed = memory.until_weight.tensor(precision, rows, width);
  kept.stats = memory.until_weight.tensor(DType::kF32, rows, norm_->stats_per_row());
  kept.dnormed = memory.gradients.tensor(precision, rows, width);
  if (!drops()) return kept;
  kept.dbranch = memory.gradients.tensor(precision, rows, width);
  if (result != options_.stream) kept.branch = memory.scratch.tensor(result, rows, width);
  return kept;
}

LayerNeeds ResidualLayer::needs(const TensorSpec& input, ComputeContext& compute) const {
  const BlockShape shape = block_shape(input, compute.device().kind, options_.by_sample_from);
  LayerAllocators memory;
  (void)allocate(shape, memory);
  LayerNeeds needs = branch_->needs(compute, shape, memory);
  needs.operator_bytes = std::max(needs.operator_bytes, norm_->workspace(compute, shape.rows()));
  return needs;
}

LayerPromises ResidualLayer::promises() const {
  return {.recomputes = true,
          .keeps_alone = true,
          .capturable = true,
          .in_place = true,
          .reads_rounded = options_.precision != options_.stream && !drops(),
          .writes_rounded = true};
}

double ResidualLayer::cost(const TensorSpec& input) const {
  return options_.cost(input.shape[1]) * static_cast<double>(input.shape[0]);
}

ResidualLayer::Made ResidualLayer::made_of(LayerCall& call) const {
  const BlockShape shape =
      block_shape(call.x.spec, call.compute().device().kind, options_.by_sample_from);
  LayerAllocators memory(call);
  const Kept kept = allocate(shape, memory);
  return {{call, shape, memory}, kept, as_rows(call.x)};
}

Dropout ResidualLayer::dropped(const Made& made) const {
  return options_.output.at(made.call.layer, made.call.shape.sequence * options_.width);
}

void ResidualLayer::keep_again(LayerCall& call, const Tensor& /*y*/) {
  const Made made = made_of(call);
  norm_->forward(call.compute(), made.x, made.kept.normed, made.kept.stats);
  branch_->keep(made.call, made.kept.normed);
}

void ResidualLayer::forward(LayerCall& call, const Tensor& y) {
  keep_again(call, y);
  const Made made = made_of(call);
  const Tensor out = as_rows(y);
  if (!options_.output.active(call)) return branch_->result(made.call, made.x, out);
  const Tensor branch = made.kept.branch.data != nullptr ? made.kept.branch : out;
  branch_->result(made.call, {}, branch);
  dropout_residual(call.compute(), branch, dropped(made), made.x, out);
}

Tensor ResidualLayer::branch_gradient(const Made& made, const Tensor& dy) const {
  if (drops()) return made.kept.dbranch;
  return as_rows(operand_gradient(made.call.layer, dy));
}

void ResidualLayer::backward_branch(const Made& made, const Tensor& dy) {
  if (options_.output.active(made.call.layer)) {
    dropout(made.call.compute(), as_rows(dy), dropped(made), made.kept.dbranch);
  }
  branch_->backward_input(made.call, branch_gradient(made, dy), made.kept.dnormed);
}

void ResidualLayer::backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) {
  const Made made = made_of(call);
  backward_branch(made, dy);
  norm_->backward_input(call.compute(), made.kept.dnormed, made.x, made.kept.stats, as_rows(dy),
                        {as_rows(dx), as_rows(call.rounded_dx)});
}

void ResidualLayer::backward_weight(LayerCall& call, const Tensor& dy) {
  const Made made = made_of(call);
  branch_->backward_weight(made.call, made.kept.normed, branch_gradient(made, dy));
  norm_->backward_weight(call.compute(), made.call.shape, made.kept.dnormed, made.x,
                         made.kept.stats);
}

void ResidualLayer::backward(LayerCall& call, const Tensor& dy, const Tensor& dx) {
  // The branch's weight gradient reads dy, which the norm may then turn into dx.
  const Made made = made_of(call);
  backward_branch(made, dy);
  branch_->backward_weight(made.call, made.kept.normed, branch_gradient(made, dy));
  norm_->backward(call.compute(), made.call.shape, made.kept.dnormed, made.x, made.kept.stats,
                  as_rows(dy), {as_rows(dx), as_rows(call.rounded_dx)});
}

}  // namespace sluice::nn
