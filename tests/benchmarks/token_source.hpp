// Tokens for benchmarks: random, so that nothing is learnt and every step costs the same.
#pragma once

#include <sluice/data.hpp>
#include <sluice/tensor.hpp>

namespace sluice::benchmarks {

class RandomTokens : public DataSource {
 public:
  RandomTokens(std::int64_t context, int vocabulary) : context_(context), vocabulary_(vocabulary) {}
  std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return {{DType::kI32, Shape{samples, context_}}};
  }
  std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return input_specs(samples);
  }
  void inputs(Phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    for (std::int64_t i = 0; i < into[0].elements(); ++i) {
      const auto word =
          philox({.seed = step, .site = 3, .step = 0}, static_cast<std::uint64_t>(range.first),
                 static_cast<std::uint64_t>(i));
      into[0].as<std::int32_t>()[i] =
          static_cast<std::int32_t>(word[0] % static_cast<std::uint32_t>(vocabulary_));
    }
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    inputs(phase, step, range, into);
  }

 private:
  std::int64_t context_;
  int vocabulary_;
};

}  // namespace sluice::benchmarks
