// The same bits however a transformer is cut into stages and its backward into halves.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include <sluice/transformer.hpp>

#include "tests/stages/transformer/local_pipeline.hpp"
#include "tests/stages/transformer/small_models.hpp"

namespace sluice {
namespace {

using testing::LocalPipeline;
using testing::make_micro_batch;
using testing::MicroBatch;

struct Variant {
  const char* name;
  TransformerKind kind;
  bool tied;
  float dropout;
  DType precision;
  void (*change)(TransformerConfig& config) = nullptr;  // of fields of llama
};

void PrintTo(const Variant& variant, std::ostream* os) { *os << variant.name; }

void to_stream(TransformerConfig& config) { config.stream_precision = DType::kBf16; }

TransformerConfig config_of(const Variant& variant) {
  TransformerConfig config{.kind = variant.kind,
                           .layers = 3,
                           .heads = 4,
                           .width = 48,
                           .context = 80,  // more than one block of the attention kernel
                           .vocabulary = 61,
                           .kv_heads = variant.kind == TransformerKind::kLlama ? 2 : 0,
                           .dropout = variant.dropout,
                           .tied = variant.tied,
                           .precision = variant.precision};
  if (variant.change != nullptr) variant.change(config);
  return config;
}

// Three micro-batches, the last one smaller.
std::vector<MicroBatch> batches_of(const TransformerConfig& config) {
  return {make_micro_batch(config, 0, 2, 70), make_micro_batch(config, 2, 2, 70),
          make_micro_batch(config, 4, 1, 70)};
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> grads;
};

Outcome outcome_of(const LocalPipeline& pipeline) {
  Outcome outcome;
  for (const auto& loss : pipeline.losses()) {
    outcome.losses.push_back(loss.sum);
  }
  outcome.grads = pipeline.grads();
  return outcome;
}

void expect_same_bits(const Outcome& got, const Outcome& expected, const std::string& what) {
  EXPECT_EQ(got.losses, expected.losses) << what;
  ASSERT_EQ(got.grads.size(), expected.grads.size()) << what;
  for (const auto& [name, grad] : got.grads) {
    const std::vector<float>& wanted = expected.grads.at(name);
    ASSERT_EQ(grad.size(), wanted.size());
    EXPECT_EQ(std::memcmp(grad.data(), wanted.data(), grad.size() * sizeof(float)), 0)
        << what << ": " << name;
    for (const float value : grad) {
      ASSERT_TRUE(std::isfinite(value)) << what << ": " << name;
    }
  }
}

class ExactnessTest : public ::testing::TestWithParam<Variant> {};

TEST_P(ExactnessTest, PartitionChangesNoBit) {
  const TransformerConfig config = config_of(GetParam());
  const auto batches = batches_of(config);
  LocalPipeline whole(config, {{0, 5}}, batches);
  whole.step();
  const Outcome expected = outcome_of(whole);
  for (const Partition& partition : {Partition{{0, 2, 5}},
                                     {{0, 4, 5}},
                                     {{0, 1, 5}},
                                     {{0, 2, 3, 5}},
                                     {{0, 1, 2, 5}},
                                     {{0, 2, 3, 4, 5}},
                                     {{0, 1, 2, 3, 4, 4, 4, 5}}}) {
    for (const bool split : {false, true}) {
      LocalPipeline cut(config, partition, batches, {.split_backward = split});
      cut.step();
      expect_same_bits(
          outcome_of(cut), expected,
          std::to_string(partition.stages()) + " stages, split " + std::to_string(split));
    }
  }
}

TEST_P(ExactnessTest, PartedBackwardEqualsTheWhole) {
  const TransformerConfig config = config_of(GetParam());
  const auto batches = batches_of(config);
  LocalPipeline fused(config, {{0, 2, 5}}, batches, {.split_backward = false});
  fused.step();
  const Outcome expected = outcome_of(fused);

  LocalPipeline together(config, {{0, 2, 5}}, batches, {.split_backward = false});
  for (const int i : {0, 1, 2}) {
    together.forward(i);
  }
  for (const int i : {0, 1, 2}) {
    together.backward(i);
  }
  expect_same_bits(outcome_of(together), expected, "all forward first");

  LocalPipeline parted(config, {{0, 2, 5}}, batches);
  for (const int i : {0, 1, 2}) {
    parted.forward(i);
  }
  for (const int i : {2, 0, 1}) {
    parted.backward_input(i);
  }
  for (const int i : {0, 1, 2}) {
    parted.backward_weight(i);
  }
  expect_same_bits(outcome_of(parted), expected, "I in another order, W deferred");

  LocalPipeline mixed(config, {{0, 2, 5}}, batches);
  mixed.forward(0);
  mixed.forward(1);
  mixed.backward_input(0);
  mixed.forward(2);
  mixed.backward_weight(0);
  mixed.backward_input(1);
  mixed.backward_input(2);
  mixed.backward_weight(1);
  mixed.backward_weight(2);
  expect_same_bits(outcome_of(mixed), expected, "F between I and W");
}

TEST_P(ExactnessTest, RecomputationChangesNoBit) {
  TransformerConfig config = config_of(GetParam());
  const auto batches = batches_of(config);
  LocalPipeline keeping(config, {{0, 5}}, batches, {.split_backward = false});
  keeping.step();
  const Outcome expected = outcome_of(keeping);
  for (const Recompute recompute : {Recompute::kAttention, Recompute::kBlock}) {
    config.recompute = recompute;
    const std::string what = "recompute " + std::to_string(static_cast<int>(recompute));
    for (const Partition& partition : {Partition{{0, 5}}, {{0, 2, 5}}, {{0, 1, 4, 5}}}) {
      // All forwards first: nothing but what is kept per slot outlives the next micro-batch's.
      LocalPipeline whole(config, partition, batches, {.split_backward = false});
      LocalPipeline parted(config, partition, batches);
      for (const int i : {0, 1, 2}) {
        whole.forward(i);
        parted.forward(i);
      }
      for (const int i : {0, 1, 2}) {
        whole.backward(i);
      }
      expect_same_bits(outcome_of(whole), expected, what);
      for (const int i : {1, 0, 2}) {
        parted.backward_input(i);
      }
      for (const int i : {0, 1, 2}) {
        parted.backward_weight(i);
      }
      expect_same_bits(outcome_of(parted), expected, what + ", I in another order, W deferred");
    }
    LocalPipeline mixed(config, {{0, 2, 5}}, batches);  // a split stage that also runs B
    mixed.forward(0);
    mixed.forward(1);
    mixed.backward_input(0);
    mixed.forward(2);
    mixed.backward_weight(0);
    mixed.backward(1);
    mixed.backward(2);
    expect_same_bits(outcome_of(mixed), expected,
                     what + ", F between I and W, and whole backwards");
  }
}

TEST_P(ExactnessTest, RepeatsAfterZeroedGradients) {
  const TransformerConfig config = config_of(GetParam());
  LocalPipeline pipeline(config, {{0, 2, 5}}, batches_of(config));
  pipeline.step();
  const Outcome expected = outcome_of(pipeline);
  pipeline.stage(0).parameters()->zero_grads({});
  pipeline.stage(1).parameters()->zero_grads({});
  pipeline.step();
  expect_same_bits(outcome_of(pipeline), expected, "second step");
}

constexpr RotaryScaling kScaling = {
    .kind = RotaryScaling::Kind::kLlama3, .factor = 4, .original_context = 40};

// Of 70 positions, the last two see none of the 64 keys of the attention kernel's first block.
void change_all(TransformerConfig& config) {
  testing::set_options_of_llama(config);
  config.width = 45;
  config.kv_heads = 2;
  config.norm_epsilon = 1e-6F;
  config.rotary_scaling = kScaling;
}

Variant llama_variant(const char* name, void (*change)(TransformerConfig& config)) {
  return {name, TransformerKind::kLlama, true, 0, DType::kF32, change};
}

INSTANTIATE_TEST_SUITE_P(
    Variants, ExactnessTest,
    ::testing::Values(
        Variant{"Gpt2", TransformerKind::kGpt2, true, 0, DType::kF32},
        Variant{"Gpt2UntiedDropout", TransformerKind::kGpt2, false, 0.2F, DType::kF32},
        Variant{"Gpt2Bf16Dropout", TransformerKind::kGpt2, true, 0.2F, DType::kBf16},
        Variant{"Llama", TransformerKind::kLlama, true, 0.1F, DType::kF32},
        Variant{"LlamaUntiedBf16", TransformerKind::kLlama, false, 0, DType::kBf16},
        llama_variant("HeadDim", [](auto& c) { c.head_dim = 10; }),
        llama_variant("Epsilon", [](auto& c) { c.norm_epsilon = 1e-3F; }),
        llama_variant("Biases",
                      [](auto& c) { c.qkv_bias = c.attention_output_bias = c.mlp_bias = true; }),
        llama_variant("Scaling", [](auto& c) { c.rotary_scaling = kScaling; }),
        llama_variant("QkNorm", [](auto& c) { c.qk_norm = true; }),
        llama_variant("Window",
                      [](auto& c) {
                        c.window = 5;
                        c.full_layers = {0, 2};
                      }),
        llama_variant("All", change_all),
        Variant{"Gpt2StreamDropout", TransformerKind::kGpt2, true, 0.2F, DType::kBf16, to_stream},
        Variant{"LlamaStream", TransformerKind::kLlama, false, 0, DType::kBf16, to_stream},
        Variant{"AllBf16Dropout", TransformerKind::kLlama, false, 0.2F, DType::kBf16, change_all}),
    [](const auto& instance) { return instance.param.name; });

// Small matmuls hide what accumulation in place and leading dimensions do.
TEST(TransformerLargeTest, PartitionChangesNoBitOfLargeMatmuls) {
  TransformerConfig config;  // width 256, MLP 1024, context 256
  config.layers = 2;
  const std::vector<MicroBatch> batches = {make_micro_batch(config, 0, 4, 256),
                                           make_micro_batch(config, 4, 4, 256)};
  LocalPipeline whole(config, {{0, 4}}, batches, {.split_backward = false});
  whole.step();
  const Outcome expected = outcome_of(whole);
  LocalPipeline cut(config, {{0, 2, 4}}, batches, {.split_backward = false});
  cut.step();
  expect_same_bits(outcome_of(cut), expected, "2 stages");
  LocalPipeline parted(config, {{0, 2, 3, 4}}, batches);
  parted.forward(0);
  parted.forward(1);
  parted.backward_input(1);
  parted.backward_input(0);
  parted.backward_weight(0);
  parted.backward_weight(1);
  expect_same_bits(outcome_of(parted), expected, "3 stages, parted backward");
}

TEST(TransformerDropoutTest, MaskIsOfTheSampleNotOfItsMicroBatch) {
  TransformerConfig config = config_of({"", TransformerKind::kGpt2, true, 0.3F, DType::kF32});
  LocalPipeline one(config, {{0, 5}}, {make_micro_batch(config, 0, 4, 70)});
  LocalPipeline three(config, {{0, 5}},
                      {make_micro_batch(config, 0, 2, 70), make_micro_batch(config, 2, 1, 70),
                       make_micro_batch(config, 3, 1, 70)});
  one.step();
  three.step();
  EXPECT_NEAR(one.loss_sum(), three.loss_sum(), 1e-6 * one.loss_sum());
  const auto expected = one.grads();
  for (const auto& [name, grad] : three.grads()) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < grad.size(); ++i) {
      difference += std::pow(grad[i] - expected.at(name)[i], 2);
      norm += std::pow(expected.at(name)[i], 2);
    }
    EXPECT_LT(std::sqrt(difference / norm), 1e-5) << name;
  }
}

TEST(TransformerInitTest, ValuesDoNotDependOnThePartition) {
  const TransformerConfig config = config_of({"", TransformerKind::kGpt2, true, 0, DType::kF32});
  const auto values = [&config](const Partition& partition) {
    std::map<std::string, std::vector<float>> result;
    LocalPipeline pipeline(config, partition, {make_micro_batch(config, 0, 1, 4)});
    pipeline.for_each_parameter([&result](Parameter& parameter) {
      const std::vector<float> copy(parameter.value.floats().begin(),
                                    parameter.value.floats().end());
      const auto [known, is_new] = result.emplace(parameter.name, copy);
      EXPECT_EQ(known->second, copy) << "uses of " << parameter.name << " differ";
      for (const float grad : parameter.grad.floats()) {
        ASSERT_EQ(grad, 0.0F) << "prepare() left a gradient in " << parameter.name;
      }
    });
    return result;
  };
  const auto expected = values({{0, 5}});
  EXPECT_EQ(values({{0, 2, 5}}), expected);
  EXPECT_EQ(values({{0, 1, 2, 3, 4, 4, 5}}), expected);
  EXPECT_EQ(expected.size(), parameter_list(config).size());
}

}  // namespace
}  // namespace sluice
