// check_gradients() of what a layer declares by set_precision(). Internal to stages/.
#pragma once

#include <sluice/layers.hpp>

namespace sluice {

// In bf16 the layer makes what it makes in f32, within rounding, if it declares that it takes bf16.
// Throws Error(kUsage).
void check_precision(const LayerSpec& spec, const TensorSpec& input, const GradientCheck& options);

}  // namespace sluice
