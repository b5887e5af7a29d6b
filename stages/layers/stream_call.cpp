#include "stages/layers/stream_call.hpp"

#include "comm/base/throw_error.hpp"
#include "stages/compute/product.hpp"

namespace sluice {

void require_stream(const TensorSpec& input, std::int64_t width) {
  if (input.dtype == DType::kF32 && input.shape.rank() == 3 && input.shape[2] == width) return;
  throw_usage("the input is {}; legal: f32 [samples, sequence, {}]", to_string(input), width);
}

BlockShape block_shape(const TensorSpec& input, DeviceKind device) {
  return {.samples = input.shape[0],
          .sequence = input.shape[1],
          .device = device,
          .by_sample = device == DeviceKind::kCpu && input.shape[1] >= kRowsToSumBySample};
}

StreamCall stream_call(const LayerCall& call) {
  return {.stage = call.stage,
          .shape = block_shape(call.x.spec, call.compute().device().kind),
          .until_input = call.until_input,
          .until_weight = call.until_weight,
          .gradients = call.gradients,
          .scratch = call.scratch};
}

std::string stem(const std::string& name) { return name.substr(0, name.size() - 1); }

}  // namespace sluice
