// What must not change the bits of a training does not: where and in which order it is computed,
// what replicas divide, what leaves a rank and what is computed again. Every option alone and every
// pair of values of two options is in a training, which has the numbers of the plain training of
// the same function. SLUICE_COVER=3: every triple. Then a training that goes on from saves under
// other options, through every ordered pair of what replicas divide.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "comm/group/collectives.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/program/train/recompute_choice.hpp"
#include "tests/covering_set.hpp"
#include "tests/runtime/first_ranks.hpp"
#include "tests/runtime/gradients/token_batches.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

constexpr int kRanks = 16, kMicroBatches = 3;  // of the job, of a virtual replica

// --- options ---
// Those that few values of others may meet come first.
enum Factor {
  kReplicas,
  kVirtual,  // replicas
  kTensor,   // ranks, of as many shards
  kDepth,
  kOrder,
  kCalls,  // of a step
  kShard,
  kSchedule,
  kOffload,
  kRecompute,
  kPositions,
  kModel,
  kPrecision,
  kHead,
  kOptimizer,
  kClip,
  kGroups,  // frozen parameters, and some with settings of their own
  kFactors
};
enum Order { kStepOrder, kMicroBatchOrder };
enum Calls { kOneCall, kAccumulated, kOpenStep };
// In groups: two of two replicas.
enum Shards {
  kNoShards,
  kOptimizerShards,
  kGradientShards,
  kGatheredPerUse,
  kGatheredPerStep,
  kInGroups
};
enum Recomputes { kNothing, kAttentions, kBlocks, kFirstBlocks, kWhatFits };
enum Offloads { kStays, kActivations, kCachedActivations, kOptimizerState, kBoth };
enum Optimizers { kAdam, kAdamBf16, kSgd, kOwn };
constexpr int kOneShard = 0;  // of kTensor

// The usual value first.
const std::vector<std::vector<std::string>>& names() {
  static const std::vector<std::vector<std::string>> all = [] {
    std::vector<std::string> schedules = {"1f1b"};
    for (const std::string& name : schedule_names()) {
      // The latter adds gradients in another order.
      if (name != "1f1b" && name != "forward-only" && name != "gpipe-lifo") {
        schedules.push_back(name);
      }
    }
    return std::vector<std::vector<std::string>>{
        {"2", "1", "3", "4"},
        {"2", "1", "3", "4"},
        {"1 of 1", "1 of 4", "2 of 4", "4 of 4"},
        {"2", "1", "3"},
        {"step", "micro-batch"},
        {"one call", "accumulated", "open"},
        {"none", "optimizer", "gradients", "parameters per use", "parameters per step",
         "parameters in groups"},
        schedules,
        {"none", "disk", "disk-cached", "optimizer", "both"},
        {"none", "attention", "block", "block,attention,none", "auto"},
        {"dealt", "whole"},
        {"gpt2", "llama", "qwen3"},
        {"f32", "bf16", "bf16 stream"},
        {"tied", "untied"},
        {"adamw", "adamw bf16", "sgd", "own"},
        {"no clip", "clip"},
        {"one group", "groups"}};
  }();
  return all;
}

constexpr std::array<const char*, kFactors> kTitles = {
    "replicas",  "virtual",  "tensor",    "pipeline",  "order",     "calls",
    "shard",     "schedule", "offload",   "recompute", "positions", "model",
    "precision", "head",     "optimizer", "clip",      "groups"};

std::string to_string(const Values& of) {
  std::string text;
  for (std::size_t factor = 0; factor < kFactors; ++factor) {
    if (of[factor] == kOpen) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", kTitles.at(factor),
                        names()[factor][at(of[factor])]);
  }
  return text;
}

// Of a factor whose values begin with a number; 0: open.
int number(const Values& of, Factor factor) {
  return of[factor] == kOpen ? 0 : std::stoi(names()[factor][at(of[factor])]);
}
int tensor_shards(const Values& of) { return of[kTensor] == kOneShard ? 1 : 4; }
int ranks_of(const Values& of) {
  return std::max(1, number(of, kReplicas)) * std::max(1, number(of, kTensor)) *
         std::max(1, number(of, kDepth));
}

