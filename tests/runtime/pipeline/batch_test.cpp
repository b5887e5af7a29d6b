// Batches of the caller: a step in one call or in several, any number of samples, evaluation and
// inference in between. The bits are those of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>
#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/collectives.hpp"
#include "stages/operators/optimizer.hpp"
#include "tests/runtime/engine/arithmetic_stage.hpp"
#include "tests/runtime/engine/copying_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kContext = 16;

// Samples of the synthetic source, as a caller has them.
struct Samples {
  std::vector<std::int32_t> inputs, targets;
  std::int64_t count = 0;

  Samples(const DataSource& source, std::uint64_t step, SampleRange range, bool all_count = true)
      : inputs(static_cast<std::size_t>(range.count * kContext)),
        targets(inputs.size()),
        count(range.count) {
    for (std::int64_t first = 0; first < count; first += 2) {  // a source's micro-batch
      const SampleRange two{first, std::min<std::int64_t>(2, count - first)};
      const Batch into = part(two);
      source.inputs(Phase::kTrain, step, {range.first + first, two.count}, into.inputs);
      source.targets(Phase::kTrain, step, {range.first + first, two.count}, into.targets);
    }
    for (std::int32_t& target : targets) target = all_count ? std::max(target, 0) : target;
  }
  [[nodiscard]] Batch batch() const { return part({0, count}); }
  [[nodiscard]] Batch part(SampleRange range) const {
    const auto cut = [&](const std::vector<std::int32_t>& all) {
      return view(std::span(all).subspan(static_cast<std::size_t>(range.first * kContext),
                                         static_cast<std::size_t>(range.count * kContext)),
                  {range.count, kContext});
    };
    return {.inputs = {cut(inputs)}, .targets = {cut(targets)}};
  }
};

struct Job {
  int pipeline = 1, replicas = 1;
  std::string schedule = "1f1b";
  int chunks = 1;
  Feed feed = Feed::kPerStage;
  int virtual_replicas = 0;
  [[nodiscard]] int shares() const { return std::max(replicas, virtual_replicas) / replicas; }
};

PipelineOptions options_of(const Job& job) {
  PipelineOptions options;
  options.shape = {.pipeline = job.pipeline,
                   .replicas = job.replicas,
                   .virtual_replicas = job.virtual_replicas,
                   .rank_order = RankOrder::kPipelineFirst,
                   .micro_batches = job.virtual_replicas > 0 ? 2 : 6 / job.replicas,
                   .micro_batch_size = 2};
  options.order.schedule = job.schedule;
  options.order.chunks = job.chunks;
  options.training.clip = 0.5;
  options.training.learning_rate = {.peak = 1e-2};
  return options;
}

TransformerConfig model_of() {
  TransformerConfig model = small_model();
  model.context = kContext;
  model.dropout = 0.1F;
  return model;
}

StageFactory factory() { return Transformer(model_of()); }

BatchSpec spec(Feed feed) {
  const TensorSpec tokens{DType::kI32, {kContext}};
  return {.inputs = {tokens}, .targets = {tokens}, .feed = feed};
}

// What each rank passes: with Feed::kPerStage its replica's share.
Batch passed(const Samples& samples, const Job& job, Communicator& comm) {
  if (job.feed == Feed::kRank0) return comm.rank() == 0 ? samples.batch() : Batch{};
  const std::int64_t parts = job.replicas * job.shares(), replica = comm.rank() / job.pipeline;
  const auto begin = [&](std::int64_t of_replica) {
    const std::int64_t part = of_replica * job.shares();
    return part * (samples.count / parts) + std::min(part, samples.count % parts);
  };
  return samples.part({begin(replica), begin(replica + 1) - begin(replica)});
}

// Runs `body` with a pipeline over all ranks, and with one over this rank alone.
using Body = std::function<void(Pipeline& pipeline, const std::function<Batch(const Samples&)>&)>;
void on_all_and_alone(Communicator& comm, const Job& job, const Body& body) {
  {
    Pipeline pipeline(comm, factory(), spec(job.feed), options_of(job));
    body(pipeline, [&](const Samples& samples) { return passed(samples, job, comm); });
  }
  const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
  Pipeline pipeline(*self, factory(), spec(Feed::kPerStage),
                    options_of({.virtual_replicas = job.virtual_replicas}));
  body(pipeline, [](const Samples& samples) { return samples.batch(); });
}

std::vector<Job> jobs_of(int ranks) {
  std::vector<Job> jobs = {{.pipeline = ranks}, {.pipeline = ranks, .feed = Feed::kRank0}};
  if (ranks > 1) jobs.push_back({.pipeline = ranks, .schedule = "zb-h1"});
  if (ranks > 1) jobs.push_back({.pipeline = ranks, .schedule = "gpipe"});
  if (ranks == 4) jobs.push_back({.pipeline = 4, .schedule = "zb-v"});
  return jobs;
}

class BatchTest : public ::testing::TestWithParam<int> {};

TEST_P(BatchTest, StepsOfAnySizeHaveTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    for (const Job& job : jobs_of(GetParam())) {
      std::vector<std::vector<double>> losses;
      on_all_and_alone(comm, job, [&](Pipeline& pipeline, const auto& mine) {
        losses.emplace_back();
        std::uint64_t step = 0;
        for (const std::int64_t count : {12, 5, 1, 12, 7, 2}) {
          const Samples samples(*source, ++step, {0, count});
          const StepReport report = pipeline.train_step(mine(samples));
          losses.back().push_back(report.loss);
          losses.back().push_back(report.grad_norm);
          EXPECT_EQ(report.targets, static_cast<double>(count * kContext));
          EXPECT_EQ(report.step, step);
        }
      });
      EXPECT_EQ(losses[0], losses[1]) << job.schedule;
    }
  });
}

// Whether the schedule runs on this many ranks with these chunks.
bool exists(const std::string& name, int ranks, int chunks) {
  try {
    (void)generate(name, {ranks, /*micro_batches=*/8, chunks});
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Some schedules keep more micro-batches of a stage in flight for a smaller step.
TEST_P(BatchTest, EveryScheduleTakesSmallerSteps) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    int tried = 0;
    for (const std::string& name : schedule_names()) {
      for (const int chunks : {1, 2}) {
        if (name == "forward-only" || !exists(name, comm.size(), chunks)) continue;
        ++tried;
        PipelineOptions options = options_of({.pipeline = comm.size(), .schedule = name});
        options.order.chunks = chunks;
        options.shape.micro_batches = 8;
        Pipeline pipeline(comm, factory(), spec({}), options);
        for (std::int64_t count = 8; count > 0; --count) {
          const Samples samples(*source, static_cast<std::uint64_t>(count), {0, 2 * count});
          EXPECT_GT(pipeline.train_step(samples.batch()).loss, 0) << name << " " << count;
        }
      }
    }
    EXPECT_GT(tried, 5);
  });
}

