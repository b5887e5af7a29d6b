// Batch statistics over replicas, and the sums within actions that a plan has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/pipeline.hpp>

#include "tests/runtime/engine/copying_stage.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice::testing {
namespace {

using namespace nn;

constexpr std::int64_t kSide = 5, kPixels = kSide * kSide;
constexpr int kSamples = 24;  // of the global batch
constexpr int kSteps = 3;

std::vector<float> numbers(std::size_t count, std::uint64_t site) {
  std::vector<float> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = 1 + to_unit(philox({.seed = 5, .site = site}, 0, i)[0]);  // their mean is not 0
  }
  return made;
}

Sequential network(BatchStatistics statistics) {
  const auto norm = [&](std::int64_t channels) {
    return batch_norm2d(channels, {.statistics = statistics});
  };
  return Sequential({conv2d(1, 4, 3), norm(4), relu(),
                     residual({conv2d(4, 4, 3, {.padding = 1}), norm(4)}), relu(),
                     group({conv2d(4, 3, 2), norm(3)}), flatten(), linear(12, 2)},
                    mse_loss())
      .with_input({DType::kF32, {1, kSide, kSide}});
}

// Samples in the order in which `replicas` replicas with micro-batches of `size` see them as one
// replica with micro-batches of replicas * size does: micro-batch i has everyone's micro-batch i.
std::vector<int> order_of(int replicas, int size) {
  std::vector<int> order;
  const int share = kSamples / replicas;
  for (int r = 0; r < replicas; ++r) {
    for (int i = 0; i < share; ++i) {
      order.push_back(i / size * replicas * size + r * size + i % size);
    }
  }
  return order;
}

struct Trained {
  std::vector<double> losses;
  std::map<std::string, HostTensor> state;
  std::string digest;
};

Trained train(Communicator& comm, const Sequential& model, int pipeline, int size,
              const std::string& schedule = "1f1b", int chunks = 1) {
  const int replicas = comm.size() / pipeline;
  PipelineOptions options;
  options.shape = {.pipeline = pipeline,
                   .replicas = replicas,
                   .micro_batches = kSamples / replicas / size,
                   .micro_batch_size = size};
  options.order = {.schedule = schedule, .chunks = chunks};
  options.training.optimizer = OptimizerConfig::sgd(0.9F);
  options.training.learning_rate = {.peak = 0.05};
  const std::vector<float> images = numbers(kSamples * kPixels, 1), wanted = numbers(kSamples, 2);
  std::vector<float> x, y;
  for (const int sample : order_of(replicas, size)) {
    const auto first = images.begin() + sample * kPixels;
    x.insert(x.end(), first, first + kPixels);
    y.insert(y.end(), {wanted[static_cast<std::size_t>(sample)], 1});
  }
  Pipeline made(comm, model,
                {.inputs = {{DType::kF32, {1, kSide, kSide}}},
                 .targets = {{DType::kF32, {2}}},
                 .feed = Feed::kRank0},
                options);
  Batch batch;
  if (comm.rank() == 0) {
    batch = {{view(x, {kSamples, 1, kSide, kSide})}, {view(y, {kSamples, 2})}};
  }
  Trained result;
  for (int step = 0; step < kSteps; ++step) result.losses.push_back(made.train_step(batch).loss);
  result.state = made.state();
  result.digest = digest_of(made);
  return result;
}

double largest_difference(const Trained& a, const Trained& b) {
  double most = 0;
  for (const auto& [name, tensor] : a.state) {
    const auto* const one = reinterpret_cast<const float*>(tensor.bytes.data());
    const auto* const two = reinterpret_cast<const float*>(b.state.at(name).bytes.data());
    for (std::int64_t i = 0; i < tensor.spec.shape.elements(); ++i) {
      const double scale = std::max(1.0, static_cast<double>(std::abs(two[i])));
      most = std::max(most, static_cast<double>(std::abs(one[i] - two[i])) / scale);
    }
  }
  return most;
}

class ReplicaStatisticsTest : public ::testing::TestWithParam<int> {};

// The batch of one replica in the micro-batches that all replicas have together.
TEST_P(ReplicaStatisticsTest, ReplicasHaveTheStatisticsOfOneLargerMicroBatch) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const int replicas = comm.size();
    const std::unique_ptr<Communicator> self = comm.split(comm.rank(), 0);
    const Sequential synchronised = network(BatchStatistics::kReplicas);
    const Trained alone = train(*self, synchronised, 1, 2 * replicas);
    EXPECT_LT(alone.losses[kSteps - 1], alone.losses[0]);
    const Trained together = train(comm, synchronised, 1, 2);
    EXPECT_LT(largest_difference(together, alone), 1e-5);
    if (replicas == 1) return;
    const Trained apart = train(comm, network(BatchStatistics::kMicroBatch), 1, 2);
    EXPECT_GT(largest_difference(apart, alone), 1e-3);
  });
}