bool is_legal(const Values& of) {
  const int replicas = number(of, kReplicas), parts = number(of, kVirtual);
  if (ranks_of(of) > kRanks || (parts != 0 && replicas != 0 && !can_divide(parts, replicas))) {
    return false;
  }
  if (of[kShard] == kInGroups && ((replicas != 0 && replicas != 4) || (parts != 0 && parts != 4))) {
    return false;
  }
  if (of[kOptimizer] == kOwn && of[kOffload] >= kOptimizerState) return false;
  const bool one_each = replicas == 0 || parts == 0 || replicas == parts;
  if (of[kCalls] == kAccumulated && !one_each) return false;
  if (of[kOrder] != kMicroBatchOrder) return true;
  return one_each && replicas != 1 && parts != 1 && of[kTensor] <= kOneShard &&
         of[kCalls] != kOpenStep && (of[kShard] == kOpen || of[kShard] >= kGradientShards);
}

Values counts() {
  Values all;
  for (const std::vector<std::string>& each : names()) all.push_back(static_cast<int>(each.size()));
  return all;
}

// The plain training of the same function: on one rank, where that is legal.
Values plain(Values of) {
  for (const Factor factor : {kSchedule, kOffload, kRecompute, kPositions}) of[factor] = 0;
  const bool needs_replicas = of[kOrder] == kMicroBatchOrder;
  of[kShard] = needs_replicas ? kGradientShards : kNoShards;
  of[kDepth] = 1;
  if (of[kTensor] != kOneShard) of[kTensor] = 1;
  if (!needs_replicas && of[kCalls] != kAccumulated) of[kReplicas] = 1;
  return of;
}

// --- trainings ---
// The embedding has 5 blocks of kSumBlock elements and is odd; matrices of the MLP have 2 and are
// odd, those of attention 1; norms and biases are smaller than a block.
TransformerConfig model_of(const Values& of) {
  TransformerConfig model{.layers = 4, .heads = 4, .width = 72};
  model.context = Tokens::kContext;
  model.vocabulary = Tokens::kVocabulary;
  model.dropout = 0.1F;
  model.tied = of[kHead] == 0;
  if (of[kModel] != 0) {
    model.kind = TransformerKind::kLlama;
    model.qk_norm = of[kModel] == 2;
    if (model.qk_norm) model.head_dim = 20;
  }
  if (of[kPrecision] > 0) model.precision = DType::kBf16;
  if (of[kPrecision] > 1) model.stream_precision = DType::kBf16;
  using enum Recompute;
  if (of[kRecompute] == kAttentions) model.recompute = kAttention;
  if (of[kRecompute] == kBlocks) model.recompute = kBlock;
  if (of[kRecompute] == kFirstBlocks) model.recompute_blocks = {kBlock, kAttention, kNone, kNone};
  return model;
}

void set_training(const Values& of, PipelineOptions::Training& training) {
  if (of[kOptimizer] == kSgd) training.optimizer = OptimizerConfig::sgd(0.9F);
  if (of[kOptimizer] == kAdamBf16) training.optimizer.moments = DType::kBf16;
  if (of[kOptimizer] == kOwn) training.make_optimizer = make_slice_momentum;
  training.optimizer.weight_decay = 0.1F;
  training.learning_rate = {.peak = 1e-2, .warmup = 1, .steps = 40};
  training.clip = of[kClip] != 0 ? 0.5 : 0;
  if (of[kOrder] == kMicroBatchOrder) training.gradient_order = GradientOrder::kMicroBatch;
  if (of[kGroups] == 0) return;
  training.groups = {{.names = "blocks.1.*", .frozen = true},
                     {.names = "blocks.3.*norm*", .frozen = true},
                     {.names = "blocks.2.*", .learning_rate_scale = 0.5}};
  if (!training.make_optimizer) training.groups.back().weight_decay = 0.2F;
}

