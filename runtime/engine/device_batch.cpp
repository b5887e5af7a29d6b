#include "runtime/engine/device_batch.hpp"

#include <algorithm>

#include "runtime/data/batch_loader.hpp"

namespace sluice {

void DeviceBatch::load(const BatchLoader::Batch& batch, std::size_t micro_batches) {
  on_device_ = &batch;
  if (compute_.device().kind == DeviceKind::kCpu) return;
  copy(batch.inputs, micro_batches, capacity_.inputs, copies_.inputs, inputs_);
  copy(batch.targets, micro_batches, capacity_.targets, copies_.targets, targets_);
  on_device_ = &copies_;
}

void DeviceBatch::copy(const std::vector<std::vector<Tensor>>& from, std::size_t micro_batches,
                       const std::vector<std::size_t>& capacity,
                       std::vector<std::vector<Tensor>>& to,
                       std::vector<std::vector<Buffer>>& memory) {
  if (to.size() < micro_batches) {
    to.resize(micro_batches);
    memory.resize(micro_batches);
  }
  for (std::size_t m = 0; m < micro_batches; ++m) {
    to[m].resize(from[m].size());
    memory[m].resize(from[m].size());
    for (std::size_t i = 0; i < from[m].size(); ++i) {
      const std::size_t bytes = from[m][i].spec.bytes();
      if (memory[m][i].size() < bytes) {
        memory[m][i] = Buffer();  // first: the memory plan has no room for both
        const std::size_t most = i < capacity.size() ? std::max(capacity[i], bytes) : bytes;
        memory[m][i] = compute_.memory().allocate(most);
      }
      to[m][i] = {memory[m][i].data(), from[m][i].spec};
      copy_async(to[m][i].data, from[m][i].data, bytes, compute_.stream());
    }
  }
}

}  // namespace sluice
