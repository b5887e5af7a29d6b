#include "stages/layers/recompute.hpp"

namespace sluice {

LayerMemory RecomputedLayer::memory(const BlockShape& shape) const {
  const LayerMemory memory = layer_->memory(shape);
  return {.gradients = memory.until_weight + memory.gradients,
          .scratch = memory.until_input + memory.scratch};
}

StreamCall RecomputedLayer::within(const StreamCall& call) const {
  const LayerMemory memory = layer_->memory(call.shape);
  return {.stage = call.stage,
          .shape = call.shape,
          .until_input = call.scratch,
          .until_weight = call.gradients,
          .gradients = call.gradients + memory.until_weight,
          .scratch = call.scratch + memory.until_input};
}

void RecomputedLayer::forward(StreamCall& call, const Tensor& in, const Tensor& out) {
  StreamCall inner = within(call);
  layer_->forward(inner, in, out);
}

void RecomputedLayer::backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                                     const StreamGradient& din) {
  StreamCall inner = within(call);
  layer_->recompute(inner, in);
  layer_->backward_input(inner, in, dout, din);
}

void RecomputedLayer::backward_weight(StreamCall& call, const Tensor& in,
                                      const StreamGradient& dout) {
  StreamCall inner = within(call);
  layer_->backward_weight(inner, in, dout);
}

void RecomputedLayer::backward(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                               const StreamGradient& din) {
  StreamCall inner = within(call);
  layer_->recompute(inner, in);
  layer_->backward(inner, in, dout, din);
}

}  // namespace sluice
