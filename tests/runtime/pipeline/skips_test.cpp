// Connections past layers, over stages too, and layers of transformers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

std::vector<float> numbers(std::size_t count, std::uint64_t site) {
  std::vector<float> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = to_unit(philox({.seed = 4, .site = site}, 0, i)[0]) - 0.5F;
  }
  return made;
}

PipelineOptions options_of(int pipeline, const std::string& schedule, int chunks) {
  PipelineOptions options;
  options.shape = {.pipeline = pipeline, .micro_batches = 4, .micro_batch_size = 3};
  options.order = {.schedule = schedule, .chunks = chunks};
  options.training.learning_rate = {.peak = 1e-2};
  return options;
}

struct Result {
  std::vector<double> losses;
  std::string digest;
  friend bool operator==(const Result&, const Result&) = default;
};

Result trained(Communicator& comm, const StageFactory& model, const BatchSpec& spec,
               const Batch& batch, const std::string& schedule, int chunks) {
  Pipeline pipeline(comm, model, spec, options_of(comm.size(), schedule, chunks));
  Result result;
  for (int step = 0; step < 5; ++step) result.losses.push_back(pipeline.train_step(batch).loss);
  result.losses.push_back(pipeline.evaluate(batch).loss);
  result.digest = digest_of(pipeline);
  return result;
}

// The same model on one rank, and cut by cost over all ranks under several schedules.
void expect_bits_of_one_rank(Communicator& comm, const Sequential& model, const BatchSpec& spec,
                             const Batch& batch) {
  const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
  const Result alone = trained(*self, model, spec, batch, "1f1b", 1);
  EXPECT_LT(alone.losses[4], alone.losses[0]);
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
    EXPECT_EQ(trained(comm, model, spec, batch, schedule, 1), alone) << schedule;
  }
  if (comm.size() == 1) return;
  EXPECT_EQ(trained(comm, model, spec, batch, "interleaved", 2), alone);
  EXPECT_EQ(trained(comm, model, spec, batch, "zb-v", 2), alone);
}

constexpr std::int64_t kWidth = 6;

class SkipsTest : public ::testing::TestWithParam<int> {};

// From the model's input, to its output, several from one layer and several to one, and across
// every number of stages.
TEST_P(SkipsTest, EveryCutAndScheduleHasTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const Sequential model =
        Sequential({linear(kWidth, kWidth), tanh(), linear(kWidth, kWidth), silu(),
                    linear(2 * kWidth, kWidth), dropout(0.1), linear(kWidth, kWidth),
                    layer_norm(kWidth), linear(kWidth, kWidth), skip(0, 2), skip(0, 5), skip(0, 8),
                    skip(-1, 8), skip(2, 4, Join::kConcatenate), skip(4, 9), skip(-1, 3)},
                   mse_loss())
            .with_input({DType::kF32, {kWidth}});
    const std::vector<float> x = numbers(11 * kWidth, 1), y = numbers(11 * kWidth, 2);
    const Batch batch{.inputs = {view(x, {11, kWidth})}, .targets = {view(y, {11, kWidth})}};
    const BatchSpec spec{.inputs = {{DType::kF32, {kWidth}}}, .targets = {{DType::kF32, {kWidth}}}};
    expect_bits_of_one_rank(comm, model, spec, batch);
    if (comm.size() == 1) return;
    // Stages without layers hand connections on, and the last one joins what comes to the output.
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const StageFactory last_empty = [&](int stage, int stages) {
      std::vector<int> first(static_cast<std::size_t>(stages) + 1, 9);
      first[0] = 0;
      return model.stage_of({first}, stage);
    };
    EXPECT_EQ(trained(comm, last_empty, spec, batch, "1f1b", 1),
              trained(*self, model, spec, batch, "1f1b", 1));
  });
}

