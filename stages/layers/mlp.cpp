#include "stages/layers/mlp.hpp"

namespace sluice {

MlpLayer::MlpLayer(const Options& options, ParameterSet& parameters, WeightCopies& copies)
    : ResidualLayer(options, ".norm2", parameters),
      kind_(options.kind),
      up_(options.name + (options.kind == Kind::kGelu ? ".mlp.up" : ".mlp.gate_up"),
          {.in = options.width,
           .out = options.hidden * (options.kind == Kind::kGelu ? 1 : 2),
           .bias = options.bias,
           .rounds_bias = true},
          parameters, copies),
      down_(options.name + ".mlp.down",
            {.in = options.hidden,
             .out = options.width,
             .deviation = options.output_deviation,
             .bias = options.bias,
             .rounds_bias = options.result() != DType::kF32},
            parameters, copies) {}

MlpLayer::Kept MlpLayer::allocate(const BlockShape& shape, LayerAllocators& memory) const {
  const std::int64_t rows = shape.rows();
  Kept kept;
  kept.raised = memory.until_input.tensor(precision(), rows, up_.out());
  kept.hidden = memory.until_weight.tensor(precision(), rows, down_.in());
  kept.draised = memory.gradients.tensor(precision(), rows, up_.out());
  return kept;
}

void MlpLayer::measure(const BlockShape& shape, LayerAllocators& memory) const {
  allocate(shape, memory);
}

OperatorMemory MlpLayer::branch_operators(ComputeContext& compute, const BlockShape& shape) const {
  return {.workspace = std::max({up_.workspace(compute, shape.rows(), precision()),
                                 down_.workspace(compute, shape.rows(), stream(), activation()),
                                 down_.workspace(compute, shape.rows(), result(), activation())})};
}

void MlpLayer::branch_keep(StreamCall& call, LayerAllocators memory, const Tensor& x) {
  const Kept kept = allocate(call.shape, memory);
  up_.forward(call.compute(), activation(), x, kept.raised, kept.hidden);
}

void MlpLayer::branch_result(StreamCall& call, LayerAllocators memory, const Tensor& residual,
                             const Tensor& y) {
  const Kept kept = allocate(call.shape, memory);
  down_.forward(call.compute(), kept.hidden, y, residual);
}

void MlpLayer::branch_backward_input(StreamCall& call, LayerAllocators memory, const Tensor& dy,
                                     const Tensor& dx) {
  const Kept kept = allocate(call.shape, memory);
  ComputeContext& compute = call.compute();
  down_.backward_input(compute, activation(), dy, kept.raised, kept.draised);
  up_.backward_input(compute, kept.draised, dx);
}

void MlpLayer::branch_backward_weight(StreamCall& call, LayerAllocators memory, const Tensor& x,
                                      const Tensor& dy) {
  const Kept kept = allocate(call.shape, memory);
  down_.backward_weight(call.compute(), call.shape, kept.hidden, dy);
  up_.backward_weight(call.compute(), call.shape, x, kept.draised);
}

}  // namespace sluice
