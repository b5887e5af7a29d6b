// infer() over fewer positions than the data has: the outputs of the first ones, the same at every
// depth, and what ranks may pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/runtime/engine/copying_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

constexpr std::int64_t kSamples = 5, kContext = 16;
constexpr int kVocabulary = 48;

PipelineOptions options_for(int pipeline, int replicas = 1, bool inference = true) {
  PipelineOptions options;
  options.shape = {.pipeline = pipeline, .replicas = replicas, .micro_batch_size = 2};
  options.shape.micro_batches = 2;
  options.training.inference = inference;
  return options;
}

BatchSpec token_spec(Feed feed = Feed::kPerStage) {
  const TensorSpec tokens{DType::kI32, {kContext}};
  return {.inputs = {tokens}, .targets = {tokens}, .feed = feed, .position_dimension = 1};
}

// The first `positions` tokens of some samples.
std::vector<std::int32_t> tokens_of(std::int64_t first, std::int64_t count,
                                    std::int64_t positions) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t sample = first; sample < first + count; ++sample) {
    for (std::int64_t t = 0; t < positions; ++t) {
      tokens.push_back(static_cast<std::int32_t>((7 * sample + 5 * t * t + 3) % kVocabulary));
    }
  }
  return tokens;
}

Batch batch_of_tokens(const std::vector<std::int32_t>& tokens, std::int64_t positions) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  return {.inputs = {view(std::span(tokens), {count / positions, positions})}};
}

// Every rank's outputs of all samples at `positions`: [sample][position][number].
std::vector<float> answers(Pipeline& pipeline, std::int64_t positions) {
  const BatchShare share = pipeline.share();
  const std::int64_t small = kSamples / share.replicas, more = kSamples % share.replicas;
  const std::int64_t first = share.replica * small + std::min<std::int64_t>(share.replica, more);
  const auto tokens = tokens_of(first, small + (share.replica < more ? 1 : 0), positions);
  const auto outputs =
      pipeline.infer(batch_of_tokens(tokens, positions), {.to = InferOptions::kEveryRank});
  EXPECT_EQ(outputs.size(), 1U);
  EXPECT_EQ(outputs[0].shape()[0], kSamples);
  EXPECT_EQ(outputs[0].shape()[1], positions);
  const std::span<const float> floats = outputs[0].floats();
  return {floats.begin(), floats.end()};
}

// Those of fewer positions among those of all.
std::vector<float> first_of(const std::vector<float>& all, std::int64_t positions) {
  const std::size_t width = all.size() / kSamples,
                    some = width * static_cast<std::size_t>(positions) / kContext;
  std::vector<float> first;
  for (std::size_t at = 0; at < all.size(); at += width) {
    first.insert(first.end(), all.begin() + static_cast<std::ptrdiff_t>(at),
                 all.begin() + static_cast<std::ptrdiff_t>(at + some));
  }
  return first;
}

struct Model {
  StageFactory stages;
  // Of outputs of about 1. Rows of a matmul have the same bits however many there are; what
  // attention adds over positions is cut into blocks by their number.
  float rounding = 0;
};

std::vector<Model> models() {
  TransformerConfig gpt2 = small_model(), llama = small_model();
  llama.kind = TransformerKind::kLlama;
  return {{Transformer(gpt2), 1e-6F},
          {Transformer(llama), 1e-6F},
          {Sequential({nn::embedding(kVocabulary, 8, kContext), nn::linear(8, 16), nn::relu(),
                       nn::linear(16, kVocabulary)},
                      nn::cross_entropy_loss())
               .with_input({DType::kI32, {kContext}})}};
}

class PositionsTest : public ::testing::TestWithParam<int> {};

TEST_P(PositionsTest, FewerPositionsHaveTheOutputsOfTheFirstOnes) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto self = comm.split(comm.rank(), 0);
    for (const Model& model : models()) {
      for (const bool inference : {true, false}) {
        Pipeline alone(*self, model.stages, token_spec(), options_for(1, 1, inference));
        Pipeline deep(comm, model.stages, token_spec(), options_for(comm.size(), 1, inference));
        Pipeline wide(comm, model.stages, token_spec(), options_for(1, comm.size(), inference));
        // The first length of all is not the whole one.
        const std::vector<float> three = answers(deep, 3), all = answers(alone, kContext);
        EXPECT_THAT(three, Pointwise(FloatNear(model.rounding), first_of(all, 3)));
        for (const std::int64_t positions : {1, 7, 16, 3, 15}) {
          const std::vector<float> some = answers(alone, positions);
          EXPECT_THAT(some, Pointwise(FloatNear(model.rounding), first_of(all, positions)));
          EXPECT_EQ(answers(deep, positions), some) << positions;
          EXPECT_EQ(answers(wide, positions), some) << positions;
        }
      }
    }
  });
}

