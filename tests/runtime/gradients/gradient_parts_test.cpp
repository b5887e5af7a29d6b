// Replicas that keep parts of gradients: with ShardLevel::kGradients trainings have the bits of
// those that keep all; with GradientOrder::kMicroBatch they have bits of their own. A rank has what
// the plan says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/gradients/resident_bytes.hpp"

namespace sluice::testing {
namespace {

constexpr std::size_t kPage = 4096;

// --- what a rank has ---
// Gradients of all stages of a rank that are not zero, whenever some are final.
struct Seen {
  std::vector<ParameterSet*> sets;
  std::size_t most = 0;  // bytes

  [[nodiscard]] static std::size_t bytes_of(ParameterSet& set) {
    const std::span<const float> all = set.flat_grads();
    return sizeof(float) * (all.size() - static_cast<std::size_t>(std::ranges::count(all, 0.F)));
  }
  void look() {
    std::size_t bytes = 0;
    for (ParameterSet* each : sets) bytes += bytes_of(*each);
    most = std::max(most, bytes);
  }
};

class SeenStage : public WrappedStage {
 public:
  SeenStage(std::unique_ptr<Stage> inner, bool overwrites, Seen* seen)
      : WrappedStage(std::move(inner)), overwrites_(overwrites), seen_(seen) {
    seen_->sets.push_back(parameters());
  }
  [[nodiscard]] bool overwrites_gradients() const override { return overwrites_; }
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override {
    Announced announced(ctx.final_gradients, seen_);
    if (ctx.final_gradients != nullptr) ctx.final_gradients = &announced;
    WrappedStage::backward(ctx, grad_outputs, grad_inputs);
    seen_->look();
  }

 private:
  class Announced : public FinalGradients {
   public:
    Announced(FinalGradients* to, Seen* seen) : to_(to), seen_(seen) {}
    void from(std::size_t begin) override {
      seen_->look();
      to_->from(begin);
    }

   private:
    FinalGradients* to_;
    Seen* seen_;
  };

