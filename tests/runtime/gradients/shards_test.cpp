// Replicas that divide the optimizer's state, or the parameters too: what a program may do between
// calls has the bits of replicas that do not, and each has its part alone. Mistakes with shards are
// at the end. every_option_test.cpp has trainings under all options.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
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
#include "tests/runtime/gradients/token_batches.hpp"
#include "tests/runtime/pipeline/scale_layer.hpp"

namespace sluice::testing {
namespace {

// --- configurations ---
// none, optimizer, and parameters that are gathered per use, per step, and, where there are four
// replicas, within groups of two.
enum Shards { kNoShards, kOptimizerShards, kGatheredPerUse, kGatheredPerStep, kInGroups };
constexpr int kShardLevels = 5;
enum Optimizers { kSgd, kAdam, kAdamBf16, kOwn };

// In the order 1F1B, with clipping.
struct Configuration {
  int depth = 1, replicas = 1;
  int shards = kNoShards;
  int optimizer = kAdam;
  bool groups = false;  // frozen parameters, and some with settings of their own
};

std::string to_string(const Configuration& of) {
  return fmt::format("p{} d{} shards {} optimizer {}", of.depth, of.replicas, of.shards,
                     of.optimizer);
}

// --- trainings ---
// The embedding has 5 blocks of kSumBlock elements and is odd; matrices of the MLP have 2 and are
// odd, those of attention 1; norms and biases are smaller than a block.
Transformer small_transformer(int width = 68) {
  TransformerConfig model{.layers = 4, .heads = 2, .width = width};
  model.context = Tokens::kContext;
  model.vocabulary = Tokens::kVocabulary;
  model.dropout = 0.1F;
  return Transformer(model);
}

void set_shards(PipelineOptions& options, int shards) {
  constexpr std::array kLevels = {ShardLevel::kNone, ShardLevel::kOptimizer,
                                  ShardLevel::kParameters};
  options.shape.shard = kLevels.at(static_cast<std::size_t>(std::min<int>(shards, 2)));
  options.shape.shard_gather = shards == kGatheredPerStep ? ShardGather::kStep : ShardGather::kAuto;
  if (shards == kInGroups && options.shape.replicas == 4) options.shape.shard_group = 2;
}

PipelineOptions options_of(const Configuration& of) {
  PipelineOptions options;
  options.shape = {
      .pipeline = of.depth, .replicas = of.replicas, .micro_batches = 3, .micro_batch_size = 2};
  set_shards(options, of.shards);
  PipelineOptions::Training& training = options.training;
  if (of.optimizer == kSgd) training.optimizer = OptimizerConfig::sgd(0.9F);
  training.optimizer.weight_decay = 0.1F;
  if (of.optimizer == kAdamBf16) training.optimizer.moments = DType::kBf16;
  if (of.optimizer == kOwn) training.make_optimizer = make_slice_momentum;
  training.learning_rate = {.peak = 1e-2, .warmup = 1, .steps = 10};
  training.clip = 0.5;
  if (of.groups) {
    training.groups = {{.names = "blocks.1.*", .frozen = true},
                       {.names = "blocks.3.*norm*", .frozen = true},
                       {.names = "blocks.2.*", .learning_rate_scale = 0.5}};
    if (!training.make_optimizer) training.groups.back().weight_decay = 0.2F;
  }
  options.checks.replicas_every = 1;
  return options;
}

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
  Digests values, gradients, optimizer_state;
};

void add(Outcome& outcome, const StepReport& report) {
  outcome.numbers.insert(outcome.numbers.end(), {report.loss, report.grad_norm, report.targets});
}

void expect_same(const Outcome& expected, const Outcome& actual, const std::string& where) {
  EXPECT_EQ(expected.numbers, actual.numbers) << where;
  EXPECT_EQ(expected.gradients, actual.gradients) << where;
  EXPECT_EQ(expected.values, actual.values) << where;
  EXPECT_EQ(expected.optimizer_state, actual.optimizer_state) << where;
}

// Runs `body` over the first `ranks` ranks of the job.
void on_some(int ranks, const std::function<void(Communicator&)>& body) {
  const auto comm = first_ranks(ranks);
  if (comm != nullptr) body(*comm);
}

// --- gradients and values of the program's own ---
// Runs `body` with a pipeline over the first ranks of the job, without shards and with them, and
// expects the same.
void expect_same_with_shards(int depth, int replicas, const PipelineOptions& more,
                             const std::function<void(Pipeline&, Communicator&, Outcome&)>& body) {
  const auto comm = first_ranks(depth * replicas);
  if (comm == nullptr) return;
  std::array<Outcome, kShardLevels> outcomes;
  for (int shards = 0; shards < kShardLevels; ++shards) {
    PipelineOptions options = options_of({.depth = depth, .replicas = replicas, .shards = shards});
    options.training.skip_nonfinite = more.training.skip_nonfinite;
    Pipeline pipeline(*comm, small_transformer(), Tokens::spec(), options);
    Outcome& outcome = outcomes.at(static_cast<std::size_t>(shards));
    body(pipeline, *comm, outcome);
    outcome.values = values_of(pipeline);
    outcome.optimizer_state = optimizer_state_of(pipeline);
  }
  for (int shards = 1; shards < kShardLevels; ++shards) {
    expect_same(outcomes[0], outcomes.at(static_cast<std::size_t>(shards)),
                to_string({.depth = depth, .replicas = replicas, .shards = shards}));
  }
}

// Every replica changes the whole gradients between the two calls.
TEST(ShardsTest, AnUpdateTakesGradientsThatTheProgramChanged) {
  if (world().size() < 8) GTEST_SKIP() << "needs 8 ranks";
  const auto body = [](Pipeline& pipeline, Communicator& comm, Outcome& outcome) {
    for (std::uint64_t step = 1; step <= 2; ++step) {
      add(outcome, pipeline.forward_backward(Tokens(step, 12).all(comm)));
      outcome.gradients = gradients_of(pipeline);
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
  const std::size_t kinds = of.optimizer == kAdam || of.optimizer == kAdamBf16 ? 2 : 1;
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
  for (int r = 0; r < of.replicas; ++r) {
    const int there = place.topology.rank_of({.pipeline = rank, .replica = r});
    largest = std::max(largest, all.at(static_cast<std::size_t>(there)));
  }
  if (of.optimizer == kOwn) return;  // a program's own is not in the plan
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
      const Configuration of = {.depth = depth,
                                .replicas = 5 - depth,
                                .shards = kOptimizerShards,
                                .optimizer = optimizer,
                                .groups = optimizer % 2 != 0};
      on_some(of.depth * of.replicas, [&](Communicator& comm) {
        Pipeline pipeline(comm, small_transformer(), Tokens::spec(), options_of(of));
        (void)pipeline.train_step(Tokens(1, 6 * of.replicas).all(comm));
        expect_state_of_own_parts(pipeline, of);
      });
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

// W of a program's own layer reads values, so B of a schedule that splits some backwards walks
// through the units twice.
TEST(ShardsTest, OwnLayersReadTheirValuesInEveryHalfOfABackward) {
  const Sequential model = Sequential({nn::layer<Scale>("first", 0.5), nn::linear(4, 3),
                                       nn::layer<Scale>("second", 0.75), nn::linear(3, 1)},
                                      nn::mse_loss())
                               .with_input({DType::kF32, {4}});
  for (const char* schedule : {"1f1b", "zb-v", "dualpipe-v"}) {
    on_some(2, [&](Communicator& comm) {
      std::array<Outcome, kShardLevels> outcomes;
      for (int shards = 0; shards < kShardLevels; ++shards) {
        PipelineOptions options = sharded_options(2, shards);
        options.shape.micro_batches = 4;
        options.order.schedule = schedule;
        Pipeline pipeline(comm, model, tiny_batches(), options);
        Outcome& outcome = outcomes.at(static_cast<std::size_t>(shards));
        for (int step = 0; step < 3; ++step) {
          add(outcome, pipeline.train_step(Numbers(16).batch(comm)));
        }
        outcome.values = values_of(pipeline);
        pipeline.close();
      }
      for (const Outcome& outcome : outcomes) expect_same(outcomes[0], outcome, schedule);
    });
  }
}

TEST(ShardsTest, MoreReplicasThanBlocksAreLegal) {
  for (const bool own : {false, true}) {
    on_some(5, [&](Communicator& comm) {
      std::array<Outcome, kShardLevels> outcomes;
      for (int shards = 0; shards < kShardLevels; ++shards) {
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
void expect_own_part_between_steps(Communicator& comm, int shards) {
  Pipeline pipeline(comm, small_transformer(/*width=*/128), Tokens::spec(),
                    options_of({.replicas = 4, .shards = shards}));
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
    expect_own_part_between_steps(comm, kGatheredPerUse);
    expect_own_part_between_steps(comm, kInGroups);
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
    PipelineOptions options = options_of({.replicas = 4, .shards = kInGroups});
    options.training.skip_nonfinite = true;
    Pipeline pipeline(comm, small_transformer(), Tokens::spec(), options);
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
