#include "stages/layers/branches.hpp"

#include <algorithm>
#include <utility>

namespace sluice::nn {

Mlp::Mlp(const Options& options, const std::string& name, ParameterSet& parameters)
    : kind_(options.kind),
      precision_(options.precision),
      result_(options.result),
      up_(name + (options.kind == Kind::kGelu ? "up." : "gate_up."),
          {.in = options.width,
           .out = options.hidden * (options.kind == Kind::kGelu ? 1 : 2),
           .bias = options.bias,
           .precision = precision_,
           .rounds_bias = true},
          parameters),
      down_(name + "down.",
            {.in = options.hidden,
             .out = options.width,
             .weight = Init::normal(options.output_deviation),
             .bias = options.bias,
             .precision = precision_,
             .rounds_bias = options.result.alone != DType::kF32},
            parameters) {}

Mlp::Kept Mlp::allocate(const BlockShape& shape, LayerAllocators& memory) const {
  const std::int64_t rows = shape.rows();
  Kept kept;
  kept.raised = memory.until_input.tensor(precision_, rows, up_.out());
  kept.hidden = memory.until_weight.tensor(precision_, rows, down_.in());
  kept.draised = memory.gradients.tensor(precision_, rows, up_.out());
  return kept;
}

LayerNeeds Mlp::needs(ComputeContext& compute, const BlockShape& shape,
                      LayerAllocators& memory) const {
  (void)allocate(shape, memory);
  const std::int64_t rows = shape.rows();
  return {
      .memory = memory.used(),
      .operator_bytes = std::max({up_.workspace(compute, rows, precision_),
                                  down_.workspace(compute, rows, result_.sum, activation()),
                                  down_.workspace(compute, rows, result_.alone, activation())})};
}

void Mlp::keep(BranchCall call, const Tensor& x) {
  const Kept kept = allocate(call.shape, call.memory);
  up_.forward(call.compute(), activation(), x, kept.raised, kept.hidden);
}

void Mlp::result(BranchCall call, const Tensor& residual, const Tensor& y) {
  const Kept kept = allocate(call.shape, call.memory);
  down_.forward(call.compute(), kept.hidden, y, residual);
}

void Mlp::backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) {
  const Kept kept = allocate(call.shape, call.memory);
  down_.backward_input(call.compute(), activation(), dy, kept.raised, kept.draised);
  if (dx.data != nullptr) up_.backward_input(call.compute(), kept.draised, dx);
}

void Mlp::backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) {
  const Kept kept = allocate(call.shape, call.memory);
  down_.backward_weight(call.compute(), call.shape, kept.hidden, dy);
  up_.backward_weight(call.compute(), call.shape, x, kept.draised);
}

SelfAttention::SelfAttention(const Options& options, const std::string& name,
                             ParameterSet& parameters)
    : heads_(options.heads),
      kv_heads_(options.kv_heads),
      head_dim_(options.head_dim),
      window_(options.window),
      precision_(options.precision),
      result_(options.result),
      positions_(options.positions),
      probabilities_(options.probabilities),
      recompute_(options.recompute),
      qkv_(name + "qkv.",
           {.in = options.width,
            .out = std::int64_t{options.heads + 2 * options.kv_heads} * head_dim_,
            .bias = options.qkv_bias,
            .precision = precision_,
            .rounds_bias = true},
           parameters),
      norm_(options.qk_norm ? std::optional<QueryKeyNorm>(std::in_place, name, head_dim_,
                                                          *options.qk_norm, parameters)
                            : std::nullopt),
      output_(name + "output.",
              {.in = std::int64_t{options.heads} * head_dim_,
               .out = options.width,
               .weight = Init::normal(options.output_deviation),
               .bias = options.output_bias,
               .precision = precision_,
               .rounds_bias = options.result.alone != DType::kF32},
              parameters) {}

AttentionShape SelfAttention::attention_shape(const BlockShape& shape) const {
  return {shape.samples, shape.sequence, heads_, kv_heads_, head_dim_, window_};
}

