// --recompute auto: against every setting of each rank's blocks.
#include "runtime/program/train/recompute_choice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <sluice/options.hpp>

#include "runtime/pipeline/pipeline_access.hpp"
#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"

namespace sluice {
namespace {

// Of blocks that are all alike, on two ranks that one process plans.
class RecomputeChoiceTest : public ::testing::Test {
 protected:
  RecomputeChoiceTest() {
    model_ = {.layers = 6, .heads = 2, .width = 64, .context = 128, .vocabulary = 64};
    options_.shape = {.pipeline = 2, .micro_batches = 4, .micro_batch_size = 2};
  }
  void divide(const char* schedule, std::vector<int> first) {
    options_.order.schedule = schedule;
    partition_ = {std::move(first)};
  }

  [[nodiscard]] JobLayout planned(const TransformerConfig& model) {
    ++plans_;
    JobLayout layout;
    const auto source = testing::synthetic_tokens(model);
    run_loopback(1, [&](Communicator& comm) {
      const Transformer stages(model);
      layout = PipelineAccess::plan_layout(
          comm, options_,
          [&](const StagePlace& place) { return stages.stage_of(partition_, place.stage); },
          *source, MemoryLimit::kIsIgnored);
    });
    return layout;
  }
  [[nodiscard]] std::size_t total(const JobLayout& layout, int rank) const {
    return layout.memory.ranks[static_cast<std::size_t>(rank)].total();
  }
  [[nodiscard]] RecomputeChoice choose(std::size_t limit) {
    plans_ = 0;
    return choose_recompute(model_, partition_, limit,
                            [&](const TransformerConfig& model) { return planned(model); });
  }
  // What backward computes again of stages of `rank`.
  [[nodiscard]] double cost_of(const TransformerConfig& model, const JobLayout& layout, int rank) {
    const std::vector<double> costs = recompute_costs(model);
    double sum = 0;
    for (const int stage : layout.plans.placement().stages_of(rank)) {
      for (int i = partition_.first[static_cast<std::size_t>(stage)];
           i < partition_.first[static_cast<std::size_t>(stage) + 1]; ++i) {
        sum += costs[static_cast<std::size_t>(i)];
      }
    }
    return sum;
  }

  // [setting] Blocks in the same order on both stages of three, each count of both kinds.
  [[nodiscard]] std::vector<TransformerConfig> all_settings() const {
    std::vector<TransformerConfig> all;
    for (int block = 0; block <= 3; ++block) {
      for (int attention = 0; attention + block <= 3; ++attention) {
        TransformerConfig& model = all.emplace_back(model_);
        for (int i = 0; i < model.layers; ++i) {
          model.recompute_blocks.push_back(i % 3 >= 3 - block               ? Recompute::kBlock
                                           : i % 3 >= 3 - block - attention ? Recompute::kAttention
                                                                            : Recompute::kNone);
        }
      }
    }
    return all;
  }

  TransformerConfig model_;
  PipelineOptions options_;
  Partition partition_;
  int plans_ = 0;
};

TEST_F(RecomputeChoiceTest, WhatFitsIsKept) {
  divide("1f1b", {0, 4, 8});
  const RecomputeChoice choice = choose(std::size_t{1} << 40);
  EXPECT_EQ(plans_, 1);
  EXPECT_EQ(recompute_costs(choice.model), std::vector<double>(8, 0.0));
  EXPECT_THAT(choice.remark, ::testing::HasSubstr("recompute auto: none; at most"));
}

// From what the least setting needs to what keeping all needs.
TEST_F(RecomputeChoiceTest, EachRankRecomputesTheLeastThatFits) {
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1"}) {
    divide(schedule, {0, 4, 8});
    const std::vector<TransformerConfig> settings = all_settings();
    std::vector<JobLayout> layouts;
    std::vector<std::size_t> least(2, std::numeric_limits<std::size_t>::max()), most(2);
    for (const TransformerConfig& model : settings) {
      layouts.push_back(planned(model));
      for (int rank = 0; rank < 2; ++rank) {
        auto& low = least[static_cast<std::size_t>(rank)];
        auto& high = most[static_cast<std::size_t>(rank)];
        low = std::min(low, total(layouts.back(), rank));
        high = std::max(high, total(layouts.back(), rank));
      }
    }
    const std::size_t low = *std::ranges::max_element(least);
    const std::size_t high = *std::ranges::max_element(most);
    std::set<std::vector<Recompute>> chosen;
    for (int part = 0; part <= 10; ++part) {
      const std::size_t limit = low + (high - low) * static_cast<std::size_t>(part) / 10;
      SCOPED_TRACE(std::string(schedule) + ", tenth " + std::to_string(part));
      const RecomputeChoice choice = choose(limit);
      EXPECT_LE(plans_, 8);
      chosen.insert(choice.model.recompute_blocks);
      const JobLayout layout = planned(choice.model);
      for (int rank = 0; rank < 2; ++rank) {
        EXPECT_LE(total(layout, rank), limit);
        double cheapest = std::numeric_limits<double>::max();
        for (std::size_t i = 0; i < settings.size(); ++i) {
          if (total(layouts[i], rank) > limit) continue;
          cheapest = std::min(cheapest, cost_of(settings[i], layout, rank));
        }
        EXPECT_EQ(cost_of(choice.model, layout, rank), cheapest) << choice.remark;
      }
    }
    EXPECT_GE(chosen.size(), 3U);
  }
}

// The chunks of a rank hold unequal numbers of micro-batches. The head is alone.
TEST_F(RecomputeChoiceTest, FitsWhereARankHasSeveralStages) {
  divide("interleaved", {0, 3, 5, 7, 8});
  const std::size_t all = total(planned(model_), 0);
  model_.recompute = Recompute::kBlock;
  const std::size_t least = total(planned(model_), 0);
  model_.recompute = Recompute::kNone;
  ASSERT_LT(least, all);
  const std::size_t limit = least + (all - least) / 3;
  const JobLayout layout = planned(choose(limit).model);
  for (int rank = 0; rank < 2; ++rank) EXPECT_LE(total(layout, rank), limit);
}

TEST_F(RecomputeChoiceTest, NamesTheLeastAndItsLargestPart) {
  divide("1f1b", {0, 4, 8});
  expect_error(ErrorCode::kUsage,
               {"--memory: 1.0 MiB a rank", "MiB are needed on pipeline rank 0", "most of it for ",
                "no --recompute needs less"},
               [&] { (void)choose(std::size_t{1} << 20); });
}

}  // namespace
}  // namespace sluice
