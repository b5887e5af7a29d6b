// Trainings whose replicas divide the optimizer's state, or the parameters too, have the bits of
// those that do not: a set
// of configurations in which every pair of values occurs; with SLUICE_ALL_SHARDS=1 the product of
// the values of schedule, depth, replicas, shards, optimizer, ties and clipping. Mistakes with
// shards are at the end.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <numeric>
#include <set>
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
#include "runtime/files/sha256.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "stages/compute/call_arguments.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/runtime/engine/wrapped_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/first_ranks.hpp"
#include "tests/runtime/gradients/resident_bytes.hpp"

namespace sluice::testing {
namespace {

// Momentum by slices, as a program would write it: memory for its own elements alone.
class SliceMomentum : public Optimizer {
 public:
  explicit SliceMomentum(std::span<const ParameterSlice> slices)
      : slices_(slices.begin(), slices.end()) {
    for (const ParameterSlice& slice : slices_) {
      speeds_.emplace_back(static_cast<std::size_t>(slice.count));
    }
  }
  void update(ComputeContext& /*compute*/, std::uint64_t /*step*/, float learning_rate,
              float grad_scale) override {
    for (std::size_t s = 0; s < slices_.size(); ++s) {
      const auto& [parameter, first, count] = slices_[s];
      for (std::int64_t i = 0; i < count; ++i) {
        float& speed = speeds_[s][static_cast<std::size_t>(i)];
        speed = 0.75F * speed + grad_scale * parameter->grad.at(first + i);
        parameter->value.at(first + i) -= learning_rate * speed;
      }
    }
  }
  std::vector<OptimizerState> state() override {
    std::vector<OptimizerState> all;
    for (std::size_t s = 0; s < slices_.size(); ++s) {
      const ParameterSlice& slice = slices_[s];
      const Shape shape = slice.whole() ? slice.parameter->shape : Shape{slice.count};
      all.push_back({slice.parameter->name, "speed", view(speeds_[s], shape), slice.first});
    }
    return all;
  }