TEST_P(BatchTest, ABatchOfTheCallerTrainsLikeTheSources) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    for (const int replicas : {1, 2}) {
      if (comm.size() % replicas != 0) continue;
      for (const Feed feed : {Feed::kPerStage, Feed::kRank0}) {
        const Job job{.pipeline = comm.size() / replicas, .replicas = replicas, .feed = feed};
        Pipeline expected(comm, factory(), *source, options_of(job));
        Pipeline pipeline(comm, factory(), spec(feed), options_of(job));
        const BatchShare share = pipeline.share();
        EXPECT_EQ(share.replica, feed == Feed::kRank0 ? 0 : comm.rank() / job.pipeline);
        EXPECT_EQ(share.targets,
                  feed == Feed::kRank0 ? comm.rank() == 0 : (comm.rank() + 1) % job.pipeline == 0);
        for (std::uint64_t step = 1; step <= 3; ++step) {
          const Samples samples(*source, step, {0, 12}, /*all_count=*/false);
          EXPECT_EQ(pipeline.train_step(passed(samples, job, comm)).loss,
                    expected.train_step().loss);
        }
        EXPECT_EQ(digest_of(pipeline), digest_of(expected));
      }
    }
  });
}

// Halves of a batch have half its targets, so that every factor is a power of two.
TEST_P(BatchTest, BatchesOfOneStepAddUp) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    const Job job{.pipeline = comm.size()};
    Pipeline whole(comm, factory(), spec(job.feed), options_of(job));
    Pipeline parts(comm, factory(), spec(job.feed), options_of(job));
    Pipeline calls(comm, factory(), spec(job.feed), options_of(job));
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const Samples samples(*source, step, {0, 8});
      const StepReport expected = whole.train_step(samples.batch());
      for (Pipeline* each : {&parts, &calls}) EXPECT_GT(spoil_old_gradients(*each), 0U);
      const StepReport half = parts.accumulate(samples.part({0, 4}));
      EXPECT_EQ(half.targets, expected.targets / 2);
      EXPECT_EQ(half.step, step);
      EXPECT_EQ(parts.step(), step - 1);
      const StepReport report = parts.train_step(samples.part({4, 4}));
      EXPECT_EQ(report.loss, expected.loss);
      EXPECT_EQ(report.grad_norm, expected.grad_norm);
      EXPECT_EQ(report.targets, expected.targets);
      // The same by calls of their own, after a batch that is dropped.
      (void)calls.accumulate(samples.part({2, 4}));
      calls.drop_gradients();
      EXPECT_GT(spoil_old_gradients(calls), 0U);
      (void)calls.accumulate(samples.part({0, 4}));
      EXPECT_EQ(calls.forward_backward(samples.part({4, 4})).grad_norm, expected.grad_norm);
      EXPECT_EQ(calls.optimizer_step().grad_norm, expected.grad_norm);
      EXPECT_EQ(calls.step(), step);
    }
    EXPECT_EQ(digest_of(parts), digest_of(whole));
    EXPECT_EQ(digest_of(calls), digest_of(whole));
  });
}

// Unequal batches: the gradient is that of the mean over all samples.
TEST_P(BatchTest, EachSampleOfAStepCountsTheSame) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    const Job job{.pipeline = comm.size()};
    Pipeline whole(comm, factory(), spec(job.feed), options_of(job));
    Pipeline parts(comm, factory(), spec(job.feed), options_of(job));
    const Samples samples(*source, 1, {0, 12});
    const StepReport expected = whole.forward_backward(samples.batch());
    (void)parts.accumulate(samples.part({0, 2}));
    const StepReport report = parts.forward_backward(samples.part({2, 10}));
    EXPECT_NEAR(report.loss, expected.loss, 1e-6 * expected.loss);
    EXPECT_NEAR(report.grad_norm, expected.grad_norm, 1e-5 * expected.grad_norm);
    const auto theirs = whole.parameters(), mine = parts.parameters();
    for (std::size_t i = 0; i < mine.size(); ++i) {
      for (std::int64_t j = 0; j < mine[i].parameter->grad.elements(); ++j) {
        const float want = theirs[i].parameter->grad.at(j), have = mine[i].parameter->grad.at(j);
        ASSERT_NEAR(have, want, 1e-6 + 1e-3 * std::abs(want)) << mine[i].parameter->name;
      }
    }
  });
}

// Of which each replica computes one, two or all.
TEST_P(BatchTest, VirtualReplicasHaveTheBitsOfOneRank) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    for (const int replicas : {1, 2, 4}) {
      if (comm.size() % replicas != 0) continue;
      for (const Feed feed : {Feed::kPerStage, Feed::kRank0}) {
        const Job job{.pipeline = comm.size() / replicas,
                      .replicas = replicas,
                      .feed = feed,
                      .virtual_replicas = 4};
        std::vector<std::vector<double>> numbers;
        std::vector<std::string> digests;
        on_all_and_alone(comm, job, [&](Pipeline& pipeline, const auto& mine) {
          std::vector<double>& seen = numbers.emplace_back();
          std::uint64_t step = 0;
          for (const std::int64_t count : {16, 13, 5, 12}) {
            const Samples samples(*source, ++step, {0, count}, /*all_count=*/false);
            const StepReport report = pipeline.train_step(mine(samples));
            seen.insert(seen.end(), {report.loss, report.grad_norm, report.targets});
          }
          for (const std::int64_t count : {3, 11, 600}) {  // a replica without samples, rounds
            const Samples samples(*source, 9, {0, count});
            seen.push_back(pipeline.evaluate(mine(samples)).loss);
            seen.push_back(pipeline.evaluate(*source, count).loss);
          }
          digests.push_back(digest_of(pipeline));
        });
        EXPECT_EQ(numbers[0], numbers[1]) << replicas;
        EXPECT_EQ(digests[0], digests[1]) << replicas;
      }
    }
  });
}

// Of which almost every sum is rounded, so that their order shows. The scale's bits show too.
struct RoundedLoss : ArithmeticStage {
  using ArithmeticStage::ArithmeticStage;
  void loss(StageContext& ctx, std::span<const Tensor> y, std::span<const Tensor> targets,
            double* sum) override {
    const double rounded = target_weight(y) * static_cast<double>(ctx.loss_scale);
    ArithmeticStage::loss(ctx, y, targets, sum);
    *sum = rounded;
  }
  [[nodiscard]] double target_weight(std::span<const Tensor> targets) const override {
    double sum = 0;
    for (const float value : targets[0].floats()) sum += 1 / static_cast<double>(value);
    return sum;
  }
};

struct RoundedNumbers {
  std::vector<double> evaluated, trained;
};

