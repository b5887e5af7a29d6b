#include "stages/operators/optimizer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace sluice {
namespace {

// Weights, then biases without decay, then a weight again; sizes that need padding.
ParameterSet make_parameters() {
  ParameterSet set;
  set.add("a.weight", {7, 11}, Init::normal(0.5));
  set.add("b.weight", {5, 3}, Init::normal(0.5));
  set.add("b.bias", {13}, Init::normal(0.5), false);
  set.add("c.weight", {70}, Init::normal(0.5));
  set.allocate({}, 11);
  return set;
}

void set_grads(ParameterSet& set, int step) {
  for (Parameter* parameter : set.all()) {
    int i = 0;
    for (float& grad : parameter->grad.floats()) {
      grad = std::sin(static_cast<float>(++i * (step + 1))) * 0.1F;
    }
  }
}

std::vector<double> values(ParameterSet& set) {
  std::vector<double> result;
  for (const Parameter* parameter : set.all()) {
    result.insert(result.end(), parameter->value.floats().begin(), parameter->value.floats().end());
  }
  return result;
}

std::vector<double> grads(ParameterSet& set) {
  std::vector<double> result;
  for (const Parameter* parameter : set.all()) {
    result.insert(result.end(), parameter->grad.floats().begin(), parameter->grad.floats().end());
  }
  return result;
}

std::vector<bool> decays(ParameterSet& set) {
  std::vector<bool> result;
  for (const Parameter* parameter : set.all()) {
    result.insert(result.end(), static_cast<size_t>(parameter->shape.elements()), parameter->decay);
  }
  return result;
}

double padding_sum(ParameterSet& set) {
  double sum = 0;
  size_t at = 0;
  for (const Parameter* parameter : set.all()) {
    const auto count = static_cast<size_t>(parameter->shape.elements());
    const size_t padded = (count + 63) / 64 * 64;
    for (size_t i = count; i < padded; ++i) {
      sum += std::abs(static_cast<double>(set.flat_values()[at + i]));
    }
    at += padded;
  }
  return sum;
}

class OptimizerTest : public ::testing::Test {
 protected:
  OptimizerTest() : compute_({}, 1), set_(make_parameters()) {}

  ComputeContext compute_;
  ParameterSet set_;
};

TEST_F(OptimizerTest, AdamWFollowsTheDoubleReference) {
  OptimizerConfig config;
  config.weight_decay = 0.1F;
  const auto optimizer = make_optimizer(config, set_.all(), {});
  std::vector<double> x = values(set_), m(x.size()), v(x.size());
  const std::vector<bool> decay = decays(set_);
  const double rate = 0.01F, scale = 0.5, beta1 = 0.9F, beta2 = 0.95F, epsilon = 1e-8F;
  for (int step = 1; step <= 5; ++step) {
    set_grads(set_, step);
    const std::vector<double> g = grads(set_);
    optimizer->update(compute_, static_cast<std::uint64_t>(step), 0.01F, 0.5F);
    for (size_t i = 0; i < x.size(); ++i) {
      const double grad = g[i] * scale;
      m[i] = beta1 * m[i] + (1 - beta1) * grad;
      v[i] = beta2 * v[i] + (1 - beta2) * grad * grad;
      const double first = m[i] / (1 - std::pow(beta1, step));
      const double second = v[i] / (1 - std::pow(beta2, step));
      x[i] -= rate * (first / (std::sqrt(second) + epsilon) +
                      (decay[i] ? static_cast<double>(config.weight_decay) * x[i] : 0.0));
    }
    const std::vector<double> got = values(set_);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(got[i], x[i], 2e-6) << "step " << step << " element " << i;
    }
  }
  EXPECT_EQ(padding_sum(set_), 0);
}