PipelineOptions options_of(const Values& of) {
  PipelineOptions options;
  options.shape = {.pipeline = number(of, kDepth),
                   .replicas = number(of, kReplicas),
                   .virtual_replicas = number(of, kVirtual),
                   .tensor = number(of, kTensor),
                   .tensor_shards = tensor_shards(of),
                   .sequence_parallel = of[kPositions] == 0,
                   .micro_batches = kMicroBatches,
                   .micro_batch_size = 2};
  constexpr std::array kLevels = {ShardLevel::kNone,       ShardLevel::kOptimizer,
                                  ShardLevel::kGradients,  ShardLevel::kParameters,
                                  ShardLevel::kParameters, ShardLevel::kParameters};
  options.shape.shard = kLevels.at(at(of[kShard]));
  if (of[kShard] == kInGroups) options.shape.shard_group = 2;
  if (of[kShard] == kGatheredPerUse) options.shape.shard_gather = ShardGather::kUse;
  if (of[kShard] == kGatheredPerStep) options.shape.shard_gather = ShardGather::kStep;
  options.order.schedule = names()[kSchedule][at(of[kSchedule])];
  using enum PipelineOptions::Offload::To;
  constexpr std::array kPlaces = {kNowhere, kDisk, kCachedDisk, kNowhere, kDisk};
  options.offload.activations = kPlaces.at(at(of[kOffload]));
  if (of[kOffload] >= kOptimizerState) options.offload.optimizer = kDisk;
  options.offload.pool = std::size_t{64} << 10;  // several pieces
  if (of[kOffload] != kStays) options.offload.directory = std::filesystem::temp_directory_path();
  set_training(of, options.training);
  options.checks.replicas_every = 1;
  return options;
}

// Recomputes and offloads what halves the memory that these settings free.
void take_what_fits(Communicator& comm, TransformerConfig& model, PipelineOptions& options) {
  const PipelineOptions::Shape& shape = options.shape;
  const int stages = stages_of(options.order.schedule,
                               {.ranks = shape.pipeline, .micro_batches = shape.micro_batches});
  const auto source = synthetic_tokens(model);
  const Partition partition = Transformer(model).partition(stages);
  const auto planned = [&](const TransformerConfig& with, const PipelineOptions& by) {
    const Transformer layers(with);
    return PipelineAccess::plan_layout(
        comm, by,
        [&](const StagePlace& place) {
          return layers.stage_of(partition, place.stage, place.shards_here());
        },
        *source, MemoryLimit::kIsIgnored);
  };
  std::size_t most = 0, least = 0;
  TransformerConfig all = model;
  all.recompute = Recompute::kBlock;
  const JobLayout kept = planned(model, options), recomputed = planned(all, options);
  for (std::size_t rank = 0; rank < kept.memory.ranks.size(); ++rank) {
    most = std::max(most, kept.memory.ranks[rank].total());
    least = std::max(least, recomputed.memory.ranks[rank].total());
  }
  PipelineOptions limited = options;
  limited.devices.memory = (most + least) / 2;
  RecomputeChoice choice = choose_recompute(model, partition, limited, planned);
  model = std::move(choice.model);
  options.offload = std::move(choice.offload);
}

// What all trainings of a function have in common.
struct Outcome {
  std::vector<double> numbers;  // losses, norms, counted targets, validation
  std::string answers;          // of infer(), where each rank of a last stage has all
  std::string digest;           // of all values by name
};

void add(Outcome& outcome, const StepReport& report) {
  outcome.numbers.insert(outcome.numbers.end(), {report.loss, report.grad_norm, report.targets});
}

std::string digest_of_state(Pipeline& pipeline) {
  std::string lines;
  for (const auto& [name, tensor] : pipeline.state()) lines += name + sha256_hex(tensor.bytes);
  return sha256_hex(std::as_bytes(std::span<const char>(lines)));
}

std::unique_ptr<Pipeline> make_pipeline(Communicator& comm, const Values& of) {
  TransformerConfig model = model_of(of);
  PipelineOptions options = options_of(of);
  if (of[kRecompute] == kWhatFits) take_what_fits(comm, model, options);
  return std::make_unique<Pipeline>(comm, Transformer(model), Tokens::spec(), options);
}

