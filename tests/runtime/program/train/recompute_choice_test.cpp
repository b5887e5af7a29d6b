// --recompute auto: against every setting of each rank's blocks, and of what its stages offload.
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
    return planned(model, options_);
  }
  [[nodiscard]] JobLayout planned(const TransformerConfig& model, const PipelineOptions& options) {
    ++plans_;
    JobLayout layout;
    const auto source = testing::synthetic_tokens(model);
    run_loopback(1, [&](Communicator& comm) {
      const Transformer stages(model);
      layout = PipelineAccess::plan_layout(
          comm, options,
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
    options_.devices.memory = limit;
    return choose_recompute(model_, partition_, options_,
                            [&](const TransformerConfig& model, const PipelineOptions& options) {
                              return planned(model, options);
                            });
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

// What a rank's step takes by the estimates that the remark says: of one thread and of a disk.
double seconds_of(const std::vector<double>& costs, double repeated, double moved, int rank) {
  double operations = repeated;
  for (std::size_t i = 0; i < 4; ++i)
    operations += 3 * costs[4 * static_cast<std::size_t>(rank) + i];
  return std::max(operations * 8 * 2 / 5e10, 2 * moved / 5e8);
}

// Each rank's step is as short as that of every setting that fits: of its blocks, and of how many
// micro-batches stay. Wide layers compute long enough to hide all moves, narrow ones do not.
TEST_F(RecomputeChoiceTest, EachRankOffloadsAndRecomputesWhatTakesLeast) {
  divide("gpipe", {0, 4, 8});
  options_.shape.micro_batches = 8;
  options_.offload = {.activations = PipelineOptions::Offload::To::kDisk, .directory = "/none"};
  std::set<bool> offloads, recomputes;
  for (const int width : {32, 128, 512}) {
    model_.width = width;
    std::vector<TransformerConfig> settings = all_settings();
    std::vector<std::pair<TransformerConfig, JobLayout>> layouts;
    std::size_t low = 0, high = 0;
    for (const TransformerConfig& model : settings) {
      for (const int resident : {0, 2, 3, 4, 5, 6, 7}) {
        PipelineOptions options = options_;
        options.offload.resident = {resident, resident};
        layouts.emplace_back(model, planned(model, options));
        const std::size_t most =
            std::max(total(layouts.back().second, 0), total(layouts.back().second, 1));
        low = low == 0 ? most : std::min(low, most);
        high = std::max(high, most);
      }
    }
    for (int part = 0; part <= 8; ++part) {
      SCOPED_TRACE("width " + std::to_string(width) + ", eighth " + std::to_string(part));
      const std::size_t limit = low + (high - low) * static_cast<std::size_t>(part) / 8;
      const RecomputeChoice choice = choose(limit);
      PipelineOptions options = options_;
      options.offload = choice.offload;
      const JobLayout layout = planned(choice.model, options);
      for (int rank = 0; rank < 2; ++rank) {
        const auto seconds = [&](const TransformerConfig& model, const JobLayout& of) {
          return seconds_of(layer_costs(model), cost_of(model, of, rank), moved_bytes(of, rank),
                            rank);
        };
        EXPECT_LE(total(layout, rank), limit);
        double least = std::numeric_limits<double>::max();
        for (const auto& [model, of] : layouts) {
          if (total(of, rank) <= limit) least = std::min(least, seconds(model, of));
        }
        EXPECT_LE(seconds(choice.model, layout), least * (1 + 1e-9)) << choice.remark;
        offloads.insert(moved_bytes(layout, rank) > 0);
        recomputes.insert(cost_of(choice.model, layout, rank) > 0);
      }
    }
  }
  EXPECT_EQ(offloads.size(), 2U);
  EXPECT_EQ(recomputes.size(), 2U);
}

TEST_F(RecomputeChoiceTest, OffloadsNothingWhereAllFits) {
  divide("gpipe", {0, 4, 8});
  options_.offload = {.activations = PipelineOptions::Offload::To::kDisk, .directory = "/none"};
  const RecomputeChoice choice = choose(std::size_t{1} << 40);
  EXPECT_EQ(plans_, 1);
  EXPECT_EQ(choice.offload.activations, PipelineOptions::Offload::To::kNowhere);
  EXPECT_THAT(choice.remark,
              ::testing::HasSubstr("no activations are offloaded: it fits as it is"));
  EXPECT_EQ(choice.offload.directory, "");
  options_.offload.optimizer = PipelineOptions::Offload::To::kDisk;
  const RecomputeChoice both = choose(std::size_t{1} << 40);
  EXPECT_EQ(both.offload.activations, PipelineOptions::Offload::To::kNowhere);
  EXPECT_EQ(both.offload.optimizer, PipelineOptions::Offload::To::kDisk);
  EXPECT_EQ(both.offload.directory, "/none");
  expect_error(ErrorCode::kUsage, {"no --recompute and no --offload of activations need less"},
               [&] { (void)choose(std::size_t{1} << 20); });
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