 private:
  std::vector<ParameterSlice> slices_;
  std::vector<std::vector<float>> speeds_;
};

std::unique_ptr<Optimizer> make_slice_momentum(std::span<const ParameterSlice> slices,
                                               const DeviceMemory& /*memory*/) {
  return std::make_unique<SliceMomentum>(slices);
}

// --- configurations ---
// What a configuration is made of, each with its number of values.
enum Factor {
  kSchedule,
  kDepth,
  kReplicas,
  kShard,
  kOptimizer,
  kTies,
  kClip,
  kRecompute,
  kPrecision,  // of matmuls: f32, or bf16, which reads copies of the values
  kGroups,     // frozen parameters, and some with settings of their own
  kCalls,      // of a step: kOneCall...
  kFactors
};
constexpr std::array<int, kFactors> kValues = {4, 2, 4, 5, 4, 2, 2, 2, 2, 2, 3};
constexpr std::array<const char*, 4> kSchedules = {"gpipe", "1f1b", "interleaved", "zb-v"};
// none, optimizer, and parameters that are gathered per use, per step, and, where there are four
// replicas, within groups of two, per step where gradients are clipped.
enum Shards { kNoShards, kOptimizerShards, kGatheredPerUse, kGatheredPerStep, kInGroups };
constexpr int kFourReplicas = 3;  // of kReplicas
constexpr std::array<const char*, 4> kOptimizers = {"sgd", "adamw", "adamw bf16", "own"};
enum Calls { kOneCall, kAccumulated, kOpenStep };

using Configuration = std::array<int, kFactors>;

int depth_of(const Configuration& of) { return of[kDepth] + 1; }
int replicas_of(const Configuration& of) { return of[kReplicas] + 1; }

std::string to_string(const Configuration& of) {
  return fmt::format("{} p{} d{} shard {} {}{}{}{}{}{} calls {}", kSchedules[at(of[kSchedule])],
                     depth_of(of), replicas_of(of), of[kShard], kOptimizers[at(of[kOptimizer])],
                     of[kTies] != 0 ? " ties" : "", of[kClip] != 0 ? " clip" : "",
                     of[kRecompute] != 0 ? " recompute" : "", of[kPrecision] != 0 ? " bf16" : "",
                     of[kGroups] != 0 ? " groups" : "", of[kCalls]);
}

// Two factors and a value of each.
using Pair = std::array<int, 4>;

// Without shards only those with kShard count: all pairs of the others are to occur with shards.
std::vector<Pair> pairs_of(const Configuration& of) {
  std::vector<Pair> pairs;
  for (int a = 0; a < kFactors; ++a) {
    for (int b = a + 1; b < kFactors; ++b) {
      if (of[kShard] == 0 && a != kShard && b != kShard) continue;
      pairs.push_back({a, of[at(a)], b, of[at(b)]});
    }
  }
  return pairs;
}

bool is_legal(int replicas, int shard) { return shard != kInGroups || replicas == kFourReplicas; }

std::set<Pair> all_pairs() {
  std::set<Pair> pairs;
  for (int a = 0; a < kFactors; ++a) {
    for (int b = a + 1; b < kFactors; ++b) {
      for (int x = 0; x < kValues[at(a)]; ++x) {
        for (int y = 0; y < kValues[at(b)]; ++y) {
          if (a != kReplicas || b != kShard || is_legal(x, y)) pairs.insert({a, x, b, y});
        }
      }
    }
  }
  return pairs;
}

// Each configuration takes the values, factor by factor, that make the most pairs not seen before.
std::vector<Configuration> covering_set() {
  std::set<Pair> missing = all_pairs();
  std::vector<Configuration> chosen;
  while (!missing.empty()) {
    const Pair seed = *missing.begin();
    Configuration next{};
    std::set<int> fixed = {kShard, seed[0], seed[2]};
    next[kShard] = 1 + static_cast<int>(chosen.size() % 4);
    next[at(seed[0])] = seed[1];
    next[at(seed[2])] = seed[3];
    if (next[kShard] == kInGroups && !fixed.contains(kReplicas)) {
      next[kReplicas] = kFourReplicas;
      fixed.insert(kReplicas);
    }
    if (!is_legal(next[kReplicas], next[kShard])) next[kShard] = kGatheredPerUse;
    for (int factor = 0; factor < kFactors; ++factor) {
      if (fixed.contains(factor)) continue;
      const auto gain = [&](int value) {
        return std::count_if(fixed.begin(), fixed.end(), [&](int other) {
          return missing.contains(other < factor ? Pair{other, next[at(other)], factor, value}
                                                 : Pair{factor, value, other, next[at(other)]});
        });
      };
      int best = 0;
      for (int value = 1; value < kValues[at(factor)]; ++value) {
        if (gain(value) > gain(best)) best = value;
      }
      next[at(factor)] = best;
      fixed.insert(factor);
    }
    for (const Pair& pair : pairs_of(next)) missing.erase(pair);
    chosen.push_back(next);
  }
  return chosen;
}

// The product of all values up to kClip. The others are drawn, the same for all schedules, depths
// and shards, so that few trainings without shards serve all.
std::vector<Configuration> all_configurations() {
  std::vector<Configuration> all;
  Configuration next{};
  for (int factor = 0; factor <= kClip;) {
    if (factor == 0) {
      Configuration each = next;
      std::uint64_t kind = 0;
      for (const int shared : {kReplicas, kOptimizer, kTies, kClip}) {
        kind = kind * 4 + static_cast<std::uint64_t>(next[at(shared)]);
      }
      for (int drawn = kClip + 1; drawn < kFactors; ++drawn) {
        const std::uint32_t word = philox({.seed = 41}, kind, static_cast<std::uint64_t>(drawn))[0];
        each[at(drawn)] = static_cast<int>(word % static_cast<std::uint32_t>(kValues[at(drawn)]));
      }
      if (is_legal(each[kReplicas], each[kShard])) all.push_back(each);
    }
    if (++next[at(factor)] < kValues[at(factor)]) {
      factor = 0;
    } else {
      next[at(factor++)] = 0;
    }
  }
  return all;
}

TEST(ShardCoverTest, EveryPairOfValuesOccursWithShards) {
  const std::vector<Configuration> chosen = covering_set();
  std::set<Pair> seen;
  for (const Configuration& each : chosen) {
    for (const Pair& pair : pairs_of(each)) seen.insert(pair);
  }
  EXPECT_EQ(seen, all_pairs());
  EXPECT_LE(chosen.size(), 30U);
  const std::vector<Configuration> all = all_configurations();
  EXPECT_EQ(std::set<Configuration>(all.begin(), all.end()).size(),
            4U * 2 * (4 * 4 + 1) * 4 * 2 * 2);
}

// --- trainings ---
constexpr std::int64_t kContext = 8;

// The embedding has 5 blocks of kSumBlock elements and is odd; matrices of the MLP have 2 and are
// odd, those of attention 1; norms and biases are smaller than a block.
TransformerConfig model_of(const Configuration& of) {
  TransformerConfig model{.layers = 4, .heads = 2, .width = 68, .context = 8, .vocabulary = 1025};
  model.dropout = 0.1F;
  model.tied = of[kTies] != 0;
  model.precision = of[kPrecision] != 0 ? DType::kBf16 : DType::kF32;
  model.recompute = of[kRecompute] != 0 ? Recompute::kBlock : Recompute::kNone;
  return model;
}

void set_shards(PipelineOptions& options, int shards) {
  constexpr std::array kLevels = {ShardLevel::kNone, ShardLevel::kOptimizer,
                                  ShardLevel::kParameters};
  options.shape.shard = kLevels.at(static_cast<std::size_t>(std::min<int>(shards, 2)));
  const bool per_step =
      shards == kInGroups ? options.training.clip > 0 : shards == kGatheredPerStep;
  options.shape.shard_gather = per_step ? ShardGather::kStep : ShardGather::kAuto;
  if (shards == kInGroups && options.shape.replicas == 4) options.shape.shard_group = 2;
}

PipelineOptions options_of(const Configuration& of) {
  PipelineOptions options;
  options.shape = {.pipeline = depth_of(of),
                   .replicas = replicas_of(of),
                   .micro_batches = 3,
                   .micro_batch_size = 2};
  options.order.schedule = kSchedules[at(of[kSchedule])];
  PipelineOptions::Training& training = options.training;
  if (of[kOptimizer] == 0) training.optimizer = OptimizerConfig::sgd(0.9F);
  training.optimizer.weight_decay = 0.1F;
  if (of[kOptimizer] == 2) training.optimizer.moments = DType::kBf16;
  if (of[kOptimizer] == 3) training.make_optimizer = make_slice_momentum;
  training.learning_rate = {.peak = 1e-2, .warmup = 1, .steps = 10};
  training.clip = of[kClip] != 0 ? 0.5 : 0;
  set_shards(options, of[kShard]);
  if (of[kGroups] != 0) {
    training.groups = {{.names = "blocks.1.*", .frozen = true},
                       {.names = "blocks.3.*norm*", .frozen = true},
                       {.names = "blocks.2.*", .learning_rate_scale = 0.5}};
    if (!training.make_optimizer) training.groups.back().weight_decay = 0.2F;
  }
  options.checks.replicas_every = 1;
  return options;
}

// Rank 0 passes all.
struct Tokens {
  std::vector<std::int32_t> inputs, targets;
  std::int64_t count;

