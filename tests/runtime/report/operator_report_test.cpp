#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/report/job_gpus.hpp"
#include "tests/loopback/loopback.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(OperatorReportTest, AddsUpRanksWithDifferentOperators) {
  run_loopback(3, [](Communicator& comm) {
    Collectives world(comm, 100, nullptr);
    std::vector<OperatorTime> mine = {{"add", 2, 0.5, 8, 0}};
    if (comm.rank() == 1) mine.push_back({"linear_forward", 1, 4, 100, 1e9});
    if (comm.rank() == 2) mine.clear();
    const std::vector<OperatorTime> sums = sum_operator_times(world, mine);
    ASSERT_EQ(sums.size(), 2U);
    EXPECT_EQ(sums[0].name, "linear_forward");
    EXPECT_EQ(sums[0].flops, 1e9);
    EXPECT_EQ(sums[1].name, "add");
    EXPECT_EQ(sums[1].calls, 4);
    EXPECT_EQ(sums[1].seconds, 1);
    EXPECT_EQ(sums[1].bytes, 16);
  });
}

TEST(OperatorReportTest, TheTableHasShareSpeedAndRoofline) {
  const std::vector<OperatorTime> times = {{"linear_forward", 8, 0.004, 4e9, 2e12},
                                           {"add", 4, 0.001, 2e9, 0}};
  OperatorReport report{.steps = 2, .rank_seconds = 0.01};
  const std::string plain = operator_table(times, report);
  EXPECT_THAT(plain, HasSubstr("linear_forward                            8      2.000  40.0 %"));
  EXPECT_THAT(plain, HasSubstr("500000.0    1000.0\n"));
  EXPECT_THAT(plain, HasSubstr("messages, sums, waiting, other code               2.500  50.0 %"));
  EXPECT_THAT(plain, Not(HasSubstr("roofline")));
  report.precision = MatmulPrecision::kBf16;
  report.card = CardPeaks{.bf16 = 1e15, .tf32 = 0, .fp32 = 0, .bytes = 4e12};
  const std::string shares = operator_table(times, report);
  EXPECT_THAT(shares, HasSubstr("1000.0       50.0 %\n"));  // 2 ms of arithmetic in 4
  EXPECT_THAT(shares, HasSubstr("2000.0       50.0 %\n"));  // 0.5 ms of memory in 1
}

}  // namespace
}  // namespace sluice
