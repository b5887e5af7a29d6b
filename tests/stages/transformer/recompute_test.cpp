// What recomputation costs and saves: bytes as described and as taken, matmuls counted again.
// That it changes no bit: transformer_exactness_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/transformer.hpp>

#include "stages/cpu/cpu_backend.hpp"
#include "stages/network/network_stage.hpp"
#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"
#include "tests/stages/transformer/local_pipeline.hpp"
#include "tests/stages/transformer/small_models.hpp"

namespace sluice {
namespace {

using testing::LocalPipeline;
using testing::make_micro_batch;

TransformerConfig config_with(Recompute recompute, DType precision = DType::kF32) {
  return {.layers = 3,
          .heads = 4,
          .width = 64,
          .context = 80,
          .vocabulary = 61,
          .dropout = 0.1F,
          .precision = precision,
          .recompute = recompute};
}

// With all that the options of llama keep and compute.
TransformerConfig llama_with(Recompute recompute, DType precision) {
  TransformerConfig config = config_with(recompute, precision);
  testing::set_options_of_llama(config);
  config.kv_heads = 2;
  config.window = 9;
  return config;
}

// A bf16 stream, with all that only a model that drops nothing has; dropping: with the rest.
TransformerConfig stream_with(Recompute recompute, DType precision) {
  TransformerConfig config = llama_with(recompute, precision);
  config.stream_precision = precision;
  config.dropout = 0;
  return config;
}
TransformerConfig dropping_stream_with(Recompute recompute, DType precision) {
  TransformerConfig config = config_with(recompute, precision);
  config.stream_precision = precision;
  return config;
}
// What backward reads of the stream's gradient is rounded.
TransformerConfig rounding_with(Recompute recompute, DType precision) {
  TransformerConfig config = config_with(recompute, precision);
  config.dropout = 0;
  return config;
}

constexpr std::int64_t kSamples = 2;
constexpr std::size_t kRows = kSamples * 80;
constexpr std::size_t kStream = kRows * 64 * sizeof(float);  // one point of the residual stream
const TensorSpec kStreamSpec{DType::kF32, {kSamples, 80, 64}};

StageDescription describe(const TransformerConfig& config, const Partition& partition, int stage,
                          const TensorSpec& input) {
  ComputeContext compute({}, 1);
  return Transformer(config).stage_of(partition, stage)->describe({&input, 1}, compute);
}

StageDescription describe_blocks(Recompute recompute, DType precision = DType::kF32) {
  const TransformerConfig config = config_with(recompute, precision);
  return describe(config, {{0, 1, 4, 5}}, 1, kStreamSpec);
}

std::size_t state_of(const StageDescription& description) {
  return description.state_bytes_until_input + description.state_bytes_until_weight;
}

TEST(RecomputeTest, BlockKeepsThePointsOfTheResidualStreamAlone) {
  // Each block's attention and MLP start from one; the stage's first is its input, on the edge.
  EXPECT_EQ(state_of(describe_blocks(Recompute::kBlock)), 5 * kStream);
  EXPECT_EQ(state_of(describe_blocks(Recompute::kBlock, DType::kBf16)), 5 * kStream);
  const TransformerConfig config = config_with(Recompute::kBlock);
  const auto head = describe(config, {{0, 4, 5}}, 1, kStreamSpec);
  EXPECT_EQ(state_of(head), 0U);
}

TEST(RecomputeTest, ABf16StreamTakesHalfTheBytes) {
  const auto config = stream_with(Recompute::kBlock, DType::kBf16);
  const TensorSpec input{DType::kBf16, kStreamSpec.shape};
  EXPECT_EQ(state_of(describe(config, {{0, 1, 4, 5}}, 1, input)), 5 * kStream / 2);
}

TEST(RecomputeTest, AttentionKeepsNothingThatGrowsWithTheSquareOfTheSequence) {
  const auto state = [](Recompute recompute, std::int64_t sequence) {
    TransformerConfig config = config_with(recompute);
    config.context = 640;
    const TensorSpec stream{DType::kF32, {kSamples, sequence, 64}};
    return state_of(describe(config, {{0, 1, 4, 5}}, 1, stream));
  };
  EXPECT_EQ(state(Recompute::kAttention, 640), 8 * state(Recompute::kAttention, 80));
  EXPECT_GT(state(Recompute::kNone, 640), 16 * state(Recompute::kNone, 80));
}

TEST(RecomputeTest, EachSettingKeepsLessThanTheOneBefore) {
  for (const DType precision : {DType::kF32, DType::kBf16}) {
    const auto none = describe_blocks(Recompute::kNone, precision);
    const auto attention = describe_blocks(Recompute::kAttention, precision);
    const auto block = describe_blocks(Recompute::kBlock, precision);
    EXPECT_LT(state_of(attention), state_of(none));
    EXPECT_LT(state_of(block), state_of(attention));
    // With what lies between I and W, for a schedule that parts them.
    const auto split = [](const StageDescription& each) {
      return state_of(each) + each.gradient_bytes_until_weight;
    };
    EXPECT_LT(split(attention), split(none));
    EXPECT_LT(split(block), split(attention));
    const auto shared = [](const StageDescription& each) {
      return each.workspace_bytes + each.shared_gradient_bytes;
    };
    EXPECT_LT(shared(none), shared(block)) << "one layer's share, not per slot";
  }
}

struct Setting {
  const char* name;
  Recompute recompute;
  DType precision;
  TransformerConfig (*make)(Recompute recompute, DType precision) = config_with;