  bool overwrites_;
  Seen* seen_;
};

// Four linear layers of 6 blocks without a bias, a stage each or one: no gradient of theirs is
// zero.
constexpr std::int64_t kWidth = 256, kRows = 384;
constexpr std::size_t kStageBytes = sizeof(float) * kWidth * kRows;

Sequential model_of(int stages) {
  std::vector<nn::LayerSpec> layers;
  for (int i = 0; i < 4; ++i) {
    if (i > 0 && stages > 1) layers.push_back(nn::cut());
    layers.push_back(i % 2 == 0 ? nn::linear(kWidth, kRows, /*bias=*/false)
                                : nn::linear(kRows, kWidth, /*bias=*/false));
  }
  return Sequential(layers, nn::mse_loss());
}

struct Numbers {
  std::vector<float> inputs, targets;
  Numbers(std::uint64_t seed, std::int64_t samples) {
    for (std::int64_t i = 0; i < samples * kWidth; ++i) {
      const auto words = philox({.seed = seed}, 0, static_cast<std::uint64_t>(i));
      inputs.push_back(static_cast<float>(words[0] % 1000) / 1000 + 0.01F);
      targets.push_back(static_cast<float>(words[1] % 1000) / 1000 + 7);
    }
  }
  [[nodiscard]] Batch batch(const Communicator& comm) const {
    const Shape shape{std::ssize(inputs) / kWidth, kWidth};
    if (comm.rank() != 0) return {};
    return {.inputs = {view(inputs, shape)}, .targets = {view(targets, shape)}};
  }
};

struct Memory {
  std::size_t planned = 0, seen = 0, at_start = 0, at_end = 0;
};

// Of the first replica, whose parts are the largest.
Memory train_four(ShardLevel shard, int replicas, const char* schedule, bool overwrites = true,
                  GradientOrder gradient_order = GradientOrder::kStep, int stages = 4) {
  Memory memory;
  run_loopback(replicas, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape = {.pipeline = 1,
                     .replicas = replicas,
                     .micro_batches = 2,
                     .micro_batch_size = 1,
                     .shard = shard};
    options.order = {.schedule = schedule, .chunks = stages == 1 ? 0 : stages};
    options.training.gradient_order = gradient_order;
    Seen seen;
    const TensorSpec row{DType::kF32, {kWidth}};
    Pipeline pipeline(
        comm,
        [&](int stage, int count) {
          return std::make_unique<SeenStage>(model_of(count)(stage, count), overwrites, &seen);
        },
        BatchSpec{.inputs = {row}, .targets = {row}, .feed = Feed::kRank0}, options);
    std::size_t at_start = 0;
    for (ParameterSet* each : seen.sets) at_start += resident_bytes(each->flat_grads());
    for (std::uint64_t step = 1; step <= 3; ++step) {
      (void)pipeline.train_step(Numbers(step, std::int64_t{2} * replicas).batch(comm));
    }
    if (comm.rank() == 0) {
      memory = {PipelineAccess::layout(pipeline).memory.ranks[0].gradients, seen.most, at_start, 0};
      for (ParameterSet* each : seen.sets) memory.at_end += Seen::bytes_of(*each);
    }
    pipeline.close();
  });
  return memory;
}

void expect_near(std::size_t seen, std::size_t planned) {
  EXPECT_LE(seen, planned + 4 * 2 * kPage);  // pages that two replicas have parts of stay
  EXPECT_GE(seen + kPage, planned);
}

TEST(GradientPartsTest, ARankHasOneStageWholeAndPartsOfThoseThatHaveEnded) {
  constexpr std::size_t kAll = 4 * kStageBytes;
  for (const int replicas : {2, 3}) {
    SCOPED_TRACE(replicas);
    const std::size_t part = kStageBytes / at(replicas);
    const Memory whole = train_four(ShardLevel::kOptimizer, replicas, "looped-bfs");
    EXPECT_EQ(whole.planned, kAll);
    EXPECT_EQ(whole.seen, kAll);
    EXPECT_EQ(whole.at_end, kAll);
    EXPECT_NEAR(static_cast<double>(whole.at_start), static_cast<double>(kAll), 4 * 2 * kPage);
    for (const ShardLevel level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      const Memory parts = train_four(level, replicas, "looped-bfs");
      EXPECT_EQ(parts.planned, kStageBytes + 3 * part);
      expect_near(parts.seen, parts.planned);
      EXPECT_EQ(parts.at_start, 0U);
      expect_near(parts.at_end, 4 * part);
    }
  }
}

// The stages' backwards alternate: all of them are whole at once.
TEST(GradientPartsTest, NothingIsSavedWhereAllStagesEndTogether) {
  const Memory parts = train_four(ShardLevel::kGradients, 2, "interleaved");
  const Memory bfs = train_four(ShardLevel::kGradients, 2, "looped-bfs");
  EXPECT_GT(parts.planned, bfs.planned);
  expect_near(parts.seen, parts.planned);
}

// Their gradients are zeroed at the end of a step, which brings back all.
TEST(GradientPartsTest, StagesThatAddToZerosSaveNothing) {
  const Memory parts = train_four(ShardLevel::kGradients, 2, "looped-bfs", /*overwrites=*/false);
  EXPECT_EQ(parts.planned, 4 * kStageBytes);
}

// A unit that is written, one that is added, and own parts of sums, which are not seen.
TEST(GradientPartsTest, ARankHasTwoUnitsOfAMicroBatchAtATime) {
  for (const int replicas : {2, 3}) {
    SCOPED_TRACE(replicas);
    const std::size_t own = 4 * kStageBytes / at(replicas);
    const Memory one = train_four(ShardLevel::kGradients, replicas, "gpipe", true,
                                  GradientOrder::kMicroBatch, /*stages=*/1);
    EXPECT_EQ(one.planned, own + 2 * kStageBytes);
    expect_near(one.seen, 2 * kStageBytes);
    const Memory four = train_four(ShardLevel::kParameters, replicas, "interleaved", true,
                                   GradientOrder::kMicroBatch, /*stages=*/4);
    EXPECT_EQ(four.planned, own + kStageBytes);
    EXPECT_LE(four.seen, four.planned);
    EXPECT_LE(four.at_end, 4 * 2 * kPage);
  }
}

// --- bits ---
enum Calls { kOneCall, kAccumulated, kOpenStep, kDropped };

struct Case {
  const char* schedule = "looped-bfs";
  int depth = 1, replicas = 2, virtual_replicas = 0;
  Calls calls = kOneCall;
  bool overwrites = true, clips = false;
  GradientOrder order = GradientOrder::kStep;
  int logit_chunks = 1, tensor_shards = 1, shard_group = 0;
};

constexpr std::int64_t kContext = 4, kVocabulary = 4099;  // the embedding has several blocks

// Its gradients are zeroed.
class AddingStage : public WrappedStage {
  using WrappedStage::WrappedStage;
};

struct Bits {
  std::vector<double> numbers;
  std::map<std::string, std::vector<std::byte>> values;
  bool operator==(const Bits&) const = default;
};

Batch some_of(const Communicator& comm, const std::vector<std::int32_t>& tokens, std::size_t first,
              std::size_t samples) {
  if (comm.rank() != 0) return {};
  const std::span some = std::span(tokens).subspan(first * kContext, samples * kContext);
  const Tensor all = view(some, {static_cast<std::int64_t>(samples), kContext});
  return {.inputs = {all}, .targets = {all}};
}

void train(Communicator& comm, Pipeline& pipeline, const Case& of, Bits& bits) {
  const std::size_t samples = at(std::max(of.replicas, of.virtual_replicas)) * 4;
  const auto note = [&](const StepReport& report) {
    bits.numbers.insert(bits.numbers.end(), {report.loss, report.grad_norm});
  };
  for (std::uint64_t step = 1; step <= 3; ++step) {
    std::vector<std::int32_t> tokens;
    for (std::uint64_t i = 0; i < samples * kContext; ++i) {
      tokens.push_back(static_cast<std::int32_t>(philox({.seed = step}, 0, i)[0] % kVocabulary));
    }
    if (of.calls == kAccumulated) {
      note(pipeline.accumulate(some_of(comm, tokens, 0, samples / 2)));
      note(pipeline.train_step(some_of(comm, tokens, samples / 2, samples / 2)));
    } else if (of.calls == kOpenStep && step != 2) {
      note(pipeline.forward_backward(some_of(comm, tokens, 0, samples)));
      for (const Pipeline::Owned& each : pipeline.parameters()) {
        for (float& value : each.parameter->grad.floats()) value *= 0.75F;
      }
      note(pipeline.optimizer_step());
    } else {
      if (of.calls == kDropped) {
        (void)pipeline.accumulate(some_of(comm, tokens, samples / 4, samples / 2));
        pipeline.drop_gradients();
      }
      note(pipeline.train_step(some_of(comm, tokens, 0, samples)));
    }
  }
}

Bits bits_with(ShardLevel shard, const Case& of) {
  Bits bits;
  run_loopback(of.depth * of.replicas, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape = {.pipeline = of.depth,
                     .replicas = of.replicas,
                     .virtual_replicas = of.virtual_replicas,
                     .tensor_shards = of.tensor_shards,
                     .micro_batches = 2,
                     .micro_batch_size = 2,
                     .shard = shard,
                     .shard_group = of.shard_group};
    options.order = {.schedule = of.schedule, .chunks = 0};
    options.training.learning_rate = {.peak = 1e-2};
    if (of.clips) options.training.clip = 0.1;
    options.training.gradient_order = of.order;
    options.checks.replicas_every = 1;
    const Transformer model({.layers = 3,
                             .heads = 2,
                             .width = 32,
                             .context = kContext,
                             .vocabulary = kVocabulary,
                             .tied = true,
                             .logit_chunks = of.logit_chunks});
    const auto make = [&](const StagePlace& place) -> std::unique_ptr<Stage> {
      if (of.overwrites) return model(place);
      return std::make_unique<AddingStage>(model(place));
    };
    const TensorSpec tokens{DType::kI32, {kContext}};
    Pipeline pipeline(comm, make,
                      BatchSpec{.inputs = {tokens}, .targets = {tokens}, .feed = Feed::kRank0},
                      options);
    Bits mine;
    train(comm, pipeline, of, mine);
    for (const auto& [name, tensor] : pipeline.state()) {
      mine.values[name] = {tensor.bytes.begin(), tensor.bytes.end()};
    }
    if (comm.rank() == 0) bits = mine;
    pipeline.close();
  });
  return bits;
}

