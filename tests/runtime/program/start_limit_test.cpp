#include "runtime/program/start_limit.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using std::chrono::seconds;

TEST(StartLimitTest, EndsTheProcessAndNamesTheHostWhereTheStartTakesLonger) {
  EXPECT_EXIT(
      {
        setenv("OMPI_COMM_WORLD_RANK", "3", 1);
        const StartLimit limit("MPI_Init", std::chrono::milliseconds(20));
        while (true) ::pause();
      },
      ::testing::ExitedWithCode(11),
      "sluice: error: rank 3 on [^:]+: MPI_Init waits for other ranks");
}

TEST(StartLimitTest, DoesNothingInTimeOrWithoutALimit) {
  { const StartLimit in_time("MPI_Init", seconds(50)); }
  { const StartLimit none("MPI_Init", seconds(0)); }
}

TEST(StartLimitTest, ReadsTheEnvironmentStrictly) {
  unsetenv("SLUICE_START_TIMEOUT");
  EXPECT_EQ(start_time_limit(), seconds(60));
  setenv("SLUICE_START_TIMEOUT", "0", 1);
  EXPECT_EQ(start_time_limit(), seconds(0));
  setenv("SLUICE_START_TIMEOUT", "90", 1);
  EXPECT_EQ(start_time_limit(), seconds(90));
  for (const char* wrong : {"", "-1", "5s", " 5", "1000001", "99999999999999"}) {
    setenv("SLUICE_START_TIMEOUT", wrong, 1);
    expect_error(ErrorCode::kUsage, {"legal: seconds from 0"}, [] { (void)start_time_limit(); });
  }
  unsetenv("SLUICE_START_TIMEOUT");
}

}  // namespace
}  // namespace sluice