  Tokens(std::uint64_t seed, std::int64_t samples) : count(samples) {
    for (std::int64_t i = 0; i <= samples * kContext; ++i) {
      const auto token = static_cast<std::int32_t>(
          philox({.seed = seed}, 0, static_cast<std::uint64_t>(i))[0] % 1025);
      if (i < samples * kContext) inputs.push_back(token);
      if (i > 0) targets.push_back(token);
    }
  }
  [[nodiscard]] Batch part(const Communicator& comm, std::int64_t first, std::int64_t end) const {
    if (comm.rank() != 0) return {};
    const auto cut = [&](const std::vector<std::int32_t>& all) {
      return view(std::span(all).subspan(static_cast<std::size_t>(first * kContext),
                                         static_cast<std::size_t>((end - first) * kContext)),
                  {end - first, kContext});
    };
    return {.inputs = {cut(inputs)}, .targets = {cut(targets)}};
  }
  [[nodiscard]] Batch all(const Communicator& comm) const { return part(comm, 0, count); }
};

// SHA-256 by name. Of tensors that several ranks have, all must have the same.
using Digests = std::map<std::string, std::string>;

Digests gathered(Pipeline& pipeline, const Digests& mine) {
  std::string lines;
  for (const auto& [name, digest] : mine) lines.append(name + "\n").append(digest + "\n");
  Digests all;
  for (const std::string& text : PipelineAccess::world(pipeline).all_gather_strings(lines)) {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t name = text.find('\n', at), end = text.find('\n', name + 1);
      const std::string digest = text.substr(name + 1, end - name - 1);
      const auto [other, is_new] = all.emplace(text.substr(at, name - at), digest);
      EXPECT_TRUE(is_new || other->second == digest) << other->first << " differs between ranks";
      at = end + 1;
    }
  }
  return all;
}

// All uses of all replicas.
Digests values_of(Pipeline& pipeline) {
  Digests mine;
  for (const Pipeline::Owned& each : pipeline.parameters()) {
    PipelineAccess::lend(pipeline, *each.parameter);
    mine[each.parameter->name] =
        sha256_hex(std::as_bytes(std::span<const float>(each.parameter->value.floats())));
    PipelineAccess::give_back(pipeline, *each.parameter);
  }
  return gathered(pipeline, mine);
}

// Whole gradients of owners, on all replicas.
Digests gradients_of(Pipeline& pipeline) {
  Digests mine;
  for (const Pipeline::Owned& each : pipeline.parameters()) {
    if (!each.owner) continue;
    mine[each.parameter->name] =
        sha256_hex(std::as_bytes(std::span<const float>(each.parameter->grad.floats())));
  }
  return gathered(pipeline, mine);
}

// Of each block of kSumBlock elements; a slice begins at such a block.
Digests optimizer_state_of(Pipeline& pipeline) {
  Digests mine;
  for (const OptimizerState& state : pipeline.optimizer_state()) {
    const auto size = static_cast<std::int64_t>(size_of(state.tensor.spec.dtype));
    const std::int64_t end = state.first + state.tensor.elements();
    for (std::int64_t first = state.first; first < end; first += kSumBlock) {
      const std::int64_t count = std::min(kSumBlock, end - first);
      const auto bytes =
          std::span(static_cast<const std::byte*>(state.tensor.data) + (first - state.first) * size,
                    static_cast<std::size_t>(count * size));
      mine[fmt::format("{}.{} from {}, {} elements", state.kind, state.parameter, first, count)] =
          sha256_hex(bytes);
    }
  }
  return gathered(pipeline, mine);
}

struct Outcome {
  std::vector<double> numbers;  // losses, norms, counted targets
  double validation = 0;
  std::string answers;  // of infer()
  Digests values, gradients, optimizer_state;
};

void add(Outcome& outcome, const StepReport& report) {
  outcome.numbers.insert(outcome.numbers.end(), {report.loss, report.grad_norm, report.targets});
}

void one_step(Communicator& comm, Pipeline& pipeline, const Tokens& tokens, int calls,
              Outcome& outcome) {
  const std::int64_t half = tokens.count / 2;
  if (calls == kAccumulated) {
    add(outcome, pipeline.accumulate(tokens.part(comm, 0, half)));
    add(outcome, pipeline.train_step(tokens.part(comm, half, tokens.count)));
  } else if (calls == kOpenStep) {
    add(outcome, pipeline.forward_backward(tokens.all(comm)));
    outcome.gradients = gradients_of(pipeline);
    add(outcome, pipeline.optimizer_step());
  } else {
    add(outcome, pipeline.train_step(tokens.all(comm)));
  }
}

using Look = std::function<void(Pipeline&)>;

// The second of three steps has a batch that is not full, with unequal shares and micro-batches.
Outcome train(Communicator& comm, const Configuration& of, const Look& at_end = {}) {
  const TensorSpec tokens{DType::kI32, {kContext}};
  Pipeline pipeline(comm, Transformer(model_of(of)),
                    BatchSpec{.inputs = {tokens}, .targets = {tokens}, .feed = Feed::kRank0},
                    options_of(of));
  Outcome outcome;
  const std::int64_t full = 6 * replicas_of(of);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    one_step(comm, pipeline, Tokens(step, step == 2 ? full - 3 : full), of[kCalls], outcome);
    if (step != 1) continue;
    outcome.validation = pipeline.evaluate(Tokens(9, 5).all(comm)).loss;
    // From four replicas on one has no sample.
    const Tokens three(8, 3);
    const Batch asked{.inputs = three.all(comm).inputs};
    for (const Tensor& answer : pipeline.infer(asked, {.to = InferOptions::kEveryRank})) {
      outcome.answers += sha256_hex({answer.as<const std::byte>(), answer.spec.bytes()});
    }
  }
  outcome.values = values_of(pipeline);
  outcome.optimizer_state = optimizer_state_of(pipeline);
  if (at_end) at_end(pipeline);
  pipeline.close();
  return outcome;
}

