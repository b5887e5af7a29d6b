#include "stages/layers/residual.hpp"

namespace sluice {

ResidualLayer::Kept ResidualLayer::allocate(const BlockShape& shape,
                                            LayerAllocators& memory) const {
  const std::int64_t rows = shape.rows();
  const bool drops = dropout_.probability > 0;
  Kept kept;
  kept.normed = memory.until_weight.tensor(precision_, rows, width_);
  kept.stats = memory.until_weight.tensor(DType::kF32, rows, norm_.stats_per_row());
  kept.dnormed = memory.gradients.tensor(precision_, rows, width_);
  if (drops) {
    kept.dbranch = memory.gradients.tensor(precision_, rows, width_);
    if (result_ != stream_) kept.branch = memory.scratch.tensor(result_, rows, width_);
  }
  return kept;
}

LayerMemory ResidualLayer::memory(const BlockShape& shape) const {
  LayerAllocators memory;
  allocate(shape, memory);
  measure(shape, memory);
  return memory.used();
}

OperatorMemory ResidualLayer::operators(ComputeContext& compute, const BlockShape& shape) const {
  return largest({.workspace = norm_.workspace(compute, shape.rows())},
                 branch_operators(compute, shape));
}

void ResidualLayer::recompute(StreamCall& call, const Tensor& in) {
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  norm_.forward(call.compute(), in, kept.normed, kept.stats);
  branch_keep(call, memory, kept.normed);
}

void ResidualLayer::forward(StreamCall& call, const Tensor& in, const Tensor& out) {
  recompute(call, in);
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  if (!dropout_.active(call)) return branch_result(call, memory, in, out);
  const Tensor branch = kept.branch.data != nullptr ? kept.branch : out;
  branch_result(call, memory, {}, branch);
  dropout_residual(call.compute(), branch, dropout_.at(call, call.shape.sequence * width_), in,
                   out);
}

bool ResidualLayer::reads_rounded() const {
  return precision_ != stream_ && dropout_.probability == 0;
}

Tensor ResidualLayer::branch_gradient(const Kept& kept, const StreamGradient& dout) const {
  if (dropout_.probability > 0) return kept.dbranch;
  return reads_rounded() ? dout.rounded : dout.value;
}

void ResidualLayer::backward_branch(StreamCall& call, const StreamGradient& dout) {
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  if (dropout_.active(call)) {
    dropout(call.compute(), dout.value, dropout_.at(call, call.shape.sequence * width_),
            kept.dbranch);
  }
  branch_backward_input(call, memory, branch_gradient(kept, dout), kept.dnormed);
}

void ResidualLayer::backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                                   const StreamGradient& din) {
  backward_branch(call, dout);
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  norm_.backward_input(call.compute(), kept.dnormed, in, kept.stats, dout.value, din);
}

void ResidualLayer::backward_weight(StreamCall& call, const Tensor& in,
                                    const StreamGradient& dout) {
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  branch_backward_weight(call, memory, kept.normed, branch_gradient(kept, dout));
  norm_.backward_weight(call.compute(), call.shape, kept.dnormed, in, kept.stats);
}

void ResidualLayer::backward(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                             const StreamGradient& din) {
  // The branch's weight gradient reads dout, which the norm may then turn into din.
  backward_branch(call, dout);
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  branch_backward_weight(call, memory, kept.normed, branch_gradient(kept, dout));
  norm_.backward(call.compute(), call.shape, kept.dnormed, in, kept.stats, dout.value, din);
}

}  // namespace sluice
