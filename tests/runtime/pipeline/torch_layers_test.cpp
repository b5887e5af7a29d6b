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

#include "stages/compute/context_access.hpp"
#include "tests/comm/mpi/mpi_main.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"

namespace sluice::testing {
namespace {

using namespace nn;
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
    const StateSlot slot(Device{}, description);
    prepare(*stage, {.compute = &compute,
                     .state = slot.state(),
                     .split_backward = split,
                     .seed = 5,
                     .input_sizes = {{in}}});
    ContextAccess::reserve_workspace(compute, description.operator_bytes);
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
    StageContext ctx{.compute = compute, .state = slot.state()};
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
  compare(rms_norm(10), rows, [](const torch::Tensor& x, Parameters& p) {
    return x * torch::rsqrt(x.pow(2).mean(-1, true) + 1e-5) * p["0.weight"];
  });
  compare(group({linear(10, 4), group({tanh(), rms_norm(4)})}), rows,
          [](const torch::Tensor& x, Parameters& p) {
            const torch::Tensor y = torch::tanh(torch::linear(x, p["0.0.weight"], p["0.0.bias"]));
            return y * torch::rsqrt(y.pow(2).mean(-1, true) + 1e-5) * p["0.1.1.weight"];
          });
  compare(embedding(4, 6), {DType::kI32, {5, 3}},
          [](const torch::Tensor& x, Parameters& p) { return torch::embedding(p["0.weight"], x); });
  compare(embedding(4, 6), {DType::kI32, {5}},
          [](const torch::Tensor& x, Parameters& p) { return torch::embedding(p["0.weight"], x); });
  const auto pure = [&](const LayerSpec& spec, torch::Tensor (*function)(const torch::Tensor&)) {
    compare(spec, rows, [=](const torch::Tensor& x, Parameters&) { return function(x); });
  };
  pure(relu(), torch::relu);
  pure(gelu(), [](const torch::Tensor& x) { return torch::gelu(x); });
  pure(gelu_tanh(), [](const torch::Tensor& x) { return torch::gelu(x, "tanh"); });
  pure(silu(), torch::silu);
  pure(tanh(), torch::tanh);
  pure(sigmoid(), torch::sigmoid);
  pure(softmax(), [](const torch::Tensor& x) { return torch::softmax(x, -1); });
  pure(flatten(), [](const torch::Tensor& x) { return torch::flatten(x, 1); });
  pure(dropout(0), [](const torch::Tensor& x) { return x.clone(); });
}

torch::Tensor normed(const torch::Tensor& x, Parameters& p, const std::string& name) {
  return torch::batch_norm(x, p[name + ".weight"], p[name + ".bias"], {}, {}, true, 0.1, 1e-5,
                           false);
}

TEST(TorchLayersTest, EveryLayerOfPicturesHasTorchsOutputsAndGradients) {
  if (world().rank() > 0) return;
  const TensorSpec images{DType::kF32, {3, 4, 9, 7}};
  const auto convolved = [](const std::vector<std::int64_t>& stride,
                            const std::vector<std::int64_t>& padding, std::int64_t groups) {
    return [=](const torch::Tensor& x, Parameters& p) {
      const torch::Tensor bias = p.count("0.bias") > 0 ? p["0.bias"] : torch::Tensor();
      return torch::conv2d(x, p["0.weight"], bias, stride, padding, 1, groups);
    };
  };
  compare(conv2d(4, 6, 3), images, convolved({1, 1}, {0, 0}, 1));
  compare(conv2d(4, 6, 3, {.stride = 2, .padding = 1}), images, convolved({2, 2}, {1, 1}, 1));
  compare(conv2d(4, 6, {5, 2}, {.stride = {1, 3}, .padding = {2, 0}, .bias = false}), images,
          convolved({1, 3}, {2, 0}, 1));
  compare(conv2d(4, 6, 3, {.padding = 1, .groups = 2}), images, convolved({1, 1}, {1, 1}, 2));
  compare(conv2d(4, 4, 3, {.groups = 4}), images, convolved({1, 1}, {0, 0}, 4));
  compare(conv2d(32, 64, 3, {.padding = 1}), {DType::kF32, {2, 32, 14, 14}},
          convolved({1, 1}, {1, 1}, 1));
  compare(conv2d(1, 32, 5, {.padding = 2}), {DType::kF32, {2, 1, 28, 28}},
          convolved({1, 1}, {2, 2}, 1));
  compare(batch_norm2d(4), images,
          [](const torch::Tensor& x, Parameters& p) { return normed(x, p, "0"); });
  for (const std::int64_t groups : {1, 2, 4}) {
    compare(group_norm(groups, 4), images, [=](const torch::Tensor& x, Parameters& p) {
      return torch::group_norm(x, groups, p["0.weight"], p["0.bias"], 1e-5);
    });
  }
  const auto pure = [&](const LayerSpec& spec, const Function& function) {
    compare(spec, images, function);
  };
  pure(max_pool2d(2), [](const torch::Tensor& x, Parameters&) {
    return torch::max_pool2d(x, {2, 2});
  });
  pure(max_pool2d(3, {.stride = 2, .padding = 1}), [](const torch::Tensor& x, Parameters&) {
    return torch::max_pool2d(x, {3, 3}, {2, 2}, {1, 1});
  });
  pure(avg_pool2d({3, 2}), [](const torch::Tensor& x, Parameters&) {
    return torch::avg_pool2d(x, {3, 2});
  });
  pure(avg_pool2d(3, {.stride = HeightWidth(1, 2), .padding = 1}),
       [](const torch::Tensor& x, Parameters&) {
         return torch::avg_pool2d(x, {3, 3}, {1, 2}, {1, 1});
       });
  pure(global_avg_pool2d(), [](const torch::Tensor& x, Parameters&) {
    return x.mean(std::vector<std::int64_t>{2, 3});
  });
  pure(residual({conv2d(4, 4, 3, {.padding = 1, .bias = false}), batch_norm2d(4), relu(),
                 conv2d(4, 4, 1)}),
       [](const torch::Tensor& x, Parameters& p) {
         const torch::Tensor at =
             torch::relu(normed(torch::conv2d(x, p["0.0.weight"], {}, 1, 1), p, "0.1"));
         return x + torch::conv2d(at, p["0.3.weight"], p["0.3.bias"]);
       });
  pure(residual({conv2d(4, 6, 3, {.stride = 2, .padding = 1}), relu()},
                {conv2d(4, 6, 1, {.stride = 2, .bias = false}), batch_norm2d(6)}),
       [](const torch::Tensor& x, Parameters& p) {
         return torch::relu(torch::conv2d(x, p["0.0.weight"], p["0.0.bias"], 2, 1)) +
                normed(torch::conv2d(x, p["0.shortcut.0.weight"], {}, 2), p, "0.shortcut.1");
       });
}

// The sum, its gradient and its weight.
void compare_loss(const LossSpec& spec, const Shape& outputs, const torch::Tensor& targets,
                  const std::function<torch::Tensor(const torch::Tensor& y)>& function) {
  SCOPED_TRACE(spec.kind);
  const std::unique_ptr<Loss> loss = spec.make();
  ComputeContext compute(Device{}, 1);
  ContextAccess::reserve_workspace(compute, loss->operator_bytes({DType::kF32, outputs}));
  std::vector<float> values = numbers(outputs.elements(), 6, 3);
  const Tensor y{values.data(), {DType::kF32, outputs}};
  const torch::Tensor at = as_torch(y).set_requires_grad(true);
  const torch::Tensor expected = function(at);
  (expected * 0.5).backward();
  StageContext ctx{.compute = compute};
  ctx.samples = outputs[0];
  ctx.loss_scale = 0.5;
  const TensorSpec spec_of_targets = loss->targets(y.spec);
  const torch::Tensor held = targets.contiguous();
  double sum = 0;
  loss->compute(ctx, y, {held.data_ptr(), spec_of_targets}, &sum);
  EXPECT_NEAR(sum, expected.item<double>(), 1e-5 * std::abs(expected.item<double>()));
  expect_close(as_torch(y), at.grad(), kGradients, "gradient");
}

TEST(TorchLayersTest, LossesHaveTorchsSumsAndGradients) {
  if (world().rank() > 0) return;
  const auto classes = [](std::vector<std::int64_t> dims, std::int64_t count) {
    std::int64_t elements = 1;
    for (const std::int64_t dim : dims) elements *= dim;
    return (torch::arange(elements) * 7 % count).reshape(dims);
  };
  const auto entropy = [](const torch::Tensor& wanted, std::int64_t ignored, double smoothing) {
    return [=](const torch::Tensor& y) {
      return torch::cross_entropy_loss(y, wanted.to(torch::kLong), {}, torch::Reduction::Sum,
                                       ignored, smoothing);
    };
  };
  const torch::Tensor rows = classes({9}, 5), pixels = classes({2, 6, 7}, 5);
  const torch::Tensor short_rows = rows.to(torch::kInt), short_pixels = pixels.to(torch::kInt);
  compare_loss(cross_entropy_loss(), {9, 5}, short_rows, entropy(rows, -100, 0));
  compare_loss(cross_entropy_loss({.targets = DType::kI64}), {9, 5}, rows, entropy(rows, -100, 0));
  compare_loss(cross_entropy_loss({.ignored = 3}), {9, 5}, short_rows, entropy(rows, 3, 0));
  compare_loss(cross_entropy_loss({.ignored = 3, .smoothing = 0.1}), {9, 5}, short_rows,
               entropy(rows, 3, 0.1));
  compare_loss(cross_entropy_loss({.axis = 1}), {2, 5, 6, 7}, short_pixels,
               entropy(pixels, -100, 0));
  compare_loss(
      cross_entropy_loss({.axis = 1, .targets = DType::kI64, .ignored = 0, .smoothing = 0.2}),
      {2, 5, 6, 7}, pixels, entropy(pixels, 0, 0.2));
  const torch::Tensor wanted = torch::linspace(-1, 1, 12).reshape({4, 3});
  compare_loss(mse_loss(), {4, 3}, wanted, [&](const torch::Tensor& y) {
    return torch::mse_loss(y, wanted, torch::Reduction::Sum);
  });
  const auto huber = [](float y, float target) -> LossTerm {
    const double off = double{y} - double{target}, size = std::abs(off);
    if (size <= 1) return {0.5 * off * off, off};
    return {size - 0.5, off > 0 ? 1.0 : -1.0};
  };
  compare_loss(elementwise_loss("huber", huber), {4, 3}, wanted, [&](const torch::Tensor& y) {
    return torch::huber_loss(y, wanted, torch::Reduction::Sum);
  });
}

// Over micro-batches of 1 to 3 samples: those of the whole batch, once.
TEST(TorchLayersTest, RunningStatisticsMoveOncePerStepAsTorchsOverTheBatch) {
  const auto self = world().split(world().rank(), 0);
  if (world().rank() > 0) return;
  const std::vector<float> x = numbers(7 * 3 * 4 * 5, 9, 2), y(7 * 3 * 4 * 5);
  const TensorSpec image{DType::kF32, {3, 4, 5}};
  const BatchSpec spec{.inputs = {image}, .targets = {image}};
  const Batch batch{.inputs = {view(x, {7, 3, 4, 5})}, .targets = {view(y, {7, 3, 4, 5})}};
  torch::Tensor mean = torch::zeros({3}), variance = torch::ones({3});
  PipelineOptions options;
  options.shape = {.micro_batches = 3, .micro_batch_size = 3};
  Pipeline pipeline(*self, Sequential({batch_norm2d(3, {.momentum = 0.2})}, mse_loss()), spec,
                    options);
  for (int step = 0; step < 3; ++step) {
    (void)pipeline.train_step(batch);
    (void)torch::batch_norm(as_torch(batch.inputs[0]), {}, {}, mean, variance, true, 0.2, 1e-5,
                            false);
    auto state = pipeline.state();
    expect_close(as_torch(state["0.running_mean"].tensor()), mean, 1e-5, "mean");
    expect_close(as_torch(state["0.running_var"].tensor()), variance, 1e-5, "variance");
  }
  // Outside of training the running ones count, whatever the micro-batches.
  const auto state = pipeline.state();
  auto weights = state;
  const torch::Tensor expected = torch::batch_norm(
      as_torch(batch.inputs[0]), as_torch(weights["0.weight"].tensor()),
      as_torch(weights["0.bias"].tensor()), mean, variance, false, 0.2, 1e-5, false);
  expect_close(as_torch(pipeline.infer(batch)[0]), expected, kOutputs, "infer()");
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
  Pipeline pipeline(comm, network.model.with_input({DType::kF32, {10}}), spec, options);
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
  follow(world(), {.model = Sequential({linear(10, 16), layer_norm(16), gelu_tanh(), linear(16, 3)},
                                       cross_entropy_loss()),
                   .function =
                       [](const torch::Tensor& x, Parameters& p) {
                         torch::Tensor at = torch::linear(x, p["0.weight"], p["0.bias"]);
                         at = torch::layer_norm(at, {16}, p["1.weight"], p["1.bias"], 1e-5);
                         return torch::linear(torch::gelu(at, "tanh"), p["3.weight"], p["3.bias"]);
                       },
                   .classes = true,
                   .optimizer = adam});
  follow(world(), {.model = Sequential({unflatten({1, 5, 2}), conv2d(1, 4, 3, {.padding = 1}),
                                        relu(), residual({conv2d(4, 4, 3, {.padding = 1}), tanh()}),
                                        max_pool2d({2, 1}), flatten(), linear(16, 3)},
                                       cross_entropy_loss()),
                   .function =
                       [](const torch::Tensor& x, Parameters& p) {
                         torch::Tensor at = x.reshape({-1, 1, 5, 2});
                         at = torch::relu(torch::conv2d(at, p["1.weight"], p["1.bias"], 1, 1));
                         at = at +
                              torch::tanh(torch::conv2d(at, p["3.0.weight"], p["3.0.bias"], 1, 1));
                         at = torch::flatten(torch::max_pool2d(at, {2, 1}), 1);
                         return torch::linear(at, p["6.weight"], p["6.bias"]);
                       },
                   .classes = true,
                   .optimizer = sgd});
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
