// The bits of a training are those of its virtual replicas, however many replicas compute them.
// With SLUICE_ALL_VIRTUAL_REPLICAS=1 each schedule runs on each layout. Mistakes are at the end.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "runtime/files/sha256.hpp"
#include "runtime/gradients/gradient_folds.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/first_ranks.hpp"

namespace sluice::testing {
namespace {

constexpr int kMicroBatches = 3;  // of a virtual replica
constexpr std::int64_t kSize = 2, kContext = 4, kVocabulary = 33;
constexpr std::array<const char*, 4> kSchedules = {"gpipe", "1f1b", "interleaved", "zb-v"};

struct Layout {
  int depth = 1, replicas = 1;
  const char* schedule = "1f1b";
  bool shards = false;

  [[nodiscard]] int ranks() const { return depth * replicas; }
};

PipelineOptions options_of(const Layout& of, int virtual_replicas) {
  PipelineOptions options;
  options.shape = {.pipeline = of.depth,
                   .replicas = of.replicas,
                   .virtual_replicas = virtual_replicas,
                   .micro_batches = kMicroBatches,
                   .micro_batch_size = kSize};
  if (of.shards) options.shape.shard = ShardLevel::kOptimizer;
  options.order.schedule = of.schedule;
  options.training.learning_rate = {.peak = 1e-2};
  options.checks.replicas_every = 1;
  return options;
}

struct Outcome {
  std::vector<double> numbers;  // losses, norms, counted targets
  std::string digest;           // of parameters and buffers

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

void add(Outcome& outcome, const StepReport& report) {
  outcome.numbers.insert(outcome.numbers.end(), {report.loss, report.grad_norm, report.targets});
}

std::string digest_of(Pipeline& pipeline) {
  std::string digests;
  for (const auto& [name, tensor] : pipeline.state()) digests += name + sha256_hex(tensor.bytes);
  return sha256_hex(std::as_bytes(std::span<const char>(digests)));
}

// Over the first ranks of the job; elsewhere nothing happens. An Error, which all of them throw, is
// a failure of the test, and the others go on.
Outcome on_some(const Layout& of, const std::function<Outcome(Communicator&)>& train) {
  const auto part = first_ranks(of.ranks());
  try {
    if (part != nullptr) return train(*part);
  } catch (const Error& error) {
    ADD_FAILURE() << of.schedule << " p" << of.depth << " d" << of.replicas << ": " << error.what();
  }
  return {};
}

void expect_same(const Outcome& expected, const Outcome& actual, const Layout& of, int parts) {
  if (world().rank() != 0) return;
  EXPECT_FALSE(expected.digest.empty());
  EXPECT_EQ(expected.numbers, actual.numbers)
      << of.schedule << " p" << of.depth << " d" << of.replicas << " R" << parts;
  EXPECT_EQ(expected.digest, actual.digest)
      << of.schedule << " p" << of.depth << " d" << of.replicas << " R" << parts;
}

// --- a transformer ---
struct Setting {
  bool ties = false, clips = false, drops = false;
  int logit_chunks = 1;
};

// Rank 0 passes all.
struct Tokens {
  std::vector<std::int32_t> inputs, targets;
  std::int64_t samples;

