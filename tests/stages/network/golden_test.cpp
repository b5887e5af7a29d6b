// Layers, losses, optimizers and rates against PyTorch's numbers in golden.json.
#include "tests/golden.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/layers.hpp>

#include "stages/operators/optimizer.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"

namespace sluice::testing {
namespace {

using namespace nn;
using Json = nlohmann::json;

std::map<std::string, LayerSpec> layers() {
  return {
      {"linear", linear(10, 7)},
      {"linear without bias", linear(10, 5, false)},
      {"layer_norm", layer_norm(10)},
      {"rms_norm", rms_norm(10)},
      {"embedding of rows", embedding(5, 6)},
      {"embedding of samples", embedding(5, 4)},
      {"relu", relu()},
      {"gelu", gelu()},
      {"gelu_tanh", gelu_tanh()},
      {"silu", silu()},
      {"tanh", tanh()},
      {"sigmoid", sigmoid()},
      {"softmax", softmax()},
      {"dropout of nothing", dropout(0)},
      {"flatten", flatten()},
      {"unflatten", unflatten({5, 2})},
      {"group", group({linear(10, 4), group({tanh(), rms_norm(4)})})},
      {"conv2d", conv2d(4, 6, 3)},
      {"conv2d with stride and padding", conv2d(4, 6, 3, {.stride = 2, .padding = 1})},
      {"conv2d of two sizes",
       conv2d(4, 6, {5, 2}, {.stride = {1, 3}, .padding = {2, 0}, .bias = false})},
      {"conv2d in groups", conv2d(4, 6, 3, {.padding = 1, .groups = 2})},
      {"conv2d of each channel", conv2d(4, 4, 3, {.groups = 4})},
      {"batch_norm2d", batch_norm2d(4)},
      {"batch_norm2d in evaluation", batch_norm2d(4, {.momentum = 0.3})},
      {"group_norm of one", group_norm(1, 4)},
      {"group_norm of two", group_norm(2, 4)},
      {"group_norm of each", group_norm(4, 4)},
      {"max_pool2d", max_pool2d(2)},
      {"max_pool2d that overlaps", max_pool2d(3, {.stride = 2, .padding = 1})},
      {"avg_pool2d", avg_pool2d({3, 2})},
      {"avg_pool2d that overlaps", avg_pool2d(3, {.stride = HeightWidth(1, 2), .padding = 1})},
      {"global_avg_pool2d", global_avg_pool2d()},
      {"residual", residual({conv2d(4, 4, 3, {.padding = 1, .bias = false}), batch_norm2d(4),
                             relu(), conv2d(4, 4, 1)})},
      {"residual with a shortcut",
       residual({conv2d(4, 6, 3, {.stride = 2, .padding = 1}), relu()},
                {conv2d(4, 6, 1, {.stride = 2, .bias = false}), batch_norm2d(6)})},
  };
}

// A stage of one layer with the file's parameters.
struct OneLayer {
  ComputeContext compute{Device{}, 1};
  std::unique_ptr<Stage> stage;
  StageDescription description;
  std::optional<StateSlot> slot;