// Over the first ranks of the job; elsewhere nothing happens. An Error, which all of them throw, is
// a failure of the test, and the others go on.
Outcome train_on_some(const Configuration& of, const Look& at_end = {}) {
  const auto part = first_ranks(depth_of(of) * replicas_of(of));
  try {
    if (part != nullptr) return train(*part, of, at_end);
  } catch (const Error& error) {
    ADD_FAILURE() << to_string(of) << ": " << error.what();
  }
  return {};
}

void expect_same(const Outcome& expected, const Outcome& actual, const std::string& where) {
  EXPECT_EQ(expected.numbers, actual.numbers) << where;
  EXPECT_EQ(expected.validation, actual.validation) << where;
  EXPECT_EQ(expected.answers, actual.answers) << where;
  EXPECT_EQ(expected.gradients, actual.gradients) << where;
  EXPECT_EQ(expected.values, actual.values) << where;
  EXPECT_EQ(expected.optimizer_state, actual.optimizer_state) << where;
}

// Trainings without shards in the order 1F1B, by configuration.
class References {
 public:
  const Outcome& of(Configuration wanted) {
    wanted[kShard] = 0;
    wanted[kSchedule] = 1;
    const auto [found, is_new] = known_.try_emplace(wanted);
    if (is_new) found->second = train_on_some(wanted);
    return found->second;
  }
  [[nodiscard]] std::size_t size() const { return known_.size(); }

 private:
  std::map<Configuration, Outcome> known_;
};

// The same as without shards at the same depth, and at the other one.
TEST(ShardsTest, HaveTheBitsOfTrainingsWithoutShards) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  const bool all = std::getenv("SLUICE_ALL_SHARDS") != nullptr;
  const std::vector<Configuration> chosen = all ? all_configurations() : covering_set();
  const auto start = std::chrono::steady_clock::now();
  References references;
  for (const Configuration& each : chosen) {
    const Outcome outcome = train_on_some(each);
    for (const int depth : {0, 1}) {
      Configuration other = each;
      other[kDepth] = depth;
      const Outcome& expected = references.of(other);
      if (world().rank() != 0) continue;
      EXPECT_GT(expected.numbers.front(), 1);
      EXPECT_FALSE(expected.answers.empty());
      EXPECT_FALSE(expected.values.empty());
      EXPECT_FALSE(expected.optimizer_state.empty());
      expect_same(expected, outcome, to_string(each) + fmt::format(", p{} expected", depth + 1));
    }
  }
  if (world().rank() != 0) return;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{} configurations and {} references in {:.1f} s\n", chosen.size(), references.size(),
             seconds.count());
}

// --- gradients and values of the program's own ---
// 1F1B, AdamW with clipping and ties.
Configuration small_configuration(int depth, int replicas, int shards) {
  Configuration of{};
  of[kSchedule] = of[kOptimizer] = of[kTies] = of[kClip] = 1;
  of[kDepth] = depth - 1;
  of[kReplicas] = replicas - 1;
  of[kShard] = shards;
  return of;
}

// Runs `body` with a pipeline over the first ranks of the job, without shards and with them, and
// expects the same.
void expect_same_with_shards(int depth, int replicas, const PipelineOptions& more,
                             const std::function<void(Pipeline&, Communicator&, Outcome&)>& body) {
  const auto comm = first_ranks(depth * replicas);
  if (comm == nullptr) return;
  const TensorSpec tokens{DType::kI32, {kContext}};
  std::array<Outcome, kValues[kShard]> outcomes;
  for (int shards = 0; shards < kValues[kShard]; ++shards) {
    const Configuration of = small_configuration(depth, replicas, shards);
    PipelineOptions options = options_of(of);
    options.training.skip_nonfinite = more.training.skip_nonfinite;
    Pipeline pipeline(*comm, Transformer(model_of(of)),
                      BatchSpec{.inputs = {tokens}, .targets = {tokens}, .feed = Feed::kRank0},
                      options);
    Outcome& outcome = outcomes.at(static_cast<std::size_t>(shards));
    body(pipeline, *comm, outcome);
    outcome.values = values_of(pipeline);
    outcome.optimizer_state = optimizer_state_of(pipeline);
  }
  for (int shards = 1; shards < kValues[kShard]; ++shards) {
    expect_same(outcomes[0], outcomes.at(static_cast<std::size_t>(shards)),
                fmt::format("p{} d{} shard {}", depth, replicas, shards));
  }
}

// Every replica changes the whole gradients between the two calls.
TEST(ShardsTest, AnUpdateTakesGradientsThatTheProgramChanged) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  const auto body = [](Pipeline& pipeline, Communicator& comm, Outcome& outcome) {
    for (std::uint64_t step = 1; step <= 2; ++step) {
      add(outcome, pipeline.forward_backward(Tokens(step, 12).all(comm)));
      for (const Pipeline::Owned& each : pipeline.parameters()) {
        if (!each.owner) continue;
        float factor = 0.5F;
        for (float& value : each.parameter->grad.floats()) value *= (factor = 1.5F - factor);
      }
      add(outcome, pipeline.optimizer_step());
      // A batch that is dropped leaves nothing.
      (void)pipeline.forward_backward(Tokens(7, 12).all(comm));
      pipeline.drop_gradients();
    }
    add(outcome, pipeline.train_step(Tokens(3, 12).all(comm)));
  };
  expect_same_with_shards(2, 3, {}, body);
  expect_same_with_shards(1, 4, {}, body);
}

