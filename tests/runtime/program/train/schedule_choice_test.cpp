#include "runtime/program/train/schedule_choice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <sluice/schedule.hpp>
#include <sluice/schedule_file.hpp>
#include <sluice/simulate.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

TrainOptions options_for(const char* schedule, int layers, int micro_batches) {
  TrainOptions options;
  options.pipeline.order.schedule = schedule;
  options.model.layers = layers;
  options.pipeline.shape.micro_batches = micro_batches;
  return options;
}

ScheduleChoice chosen(const TrainOptions& options, int ranks) {
  ScheduleChoice result;
  std::set<std::string> answers;
  std::mutex mutex;
  run_loopback(ranks, [&](Communicator& comm) {
    Collectives world(comm, 0, nullptr);
    const ScheduleChoice mine = choose_schedule(options, ranks, world);
    const std::lock_guard guard(mutex);
    if (mine.order != nullptr) answers.insert(to_schedule_json(*mine.order));
    result = mine;
  });
  EXPECT_LE(answers.size(), 1U) << "the ranks disagree";
  return result;
}

TEST(ScheduleChoiceTest, ANamedScheduleIsGeneratedLater) {
  const ScheduleChoice result = chosen(options_for("zb-v", 6, 4), 3);
  EXPECT_EQ(result.order, nullptr);
  EXPECT_EQ(result.partition.stages(), 6);
}

TEST(ScheduleChoiceTest, ASearchedOrderHoldsNoMoreThan1f1bAndIsFaster) {
  const TrainOptions options = options_for("auto", 8, 8);
  const ScheduleChoice result = chosen(options, 4);
  ASSERT_NE(result.order, nullptr);
  EXPECT_EQ(check(*result.order), std::nullopt);
  EXPECT_TRUE(is_exact(*result.order));
  EXPECT_EQ(result.order->micro_batches, 8);
  EXPECT_EQ(result.partition.stages(), result.order->placement.stages());
  EXPECT_EQ(result.partition.first.back(), 10);  // embedding, blocks, head
  const int chunks = result.order->placement.stages() / 4;
  for (const int peak : peak_in_flight(*result.order)) EXPECT_LE(peak, 4 * chunks);
  EXPECT_THAT(result.remark, ::testing::StartsWith("schedule auto: "));

  const std::vector<double> costs = layer_costs(options.model);
  const auto step = [&](const Schedule& order, const Partition& partition) {
    SimulationTimes times;
    for (int s = 0; s < partition.stages(); ++s) {
      double cost = 0;
      for (int i = partition.first[static_cast<std::size_t>(s)];
           i < partition.first[static_cast<std::size_t>(s) + 1]; ++i) {
        cost += costs[static_cast<std::size_t>(i)];
      }
      times.stages.push_back({.forward = cost, .backward_input = cost, .backward_weight = cost});
    }
    return simulate(order, times).makespan;
  };
  EXPECT_LT(step(*result.order, result.partition),
            step(generate("1f1b", {.ranks = 4, .micro_batches = 8}), partition_by_cost(costs, 4)));
}

// Narrow layers compute too little to hide moves, so the promise is a longer step.
TEST(ScheduleChoiceTest, ASearchedOrderCountsWhatIsOffloaded) {
  TrainOptions options = options_for("auto", 8, 8);
  const ScheduleChoice keeping = chosen(options, 4);
  options.pipeline.offload = {.activations = PipelineOptions::Offload::To::kDisk,
                              .directory = "/none"};
  const ScheduleChoice offloading = chosen(options, 4);
  ASSERT_NE(offloading.order, nullptr);
  EXPECT_GT(offloading.promise->bubble, keeping.promise->bubble);
  EXPECT_THAT(offloading.remark, ::testing::HasSubstr("; moves by an estimate of 0.5 GB/s"));
}

// A whole block runs again ahead of the wait for its gradient, attention does not.
TEST(ScheduleChoiceTest, ALayersTimesSayWhatCanRunAheadOfAWait) {
  TransformerConfig model{.layers = 3, .heads = 2, .width = 32, .context = 16};
  model.recompute_blocks = {Recompute::kBlock, Recompute::kAttention, Recompute::kNone};
  const std::vector<StageTimes> times = layer_times(model);
  const std::vector<double> again = recompute_costs(model);
  ASSERT_GT(again[1], 0);
  EXPECT_EQ(times[1].recompute, again[1]);
  for (const std::size_t layer : {0UL, 2UL, 3UL, 4UL})
    EXPECT_EQ(times[layer].recompute, 0) << layer;
}

// A head of 3.3 blocks weighs less beside blocks that backward runs again in part.
TEST(ScheduleChoiceTest, WhatIsRecomputedCountsWhereLayersAreCut) {
  TrainOptions options = options_for("1f1b", 6, 4);
  options.model.vocabulary = 43 * options.model.width;
  const std::vector<double> costs = layer_costs(options.model);
  const auto blocks_of_last = [&] {
    const Partition partition = chosen(options, 2).partition;
    return partition.first[2] - partition.first[1];
  };
  const int keeping = blocks_of_last();
  options.model.recompute = Recompute::kBlock;
  EXPECT_GT(blocks_of_last(), keeping);
}

// Two shards deal the positions: two matrices of a block gather and scatter in each direction.
TEST(ScheduleChoiceTest, KnowsWhatTensorRanksWouldExchange) {
  const TransformerConfig model{.layers = 2, .heads = 2, .width = 32, .context = 16};
  ComputeContext compute(Device{}, 1);
  const std::vector<TensorSpec> tokens = {{DType::kI32, Shape{3, 16}}};
  const auto dealt = layer_collectives(model, 1, true, tokens, compute);
  ASSERT_EQ(dealt.size(), 4U);
  EXPECT_EQ(dealt[1], dealt[2]);
  static constexpr std::uint64_t kStream = 3 * 16 * 32 * sizeof(float);
  const auto is = [](const std::vector<PlannedCollective>& list, CollectiveKind first,
                     CollectiveKind second) {
    ASSERT_EQ(list.size(), 4U);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(list[i].kind, i % 2 == 0 ? first : second);
      EXPECT_EQ(list[i].bytes, kStream);
    }
  };
  is(dealt[1].forward, CollectiveKind::kAllGather, CollectiveKind::kReduceScatter);
  is(dealt[1].backward_input, CollectiveKind::kAllGather, CollectiveKind::kReduceScatter);
  EXPECT_EQ(layer_collectives(model, 8, true, tokens, compute)[1], dealt[1]) << "of all parts";
  const auto whole = layer_collectives(model, 1, false, tokens, compute);
  ASSERT_EQ(whole[1].forward.size(), 2U);
  EXPECT_EQ(whole[1].forward[0].kind, CollectiveKind::kSum);
  EXPECT_EQ(whole[1].forward[0].bytes, kStream);
}

TEST(ScheduleChoiceTest, MoreRanksThanLayersAreRefused) {
  expect_error(ErrorCode::kUsage, {"--schedule: auto", "at most 3 ranks"}, [] {
    run_loopback(1, [](Communicator& comm) {
      Collectives world(comm, 0, nullptr);
      (void)choose_schedule(options_for("auto", 1, 2), 4, world);
    });
  });
}

}  // namespace
}  // namespace sluice