TEST_P(PositionsTest, RankZerosBatchReachesReplicasWithoutSamples) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    Pipeline pipeline(comm, models()[0].stages, token_spec(Feed::kRank0),
                      options_for(1, comm.size()));
    const std::vector<std::int32_t> tokens = tokens_of(0, 1, 6);
    const auto batch = comm.rank() == 0 ? batch_of_tokens(tokens, 6) : Batch{};
    const auto outputs = pipeline.infer(batch, {.to = InferOptions::kEveryRank});
    EXPECT_EQ(outputs[0].spec, (TensorSpec{DType::kF32, {1, 6, kVocabulary}}));
  });
}

// Training goes on with whole sequences after an answer of fewer positions, with the same bits.
TEST_P(PositionsTest, TrainingIsUndisturbed) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const StageFactory model = models()[0].stages;
    Pipeline pipeline(comm, model, token_spec(), options_for(comm.size(), 1, false));
    Pipeline undisturbed(comm, model, token_spec(), options_for(comm.size(), 1, false));
    const std::vector<std::int32_t> tokens = tokens_of(0, 4, kContext);
    Batch batch = batch_of_tokens(tokens, kContext);
    batch.targets = batch.inputs;
    for (int step = 0; step < 2; ++step) {
      (void)answers(pipeline, 4 + step);
      EXPECT_EQ(pipeline.train_step(batch).loss, undisturbed.train_step(batch).loss);
    }
    EXPECT_EQ(digest_of(pipeline), digest_of(undisturbed));
  });
}

TEST_P(PositionsTest, WhatIsNotLegalIsRefusedWithWhatIs) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    Pipeline pipeline(comm, models()[0].stages, token_spec(), options_for(comm.size(), 1, false));
    const std::vector<std::int32_t> many = tokens_of(0, 2, 17), eight = tokens_of(0, 2, 8);
    expect_error(ErrorCode::kUsage, {"i32 [2, 0], but i32 [samples, 1 to 16] is needed"}, [&] {
      (void)pipeline.infer({.inputs = {{nullptr, {DType::kI32, {2, 0}}}}});
    });
    expect_error(ErrorCode::kUsage, {"i32 [2, 17], but i32 [samples, 1 to 16] is needed"},
                 [&] { (void)pipeline.infer(batch_of_tokens(many, 17)); });
    Batch fewer = batch_of_tokens(eight, 8);
    fewer.targets = fewer.inputs;
    expect_error(ErrorCode::kUsage, {"is i32 [2, 8], but i32 [samples, 16] is needed"},
                 [&] { (void)pipeline.train_step(fewer); });
    expect_error(ErrorCode::kUsage, {"is i32 [2, 8], but i32 [samples, 16] is needed"},
                 [&] { (void)pipeline.evaluate(fewer); });
    BatchSpec uncounted = token_spec();
    uncounted.position_dimension = 0;
    Pipeline whole(comm, models()[0].stages, uncounted, options_for(comm.size(), 1, false));
    expect_error(ErrorCode::kUsage, {"is i32 [2, 8], but i32 [samples, 16] is needed"},
                 [&] { (void)whole.infer(fewer); });
    const TensorSpec pair{DType::kF32, {4}};
    Pipeline two(comm, StageFactory([](int, int) { return std::make_unique<CopyingStage>(); }),
                 BatchSpec{.inputs = {pair, pair}, .position_dimension = 1},
                 options_for(comm.size()));
    const std::vector<float> values(6);
    expect_error(ErrorCode::kUsage, {"input 1 has 2 positions, input 0 has 3"}, [&] {
      const auto some = std::span(values);
      (void)two.infer({.inputs = {view(some, {2, 3}), view(some.first(4), {2, 2})}});
    });
    for (const Pipeline* each : {&pipeline, &whole, &two}) EXPECT_TRUE(each->usable());
    if (comm.size() == 1) return;
    Pipeline replicas(comm, models()[0].stages, token_spec(), options_for(1, comm.size()));
    expect_error(ErrorCode::kUsage, {"infer(): rank 0 passes 16 positions, rank 1 passes 8"}, [&] {
      const std::int64_t mine = comm.rank() == 0 ? 16 : 8;
      const auto tokens = tokens_of(0, 2, mine);
      (void)replicas.infer(batch_of_tokens(tokens, mine));
    });
    EXPECT_TRUE(replicas.usable());
  });
}

