#include "stages/operators/optimizer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <sluice/error.hpp>

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
  const auto optimizer = make_optimizer(config, whole_slices(set_.all()), {});
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
  const auto optimizer = make_optimizer(config, whole_slices(set_.all()), {});
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
  const auto optimizer = make_optimizer(config, whole_slices(set_.all()), {});
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
  EXPECT_THROW((void)make_optimizer(wrong, whole_slices(set_.all()), {}), Error);
  EXPECT_THROW((void)make_optimizer(OptimizerConfig::sgd(0, true), whole_slices(set_.all()), {}),
               Error);
}

TEST_F(OptimizerTest, AdamAddsWeightDecayToTheGradient) {
  OptimizerConfig config = OptimizerConfig::adam();
  config.weight_decay = 0.1F;
  const auto optimizer = make_optimizer(config, whole_slices(set_.all()), {});
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
  make_optimizer({}, whole_slices(some), {})->update(compute_, 1, 0.1F, 1.0F);
  const std::vector<float> after(all[1]->value.floats().begin(), all[1]->value.floats().end());
  EXPECT_EQ(before, after);

  ParameterSet whole = make_parameters();
  set_grads(whole, 1);
  make_optimizer({}, whole_slices(whole.all()), {})->update(compute_, 1, 0.1F, 1.0F);
  EXPECT_TRUE(std::equal(all[3]->value.floats().begin(), all[3]->value.floats().end(),
                         whole.all()[3]->value.floats().begin()));
}

TEST_F(OptimizerTest, StateIsNamedShapedAndCounted) {
  const auto adamw = make_optimizer({}, whole_slices(set_.all()), {});
  const auto state = adamw->state();
  ASSERT_EQ(state.size(), 8U);
  EXPECT_EQ(state[0].parameter, "a.weight");
  EXPECT_EQ(state[0].kind, "exp_avg");
  EXPECT_EQ(state[1].kind, "exp_avg_sq");
  EXPECT_EQ(state[7].tensor.shape(), Shape({70}));

  OptimizerConfig sgd;
  sgd.kind = OptimizerConfig::Kind::kSgd;
  EXPECT_TRUE(make_optimizer(sgd, whole_slices(set_.all()), {})->state().empty());
  sgd.momentum = 0.5F;
  EXPECT_EQ(make_optimizer(sgd, whole_slices(set_.all()), {})->state()[0].kind, "momentum");
}

OptimizerConfig bf16_moments() {
  OptimizerConfig config;
  config.moments = DType::kBf16;
  return config;
}

