// A step's inputs and targets where the stages compute: the loader's on a CPU, copies on a GPU.
// Internal to the engine.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

#include "runtime/data/batch_loader.hpp"

namespace sluice {

class DeviceBatch {
 public:
  // Bytes of each input and each target of the largest micro-batch. Tensors beyond these lists are
  // taken to be as large as the first ones that arrive.
  struct Capacity {
    std::vector<std::size_t> inputs, targets;
  };
  explicit DeviceBatch(ComputeContext& compute, Capacity capacity = {})
      : compute_(compute), capacity_(std::move(capacity)) {}
  // Copies the first `micro_batches` micro-batches on the compute stream. `batch` must not change
  // until the copies are done. Allocates only for more micro-batches, or larger ones, than before.
  void load(const BatchLoader::Batch& batch, std::size_t micro_batches);
  // Of the batch that was loaded last; empty where the loader loads none.
  [[nodiscard]] std::span<const Tensor> inputs(int micro_batch) const {
    return on_device_->inputs[static_cast<std::size_t>(micro_batch)];
  }
  [[nodiscard]] std::span<const Tensor> targets(int micro_batch) const {
    return on_device_->targets[static_cast<std::size_t>(micro_batch)];
  }

 private:
  void copy(const std::vector<std::vector<Tensor>>& from, std::size_t micro_batches,
            const std::vector<std::size_t>& capacity, std::vector<std::vector<Tensor>>& to,
            std::vector<std::vector<Buffer>>& memory);

  ComputeContext& compute_;
  Capacity capacity_;
  const BatchLoader::Batch* on_device_ = nullptr;
  BatchLoader::Batch copies_;
  std::vector<std::vector<Buffer>> inputs_, targets_;  // [micro_batch][tensor] of copies_
};

}  // namespace sluice