// In the part of the last replica, and in a frozen parameter's place.
TEST(ShardsTest, AStepThatIsNotFiniteMovesNothing) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  PipelineOptions more;
  more.training.skip_nonfinite = true;
  expect_same_with_shards(2, 4, more, [](Pipeline& pipeline, Communicator& comm, Outcome& outcome) {
    add(outcome, pipeline.train_step(Tokens(1, 24).all(comm)));
    const Digests before = values_of(pipeline), state = optimizer_state_of(pipeline);
    (void)pipeline.forward_backward(Tokens(2, 24).all(comm));
    for (const Pipeline::Owned& each : pipeline.parameters()) {
      if (each.parameter->name != "token_embedding.weight" || !each.owner) continue;
      each.parameter->grad.floats().back() = std::nanf("");
    }
    const StepReport report = pipeline.optimizer_step();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(values_of(pipeline), before);
    EXPECT_EQ(optimizer_state_of(pipeline), state);
    add(outcome, pipeline.train_step(Tokens(3, 24).all(comm)));
  });
}

// Values that the program writes, and those of another pipeline, are what the next update takes.
TEST(ShardsTest, AnUpdateTakesValuesThatTheProgramSets) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  expect_same_with_shards(2, 2, {}, [](Pipeline& pipeline, Communicator& comm, Outcome& outcome) {
    add(outcome, pipeline.train_step(Tokens(1, 12).all(comm)));
    std::map<std::string, HostTensor> values = pipeline.state();
    add(outcome, pipeline.train_step(Tokens(2, 12).all(comm)));
    pipeline.set_state(values);
    add(outcome, pipeline.train_step(Tokens(3, 12).all(comm)));
    for (const Pipeline::Owned& each : pipeline.parameters()) {
      for (float& value : each.parameter->value.floats()) value *= 0.5F;
    }
    pipeline.values_changed();
    add(outcome, pipeline.train_step(Tokens(4, 12).all(comm)));
  });
}

// --- what each replica keeps ---
// What this rank updates of each of its parameters; those of which it updates nothing are left out.
std::map<std::string, ElementRange> own_parts(Pipeline& pipeline,
                                              const std::vector<ParameterGroup>& groups) {
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  std::map<std::string, ElementRange> parts;
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    const std::string& name = owned.parameter->name;
    const ParameterGroup* group = group_of(groups, name);
    if (!owned.owner || (group != nullptr && group->frozen)) continue;
    const StageEntry& stage = layout.parameters.stages.at(static_cast<std::size_t>(owned.stage));
    const auto entry = std::find_if(stage.parameters.begin(), stage.parameters.end(),
                                    [&](const ParameterEntry& each) { return each.name == name; });
    const ElementRange part = entry->part(layout.place.here.replica);
    if (part.count > 0) parts[name] = part;
  }
  return parts;
}

// This rank has state of its parts and of nothing else; the largest of all replicas is what the
// plan says.
void expect_state_of_own_parts(Pipeline& pipeline, const Configuration& of) {
  const std::size_t kinds = of[kOptimizer] == 1 || of[kOptimizer] == 2 ? 2 : 1;
  const auto parts = own_parts(pipeline, options_of(of).training.groups);
  std::map<std::string, std::size_t> seen;
  std::size_t bytes = 0;
  for (const OptimizerState& state : pipeline.optimizer_state()) {
    const auto part = parts.find(state.parameter);
    ++seen[state.parameter];
    bytes += state.tensor.spec.bytes();
    const ElementRange own = part == parts.end() ? ElementRange{} : part->second;
    EXPECT_EQ(state.first, own.first) << to_string(of) << ": " << state.parameter;
    EXPECT_EQ(state.tensor.elements(), own.count) << to_string(of) << ": " << state.parameter;
  }
  EXPECT_EQ(seen.size(), parts.size()) << to_string(of);
  for (const auto& [name, count] : seen) EXPECT_EQ(count, kinds) << to_string(of) << ": " << name;

  const RankPlace& place = PipelineAccess::layout(pipeline).place;
  const int rank = place.here.pipeline;
  std::size_t largest = 0;
  std::vector<std::size_t> all(static_cast<std::size_t>(place.topology.ranks()));
  PipelineAccess::world(pipeline).all_gather(bytes, all);
  for (int r = 0; r < replicas_of(of); ++r) {
    const int there = place.topology.rank_of({.pipeline = rank, .replica = r});
    largest = std::max(largest, all.at(static_cast<std::size_t>(there)));
  }
  if (of[kOptimizer] == 3) return;  // a program's own is not in the plan
  const std::size_t planned =
      PipelineAccess::layout(pipeline).memory.ranks.at(static_cast<std::size_t>(rank)).optimizer;
  const std::size_t padding = kinds * kBufferAlignment * pipeline.parameters().size();
  EXPECT_GE(planned, largest) << to_string(of);
  EXPECT_LE(static_cast<double>(planned), 1.01 * static_cast<double>(largest + padding))
      << to_string(of);
}

TEST(ShardsTest, EachReplicaHasOptimizerStateOfItsPartsAlone) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  for (int optimizer = 0; optimizer < 4; ++optimizer) {
    for (const int depth : {1, 2}) {
      Configuration of = small_configuration(depth, 5 - depth, kOptimizerShards);
      of[kOptimizer] = optimizer;
      of[kGroups] = optimizer % 2;
      (void)train_on_some(of, [&](Pipeline& pipeline) { expect_state_of_own_parts(pipeline, of); });
    }
  }
}