  OneLayer(const LayerSpec& spec, const TensorSpec& in, bool split)
      : stage(Sequential({spec})(0, 1)) {
    description = stage->describe({&in, 1}, compute);
    slot.emplace(Device{}, description);
    prepare(*stage, {.compute = &compute,
                     .state = slot->state(),
                     .split_backward = split,
                     .seed = 5,
                     .input_sizes = {{in}}});
  }
  [[nodiscard]] std::vector<Parameter*> parameters() const {
    return stage->parameters() == nullptr ? std::vector<Parameter*>() : stage->parameters()->all();
  }
  [[nodiscard]] std::vector<Parameter*> buffers() const {
    return stage->parameters() == nullptr ? std::vector<Parameter*>()
                                          : stage->parameters()->buffers();
  }
  static void take(const std::vector<Parameter*>& to, const Json& from) {
    ASSERT_EQ(to.size(), from.size());
    for (Parameter* each : to) {
      HostTensor values = golden_tensor(from.at(each->name));
      ASSERT_EQ(values.spec.shape, each->shape) << each->name;
      std::copy_n(values.tensor().as<float>(), values.tensor().elements(), each->value.as<float>());
    }
  }
};

void compare_layer(const LayerSpec& spec, const Json& golden, bool trains, bool split) {
  const bool classes = spec.kind == "embedding";
  HostTensor x = golden_tensor(golden.at("x"), classes ? DType::kI32 : DType::kF32);
  HostTensor dy = golden_tensor(golden.at("dy"));
  OneLayer one(spec, x.spec, split);
  OneLayer::take(one.parameters(), golden.at("parameters"));
  OneLayer::take(one.buffers(), golden.at("buffers"));
  ASSERT_EQ(one.description.outputs[0], dy.spec);
  HostTensor y{dy.spec, std::vector<std::byte>(dy.bytes.size())};
  HostTensor dx{x.spec, std::vector<std::byte>(x.bytes.size())};
  const Tensor in = x.tensor(), out = y.tensor(), gradient = dy.tensor(), wanted = dx.tensor();
  StageContext ctx{.compute = one.compute, .state = one.slot->state()};
  ctx.phase = trains ? Phase::kTrain : Phase::kEvaluate;
  ctx.samples = in.shape()[0];
  ctx.inputs = {&in, 1};
  one.stage->forward(ctx, ctx.inputs, {&out, 1});
  expect_golden(out, golden.at("y"), kOutputs, "y");
  for (const Parameter* each : one.buffers()) {
    expect_golden(each->value, golden.at("buffers after").at(each->name), kOutputs, each->name);
  }
  if (!trains) return;
  const std::span<const Tensor> gradients{&wanted, classes ? 0U : 1U};
  if (split) {
    auto& halves = dynamic_cast<SplitBackward&>(*one.stage);
    halves.backward_input(ctx, {&gradient, 1}, gradients);
    halves.backward_weight(ctx, {&gradient, 1});
  } else {
    one.stage->backward(ctx, {&gradient, 1}, gradients);
  }
  if (!classes) expect_golden(wanted, golden.at("dx"), kGradients, "dx");
  for (const Parameter* each : one.parameters()) {
    expect_golden(each->grad, golden.at("gradients").at(each->name), kGradients, each->name);
  }
}

TEST(GoldenTest, LayersHaveTorchsOutputsAndGradients) {
  const Json golden = read_golden(SLUICE_GOLDEN_FILE).at("layers");
  expect_same_names(golden, layers());
  for (const auto& [name, layer] : layers()) {
    const bool trains = name.find("evaluation") == std::string::npos;
    for (const bool split : {false, true}) {
      SCOPED_TRACE(name + (split ? ", split" : ""));
      compare_layer(layer, golden.at(name), trains, split);
    }
  }
}

std::map<std::string, LossSpec> losses() {
  const auto huber = [](float y, float target) -> LossTerm {
    const double off = double{y} - double{target}, size = std::abs(off);
    if (size <= 1) return {0.5 * off * off, off};
    return {size - 0.5, off > 0 ? 1.0 : -1.0};
  };
  const DType wide = DType::kI64;
  return {
      {"mse_loss", mse_loss()},
      {"cross_entropy_loss", cross_entropy_loss()},
      {"cross_entropy_loss of i64", cross_entropy_loss({.targets = wide})},
      {"cross_entropy_loss with an ignored class", cross_entropy_loss({.ignored = 3})},
      {"cross_entropy_loss with smoothing", cross_entropy_loss({.ignored = 3, .smoothing = 0.1})},
      {"cross_entropy_loss of pixels", cross_entropy_loss({.axis = 1})},
      {"cross_entropy_loss of pixels with all",
       cross_entropy_loss({.axis = 1, .targets = wide, .ignored = 0, .smoothing = 0.2})},
      {"elementwise_loss", elementwise_loss("huber", huber)},
  };
}

TEST(GoldenTest, LossesHaveTorchsSumsAndGradients) {
  const Json golden = read_golden(SLUICE_GOLDEN_FILE).at("losses");
  expect_same_names(golden, losses());
  for (const auto& [name, spec] : losses()) {
    SCOPED_TRACE(name);
    const Json& expected = golden.at(name);
    const std::unique_ptr<Loss> loss = spec.make();
    HostTensor y = golden_tensor(expected.at("y"));
    HostTensor targets = golden_tensor(expected.at("targets"), loss->targets(y.spec).dtype);
    ASSERT_EQ(targets.spec, loss->targets(y.spec));
    ComputeContext compute(Device{}, 1);
    StageContext ctx{.compute = compute};
    ctx.samples = y.spec.shape[0];
    ctx.loss_scale = 0.5;
    double sum = 0;
    loss->compute(ctx, y.tensor(), targets.tensor(), &sum);
    const double wanted = expected.at("sum").get<double>();
    EXPECT_NEAR(sum, wanted, kOutputs * std::abs(wanted));
    expect_golden(y.tensor(), expected.at("gradient"), kGradients, "gradient");
  }
}

std::map<std::string, OptimizerConfig> optimizers() {
  OptimizerConfig decayed = OptimizerConfig::sgd(0.8F), adam = OptimizerConfig::adam();
  decayed.weight_decay = 0.05F;
  adam.beta1 = 0.8F;
  adam.beta2 = 0.99F;
  adam.epsilon = 1e-6F;
  adam.weight_decay = 0.05F;
  return {
      {"sgd", OptimizerConfig::sgd()},
      {"sgd with momentum", OptimizerConfig::sgd(0.9F)},
      {"sgd with nesterov", OptimizerConfig::sgd(0.9F, true)},
      {"sgd with decay", decayed},
      {"adam", OptimizerConfig::adam()},
      {"adam with decay", adam},
      {"adamw", OptimizerConfig::adamw()},
  };
}

TEST(GoldenTest, OptimizersHaveTorchsValues) {
  const Json golden = read_golden(SLUICE_GOLDEN_FILE).at("optimizers");
  expect_same_names(golden, optimizers());
  for (const auto& [name, config] : optimizers()) {
    SCOPED_TRACE(name);
    HostTensor start = golden_tensor(golden.at(name).at("start"));
    HostTensor gradients = golden_tensor(golden.at(name).at("gradients"));
    HostTensor made = gradients;
    ComputeContext compute(Device{}, 1);
    ParameterSet set;
    Parameter& parameter = set.add("weight", start.spec.shape, Init::constant(0));
    set.allocate(compute.memory(), 1);
    std::copy_n(start.tensor().as<float>(), parameter.value.elements(),
                parameter.value.as<float>());
    const std::vector<Parameter*> all = set.all();
    const std::unique_ptr<Optimizer> optimizer =
        make_optimizer(config, whole_slices(all), compute.memory());
    const std::int64_t count = parameter.value.elements();
    for (std::int64_t step = 0; step < gradients.spec.shape[0]; ++step) {
      std::copy_n(gradients.tensor().as<float>() + step * count, count, parameter.grad.as<float>());
      optimizer->update(compute, static_cast<std::uint64_t>(step) + 1, 0.1F, 1);
      std::copy_n(parameter.value.as<float>(), count, made.tensor().as<float>() + step * count);
    }
    expect_golden(made.tensor(), golden.at(name).at("values"), kOutputs, "values");
  }
}

TEST(GoldenTest, RatesAreTorchs) {
  using Decay = LearningRate::Decay;
  const std::map<std::string, LearningRate> rates = {
      {"constant", {.peak = 0.2}},
      {"step", {.peak = 0.2, .decay = Decay::kStep, .factor = 0.5, .every = 6}},
      {"cosine", {.peak = 0.2, .steps = 20}},
      {"cosine after a warmup", {.peak = 0.2, .warmup = 4, .steps = 20}},
      {"linear", {.peak = 0.2, .steps = 20, .decay = Decay::kLinear}},
  };
  const Json golden = read_golden(SLUICE_GOLDEN_FILE).at("rates");
  expect_same_names(golden, rates);
  for (const auto& [name, rate] : rates) {
    const auto expected = golden.at(name).get<std::vector<double>>();
    ASSERT_EQ(expected.size(), 24U);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(rate.at(i + 1), expected[i], 1e-12) << name << ", step " << i + 1;
    }
  }
}

}  // namespace
}  // namespace sluice::testing
