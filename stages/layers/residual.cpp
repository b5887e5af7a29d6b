#include "stages/layers/residual.hpp"

#include <algorithm>

#include "comm/base/throw_error.hpp"

namespace sluice::nn {

TensorSpec ResidualLayer::output(const TensorSpec& input) const {
  require_stream(input, options_.stream, options_.width, options_.context, options_.shards);
  return input;
}

void ResidualLayer::add_parameters(ParameterSet& set, const std::string& name) {
  norm_.emplace(options_.norm, name + options_.norm_name, options_.width, options_.norm_epsilon,
                set, options_.shards);
  branch_ = make_(options_, name, set);
}

StreamShape ResidualLayer::shape_of(const TensorSpec& input, ComputeContext& compute) const {
  return stream_shape(input, options_.shards, compute.device().kind, options_.by_sample_from);
}

ResidualLayer::Kept ResidualLayer::allocate(const StreamShape& shape,
                                            LayerAllocators& memory) const {
  const std::int64_t all = shape.whole.rows(), rows = shape.mine.rows(), width = options_.width;
  const DType precision = options_.precision, result = options_.result().alone;
  Kept kept;
  kept.normed = memory.until_weight.tensor(precision, all, width);
  kept.stats = memory.until_weight.tensor(DType::kF32, rows, norm_->stats_per_row());
  kept.dnormed = memory.gradients.tensor(precision, rows, width);
  if (drops() || shape.dealt) kept.dbranch = memory.gradients.tensor(precision, all, width);
  if (drops() && result != options_.stream) {
    kept.branch = memory.scratch.tensor(result, rows, width);
  }
  kept.mine = shape.dealt ? memory.scratch.tensor(precision, rows, width) : Tensor{};
  return kept;
}

LayerNeeds ResidualLayer::needs(const TensorSpec& input, ComputeContext& compute) const {
  const StreamShape shape = shape_of(input, compute);
  LayerAllocators memory;
  (void)allocate(shape, memory);
  LayerNeeds needs = branch_->needs(compute, shape, memory);
  needs.operator_bytes =
      std::max(needs.operator_bytes, norm_->workspace(compute, shape.mine.rows()));
  needs.again = gathers(shape, options_.precision, options_.width);  // of normed, as of dbranch
  for (auto* list : {&needs.collectives.forward, &needs.collectives.backward_input}) {
    list->insert(list->begin(), needs.again->begin(), needs.again->end());
  }
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
  const StreamShape shape = shape_of(call.x.spec, call.compute());
  LayerAllocators memory(call);
  const Kept kept = allocate(shape, memory);
  return {{call, shape, memory}, kept, as_rows(call.x)};
}

template <typename Work>
void ResidualLayer::for_dropped(const Made& made, const Work& work) const {
  options_.output.for_rows(made.call.layer, made.call.stream, options_.width, work);
}

void ResidualLayer::keep_again(LayerCall& call, const Tensor& /*y*/) {
  const Made made = made_of(call);
  const StreamShape& shape = made.call.stream;
  const Tensor& mine = shape.dealt ? made.kept.mine : made.kept.normed;
  norm_->forward(call.compute(), made.x, mine, made.kept.stats);
  if (shape.dealt) gather_rows(call.stage, shape, mine, made.kept.normed);
  branch_->keep(made.call, made.kept.normed);
}

void ResidualLayer::forward(LayerCall& call, const Tensor& y) {
  keep_again(call, y);
  const Made made = made_of(call);
  const Tensor out = as_rows(y);
  if (!options_.output.active(call)) return branch_->result(made.call, made.x, out);
  const Tensor branch = made.kept.branch.data != nullptr ? made.kept.branch : out;
  branch_->result(made.call, {}, branch);
  for_dropped(made, [&](const Dropout& dropped, std::int64_t first, std::int64_t rows) {
    dropout_residual(call.compute(), rows_from(branch, first, rows), dropped,
                     rows_from(made.x, first, rows), rows_from(out, first, rows));
  });
}

Tensor ResidualLayer::branch_gradient(const Made& made, const Tensor& dy) const {
  if (made.kept.dbranch.data != nullptr) return made.kept.dbranch;
  return as_rows(operand_gradient(made.call.layer, dy));
}

void ResidualLayer::backward_branch(const Made& made, const Tensor& dy) {
  const StreamShape& shape = made.call.stream;
  Tensor mine = as_rows(operand_gradient(made.call.layer, dy));
  if (options_.output.active(made.call.layer)) {
    mine = shape.dealt ? made.kept.mine : made.kept.dbranch;
    for_dropped(made, [&](const Dropout& dropped, std::int64_t first, std::int64_t rows) {
      dropout(made.call.compute(), rows_from(as_rows(dy), first, rows), dropped,
              rows_from(mine, first, rows));
    });
  }
  if (shape.dealt) gather_rows(made.call.layer.stage, shape, mine, made.kept.dbranch);
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
  norm_->backward_weight(call.compute(), made.call.stream, made.kept.dnormed, made.x,
                         made.kept.stats);
}

void ResidualLayer::backward(LayerCall& call, const Tensor& dy, const Tensor& dx) {
  // The branch's weight gradient reads dy, which the norm may then turn into dx.
  const Made made = made_of(call);
  backward_branch(made, dy);
  branch_->backward_weight(made.call, made.kept.normed, branch_gradient(made, dy));
  norm_->backward(call.compute(), made.call.stream, made.kept.dnormed, made.x, made.kept.stats,
                  as_rows(dy), {as_rows(dx), as_rows(call.rounded_dx)});
}

}  // namespace sluice::nn