void one_step(Communicator& comm, Pipeline& pipeline, const Values& of, std::uint64_t step,
              Outcome& outcome) {
  const std::int64_t full = 2 * kMicroBatches * number(of, kVirtual);
  // The second has a batch that is not full, with unequal shares and micro-batches.
  const Tokens tokens(step, step == 2 ? full - 3 : full);
  if (of[kCalls] == kAccumulated) {
    const std::int64_t half = tokens.count / 2;
    add(outcome, pipeline.accumulate(tokens.part(comm, 0, half)));
    add(outcome, pipeline.train_step(tokens.part(comm, half, tokens.count)));
  } else if (of[kCalls] == kOpenStep) {
    add(outcome, pipeline.forward_backward(tokens.all(comm)));
    add(outcome, pipeline.optimizer_step());
  } else {
    add(outcome, pipeline.train_step(tokens.all(comm)));
  }
}

Outcome train(Communicator& comm, const Values& of) {
  const auto pipeline = make_pipeline(comm, of);
  Outcome outcome;
  for (std::uint64_t step = 1; step <= 3; ++step) {
    one_step(comm, *pipeline, of, step, outcome);
    if (step != 1) continue;
    outcome.numbers.push_back(pipeline->evaluate(Tokens(9, 5).all(comm)).loss);
    // Of four replicas one has no sample.
    const Tokens three(8, 3);
    const Batch asked{.inputs = three.all(comm).inputs};
    for (const Tensor& answer : pipeline->infer(asked, {.to = InferOptions::kEveryRank})) {
      if (number(of, kTensor) > 1) continue;
      outcome.answers += sha256_hex({answer.as<const std::byte>(), answer.spec.bytes()});
    }
  }
  outcome.digest = digest_of_state(*pipeline);
  pipeline->close();
  return outcome;
}

// Over the first ranks of the job; elsewhere nothing happens. An Error, which all of them throw, is
// a failure of the test, and the others go on.
Outcome train_on_some(const Values& of) {
  const auto part = first_ranks(ranks_of(of));
  try {
    if (part != nullptr) return train(*part, of);
  } catch (const Error& error) {
    ADD_FAILURE() << to_string(of) << ": " << error.what();
  }
  return {};
}

// The same on all ranks: rank 0's.
std::string told(const std::string& text) {
  return Collectives(world(), 0, nullptr)
      .all_gather_strings(world().rank() == 0 ? text : std::string())[0];
}

std::vector<Values> covering_set(std::size_t strength) {
  std::string bytes;
  if (world().rank() == 0) {
    const CoveringSet set(counts(), strength, is_legal);
    for (const Values& each : set.chosen()) {
      for (const int value : each) bytes += static_cast<char>(value);
    }
  }
  std::vector<Values> all;
  bytes = told(bytes);
  for (auto from = bytes.begin(); from != bytes.end(); from += kFactors) {
    all.emplace_back(from, from + kFactors);
  }
  return all;
}

TEST(EveryOptionTest, WhatIsNotCoveredIsRefused) {
  if (world().rank() != 0) return;
  const CoveringSet set(counts(), 2, is_legal);
  EXPECT_LE(set.chosen().size(), 150U);
  std::set<std::pair<int, int>> apart;
  for (const Values& each : set.impossible()) {
    std::vector<int> factors;
    for (int factor = 0; factor < kFactors; ++factor) {
      if (each[at(factor)] != kOpen) factors.push_back(factor);
    }
    apart.emplace(factors.at(0), factors.at(1));
  }
  const std::set<std::pair<int, int>> expected = {
      {kReplicas, kVirtual}, {kReplicas, kOrder}, {kReplicas, kShard},
      {kVirtual, kShard},    {kVirtual, kOrder},  {kTensor, kOrder},
      {kOrder, kCalls},      {kOrder, kShard},    {kOffload, kOptimizer}};
  EXPECT_EQ(apart, expected);
}

