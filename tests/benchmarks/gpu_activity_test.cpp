#include "tests/benchmarks/gpu_activity.hpp"

#include <gtest/gtest.h>

namespace sluice::benchmarks {
namespace {

TEST(CoverageTest, NothingIsNeitherLongNorIdle) {
  const Coverage none = coverage_of({});
  EXPECT_EQ(none.span, 0);
  EXPECT_EQ(none.idle_share(), 0);
  EXPECT_EQ(coverage_of({{7, 7}}).idle_share(), 0);
}

TEST(CoverageTest, CountsOverlapsOnceAndGapsAsIdle) {
  // 10 to 30 and 40 to 50 are covered, of 10 to 50.
  const Coverage coverage = coverage_of({{40, 50}, {10, 20}, {15, 30}, {16, 18}});
  EXPECT_DOUBLE_EQ(coverage.span, 40e-9);
  EXPECT_DOUBLE_EQ(coverage.covered, 30e-9);
  EXPECT_DOUBLE_EQ(coverage.idle_share(), 0.25);
}

TEST(CoverageTest, IntervalsThatTouchLeaveNoGap) {
  EXPECT_DOUBLE_EQ(coverage_of({{20, 30}, {10, 20}, {30, 31}}).idle_share(), 0);
}

TEST(CoverageTest, ALongIntervalHidesGapsUnderIt) {
  EXPECT_DOUBLE_EQ(coverage_of({{0, 100}, {10, 20}, {30, 40}}).idle_share(), 0);
  EXPECT_DOUBLE_EQ(coverage_of({{10, 20}, {0, 15}, {80, 100}, {90, 95}}).idle_share(), 0.6);
}

TEST(CoverageTest, TimesOfADayKeepTheirNanoseconds) {
  constexpr std::uint64_t kNow = 1'700'000'000'000'000'000;
  EXPECT_DOUBLE_EQ(coverage_of({{kNow, kNow + 1}, {kNow + 3, kNow + 4}}).idle_share(), 0.5);
}

}  // namespace
}  // namespace sluice::benchmarks
