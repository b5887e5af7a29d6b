// The tensors between stages, known on every rank before anything is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

// A tensor of an edge. Its gradient has the same shape and dtype.
struct EdgeTensor {
  TensorSpec spec;
  bool wants_gradient = true;
};

// The tensors of every edge, for every number of samples that a micro-batch may have.
class EdgeTable {
 public:
  EdgeTable() = default;
  // `sizes`: distinct numbers of samples, the largest first. edges[size][s] are the inputs of stage
  // s, edges[size][stages] the outputs of the last stage.
  EdgeTable(std::vector<std::int64_t> sizes,
            std::vector<std::vector<std::vector<EdgeTensor>>> edges)
      : sizes_(std::move(sizes)), edges_(std::move(edges)) {}

  // For another number of samples, at most the largest. Spans of inputs() stay valid.
  void add(std::int64_t samples, std::vector<std::vector<EdgeTensor>> edges) {
    sizes_.push_back(samples);
    edges_.push_back(std::move(edges));
  }
  [[nodiscard]] bool has(std::int64_t samples) const {
    return std::find(sizes_.begin(), sizes_.end(), samples) != sizes_.end();
  }

  // Valid as long as the table. Throws Error(kInternal) for a number that is not in sizes().
  [[nodiscard]] std::span<const EdgeTensor> inputs(std::int64_t samples, int stage) const {
    const auto found = std::find(sizes_.begin(), sizes_.end(), samples);
    if (found != sizes_.end()) {
      return edges_[static_cast<std::size_t>(found - sizes_.begin())]
                   [static_cast<std::size_t>(stage)];
    }
    throw Error(ErrorCode::kInternal,
                "no edge shapes for a micro-batch of " + std::to_string(samples) + " samples");
  }
  [[nodiscard]] std::int64_t largest() const { return sizes_.front(); }
  [[nodiscard]] const std::vector<std::int64_t>& sizes() const { return sizes_; }

 private:
  std::vector<std::int64_t> sizes_;
  std::vector<std::vector<std::vector<EdgeTensor>>> edges_;
};

}  // namespace sluice
