#include "runtime/report/stragglers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Seconds of a rank in a step, before noise.
using Seconds = std::function<double(int rank, int step)>;

std::vector<Straggler> run(Stragglers& stragglers, int ranks, int steps, const Seconds& seconds,
                           unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> noise(1, 0.05);
  std::vector<Straggler> all;
  for (int step = 0; step < steps; ++step) {
    std::vector<double> busy;
    for (int rank = 0; rank < ranks; ++rank) {
      // One in twenty steps meets something else that the machine does.
      const double other = random() % 20 == 0 ? 3 : 1;
      busy.push_back(seconds(rank, step) * noise(random) * other);
    }
    for (const Straggler& each : stragglers.step(busy)) all.push_back(each);
  }
  return all;
}

const std::vector<int> kTwoReplicas = {0, 1, 0, 1};

TEST(StragglersTest, NameARankAtFourFifthsOfTheSpeedOfItsReplica) {
  Stragglers stragglers(kTwoReplicas);
  const auto found =
      run(stragglers, 4, 205, [](int rank, int) { return rank == 2 ? 0.0125 : 0.01; });
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].rank, 2);
  EXPECT_TRUE(found[0].of_replicas);
  EXPECT_NEAR(found[0].factor, 1.25, 0.04);
  EXPECT_THAT(stragglers.now(), ElementsAre(2));
}

TEST(StragglersTest, NameARankThatBecomesSlowerThanItWas) {
  Stragglers stragglers({0, 1, 2});
  const auto found = run(stragglers, 3, 450, [](int rank, int step) {
    return rank == 1 && step > 250 ? 0.0125 : 0.01;
  });
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].rank, 1);
  EXPECT_FALSE(found[0].of_replicas);
}

TEST(StragglersTest, ForgetARankThatRecovers) {
  Stragglers stragglers(kTwoReplicas);
  (void)run(stragglers, 4, 600,
            [](int rank, int step) { return rank == 2 && step < 300 ? 0.0125 : 0.01; });
  EXPECT_THAT(stragglers.now(), IsEmpty());
}

TEST(StragglersTest, NameNobodyWhereAllAreEquallySlowOrStagesDiffer) {
  Stragglers slower({0, 1, 2});
  EXPECT_THAT(run(slower, 3, 600, [](int, int step) { return step > 250 ? 0.02 : 0.01; }),
              IsEmpty());
  Stragglers uneven(kTwoReplicas);
  EXPECT_THAT(run(uneven, 4, 600, [](int rank, int) { return rank % 2 == 0 ? 0.03 : 0.01; }),
              IsEmpty());
}

TEST(StragglersTest, NeverNameTheOnlyRank) {
  Stragglers stragglers({0});
  EXPECT_THAT(run(stragglers, 1, 600, [](int, int step) { return step > 250 ? 0.02 : 0.01; }),
              IsEmpty());
}

TEST(StragglersTest, NameNobodyInQuietRuns) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    Stragglers stragglers(kTwoReplicas);
    EXPECT_THAT(run(
                    stragglers, 4, 1000, [](int, int) { return 0.01; }, seed),
                IsEmpty())
        << seed;
  }
}

// Ranks that outnumber their cores take turns as the system likes.
TEST(StragglersTest, NameNobodyThatSharesItsCores) {
  Stragglers stragglers({0, 1, Stragglers::kShared, Stragglers::kShared});
  EXPECT_THAT(run(stragglers, 4, 600, [](int rank, int) { return rank >= 2 ? 0.02 : 0.01; }),
              IsEmpty());
}

TEST(StragglersTest, NameNobodyForOnePause) {
  Stragglers stragglers(kTwoReplicas);
  EXPECT_THAT(run(stragglers, 4, 600,
                  [](int rank, int step) { return rank == 1 && step % 200 < 5 ? 2 : 0.01; }),
              IsEmpty());
}

}  // namespace
}  // namespace sluice
