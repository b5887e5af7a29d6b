// Layers of a Sequential over the residual stream: their calls as those of stream layers.
#pragma once

#include <string>

#include <sluice/layers.hpp>

#include "stages/layers/layer.hpp"

namespace sluice {

// Throws Error(kUsage) unless `input` is f32 [samples, sequence, width].
void require_stream(const TensorSpec& input, std::int64_t width);
// Requires the same.
[[nodiscard]] BlockShape block_shape(const TensorSpec& input, DeviceKind device);
[[nodiscard]] StreamCall stream_call(const LayerCall& call);
// "3." as a prefix of a stream layer's names: "3".
[[nodiscard]] std::string stem(const std::string& name);

}  // namespace sluice
