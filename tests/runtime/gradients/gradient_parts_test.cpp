// Replicas that keep parts of gradients (ShardLevel::kGradients): trainings have the bits of those
// that keep all, a rank has what the plan says, and GPUs are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"

namespace sluice::testing {
namespace {

constexpr std::size_t kPage = 4096;

// --- what a rank has ---
// Gradients of all stages of a rank that are not zero, whenever a stage ends its backward.
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
    WrappedStage::backward(ctx, grad_outputs, grad_inputs);
    seen_->look();
  }

 private:
  bool overwrites_;
  Seen* seen_;
};

// Four stages of a linear layer of 6 blocks, without a bias: no gradient of theirs is zero.
constexpr std::int64_t kWidth = 256, kRows = 384;
constexpr std::size_t kStageBytes = sizeof(float) * kWidth * kRows;

Sequential four_stages() {
  const auto layer = [](std::int64_t from, std::int64_t to) {
    return nn::linear(from, to, /*bias=*/false);
  };
  return Sequential({layer(kWidth, kRows), nn::cut(), layer(kRows, kWidth), nn::cut(),
                     layer(kWidth, kRows), nn::cut(), layer(kRows, kWidth)},
                    nn::mse_loss());
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
  std::size_t planned = 0, seen = 0, at_end = 0;
};

// Of the first replica, whose parts are the largest.
Memory train_four(ShardLevel shard, int replicas, const char* schedule, bool overwrites = true) {
  Memory memory;
  run_loopback(replicas, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape = {.pipeline = 1,
                     .replicas = replicas,
                     .micro_batches = 2,
                     .micro_batch_size = 1,
                     .shard = shard};
    options.order = {.schedule = schedule, .chunks = 4};
    Seen seen;
    const TensorSpec row{DType::kF32, {kWidth}};
    Pipeline pipeline(
        comm,
        [&](int stage, int stages) {
          return std::make_unique<SeenStage>(four_stages()(stage, stages), overwrites, &seen);
        },
        BatchSpec{.inputs = {row}, .targets = {row}, .feed = Feed::kRank0}, options);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      (void)pipeline.train_step(Numbers(step, std::int64_t{2} * replicas).batch(comm));
    }
    if (comm.rank() == 0) {
      memory = {PipelineAccess::layout(pipeline).memory.ranks[0].gradients, seen.most, 0};
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
    for (const ShardLevel level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      const Memory parts = train_four(level, replicas, "looped-bfs");
      EXPECT_EQ(parts.planned, kStageBytes + 3 * part);
      expect_near(parts.seen, parts.planned);
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

// --- bits ---
enum Calls { kOneCall, kAccumulated, kOpenStep };

struct Case {
  const char* schedule = "looped-bfs";
  int depth = 1, replicas = 2, virtual_replicas = 0;
  Calls calls = kOneCall;
  bool overwrites = true, clips = false;
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
                     .micro_batches = 2,
                     .micro_batch_size = 2,
                     .shard = shard};
    options.order = {.schedule = of.schedule, .chunks = 0};
    options.training.learning_rate = {.peak = 1e-2};
    if (of.clips) options.training.clip = 0.1;
    options.checks.replicas_every = 1;
    const Transformer model({.layers = 3,
                             .heads = 2,
                             .width = 32,
                             .context = kContext,
                             .vocabulary = kVocabulary,
                             .tied = true});
    const auto make = [&](int stage, int stages) -> std::unique_ptr<Stage> {
      if (of.overwrites) return model(stage, stages);
      return std::make_unique<AddingStage>(model(stage, stages));
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

}  // namespace
}  // namespace sluice::testing
