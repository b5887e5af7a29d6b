// What a transformer computes: losses and gradients against double precision, sizes, refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/transformer.hpp>

#include "tests/stages/prepared.hpp"
#include "tests/stages/state_slot.hpp"
#include "tests/stages/transformer/local_pipeline.hpp"
#include "tests/stages/transformer/reference_transformer.hpp"
#include "tests/stages/transformer/small_models.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::LocalPipeline;
using testing::make_micro_batch;
using testing::reference_loss;
using testing::ReferenceParameters;

TransformerConfig small_config(TransformerKind kind, bool tied) {
  TransformerConfig config = testing::odd_model(kind);
  config.tied = tied;
  return config;
}

Partition whole(const TransformerConfig& config) { return {{0, config.layers + 2}}; }

// Values large enough that every gradient matters, norms and biases included.
void enlarge(LocalPipeline& pipeline) {
  pipeline.for_each_parameter([](Parameter& parameter) {
    int i = 0;
    for (float& value : parameter.value.floats()) {
      const float bump =
          0.2F * std::sin(static_cast<float>(++i) + static_cast<float>(parameter.name.size()));
      value = parameter.decay ? 10 * value + 0.1F * bump : value + bump;
    }
  });
  pipeline.mark_values_changed();
}

ReferenceParameters in_double(LocalPipeline& pipeline) {
  ReferenceParameters result;
  pipeline.for_each_parameter([&result](Parameter& parameter) {
    result[parameter.name].assign(parameter.value.floats().begin(), parameter.value.floats().end());
  });
  return result;
}

using Change = void (*)(TransformerConfig& config);

struct ModelCase {
  const char* name;
  TransformerKind kind;
  bool tied;
  Change change = nullptr;  // of fields of llama

  [[nodiscard]] TransformerConfig config() const {
    TransformerConfig config = small_config(kind, tied);
    if (change != nullptr) change(config);
    return config;
  }
};
void PrintTo(const ModelCase& model, std::ostream* os) { *os << model.name; }

class TransformerModelTest : public ::testing::TestWithParam<ModelCase> {};

TEST_P(TransformerModelTest, LossAndGradientsMatchDoublePrecision) {
  const TransformerConfig config = GetParam().config();
  const auto batch = make_micro_batch(config, 0, 2, 11);
  LocalPipeline pipeline(config, whole(config), {batch}, {.loss_scale = 0.125});
  enlarge(pipeline);
  pipeline.step();

  ReferenceParameters parameters = in_double(pipeline);
  const auto loss = [&] {
    return reference_loss(config, parameters, batch.tokens, batch.targets, 2, 11);
  };
  const double expected = loss();
  EXPECT_NEAR(pipeline.loss_sum(), expected, 2e-6 * expected);
  EXPECT_EQ(pipeline.losses()[0].weight, std::count_if(batch.targets.begin(), batch.targets.end(),
                                                       [](int t) { return t >= 0; }));

  for (const auto& [name, grad] : pipeline.grads()) {
    std::vector<double>& values = parameters.at(name);
    double largest = 0;
    for (const float g : grad) {
      largest = std::max(largest, std::abs(static_cast<double>(g)));
    }
    EXPECT_GT(largest, 1e-4) << name << " has no gradient worth testing";
    const size_t stride = std::max<size_t>(1, values.size() / 9);
    for (size_t i = 0; i < values.size(); i += stride) {
      const double kept = values[i], h = 1e-4;
      values[i] = kept + h;
      const double above = loss();
      values[i] = kept - h;
      const double below = loss();
      values[i] = kept;
      EXPECT_NEAR(grad[i], 0.125 * (above - below) / (2 * h), 2e-5 * largest + 1e-7)
          << name << "[" << i << "]";
    }
  }
}