// A small U-Net: features of the way down are joined to those of the way up.
TEST_P(SkipsTest, PicturesAreJoinedByChannels) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TensorSpec image{DType::kF32, {1, 6, 5}};
    const Sequential model =
        Sequential(
            {conv2d(1, 3, 3, {.padding = 1}), relu(), conv2d(3, 4, 3, {.padding = 1}),
             batch_norm2d(4), relu(), conv2d(7, 3, 3, {.padding = 1}), relu(), conv2d(6, 1, 1),
             skip(1, 5, Join::kConcatenate), skip(1, 7, Join::kConcatenate)},
            mse_loss())
            .with_input(image);
    const std::vector<float> x = numbers(11 * 30, 1), y = numbers(11 * 30, 2);
    const Batch batch{.inputs = {view(x, {11, 1, 6, 5})}, .targets = {view(y, {11, 1, 6, 5})}};
    expect_bits_of_one_rank(comm, model, {.inputs = {image}, .targets = {image}}, batch);
  });
}

// What residual() computes within one layer, from the same values.
TEST_P(SkipsTest, ASkipThatAddsTrainsAsAResidualBlock) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() > 2) return;
    const BatchSpec spec{.inputs = {{DType::kF32, {kWidth}}}, .targets = {{DType::kF32, {2}}}};
    const std::vector<float> x = numbers(11 * kWidth, 1), y = numbers(11 * 2, 2);
    const Batch batch{.inputs = {view(x, {11, kWidth})}, .targets = {view(y, {11, 2})}};
    const Sequential flat = Sequential({linear(kWidth, 5), tanh(), linear(5, 5), silu(),
                                        linear(5, 5), linear(5, 2), skip(0, 5)},
                                       mse_loss())
                                .with_input(spec.inputs[0]);
    const Sequential nested(
        {linear(kWidth, 5), residual({tanh(), linear(5, 5), silu(), linear(5, 5)}), linear(5, 2)},
        mse_loss());
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    Pipeline one(comm, flat, spec, options_of(comm.size(), "1f1b", 1));
    Pipeline other(*self, nested, spec, options_of(1, "1f1b", 1));
    const std::map<std::string, std::string> names = {
        {"0", "0"}, {"2", "1.1"}, {"4", "1.3"}, {"5", "2"}};
    auto values = one.state();
    std::map<std::string, HostTensor> renamed;
    for (const auto& [name, value] : values) {
      const auto dot = name.find('.');
      renamed.emplace(names.at(name.substr(0, dot)) + name.substr(dot), value);
    }
    other.set_state(renamed);
    for (int step = 0; step < 10; ++step) {
      EXPECT_EQ(one.train_step(batch).loss, other.train_step(batch).loss) << step;
    }
  });
}

// A GPT of layers: learned positions, blocks, attention alone, and rotary positions.
TEST_P(SkipsTest, TransformersOfLayersHaveTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const TransformerConfig gpt{.layers = 2, .heads = 2, .width = 8, .dropout = 0.1F};
    TransformerConfig llama{.kind = TransformerKind::kLlama, .layers = 2, .heads = 2, .width = 8};
    llama.kv_heads = 1;
    llama.recompute = Recompute::kBlock;
    TransformerConfig qwen = llama;
    qwen.head_dim = 6;
    qwen.qkv_bias = qwen.qk_norm = true;
    qwen.window = 3;
    const Sequential model =
        Sequential({embedding(7, 8, 5), transformer_block(gpt), layer_norm(8),
                    attention(8, 4, {.kv_heads = 2, .rotary_base = 1e4F, .dropout = 0.1}),
                    transformer_block(llama), transformer_block(qwen),
                    residual({rms_norm(8), attention(8, 2)}), linear(8, 7), skip(1, 4)},
                   cross_entropy_loss())
            .with_input({DType::kI32, {5}});
    std::vector<std::int32_t> x(11 * 5), y(11 * 5);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::int32_t>(i * i % 7);
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<std::int32_t>(i % 7);
    const Batch batch{.inputs = {view(x, {11, 5})}, .targets = {view(y, {11, 5})}};
    const TensorSpec tokens{DType::kI32, {5}};
    expect_bits_of_one_rank(comm, model, {.inputs = {tokens}, .targets = {tokens}}, batch);
  });
}

