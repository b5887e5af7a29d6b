// The tensors between stages, known on every rank before anything is allocated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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
  // `sizes`: distinct numbers of samples, descending. edges[size][s] are the inputs of stage s,
  // edges[size][stages] the outputs of the last stage.
  EdgeTable(std::vector<std::int64_t> sizes,
            std::vector<std::vector<std::vector<EdgeTensor>>> edges);

  // Valid as long as the table. Throws Error(kInternal) for a number that is not in sizes().
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
