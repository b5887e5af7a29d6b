#include "runtime/layout/edges.hpp"

#include <utility>

#include <sluice/error.hpp>

namespace sluice {

EdgeTable::EdgeTable(std::vector<std::int64_t> sizes,
                     std::vector<std::vector<std::vector<EdgeTensor>>> edges)
    : sizes_(std::move(sizes)), edges_(std::move(edges)) {}

std::span<const EdgeTensor> EdgeTable::inputs(std::int64_t samples, int stage) const {
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i] == samples) return edges_[i][static_cast<std::size_t>(stage)];
  }
  throw Error(ErrorCode::kInternal,
              "no edge shapes for a micro-batch of " + std::to_string(samples) + " samples");
}

}  // namespace sluice