// The same function as the stage of a transformer, from the same values.
TEST_P(SkipsTest, BlocksAreThoseOfATransformerStage) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() > 2) return;
    for (const TransformerKind kind : {TransformerKind::kGpt2, TransformerKind::kLlama}) {
      TransformerConfig config{.kind = kind, .layers = 2, .heads = 2, .width = 8, .context = 5};
      config.vocabulary = 7;
      config.tied = false;
      const bool gpt2 = kind == TransformerKind::kGpt2;
      const Sequential model =
          Sequential({gpt2 ? embedding(7, 8, 5) : embedding(7, 8), transformer_block(config),
                      transformer_block(config), gpt2 ? layer_norm(8) : rms_norm(8),
                      linear(8, 7, /*bias=*/false)},
                     cross_entropy_loss())
              .with_input({DType::kI32, {5}});
      const StageFactory whole = Transformer(config);
      const TensorSpec tokens{DType::kI32, {5}};
      const BatchSpec spec{.inputs = {tokens}, .targets = {tokens}};
      Pipeline layers(comm, model, spec, options_of(comm.size(), "1f1b", 1));
      Pipeline stages(comm, whole, spec, options_of(comm.size(), "1f1b", 1));
      const std::map<std::string, std::string> names = {
          {"token_embedding.weight", "0.weight"},
          {"position_embedding.weight", "0.positions"},
          {"final_norm.weight", "3.weight"},
          {"final_norm.bias", "3.bias"},
          {"head.weight", "4.weight"}};
      std::map<std::string, HostTensor> renamed;
      for (const auto& [name, value] : stages.state()) {
        const auto found = names.find(name);
        const std::string block = name.starts_with("blocks.0.") ? "1." : "2.";
        renamed.emplace(found != names.end() ? found->second : block + name.substr(9), value);
      }
      layers.set_state(renamed);
      std::vector<std::int32_t> x(11 * 5), y(11 * 5);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::int32_t>(i * i % 7);
      for (std::size_t i = 0; i < y.size(); ++i) y[i] = static_cast<std::int32_t>(i % 7);
      const Batch batch{.inputs = {view(x, {11, 5})}, .targets = {view(y, {11, 5})}};
      for (int step = 0; step < 5; ++step) {
        EXPECT_NEAR(layers.train_step(batch).loss, stages.train_step(batch).loss, 1e-6) << step;
      }
    }
  });
}

TEST_P(SkipsTest, ModelsThatDifferBetweenRanksAreNamed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() == 1) return;
    const bool last = comm.rank() + 1 == comm.size();
    const std::string rank = std::to_string(comm.size() - 1);
    const BatchSpec spec{.inputs = {{DType::kF32, {kWidth}}}, .targets = {{DType::kF32, {kWidth}}}};
    PipelineOptions options = options_of(1, "1f1b", 1);
    options.shape.replicas = comm.size();  // replicas of one stage alone would notice nothing else
    const auto refused = [&](std::vector<LayerSpec> layers, const LossSpec& loss,
                             const std::string& part) {
      expect_error(ErrorCode::kMismatch, {part}, [&] {
        const Pipeline pipeline(comm, Sequential(std::move(layers), loss), spec, options);
      });
    };
    refused({linear(kWidth, kWidth), last ? relu() : silu()}, mse_loss(),
            "ranks disagree about the model: rank 0 has 'layer 1: silu()', rank " + rank +
                " has 'layer 1: relu()'");
    refused({dropout(last ? 0.1 : 0.2)}, mse_loss(), "rank 0 has 'layer 0: dropout(0.2)'");
    refused({relu(), residual({linear(kWidth, kWidth), rms_norm(kWidth, last ? 1e-5 : 1e-6)})},
            mse_loss(), "layer 1: residual(linear(6, 6, 1), rms_norm(6, 1e-06))");
    const auto squared = [](float output, float target) { return LossTerm{output - target, 1}; };
    refused({relu()}, last ? mse_loss() : elementwise_loss("mine", squared),
            "rank 0 has 'loss mine()', rank " + rank + " has 'loss mse_loss()'");
    std::vector<LayerSpec> longer = {relu(), tanh()};
    if (last) longer.push_back(relu());
    refused(longer, mse_loss(), "rank 0 has '2 layers', rank " + rank + " has '3 layers'");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SkipsTest, ::testing::Values(1, 2, 3, 4));

