// From a partition to its stages.
#include <fmt/format.h>

#include <algorithm>

#include <sluice/error.hpp>
#include <sluice/transformer.hpp>

#include "stages/transformer/transformer_stage.hpp"

namespace sluice {

namespace {

void validate(const TransformerConfig& config, const Partition& partition, int stage) {
  validate(config);
  const std::vector<int>& first = partition.first;
  const int layers = config.layers + 2;
  const bool covers = first.size() >= 2 && first.front() == 0 && first.back() == layers &&
                      std::is_sorted(first.begin(), first.end());
  if (!covers) {
    throw Error(
        ErrorCode::kUsage,
        fmt::format("the partition [{}] does not cut layers 0 to {} (embedding, {} blocks, head) "
                    "into stages, ascending from 0 to {}",
                    fmt::join(first, ", "), layers - 1, config.layers, layers));
  }
  if (first[1] < 1 || first[first.size() - 2] == layers) {
    throw Error(
        ErrorCode::kUsage,
        fmt::format("the partition [{}] leaves the first or the last stage empty; they hold the "
                    "embedding and the head",
                    fmt::join(first, ", ")));
  }
  if (stage < 0 || stage >= partition.stages()) {
    throw Error(ErrorCode::kUsage,
                fmt::format("stage {} of a partition into {} stages; legal: 0 to {}", stage,
                            partition.stages(), partition.stages() - 1));
  }
}

}  // namespace

std::unique_ptr<Stage> make_transformer_stage(const TransformerConfig& config,
                                              const Partition& partition, int stage) {
  validate(config, partition, stage);
  const auto at = static_cast<size_t>(stage);
  const LayerRange range{partition.first[at], partition.first[at + 1]};
  if (stage == partition.stages() - 1) {
    return std::make_unique<LastTransformerStage>(config, range);
  }
  return std::make_unique<TransformerStage>(config, range);
}

}  // namespace sluice