// Along its own gradient, a parameter changes the loss by the gradient's square: true only where
// backward drops what forward dropped.
TEST_P(TransformerModelTest, GradientsFollowTheForwardsDropout) {
  TransformerConfig config = GetParam().config();
  config.dropout = 0.3F;
  LocalPipeline pipeline(config, whole(config), {make_micro_batch(config, 3, 2, 13)});
  enlarge(pipeline);
  pipeline.step();
  const auto grads = pipeline.grads();
  for (const auto& [name, grad] : grads) {
    double square = 0;
    for (const float g : grad) {
      square += static_cast<double>(g) * g;
    }
    const double h = 0.02 / std::sqrt(square);
    const auto loss_after_moving = [&, &moved = name, &along = grad](double distance) {
      pipeline.for_each_parameter([&](Parameter& parameter) {
        for (size_t i = 0; parameter.name == moved && i < along.size(); ++i) {
          parameter.value.floats()[i] += static_cast<float>(distance * along[i]);
        }
      });
      pipeline.mark_values_changed();
      pipeline.forward(0);
      return pipeline.loss_sum();
    };
    const double above = loss_after_moving(h);
    const double below = loss_after_moving(-2 * h);
    (void)loss_after_moving(h);
    EXPECT_NEAR((above - below) / (2 * h * square), 1.0, 0.02) << name;
  }
}

constexpr RotaryScaling kLinear = {.kind = RotaryScaling::Kind::kLinear, .factor = 4};
constexpr RotaryScaling kLlama3 = {
    .kind = RotaryScaling::Kind::kLlama3, .factor = 4, .original_context = 20};

ModelCase llama(const char* name, Change change) {
  return {name, TransformerKind::kLlama, true, change};
}

INSTANTIATE_TEST_SUITE_P(
    Models, TransformerModelTest,
    ::testing::Values(ModelCase{"Gpt2Tied", TransformerKind::kGpt2, true},
                      ModelCase{"Gpt2Untied", TransformerKind::kGpt2, false},
                      ModelCase{"Gpt2Epsilon", TransformerKind::kGpt2, true,
                                [](auto& c) { c.norm_epsilon = 0.03F; }},
                      ModelCase{"LlamaTied", TransformerKind::kLlama, true},
                      ModelCase{"LlamaUntied", TransformerKind::kLlama, false},
                      llama("LlamaWideHeads", [](auto& c) { c.head_dim = 10; }),
                      llama("LlamaWidthOfNoMultiple",
                            [](auto& c) {
                              c.width = 23;
                              c.head_dim = 4;
                              c.mlp_width = 31;
                              c.vocabulary = 17;
                            }),
                      llama("LlamaEpsilon", [](auto& c) { c.norm_epsilon = 0.03F; }),
                      llama("LlamaQkvBias", [](auto& c) { c.qkv_bias = true; }),
                      llama("LlamaOutputBias", [](auto& c) { c.attention_output_bias = true; }),
                      llama("LlamaMlpBias", [](auto& c) { c.mlp_bias = true; }),
                      llama("LlamaLinearScaling", [](auto& c) { c.rotary_scaling = kLinear; }),
                      llama("Llama3Scaling", [](auto& c) { c.rotary_scaling = kLlama3; }),
                      llama("LlamaQkNorm", [](auto& c) { c.qk_norm = true; }),
                      llama("LlamaWindow", [](auto& c) { c.window = 4; }),
                      llama("LlamaFullLayers",
                            [](auto& c) {
                              c.window = 3;
                              c.full_layers = {1};
                            }),
                      llama("LlamaAll",
                            [](auto& c) {
                              c.width = 22;
                              c.head_dim = 6;
                              c.norm_epsilon = 0.01F;
                              c.rotary_scaling = kLlama3;
                              c.qkv_bias = c.attention_output_bias = c.mlp_bias = c.qk_norm = true;
                              c.window = 3;
                              c.full_layers = {0};
                            })),
    [](const auto& instance) { return instance.param.name; });

TEST(TransformerTest, ShorterSequenceGivesThePrefixesLogits) {
  const TransformerConfig config = small_config(TransformerKind::kLlama, true);
  LocalPipeline full(config, whole(config), {make_micro_batch(config, 5, 1, 13)},
                     {.phase = Phase::kGenerate});
  auto prefix = make_micro_batch(config, 5, 1, 13);
  prefix.sequence = 4;
  prefix.tokens.resize(4);
  prefix.targets.resize(4);
  LocalPipeline part(config, whole(config), {make_micro_batch(config, 5, 1, 13), prefix},
                     {.phase = Phase::kGenerate});
  full.forward(0);
  part.forward(1);
  for (size_t i = 0; i < part.logits(1).size(); ++i) {
    EXPECT_NEAR(part.logits(1)[i], full.logits(0)[i], 1e-5);
  }
}

