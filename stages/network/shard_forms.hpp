// Whether layers that follow each other divide what is between them alike, in a model of several
// shards. Internal to stages/.
#pragma once

#include <span>
#include <vector>

#include <sluice/layers.hpp>

namespace sluice::nn {

// Of a layer, or a group; of layers one after the other; of two whose results are added.
[[nodiscard]] ShardForms forms_of(const LayerSpec& layer);
[[nodiscard]] ShardForms forms_of(std::span<const LayerSpec> layers);
[[nodiscard]] ShardForms forms_of_sum(const ShardForms& first, const ShardForms& second);

// Throws Error(kUsage) that names the layer, connection or loss that cannot take what it gets.
// `begins`: of stages.
void require_forms(std::span<const LayerSpec> layers, std::span<const int> begins,
                   std::span<const Skip> skips, const LossSpec& loss);

}  // namespace sluice::nn