TEST_P(ReplicaStatisticsTest, EveryDepthAndScheduleHasTheSameBits) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    if (comm.size() != 4 && comm.size() != 6) return;
    const int depth = comm.size() / 2;
    // Two replicas of one rank, made of ranks 0 and 1.
    const std::unique_ptr<Communicator> two = comm.split(comm.rank() / 2, 0);
    const Sequential model = network(BatchStatistics::kReplicas);
    const Trained flat = train(*two, model, 1, 2);
    for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
      const Trained deep = train(comm, model, depth, 2, schedule);
      EXPECT_EQ(deep.losses, flat.losses) << schedule;
      EXPECT_EQ(deep.digest, flat.digest) << schedule;
    }
    if (depth > 2) return;
    EXPECT_EQ(train(comm, model, depth, 2, "zb-v", 2).digest, flat.digest);
    EXPECT_EQ(train(comm, model, depth, 2, "interleaved", 2).digest, flat.digest);
  });
}

// Sums over its replicas as often as it is told to; describes `described` for each.
class Summing : public CopyingStage {
 public:
  Summing(int forward, int backward, int described)
      : forward_(forward), backward_(backward), described_(described) {
    set_.add("weight", {1}, Init::constant(1));
  }
  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& /*compute*/) const override {
    const PlannedCollective sum{
        .axis = CollectiveAxis::kReplica, .bytes = sizeof(double), .type = DType::kF64};
    const std::vector<PlannedCollective> sums(static_cast<std::size_t>(described_), sum);
    StageDescription description{.outputs = {inputs[0]}};
    description.collectives = {.forward = sums, .backward_input = sums};
    return description;
  }
  void forward(StageContext& ctx, std::span<const Tensor> in,
               std::span<const Tensor> out) override {
    double count = 0;
    if (ctx.phase == Phase::kTrain) {
      count = 1 + ctx.micro_batch;
      for (int i = 0; i < forward_; ++i) ctx.collective->sum({&count, 1});
    } else {
      EXPECT_EQ(ctx.collective, nullptr);
    }
    for (std::int64_t i = 0; i < in[0].elements(); ++i) {
      out[0].at(i) = in[0].at(i) + static_cast<float>(count);
    }
  }
  void backward(StageContext& ctx, std::span<const Tensor> grad_out,
                std::span<const Tensor> /*grad_in*/) override {
    double one = 1;
    for (int i = 0; i < backward_; ++i) ctx.collective->sum({&one, 1});
    set_.find("weight")->grad.at(0) += grad_out[0].at(0);
  }
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> /*targets*/,
            double* sum) override {
    *sum = static_cast<double>(outputs[0].at(0));
    outputs[0].at(0) = static_cast<float>(ctx.loss_scale);
  }

 private:
  int forward_, backward_, described_;
};

TEST_P(ReplicaStatisticsTest, SumsThatAStageDoesNotDescribeAreNamedOnAllRanks) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    PipelineOptions options;
    options.shape = {
        .pipeline = 1, .replicas = comm.size(), .micro_batches = 2, .micro_batch_size = 1};
    const BatchSpec spec{.inputs = {{DType::kF32, {}}}, .targets = {{DType::kF32, {}}}};
    const std::vector<float> x(2);
    const Batch batch{.inputs = {view(x, {2})}, .targets = {view(x, {2})}};
    const auto with = [&](int forward, int backward, int described) {
      const StageFactory make = [=](int, int) {
        return std::make_unique<Summing>(forward, backward, described);
      };
      Pipeline pipeline(comm, make, spec, options);
      const StepReport report = pipeline.train_step(batch);
      (void)pipeline.evaluate(batch);
      return report.loss;
    };
    // Micro-batches 0 and 1 sum 1 and 2 over the replicas.
    EXPECT_DOUBLE_EQ(with(1, 1, 1), 1.5 * comm.size());
    expect_error(ErrorCode::kUsage,
                 {"stage 0, forward of micro-batch 0: the stage makes a sum of 8 bytes of f64 over "
                  "the replicas where its description has no more (1 in this action)"},
                 [&] { (void)with(2, 1, 1); });
    expect_error(ErrorCode::kUsage,
                 {"the stage does not make a sum of 8 bytes of f64 over the replicas"},
                 [&] { (void)with(0, 1, 1); });
    expect_error(ErrorCode::kUsage,
                 {"stage 0, backward of micro-batch 0", "no more (0 in this action)"},
                 [&] { (void)with(0, 1, 0); });
  });
}

