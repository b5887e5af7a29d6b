#include "stages/layers/mlp.hpp"

#include <algorithm>

namespace sluice {

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

void Mlp::measure(const BlockShape& shape, LayerAllocators& memory) const {
  allocate(shape, memory);
}

OperatorMemory Mlp::operators(ComputeContext& compute, const BlockShape& shape) const {
  const std::int64_t rows = shape.rows();
  return {.workspace = std::max({up_.workspace(compute, rows, precision_),
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

}  // namespace sluice