  Tokens(std::uint64_t seed, std::int64_t count) : samples(count) {
    for (std::int64_t i = 0; i < count * kContext; ++i) {
      const auto words = philox({.seed = seed}, 0, static_cast<std::uint64_t>(i));
      inputs.push_back(static_cast<std::int32_t>(words[0] % kVocabulary));
      targets.push_back(static_cast<std::int32_t>(words[1] % (kVocabulary + 3)) - 3);
    }
  }
  [[nodiscard]] Batch batch(const Communicator& comm) const {
    if (comm.rank() != 0) return {};
    return {.inputs = {view(inputs, {samples, kContext})},
            .targets = {view(targets, {samples, kContext})}};
  }
};

// The second of three steps has fewer micro-batches, and two calls.
Outcome train_tokens(Communicator& comm, const Layout& of, int parts, const Setting& setting) {
  TransformerConfig model{.layers = 4, .heads = 2, .width = 16, .context = kContext};
  model.vocabulary = kVocabulary;
  model.dropout = setting.drops ? 0.1F : 0;
  model.tied = setting.ties;
  model.logit_chunks = setting.logit_chunks;
  PipelineOptions options = options_of(of, parts);
  options.training.clip = setting.clips ? 0.5 : 0;
  const TensorSpec tokens{DType::kI32, {kContext}};
  Pipeline pipeline(comm, Transformer(model),
                    BatchSpec{.inputs = {tokens}, .targets = {tokens}, .feed = Feed::kRank0},
                    options);
  Outcome outcome;
  const std::int64_t full = kMicroBatches * kSize * parts;
  add(outcome, pipeline.train_step(Tokens(1, full).batch(comm)));
  add(outcome, pipeline.forward_backward(Tokens(2, full / 3 * 2).batch(comm)));
  add(outcome, pipeline.optimizer_step());
  add(outcome, pipeline.train_step(Tokens(3, full).batch(comm)));
  outcome.digest = digest_of(pipeline);
  pipeline.close();
  return outcome;
}

TEST(VirtualReplicasTest, TheirNumberAloneDeterminesTheBits) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  const bool all = std::getenv("SLUICE_ALL_VIRTUAL_REPLICAS") != nullptr;
  const std::array<Setting, 2> settings = {Setting{.ties = true, .logit_chunks = 2},
                                           Setting{.clips = true, .drops = true}};
  std::vector<std::string> digests;
  for (const int parts : {1, 2, 3, 4, 6, 8}) {
    for (std::size_t i = 0; i < settings.size(); ++i) {
      const Layout whole = {.schedule = "1f1b"};
      const auto train = [&](const Layout& of) {
        return on_some(
            of, [&](Communicator& comm) { return train_tokens(comm, of, parts, settings[i]); });
      };
      const Outcome expected = train(whole);
      digests.push_back(expected.digest);
      for (const int replicas : {1, 2, 3, 4, 8}) {
        if (parts < replicas || !can_divide(parts, replicas)) continue;
        for (const int depth : {1, 2}) {
          if (depth * replicas > world().size()) continue;
          const std::size_t turn = i + static_cast<std::size_t>(parts + replicas + depth);
          for (std::size_t s = 0; s < kSchedules.size(); ++s) {
            if (!all && s != turn % kSchedules.size()) continue;
            const Layout of = {depth, replicas, kSchedules.at(s), (turn + s) % 3 == 0};
            expect_same(expected, train(of), of, parts);
          }
        }
      }
    }
  }
  if (world().rank() != 0) return;
  for (std::size_t i = 0; i < digests.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(digests[i], digests[j]);
  }
}

// The default is one virtual replica for each replica.
TEST(VirtualReplicasTest, AsManyAsReplicasIsTheDefault) {
  const Layout of = {.replicas = 2};
  const auto train = [&](int parts) {
    return on_some(of, [&](Communicator& comm) {
      PipelineOptions options = options_of(of, parts);
      const Pipeline pipeline(
          comm, Sequential({nn::linear(4, 2)}, nn::mse_loss()),
          BatchSpec{.inputs = {{DType::kF32, {4}}}, .targets = {{DType::kF32, {2}}}}, options);
      const JobLayout& layout = PipelineAccess::layout(const_cast<Pipeline&>(pipeline));
      EXPECT_EQ(layout.plans.train.fold_every, 0);
      EXPECT_EQ(layout.plans.micro_batches.size(), 3U);
      return Outcome{.numbers = {static_cast<double>(layout.memory.ranks[0].gradients)},
                     .digest = {}};
    });
  };
  EXPECT_EQ(train(0), train(2));
}

// --- images ---
constexpr std::int64_t kSide = 4, kPixels = kSide * kSide;

BatchSpec image_batches() {
  return {.inputs = {{DType::kF32, {1, kSide, kSide}}},
          .targets = {{DType::kF32, {2}}},
          .feed = Feed::kRank0};
}

struct Images {
  std::vector<float> pixels, targets;
  std::int64_t samples;

