// What trainings of the tests of replicas take: batches of tokens, and an optimizer of slices.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>

#include "comm/group/communicator.hpp"

namespace sluice::testing {

// Of transformers with this context and vocabulary; rank 0 passes all.
struct Tokens {
  static constexpr std::int64_t kContext = 8, kVocabulary = 1025;

  std::vector<std::int32_t> inputs, targets;
  std::int64_t count;

  Tokens(std::uint64_t seed, std::int64_t samples) : count(samples) {
    for (std::int64_t i = 0; i <= samples * kContext; ++i) {
      const auto token = static_cast<std::int32_t>(
          philox({.seed = seed}, 0, static_cast<std::uint64_t>(i))[0] % kVocabulary);
      if (i < samples * kContext) inputs.push_back(token);
      if (i > 0) targets.push_back(token);
    }
  }
  static BatchSpec spec() {
    const TensorSpec tokens{DType::kI32, {kContext}};
    return {.inputs = {tokens}, .targets = {tokens}, .feed = Feed::kRank0};
  }
  [[nodiscard]] Batch part(const Communicator& comm, std::int64_t first, std::int64_t end) const {
    if (comm.rank() != 0) return {};
    const auto cut = [&](const std::vector<std::int32_t>& all) {
      return view(std::span(all).subspan(static_cast<std::size_t>(first * kContext),
                                         static_cast<std::size_t>((end - first) * kContext)),
                  {end - first, kContext});
    };
    return {.inputs = {cut(inputs)}, .targets = {cut(targets)}};
  }
  [[nodiscard]] Batch all(const Communicator& comm) const { return part(comm, 0, count); }
};

// Momentum by slices, as a program would write it: memory for its own elements alone.
class SliceMomentum : public Optimizer {
 public:
  explicit SliceMomentum(std::span<const ParameterSlice> slices)
      : slices_(slices.begin(), slices.end()) {
    for (const ParameterSlice& slice : slices_) {
      speeds_.emplace_back(static_cast<std::size_t>(slice.count));
    }
  }
  void update(ComputeContext& /*compute*/, std::uint64_t /*step*/, float learning_rate,
              float grad_scale) override {
    for (std::size_t s = 0; s < slices_.size(); ++s) {
      const auto& [parameter, first, count] = slices_[s];
      for (std::int64_t i = 0; i < count; ++i) {
        float& speed = speeds_[s][static_cast<std::size_t>(i)];
        speed = 0.75F * speed + grad_scale * parameter->grad.at(first + i);
        parameter->value.at(first + i) -= learning_rate * speed;
      }
    }
  }
  std::vector<OptimizerState> state() override {
    std::vector<OptimizerState> all;
    for (std::size_t s = 0; s < slices_.size(); ++s) {
      const ParameterSlice& slice = slices_[s];
      const Shape shape = slice.whole() ? slice.parameter->shape : Shape{slice.count};
      all.push_back({slice.parameter->name, "speed", view(speeds_[s], shape), slice.first});
    }
    return all;
  }

 private:
  std::vector<ParameterSlice> slices_;
  std::vector<std::vector<float>> speeds_;
};

inline std::unique_ptr<Optimizer> make_slice_momentum(std::span<const ParameterSlice> slices,
                                                      const DeviceMemory& /*memory*/) {
  return std::make_unique<SliceMomentum>(slices);
}

}  // namespace sluice::testing