TEST_F(OptimizerTest, SgdWithMomentumFollowsTheDoubleReference) {
  OptimizerConfig config;
  config.kind = OptimizerConfig::Kind::kSgd;
  config.momentum = 0.9F;
  config.weight_decay = 0.01F;
  const auto optimizer = make_optimizer(config, set_.all(), {});
  std::vector<double> x = values(set_), velocity(x.size());
  const std::vector<bool> decay = decays(set_);
  for (int step = 1; step <= 5; ++step) {
    set_grads(set_, step);
    const std::vector<double> g = grads(set_);
    optimizer->update(compute_, static_cast<std::uint64_t>(step), 0.1F, 1.0F);
    for (size_t i = 0; i < x.size(); ++i) {
      const double grad = g[i] + (decay[i] ? static_cast<double>(config.weight_decay) * x[i] : 0.0);
      velocity[i] = static_cast<double>(config.momentum) * velocity[i] + grad;
      x[i] -= static_cast<double>(0.1F) * velocity[i];
    }
    const std::vector<double> got = values(set_);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(got[i], x[i], 2e-6) << "step " << step << " element " << i;
    }
  }
  EXPECT_EQ(padding_sum(set_), 0);
}

TEST_F(OptimizerTest, NesterovFollowsTheDoubleReference) {
  const OptimizerConfig config = OptimizerConfig::sgd(0.9F, /*nesterov=*/true);
  const auto optimizer = make_optimizer(config, set_.all(), {});
  std::vector<double> x = values(set_), velocity(x.size());
  const double momentum = 0.9F;
  for (int step = 1; step <= 5; ++step) {
    set_grads(set_, step);
    const std::vector<double> g = grads(set_);
    optimizer->update(compute_, static_cast<std::uint64_t>(step), 0.1F, 1.0F);
    for (size_t i = 0; i < x.size(); ++i) {
      velocity[i] = momentum * velocity[i] + g[i];
      x[i] -= static_cast<double>(0.1F) * (g[i] + momentum * velocity[i]);
    }
    const std::vector<double> got = values(set_);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(got[i], x[i], 2e-6) << "step " << step << " element " << i;
    }
  }
  EXPECT_EQ(padding_sum(set_), 0);
  OptimizerConfig wrong = OptimizerConfig::adam();
  wrong.nesterov = true;
  EXPECT_THROW((void)make_optimizer(wrong, set_.all(), {}), Error);
  EXPECT_THROW((void)make_optimizer(OptimizerConfig::sgd(0, true), set_.all(), {}), Error);
}

TEST_F(OptimizerTest, AdamAddsWeightDecayToTheGradient) {
  OptimizerConfig config = OptimizerConfig::adam();
  config.weight_decay = 0.1F;
  const auto optimizer = make_optimizer(config, set_.all(), {});
  std::vector<double> x = values(set_), m(x.size()), v(x.size());
  const std::vector<bool> decay = decays(set_);
  const double rate = 0.01F, beta1 = 0.9F, beta2 = 0.999F, epsilon = 1e-8F, weight = 0.1F;
  for (int step = 1; step <= 5; ++step) {
    set_grads(set_, step);
    const std::vector<double> g = grads(set_);
    optimizer->update(compute_, static_cast<std::uint64_t>(step), 0.01F, 1.0F);
    for (size_t i = 0; i < x.size(); ++i) {
      const double grad = g[i] + (decay[i] ? weight * x[i] : 0.0);
      m[i] = beta1 * m[i] + (1 - beta1) * grad;
      v[i] = beta2 * v[i] + (1 - beta2) * grad * grad;
      x[i] -= rate * m[i] / (1 - std::pow(beta1, step)) /
              (std::sqrt(v[i] / (1 - std::pow(beta2, step))) + epsilon);
    }
    const std::vector<double> got = values(set_);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(got[i], x[i], 5e-6) << "step " << step << " element " << i;
    }
  }
  EXPECT_EQ(padding_sum(set_), 0);
}

TEST_F(OptimizerTest, UpdateOfSomeParametersLeavesTheOthers) {
  const auto all = set_.all();
  const std::vector<Parameter*> some = {all[0], all[3]};
  const std::vector<float> before(all[1]->value.floats().begin(), all[1]->value.floats().end());
  set_grads(set_, 1);
  make_optimizer({}, some, {})->update(compute_, 1, 0.1F, 1.0F);
  const std::vector<float> after(all[1]->value.floats().begin(), all[1]->value.floats().end());
  EXPECT_EQ(before, after);

  ParameterSet whole = make_parameters();
  set_grads(whole, 1);
  make_optimizer({}, whole.all(), {})->update(compute_, 1, 0.1F, 1.0F);
  EXPECT_TRUE(std::equal(all[3]->value.floats().begin(), all[3]->value.floats().end(),
                         whole.all()[3]->value.floats().begin()));
}

