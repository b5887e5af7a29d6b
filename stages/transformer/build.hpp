// From a transformer's configuration to its layers. Internal to stages/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sluice/transformer.hpp>

#include "stages/layers/layer.hpp"
#include "stages/layers/parts.hpp"

namespace sluice {

// Sizes with their defaults filled in.
struct TransformerSizes {
  std::int64_t width = 0, mlp_width = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  [[nodiscard]] std::int64_t query_width() const { return std::int64_t{heads} * head_dim; }
  [[nodiscard]] std::int64_t kv_width() const { return std::int64_t{kv_heads} * head_dim; }
};
// Requires: validate(config) passes.
[[nodiscard]] TransformerSizes sizes_of(const TransformerConfig& config);

// AttentionShape::window of block `block` of 0 .. layers - 1.
[[nodiscard]] int window_of(const TransformerConfig& config, int block);

// Appends the parts of layer `index` (0: embedding, 1..layers: blocks, layers + 1: head) to
// `layers` and declares their parameters, those of a part in a row. Returns for each part how many
// were declared before its first.
std::vector<std::size_t> build_layer(const TransformerConfig& config, int index,
                                     ParameterSet& parameters, WeightCopies& copies,
                                     std::vector<std::unique_ptr<StreamLayer>>& layers);

// The parts of one block, with parameters "<name>.norm1.weight" and so on. `layer`: its number for
// random numbers.
std::vector<std::unique_ptr<StreamLayer>> build_block(const TransformerConfig& config,
                                                      const std::string& name, int layer,
                                                      ParameterSet& parameters,
                                                      WeightCopies& copies);

}  // namespace sluice