  explicit Images(std::int64_t count) : samples(count) {
    for (std::int64_t i = 0; i < count * kPixels; ++i) {
      const auto words = philox({.seed = 7}, 0, static_cast<std::uint64_t>(i));
      pixels.push_back(1 + to_unit(words[0]));
      if (i < 2 * count) targets.push_back(to_unit(words[1]));
    }
  }
  [[nodiscard]] Batch batch(const Communicator& comm) const {
    if (comm.rank() != 0) return {};
    return {.inputs = {view(pixels, {samples, 1, kSide, kSide})},
            .targets = {view(targets, {samples, 2})}};
  }
};

Sequential images_model(nn::BatchStatistics statistics = nn::BatchStatistics::kMicroBatch) {
  const auto norm = [&] { return nn::batch_norm2d(3, {.statistics = statistics}); };
  return Sequential({nn::conv2d(1, 3, 3), norm(), nn::relu(), nn::conv2d(3, 3, 3, {.padding = 1}),
                     norm(), nn::flatten(), nn::linear(3 * (kSide - 2) * (kSide - 2), 2)},
                    nn::mse_loss())
      .with_input({DType::kF32, {1, kSide, kSide}});
}

// Running statistics are part of the digest.
TEST(VirtualReplicasTest, RunningStatisticsAreJoinedAlike) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  for (const int parts : {2, 3, 4}) {
    const Images images(kMicroBatches * kSize * parts);
    const auto train = [&](const Layout& of) {
      return on_some(of, [&](Communicator& comm) {
        Pipeline pipeline(comm, images_model(), image_batches(), options_of(of, parts));
        Outcome outcome;
        for (int step = 0; step < 3; ++step) {
          add(outcome, pipeline.train_step(images.batch(comm)));
        }
        outcome.digest = digest_of(pipeline);
        return outcome;
      });
    };
    const Outcome expected = train({});
    for (const int replicas : {1, 2, 3, 4}) {
      if (parts < replicas || !can_divide(parts, replicas)) continue;
      for (const char* schedule : kSchedules) {
        const Layout of = {2, replicas, schedule};
        expect_same(expected, train(of), of, parts);
      }
    }
  }
}

// A step that is refused leaves everything as it was.
TEST(VirtualReplicasTest, ALossThatIsNotFiniteIsNamedAndMovesNothing) {
  const Layout of = {.depth = 2, .replicas = 2, .schedule = "gpipe"};
  on_some(of, [&](Communicator& comm) {
    Pipeline pipeline(comm, images_model(), image_batches(), options_of(of, 4));
    const Images images(kMicroBatches * kSize * 4);
    (void)pipeline.train_step(images.batch(comm));
    const std::string before = digest_of(pipeline);
    Images broken = images;
    // The second micro-batch of the last virtual replica.
    broken.targets[2 * kSize * (kMicroBatches * 3 + 1)] = std::numeric_limits<float>::infinity();
    expect_error(ErrorCode::kNumeric,
                 {"not finite, first in micro-batch 1 of virtual replica 3; no parameter"},
                 [&] { (void)pipeline.train_step(broken.batch(comm)); });
    EXPECT_EQ(digest_of(pipeline), before);
    EXPECT_EQ(pipeline.train_step(images.batch(comm)).step, 2U);
    return Outcome{};
  });
}

TEST(VirtualReplicasTest, TheMemoryTableHasALevelOfGradientsForEachBit) {
  std::array<std::size_t, 6> gradients{}, parameters{};
  for (const int parts : {1, 2, 3, 4, 5}) {
    on_some({}, [&](Communicator& comm) {
      Pipeline pipeline(comm, images_model(), image_batches(), options_of({}, parts));
      const RankMemory& memory = PipelineAccess::layout(pipeline).memory.ranks[0];
      gradients.at(static_cast<std::size_t>(parts)) = memory.gradients;
      parameters.at(static_cast<std::size_t>(parts)) = memory.parameters;
      return Outcome{};
    });
  }
  for (std::size_t parts = 2; parts <= 5; ++parts) {
    const auto levels = static_cast<std::size_t>(TreeSum::levels(static_cast<int>(parts)));
    EXPECT_EQ(gradients.at(parts), (1 + levels) * gradients[1]);
    // Four running statistics.
    if (world().rank() == 0) {
      EXPECT_EQ(parameters.at(parts) - parameters[1], levels * 4 * kBufferAlignment);
    }
  }
}

// --- mistakes ---
void expect_refused(const Layout& of, int parts, ErrorCode code,
                    std::initializer_list<std::string> texts, const StageFactory& stages,
                    const BatchSpec& batches) {
  const auto part = first_ranks(of.ranks());
  if (part == nullptr) return;
  expect_error(code, texts,
               [&] { const Pipeline none(*part, stages, batches, options_of(of, parts)); });
}

TEST(VirtualReplicasMistakesTest, NumbersThatReplicasCannotDivideAreRefused) {
  expect_refused({.replicas = 2}, 6, ErrorCode::kUsage,
                 {"6 virtual replicas with 2 replicas", "here 4 or 8, or one replica"},
                 images_model(), image_batches());
}

TEST(VirtualReplicasMistakesTest, AScheduleThatMixesTheirGradientsIsRefused) {
  expect_refused({.depth = 2, .schedule = "gpipe-lifo"}, 2, ErrorCode::kPlan,
                 {"gpipe-lifo", "micro-batches 0 to 2 are not folded yet; legal are schedules"},
                 images_model(), image_batches());
}

TEST(VirtualReplicasMistakesTest, SumsOverReplicasWithinActionsAreRefused) {
  expect_refused({.replicas = 2}, 4, ErrorCode::kUsage,
                 {"stage 0 makes collectives over the replicas within its actions, with 4 virtual "
                  "replicas on 2 replicas; legal: as many as replicas"},
                 images_model(nn::BatchStatistics::kReplicas), image_batches());
}

BatchSpec numbers() {
  return {.inputs = {{DType::kF32, {1}}}, .targets = {{DType::kF32, {1}}}, .feed = Feed::kRank0};
}

struct Ones {
  explicit Ones(int parts) : values(static_cast<std::size_t>(kMicroBatches * kSize * parts), 1) {}
  [[nodiscard]] Batch batch(const Communicator& comm) const {
    if (comm.rank() != 0) return {};
    const Tensor all = view(values, {std::ssize(values), 1});
    return {.inputs = {all}, .targets = {all}};
  }
  std::vector<float> values;
};

class StageOfFirst : public ArithmeticStage {
 public:
  StageOfFirst() : ArithmeticStage(0) {
    parameters()->add_buffer("counter", {1}, Init::constant(0), ReplicaRule::kFirst);
  }
};

TEST(VirtualReplicasMistakesTest, BuffersThatAreNoMeanAreRefused) {
  const StageFactory stages = [](int, int) { return std::make_unique<StageOfFirst>(); };
  expect_refused({}, 2, ErrorCode::kUsage,
                 {"buffer 'counter' is not the mean over replicas (ReplicaRule), with 2 virtual "
                  "replicas on 1 replica; legal: as many as replicas"},
                 stages, numbers());
}

TEST(VirtualReplicasMistakesTest, AccumulatedBatchesAreRefusedAndChangeNothing) {
  const Layout of = {.replicas = 2};
  on_some(of, [&](Communicator& comm) {
    Pipeline pipeline(comm, images_model(), image_batches(), options_of(of, 4));
    const Images images(kMicroBatches * kSize * 4);
    expect_error(ErrorCode::kUsage,
                 {"accumulate() with 4 virtual replicas on 2 replicas",
                  "legal: as many virtual replicas as replicas, or one batch a step"},
                 [&] { (void)pipeline.accumulate(images.batch(comm)); });
    EXPECT_EQ(pipeline.train_step(images.batch(comm)).step, 1U);
    return Outcome{};
  });
}

// A stage sees numbers within its virtual replica.
TEST(VirtualReplicasMistakesTest, AnErrorNamesTheMicroBatchAndItsVirtualReplica) {
  const Layout of = {.replicas = 2};
  on_some(of, [&](Communicator& comm) {
    int calls = 0;
    const PlannedFailure second{1, 2, [&] {
                                  if (comm.rank() == 1 && ++calls == 2)
                                    throw std::runtime_error("no numbers today");
                                }};
    const StageFactory stages = [&](int, int) {
      return std::make_unique<ArithmeticStage>(0, second);
    };
    Pipeline pipeline(comm, stages, numbers(), options_of(of, 4));
    const Ones ones(4);
    expect_error(ErrorCode::kUser,
                 {"stage 0, forward of micro-batch 2 of virtual replica 3: no numbers today"},
                 [&] { (void)pipeline.train_step(ones.batch(comm)); });
    return Outcome{};
  });
}

// Its loss adds to the gradient that its backward adds to.
class StageThatMixes : public ArithmeticStage {
 public:
  StageThatMixes() : ArithmeticStage(0) {}
  void loss(StageContext& ctx, std::span<const Tensor> y, std::span<const Tensor> targets,
            double* sum) override {
    ArithmeticStage::loss(ctx, y, targets, sum);
    parameters()->all()[0]->grad.at(0) += 1;
  }
};

// The first step of such a stage, on one rank with two virtual replicas.
template <typename MadeStage>
void expect_refused_step(std::initializer_list<std::string> texts) {
  on_some({}, [&](Communicator& comm) {
    const StageFactory stages = [](int, int) { return std::make_unique<MadeStage>(); };
    Pipeline pipeline(comm, stages, numbers(), options_of({}, 2));
    const Ones ones(2);
    expect_error(ErrorCode::kUsage, texts, [&] { (void)pipeline.train_step(ones.batch(comm)); });
    return Outcome{};
  });
}

TEST(VirtualReplicasMistakesTest, ALossThatWritesOtherGradientsIsRefused) {
  expect_refused_step<StageThatMixes>(
      {"forward() or loss() writes the gradient of parameter 'w0'", "Parameter::written_by_loss"});
}

// Its backward adds to a gradient that it leaves to its loss.
class StageThatClaims : public ArithmeticStage {
 public:
  StageThatClaims() : ArithmeticStage(0) { parameters()->all()[0]->written_by_loss = true; }
};

TEST(VirtualReplicasMistakesTest, ABackwardThatWritesAGradientOfTheLossIsRefused) {
  expect_refused_step<StageThatClaims>(
      {"backward writes the gradient of parameter 'w0'", "without Parameter::written_by_loss"});
}

}  // namespace
}  // namespace sluice::testing