TEST(GradientPartsTest, HaveTheBitsOfWholeGradients) {
  for (const Case& each :
       {Case{}, Case{.replicas = 3, .clips = true}, Case{.depth = 2, .calls = kAccumulated},
        Case{.depth = 2, .calls = kOpenStep, .clips = true}, Case{.virtual_replicas = 4},
        Case{.overwrites = false},
        Case{.schedule = "interleaved", .depth = 2, .virtual_replicas = 4},
        Case{.schedule = "zb-v", .depth = 2}}) {
    SCOPED_TRACE(::testing::Message() << each.schedule << " p" << each.depth << " d"
                                      << each.replicas << " R" << each.virtual_replicas << " calls "
                                      << each.calls << " overwrites " << each.overwrites);
    const Bits whole = bits_with(ShardLevel::kNone, each);
    EXPECT_FALSE(whole.values.empty());
    EXPECT_EQ(whole, bits_with(ShardLevel::kGradients, each));
  }
}

TEST(GradientPartsTest, BitsOfTheOrderMicroBatchDependOnNoLayout) {
  constexpr GradientOrder kOrder = GradientOrder::kMicroBatch;
  for (const int replicas : {2, 3}) {
    for (const Calls calls : {kOneCall, kAccumulated}) {
      SCOPED_TRACE(::testing::Message() << "d" << replicas << " calls " << calls);
      const Case usual = {
          .schedule = "1f1b", .replicas = replicas, .calls = calls, .order = kOrder};
      const Bits expected = bits_with(ShardLevel::kGradients, usual);
      Case other = usual;
      other.order = GradientOrder::kStep;
      const Bits step = bits_with(ShardLevel::kGradients, other);
      EXPECT_NE(expected.values, step.values);
      ASSERT_EQ(expected.numbers.size(), step.numbers.size());
      for (std::size_t i = 0; i < step.numbers.size(); ++i) {
        EXPECT_NEAR(expected.numbers[i], step.numbers[i], 1e-5 * std::abs(step.numbers[i]));
      }
      for (const char* schedule : {"looped-bfs", "zb-v", "zb-h1", "gpipe"}) {
        other = usual;
        other.schedule = schedule;
        other.depth = 2;
        EXPECT_EQ(expected, bits_with(ShardLevel::kGradients, other)) << schedule;
      }
      if (calls == kOneCall) other.calls = kDropped;
      EXPECT_EQ(expected, bits_with(ShardLevel::kParameters, other));
    }
  }
}