RoundedNumbers rounded_numbers(Communicator& comm, const Job& job) {
  std::vector<float> values(600);
  std::iota(values.begin(), values.end(), 1.0F);
  const auto batch = [&](std::int64_t count) {
    if (comm.rank() != 0) return Batch{};
    const Tensor first = view(std::span(values).first(static_cast<std::size_t>(count)), {count, 1});
    return Batch{.inputs = {first}, .targets = {first}};
  };
  const auto source = make_array_source(values, 1, values, 1, std::ssize(values));
  const TensorSpec number{DType::kF32, {1}};
  const StageFactory stages = [](int stage, int) { return std::make_unique<RoundedLoss>(stage); };
  Pipeline pipeline(comm, stages,
                    BatchSpec{.inputs = {number}, .targets = {number}, .feed = Feed::kRank0},
                    options_of(job));
  RoundedNumbers seen;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(3 * job.virtual_replicas + 1));
  std::iota(counts.begin(), counts.end(), job.virtual_replicas);
  for (const std::int64_t count : counts) {
    const StepReport report = pipeline.train_step(batch(count));
    seen.trained.insert(seen.trained.end(), {report.loss, report.targets, report.grad_norm});
  }
  counts.insert(counts.end(), {3, 600});  // virtual replicas without samples, several rounds
  for (const std::int64_t count : counts) {
    for (const EvaluationReport& report :
         {pipeline.evaluate(batch(count)), pipeline.evaluate(*source, count)}) {
      seen.evaluated.insert(seen.evaluated.end(), {report.loss, report.targets});
    }
  }
  return seen;
}

TEST_P(BatchTest, RoundedLossesAndWeightsAreAddedInTheOrderOfVirtualReplicas) {
  if (4 % GetParam() != 0) return;
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    for (const int parts : {4, 8}) {
      const RoundedNumbers expected = rounded_numbers(*self, {.virtual_replicas = parts});
      const RoundedNumbers seen =
          rounded_numbers(comm, {.replicas = comm.size(), .virtual_replicas = parts});
      EXPECT_EQ(seen.evaluated, expected.evaluated) << parts;
      EXPECT_EQ(seen.trained, expected.trained) << parts;
    }
  });
}

TEST_P(BatchTest, EachVirtualReplicaNeedsASample) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const Job job{.pipeline = comm.size(), .feed = Feed::kRank0, .virtual_replicas = 4};
    Pipeline pipeline(comm, factory(), spec(job.feed), options_of(job));
    const auto refused = [&](std::int64_t count, const std::string& part) {
      const Samples samples(*synthetic_tokens(model_of()), 1, {0, count});
      expect_error(ErrorCode::kUsage, {part},
                   [&] { (void)pipeline.train_step(passed(samples, job, comm)); });
      EXPECT_TRUE(pipeline.usable());
    };
    refused(3, "virtual replica 3 gets no sample");
    refused(17, "a batch of 5 samples for a virtual replica; this pipeline was made for at most 4");
  });
}

// The gradients between the calls are the caller's.
TEST_P(BatchTest, AChangedGradientIsWhatTheUpdateTakes) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    const Job job{.pipeline = comm.size()};
    Pipeline pipeline(comm, factory(), spec(job.feed), options_of(job));
    const Samples samples(*source, 1, {0, 12});
    (void)pipeline.forward_backward(samples.batch());
    for (const Pipeline::Owned& owned : pipeline.parameters()) {
      for (float& value : owned.parameter->grad.floats()) value = 0;
    }
    const std::string before = digest_of(pipeline);
    EXPECT_EQ(pipeline.optimizer_step().grad_norm, 0);
    EXPECT_EQ(digest_of(pipeline), before);
  });
}

TEST_P(BatchTest, EvaluationAndInferenceHaveTheBitsOfOneRankAndLeaveTrainingAlone) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    for (const Job& job : jobs_of(GetParam())) {
      std::vector<std::vector<double>> numbers;
      on_all_and_alone(comm, job, [&](Pipeline& pipeline, const auto& mine) {
        std::vector<double>& seen = numbers.emplace_back();
        for (std::uint64_t step = 1; step <= 2; ++step) {
          const Samples samples(*source, step, {0, 12}), many(*source, 9, {0, 131});
          (void)pipeline.accumulate(mine(samples));
          seen.push_back(pipeline.evaluate(mine(many)).loss);
          seen.push_back(pipeline.evaluate(*source, 5).loss);
          const auto outputs = pipeline.infer(mine(many), {.to = InferOptions::kEveryRank});
          ASSERT_EQ(outputs.size(), 1U);
          EXPECT_EQ(outputs[0].shape()[0], 131);
          double sum = 0;
          for (std::int64_t i = 0; i < outputs[0].elements(); ++i) {
            sum += outputs[0].at(i) * static_cast<double>(i % 1009);
          }
          seen.push_back(sum);
          seen.push_back(pipeline.train_step(mine(samples)).loss);
        }
      });
      EXPECT_EQ(numbers[0], numbers[1]) << job.schedule;
    }
  });
}

TEST_P(BatchTest, OutputsOfReplicasGoWhereTheCallerWants) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() % 2 != 0) return;
    const auto source = synthetic_tokens(model_of());
    const Job job{.pipeline = comm.size() / 2, .replicas = 2, .feed = Feed::kRank0};
    Pipeline pipeline(comm, factory(), spec(job.feed), options_of(job));
    const Samples samples(*source, 1, {0, 7});
    const std::vector<Tensor> inputs = passed(samples, job, comm).inputs;
    const auto rows = [&](const InferOptions& options) {
      const auto outputs = pipeline.infer({.inputs = inputs}, options);
      return outputs.empty() ? 0 : outputs[0].shape()[0];
    };
    const int last = comm.size() - 1, other = comm.size() / 2 - 1;
    EXPECT_EQ(rows({}), comm.rank() == other ? 4 : comm.rank() == last ? 3 : 0);
    EXPECT_EQ(rows({.to = 0}), comm.rank() == 0 ? 7 : 0);
    EXPECT_EQ(rows({.to = last}), comm.rank() == last ? 7 : 0);
    EXPECT_EQ(rows({.to = InferOptions::kEveryRank}), 7);
    std::int64_t next = comm.rank() == last ? 4 : 0;
    const auto take = [&](SampleRange range, std::span<const Tensor> outputs) {
      EXPECT_EQ(range.first, next);
      EXPECT_EQ(outputs[0].shape()[0], range.count);
      next += range.count;
    };
    EXPECT_TRUE(pipeline.infer({.inputs = inputs}, {.on_outputs = take}).empty());
    EXPECT_EQ(next, comm.rank() == last ? 7 : comm.rank() == other ? 4 : 0);
  });
}

