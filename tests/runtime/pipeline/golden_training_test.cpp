// 20 steps of three small networks against PyTorch's losses in golden.json, from the same values,
// on one and on several ranks.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>

#include "tests/golden.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

struct Network {
  Sequential model;
  OptimizerConfig optimizer;
  LearningRate rate;
  int micro_batches = 3;  // of the 12 samples
  DType inputs = DType::kF32, targets = DType::kI32;
};

std::map<std::string, Network> networks() {
  using Decay = LearningRate::Decay;
  const Sequential numbers({linear(10, 24), relu(), linear(24, 12), gelu(), linear(12, 1)},
                           mse_loss());
  const Sequential images({conv2d(1, 4, 3, {.padding = 1}), batch_norm2d(4), relu(), max_pool2d(2),
                           conv2d(4, 6, 3, {.groups = 2}), group_norm(2, 6), silu(),
                           avg_pool2d(2, {.stride = 1}), flatten(), linear(6, 3)},
                          cross_entropy_loss());
  const Sequential rows(
      {embedding(11, 6), residual({layer_norm(6), linear(6, 12), gelu_tanh(), linear(12, 6)}),
       rms_norm(6), flatten(), linear(24, 5)},
      cross_entropy_loss({.targets = DType::kI64, .smoothing = 0.1}));
  return {
      {"numbers",
       {.model = numbers,
        .optimizer = OptimizerConfig::sgd(0.9F, true),
        .rate = {.peak = 0.02, .decay = Decay::kStep, .factor = 0.5, .every = 8},
        .targets = DType::kF32}},
      // One micro-batch: its statistics are the batch's.
      {"images",
       {.model = images,
        .optimizer = OptimizerConfig::adam(),
        .rate = {.peak = 0.01},
        .micro_batches = 1}},
      {"rows",
       {.model = rows,
        .optimizer = OptimizerConfig::adamw(),
        .rate = {.peak = 0.01, .steps = 25},
        .inputs = DType::kI32,
        .targets = DType::kI64}},
  };
}

// Without the samples.
TensorSpec of_a_sample(const TensorSpec& spec) {
  std::vector<std::int64_t> dims;
  for (int d = 1; d < spec.shape.rank(); ++d) dims.push_back(spec.shape[d]);
  return {spec.dtype, Shape(std::span<const std::int64_t>(dims))};
}

void follow(Communicator& comm, const Network& network, const nlohmann::json& golden,
            const char* schedule) {
  HostTensor x = golden_tensor(golden.at("x"), network.inputs);
  HostTensor y = golden_tensor(golden.at("targets"), network.targets);
  const BatchSpec spec{.inputs = {of_a_sample(x.spec)}, .targets = {of_a_sample(y.spec)}};
  PipelineOptions options;
  options.shape = {.micro_batches = network.micro_batches,
                   .micro_batch_size = x.spec.shape[0] / network.micro_batches};
  options.order.schedule = schedule;
  options.training.optimizer = network.optimizer;
  options.training.learning_rate = network.rate;
  Pipeline pipeline(comm, network.model.with_input(spec.inputs[0]), spec, options);
  std::map<std::string, HostTensor> values;
  for (const auto& [name, tensor] : golden.at("parameters").items()) {
    values[name] = golden_tensor(tensor);
  }
  ASSERT_EQ(pipeline.state().size(), values.size());
  pipeline.set_state(values);
  const Batch batch{.inputs = {x.tensor()}, .targets = {y.tensor()}};
  const auto losses = golden.at("losses").get<std::vector<double>>();
  ASSERT_EQ(losses.size(), 20U);
  for (std::size_t step = 0; step < losses.size(); ++step) {
    EXPECT_NEAR(pipeline.train_step(batch).loss, losses[step], kLosses * losses[step])
        << "step " << step + 1;
  }
}

class GoldenTrainingTest : public ::testing::TestWithParam<int> {};

TEST_P(GoldenTrainingTest, LossesOfTwentyStepsAreTorchs) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const nlohmann::json golden = read_golden(SLUICE_GOLDEN_FILE).at("networks");
    expect_same_names(golden, networks());
    for (const auto& [name, network] : networks()) {
      SCOPED_TRACE(name);
      follow(comm, network, golden.at(name), "zb-h1");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GoldenTrainingTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace sluice::testing