// --- slices ---
// Several blocks of 16,384 elements and parts of them; a vector without decay; one with a copy.
ParameterSet make_blocks() {
  ParameterSet set;
  set.add("a", {3, 20'000}, Init::normal(0.5)).keeps_bf16 = Bf16Copy::kEverywhere;
  set.add("b", {50'001}, Init::normal(0.5), false);
  set.add("c", {5}, Init::normal(0.5));
  set.add("d", {2, 16'384}, Init::normal(0.5)).keeps_bf16 = Bf16Copy::kEverywhere;
  set.allocate({}, 11);
  for (const Parameter* each : {set.find("a"), set.find("d")}) {
    std::fill_n(each->bf16_copy.as<Bf16>(), each->shape.elements(), Bf16{});
  }
  return set;
}

// [replica][parameter] what it updates, cut at random blocks; some slices are empty.
using Parts = std::vector<ParameterSlice>;
std::vector<Parts> cut_at_random(ParameterSet& set, unsigned replicas, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Parts> parts(replicas);
  for (Parameter* parameter : set.all()) {
    const std::int64_t elements = parameter->shape.elements();
    std::vector<std::int64_t> ends(parts.size(), elements);
    for (std::size_t r = 0; r + 1 < parts.size(); ++r) {
      const std::int64_t block = static_cast<std::int64_t>(random()) % (elements / 16'384 + 2);
      ends[r] = std::min(elements, 16'384 * block);
    }
    std::sort(ends.begin(), ends.end());
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const std::int64_t first = r == 0 ? 0 : ends[r - 1];
      parts[r].push_back({parameter, first, ends[r] - first});
    }
  }
  return parts;
}

std::vector<std::byte> bytes_of(const Tensor& tensor, std::int64_t first, std::int64_t count) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.spec.dtype));
  const std::byte* const data = tensor.as<std::byte>() + first * size;
  return {data, data + count * size};
}

constexpr std::uint64_t kSliceSteps = 3;
void train(ParameterSet& set, Optimizer& optimizer, int threads) {
  ComputeContext compute({}, threads);
  for (std::uint64_t step = 1; step <= kSliceSteps; ++step) {
    set.mark_values_changed();
    optimizer.update(compute, step, 0.01F, 0.5F);
  }
}

// The parts that are not empty, in this set, whose other gradients become NaN.
std::vector<ParameterSlice> slices_of(ParameterSet& set, const Parts& parts) {
  std::vector<ParameterSlice> slices;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    Parameter& parameter = *set.all()[i];
    const std::int64_t first = parts[i].first, count = parts[i].count;
    for (std::int64_t k = 0; k < parameter.shape.elements(); ++k) {
      if (k < first || k >= first + count) parameter.grad.at(k) = NAN;
    }
    if (count > 0) slices.push_back({&parameter, first, count});
  }
  return slices;
}

// Against the whole, which has been trained too; what is not in a part is as at the start.
void expect_values_of(ParameterSet& set, const Parts& parts, bool writes_copies) {
  ParameterSet start = make_blocks();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Parameter &one = *set.all()[i], &all = *parts[i].parameter, &old = *start.all()[i];
    const std::int64_t first = parts[i].first, count = parts[i].count;
    const auto same = [&](const Tensor& now, const Tensor& wanted, std::int64_t from,
                          std::int64_t to) {
      if (now.data == nullptr) return;
      EXPECT_TRUE(bytes_of(now, from, to - from) == bytes_of(wanted, from, to - from))
          << one.name << " from " << from << " to " << to;
    };
    same(one.value, all.value, first, first + count);
    same(one.value, old.value, 0, first);
    same(one.value, old.value, first + count, one.shape.elements());
    if (writes_copies) same(one.bf16_copy, all.bf16_copy, first, first + count);
    same(one.bf16_copy, old.bf16_copy, 0, first);
    same(one.bf16_copy, old.bf16_copy, first + count, one.shape.elements());
    EXPECT_EQ(one.bf16_copy_is_current, writes_copies && count == one.shape.elements());
  }
}

void expect_state_of(Optimizer& optimizer, const std::vector<ParameterSlice>& slices,
                     Optimizer& whole) {
  std::size_t next = 0;
  const std::vector<OptimizerState> states = optimizer.state(), whole_state = whole.state();
  for (const OptimizerState& of_all : whole_state) {
    const auto slice = std::find_if(slices.begin(), slices.end(), [&](const ParameterSlice& each) {
      return each.parameter->name == of_all.parameter;
    });
    if (slice == slices.end()) continue;
    ASSERT_LT(next, states.size());
    const OptimizerState& state = states[next++];
    EXPECT_EQ(state.parameter + state.kind, of_all.parameter + of_all.kind);
    EXPECT_EQ(state.first, slice->first);
    EXPECT_EQ(state.tensor.shape(), slice->whole() ? of_all.tensor.shape() : Shape{slice->count});
    EXPECT_TRUE(bytes_of(state.tensor, 0, slice->count) ==
                bytes_of(of_all.tensor, slice->first, slice->count))
        << state.kind << " of " << state.parameter << " from " << state.first << " on";
  }
  EXPECT_EQ(next, states.size());
}

TEST(SliceTest, EachPartGetsTheBitsOfTheWholeAndLeavesTheRest) {
  for (const OptimizerConfig& config :
       {OptimizerConfig::sgd(0.9F, true), OptimizerConfig::adamw(), bf16_moments()}) {
    ParameterSet whole = make_blocks();
    set_grads(whole, 1);
    const auto all = make_optimizer(config, whole_slices(whole.all()), {}, 7);
    train(whole, *all, 1);
    for (const unsigned replicas : {1U, 2U, 3U, 5U}) {
      for (const Parts& parts : cut_at_random(whole, replicas, replicas)) {
        ParameterSet set = make_blocks();
        set_grads(set, 1);
        const std::vector<ParameterSlice> slices = slices_of(set, parts);
        const auto optimizer = make_optimizer(config, slices, {}, 7);
        train(set, *optimizer, 3);
        expect_values_of(set, parts, config.kind == OptimizerConfig::Kind::kAdamW);
        expect_state_of(*optimizer, slices, *all);
      }
    }
  }
}

// --- moments in bf16 ---
std::vector<std::uint16_t> bits_of(const OptimizerState& state) {
  const Bf16* const data = state.tensor.as<Bf16>();
  std::vector<std::uint16_t> bits;
  for (std::int64_t i = 0; i < state.tensor.elements(); ++i) bits.push_back(data[i].bits);
  return bits;
}

// What philox(), the specification, makes of an f32 moment.
std::uint16_t rounded(float moment, const Parameter& parameter, std::uint64_t seed,
                      std::uint64_t step, std::size_t element, bool second) {
  const auto words = philox({seed, hash_name(parameter.name + ".moments"), step}, 0, element / 4);
  const std::uint32_t word = words[element % 4];
  const std::uint32_t random = second ? word >> 16 : word & 0xFFFFU;
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(moment) + random) >> 16);
}

