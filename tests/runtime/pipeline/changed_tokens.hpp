// Tokens of a model's kind, changed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/transformer.hpp>

#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {

// Those of synthetic_tokens(); what derives from it changes some of them.
class ChangedTokens : public DataSource {
 public:
  explicit ChangedTokens(const TransformerConfig& model) : tokens_(synthetic_tokens(model)) {}
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return tokens_->input_specs(samples);
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return tokens_->target_specs(samples);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    tokens_->inputs(phase, step, range, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    tokens_->targets(phase, step, range, into);
  }

 private:
  std::unique_ptr<DataSource> tokens_;
};

// The first four batches over and over, which a small model learns by heart.
class FourBatches : public ChangedTokens {
 public:
  using ChangedTokens::ChangedTokens;
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    ChangedTokens::inputs(phase, step % 4, range, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    ChangedTokens::targets(phase, step % 4, range, into);
  }
};

}  // namespace sluice::testing
