#include "tests/benchmarks/gpu/activity.hpp"

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

TEST(KernelTimesTest, AddsUpRunsUnderReadableNamesLongestFirst) {
  const std::vector<KernelTime> times = kernel_times(
      {{0, 10, "copy"},
       {10, 40, "_ZN6sluice12_GLOBAL__N_14normIfEEvPKT_"},  // sluice::(anonymous)::norm<float>
       {40, 60, "_ZN6sluice12_GLOBAL__N_14normIdEEvPKT_"},  // sluice::(anonymous)::norm<double>
       {60, 75, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"}});
  ASSERT_EQ(times.size(), 3U);
  EXPECT_EQ(times[0].name, "norm");
  EXPECT_EQ(times[0].runs, 2);
  EXPECT_DOUBLE_EQ(times[0].seconds, 50e-9);
  EXPECT_EQ(times[1].name, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT");
  EXPECT_EQ(times[2].name, "copy");
  EXPECT_DOUBLE_EQ(times[2].seconds, 10e-9);
}

}  // namespace
}  // namespace sluice::benchmarks