  [[nodiscard]] TransformerConfig config() const { return make(recompute, precision); }
};

void PrintTo(const Setting& setting, std::ostream* os) { *os << setting.name; }

class RecomputeMemoryTest : public ::testing::TestWithParam<Setting> {};

TEST_P(RecomputeMemoryTest, TakesTheBytesItDescribes) {
  const TransformerConfig config = GetParam().config();
  const TensorSpec input{config.stream_precision, kStreamSpec.shape};
  const StageDescription described = describe(config, {{0, 1, 4, 5}}, 1, input);
  EXPECT_EQ(described.outputs, std::vector{input});
  const testing::StateSlot slot(Device{}, described);
  for (const bool split : {false, true}) {
    ComputeContext compute({}, 1);
    const auto made = Transformer(config).stage_of({{0, 1, 4, 5}}, 1);
    auto& stage = dynamic_cast<nn::NetworkStage&>(*made);
    testing::prepare(stage, {.compute = &compute,
                             .state = slot.state(),
                             .split_backward = split,
                             .input_sizes = {{input}}});
    EXPECT_EQ(stage.prepared_bytes(),
              described.workspace_bytes + (split ? 0 : described.shared_gradient_bytes));
  }
}

TEST_P(RecomputeMemoryTest, StepsMakeNoPrimitiveAndNoScratch) {
  const TransformerConfig config = GetParam().config();
  for (const bool split : {false, true}) {
    LocalPipeline pipeline(
        config, {{0, 2, 5}},
        {make_micro_batch(config, 0, kSamples, 80), make_micro_batch(config, kSamples, 1, 80)},
        {.split_backward = split});
    const std::size_t primitives = matmuls_of(pipeline.compute()).size();
    const std::byte* const scratch = pipeline.compute().workspace(1);
    pipeline.step();
    EXPECT_EQ(matmuls_of(pipeline.compute()).size(), primitives);
    EXPECT_EQ(pipeline.compute().workspace(1), scratch);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, RecomputeMemoryTest,
    ::testing::Values(
        Setting{"None", Recompute::kNone, DType::kF32},
        Setting{"Attention", Recompute::kAttention, DType::kF32},
        Setting{"Block", Recompute::kBlock, DType::kF32},
        Setting{"BlockBf16", Recompute::kBlock, DType::kBf16},
        Setting{"Llama", Recompute::kNone, DType::kF32, llama_with},
        Setting{"LlamaAttentionBf16", Recompute::kAttention, DType::kBf16, llama_with},
        Setting{"LlamaBlock", Recompute::kBlock, DType::kF32, llama_with},
        Setting{"Rounding", Recompute::kNone, DType::kBf16, rounding_with},
        Setting{"RoundingBlock", Recompute::kBlock, DType::kBf16, rounding_with},
        Setting{"Stream", Recompute::kNone, DType::kBf16, stream_with},
        Setting{"StreamBlock", Recompute::kBlock, DType::kBf16, stream_with},
        Setting{"DroppingStream", Recompute::kAttention, DType::kBf16, dropping_stream_with}),
    [](const auto& instance) { return instance.param.name; });

TEST(RecomputeTest, ForwardRunsNoMatmulTwiceAndBackwardOnlyThoseItCounts) {
  const auto counted = [](Recompute recompute) {
    const TransformerConfig config = config_with(recompute);
    LocalPipeline pipeline(config, {{0, 5}}, {make_micro_batch(config, 0, kSamples, 80)},
                           {.split_backward = false});
    MatmulCache& matmuls = matmuls_of(pipeline.compute());
    matmuls.record(true);
    pipeline.forward(0);
    const std::size_t forward = matmuls.recorded().size();
    pipeline.backward(0);
    return std::vector<std::size_t>{forward, matmuls.recorded().size() - forward};
  };
  const auto none = counted(Recompute::kNone);
  const auto block = counted(Recompute::kBlock);
  EXPECT_EQ(block[0], none[0]);
  EXPECT_GT(block[1], none[1]);
  EXPECT_LT(block[1], none[1] + none[0]) << "results that end in the residual stream are kept";
}

// The stages end with a block, with a block and with the head.
TEST(RecomputeTest, WhatRunsBeforeTheGradientIsNotRunAgain) {
  for (const auto make : {config_with, stream_with, dropping_stream_with}) {
    for (const bool split : {false, true}) {
      const TransformerConfig config = make(Recompute::kBlock, DType::kBf16);
      const auto trained = [&](bool first) {
        LocalPipeline pipeline(config, {{0, 2, 4, 5}}, {make_micro_batch(config, 0, kSamples, 80)},
                               {.split_backward = split, .recomputes_first = first});
        pipeline.forward(0);
        MatmulCache& matmuls = matmuls_of(pipeline.compute());
        matmuls.record(true);
        if (split) {
          pipeline.backward_input(0);
          pipeline.backward_weight(0);
        } else {
          pipeline.backward(0);
        }
        return std::pair(matmuls.recorded().size(), pipeline.grads());
      };
      EXPECT_EQ(trained(true), trained(false)) << split;
    }
  }
  const auto recomputes = [](Recompute recompute) {
    return describe(config_with(recompute), {{0, 2, 4, 5}}, 1, kStreamSpec).recomputes;
  };
  EXPECT_TRUE(recomputes(Recompute::kBlock));
  EXPECT_FALSE(recomputes(Recompute::kNone));
}

TEST(RecomputeTest, CostsAreThoseOfTheMatmulsDoneAgain) {
  const auto costs = [](Recompute recompute) { return recompute_costs(config_with(recompute)); };
  const std::vector<double> forward = layer_costs(config_with(Recompute::kBlock));
  EXPECT_EQ(costs(Recompute::kNone), std::vector<double>(5, 0.0));
  const double attention = 2.0 * 80 * 80 * 64;
  EXPECT_EQ(costs(Recompute::kAttention),
            (std::vector<double>{0, attention, attention, attention, 0}));
  // A block's matmuls are 12 width^2: 3 for qkv and 4 to raise; 5 end in the residual stream.
  const double block = attention + 2.0 * 80 * 7 * 64 * 64;
  EXPECT_EQ(costs(Recompute::kBlock), (std::vector<double>{0, block, block, block, 0}));
  EXPECT_EQ(forward[1] - block, 2.0 * 80 * 5 * 64 * 64);
  TransformerConfig mixed = config_with(Recompute::kNone);
  mixed.recompute_blocks = {Recompute::kBlock, Recompute::kNone, Recompute::kAttention};
  EXPECT_EQ(recompute_costs(mixed), (std::vector<double>{0, block, 0, attention, 0}));
}

// The head goes by the last block.
TEST(RecomputeTest, EachBlockKeepsWhatItsOwnSettingSays) {
  const auto kept = [](const TransformerConfig& config, int stage) {
    const StageDescription description = describe(config, {{0, 1, 2, 3, 4, 5}}, stage, kStreamSpec);
    return description.state_bytes_until_input + description.state_bytes_until_weight;
  };
  TransformerConfig mixed = config_with(Recompute::kNone);
  mixed.recompute_blocks = {Recompute::kBlock, Recompute::kAttention, Recompute::kNone};
  for (int block = 0; block < 3; ++block) {
    const Recompute own = mixed.recompute_blocks[static_cast<std::size_t>(block)];
    EXPECT_EQ(kept(mixed, block + 1), kept(config_with(own), block + 1)) << block;
  }
  EXPECT_LT(kept(mixed, 1), kept(mixed, 2));
  EXPECT_LT(kept(mixed, 2), kept(mixed, 3));
  EXPECT_EQ(kept(mixed, 4), kept(config_with(Recompute::kNone), 4));
  mixed.recompute_blocks.back() = Recompute::kBlock;
  EXPECT_LT(kept(mixed, 4), kept(config_with(Recompute::kNone), 4));

  mixed.recompute_blocks.pop_back();
  EXPECT_THROW(validate(mixed), Error) << "two settings of three blocks";
  mixed.recompute_blocks = {Recompute::kBlock};
  EXPECT_THROW(Sequential({nn::transformer_block(mixed)}), Error);
}

}  // namespace
}  // namespace sluice
