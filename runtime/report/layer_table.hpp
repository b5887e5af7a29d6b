// The layers of a run's stages and what they take, as traces and metrics say it: so that a search
// for a schedule knows how often the model can be cut. Pure.
#pragma once

#include <span>
#include <string>
#include <vector>

#include <sluice/simulate.hpp>

namespace sluice {

struct LayerTable {
  std::vector<int> first_layer;   // stage s owns layers [first_layer[s], first_layer[s + 1])
  std::vector<StageTimes> costs;  // [layer] in any unit, at least one entry
};

// {"first": first_layer, "times": [[forward, backward_input, backward_weight], ...]}, one entry per
// layer. The times are milliseconds: what its stage took, `stages` in seconds, divided among the
// stage's layers in proportion to their costs. Without `stages` they are the costs.
[[nodiscard]] std::string to_json_text(const LayerTable& table,
                                       std::span<const StageTimes> stages = {});

}  // namespace sluice
