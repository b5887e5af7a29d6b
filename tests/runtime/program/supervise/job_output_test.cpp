#include "runtime/program/supervise/job_output.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The output goes into a file that has no name.
class JobOutputTest : public ::testing::Test {
 public:
  ~JobOutputTest() override { std::fclose(file_); }

 protected:
  void feed(std::string_view text) { add(out_.feed(text)); }
  void finish() { add(out_.finish()); }
  void add(const std::vector<JobEvent>& found) {
    events.insert(events.end(), found.begin(), found.end());
  }
  // All that was shown so far.
  std::string shown() {
    while (out_.fd() >= 0) out_.write_some();
    std::string text(static_cast<std::size_t>(::lseek(::fileno(file_), 0, SEEK_END)), ' ');
    (void)!::pread(::fileno(file_), text.data(), text.size(), 0);
    return text;
  }

  std::FILE* file_ = std::tmpfile();
  JobOutput out_{::fileno(file_)};
  std::vector<JobEvent> events;
};

TEST_F(JobOutputTest, ShowsLinesAndHidesEvents) {
  feed("hello\nsluice-event {\"event\":\"start\",\"step\":7}\nwor");
  EXPECT_EQ(shown(), "hello\n");
  feed("ld\nlast");
  finish();
  EXPECT_EQ(shown(), "hello\nworld\nlast\n");
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].kind, JobEvent::Kind::kStart);
  EXPECT_EQ(events[0].step, 7U);
}

TEST_F(JobOutputTest, ReadsEventsInAnyPieces) {
  const std::string line = "sluice-event {\"event\":\"step\",\"step\":12,\"seconds\":3.5}\n";
  for (std::size_t cut = 0; cut <= line.size(); ++cut) {
    events.clear();
    feed(line.substr(0, cut));
    feed(line.substr(cut));
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].seconds, 3.5);
  }
  EXPECT_THAT(shown(), IsEmpty());
}

TEST_F(JobOutputTest, ReadsReports) {
  feed(
      "[1,0]<stderr>:sluice-event "
      "{\"event\":\"hang\",\"kind\":\"lost\",\"hosts\":[\"node3\"],\"ranks\":[2],\"step\":1207}\n"
      "sluice-event {\"event\":\"hang\",\"kind\":\"ended\",\"ranks\":[1]}\n");
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].kind, JobEvent::Kind::kHang);
  EXPECT_EQ(events[0].hang, JobEvent::Hang::kLost);
  EXPECT_THAT(events[0].hosts, ElementsAre("node3"));
  EXPECT_THAT(events[0].ranks, ElementsAre(2));
  EXPECT_EQ(events[1].hang, JobEvent::Hang::kEnded);
  EXPECT_THAT(shown(), IsEmpty());
}

TEST_F(JobOutputTest, ReadsAnEventBehindAPartOfAnotherLine) {
  feed("  sasluice-event {\"event\":\"start\",\"step\":8}\nafter\n");
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].step, 8U);
  feed("a text of sluice-event {}\n");
  EXPECT_EQ(shown(), "  sa\nafter\na text of sluice-event {}\n");
}

TEST_F(JobOutputTest, PassesOverEventsThatAreNone) {
  for (const char* json :
       {"{}", "{", "{\"event\":\"other\"}", "{\"event\":1}", "{\"event\":\"step\",\"step\":-1}",
        "{\"event\":\"step\",\"step\":1.5}", "{\"event\":\"step\",\"step\":\"1\"}",
        "{\"event\":\"step\",\"step\":1,\"seconds\":-1}",
        "{\"event\":\"hang\",\"kind\":\"lost\",\"hosts\":[1]}",
        "{\"event\":\"hang\",\"kind\":\"lost\",\"hosts\":\"x\"}",
        "{\"event\":\"hang\",\"kind\":\"new\"}", "{\"event\":\"hang\"}",
        "{\"event\":\"save\",\"step\":1}sluice-event {"}) {
    feed(std::string("sluice-event ") + json + "\n");
    EXPECT_THAT(events, IsEmpty()) << json;
  }
  EXPECT_FALSE(parse_event("[1]"));
}

TEST_F(JobOutputTest, ShowsTheLaunchersWordsAsTheyAre) {
  const std::string said = std::string(74, '-') + "\nThere are not enough slots\n\n" +
                           std::string(74, '-') + "\nmpirun: Forwarding signal 10 to job\n" +
                           std::string(1, '\0') + "\n";
  feed(said);
  EXPECT_EQ(shown(), said);
}

TEST_F(JobOutputTest, ShowsALineWithoutAnEndInPieces) {
  const std::string piece(50000, 'y');
  for (int i = 0; i < 10; ++i) feed(piece);
  EXPECT_GT(shown().size(), 400000U);
  feed("\nafter\n");
  EXPECT_TRUE(shown().ends_with("y\nafter\n"));
  EXPECT_EQ(shown().size(), 10 * piece.size() + 7);
}

TEST_F(JobOutputTest, TakesNoMoreWhereNobodyReads) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  JobOutput out(ends[1]);
  const std::string line(std::string(999, 'x') + "\n");
  while (!out.full()) (void)out.feed(line);
  ::close(ends[0]);
  ::signal(SIGPIPE, SIG_IGN);
  out.flush(-1);  // a reader that is gone: nothing waits
  EXPECT_EQ(out.fd(), -1);
  ::close(ends[1]);
}

}  // namespace
}  // namespace sluice::testing