TEST(TransformerTest, DropsOnlyInTraining) {
  TransformerConfig config = small_config(TransformerKind::kGpt2, true);
  const auto batch = make_micro_batch(config, 0, 2, 13);
  LocalPipeline plain(config, whole(config), {batch}, {.phase = Phase::kEvaluate});
  config.dropout = 0.3F;
  LocalPipeline evaluated(config, whole(config), {batch}, {.phase = Phase::kEvaluate});
  LocalPipeline trained(config, whole(config), {batch});
  plain.forward(0);
  evaluated.forward(0);
  trained.forward(0);
  EXPECT_EQ(plain.logits(0), evaluated.logits(0));
  EXPECT_NE(plain.logits(0), trained.logits(0));
}

// Loss and gradients of bf16 matmuls, within `tolerance` of each gradient's norm.
void expect_bf16_near_f32(DType stream, double tolerance) {
  for (const TransformerKind kind : {TransformerKind::kGpt2, TransformerKind::kLlama}) {
    TransformerConfig config = small_config(kind, true);
    config.dropout = 0.1F;
    const auto batch = make_micro_batch(config, 0, 2, 13);
    LocalPipeline f32(config, whole(config), {batch});
    config.precision = DType::kBf16;
    config.stream_precision = stream;
    LocalPipeline bf16(config, whole(config), {batch});
    bf16.forward(0);  // with the first values; the enlarged ones must replace their copies
    enlarge(f32);
    enlarge(bf16);
    f32.step();
    bf16.step();
    EXPECT_NEAR(bf16.loss_sum(), f32.loss_sum(), 0.01 * f32.loss_sum());
    const auto expected = f32.grads();
    for (const auto& [name, grad] : bf16.grads()) {
      double difference = 0, norm = 0;
      for (size_t i = 0; i < grad.size(); ++i) {
        difference += std::pow(grad[i] - expected.at(name)[i], 2);
        norm += std::pow(expected.at(name)[i], 2);
      }
      EXPECT_LT(std::sqrt(difference / norm), tolerance) << name;
    }
  }
}

TEST(TransformerTest, Bf16StaysNearF32AndFollowsNewValues) {
  expect_bf16_near_f32(DType::kF32, 3e-2);
}

TEST(TransformerTest, ABf16StreamStaysNearF32) { expect_bf16_near_f32(DType::kBf16, 5e-2); }

TEST(TransformerTest, TheLastStageDescribesItsTargets) {
  ComputeContext compute({}, 1);
  for (const int chunks : {1, 3}) {
    TransformerConfig config = small_config(TransformerKind::kGpt2, true);
    config.logit_chunks = chunks;
    const TensorSpec tokens{DType::kI32, Shape{2, config.context}};
    const auto targets = [&](const Partition& partition) {
      return Transformer(config).stage_of(partition, 0)->describe({&tokens, 1}, compute).targets;
    };
    EXPECT_THAT(targets(whole(config)), ::testing::ElementsAre(tokens)) << chunks;
    EXPECT_THAT(targets({{0, 2, config.layers + 2}}), ::testing::IsEmpty()) << chunks;
  }
}

TEST(TransformerTest, ListsParametersOnceInGlobalOrder) {
  const auto names = [](const TransformerConfig& config) {
    std::vector<std::string> result;
    for (const ParameterInfo& info : parameter_list(config)) {
      result.push_back(info.name + " " + to_string(info.shape));
    }
    return result;
  };
  TransformerConfig config = small_config(TransformerKind::kLlama, true);
  config.layers = 1;
  EXPECT_THAT(
      names(config),
      ::testing::ElementsAre("token_embedding.weight [19, 24]", "blocks.0.norm1.weight [24]",
                             "blocks.0.attention.qkv.weight [48, 24]",
                             "blocks.0.attention.output.weight [24, 24]",
                             "blocks.0.norm2.weight [24]", "blocks.0.mlp.gate_up.weight [80, 24]",
                             "blocks.0.mlp.down.weight [24, 40]", "final_norm.weight [24]"));
  config.tied = false;
  EXPECT_EQ(names(config).back(), "head.weight [19, 24]");
}