// As in train_step({}): what a rank passes that has nothing of the batch.
TEST_P(BatchTest, EmptyBracesAreABatchToEvaluate) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const Job job{.pipeline = comm.size(), .feed = Feed::kRank0};
    Pipeline pipeline(comm, factory(), spec(job.feed), options_of(job));
    const Samples samples(*synthetic_tokens(model_of()), 1, {0, 7});
    const Batch batch = samples.batch();
    const EvaluationReport report =
        comm.rank() == 0 ? pipeline.evaluate(batch) : pipeline.evaluate({});
    EXPECT_EQ(report.targets, 7 * kContext);
  });
}

void expect_refusal(const std::string& text, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << text;
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

TEST_P(BatchTest, WhatRanksPassIsComparedBeforeTheFirstMessage) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    const Job job{.pipeline = comm.size()};
    Pipeline pipeline(comm, factory(), spec(job.feed), options_of(job));
    Pipeline undisturbed(comm, factory(), spec(job.feed), options_of(job));
    const Samples samples(*source, 1, {0, 12}), more(*source, 1, {0, 14});
    const bool first = comm.rank() == 0, last = comm.rank() == comm.size() - 1;
    for (int step = 0; step < 2; ++step) {
      Batch wrong = samples.batch();
      if (first) wrong.inputs[0].spec.dtype = DType::kF32;
      expect_refusal("input 0 is f32 [12, 16], but i32 [samples, 16] is needed",
                     [&] { (void)pipeline.train_step(wrong); });
      wrong = samples.batch();
      if (last) wrong.targets.clear();
      expect_refusal("0 targets are given, 1 are needed",
                     [&] { (void)pipeline.accumulate(wrong); });
      wrong = samples.batch();
      if (last) wrong.targets = more.batch().targets;
      expect_refusal("passes inputs of 12 samples", [&] { (void)pipeline.evaluate(wrong); });
      wrong = samples.batch();
      if (first) wrong.inputs[0].data = nullptr;
      expect_refusal("without data", [&] { (void)pipeline.infer(wrong); });
      expect_refusal("this pipeline was made for at most 12",
                     [&] { (void)pipeline.train_step(more.batch()); });
      expect_refusal("the batch has no sample", [&] {
        (void)pipeline.train_step(samples.part({0, 0}));
      });
      expect_refusal("has no source", [&] { (void)pipeline.train_step(); });
      expect_refusal("needs a forward_backward()", [&] { (void)pipeline.optimizer_step(); });
      expect_refusal("infer() to rank 99",
                     [&] { (void)pipeline.infer(samples.batch(), {.to = 99}); });
      if (comm.size() > 1) {
        expect_refusal("ranks make different calls", [&] {
          if (last) {
            (void)pipeline.evaluate(samples.batch());
          } else {
            (void)pipeline.train_step(samples.batch());
          }
        });
      }
      EXPECT_TRUE(pipeline.usable());
      EXPECT_EQ(pipeline.train_step(samples.batch()).loss,
                undisturbed.train_step(samples.batch()).loss);
      (void)pipeline.forward_backward(samples.batch());
      expect_refusal("a step is complete", [&] { (void)pipeline.accumulate(samples.batch()); });
      pipeline.drop_gradients();
    }
    EXPECT_EQ(digest_of(pipeline), digest_of(undisturbed));
  });
}

TEST_P(BatchTest, RanksWithOtherBatchSpecsAreToldBoth) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() == 1) return;
    BatchSpec mine = spec({});
    if (comm.rank() == 1) mine.targets.push_back({DType::kF32, {}});
    expect_refusal("disagree about 'BatchSpec'", [&] {
      const Pipeline none(comm, factory(), mine, options_of({.pipeline = comm.size()}));
    });
    // Gradients that one rank alone drops would be of half the step.
    const auto source = synthetic_tokens(model_of());
    const Samples samples(*source, 1, {0, 12});
    Pipeline pipeline(comm, factory(), spec({}), options_of({.pipeline = comm.size()}));
    (void)pipeline.accumulate(samples.batch());
    expect_refusal("ranks make different calls", [&] {
      if (comm.rank() == 0) return pipeline.drop_gradients();
      (void)pipeline.train_step(samples.batch());
    });
    EXPECT_TRUE(pipeline.usable());
  });
}

TEST_P(BatchTest, ACallbackThatThrowsEndsThePipelineOnAllRanks) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    Pipeline pipeline(comm, factory(), spec({}), options_of({.pipeline = comm.size()}));
    const Samples samples(*source, 1, {0, 12});
    const auto fail = [](SampleRange, std::span<const Tensor>) { throw 42; };
    expect_refusal("on_outputs: an exception that is not a std::exception",
                   [&] { (void)pipeline.infer(samples.batch(), {.on_outputs = fail}); });
    EXPECT_FALSE(pipeline.usable());
    ASSERT_NE(pipeline.failure(), nullptr);
    EXPECT_EQ(pipeline.failure()->rank(), comm.size() - 1);
    expect_refusal("the pipeline is unusable since an earlier error",
                   [&] { (void)pipeline.train_step(samples.batch()); });
  });
}

TEST_P(BatchTest, AMissingCheckpointLeavesThePipelineUsable) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    Pipeline pipeline(comm, factory(), spec({}), options_of({.pipeline = comm.size()}));
    const Samples samples(*source, 1, {0, 12});
    const double before = pipeline.evaluate(samples.batch()).loss;
    expect_refusal("/no/such/directory",
                   [&] { (void)load_checkpoint(pipeline, "/no/such/directory"); });
    EXPECT_TRUE(pipeline.usable());
    EXPECT_EQ(pipeline.evaluate(samples.batch()).loss, before);
    EXPECT_EQ(pipeline.train_step(samples.batch()).step, 1U);
  });
}

// y = w x, with a running sum of what it saw, and a count of its calls.
struct Tracking : ArithmeticStage {
  Tracking() : ArithmeticStage(0) {}
  ParameterSet& set = *parameters();
  Parameter& mean = set.add_buffer("mean", {1}, Init::constant(0));
  Parameter& calls = set.add_buffer("calls", {1}, Init::constant(0), ReplicaRule::kNothing);
  Parameter& first = set.add_buffer("first", {1}, Init::constant(7), ReplicaRule::kFirst);

  void forward(StageContext& ctx, std::span<const Tensor> in,
               std::span<const Tensor> out) override {
    ArithmeticStage::forward(ctx, in, out);
    if (ctx.phase != Phase::kTrain) return;
    mean.value.at(0) += in[0].at(0);
    calls.value.at(0) += 1;
    first.value.at(0) += in[0].at(0);
  }
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override {
    *sum = 0;
    for (std::int64_t i = 0; i < outputs[0].elements(); ++i) {
      const float off = outputs[0].at(i) - targets[0].at(i);
      *sum += off * off;
      outputs[0].at(i) = static_cast<float>(2 * off * ctx.loss_scale.value);
    }
  }
};