SelfAttention::Kept SelfAttention::allocate(const BlockShape& shape,
                                            LayerAllocators& memory) const {
  const std::int64_t rows = shape.rows();
  BumpAllocator& probabilities = recompute_ ? memory.scratch : memory.until_input;
  BumpAllocator& mixed = recompute_ ? memory.gradients : memory.until_weight;
  Kept kept;
  kept.qkv = memory.until_input.tensor(precision_, rows, qkv_.out());
  if (norm_) {
    const std::int64_t heads = std::int64_t{heads_} + kv_heads_;
    kept.raw = memory.until_input.tensor(precision_, rows, heads * head_dim_);
    kept.stats = memory.until_input.tensor(DType::kF32, rows, heads);
    const Shape gains = QueryKeyNorm::gains(shape, head_dim_);
    kept.dgains = memory.gradients.tensor(DType::kF32, gains[0], gains[1]);
  }
  kept.probabilities =
      probabilities.bytes(attention_state_bytes(shape.device, attention_shape(shape), precision_));
  kept.mixed = mixed.tensor(precision_, rows, output_.in());
  kept.dqkv = memory.gradients.tensor(precision_, rows, qkv_.out());
  kept.dmixed = memory.scratch.tensor(precision_, rows, output_.in());
  return kept;
}

// The note names the engine of training. Evaluation drops nothing and may use another one.
LayerNeeds SelfAttention::needs(ComputeContext& compute, const BlockShape& batch,
                                LayerAllocators& memory) const {
  (void)allocate(batch, memory);
  const AttentionShape shape = attention_shape(batch);
  const bool drops = probabilities_.probability > 0;
  const std::int64_t rows = batch.rows();
  const std::string engine = attention_engine(compute, shape, precision_, drops);
  return {
      .memory = memory.used(),
      .operator_bytes = std::max({qkv_.workspace(compute, rows, precision_),
                                  output_.workspace(compute, rows, result_.alone),
                                  output_.workspace(compute, rows, result_.sum),
                                  attention_forward_workspace(compute, shape, precision_, false),
                                  attention_forward_workspace(compute, shape, precision_, drops),
                                  attention_backward_workspace(compute, shape, precision_, drops),
                                  norm_ ? query_key_norm_backward_workspace(compute, shape) : 0}),
      .table_bytes = positions_ ? ComputeContext::rotary_table_bytes(shape.sequence, head_dim_) : 0,
      .note = engine.empty() ? engine : "attention: " + engine};
}

Dropout SelfAttention::mask(const BranchCall& call) const {
  return probabilities_.at(call.layer, heads_ * call.shape.sequence * call.shape.sequence);
}

void SelfAttention::attend(const BranchCall& call, const Kept& kept) const {
  attention_forward(call.compute(), attention_shape(call.shape), kept.qkv, mask(call), kept.mixed,
                    kept.probabilities);
}

void SelfAttention::keep(BranchCall call, const Tensor& x) {
  const Kept kept = allocate(call.shape, call.memory);
  const AttentionShape shape = attention_shape(call.shape);
  qkv_.forward(call.compute(), x, kept.qkv);
  if (norm_) norm_->forward(call.compute(), shape, kept.qkv, kept.raw, kept.stats);
  if (positions_) rotary(call.compute(), shape, *positions_, kept.qkv, false);
  attend(call, kept);
}

void SelfAttention::result(BranchCall call, const Tensor& residual, const Tensor& y) {
  const Kept kept = allocate(call.shape, call.memory);
  output_.forward(call.compute(), kept.mixed, y, residual);
}

void SelfAttention::backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) {
  const Kept kept = allocate(call.shape, call.memory);
  const AttentionShape shape = attention_shape(call.shape);
  ComputeContext& compute = call.compute();
  if (recompute_) {
    attend(call, kept);
  }
  output_.backward_input(compute, dy, kept.dmixed);
  attention_backward(compute, shape, kept.qkv, kept.mixed, kept.dmixed, mask(call),
                     kept.probabilities, kept.dqkv);
  if (positions_) rotary(compute, shape, *positions_, kept.dqkv, true);
  if (norm_) norm_->backward_input(compute, shape, kept.raw, kept.stats, kept.dqkv, kept.dgains);
  if (dx.data != nullptr) qkv_.backward_input(compute, kept.dqkv, dx);
}

void SelfAttention::backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) {
  const Kept kept = allocate(call.shape, call.memory);
  output_.backward_weight(call.compute(), call.shape, kept.mixed, dy);
  if (norm_) norm_->backward_weight(call.compute(), kept.dgains);
  qkv_.backward_weight(call.compute(), call.shape, x, kept.dqkv);
}

}  // namespace sluice::nn
