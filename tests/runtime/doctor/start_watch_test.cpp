#include "runtime/doctor/start_watch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace sluice {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(StartWatchTest, EndsTheProcessWithItsTextInTime) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const StartWatch watch(0.01, [] { return std::string("nobody answers"); });
        std::mutex mutex;
        std::unique_lock lock(mutex);
        std::condition_variable().wait(lock, [] { return false; });
      },
      ::testing::ExitedWithCode(11), "sluice: error: nobody answers\n");
}

TEST(StartWatchTest, DoesNothingOnceStopped) {
  StartWatch watch(3600, []() -> std::string { std::abort(); });
  watch.stop();
  watch.stop();
}

TEST(StartWatchTest, TheTextNamesInterfacesThatMpiShouldNotUse) {
  NetworkFacts facts;
  facts.interfaces = {{"docker0", "172.17.0.1", "172.17.0.0/16", 0},
                      {"eth0", "10.0.0.5", "10.0.0.0/24", 0}};
  const std::string text = no_start_text("alpha", 45, facts);
  EXPECT_THAT(text, HasSubstr("alpha: MPI has not started within 45 s"));
  EXPECT_THAT(text, HasSubstr("docker0 (172.17.0.1), eth0 (10.0.0.5)"));
  EXPECT_THAT(text, HasSubstr("MPI may have chosen docker0, which"));
  EXPECT_THAT(text, HasSubstr("--mca btl_tcp_if_include 10.0.0.0/24"));
  facts.interfaces.erase(facts.interfaces.begin());
  EXPECT_THAT(no_start_text("alpha", 45, facts), HasSubstr("a firewall"));
  EXPECT_THAT(no_start_text("alpha", 45, facts), Not(HasSubstr("docker0")));
}

}  // namespace
}  // namespace sluice
