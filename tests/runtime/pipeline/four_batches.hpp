// Data that a small model learns by heart.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/transformer.hpp>

#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {

// The first four batches of another source, over and over.
class FourBatches : public DataSource {
 public:
  explicit FourBatches(const TransformerConfig& model) : all_(synthetic_tokens(model)) {}
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return all_->input_specs(samples);
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return all_->target_specs(samples);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    all_->inputs(phase, step % 4, range, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    all_->targets(phase, step % 4, range, into);
  }

 private:
  std::unique_ptr<DataSource> all_;
};

}  // namespace sluice::testing
