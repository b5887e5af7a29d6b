#include <algorithm>
#include <utility>

#include <sluice/data.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

struct Rows {
  std::vector<float> values;
  std::int64_t width = 1;

  [[nodiscard]] std::int64_t count() const {
    return static_cast<std::int64_t>(values.size()) / width;
  }
  // Rows [first, first + count), modulo the number of rows.
  void copy(std::int64_t first, std::int64_t rows, float* into) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto from = values.begin() + ((first + i) % count()) * width;
      std::copy(from, from + width, into + i * width);
    }
  }
};

class ArraySource : public DataSource {
 public:
  ArraySource(Rows inputs, Rows targets, std::int64_t batch_size)
      : inputs_(std::move(inputs)), targets_(std::move(targets)), batch_size_(batch_size) {}

  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kF32, Shape{samples, inputs_.width}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return {{DType::kF32, Shape{samples, targets_.width}}};
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    inputs_.copy(first_row(phase, step, range), range.count, into[0].as<float>());
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    targets_.copy(first_row(phase, step, range), range.count, into[0].as<float>());
  }

 private:
  [[nodiscard]] std::int64_t first_row(Phase phase, std::uint64_t step, SampleRange range) const {
    if (phase != Phase::kTrain || step == 0) return range.first;
    const auto batches =
        static_cast<std::int64_t>((step - 1) % static_cast<std::uint64_t>(inputs_.count()));
    return (batches * batch_size_) % inputs_.count() + range.first;
  }

  Rows inputs_, targets_;
  std::int64_t batch_size_;
};

}  // namespace

std::unique_ptr<DataSource> make_array_source(std::vector<float> inputs, std::int64_t input_width,
                                              std::vector<float> targets, std::int64_t target_width,
                                              std::int64_t batch_size) {
  const auto rows = [](const std::vector<float>& values, std::int64_t width, const char* what) {
    const auto size = static_cast<std::int64_t>(values.size());
    if (width < 1 || size == 0 || size % width != 0) {
      throw_usage("{} {} do not make rows of {}", size, what, width);
    }
    return size / width;
  };
  const std::int64_t samples = rows(inputs, input_width, "inputs");
  if (rows(targets, target_width, "targets") != samples || batch_size < 1) {
    throw_usage(
        "{} samples of inputs need as many of targets and batches of at least "
        "one; got {} target values in rows of {}, batches of {}",
        samples, targets.size(), target_width, batch_size);
  }
  return std::make_unique<ArraySource>(Rows{std::move(inputs), input_width},
                                       Rows{std::move(targets), target_width}, batch_size);
}

}  // namespace sluice
