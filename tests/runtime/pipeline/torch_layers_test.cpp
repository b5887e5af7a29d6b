// Layers and losses against LibTorch: outputs, gradients, and training from the same values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/torch.hpp>

#include "tests/comm/mpi/mpi_main.hpp"

namespace sluice::testing {
namespace {

using Parameters = std::map<std::string, torch::Tensor>;
using Function = std::function<torch::Tensor(const torch::Tensor& x, Parameters& parameters)>;

std::vector<float> numbers(std::int64_t count, std::uint64_t site, float scale = 1) {
  std::vector<float> made;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto word = philox({.seed = 3, .site = site}, 0, static_cast<std::uint64_t>(i))[0];
    made.push_back((2 * to_unit(word) - 1) * scale);
  }
  return made;
}

std::vector<std::int64_t> dims_of(const Shape& shape) {
  std::vector<std::int64_t> dims;
  for (int d = 0; d < shape.rank(); ++d) dims.push_back(shape[d]);
  return dims;
}

torch::Tensor as_torch(const Tensor& tensor) {
  const auto type = tensor.spec.dtype == DType::kF32 ? torch::kFloat32 : torch::kInt32;
  return torch::from_blob(tensor.data, dims_of(tensor.shape()), type).clone();
}

// max |a - b| <= tolerance max |b|.
void expect_close(const torch::Tensor& a, const torch::Tensor& b, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const double off = (a - b).abs().max().item<double>();
  EXPECT_LE(off, tolerance * b.abs().max().item<double>()) << what;
}

constexpr double kOutputs = 1e-5, kGradients = 1e-4;

// One stage with the layer, its input gradient and weight gradient in two calls and in one.
void compare(const LayerSpec& spec, const TensorSpec& in, const Function& function) {
  for (const bool split : {false, true}) {
    SCOPED_TRACE(spec.kind + (split ? " split" : ""));
    ComputeContext compute(Device{}, 1);
    const std::unique_ptr<Stage> stage = Sequential({spec})(0, 1);
    const StageDescription description = stage->describe({&in, 1}, compute);
    stage->prepare(
        {.compute = &compute, .split_backward = split, .seed = 5, .input_sizes = {{in}}});
    compute.reserve_workspace(description.operator_bytes);
    const TensorSpec& out = description.outputs[0];
    std::vector<float> x = numbers(in.shape.elements(), 1, 3), dx(x.size(), std::nanf(""));
    std::vector<std::int32_t> classes;
    for (const float value : x) classes.push_back(static_cast<std::int32_t>(std::abs(value)));
    const bool trains_input = is_float(in.dtype);
    const Tensor input{trains_input ? static_cast<void*>(x.data()) : classes.data(), in};
    std::vector<float> y(static_cast<std::size_t>(out.shape.elements()));
    const std::vector<float> dy = numbers(out.shape.elements(), 2);
    const Tensor output{y.data(), out}, gradient = view(dy, out.shape);
    const Tensor input_gradient{dx.data(), in};
    const std::span<const Tensor> wanted{&input_gradient, trains_input ? 1U : 0U};
    StageContext ctx{.compute = compute};
    ctx.samples = in.shape[0];
    ctx.inputs = {&input, 1};
    stage->forward(ctx, ctx.inputs, {&output, 1});
    if (split) {
      auto& halves = dynamic_cast<SplitBackward&>(*stage);
      halves.backward_input(ctx, {&gradient, 1}, wanted);
      halves.backward_weight(ctx, {&gradient, 1});
    } else {
      stage->backward(ctx, {&gradient, 1}, wanted);
    }

    Parameters parameters;
    std::map<std::string, torch::Tensor> gradients;
    if (stage->parameters() != nullptr) {
      for (const Parameter* each : stage->parameters()->all()) {
        parameters[each->name] = as_torch(each->value).set_requires_grad(true);
        gradients[each->name] = as_torch(each->grad);
      }
    }
    const torch::Tensor at = as_torch(input).set_requires_grad(trains_input);
    const torch::Tensor expected = function(at, parameters);
    expected.backward(as_torch(gradient));
    expect_close(as_torch(output), expected, kOutputs, "output");
    if (trains_input) expect_close(as_torch(input_gradient), at.grad(), kGradients, "dx");
    for (const auto& [name, mine] : gradients) {
      expect_close(mine, parameters[name].grad(), kGradients, name);
    }
  }
}

TEST(TorchLayersTest, EveryLayerHasTorchsOutputsAndGradients) {
  if (world().rank() > 0) return;
  const TensorSpec rows{DType::kF32, {7, 3, 10}};
  compare(linear(10, 13), rows, [](const torch::Tensor& x, Parameters& p) {
    return torch::linear(x, p["0.weight"], p["0.bias"]);
  });
  compare(linear(10, 5, false), rows,
          [](const torch::Tensor& x, Parameters& p) { return torch::linear(x, p["0.weight"]); });
  compare(layer_norm(10), rows, [](const torch::Tensor& x, Parameters& p) {
    return torch::layer_norm(x, {10}, p["0.weight"], p["0.bias"], 1e-5);
  });
  compare(embedding(4, 6), {DType::kI32, {5, 3}},
          [](const torch::Tensor& x, Parameters& p) { return torch::embedding(p["0.weight"], x); });
  compare(embedding(4, 6), {DType::kI32, {5}},
          [](const torch::Tensor& x, Parameters& p) { return torch::embedding(p["0.weight"], x); });
  const auto pure = [&](const LayerSpec& spec, torch::Tensor (*function)(const torch::Tensor&)) {
    compare(spec, rows, [=](const torch::Tensor& x, Parameters&) { return function(x); });
  };
  pure(relu(), torch::relu);
  pure(gelu(), [](const torch::Tensor& x) { return torch::gelu(x, "tanh"); });
  pure(silu(), torch::silu);
  pure(tanh(), torch::tanh);
  pure(sigmoid(), torch::sigmoid);
  pure(flatten(), [](const torch::Tensor& x) { return torch::flatten(x, 1); });
  pure(dropout(0), [](const torch::Tensor& x) { return x.clone(); });
}

TEST(TorchLayersTest, InitialValuesAreOfTorchsDistributions) {
  if (world().rank() > 0) return;
  const std::unique_ptr<Stage> stage = Sequential({linear(400, 300), embedding(100, 400)})(0, 1);
  ParameterSet& set = *stage->parameters();
  ComputeContext compute(Device{}, 1);
  set.allocate(compute.memory(), 1);
  const auto spread = [&](const char* name, double low, double high, double deviation) {
    const torch::Tensor value = as_torch(set.find(name)->value);
    EXPECT_GE(value.min().item<double>(), low) << name;
    EXPECT_LE(value.max().item<double>(), high) << name;
    EXPECT_NEAR(value.std().item<double>(), deviation, 0.05 * deviation) << name;
  };
  spread("0.weight", -0.05, 0.05, 0.05 / std::sqrt(3.0));
  spread("0.bias", -0.05, 0.05, 0.05 / std::sqrt(3.0));
  spread("1.weight", -6, 6, 1);
}

struct Network {
  Sequential model;
  Function function;  // the same with torch
  bool classes = false;
  OptimizerConfig optimizer = {};
};

// Losses of 20 steps over one batch of 12, from the values that the pipeline drew.
void follow(Communicator& comm, const Network& network) {
  constexpr std::int64_t kSamples = 12;
  PipelineOptions options;
  options.shape = {.micro_batches = 3, .micro_batch_size = 4};
  options.training.optimizer = network.optimizer;
  options.training.learning_rate = {.peak = 0.02};
  const std::vector<float> x = numbers(kSamples * 10, 4), y = numbers(kSamples, 5);
  std::vector<std::int32_t> classes;
  for (int i = 0; i < kSamples; ++i) classes.push_back(i % 3);
  const BatchSpec spec{
      .inputs = {{DType::kF32, {10}}},
      .targets = {network.classes ? TensorSpec{DType::kI32, {}} : TensorSpec{DType::kF32, {1}}}};
  const Batch batch{
      .inputs = {view(x, {kSamples, 10})},
      .targets = {network.classes ? view(classes, {kSamples}) : view(y, {kSamples, 1})}};
  Pipeline pipeline(comm, options, network.model.with_input({DType::kF32, {10}}), spec);
  Parameters parameters;
  std::vector<torch::Tensor> all;
  for (auto& [name, value] : pipeline.state()) {
    all.push_back(as_torch(value.tensor()).set_requires_grad(true));
    parameters[name] = all.back();
  }
  const OptimizerConfig& how = network.optimizer;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (how.kind == OptimizerConfig::Kind::kSgd) {
    optimizer = std::make_unique<torch::optim::SGD>(
        all, torch::optim::SGDOptions(0.02).momentum(how.momentum));
  } else {
    optimizer = std::make_unique<torch::optim::Adam>(
        all, torch::optim::AdamOptions(0.02).betas({how.beta1, how.beta2}));
  }
  for (int step = 0; step < 20; ++step) {
    optimizer->zero_grad();
    const torch::Tensor outputs = network.function(as_torch(batch.inputs[0]), parameters);
    const torch::Tensor targets = as_torch(batch.targets[0]);
    const torch::Tensor loss = network.classes
                                   ? torch::cross_entropy_loss(outputs, targets.to(torch::kLong))
                                   : torch::mse_loss(outputs, targets);
    loss.backward();
    optimizer->step();
    const double mine = pipeline.train_step(batch).loss;
    EXPECT_NEAR(mine, loss.item<double>(), 1e-4 * loss.item<double>()) << "step " << step;
  }
}

TEST(TorchLayersTest, TrainingFollowsTorch) {
  if (world().size() > 3) return;
  OptimizerConfig sgd{.kind = OptimizerConfig::Kind::kSgd, .momentum = 0.9F};
  const OptimizerConfig adam{.beta1 = 0.9F, .beta2 = 0.999F};
  follow(world(), {.model = Sequential(
                       {linear(10, 50), relu(), linear(50, 20), relu(), linear(20, 1)}, mse_loss()),
                   .function =
                       [](const torch::Tensor& x, Parameters& p) {
                         const auto map = [&](const torch::Tensor& at, const std::string& name) {
                           return torch::linear(at, p[name + ".weight"], p[name + ".bias"]);
                         };
                         return map(torch::relu(map(torch::relu(map(x, "0")), "2")), "4");
                       },
                   .optimizer = sgd});
  follow(world(), {.model = Sequential({linear(10, 16), layer_norm(16), gelu(), linear(16, 3)},
                                       cross_entropy_loss()),
                   .function =
                       [](const torch::Tensor& x, Parameters& p) {
                         torch::Tensor at = torch::linear(x, p["0.weight"], p["0.bias"]);
                         at = torch::layer_norm(at, {16}, p["1.weight"], p["1.bias"], 1e-5);
                         return torch::linear(torch::gelu(at, "tanh"), p["3.weight"], p["3.bias"]);
                       },
                   .classes = true,
                   .optimizer = adam});
  sgd.momentum = 0;
  follow(world(),
         {.model = Sequential(
              {linear(10, 8), silu(), linear(8, 8), tanh(), linear(8, 1), sigmoid()}, mse_loss()),
          .function =
              [](const torch::Tensor& x, Parameters& p) {
                torch::Tensor at = torch::linear(x, p["0.weight"], p["0.bias"]);
                at = torch::linear(torch::silu(at), p["2.weight"], p["2.bias"]);
                at = torch::linear(torch::tanh(at), p["4.weight"], p["4.bias"]);
                return torch::sigmoid(at);
              },
          .optimizer = sgd});
}

}  // namespace
}  // namespace sluice::testing
