#include "stages/layers/attention.hpp"

namespace sluice {

AttentionLayer::AttentionLayer(const Options& options, ParameterSet& parameters,
                               WeightCopies& copies)
    : ResidualLayer(options, ".norm1", parameters),
      heads_(options.heads),
      kv_heads_(options.kv_heads),
      head_dim_(static_cast<int>(options.width / options.heads)),
      rotary_base_(options.rotary_base),
      probabilities_(options.probabilities),
      recompute_(options.recompute),
      qkv_(options.name + ".attention.qkv",
           {.in = options.width,
            .out = std::int64_t{options.heads + 2 * options.kv_heads} * head_dim_,
            .bias = options.bias},
           parameters, copies),
      output_(options.name + ".attention.output",
              {.in = options.width,
               .out = options.width,
               .deviation = options.output_deviation,
               .bias = options.bias},
              parameters, copies) {}

AttentionShape AttentionLayer::attention_shape(const BlockShape& shape) const {
  return {shape.samples, shape.sequence, heads_, kv_heads_, head_dim_};
}

AttentionLayer::Kept AttentionLayer::allocate(const BlockShape& shape,
                                              LayerAllocators& memory) const {
  const std::int64_t rows = shape.rows();
  BumpAllocator& probabilities = recompute_ ? memory.scratch : memory.until_input;
  BumpAllocator& mixed = recompute_ ? memory.gradients : memory.until_weight;
  Kept kept;
  kept.qkv = memory.until_input.tensor(precision(), rows, qkv_.out());
  kept.probabilities =
      probabilities.bytes(attention_state_bytes(shape.device, attention_shape(shape), precision()));
  kept.mixed = mixed.tensor(precision(), rows, width());
  kept.dqkv = memory.gradients.tensor(precision(), rows, qkv_.out());
  kept.dmixed = memory.scratch.tensor(precision(), rows, width());
  return kept;
}

void AttentionLayer::measure(const BlockShape& shape, LayerAllocators& memory) const {
  allocate(shape, memory);
}

// Nothing is dropped in evaluation.
OperatorMemory AttentionLayer::branch_operators(ComputeContext& compute,
                                                const BlockShape& batch) const {
  const AttentionShape shape = attention_shape(batch);
  const bool drops = probabilities_.probability > 0;
  const std::int64_t rows = batch.rows();
  return {
      .workspace = std::max({qkv_.workspace(compute, rows, precision()),
                             output_.workspace(compute, rows, DType::kF32),
                             attention_forward_workspace(compute, shape, precision(), false),
                             attention_forward_workspace(compute, shape, precision(), drops),
                             attention_backward_workspace(compute, shape, precision(), drops)}),
      .tables = rotary_base_ ? ComputeContext::rotary_table_bytes(shape.sequence, head_dim_) : 0};
}

// The engine of training; evaluation drops nothing and may use another.
std::string AttentionLayer::note(ComputeContext& compute, const BlockShape& shape) const {
  const std::string engine = attention_engine(compute, attention_shape(shape), precision(),
                                              probabilities_.probability > 0);
  return engine.empty() ? engine : "attention: " + engine;
}

Dropout AttentionLayer::mask(const StreamCall& call) const {
  return probabilities_.at(call, heads_ * call.shape.sequence * call.shape.sequence);
}

void AttentionLayer::attend(StreamCall& call, const Kept& kept) const {
  attention_forward(call.compute(), attention_shape(call.shape), kept.qkv, mask(call), kept.mixed,
                    kept.probabilities);
}

void AttentionLayer::branch_keep(StreamCall& call, LayerAllocators memory, const Tensor& x) {
  const Kept kept = allocate(call.shape, memory);
  qkv_.forward(call.compute(), x, kept.qkv);
  if (rotary_base_) {
    rotary(call.compute(), attention_shape(call.shape), *rotary_base_, kept.qkv, false);
  }
  attend(call, kept);
}

void AttentionLayer::branch_result(StreamCall& call, LayerAllocators memory, const Tensor& y) {
  const Kept kept = allocate(call.shape, memory);
  output_.forward(call.compute(), kept.mixed, y);
}

void AttentionLayer::branch_backward_input(StreamCall& call, LayerAllocators memory,
                                           const Tensor& dy, const Tensor& dx) {
  const Kept kept = allocate(call.shape, memory);
  const AttentionShape shape = attention_shape(call.shape);
  ComputeContext& compute = call.compute();
  if (recompute_) {
    attend(call, kept);
  }
  output_.backward_input(compute, dy, kept.dmixed);
  attention_backward(compute, shape, kept.qkv, kept.mixed, kept.dmixed, mask(call),
                     kept.probabilities, kept.dqkv);
  if (rotary_base_) {
    rotary(compute, shape, *rotary_base_, kept.dqkv, true);
  }
  qkv_.backward_input(compute, kept.dqkv, dx);
}

void AttentionLayer::branch_backward_weight(StreamCall& call, LayerAllocators memory,
                                            const Tensor& x, const Tensor& dy) {
  const Kept kept = allocate(call.shape, memory);
  output_.backward_weight(call.compute(), kept.mixed, dy);
  qkv_.backward_weight(call.compute(), x, kept.dqkv);
}

}  // namespace sluice