TEST_F(OptimizerTest, Bf16MomentsAreF32OnesRoundedByTheNumberOfTheirPlace) {
  constexpr std::uint64_t kSeed = 0x1234'5678'9ABCU;
  const auto exact = make_optimizer({}, whole_slices(set_.all()), {});
  const std::vector<double> start = values(set_);
  set_grads(set_, 1);
  exact->update(compute_, 7, 0.01F, 0.5F);
  const std::vector<double> moved = values(set_);

  ParameterSet other = make_parameters();
  const auto optimizer = make_optimizer(bf16_moments(), whole_slices(other.all()), {}, kSeed);
  set_grads(other, 1);
  optimizer->update(compute_, 7, 0.01F, 0.5F);
  EXPECT_EQ(values(other), moved) << "the step uses the moments before they are rounded";
  EXPECT_NE(moved, start);
  const auto expected = exact->state(), actual = optimizer->state();
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].tensor.spec.dtype, DType::kBf16);
    const Parameter& parameter = *other.find(actual[i].parameter);
    const std::vector<std::uint16_t> bits = bits_of(actual[i]);
    for (std::size_t k = 0; k < bits.size(); ++k) {
      ASSERT_EQ(bits[k], rounded(expected[i].tensor.floats()[k], parameter, kSeed, 7, k,
                                 actual[i].kind == "exp_avg_sq"))
          << actual[i].kind << " of " << parameter.name << ", element " << k;
    }
  }
}

TEST_F(OptimizerTest, Bf16MomentsDependNeitherOnThreadsNorOnTheOtherParameters) {
  ParameterSet big;
  big.add("x", {5}, Init::normal(1));
  big.add("big", {50'001}, Init::normal(1));
  big.allocate({}, 3);
  const auto moments = [&](std::span<Parameter* const> parameters, int threads) {
    ComputeContext compute({}, threads);
    const auto optimizer = make_optimizer(bf16_moments(), whole_slices(parameters), {}, 5);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      set_grads(big, static_cast<int>(step));
      optimizer->update(compute, step, 0, 1);
    }
    std::vector<std::uint16_t> all;
    for (const OptimizerState& state : optimizer->state()) {
      if (state.parameter != "big") continue;
      const std::vector<std::uint16_t> bits = bits_of(state);
      all.insert(all.end(), bits.begin(), bits.end());
    }
    return all;
  };
  const std::vector<Parameter*> all = big.all(), last = {all[1]};
  const std::vector<std::uint16_t> one = moments(all, 1);
  EXPECT_EQ(moments(all, 3), one);
  EXPECT_EQ(moments(last, 1), one);
}

// Over many places the mean of what is stored is what was to be stored. Both moments start at 0,
// and all gradients are equal, so all elements would have one f32 moment. Four standard deviations
// of the mean of that many roundings of 1 in 65,536 at worst.
TEST(Bf16MomentsTest, RoundingIsUnbiasedAndTheTwoMomentsAreIndependent) {
  constexpr std::int64_t kElements = 1 << 18;
  ParameterSet set;
  set.add("w", {kElements}, Init::constant(0));
  set.allocate({}, 1);
  ComputeContext compute({}, 1);
  for (const float gradient : {0.1F, -0.3F, 1.2345F, 7e-5F}) {
    const auto optimizer = make_optimizer(bf16_moments(), whole_slices(set.all()), {}, 9);
    for (float& grad : set.all()[0]->grad.floats()) grad = gradient;
    optimizer->update(compute, 1, 0, 1);
    const float wanted[] = {gradient * (1.0F - 0.9F), gradient * gradient * (1.0F - 0.95F)};
    std::vector<double> off[2];
    for (std::size_t kind = 0; kind < 2; ++kind) {
      const auto bits = bits_of(optimizer->state()[kind]);
      const auto low = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(wanted[kind]) >> 16);
      const auto high = static_cast<std::uint16_t>(low + 1);
      const double below = to_float(Bf16{low}), step = to_float(Bf16{high}) - below;
      const double share = (wanted[kind] - below) / step;
      double ups = 0;
      for (const std::uint16_t each : bits) {
        ASSERT_TRUE(each == low || each == low + 1);
        ups += each - low;
        off[kind].push_back(each - low - share);
      }
      const double deviation = std::sqrt(share * (1 - share) / static_cast<double>(kElements));
      EXPECT_NEAR(ups / static_cast<double>(kElements), share, 4 * deviation + 1e-9) << gradient;
    }
    double together = 0;
    for (std::size_t i = 0; i < off[0].size(); ++i) together += off[0][i] * off[1][i];
    EXPECT_LT(std::abs(together / static_cast<double>(kElements)), 4 * 0.25 / 512) << gradient;
  }
}

