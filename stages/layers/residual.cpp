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
  if (drops || precision_ != DType::kF32) {
    kept.dbranch = memory.gradients.tensor(precision_, rows, width_);
  }
  if (drops && precision_ != DType::kF32) {
    kept.dropped = memory.scratch.tensor(DType::kF32, rows, width_);
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

void ResidualLayer::keep(StreamCall& call, const Residual& in) {
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  norm_.forward(call.compute(), in, kept.normed, kept.stats);
  branch_keep(call, memory, kept.normed);
}

void ResidualLayer::recompute(StreamCall& call, const Tensor& in) { keep(call, {in, {}}); }

Residual ResidualLayer::forward(StreamCall& call, const Residual& in, const Tensor& out) {
  keep(call, in);
  LayerAllocators memory = call.allocators();
  allocate(call.shape, memory);
  branch_result(call, memory, out);
  if (dropout_.active(call)) {
    dropout(call.compute(), out, dropout_.at(call, call.shape.sequence * width_), out);
  }
  return {out, in.value};
}

Tensor ResidualLayer::branch_gradient(const Kept& kept, const Tensor& dout) const {
  return kept.dbranch.spec.shape.rank() == 0 ? dout : kept.dbranch;
}

void ResidualLayer::backward_branch(StreamCall& call, const Tensor& dout) {
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  ComputeContext& compute = call.compute();
  const Tensor dbranch = branch_gradient(kept, dout);
  if (dropout_.active(call)) {
    const Dropout mask = dropout_.at(call, call.shape.sequence * width_);
    const Tensor dropped = precision_ == DType::kF32 ? dbranch : kept.dropped;
    dropout(compute, dout, mask, dropped);
    copy_or_convert(compute, dropped, dbranch);
  } else {
    copy_or_convert(compute, dout, dbranch);
  }
  branch_backward_input(call, memory, dbranch, kept.dnormed);
}

void ResidualLayer::backward_norm(StreamCall& call, const Tensor& in, const Tensor& din) {
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  norm_.backward_input(call.compute(), kept.dnormed, in, kept.stats, din);
}

void ResidualLayer::backward_input(StreamCall& call, const Tensor& in, const Tensor& dout,
                                   const Tensor& din) {
  backward_branch(call, dout);
  if (din.data != nullptr) {
    copy_or_convert(call.compute(), dout, din);
    backward_norm(call, in, din);
  }
}

void ResidualLayer::backward_weight(StreamCall& call, const Tensor& in, const Tensor& dout) {
  LayerAllocators memory = call.allocators();
  const Kept kept = allocate(call.shape, memory);
  branch_backward_weight(call, memory, kept.normed, branch_gradient(kept, dout));
  norm_.backward_weight(call.compute(), kept.dnormed, in, kept.stats);
}

void ResidualLayer::backward(StreamCall& call, const Tensor& in, const Tensor& dout,
                             const Tensor& din) {
  // The weight gradient reads dout, which the norm's input gradient may then turn into din.
  backward_branch(call, dout);
  backward_weight(call, in, dout);
  if (din.data != nullptr) {
    copy_or_convert(call.compute(), dout, din);
    backward_norm(call, in, din);
  }
}

}  // namespace sluice