// --- small stages ---
// One stage of two parameters, of 1 block each.
Sequential tiny_model() { return Sequential({nn::linear(4, 1)}, nn::mse_loss()); }

BatchSpec tiny_batches() {
  return {.inputs = {{DType::kF32, {4}}}, .targets = {{DType::kF32, {1}}}, .feed = Feed::kRank0};
}

struct Numbers {
  std::vector<float> inputs, targets;
  explicit Numbers(std::int64_t samples)
      : inputs(static_cast<std::size_t>(samples) * 4), targets(static_cast<std::size_t>(samples)) {
    std::iota(inputs.begin(), inputs.end(), -3.0F);
    std::iota(targets.begin(), targets.end(), 2.0F);
  }
  [[nodiscard]] Batch batch(const Communicator& comm) const {
    const auto samples = static_cast<std::int64_t>(targets.size());
    if (comm.rank() != 0) return {};
    return {.inputs = {view(inputs, {samples, 4})}, .targets = {view(targets, {samples, 1})}};
  }
};

// AdamW over replicas alone.
PipelineOptions sharded_options(int replicas, int shards = kOptimizerShards) {
  PipelineOptions options;
  options.shape = {.replicas = replicas, .micro_batches = 1, .micro_batch_size = 2};
  set_shards(options, shards);
  options.training.learning_rate = {.peak = 1e-2};
  options.checks.replicas_every = 1;
  return options;
}

// Runs `body` over the first `ranks` ranks of the job.
void on_some(int ranks, const std::function<void(Communicator&)>& body) {
  const auto comm = first_ranks(ranks);
  if (comm != nullptr) body(*comm);
}

TEST(ShardsTest, MoreReplicasThanBlocksAreLegal) {
  for (const bool own : {false, true}) {
    on_some(5, [&](Communicator& comm) {
      std::array<Outcome, kValues[kShard]> outcomes;
      for (int shards = 0; shards < kValues[kShard]; ++shards) {
        PipelineOptions options = sharded_options(5, shards);
        if (own) options.training.make_optimizer = make_slice_momentum;
        Pipeline pipeline(comm, tiny_model(), tiny_batches(), options);
        Outcome& outcome = outcomes.at(static_cast<std::size_t>(shards));
        for (int step = 0; step < 3; ++step) {
          add(outcome, pipeline.train_step(Numbers(10).batch(comm)));
        }
        outcome.values = values_of(pipeline);
        outcome.optimizer_state = optimizer_state_of(pipeline);
        pipeline.close();
      }
      for (std::size_t shards = 1; shards < outcomes.size(); ++shards) {
        expect_same(outcomes[0], outcomes.at(shards), own ? "own optimizer" : "AdamW");
      }
    });
  }
}

// --- mistakes ---
void expect_refused(int ranks, ErrorCode code, std::initializer_list<std::string> parts,
                    const std::function<void(Communicator&)>& body) {
  on_some(ranks, [&](Communicator& comm) { expect_error(code, parts, [&] { body(comm); }); });
}

TEST(ShardMistakesTest, AFactoryOfWholeParametersIsRefused) {
  PipelineOptions options = sharded_options(2);
  options.training.make_optimizer = [](std::span<Parameter* const>, const DeviceMemory&) {
    return std::unique_ptr<Optimizer>();
  };
  expect_refused(2, ErrorCode::kUsage,
                 {"options.shape.shard", "OptimizerFactory of whole parameters",
                  "legal: a factory that takes std::span<const ParameterSlice>, or no shards"},
                 [&](Communicator& comm) {
                   const Pipeline none(comm, tiny_model(), tiny_batches(), options);
                 });
}

// Its state says that it has the elements of `says`, whatever slices it got.
class CarelessMomentum : public SliceMomentum {
 public:
  CarelessMomentum(std::span<const ParameterSlice> slices, ElementRange says)
      : SliceMomentum(slices), says_(says), memory_(static_cast<std::size_t>(says.count)) {}
  std::vector<OptimizerState> state() override {
    std::vector<OptimizerState> all = SliceMomentum::state();
    for (OptimizerState& state : all) {
      state.tensor = view(memory_, Shape{says_.count});
      state.first = says_.first;
    }
    return all;
  }

 private:
  ElementRange says_;
  std::vector<float> memory_;
};

// A save puts the whole together from what each replica says.
TEST(ShardMistakesTest, StateThatIsNotThatOfItsSlicesIsRefused) {
  const Sequential model({nn::linear(1000, 41, /*bias=*/false)}, nn::mse_loss());
  const BatchSpec batches{
      .inputs = {{DType::kF32, {1000}}}, .targets = {{DType::kF32, {41}}}, .feed = Feed::kRank0};
  constexpr std::int64_t kAll = 41 * 1000;
  const auto refused = [&](const char* what, const auto& says) {
    PipelineOptions options = sharded_options(2);
    options.training.make_optimizer = [&](std::span<const ParameterSlice> slices,
                                          const DeviceMemory&) -> std::unique_ptr<Optimizer> {
      return std::make_unique<CarelessMomentum>(slices, says(slices[0].first, slices[0].count));
    };
    SCOPED_TRACE(what);
    expect_refused(2, ErrorCode::kUsage,
                   {"the optimizer's state 'speed' of '0.weight' has ", "legal: all of elements "},
                   [&](Communicator& comm) { const Pipeline none(comm, model, batches, options); });
  };
  refused("the whole", [](auto, auto) { return ElementRange{0, kAll}; });
  refused("fewer", [](auto first, auto count) { return ElementRange{first, count - 1}; });
  refused("later ones", [](auto first, auto count) { return ElementRange{first + 1, count - 1}; });
  refused("none", [](auto first, auto) { return ElementRange{first, 0}; });
}