TEST_F(OptimizerTest, StateIsNamedShapedAndCounted) {
  const auto adamw = make_optimizer({}, set_.all(), {});
  const auto state = adamw->state();
  ASSERT_EQ(state.size(), 8U);
  EXPECT_EQ(state[0].parameter, "a.weight");
  EXPECT_EQ(state[0].kind, "exp_avg");
  EXPECT_EQ(state[1].kind, "exp_avg_sq");
  EXPECT_EQ(state[7].tensor.shape(), Shape({70}));

  OptimizerConfig sgd;
  sgd.kind = OptimizerConfig::Kind::kSgd;
  EXPECT_TRUE(make_optimizer(sgd, set_.all(), {})->state().empty());
  sgd.momentum = 0.5F;
  EXPECT_EQ(make_optimizer(sgd, set_.all(), {})->state()[0].kind, "momentum");
}

TEST(LearningRateTest, WarmsUpLinearlyThenFollowsHalfACosine) {
  const LearningRate rate{.peak = 2.0, .final_share = 0.1, .warmup = 10, .steps = 110};
  EXPECT_DOUBLE_EQ(rate.at(1), 0.2);
  EXPECT_DOUBLE_EQ(rate.at(5), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(10), 2.0);
  EXPECT_DOUBLE_EQ(rate.at(60), 2.0 * 0.55);
  EXPECT_DOUBLE_EQ(rate.at(110), 0.2);
  EXPECT_DOUBLE_EQ(rate.at(500), 0.2);
  for (std::uint64_t step = 11; step <= 110; ++step) {
    EXPECT_LT(rate.at(step), rate.at(step - 1));
  }
}

TEST(LearningRateTest, FallsAlongALineOrInSteps) {
  const LearningRate line{.peak = 2,
                          .final_share = 0.5,
                          .warmup = 10,
                          .steps = 110,
                          .decay = LearningRate::Decay::kLinear};
  EXPECT_DOUBLE_EQ(line.at(5), 1);
  EXPECT_DOUBLE_EQ(line.at(10), 2);
  EXPECT_DOUBLE_EQ(line.at(60), 1.5);
  EXPECT_DOUBLE_EQ(line.at(110), 1);
  EXPECT_DOUBLE_EQ(line.at(1000), 1);
  const LearningRate steps{
      .peak = 8, .warmup = 2, .decay = LearningRate::Decay::kStep, .factor = 0.5, .every = 3};
  const std::vector<double> expected = {4, 8, 8, 8, 8, 4, 4, 4, 2};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_DOUBLE_EQ(steps.at(i + 1), expected[i]);
  const LearningRate never{.peak = 8, .decay = LearningRate::Decay::kStep};
  EXPECT_DOUBLE_EQ(never.at(1'000'000), 8);
}

TEST(LearningRateTest, StaysAtThePeakWithoutStepsOrWhereWarmupFillsTheRun) {
  const LearningRate constant{.peak = 1, .warmup = 2};
  EXPECT_DOUBLE_EQ(constant.at(1), 0.5);
  EXPECT_DOUBLE_EQ(constant.at(2), 1);
  EXPECT_DOUBLE_EQ(constant.at(100), 1);
  const LearningRate short_run{.peak = 1, .warmup = 10, .steps = 4};
  EXPECT_DOUBLE_EQ(short_run.at(4), 0.4);
  const LearningRate no_warmup{.peak = 1, .final_share = 0, .warmup = 0, .steps = 2};
  EXPECT_DOUBLE_EQ(no_warmup.at(1), 0.5);
}

TEST(ClipFactorTest, BringsLargeNormsToTheLimit) {
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_factor(4.0, 1.0), 0.25);
  EXPECT_EQ(clip_factor(4.0, 0.0), 1.0);
  EXPECT_EQ(clip_factor(4.0, -1.0), 1.0);
  EXPECT_EQ(clip_factor(0.0, 1.0), 1.0);
}

}  // namespace
}  // namespace sluice
