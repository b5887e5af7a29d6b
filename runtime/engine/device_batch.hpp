// A step's inputs and targets where the stages compute: on a CPU the loader's own, on a GPU copies.
// Internal to the engine.
#pragma once

#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

#include "runtime/data/batch_loader.hpp"

namespace sluice {

class DeviceBatch {
 public:
  explicit DeviceBatch(ComputeContext& compute) : compute_(compute) {}
  // Puts the copies of the first `micro_batches` micro-batches on the compute stream; `batch` stays
  // as it is until they are done. Allocates only where a tensor is larger than ever before.
  void load(const BatchLoader::Batch& batch, std::size_t micro_batches);
  // Of a micro-batch of the batch loaded last; empty where nobody wanted any.
  [[nodiscard]] std::span<const Tensor> inputs(int micro_batch) const {
    return on_device_->inputs[static_cast<std::size_t>(micro_batch)];
  }
  [[nodiscard]] std::span<const Tensor> targets(int micro_batch) const {
    return on_device_->targets[static_cast<std::size_t>(micro_batch)];
  }

 private:
  void copy(const std::vector<std::vector<Tensor>>& from, std::size_t micro_batches,
            std::vector<std::vector<Tensor>>& to, std::vector<std::vector<Buffer>>& memory);

  ComputeContext& compute_;
  const BatchLoader::Batch* on_device_ = nullptr;
  BatchLoader::Batch copies_;
  std::vector<std::vector<Buffer>> inputs_, targets_;  // [micro_batch][tensor] of copies_
};

}  // namespace sluice
