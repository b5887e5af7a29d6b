#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/stage.hpp>

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Costs per stage, last stage first: the order in which ties are decided.
std::vector<double> from_the_back(const std::vector<double>& costs, const std::vector<int>& first) {
  std::vector<double> sums;
  for (size_t s = first.size() - 1; s >= 1; --s) {
    sums.push_back(std::accumulate(costs.begin() + first[s - 1], costs.begin() + first[s], 0.0));
  }
  return sums;
}

struct Best {
  double largest = std::numeric_limits<double>::infinity();
  std::vector<double> back;
};

void search(const std::vector<double>& costs, int stages, std::vector<int>& first, Best& best) {
  const int layers = static_cast<int>(costs.size());
  if (static_cast<int>(first.size()) == stages) {
    first.push_back(layers);
    const std::vector<double> back = from_the_back(costs, first);
    const double largest = *std::max_element(back.begin(), back.end());
    if (largest < best.largest || (largest == best.largest && back < best.back)) {
      best = {largest, back};
    }
    first.pop_back();
    return;
  }
  for (int begin = first.back() + 1; begin < layers; ++begin) {
    first.push_back(begin);
    search(costs, stages, first, best);
    first.pop_back();
  }
}

std::string error_of(std::string_view text, const std::vector<double>& costs, int stages) {
  try {
    (void)parse_partition(text, costs, stages);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "no error";
}

TEST(PartitionTest, FindsSmallestLargestCostAndThenTheLightestLaterStages) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int layers = 1 + static_cast<int>(random() % 9);
    const int stages = 1 + static_cast<int>(random() % static_cast<unsigned>(layers));
    std::vector<double> costs;
    for (int i = 0; i < layers; ++i) {
      costs.push_back(static_cast<double>(random() % 6));  // zeros and ties included
    }
    std::vector<int> first = {0};
    Best best;
    search(costs, stages, first, best);
    const Partition found = partition_by_cost(costs, stages);
    ASSERT_EQ(found.stages(), stages);
    EXPECT_EQ(from_the_back(costs, found.first), best.back) << "round " << round;
  }
}

TEST(PartitionTest, LeavesNoStageEmptyWhileLayersSuffice) {
  const std::vector<double> costs = {0, 0, 0, 0, 9};
  for (int stages = 1; stages <= 5; ++stages) {
    const Partition partition = partition_by_cost(costs, stages);
    for (size_t s = 0; s < static_cast<size_t>(stages); ++s) {
      EXPECT_LT(partition.first[s], partition.first[s + 1]);
    }
  }
}

TEST(PartitionTest, PutsEmptyStagesBeforeTheHead) {
  const std::vector<double> costs = {0.1, 1, 1, 0.5};
  EXPECT_THAT(partition_by_cost(costs, 6).first, ElementsAre(0, 1, 2, 3, 3, 3, 4));
  EXPECT_THAT(partition_by_cost(std::vector<double>{1, 1}, 4).first, ElementsAre(0, 1, 1, 1, 2));
}

TEST(PartitionTest, WeighsEmbeddingAndHead) {
  // A head as heavy as two blocks takes one block less.
  EXPECT_THAT(partition_by_cost(std::vector<double>{0, 1, 1, 1, 1, 2}, 2).first,
              ElementsAre(0, 4, 6));
}

TEST(PartitionTest, EvenGivesTheFirstStagesOneMore) {
  const std::vector<double> costs(7, 1.0);  // 5 blocks
  EXPECT_THAT(parse_partition("even", costs, 3).first, ElementsAre(0, 3, 5, 7));
  EXPECT_THAT(parse_partition("even", costs, 1).first, ElementsAre(0, 7));
  EXPECT_THAT(parse_partition("even", costs, 7).first, ElementsAre(0, 2, 3, 4, 5, 6, 6, 7));
}

TEST(PartitionTest, ReadsCountsOfBlocks) {
  const std::vector<double> costs(9, 1.0);  // 7 blocks
  EXPECT_THAT(parse_partition("2,3,0,2", costs, 4).first, ElementsAre(0, 3, 6, 6, 9));
  EXPECT_THAT(parse_partition("0,7", costs, 2).first, ElementsAre(0, 1, 9));
  EXPECT_EQ(parse_partition("auto", costs, 2), partition_by_cost(costs, 2));
}

TEST(PartitionTest, RefusesNamingTheTextAndWhatWouldBeLegal) {
  const std::vector<double> costs(6, 1.0);  // 4 blocks
  EXPECT_THAT(error_of("2,3", costs, 2),
              AllOf(HasSubstr("2,3"), HasSubstr("add up to 5"), HasSubstr("4 blocks")));
  EXPECT_THAT(error_of("2,2", costs, 3), HasSubstr("2 counts for 3 stages"));
  EXPECT_THAT(error_of("2,,2", costs, 3), HasSubstr("'' is not a count"));
  EXPECT_THAT(error_of("2,2,", costs, 2), HasSubstr("'' is not a count"));
  EXPECT_THAT(error_of("-1,5", costs, 2), HasSubstr("'-1' is not a count"));
  EXPECT_THAT(error_of("1x,3", costs, 2), HasSubstr("'1x' is not a count"));
  EXPECT_THAT(error_of("99999999999,3", costs, 2), HasSubstr("is not a count"));
  EXPECT_THAT(error_of("2147483647,2147483647", costs, 2), HasSubstr("add up to 4294967294"));
  EXPECT_THAT(error_of("balanced", costs, 2), HasSubstr("auto, even"));
  EXPECT_THAT(error_of("", costs, 1), HasSubstr("is not a count"));
  EXPECT_THAT(error_of("auto", costs, 0), HasSubstr("0 stages"));
  EXPECT_THAT(error_of("even", {}, 2), HasSubstr("a partition of 0 layers by their costs; legal"));
  EXPECT_THAT(error_of("auto", {1.0}, 2), HasSubstr("a partition of 1 layers by their costs"));
  EXPECT_THROW((void)partition_by_cost(std::vector<double>{1}, 2), Error);
  EXPECT_THAT(error_of("auto", {1, -5, 1}, 2),
              HasSubstr("layer 1 costs -5; legal are numbers from 0"));
  EXPECT_THAT(error_of("auto", {1, 1, std::nan("")}, 2), HasSubstr("layer 2 costs nan"));
}

TEST(PartitionTest, PlansManyLayersQuickly) {
  const std::vector<double> costs(1026, 1.0);
  const Partition partition = partition_by_cost(costs, 512);
  EXPECT_EQ(partition.first.back(), 1026);
}

}  // namespace
}  // namespace sluice