TEST(TransformerTest, ListsParametersOfTheOptionsOfLlama) {
  TransformerConfig config = small_config(TransformerKind::kLlama, true);
  config.layers = 1;
  config.width = 23;
  config.head_dim = 6;
  config.qkv_bias = config.attention_output_bias = config.mlp_bias = config.qk_norm = true;
  std::vector<std::string> names;
  for (const ParameterInfo& info : parameter_list(config)) {
    names.push_back(info.name.substr(info.name.find('.') + 1) + " " + to_string(info.shape));
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre(
                  "weight [19, 23]", "0.norm1.weight [23]", "0.attention.qkv.weight [48, 23]",
                  "0.attention.qkv.bias [48]", "0.attention.query_norm.weight [6]",
                  "0.attention.key_norm.weight [6]", "0.attention.output.weight [23, 24]",
                  "0.attention.output.bias [23]", "0.norm2.weight [23]",
                  "0.mlp.gate_up.weight [80, 23]", "0.mlp.gate_up.bias [80]",
                  "0.mlp.down.weight [23, 40]", "0.mlp.down.bias [23]", "weight [23]"));
}

TEST(TransformerTest, CountsTheParametersOfKnownModels) {
  const TransformerConfig gpt2{
      .layers = 12, .heads = 12, .width = 768, .context = 1024, .vocabulary = 50257};
  EXPECT_EQ(parameter_count(gpt2), 124439808);
  // Of a token: 6 N + 6 L C T.
  EXPECT_DOUBLE_EQ(training_flops(gpt2) / 1024, 6 * 124439808.0 + 6 * 12 * 768 * 1024.0);

  const TransformerConfig tiny_llama{.kind = TransformerKind::kLlama,  // TinyLlama 1.1B
                                     .layers = 22,
                                     .heads = 32,
                                     .width = 2048,
                                     .context = 2048,
                                     .vocabulary = 32000,
                                     .kv_heads = 4,
                                     .mlp_width = 5632,
                                     .tied = false};
  EXPECT_EQ(parameter_count(tiny_llama), 1100048384);
}

TEST(TransformerTest, CostsWeighTheHeadAgainstTheBlocks) {
  const TransformerConfig config;  // 4 layers, width 256, context 256, vocabulary 256
  const std::vector<double> costs = layer_costs(config);
  ASSERT_EQ(costs.size(), 6U);
  EXPECT_DOUBLE_EQ(costs[1], costs[4]);
  EXPECT_LT(costs[0], 0.01 * costs[1]);
  EXPECT_NEAR(costs[5] / costs[1], 1.0 / 12, 0.01);
}

TEST(TransformerTest, CostsFollowTheOptionsOfLlama) {
  TransformerConfig config = small_config(TransformerKind::kLlama, true);
  config.width = 23;
  config.head_dim = 6;
  config.layers = 3;
  config.context = 100;
  config.window = 10;
  config.full_layers = {1};
  config.recompute = Recompute::kAttention;
  // 24 columns of queries, 2 * 12 of keys and values; pairs of a query and a key: half a square,
  // and a band less its half square.
  const double whole = 4.0 * 24 * 100 * 100 / 2, band = 4.0 * 24 * (10 * 100 - 10 * 10 / 2.0);
  const double matmuls = 2.0 * 100 * (23 * (24 + 24) + 24 * 23 + 3 * 23 * 40);
  EXPECT_EQ(recompute_costs(config), (std::vector<double>{0, band, whole, band, 0}));
  EXPECT_EQ(layer_costs(config)[1], band + matmuls);
  EXPECT_EQ(layer_costs(config)[2], whole + matmuls);
  EXPECT_DOUBLE_EQ(
      training_flops(config),
      6.0 * 100 * static_cast<double>(parameter_count(config)) + 3 * (2 * band + whole));
  config.window = 1000;  // longer than the context
  EXPECT_EQ(layer_costs(config)[1], whole + matmuls);
}

