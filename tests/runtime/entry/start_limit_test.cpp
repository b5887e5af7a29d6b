#include "runtime/entry/start_limit.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <string>
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
  const auto text = [&] { return network_advice(facts); };
  EXPECT_THAT(text(), HasSubstr("interfaces here: docker0 (172.17.0.1), eth0 (10.0.0.5); MPI may "
                                "have chosen docker0, which"));
  EXPECT_THAT(text(), HasSubstr("--mca btl_tcp_if_include 10.0.0.0/24"));
  facts.interfaces.erase(facts.interfaces.begin());
  EXPECT_THAT(text(), HasSubstr("a firewall"));
  EXPECT_THAT(text(), Not(HasSubstr("docker0")));
}

// What the launcher starts as a rank; /proc shows the environment that a process starts with.
class LaunchedRank {
 public:
  explicit LaunchedRank(const std::string& rank) {
    const std::string variable = "PMIX_RANK=" + rank;
    std::array<const char*, 3> environment = {"PMIX_NAMESPACE=start_limit_test", variable.c_str()};
    std::array<const char*, 3> words = {"sleep", "100"};
    EXPECT_EQ(::posix_spawnp(&process_, "sleep", nullptr, nullptr, const_cast<char**>(words.data()),
                             const_cast<char**>(environment.data())),
              0);
  }
  ~LaunchedRank() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  LaunchedRank(const LaunchedRank&) = delete;
  LaunchedRank& operator=(const LaunchedRank&) = delete;

  void stop() const {
    ::kill(process_, SIGSTOP);
    ::waitpid(process_, nullptr, WUNTRACED);
  }

 private:
  pid_t process_ = -1;
};

TEST(StartLimitTest, TheFirstRankThatIsNotStoppedNamesThoseThatAre) {
  const LaunchedRank first("0"), second("1");
  first.stop();
  EXPECT_EXIT(
      {
        setenv("PMIX_NAMESPACE", "start_limit_test", 1);
        setenv("OMPI_COMM_WORLD_RANK", "1", 1);
        setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
        for (const char* name : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
          setenv(name, "3", 1);
        }
        const StartLimit limit("MPI_Init", std::chrono::milliseconds(20));
        while (true) ::pause();
      },
      ::testing::ExitedWithCode(11),
      "sluice: error: rank 1 on [^:]+: MPI_Init waits for other ranks of the job since 0.02 s: "
      "rank "
      "0 .process [0-9]+. is stopped .state T., rank 2 does not run. SLUICE_START_TIMEOUT");
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