TEST_P(BatchTest, BuffersFollowTheirRuleOverReplicasAndComeBackFromASave) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::string directory = ::testing::TempDir() + "/buffers_" + std::to_string(comm.size());
    PipelineOptions options;
    options.shape = {.pipeline = 1, .replicas = comm.size(), .micro_batches = 2};
    options.training.learning_rate = {.peak = 0.01};
    const StageFactory make = [](int, int) { return std::make_unique<Tracking>(); };
    const BatchSpec numbers{.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
    Pipeline pipeline(comm, make, numbers, options);
    const auto value = [](Pipeline& of, std::size_t index) {
      return of.buffers()[index].parameter->value.at(0);
    };
    const float mine = static_cast<float>(comm.rank() + 1);
    const std::vector<float> inputs = {mine, mine}, targets = {0, 0};
    const Batch batch{.inputs = {view(inputs, {2})}, .targets = {view(targets, {2})}};
    (void)pipeline.train_step(batch);
    (void)pipeline.evaluate(batch);
    // Each replica added its number twice; the mean of 1 to R is (R + 1) / 2.
    EXPECT_EQ(value(pipeline, 0), static_cast<float>(comm.size() + 1));
    EXPECT_EQ(value(pipeline, 1), 2);
    EXPECT_EQ(value(pipeline, 2), 9);
    // A refused step, and one that is dropped, leave them alone.
    const std::vector<float> bad = {std::nanf(""), 1};
    Batch broken = batch;
    broken.inputs = {view(bad, {2})};
    expect_refusal("not finite", [&] { (void)pipeline.train_step(broken); });
    (void)pipeline.accumulate(batch);
    EXPECT_EQ(value(pipeline, 1), 4);
    pipeline.drop_gradients();
    EXPECT_EQ(value(pipeline, 0), static_cast<float>(comm.size() + 1));
    EXPECT_EQ(value(pipeline, 1), 2);
    save_checkpoint(pipeline, {.directory = directory, .overwrite = true});
    Pipeline other(comm, make, numbers, options);
    (void)load_checkpoint(other, directory);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(value(other, i), value(pipeline, i));
    (void)pipeline.train_step(batch);
    (void)other.train_step(batch);
    EXPECT_EQ(digest_of(other), digest_of(pipeline));
  });
}

// The batches before it count for nothing, and the next call begins a step.
TEST_P(BatchTest, ABatchThatIsNotFiniteEndsTheStepItBelongsTo) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    PipelineOptions options;
    options.shape = {.pipeline = 1, .replicas = comm.size(), .micro_batches = 2};
    options.training.learning_rate = {.peak = 0.01};
    const StageFactory make = [](int, int) { return std::make_unique<Tracking>(); };
    const BatchSpec numbers{.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
    const std::vector<float> good = {1, 2}, broken = {1, std::nanf("")}, zero = {0, 0};
    const auto batch_of = [&](const std::vector<float>& inputs) {
      return Batch{.inputs = {view(inputs, {2})}, .targets = {view(zero, {2})}};
    };
    Pipeline undisturbed(comm, make, numbers, options);
    Pipeline refusing(comm, make, numbers, options);
    options.training.skip_nonfinite = true;
    Pipeline skipping(comm, make, numbers, options);
    undisturbed.set_step(1);
    (void)undisturbed.train_step(batch_of(good));

    (void)refusing.accumulate(batch_of(good));
    expect_refusal("the loss of step 1 is not finite",
                   [&] { (void)refusing.accumulate(batch_of(broken)); });
    EXPECT_EQ(refusing.step(), 0U);
    refusing.set_step(1);
    EXPECT_EQ(refusing.train_step(batch_of(good)).targets, 2.0 * comm.size());
    EXPECT_EQ(digest_of(refusing), digest_of(undisturbed));

    (void)skipping.accumulate(batch_of(good));
    EXPECT_TRUE(skipping.accumulate(batch_of(broken)).skipped);
    EXPECT_EQ(skipping.step(), 1U);
    const StepReport report = skipping.train_step(batch_of(good));
    EXPECT_FALSE(report.skipped);
    EXPECT_EQ(report.targets, 2.0 * comm.size());
    EXPECT_EQ(digest_of(skipping), digest_of(undisturbed));
  });
}

// Everything that may come between the batches of a step leaves the step alone, and a save then is
// that of the step before.
TEST_P(BatchTest, WhatComesBetweenTheBatchesOfAStepLeavesItAlone) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::string directory = ::testing::TempDir() + "/open_" + std::to_string(comm.size());
    const auto source = synthetic_tokens(model_of());
    PipelineOptions options = options_of({.pipeline = comm.size()});
    Pipeline undisturbed(comm, factory(), spec({}), options);
    Pipeline pipeline(comm, factory(), spec({}), options);
    Pipeline resumed(comm, factory(), spec({}), options);
    const Samples one(*source, 1, {0, 7}), two(*source, 2, {0, 12}), other(*source, 3, {0, 5});
    const auto disturb = [&] {
      (void)pipeline.evaluate(other.batch());
      for (const std::int64_t count : {5, 1, 3}) {
        (void)pipeline.infer(other.part({0, count}));
      }
      EXPECT_FALSE(pipeline.state().empty());
      expect_refusal("other values in the middle of a step",
                     [&] { pipeline.set_state(undisturbed.state()); });
      expect_refusal("other values in the middle of a step",
                     [&] { (void)load_checkpoint(pipeline, directory); });
      expect_refusal("set_step() in the middle of a step", [&] { pipeline.set_step(7); });
    };
    for (int step = 0; step < 2; ++step) {
      for (Pipeline* each : {&undisturbed, &pipeline}) {
        const bool disturbed = each == &pipeline;
        (void)each->accumulate(one.batch());
        if (disturbed) disturb();
        (void)each->forward_backward(two.batch());
        if (disturbed) disturb();
        if (disturbed) save_checkpoint(pipeline, {.directory = directory, .overwrite = true});
        (void)each->optimizer_step();
      }
    }
    EXPECT_EQ(digest_of(pipeline), digest_of(undisturbed));
    EXPECT_EQ(load_checkpoint(resumed, directory).step, 1U);
    (void)resumed.accumulate(one.batch());
    (void)resumed.forward_backward(two.batch());
    (void)resumed.optimizer_step();
    EXPECT_EQ(digest_of(resumed), digest_of(undisturbed));
  });
}