// Ranks compare the settings of their models.
TEST(TransformerTest, EachOptionOfABlockIsOneOfItsSettings) {
  const auto settings = [](const std::function<void(TransformerConfig&)>& change) {
    TransformerConfig config = small_config(TransformerKind::kLlama, true);
    config.head_dim = 6;
    config.rotary_scaling = kLlama3;
    change(config);
    return nn::transformer_block(config).settings;
  };
  using Config = TransformerConfig;
  const std::string plain = settings([](Config&) {});
  EXPECT_EQ(settings([](Config&) {}), plain);
  const std::vector<std::function<void(Config&)>> changes = {
      [](Config& c) { c.head_dim = 8; },
      [](Config& c) { c.norm_epsilon = 1e-6F; },
      [](Config& c) { c.rotary_scaling.kind = RotaryScaling::Kind::kLinear; },
      [](Config& c) { c.rotary_scaling.factor = 3; },
      [](Config& c) { c.rotary_scaling.low_frequency_factor = 2; },
      [](Config& c) { c.rotary_scaling.high_frequency_factor = 8; },
      [](Config& c) { c.rotary_scaling.original_context = 21; },
      [](Config& c) { c.qkv_bias = true; },
      [](Config& c) { c.attention_output_bias = true; },
      [](Config& c) { c.mlp_bias = true; },
      [](Config& c) { c.qk_norm = true; },
      [](Config& c) { c.window = 9; }};
  for (std::size_t i = 0; i < changes.size(); ++i) EXPECT_NE(settings(changes[i]), plain) << i;
}

TEST(TransformerTest, NamesTheStagesOfATiedEmbedding) {
  TransformerConfig config = small_config(TransformerKind::kGpt2, true);
  EXPECT_EQ(tied_stages(config, {{0, 1, 2, 3, 3, 4}}), (std::vector<int>{0, 4}));
  EXPECT_EQ(tied_stages(config, {{0, 4}}), (std::vector<int>{0}));
  config.tied = false;
  EXPECT_TRUE(tied_stages(config, {{0, 2, 4}}).empty());
}

TEST(TransformerTest, DescribesShapesAndMemory) {
  const TransformerConfig config = small_config(TransformerKind::kGpt2, true);
  const Partition partition{{0, 1, 2, 2, 4}};
  const TensorSpec tokens{DType::kI32, {3, 13}};
  const TensorSpec stream{DType::kF32, {3, 13, 24}};
  ComputeContext compute({}, 1);

  const auto first = Transformer(config).stage_of(partition, 0)->describe({&tokens, 1}, compute);
  EXPECT_EQ(first.outputs, (std::vector<TensorSpec>{stream}));
  EXPECT_EQ(first.input_gradients, (std::vector<bool>{false}));
  const auto block = Transformer(config).stage_of(partition, 1)->describe({&stream, 1}, compute);
  EXPECT_EQ(block.input_gradients, (std::vector<bool>{true}));
  // At least: two norms' and attention's results, the MLP's hidden values.
  EXPECT_GE(block.state_bytes_until_weight, 3U * 13 * 4 * (3 * 24 + 40));
  // qkv and the MLP's raised values, probabilities.
  EXPECT_GE(block.state_bytes_until_input, 3U * 13 * 4 * (3 * 24 + 40 + 4 * 13));
  const auto empty = Transformer(config).stage_of(partition, 2)->describe({&stream, 1}, compute);
  EXPECT_EQ(empty.outputs, (std::vector<TensorSpec>{stream}));
  EXPECT_EQ(empty.state_bytes_until_weight + empty.state_bytes_until_input, 0U);
  EXPECT_EQ(Transformer(config).stage_of(partition, 2)->parameters(), nullptr);
  const auto last = Transformer(config).stage_of(partition, 3)->describe({&stream, 1}, compute);
  EXPECT_EQ(last.outputs, (std::vector<TensorSpec>{{DType::kF32, {3, 13, 19}}}));
}