// Rounding to nearest would leave a second moment where it is once its change falls below half of
// bf16's last bit, 1 in 512: with beta2 = 0.999 far from its limit.
TEST(Bf16MomentsTest, ASlowAverageStillReachesItsLimit) {
  ParameterSet set;
  set.add("w", {4096}, Init::constant(0));
  set.allocate({}, 1);
  ComputeContext compute({}, 1);
  OptimizerConfig config = bf16_moments();
  config.beta2 = 0.999F;
  const auto optimizer = make_optimizer(config, whole_slices(set.all()), {}, 2);
  for (float& grad : set.all()[0]->grad.floats()) grad = 1;
  for (std::uint64_t step = 1; step <= 4000; ++step) optimizer->update(compute, step, 0, 1);
  double sum = 0;
  for (const std::uint16_t bits : bits_of(optimizer->state()[1])) sum += to_float(Bf16{bits});
  EXPECT_NEAR(sum / 4096, 1 - std::pow(0.999, 4000), 2e-3);
}

TEST(Bf16MomentsTest, WhatIsNotFiniteStaysSo) {
  ParameterSet set;
  set.add("w", {3}, Init::constant(0));
  set.allocate({}, 1);
  ComputeContext compute({}, 1);
  const auto optimizer = make_optimizer(bf16_moments(), whole_slices(set.all()), {}, 2);
  const float infinity = std::numeric_limits<float>::infinity();
  const float grads[] = {infinity, -infinity, std::bit_cast<float>(0x7FFFFFFFU)};
  std::copy(std::begin(grads), std::end(grads), set.all()[0]->grad.floats().begin());
  optimizer->update(compute, 1, 0, 1);
  EXPECT_EQ(bits_of(optimizer->state()[0]), (std::vector<std::uint16_t>{0x7F80, 0xFF80, 0x7FC0}));
}

// --- copies of values in bf16 ---
// Copies for the first and the last parameter, one directly behind the other, and none between.
struct Copies {
  explicit Copies(ParameterSet& set) : memory(Device{}, 1024) {
    std::size_t offset = 0;
    for (const std::size_t i : {std::size_t{0}, set.size() - 1}) {
      Parameter& parameter = *set.all()[i];
      parameter.bf16_copy = {memory.data() + offset, {DType::kBf16, parameter.shape}};
      offset += round_up(parameter.bf16_copy.spec.bytes(), kBufferAlignment);
    }
  }
  Buffer memory;
};

TEST_F(OptimizerTest, AdamWWritesTheCopiesThatStagesKeep) {
  for (const DType moments : {DType::kF32, DType::kBf16}) {
    OptimizerConfig config;
    config.moments = moments;
    ParameterSet plain = make_parameters(), copied = make_parameters();
    const Copies copies(copied);
    set_grads(plain, 1);
    set_grads(copied, 1);
    make_optimizer(config, whole_slices(plain.all()), {})->update(compute_, 1, 0.1F, 1);
    make_optimizer(config, whole_slices(copied.all()), {})->update(compute_, 1, 0.1F, 1);
    EXPECT_EQ(values(plain), values(copied)) << "copies change no bit";
    for (Parameter* parameter : copied.all()) {
      if (parameter->bf16_copy.data == nullptr) continue;
      EXPECT_TRUE(parameter->bf16_copy_is_current);
      const std::span<float> values = parameter->value.floats();
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(parameter->bf16_copy.as<Bf16>()[i].bits, to_bf16(values[i]).bits)
            << parameter->name << " " << i;
      }
    }
    copied.mark_values_changed();
    for (const Parameter* parameter : copied.all()) EXPECT_FALSE(parameter->bf16_copy_is_current);
  }
}

TEST_F(OptimizerTest, SgdLeavesCopiesToTheirStage) {
  const Copies copies(set_);
  set_grads(set_, 1);
  make_optimizer(OptimizerConfig::sgd(0.9F), whole_slices(set_.all()), {})
      ->update(compute_, 1, 0.1F, 1);
  for (const Parameter* parameter : set_.all()) EXPECT_FALSE(parameter->bf16_copy_is_current);
}

TEST_F(OptimizerTest, MomentsOfOtherTypesAndOfSgdAreRefused) {
  OptimizerConfig config;
  config.moments = DType::kF16;
  EXPECT_THROW((void)make_optimizer(config, whole_slices(set_.all()), {}), Error);
  config = OptimizerConfig::sgd(0.9F);
  config.moments = DType::kBf16;
  EXPECT_THROW((void)make_optimizer(config, whole_slices(set_.all()), {}), Error);
  EXPECT_EQ(optimizer_bytes({}, 192), 1536U);
  EXPECT_EQ(optimizer_bytes(bf16_moments(), 192), 1024U) << "each vector at multiples of 256 bytes";
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