// Buffers in a save are those of the last complete step.
TEST_P(BatchTest, ASaveInTheMiddleOfAStepHasTheBuffersOfTheStepBefore) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const std::string directory = ::testing::TempDir() + "/middle_" + std::to_string(comm.size());
    PipelineOptions options;
    options.shape = {.pipeline = 1, .replicas = comm.size(), .micro_batches = 2};
    options.training.learning_rate = {.peak = 0.01};
    const StageFactory make = [](int, int) { return std::make_unique<Tracking>(); };
    const BatchSpec numbers{.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
    const float mine = static_cast<float>(comm.rank() + 1);
    const std::vector<float> inputs = {mine, mine}, targets = {0, 0};
    const Batch batch{.inputs = {view(inputs, {2})}, .targets = {view(targets, {2})}};
    Pipeline pipeline(comm, make, numbers, options), other(comm, make, numbers, options);
    const auto value = [](Pipeline& of) { return of.buffers()[0].parameter->value.at(0); };
    (void)pipeline.train_step(batch);
    const float complete = value(pipeline);
    (void)pipeline.accumulate(batch);
    const float open = value(pipeline);
    EXPECT_NE(open, complete);
    save_checkpoint(pipeline, {.directory = directory, .overwrite = true});
    EXPECT_EQ(value(pipeline), open);
    (void)load_checkpoint(other, directory);
    EXPECT_EQ(value(other), complete);
    (void)pipeline.train_step(batch);
    (void)other.accumulate(batch);
    (void)other.train_step(batch);
    EXPECT_EQ(digest_of(other), digest_of(pipeline));
  });
}

TEST_P(BatchTest, ABufferNeedsANameOfItsOwn) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    struct Twice : Tracking {
      Parameter& again = set.add_buffer("w0", {1}, Init::constant(0));
    };
    PipelineOptions options;
    options.shape.replicas = comm.size();
    const BatchSpec numbers{.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
    expect_refusal("buffer 'w0' of stage 0", [&] {
      const Pipeline pipeline(
          comm, [](int, int) { return std::make_unique<Twice>(); }, numbers, options);
    });
  });
}

// Hands every tensor on as it is.
struct PassOn : CopyingStage, SplitBackward {
  void backward(StageContext& ctx, std::span<const Tensor> grad_out,
                std::span<const Tensor> grad_in) override {
    for (const Tensor& each : grad_in) {
      EXPECT_EQ(each.data != nullptr, is_float(each.spec.dtype));
    }
    CopyingStage::backward(ctx, grad_out, grad_in);
  }
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_out,
                      std::span<const Tensor> grad_in) override {
    backward(ctx, grad_out, grad_in);
  }
  void backward_weight(StageContext&, std::span<const Tensor>) override {}
};

TEST_P(BatchTest, EveryTypeAndNumberOfDimensionsTravels) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    std::vector<TensorSpec> ones;
    for (int number = 0; number < kDTypes; ++number) {
      for (std::size_t dims = 0; dims < 6; ++dims) {
        const std::vector<std::int64_t> shape(dims, 2);
        ones.push_back({static_cast<DType>(number), Shape(std::span(shape))});
      }
    }
    PipelineOptions options;
    options.shape = {.pipeline = comm.size(), .micro_batches = 3, .micro_batch_size = 2};
    options.order.schedule = comm.size() > 1 ? "zb-h1" : "1f1b";
    const StageFactory make = [](int, int) { return std::make_unique<PassOn>(); };
    Pipeline pipeline(comm, make, BatchSpec{.inputs = ones}, options);
    Batch batch;
    std::vector<std::vector<std::byte>> memory;
    for (const TensorSpec& one : ones) {
      std::vector<std::int64_t> shape = {5};
      for (int d = 0; d < one.shape.rank(); ++d) shape.push_back(one.shape[d]);
      const TensorSpec spec{one.dtype, Shape(std::span(shape))};
      std::vector<std::byte>& bytes = memory.emplace_back(spec.bytes());
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::byte>(i * 7 + memory.size());
      }
      batch.inputs.push_back({bytes.data(), spec});
    }
    EXPECT_EQ(pipeline.train_step(batch).loss, 1);
    const auto outputs = pipeline.infer(batch, {.to = InferOptions::kEveryRank});
    ASSERT_EQ(outputs.size(), ones.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      ASSERT_EQ(outputs[i].spec, batch.inputs[i].spec);
      EXPECT_EQ(std::memcmp(outputs[i].data, memory[i].data(), memory[i].size()), 0);
    }
  });
}

std::map<std::string, std::vector<float>> values_of(Pipeline& pipeline) {
  std::map<std::string, std::vector<float>> values;
  for (const Pipeline::Owned& owned : pipeline.parameters()) {
    const std::span<float> now = owned.parameter->value.floats();
    values[owned.parameter->name].assign(now.begin(), now.end());
  }
  return values;
}

TEST_P(BatchTest, GroupsOfParametersHaveTheirOwnSettings) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    const Samples samples(*source, 1, {0, 12});
    PipelineOptions options = options_of({.pipeline = comm.size()});
    options.training.clip = 0;
    options.training.optimizer.weight_decay = 0.1F;
    Pipeline plain(comm, factory(), spec({}), options);
    options.training.groups = {{.names = "blocks.0.*", .frozen = true},
                               {.names = "*.bias", .learning_rate_scale = 0.5},
                               {.names = "blocks.1.mlp.*.weight", .weight_decay = 0.0F}};
    Pipeline grouped(comm, factory(), spec({}), options);
    const auto before = values_of(plain);
    ASSERT_EQ(before, values_of(grouped));
    const double norm = plain.train_step(samples.batch()).grad_norm;
    EXPECT_LT(grouped.train_step(samples.batch()).grad_norm, norm);
    const auto expected = values_of(plain), actual = values_of(grouped);
    for (const auto& [name, values] : actual) {
      const std::vector<float>& was = before.at(name);
      const std::vector<float>& other = expected.at(name);
      const bool bias = name.ends_with(".bias"), frozen = name.starts_with("blocks.0.");
      const bool no_decay = name.starts_with("blocks.1.mlp.") && name.ends_with(".weight");
      if (frozen) {
        EXPECT_EQ(values, was) << name;
      } else if (!bias && !no_decay) {
        EXPECT_EQ(values, other) << name;
      } else {
        EXPECT_NE(values, other) << name;
      }
      for (std::size_t i = 0; bias && !frozen && i < values.size(); ++i) {
        EXPECT_NEAR(values[i] - was[i], (other[i] - was[i]) / 2, 1e-7) << name;
      }
    }
    options.training.groups = {{.names = "no.such.*"}};
    expect_refusal("'no.such.*' has none",
                   [&] { const Pipeline none(comm, factory(), spec({}), options); });
  });
}