TEST_P(PositionsTest, ADimensionThatCountsNothingIsRefused) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto refused = [&](const BatchSpec& spec, const std::string& why) {
      expect_error(ErrorCode::kUsage, {why}, [&] {
        const Pipeline none(comm, models()[0].stages, spec, options_for(comm.size()));
      });
    };
    BatchSpec spec = token_spec();
    spec.position_dimension = 2;
    refused(spec, "a tensor of one sample is i32 [1, 16]; legal: 0, for none, or 1 to 1");
    spec.position_dimension = -1;
    refused(spec, "legal: 0, for none, or 1 to 1");
    spec = token_spec();
    spec.targets[0].shape = {8};
    refused(spec, "is 16 in i32 [1, 16], but 8 in i32 [1, 8]");
  });
}

// What a stage of a program sees. With `greedy` it describes more workspace for fewer positions.
struct SeeingStage : CopyingStage {
  SeeingStage(std::multiset<std::int64_t>* seen_in, bool greedy_in)
      : seen(seen_in), greedy(greedy_in) {}
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = CopyingStage::describe(inputs, compute);
    if (greedy && inputs[0].shape[1] == 3) description.workspace_bytes = 64;
    return description;
  }
  void prepare_size(ComputeContext&, std::span<const TensorSpec> inputs) override {
    prepared.push_back(inputs[0]);
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    EXPECT_EQ(ctx.first_position, 0);
    EXPECT_EQ(x[0].shape()[1], ctx.positions == 0 ? 4 : ctx.positions);
    if (ctx.positions > 0) {
      EXPECT_THAT(prepared, ::testing::Contains(x[0].spec));
    }
    seen->insert(ctx.positions);
    CopyingStage::forward(ctx, x, y);
  }
  std::multiset<std::int64_t>* seen;
  std::vector<TensorSpec> prepared;
  bool greedy;
};

TEST_P(PositionsTest, AStageOfAProgramSeesThem) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    std::multiset<std::int64_t> seen;
    const BatchSpec spec{.inputs = {{DType::kF32, {4, 2}}}, .position_dimension = 1};
    const auto make = [&](bool greedy) {
      return [&seen, greedy](int, int) { return std::make_unique<SeeingStage>(&seen, greedy); };
    };
    const std::vector<float> values(24, 1.5F);
    const auto infer = [&](Pipeline& pipeline, std::int64_t positions) {
      const std::int64_t samples = 3;
      const auto some = std::span(values).first(static_cast<std::size_t>(2 * samples * positions));
      return pipeline
          .infer({.inputs = {view(some, {samples, positions, 2})}},
                 {.to = InferOptions::kEveryRank})[0]
          .spec;
    };
    Pipeline pipeline(comm, StageFactory(make(false)), spec, options_for(comm.size()));
    for (const std::int64_t positions : {2, 4, 2}) {
      EXPECT_EQ(infer(pipeline, positions), (TensorSpec{DType::kF32, {3, positions, 2}}));
    }
    EXPECT_EQ(seen, (std::multiset<std::int64_t>{0, 0, 2, 2, 2, 2}));
    // Two sizes of each length: micro-batches of 2 samples, and of 1.
    EXPECT_EQ(PipelineAccess::layout(pipeline).wires.edges.sizes().size(), 4U);
    Pipeline greedy(comm, StageFactory(make(true)), spec, options_for(comm.size()));
    EXPECT_EQ(infer(greedy, 2).shape[0], 3);
    expect_error(
        ErrorCode::kUsage,
        {"stage 0 needs more memory for a micro-batch of 2 samples of 3 positions than for "
         "the largest, of 2 samples"},
        [&] { (void)infer(greedy, 3); });
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PositionsTest, ::testing::Values(1, 2),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace sluice::testing