TEST(ShardMistakesTest, AllReduceIsRefused) {
  PipelineOptions options = sharded_options(2);
  options.devices.all_reduce = true;
  expect_refused(2, ErrorCode::kUsage, {"--all-reduce", "legal: one of the two"},
                 [&](Communicator& comm) {
                   const Pipeline none(comm, tiny_model(), tiny_batches(), options);
                 });
}

TEST(ShardMistakesTest, GathersWithoutShardsOfTheParametersAreRefused) {
  PipelineOptions options = sharded_options(2);
  options.shape.shard_gather = ShardGather::kUse;
  expect_refused(
      2, ErrorCode::kUsage,
      {"--shard-gather) with shards of optimizer", "legal: auto, or shards of the param"},
      [&](Communicator& comm) {
        const Pipeline none(comm, tiny_model(), tiny_batches(), options);
      });
}

TEST(ShardMistakesTest, RanksThatDisagreeAboutShardsAreNamed) {
  expect_refused(3, ErrorCode::kMismatch, {"shard", "optimizer", "none"}, [](Communicator& comm) {
    const Pipeline none(comm, tiny_model(), tiny_batches(),
                        sharded_options(3, comm.rank() != 1 ? kOptimizerShards : kNoShards));
  });
}

// A stage with one more parameter than ArithmeticStage.
struct MoreParameters {
  std::string name = "more";
  std::int64_t elements = 7;
  bool own_unit = false;
};

class StageOfMore : public WrappedStage {
 public:
  explicit StageOfMore(const MoreParameters& more)
      : WrappedStage(std::make_unique<ArithmeticStage>(0)) {
    ParameterSet& set = *WrappedStage::parameters();
    if (more.own_unit) set.begin_unit();
    set.add(more.name, {more.elements}, Init::constant(1));
  }
};

TEST(ShardMistakesTest, ReplicasWithOtherParametersOrUnitsAreNamed) {
  const auto refused = [](const MoreParameters& other, const std::string& part) {
    expect_refused(3, ErrorCode::kMismatch, {"replicas disagree about the model", part},
                   [&](Communicator& comm) {
                     const bool last = comm.rank() == 2;
                     const StageFactory make = [&](int, int) -> std::unique_ptr<Stage> {
                       return std::make_unique<StageOfMore>(last ? other : MoreParameters{});
                     };
                     const Pipeline none(comm, make, *counting_source(6), sharded_options(3));
                   });
  };
  const std::string usual = "replica 0 has 'parameter 1 of stage 0: more, 7 elements, unit 0', ";
  refused({.name = "most"},
          usual + "replica 2 has 'parameter 1 of stage 0: most, 7 elements, unit 0'");
  refused({.elements = 8},
          usual + "replica 2 has 'parameter 1 of stage 0: more, 8 elements, unit 0'");
  refused({.own_unit = true},
          usual + "replica 2 has 'parameter 1 of stage 0: more, 7 elements, unit 1'");
}

TEST(ShardMistakesTest, FewerSamplesThanReplicasAreRefusedAndChangeNothing) {
  expect_refused(4, ErrorCode::kUsage, {"batch size 3", "4 replicas"}, [](Communicator& comm) {
    PipelineOptions options = sharded_options(4);
    options.shape.batch_size = 3;
    const Pipeline none(comm, tiny_model(), tiny_batches(), options);
  });
  on_some(4, [](Communicator& comm) {
    Pipeline pipeline(comm, tiny_model(), tiny_batches(), sharded_options(4));
    (void)pipeline.train_step(Numbers(8).batch(comm));
    const Digests before = values_of(pipeline);
    expect_error(ErrorCode::kUsage, {"replica 3 gets no sample; each needs at least 1"},
                 [&] { (void)pipeline.train_step(Numbers(3).batch(comm)); });
    ASSERT_TRUE(pipeline.usable());
    EXPECT_EQ(values_of(pipeline), before);
    EXPECT_EQ(pipeline.train_step(Numbers(5).batch(comm)).step, 2U);
  });
}

// --- what each replica has of the parameters ---
// Bytes of pages that are there, of all parameters of this rank.
std::size_t resident_values(Pipeline& pipeline) {
  std::size_t bytes = 0;
  for (const Pipeline::Owned& each : pipeline.parameters()) {
    bytes += resident_bytes(each.parameter->value.floats());
  }
  return bytes;
}

// What this rank's replica has of them, and what pages at the borders may add.
struct OwnBytes {
  std::size_t own = 0, borders = 0;
};
OwnBytes own_bytes(Pipeline& pipeline) {
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  OwnBytes bytes;
  for (const StageEntry& stage : layout.parameters.stages) {
    for (const ParameterEntry& each : stage.parameters) {
      bytes.own += sizeof(float) *
                   static_cast<std::size_t>(each.part_at_rest(layout.place.here.replica).count);
      bytes.borders += 2 * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    }
  }
  return bytes;
}