TEST(SkipSpecTest, ConnectionsThatCannotWorkAreRefusedWhenTheModelIsMade) {
  const auto refused = [](std::vector<LayerSpec> layers, const std::string& part) {
    expect_error(ErrorCode::kUsage, {part}, [&] { const Sequential model(std::move(layers)); });
  };
  refused({relu(), relu(), skip(0, 1)}, "skip(0, 1): legal in a model of 2 layers");
  refused({relu(), relu(), skip(0, 3)}, "skip(0, 3): legal in a model of 2 layers");
  refused({relu(), relu(), skip(-2, 1)}, "skip(-2, 1): legal");
  refused({relu(), relu(), relu(), skip(0, 2), skip(0, 2)}, "skip(0, 2) is given twice");
  refused({relu(), relu(), skip(0, 2, Join::kConcatenate, 0)}, "skip(0, 2): axis is 0");
  refused({skip(0, 2)}, "a Sequential needs at least one layer");
  refused({residual({relu(), skip(0, 1)})}, "skip() within another layer");
  const auto unfit = [](std::vector<LayerSpec> layers, const std::string& part) {
    expect_error(ErrorCode::kUsage, {part}, [&] {
      (void)Sequential(std::move(layers)).with_input({DType::kF32, {3}});
    });
  };
  unfit({linear(3, 4), relu(), linear(4, 5), relu(), skip(0, 3)},
        "skip(0, 3): adds f32 [1, 5] and f32 [1, 4]; legal: f32 of the same shape");
  unfit({linear(3, 4), relu(), linear(4, 5), skip(0, 3, Join::kConcatenate, 2)},
        "skip(0, 3): joins f32 [1, 5] and f32 [1, 4]; legal: f32 of the same shape but for "
        "dimension 2");
}

TEST(SkipSpecTest, LayersOfTransformersRefuseNumbersThatCannotWork) {
  const auto refused = [](const LayerSpec& spec, const std::string& part) {
    expect_error(ErrorCode::kUsage, {part}, [&] { const Sequential model({spec}); });
  };
  refused(attention(8, 3), "layer 0 (attention): a width of 8 in 3 heads");
  refused(attention(8, 4, {.kv_heads = 3}), "kv_heads is 3; legal with 4 heads");
  refused(attention(8, 4, {.dropout = 1}), "dropout is 1");
  refused(attention(4, 4, {.rotary_base = 1e4F}), "heads of 1 numbers with rotary positions");
  refused(attention(8, 4, {.rotary_base = 0.5F}), "rotary_base is 0.5; legal: above 1");
  refused(transformer_block({.heads = 3, .width = 8}),
          "layer 0.0 (attention_block): --width 8 is not");
  TransformerConfig full{.kind = TransformerKind::kLlama, .heads = 2, .width = 8};
  full.window = 4;
  full.full_layers = {0, 2};
  refused(transformer_block(full), "full_layers of 2 blocks; legal in a block: none");
  refused(embedding(4, 8, -1), "positions is -1");
  const auto unfit = [](const LayerSpec& spec, const TensorSpec& input, const std::string& part) {
    expect_error(ErrorCode::kUsage, {part}, [&] { (void)Sequential({spec}).with_input(input); });
  };
  unfit(attention(8, 4), {DType::kF32, {8}}, "legal: f32 [samples, sequence, 8]");
  unfit(transformer_block({.width = 8}), {DType::kF32, {3, 4}},
        "the input is f32 [1, 3, 4]; legal: f32 [samples, sequence, 8]");
  unfit(embedding(4, 8, 3), {DType::kI32, {4}}, "legal with 3 positions: i32 [samples, n]");
}

}  // namespace
}  // namespace sluice::testing