std::string describe_error(int stage, const TensorSpec& input) {
  const TransformerConfig config = small_config(TransformerKind::kGpt2, true);
  ComputeContext compute({}, 1);
  try {
    (void)Transformer(config).stage_of({{0, 2, 4}}, stage)->describe({&input, 1}, compute);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(TransformerTest, RefusesWrongInputsNamingWhatItTakes) {
  EXPECT_THAT(describe_error(0, {DType::kF32, {2, 8}}),
              AllOf(HasSubstr("f32 [2, 8]"), HasSubstr("i32 [samples, sequence]")));
  EXPECT_THAT(describe_error(0, {DType::kI32, {2, 14}}), HasSubstr("1 to 13 positions"));
  EXPECT_THAT(describe_error(0, {DType::kI32, {0, 8}}), HasSubstr("at least 1 sample"));
  EXPECT_THAT(describe_error(1, {DType::kF32, {2, 8, 23}}),
              AllOf(HasSubstr("[2, 8, 23]"), HasSubstr("[samples, sequence, 24]")));
}

TEST(TransformerTest, RefusesTokensAndTargetsOutsideTheVocabulary) {
  const TransformerConfig config = small_config(TransformerKind::kGpt2, true);
  auto batch = make_micro_batch(config, 0, 1, 4);
  batch.tokens[2] = 19;
  LocalPipeline tokens(config, whole(config), {batch});
  EXPECT_THROW(tokens.forward(0), Error);
  batch.tokens[2] = -1;
  LocalPipeline negative(config, whole(config), {batch});
  EXPECT_THROW(negative.forward(0), Error);
  batch.tokens[2] = 0;
  batch.targets[1] = 19;
  LocalPipeline targets(config, whole(config), {batch});
  EXPECT_THROW(targets.forward(0), Error);
}

TEST(TransformerTest, RefusesMicroBatchesLargerThanPrepared) {
  const TransformerConfig config = small_config(TransformerKind::kGpt2, true);
  ComputeContext compute({}, 1);
  const auto stage = Transformer(config).stage_of({{0, 2, 4}}, 0);
  const TensorSpec prepared{DType::kI32, {2, 5}}, larger{DType::kI32, {3, 5}};
  const testing::StateSlot slot(Device{}, stage->describe({&prepared, 1}, compute));
  testing::prepare(*stage,
                   {.compute = &compute, .state = slot.state(), .input_sizes = {{prepared}}});
  std::vector<std::int32_t> tokens(15);
  std::vector<float> out(15 * 24);
  const Tensor input{tokens.data(), larger}, output{out.data(), {DType::kF32, {3, 5, 24}}};
  StageContext ctx{.compute = compute, .state = slot.state()};
  ctx.inputs = {&input, 1};
  EXPECT_THROW(stage->forward(ctx, ctx.inputs, {&output, 1}), Error);
}

TEST(TransformerTest, RefusesLessMemoryForAMicroBatchThanItDescribes) {
  const TransformerConfig config = small_config(TransformerKind::kGpt2, true);
  ComputeContext compute({}, 1);
  const auto stage = Transformer(config).stage_of({{0, 2, 4}}, 0);
  const TensorSpec spec{DType::kI32, {2, 5}};
  const testing::StateSlot slot(Device{}, stage->describe({&spec, 1}, compute));
  testing::prepare(*stage, {.compute = &compute, .state = slot.state(), .input_sizes = {{spec}}});
  std::vector<std::int32_t> tokens(10);
  std::vector<float> out(10 * 24);
  const Tensor input{tokens.data(), spec}, output{out.data(), {DType::kF32, {2, 5, 24}}};
  StageContext ctx{.compute = compute, .state = slot.state()};
  ctx.inputs = {&input, 1};
  stage->forward(ctx, ctx.inputs, {&output, 1});
  for (auto part : {&StageContext::State::until_input, &StageContext::State::until_weight}) {
    ctx.state = slot.state();
    if ((ctx.state.*part).empty()) continue;
    ctx.state.*part = (ctx.state.*part).first((ctx.state.*part).size() - 1);
    try {
      stage->forward(ctx, ctx.inputs, {&output, 1});
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_NE(std::string(error.what()).find("less memory than the stage describes"),
                std::string::npos);
    }
  }
}

TEST(TransformerTest, RefusesAStageThatThePartitionDoesNotHave) {
  const TransformerConfig config;
  for (const int stage : {-1, 2, 99}) {
    try {
      (void)Transformer(config).stage_of(Partition{{0, 3, config.layers + 2}}, stage);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("of a partition into 2 stages; legal: 0 to 1"));
    }
  }
}

std::string validation_error(const std::function<void(TransformerConfig&)>& change) {
  TransformerConfig config;
  change(config);
  try {
    validate(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "no error";
}

TEST(TransformerConfigTest, RefusesNamingTheOptionAndTheNearestLegalValue) {
  using Config = TransformerConfig;
  EXPECT_THAT(validation_error([](Config& c) { c.layers = 0; }),
              AllOf(HasSubstr("--layers 0"), HasSubstr("nearest legal: 1")));
  EXPECT_THAT(validation_error([](Config& c) { c.context = -3; }), HasSubstr("--context -3"));
  EXPECT_THAT(validation_error([](Config& c) { c.vocabulary = std::numeric_limits<int>::max(); }),
              HasSubstr("--vocabulary 2147483647"));
  EXPECT_THAT(validation_error([](Config& c) { c.width = std::numeric_limits<int>::max(); }),
              HasSubstr("--width 2147483647"));
  EXPECT_THAT(validation_error([](Config& c) {
                c.width = 100;
                c.heads = 7;
              }),
              AllOf(HasSubstr("--heads 7"), HasSubstr("98 or 105")));
  EXPECT_THAT(validation_error([](Config& c) {
                c.kind = TransformerKind::kLlama;
                c.kv_heads = 3;
              }),
              AllOf(HasSubstr("--kv-heads 3"), HasSubstr("nearest legal: --kv-heads 2")));
  EXPECT_THAT(validation_error([](Config& c) {
                c.kind = TransformerKind::kLlama;
                c.width = 20;
              }),
              AllOf(HasSubstr("odd head size"), HasSubstr("16 or 24")));
  EXPECT_THAT(validation_error([](Config& c) { c.dropout = 1; }), HasSubstr("--dropout 1"));
  EXPECT_THAT(
      validation_error([](Config& c) { c.dropout = std::numeric_limits<float>::quiet_NaN(); }),
      HasSubstr("--dropout nan"));
  EXPECT_THAT(validation_error([](Config& c) { c.precision = DType::kI32; }),
              HasSubstr("f32, bf16"));
  EXPECT_THAT(validation_error([](Config& c) { c.stream_precision = DType::kBf16; }),
              HasSubstr("--stream-precision bf16 with --precision f32; legal: f32, and bf16 with"));
}

std::string llama_error(const std::function<void(TransformerConfig&)>& change) {
  return validation_error([&](TransformerConfig& config) {
    config.kind = TransformerKind::kLlama;
    change(config);
  });
}

TEST(TransformerConfigTest, RefusesOptionsOfLlamaNamingWhatIsLegal) {
  using Config = TransformerConfig;
  EXPECT_THAT(llama_error([](Config& c) { c.head_dim = 7; }),
              AllOf(HasSubstr("--head-dim 7 is odd"), HasSubstr("nearest legal: 6 or 8")));
  EXPECT_THAT(llama_error([](Config& c) { c.head_dim = -2; }), HasSubstr("nearest legal: 0"));
  EXPECT_THAT(llama_error([](Config& c) { c.width = 30; }),
              AllOf(HasSubstr("--width 28 or 32"), HasSubstr("or a --head-dim of its own")));
  EXPECT_EQ(llama_error([](Config& c) {
              c.width = 31;
              c.head_dim = 8;
            }),
            "no error");
  EXPECT_THAT(llama_error([](Config& c) { c.window = -1; }),
              AllOf(HasSubstr("--window -1"), HasSubstr("nearest legal: 0")));
  EXPECT_THAT(llama_error([](Config& c) {
                c.full_layers = {0, 2};
              }),
              AllOf(HasSubstr("--full-layers names 2 blocks"), HasSubstr("without --window")));
  const auto full = [](std::vector<int> layers) {
    return llama_error([&](Config& c) {
      c.window = 8;
      c.full_layers = std::move(layers);
    });
  };
  EXPECT_EQ(full({0, 1, 3}), "no error");
  EXPECT_THAT(full({1, 4}), AllOf(HasSubstr("--full-layers 4"), HasSubstr("nearest legal: 3")));
  EXPECT_THAT(full({-1}), AllOf(HasSubstr("--full-layers -1"), HasSubstr("nearest legal: 0")));
  EXPECT_THAT(full({2, 1}),
              HasSubstr("--full-layers has 1 after 2; legal: numbers of blocks, asc"));
  EXPECT_THAT(full({2, 2}), HasSubstr("--full-layers has 2 after 2"));
}

TEST(TransformerConfigTest, RefusesFactorsAndEpsilons) {
  using Config = TransformerConfig;
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {0.0F, -1.0F, kInfinite, kNan}) {
    EXPECT_THAT(
        validation_error([&](Config& c) { c.norm_epsilon = bad; }),
        AllOf(HasSubstr("--norm-epsilon "), HasSubstr("not above 0 and finite; usual: 1e-05")));
    for (float RotaryScaling::*field :
         {&RotaryScaling::factor, &RotaryScaling::low_frequency_factor,
          &RotaryScaling::high_frequency_factor}) {
      EXPECT_THAT(llama_error([&](Config& c) {
                    c.rotary_scaling = kLlama3;
                    c.rotary_scaling.*field = bad;
                  }),
                  AllOf(HasSubstr("--rotary-scaling: the "), HasSubstr("factor"),
                        HasSubstr("not above 0 and finite")));
    }
    EXPECT_THAT(llama_error([&](Config& c) {
                  c.rotary_scaling = kLinear;
                  c.rotary_scaling.factor = bad;
                }),
                HasSubstr("--rotary-scaling: the factor "));
  }
  EXPECT_THAT(llama_error([](Config& c) {
                c.rotary_scaling = kLlama3;
                c.rotary_scaling.low_frequency_factor = 4;
              }),
              HasSubstr("the low frequency factor 4 is not below the high one 4; usual: 1 and 4"));
  EXPECT_THAT(llama_error([](Config& c) {
                c.rotary_scaling = kLlama3;
                c.rotary_scaling.original_context = 0;
              }),
              HasSubstr("the original context 0 is not at least 1"));
}

TEST(TransformerConfigTest, RefusesOptionsOfLlamaWithGpt2) {
  using Config = TransformerConfig;
  const std::vector<std::pair<const char*, std::function<void(Config&)>>> changes = {
      {"--kv-heads", [](Config& c) { c.kv_heads = 1; }},
      {"--head-dim", [](Config& c) { c.head_dim = 64; }},
      {"--rotary-base", [](Config& c) { c.rotary_base = 5; }},
      {"--rotary-scaling", [](Config& c) { c.rotary_scaling = kLinear; }},
      {"--qkv-bias", [](Config& c) { c.qkv_bias = true; }},
      {"--attention-output-bias", [](Config& c) { c.attention_output_bias = true; }},
      {"--mlp-bias", [](Config& c) { c.mlp_bias = true; }},
      {"--qk-norm", [](Config& c) { c.qk_norm = true; }},
      {"--window", [](Config& c) { c.window = 8; }},
      {"--full-layers", [](Config& c) { c.full_layers = {1}; }}};
  for (const auto& [option, change] : changes) {
    EXPECT_EQ(
        validation_error(change),
        std::string(option) + " is an option of --model llama; legal with --model gpt2: none");
  }
}

TEST(TransformerConfigTest, RefusesPartitionsThatDoNotFit) {
  const TransformerConfig config = small_config(TransformerKind::kGpt2, true);  // 4 layers in all
  for (const std::vector<int>& first :
       {std::vector<int>{0, 3}, {0, 5}, {1, 4}, {0, 3, 2, 4}, {0, 0, 4}, {0}}) {
    EXPECT_THROW((void)Transformer(config).stage_of({first}, 0), Error);
  }
  EXPECT_THROW((void)Transformer(config).stage_of({{0, 4}}, 1), Error);
}

TEST(TransformerPartsTest, ATiedEmbeddingStaysTiedInAGroupWithAName) {
  TransformerConfig config = small_config(TransformerKind::kGpt2, /*tied=*/true);
  std::vector<nn::LayerSpec> layers = nn::transformer_layers(config);
  layers.front() = nn::group({layers.front()});
  layers.front().name = "first.";
  const Sequential model(layers, nn::transformer_loss(config));
  const std::unique_ptr<Stage> stage = model(0, 1);
  int uses = 0;
  for (const Parameter* each : stage->parameters()->all()) {
    if (!each->tied) continue;
    EXPECT_EQ(each->name, "token_embedding.weight");
    ++uses;
  }
  EXPECT_EQ(uses, 2);
}

}  // namespace
}  // namespace sluice