// Before the first step, after steps, evaluations, and values that are read or written as a whole.
void expect_own_part_between_steps(Communicator& comm, const Configuration& of) {
  TransformerConfig model = model_of(of);
  model.width = 128;
  const TensorSpec tokens{DType::kI32, {kContext}};
  Pipeline pipeline(comm, Transformer(model),
                    BatchSpec{.inputs = {tokens}, .targets = {tokens}, .feed = Feed::kRank0},
                    options_of(of));
  const auto [own, borders] = own_bytes(pipeline);
  EXPECT_GT(own, borders / 2);
  const auto expect_part = [&, own = own, borders = borders](const char* when) {
    const std::size_t here = resident_values(pipeline);
    EXPECT_GE(here + borders, own) << when;
    EXPECT_LE(here, own + borders) << when;
  };
  expect_part("at first");
  (void)pipeline.train_step(Tokens(1, 24).all(comm));
  expect_part("after a step");
  (void)pipeline.evaluate(Tokens(2, 5).all(comm));
  expect_part("after an evaluation");
  std::map<std::string, HostTensor> values = pipeline.state();
  expect_part("after state()");
  pipeline.set_state(values);
  expect_part("after set_state()");
}

TEST(ShardsTest, AReplicaHasItsPartOfTheParametersAloneBetweenSteps) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  on_some(4, [](Communicator& comm) {
    expect_own_part_between_steps(comm, small_configuration(1, 4, kGatheredPerUse));
    expect_own_part_between_steps(comm, small_configuration(1, 4, kInGroups));
  });
}

// Four units of 1 MiB, of which two are there at a time.
TEST(ShardsTest, AGroupOfTwoHasHalfOfTheParametersEach) {
  on_some(4, [](Communicator& comm) {
    constexpr std::size_t kUnit = std::size_t{1} << 20;
    const TensorSpec wide{DType::kF32, {512}};
    const Sequential model(std::vector(4, nn::linear(512, 512, /*bias=*/false)), nn::mse_loss());
    for (const int group : {0, 2}) {
      PipelineOptions options = sharded_options(4, kGatheredPerUse);
      options.shape.shard_group = group;
      Pipeline pipeline(comm, model,
                        BatchSpec{.inputs = {wide}, .targets = {wide}, .feed = Feed::kRank0},
                        options);
      const std::size_t sharers = group == 2 ? 2 : 4;
      EXPECT_EQ(resident_values(pipeline), 4 * kUnit / sharers);
      const RankMemory& memory = PipelineAccess::layout(pipeline).memory.ranks.front();
      EXPECT_EQ(memory.parameters, 4 * kUnit / sharers + 2 * (kUnit - kUnit / sharers));
      EXPECT_EQ(memory.optimizer, 2 * 4 * kUnit / 4) << "of all replicas";
    }
  });
}

// After a step without an update, which would send it again.
TEST(ShardsTest, AChangedCopyOfAnotherGroupIsFound) {
  on_some(4, [](Communicator& comm) {
    const Configuration of = small_configuration(1, 4, kInGroups);
    const TensorSpec tokens{DType::kI32, {kContext}};
    PipelineOptions options = options_of(of);
    options.training.skip_nonfinite = true;
    Pipeline pipeline(comm, Transformer(model_of(of)),
                      BatchSpec{.inputs = {tokens}, .targets = {tokens}, .feed = Feed::kRank0},
                      options);
    (void)pipeline.train_step(Tokens(1, 24).all(comm));
    (void)pipeline.forward_backward(Tokens(2, 24).all(comm));
    const auto& entries = PipelineAccess::layout(pipeline).parameters.stages[0].parameters;
    for (const Pipeline::Owned& each : pipeline.parameters()) {
      if (each.parameter->name != "token_embedding.weight") continue;
      each.parameter->grad.floats().back() = std::nanf("");
      const auto entry = std::ranges::find(entries, each.parameter->name, &ParameterEntry::name);
      // Of what replica 1 updates.
      if (comm.rank() == 3) each.parameter->value.at(entry->part(1).first + 1) += 1e-3F;
    }
    expect_error(ErrorCode::kMismatch,
                 {"after step 2 parameter 'token_embedding.weight' of stage 0 differs between "
                  "replica 1 and replica 3"},
                 [&] { (void)pipeline.optimizer_step(); });
  });
}

// Says that it uses units, and uses them in the given order.
class StageOfUnits : public WrappedStage {
 public:
  explicit StageOfUnits(std::vector<int> order)
      : WrappedStage(std::make_unique<ArithmeticStage>(0)), order_(std::move(order)) {
    ParameterSet& set = *WrappedStage::parameters();
    for (int unit = 1; unit < 3; ++unit) {
      set.begin_unit();
      set.add(fmt::format("more {}", unit), {7}, Init::constant(1));
    }
  }
  StageDescription describe(std::span<const TensorSpec> inputs,
                            ComputeContext& compute) const override {
    StageDescription description = WrappedStage::describe(inputs, compute);
    description.uses_units = true;
    return description;
  }
  void forward(StageContext& ctx, std::span<const Tensor> x, std::span<const Tensor> y) override {
    for (const int unit : order_) ctx.units->use(unit);
    WrappedStage::forward(ctx, x, y);
  }

 private:
  std::vector<int> order_;
};

TEST(ShardMistakesTest, UnitsThatAreUsedOutOfOrderAreRefused) {
  expect_refused(2, ErrorCode::kUsage,
                 {"stage 0, forward of micro-batch 0",
                  "unit 0 of the parameters is used after a unit that follows it",
                  "legal: ascending in forward() and loss()"},
                 [](Communicator& comm) {
                   const StageFactory make = [](int, int) -> std::unique_ptr<Stage> {
                     return std::make_unique<StageOfUnits>(std::vector{0, 1, 0});
                   };
                   const auto source = counting_source(6);
                   Pipeline pipeline(comm, make, *source, sharded_options(2, kGatheredPerUse));
                   (void)pipeline.train_step();
                 });
}

}  // namespace
}  // namespace sluice::testing