TEST(EveryOptionTest, HasTheBitsOfThePlainTraining) {
  if (world().size() < kRanks) GTEST_SKIP() << "needs " << kRanks << " ranks";
  const char* strength = std::getenv("SLUICE_COVER");
  const std::vector<Values> chosen = covering_set(strength == nullptr ? 2 : std::stoul(strength));
  const auto start = std::chrono::steady_clock::now();
  std::map<Values, Outcome> references;
  for (const Values& each : chosen) {
    const Values wanted = plain(each);
    const auto [found, is_new] = references.try_emplace(wanted);
    if (is_new) found->second = train_on_some(wanted);
    const Outcome outcome = train_on_some(each);
    if (world().rank() != 0) continue;
    const Outcome& expected = found->second;
    SCOPED_TRACE(to_string(each));
    EXPECT_FALSE(expected.digest.empty());
    EXPECT_EQ(expected.numbers, outcome.numbers);
    EXPECT_EQ(expected.digest, outcome.digest);
    if (number(each, kTensor) == 1) {
      EXPECT_EQ(expected.answers, outcome.answers);
    }
  }
  if (world().rank() != 0) return;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{} trainings and {} plain ones in {:.1f} s\n", chosen.size(), references.size(),
             seconds.count());
}

// --- one training over many saves ---
// Goes along every ordered pair of `count` values once, and ends where it began.
void walk_pairs(int from, int count, std::vector<int>& steps) {
  if (from + 1 == count) return;
  for (int to = from + 2; to < count; ++to) steps.insert(steps.end(), {to, from});
  steps.push_back(from + 1);
  walk_pairs(from + 1, count, steps);
  steps.push_back(from);
}

// Another layout, schedule, offload and recomputation for each of the steps, of 4 virtual replicas
// and 4 shards.
std::vector<Values> chain(const Values& usual) {
  std::vector<int> levels = {kNoShards};
  walk_pairs(kNoShards, counts()[kShard], levels);
  std::vector<Values> all;
  std::uint64_t draw = 0;
  for (const int level : levels) {
    Values next = usual;
    do {
      for (const Factor factor : {kReplicas, kTensor, kDepth, kSchedule, kOffload, kRecompute}) {
        const std::uint32_t word = philox({.seed = 44}, ++draw, factor)[0];
        next[factor] = static_cast<int>(word % static_cast<std::uint32_t>(counts()[factor]));
      }
      next[kShard] = level;
    } while (next[kTensor] == kOneShard || !is_legal(next));
    all.push_back(next);
  }
  return all;
}

TEST(EveryOptionTest, ATrainingGoesOnUnderAnyOthers) {
  if (world().size() < kRanks) GTEST_SKIP() << "needs " << kRanks << " ranks";
  Values usual(kFactors);
  usual[kVirtual] = 3;
  usual[kTensor] = 1;
  usual[kClip] = usual[kGroups] = 1;
  ASSERT_EQ(names()[kVirtual][3], "4");
  const std::vector<Values> links = chain(usual);
  std::set<std::pair<int, int>> changes;
  for (std::size_t i = 1; i < links.size(); ++i) {
    changes.emplace(links[i - 1][kShard], links[i][kShard]);
  }
  EXPECT_EQ(changes.size(), 30U);
  EXPECT_EQ(links.size(), 31U);
  const TemporaryDirectory folder;
  const std::filesystem::path saves = told(folder.path());
  Outcome whole, linked;
  if (const auto comm = first_ranks(1)) {
    const auto pipeline = make_pipeline(*comm, plain(usual));
    for (std::uint64_t step = 1; step <= links.size(); ++step) {
      one_step(*comm, *pipeline, usual, step, whole);
    }
    whole.digest = digest_of_state(*pipeline);
  }
  for (std::uint64_t step = 1; step <= links.size(); ++step) {
    const Values& link = links[step - 1];
    SCOPED_TRACE(fmt::format("step {}: {}", step, to_string(link)));
    const auto comm = first_ranks(ranks_of(link));
    if (comm == nullptr) continue;
    const auto pipeline = make_pipeline(*comm, link);
    CheckpointOptions save{.directory = saves};
    if (step > 1) save.run = load_checkpoint(*pipeline, saves, Verify::kRead).run;
    EXPECT_EQ(pipeline->step(), step - 1);
    one_step(*comm, *pipeline, link, step, linked);
    save_checkpoint(*pipeline, save);
    linked.digest = digest_of_state(*pipeline);
    pipeline->close();
  }
  (void)told("");  // the directory is needed no more
  if (world().rank() != 0) return;
  EXPECT_EQ(whole.numbers, linked.numbers);
  EXPECT_EQ(whole.digest, linked.digest);
}

}  // namespace
}  // namespace sluice::testing