// Steps of one batch normalisation, over replicas.
class Steps {
 public:
  Steps(Communicator& comm, BatchStatistics statistics)
      : replicas_(comm.size()), x_(numbers(kSamples * kPixels, 3)), y_(kSamples) {
    for (std::size_t i = 0; i < x_.size(); ++i) x_[i] += static_cast<float>(i / kPixels);
    PipelineOptions options;
    options.shape = {.pipeline = 1,
                     .replicas = comm.size(),
                     .micro_batches = kSamples / comm.size() / 2,
                     .micro_batch_size = 2};
    const Sequential model(
        {batch_norm2d(1, {.statistics = statistics}), flatten(), linear(kPixels, 1)}, mse_loss());
    made_ = std::make_unique<Pipeline>(
        comm, model,
        BatchSpec{.inputs = {{DType::kF32, {1, kSide, kSide}}}, .targets = {{DType::kF32, {1}}}},
        options);
  }
  Pipeline& pipeline() { return *made_; }
  // `count` samples over all replicas, of which each passes those of its own part of the data.
  Batch batch(int first, int count, int rank) {
    const int share = count / replicas_, at = (rank * kSamples + first) / replicas_;
    return {{Tensor{x_.data() + at * kPixels, {DType::kF32, {share, 1, kSide, kSide}}}},
            {Tensor{y_.data() + at, {DType::kF32, {share, 1}}}}};
  }
  std::vector<float> statistics() {
    std::vector<float> all;
    for (const Pipeline::Owned& each : made_->buffers()) all.push_back(each.parameter->value.at(0));
    return all;
  }

 private:
  int replicas_;
  std::vector<float> x_, y_;
  std::unique_ptr<Pipeline> made_;
};

TEST_P(ReplicaStatisticsTest, AStepOfSeveralBatchesMovesRunningStatisticsOnce) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const int half = kSamples / 2, rank = comm.rank();
    for (const BatchStatistics statistics :
         {BatchStatistics::kMicroBatch, BatchStatistics::kReplicas}) {
      Steps whole(comm, statistics), parts(comm, statistics);
      const std::vector<float> before = parts.statistics();
      // Batches that are dropped leave nothing behind.
      (void)parts.pipeline().accumulate(parts.batch(half, half, rank));
      parts.pipeline().drop_gradients();
      EXPECT_EQ(parts.statistics(), before);
      (void)parts.pipeline().accumulate(parts.batch(0, half, rank));
      EXPECT_EQ(parts.statistics(), before);
      (void)parts.pipeline().forward_backward(parts.batch(half, half, rank));
      (void)parts.pipeline().optimizer_step();
      (void)whole.pipeline().train_step(whole.batch(0, kSamples, rank));
      const std::vector<float> all = whole.statistics(), moved = parts.statistics();
      ASSERT_NE(all, before);
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_NEAR(moved[i], all[i], 2e-5F * std::abs(all[i])) << i;
      }
    }
  });
}

// Its running statistics are those of the steps that count.
TEST_P(ReplicaStatisticsTest, AStepThatIsRefusedInItsLastBatchMovesNoRunningStatistics) {
  with_ranks(GetParam(), [&](Communicator& comm) {
    const int half = kSamples / 2, rank = comm.rank();
    Steps steps(comm, BatchStatistics::kMicroBatch),
        undisturbed(comm, BatchStatistics::kMicroBatch);
    const std::vector<float> before = steps.statistics();
    (void)steps.pipeline().accumulate(steps.batch(0, half, rank));
    Batch bad = steps.batch(half, half, rank);
    const float had = bad.targets[0].at(0);
    bad.targets[0].at(0) = std::nanf("");
    expect_error(ErrorCode::kNumeric, {"not finite"},
                 [&] { (void)steps.pipeline().train_step(bad); });
    EXPECT_EQ(steps.statistics(), before);
    bad.targets[0].at(0) = had;
    (void)steps.pipeline().train_step(steps.batch(0, half, rank));
    (void)undisturbed.pipeline().train_step(undisturbed.batch(0, half, rank));
    EXPECT_EQ(steps.statistics(), undisturbed.statistics());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReplicaStatisticsTest, ::testing::Values(1, 2, 3, 4, 6));

}  // namespace
}  // namespace sluice::testing