TEST_P(BatchTest, AllValuesComeAsAMapAndGoBack) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    std::vector<std::map<std::string, HostTensor>> states;
    on_all_and_alone(comm, {.pipeline = comm.size()}, [&](Pipeline& pipeline, const auto& mine) {
      (void)pipeline.train_step(mine(Samples(*source, 1, {0, 12})));
      states.push_back(pipeline.state());
    });
    ASSERT_EQ(states[0].size(), states[1].size());
    for (const auto& [name, tensor] : states[1]) {
      EXPECT_EQ(states[0].at(name).spec, tensor.spec) << name;
      EXPECT_EQ(states[0].at(name).bytes, tensor.bytes) << name;
    }
    Pipeline fresh(comm, factory(), spec({}), options_of({.pipeline = comm.size()}));
    fresh.set_state(states[1]);
    const auto again = fresh.state();
    for (const auto& [name, tensor] : states[1]) EXPECT_EQ(again.at(name).bytes, tensor.bytes);
    std::map<std::string, HostTensor> wrong = states[1];
    const std::string first = wrong.begin()->first;
    wrong.erase(first);
    expect_refusal("the values have no '" + first + "'", [&] { fresh.set_state(wrong); });
    wrong[first].spec.shape = {3};
    expect_refusal("but the model has", [&] { fresh.set_state(wrong); });
    EXPECT_EQ(fresh.state().at(first).bytes, states[1].at(first).bytes);
  });
}

// Momentum by hand, w -= rate * m, with the state in plain vectors.
class Heavy : public Optimizer {
 public:
  explicit Heavy(std::span<const ParameterSlice> slices) : slices_(slices.begin(), slices.end()) {
    for (const ParameterSlice& each : slices_) {
      momenta_.emplace_back(static_cast<std::size_t>(each.count));
    }
  }
  explicit Heavy(std::span<Parameter* const> parameters) : Heavy(whole_slices(parameters)) {}
  void update(ComputeContext&, std::uint64_t, float rate, float scale) override {
    for (std::size_t s = 0; s < slices_.size(); ++s) {
      const auto& [parameter, first, count] = slices_[s];
      for (std::int64_t i = 0; i < count; ++i) {
        float& momentum = momenta_[s][static_cast<std::size_t>(i)];
        momentum = 0.9F * momentum + scale * parameter->grad.at(first + i);
        parameter->value.at(first + i) -= rate * momentum;
      }
    }
  }
  std::vector<OptimizerState> state() override {
    std::vector<OptimizerState> all;
    for (std::size_t s = 0; s < slices_.size(); ++s) {
      const auto& [parameter, first, count] = slices_[s];
      const Shape shape = slices_[s].whole() ? parameter->shape : Shape{count};
      all.push_back({parameter->name, "heavy", {momenta_[s].data(), {DType::kF32, shape}}, first});
    }
    return all;
  }

 private:
  std::vector<ParameterSlice> slices_;
  std::vector<std::vector<float>> momenta_;
};

TEST_P(BatchTest, AnOptimizerOfOnesOwnIsSaved) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto source = synthetic_tokens(model_of());
    const std::string directory = ::testing::TempDir() + "/own_" + std::to_string(comm.size());
    PipelineOptions options = options_of({.pipeline = comm.size()});
    options.training.make_optimizer = [](std::span<Parameter* const> parameters,
                                         const DeviceMemory&) {
      return std::make_unique<Heavy>(parameters);
    };
    PipelineOptions with_slices = options;
    with_slices.training.make_optimizer = [](std::span<const ParameterSlice> slices,
                                             const DeviceMemory&) {
      return std::make_unique<Heavy>(slices);
    };
    Pipeline pipeline(comm, factory(), spec({}), options);
    for (std::uint64_t step = 1; step <= 2; ++step) {
      (void)pipeline.train_step(Samples(*source, step, {0, 12}).batch());
    }
    save_checkpoint(pipeline, {.directory = directory, .overwrite = true});
    Pipeline resumed(comm, factory(), spec({}), with_slices);
    EXPECT_EQ(load_checkpoint(resumed, directory).step, 2U);
    const Samples next(*source, 3, {0, 12});
    EXPECT_EQ(pipeline.train_step(next.batch()).loss, resumed.train_step(next.batch()).loss);
    EXPECT_EQ(digest_of(pipeline), digest_of(resumed));
    options.training.make_optimizer = [](std::span<Parameter* const>, const DeviceMemory&) {
      return std::unique_ptr<Optimizer>();
    };
    expect_refusal("the factory made no optimizer",
                   [&] { const Pipeline none(comm, factory(), spec({}), options); });
  });
}

// With state that a save would have, but no load could find.
class Careless : public Optimizer {
 public:
  using States = std::function<std::vector<OptimizerState>(const std::string& owned, float* data)>;
  Careless(std::span<Parameter* const> parameters, States states)
      : owned_(parameters[0]->name), states_(std::move(states)) {}
  void update(ComputeContext&, std::uint64_t, float, float) override {}
  std::vector<OptimizerState> state() override { return states_(owned_, data_.data()); }

 private:
  std::string owned_;
  States states_;
  std::array<float, 3> data_ = {};
};

TEST_P(BatchTest, StateOfAnOptimizerOfOnesOwnThatNoLoadFindsIsRefused) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const auto refused = [&](const std::string& part, const Careless::States& states) {
      PipelineOptions options = options_of({.pipeline = comm.size()});
      options.training.make_optimizer = [&](std::span<Parameter* const> parameters,
                                            const DeviceMemory&) {
        return std::make_unique<Careless>(parameters, states);
      };
      expect_refusal(part, [&] { const Pipeline none(comm, factory(), spec({}), options); });
    };
    const TensorSpec f32{DType::kF32, {3}}, i32{DType::kI32, {3}};
    refused("the optimizer has state 'k' of 'nosuch'; legal: of the",
            [=](const std::string&, float* data) {
              return std::vector<OptimizerState>{{"nosuch", "k", {data, f32}}};
            });
    refused("has 3 elements from -1 on; legal: of elements 0 to below ",
            [=](const std::string& owned, float* data) {
              return std::vector<OptimizerState>{{owned, "k", {data, f32}, -1}};
            });
    refused(", which the factory got, from the first on",
            [=](const std::string& owned, float* data) {
              return std::vector<OptimizerState>{{owned, "k", {data, {DType::kF32, {1}}}, 1}};
            });
    constexpr std::int64_t kFar = std::int64_t{1} << 40;
    refused(", which the factory got", [=](const std::string& owned, float* data) {
      return std::vector<OptimizerState>{{owned, "k", {data, f32}, kFar}};
    });
    refused("elements from 0 on; legal: of elements 0 to below ",
            [=](const std::string& owned, float* data) {
              return std::vector<OptimizerState>{{owned, "k", {data, {DType::kF32, {kFar}}}}};
            });
    refused("is i32 [3]; legal: f32 and bf16", [=](const std::string& owned, float* data) {
      return std::vector<OptimizerState>{{owned, "k", {data, i32}}};
    });
    refused("has null data; legal: memory of its own", [=](const std::string& owned, float*) {
      return std::vector<OptimizerState>{{owned, "k", {nullptr, f32}}};
    });
    refused("that something else has too; legal: another kind",
            [=](const std::string& owned, float* data) {
              return std::vector<OptimizerState>(2, {owned, "k", {data, f32}});
            });
  });
}

