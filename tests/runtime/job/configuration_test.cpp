#include "runtime/job/configuration.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Change = std::function<void(PipelineOptions&)>;

void expect_refused(const std::string& text, const std::vector<Change>& changes) {
  for (const Change& change : changes) {
    PipelineOptions options;
    change(options);
    expect_error(ErrorCode::kUsage, {text, "legal"}, [&] { require_sensible(options); });
  }
}

TEST(SensibleOptionsTest, WhatIsGivenByDefaultIsSensible) {
  require_sensible(PipelineOptions{});
  for (const OptimizerConfig& config : {OptimizerConfig::sgd(), OptimizerConfig::sgd(0.9F, true),
                                        OptimizerConfig::adam(), OptimizerConfig::adamw()}) {
    PipelineOptions options;
    options.training.optimizer = config;
    options.training.clip = std::numeric_limits<double>::infinity();
    options.training.learning_rate = {.peak = 0, .final_share = 0};
    require_sensible(options);
  }
}

TEST(SensibleOptionsTest, AnOptimizersNumbersAreOnesThatAStepCanWorkWith) {
  for (const float bad : {1.0F, -1.0F, kNan, kInfinity}) {
    expect_refused("beta1", {[&](auto& o) { o.training.optimizer.beta1 = bad; }});
    expect_refused("beta2", {[&](auto& o) { o.training.optimizer.beta2 = bad; }});
  }
  for (const float bad : {0.0F, -1.0F, kNan, kInfinity}) {
    expect_refused("epsilon", {[&](auto& o) { o.training.optimizer.epsilon = bad; }});
  }
  for (const float bad : {-1.0F, kNan, kInfinity}) {
    expect_refused("weight decay",
                   {[&](auto& o) { o.training.optimizer.weight_decay = bad; },
                    [&](auto& o) { o.training.groups = {{.names = "*", .weight_decay = bad}}; }});
    expect_refused("momentum",
                   {[&](auto& o) { o.training.optimizer = OptimizerConfig::sgd(bad); }});
  }
  for (const double bad : {-1.0, static_cast<double>(kNan)}) {
    expect_refused("clip", {[&](auto& o) { o.training.clip = bad; }});
  }
  // A program's own optimizer gets none of them.
  PipelineOptions options;
  options.training.optimizer.beta1 = kNan;
  options.training.make_optimizer = [](std::span<Parameter* const>, const DeviceMemory&) {
    return std::unique_ptr<Optimizer>();
  };
  require_sensible(options);
}

TEST(SensibleOptionsTest, F32HoldsEveryLearningRate) {
  for (const double bad : {-1.0, static_cast<double>(kNan), static_cast<double>(kInfinity), 1e39}) {
    expect_refused("learning rate", {[&](auto& o) { o.training.learning_rate.peak = bad; }});
  }
  for (const double bad : {-1.0, static_cast<double>(kNan), 1e300}) {
    expect_refused("learning rate", {[&](auto& o) {
                     o.training.groups = {{.names = "*", .learning_rate_scale = bad}};
                   }});
  }
  const LearningRate grows{
      .peak = 1, .decay = LearningRate::Decay::kStep, .factor = 1e20, .every = 1};
  require_sensible(grows, {});
  require_sensible_at(2, grows, {});
  expect_error(ErrorCode::kUsage, {"the learning rate of step 3 is 1e+40", "legal"},
               [&] { require_sensible_at(3, grows, {}); });
  const std::vector<ParameterGroup> groups = {{.names = "*", .learning_rate_scale = 1e20}};
  expect_error(ErrorCode::kUsage, {"the learning rate of step 2", "times up to 1e+20"},
               [&] { require_sensible_at(2, grows, groups); });
}

TEST(SensibleOptionsTest, ThreadsAndDepthHaveLimits) {
  for (const int bad : {0, -1, 1025, std::numeric_limits<int>::max()}) {
    expect_refused("options.devices.threads is " + std::to_string(bad) + "; legal are 1 to 1024",
                   {[&](auto& o) { o.devices.threads = bad; }});
  }
  expect_refused("shape.pipeline is -1", {[](auto& o) { o.shape.pipeline = -1; }});
}

TEST(ConfigurationTest, AnOrderThatNoFileCanHoldIsTheUsersMistake) {
  Schedule order = empty_schedule("own", Placement::linear(1), 1);
  append(order, ActionKind::kForward, 0, 0);
  PipelineOptions options;
  const auto values = [&] {
    options.order.given = std::make_shared<const Schedule>(order);
    return agreed_values(options);
  };
  (void)values();
  for (const ActionKind kind : {ActionKind::kRecompute, ActionKind::kOptimizer,
                                ActionKind::kSendForward, static_cast<ActionKind>(99)}) {
    order.ranks[0].push_back({.action = {.kind = kind}});
    expect_error(ErrorCode::kUsage, {"options.order.given", "schedule 'own'"},
                 [&] { (void)values(); });
    order.ranks[0].pop_back();
  }
  order.name = std::string(201, 'x');
  expect_error(ErrorCode::kUsage, {"options.order.given", "name"}, [&] { (void)values(); });
}

}  // namespace
}  // namespace sluice