TEST(GradientPartsTest, GroupsThatHaveACopyEachHaveTheSameBits) {
  for (const GradientOrder order : {GradientOrder::kStep, GradientOrder::kMicroBatch}) {
    for (const auto& [replicas, size] : {std::pair(4, 2), std::pair(6, 3), std::pair(6, 2)}) {
      SCOPED_TRACE(::testing::Message() << name_of(order) << " d" << replicas << " by " << size);
      Case each{.schedule = "1f1b", .replicas = replicas, .clips = true, .order = order};
      const Bits expected = bits_with(ShardLevel::kGradients, each);
      each.shard_group = size;
      EXPECT_EQ(expected, bits_with(ShardLevel::kParameters, each));
      each.depth = 2;
      EXPECT_EQ(expected, bits_with(ShardLevel::kParameters, each));
    }
  }
}

TEST(GradientPartsTest, WhatTheOrderMicroBatchCannotAddIsRefused) {
  const auto refused = [](std::initializer_list<std::string> parts, const Case& of,
                          ShardLevel shard = ShardLevel::kGradients) {
    Case with = of;
    with.order = GradientOrder::kMicroBatch;
    expect_error(ErrorCode::kUsage, parts, [&] { (void)bits_with(shard, with); });
  };
  refused({"with one replica", "legal: the order step, or two replicas or more"}, {.replicas = 1});
  refused({"with 4 virtual replicas on 2 replicas", "as many virtual replicas as replicas"},
          {.virtual_replicas = 4});
  refused({"with --shard optimizer", "or --shard gradients or parameters"}, {},
          ShardLevel::kOptimizer);
  refused({"that of ", " of stage 0 is added to zeros", "legal: the order step"},
          {.overwrites = false});
  refused({"forward_backward()", "legal: train_step()"}, {.calls = kOpenStep});
  refused({"is written by the loss"}, {.logit_chunks = 2});
  refused({"has shares"}, {.tensor_shards = 2});
}

}  // namespace
}  // namespace sluice::testing