// y = w x for the first tensor. Stage 0 makes two tensors, w x and v x; the last adds both up.
struct Link : Stage, SplitBackward {
  ParameterSet set;
  Parameter &w, &v;
  bool two;
  Link(int stage, bool makes_two)
      : w(set.add("w" + std::to_string(stage), {1}, Init::uniform(1))),
        v(set.add("v" + std::to_string(stage), {1}, Init::uniform(1))),
        two(makes_two) {}
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    EXPECT_EQ(in.size(), 1U);
    return {.outputs = std::vector<TensorSpec>(two ? 2 : 1, in[0])};
  }
  ParameterSet* parameters() override { return &set; }
  void forward(StageContext&, std::span<const Tensor> in, std::span<const Tensor> out) override {
    for (std::int64_t i = 0; i < in[0].elements(); ++i) {
      out[0].at(i) = w.value.at(0) * in[0].at(i);
      if (two) out[1].at(i) = v.value.at(0) * in[0].at(i);
    }
  }
  void backward_input(StageContext&, std::span<const Tensor> grad_out,
                      std::span<const Tensor> grad_in) override {
    for (std::int64_t i = 0; !grad_in.empty() && i < grad_in[0].elements(); ++i) {
      grad_in[0].at(i) = w.value.at(0) * grad_out[0].at(i);
    }
  }
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_out) override {
    for (std::int64_t i = 0; i < grad_out[0].elements(); ++i) {
      w.grad.at(0) += grad_out[0].at(i) * ctx.inputs[0].at(i);
      if (two) v.grad.at(0) += grad_out[1].at(i) * ctx.inputs[0].at(i);
    }
  }
  void backward(StageContext& ctx, std::span<const Tensor> grad_out,
                std::span<const Tensor> grad_in) override {
    backward_input(ctx, grad_out, grad_in);
    backward_weight(ctx, grad_out);
  }
};
struct Sum : PassOn {
  StageDescription describe(std::span<const TensorSpec> in, ComputeContext&) const override {
    EXPECT_EQ(in.size(), 2U);
    return {.outputs = {in[0]}};
  }
  void forward(StageContext&, std::span<const Tensor> in, std::span<const Tensor> out) override {
    for (std::int64_t i = 0; i < in[0].elements(); ++i) {
      out[0].at(i) = in[0].at(i) + in[1].at(i);
    }
  }
  void backward(StageContext&, std::span<const Tensor> grad_out,
                std::span<const Tensor> grad_in) override {
    for (const Tensor& grad : grad_in) {
      std::memcpy(grad.data, grad_out[0].data, grad.spec.bytes());
    }
  }
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override {
    Tracking().loss(ctx, outputs, targets, sum);
  }
  double target_weight(std::span<const Tensor> targets) const override {
    return static_cast<double>(targets[0].elements());
  }
};

// Four stages: the second tensor of stage 0 passes by stages 1 and 2.
TEST_P(BatchTest, ATensorPassesByOtherStages) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() == 3) return;
    const StageFactory make = [](int stage, int) -> std::unique_ptr<Stage> {
      if (stage == 0) return std::make_unique<Link>(0, /*makes_two=*/true);
      if (stage == 3) return std::make_unique<Sum>();
      return pass_through(std::make_unique<Link>(stage, /*makes_two=*/false), 1);
    };
    const std::vector<float> x = {1, 2, 3, 4, 5, 6, 7}, y = {3, 1, 4, 1, 5, 9, 2};
    const BatchSpec numbers{.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
    const auto train = [&](Communicator& over, const std::string& schedule) {
      PipelineOptions options;
      options.shape = {.micro_batches = 4, .micro_batch_size = 2};
      options.order = {.schedule = schedule, .chunks = 4 / over.size()};
      options.training.learning_rate = {.peak = 0.05};
      Pipeline pipeline(over, make, numbers, options);
      std::vector<double> seen;
      for (int step = 0; step < 5; ++step) {
        const Batch batch{.inputs = {view(x, {7})}, .targets = {view(y, {7})}};
        const StepReport report = pipeline.train_step(batch);
        seen.push_back(report.loss);
        seen.push_back(report.grad_norm);
      }
      return seen;
    };
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const std::vector<double> alone = train(*self, "interleaved");
    EXPECT_LT(alone[8], alone[0]);
    EXPECT_EQ(train(comm, comm.size() == 4 ? "zb-h1" : "interleaved"), alone);
    if (comm.size() == 4) {
      EXPECT_EQ(train(comm, "1f1b"), alone);
    }
    expect_refusal("needs another one in it", [] { (void)pass_through(nullptr, 1); });
  });
}

struct Held {
  std::size_t descriptors = 0, threads = 0, pages = 0;  // of this process
};
Held held_now() {
  const auto count = [](const char* folder) {
    const std::filesystem::directory_iterator entries(folder);
    return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
  };
  Held held{.descriptors = count("/proc/self/fd"), .threads = count("/proc/self/task")};
  std::size_t all = 0;
  std::ifstream("/proc/self/statm") >> all >> held.pages;
  return held;
}

// SLUICE_PIPELINES: how many; a thousand over MPI take some seconds.
TEST_P(BatchTest, APipelineLeavesNothingBehind) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const char* asked = std::getenv("SLUICE_PIPELINES");
    const int pipelines = asked != nullptr ? std::atoi(asked) : 60;
    const auto source = synthetic_tokens(model_of());
    const Samples samples(*source, 1, {0, 4});
    Held before;
    for (int i = 0; i < pipelines; ++i) {
      {
        Pipeline pipeline(comm, factory(), spec({}), options_of({.pipeline = comm.size()}));
        (void)pipeline.train_step(samples.batch());
        if (i % 2 == 0) pipeline.close();
      }
      Collectives(comm, 0, nullptr).barrier();  // ranks that are threads share what is counted
      if (i == 29 && comm.rank() == 0) before = held_now();
      Collectives(comm, 0, nullptr).barrier();
    }
    const Held after = comm.rank() == 0 ? held_now() : before;
    Collectives(comm, 0, nullptr).barrier();
    EXPECT_EQ(after.descriptors, before.descriptors);
    EXPECT_EQ(after.threads, before.threads);
    EXPECT_LT(after.pages, before.pages + 2048);  // 8 MiB
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BatchTest, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace sluice::testing
