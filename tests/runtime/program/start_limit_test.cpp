#include "runtime/program/start_limit.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

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

TEST(StartLimitTest, TheTextNamesInterfacesThatMpiShouldNotUse) {
  NetworkFacts facts;
  facts.interfaces = {{"docker0", "172.17.0.1", "172.17.0.0/16", 0},
                      {"eth0", "10.0.0.5", "10.0.0.0/24", 0}};
  const auto text = [&] { return waiting_text("rank 2 on node3", "MPI_Init", seconds(45), facts); };
  EXPECT_THAT(text(), HasSubstr("rank 2 on node3: MPI_Init waits for other ranks of the job since "
                                "45 s. Interfaces here: docker0 (172.17.0.1), eth0 (10.0.0.5); "
                                "MPI may have chosen docker0, which"));
  EXPECT_THAT(text(), HasSubstr("--mca btl_tcp_if_include 10.0.0.0/24"));
  facts.interfaces.erase(facts.interfaces.begin());
  EXPECT_THAT(text(), HasSubstr("a firewall"));
  EXPECT_THAT(text(), Not(HasSubstr("docker0")));
}

// Long enough for a limit that is still there to end the process.
void go_on_and_exit(int code) {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ::_exit(code);
}

TEST(StartLimitTest, DoesNothingInTimeOrWithoutALimit) {
  EXPECT_EXIT(
      {
        { const StartLimit in_time("MPI_Init", std::chrono::milliseconds(50)); }
        go_on_and_exit(7);
      },
      ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(
      {
        const StartLimit none("MPI_Init", seconds(0));
        go_on_and_exit(7);
      },
      ::testing::ExitedWithCode(7), "");
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
