// Launchers that do not return, with small limits. tests/faults/supervised_jobs.py has the rest.
#include "runtime/program/supervise/job_watch.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace sluice::testing {
namespace {

// Longer than any test lasts: reaching it fails the test by ctest's time-out.
constexpr double kNever = 1e6;
const std::string kStays = "while :; do sleep 0.01; done";
const std::string kHang =
    R"(echo 'sluice-event {"event":"hang","kind":"lost","hosts":["node3"],"ranks":[2],"step":7}' >&2; )";
const std::string kEnded =
    R"(echo 'sluice-event {"event":"hang","kind":"ended","hosts":["node2"],"ranks":[1]}' >&2; )";

class JobWatchTest : public ::testing::Test {
 public:
  ~JobWatchTest() override { ::close(null_); }

 protected:
  Attempt watch(const std::string& script, const WatchOptions& options) {
    const std::string path = std::string("PATH=") + std::getenv("PATH");
    JobProcess job({"sh", "-c", script}, {path}, kNever);
    return watch_job(job, stops_, out_, options);
  }

  int null_ = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  StopRequests stops_;
  JobOutput out_{null_};
};

TEST_F(JobWatchTest, EndsALauncherThatDoesNotReturnAfterAReport) {
  const Attempt attempt = watch(kHang + kStays, {.after_hang = 0.05, .after_end = kNever});
  EXPECT_EQ(attempt.end.code, 11);
  EXPECT_FALSE(attempt.end.by_signal);
  ASSERT_TRUE(attempt.hang);
  EXPECT_EQ(attempt.hang->step, 7U);
}

TEST_F(JobWatchTest, KillsOneThatIgnoresSigterm) {
  const Attempt attempt =
      watch("trap '' TERM; " + kHang + kStays, {.after_hang = 0.05, .after_end = kNever});
  EXPECT_EQ(attempt.end.code, 11);
}

TEST_F(JobWatchTest, EndsALauncherThatDoesNotReturnAfterARankEnded) {
  const Attempt attempt = watch(kEnded + kStays, {.after_hang = kNever, .after_end = 0.05});
  EXPECT_EQ(attempt.end.code, 11);
  ASSERT_TRUE(attempt.ended);
  EXPECT_EQ(attempt.ended->hosts.front(), "node2");
}

TEST_F(JobWatchTest, GivesAHangLessTimeThanARankThatEnded) {
  const Attempt attempt = watch(kEnded + kHang + kStays, {.after_hang = 0.05, .after_end = kNever});
  EXPECT_EQ(attempt.end.code, 11);
  EXPECT_TRUE(attempt.hang);
}

TEST_F(JobWatchTest, KeepsTheCodeOfALauncherThatReturns) {
  const Attempt attempt = watch(kHang + "exit 9", {.after_hang = kNever, .after_end = kNever});
  EXPECT_EQ(attempt.end.code, 9);
  EXPECT_TRUE(attempt.hang);
}

}  // namespace
}  // namespace sluice::testing
