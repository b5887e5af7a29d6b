#include <cstring>
#include <utility>

#include <sluice/data.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

TensorSpec one_sample(const TensorSpec& all) {
  std::vector<std::int64_t> dims;
  for (int d = 1; d < all.shape.rank(); ++d) dims.push_back(all.shape[d]);
  return {all.dtype, Shape(std::span<const std::int64_t>(dims))};
}

class ArrayDataset final : public Dataset {
 public:
  ArrayDataset(std::vector<HostTensor> inputs, std::vector<HostTensor> targets)
      : inputs_(std::move(inputs)), targets_(std::move(targets)) {
    if (inputs_.empty()) throw_usage("a data set needs an array of inputs, got none");
    for (const auto* arrays : {&inputs_, &targets_}) {
      for (const HostTensor& array : *arrays) require_sensible(array);
    }
  }

  [[nodiscard]] std::int64_t size() const override { return inputs_[0].spec.shape[0]; }
  [[nodiscard]] BatchSpec spec() const override {
    BatchSpec spec;
    for (const HostTensor& array : inputs_) spec.inputs.push_back(one_sample(array.spec));
    for (const HostTensor& array : targets_) spec.targets.push_back(one_sample(array.spec));
    return spec;
  }
  void get(const ItemRequest& item, std::span<const Tensor> inputs,
           std::span<const Tensor> targets) const override {
    copy(item.index, inputs_, inputs);
    copy(item.index, targets_, targets);
  }

 private:
  void require_sensible(const HostTensor& array) const {
    if (array.spec.shape.rank() == 0 || array.spec.shape[0] < 1) {
      throw_usage("array {} of a data set has no samples in its first dimension",
                  to_string(array.spec));
    }
    if (array.bytes.size() != array.spec.bytes()) {
      throw_usage("array {} of a data set has {} bytes; legal: {}", to_string(array.spec),
                  array.bytes.size(), array.spec.bytes());
    }
    if (array.spec.shape[0] == size()) return;
    throw_usage("the arrays of a data set have different numbers of samples: {} and {}",
                to_string(inputs_[0].spec), to_string(array.spec));
  }

  static void copy(std::int64_t index, const std::vector<HostTensor>& arrays,
                   std::span<const Tensor> into) {
    for (std::size_t i = 0; i < into.size(); ++i) {
      const std::size_t bytes = into[i].spec.bytes();
      if (bytes == 0) continue;
      std::memcpy(into[i].data, arrays[i].bytes.data() + static_cast<std::size_t>(index) * bytes,
                  bytes);
    }
  }

  std::vector<HostTensor> inputs_, targets_;
};

}  // namespace

HostTensor host_copy(const Tensor& values) {
  if (values.data == nullptr && values.spec.bytes() > 0) {
    throw_usage("a copy of {} whose data is null; legal: values in host memory",
                to_string(values.spec));
  }
  const auto* const first = static_cast<const std::byte*>(values.data);
  return {.spec = values.spec, .bytes = {first, first + values.spec.bytes()}};
}

std::shared_ptr<Dataset> make_array_dataset(std::vector<HostTensor> inputs,
                                            std::vector<HostTensor> targets) {
  return std::make_shared<ArrayDataset>(std::move(inputs), std::move(targets));
}

}  // namespace sluice
