// Edges: what travels between stages, known on every rank before anything is allocated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <sluice/tensor.hpp>

namespace sluice {

// A tensor of an edge. Gradients travel the other way in the same shape and dtype.
struct EdgeTensor {
  TensorSpec spec;
  bool wants_gradient = true;
};

// Shapes of every edge for every number of samples a micro-batch may have.
class EdgeTable {
 public:
  EdgeTable() = default;
  // sizes: distinct sample counts, descending. edges[size][s] are the inputs of stage s,
  // edges[size][stages] the outputs of the last stage.
  EdgeTable(std::vector<std::int64_t> sizes,
            std::vector<std::vector<std::vector<EdgeTensor>>> edges);

  [[nodiscard]] std::span<const EdgeTensor> inputs(std::int64_t samples, int stage) const;
  [[nodiscard]] std::span<const EdgeTensor> outputs(std::int64_t samples, int stage) const {
    return inputs(samples, stage + 1);
  }
  [[nodiscard]] std::int64_t largest() const { return sizes_.front(); }
  [[nodiscard]] const std::vector<std::int64_t>& sizes() const { return sizes_; }

 private:
  std::vector<std::int64_t> sizes_;
  std::vector<std::vector<std::vector<EdgeTensor>>> edges_;
};

}  // namespace sluice
