#include "runtime/launch/job_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kFrame = std::string(74, '-') + "\n";

struct Reader {
  explicit Reader(bool verbose = false)
      : text(
            verbose, [this](std::string_view piece) { shown += piece; },
            [this](const JobEvent& event) { events.push_back(event); }) {}
  std::string shown;
  std::vector<JobEvent> events;
  JobText text;
};

TEST(JobTextTest, ShowsLinesAndHidesEvents) {
  Reader reader;
  reader.text.feed("hello\nsluice-event {\"event\":\"start\",\"step\":7}\nwor", 0);
  EXPECT_EQ(reader.shown, "hello\n");
  reader.text.feed("ld\nlast", 0);
  reader.text.finish();
  EXPECT_EQ(reader.shown, "hello\nworld\nlast\n");
  ASSERT_EQ(reader.events.size(), 1U);
  EXPECT_EQ(reader.events[0].kind, JobEvent::Kind::kStart);
  EXPECT_EQ(reader.events[0].step, 7U);
}

TEST(JobTextTest, ReadsEventsInAnyPieces) {
  const std::string line = "sluice-event {\"event\":\"step\",\"step\":12,\"seconds\":3.5}\n";
  for (std::size_t cut = 0; cut <= line.size(); ++cut) {
    Reader reader;
    reader.text.feed(line.substr(0, cut), 0);
    reader.text.feed(line.substr(cut), 0);
    ASSERT_EQ(reader.events.size(), 1U);
    EXPECT_EQ(reader.events[0].seconds, 3.5);
    EXPECT_THAT(reader.shown, IsEmpty());
  }
}

TEST(JobTextTest, ReadsAHang) {
  Reader reader;
  reader.text.feed(
      "[1,0]<stderr>:sluice-event "
      "{\"event\":\"hang\",\"kind\":\"lost\",\"hosts\":[\"node3\"],\"ranks\":[2],\"step\":1207}\n",
      0);
  ASSERT_EQ(reader.events.size(), 1U);
  EXPECT_EQ(reader.events[0].kind, JobEvent::Kind::kHang);
  EXPECT_FALSE(reader.events[0].deadlock);
  EXPECT_THAT(reader.events[0].hosts, ElementsAre("node3"));
  EXPECT_THAT(reader.events[0].ranks, ElementsAre(2));
}

TEST(JobTextTest, ReadsAnEventBehindAPartOfAnotherLine) {
  Reader reader;
  reader.text.feed("  sasluice-event {\"event\":\"start\",\"step\":8}\nafter\n", 0);
  ASSERT_EQ(reader.events.size(), 1U);
  EXPECT_EQ(reader.events[0].step, 8U);
  EXPECT_EQ(reader.shown, "  sa\nafter\n");
  reader.text.feed("a text of sluice-event {}\n", 0);
  EXPECT_EQ(reader.shown, "  sa\nafter\na text of sluice-event {}\n");
}

TEST(JobTextTest, PassesOverEventsThatAreNone) {
  for (const char* json :
       {"{}", "{", "{\"event\":\"other\"}", "{\"event\":1}", "{\"event\":\"step\",\"step\":-1}",
        "{\"event\":\"step\",\"step\":1.5}", "{\"event\":\"step\",\"step\":\"1\"}",
        "{\"event\":\"step\",\"step\":1,\"seconds\":-1}", "{\"event\":\"hang\",\"hosts\":[1]}",
        "{\"event\":\"hang\",\"hosts\":\"x\"}", "{\"event\":\"save\",\"step\":1}sluice-event {"}) {
    Reader reader;
    reader.text.feed(std::string("sluice-event ") + json + "\n", 0);
    EXPECT_THAT(reader.events, IsEmpty()) << json;
  }
}

TEST(JobTextTest, HidesTheLaunchersBlocksAndReadsThem) {
  Reader reader;
  reader.text.feed(
      kFrame +
          "Primary job  terminated normally, but 1 process returned\na non-zero exit code. Per "
          "user-direction, the job has been aborted.\n" +
          kFrame + "sluice: error: x [rank 1]\n" + kFrame +
          "mpirun noticed that process rank 1 with PID 121 on node node2 exited on signal 9 "
          "(Killed).\n" +
          kFrame +
          "[node1:12] 3 more processes have sent help message help-mpi-api.txt / mpi-abort\n"
          "mpirun: Forwarding signal 10 to job\nmpiexec: Forwarding signal 12 to job\n",
      0);
  reader.text.finish();
  EXPECT_EQ(reader.shown, "sluice: error: x [rank 1]\n");
  const JobFindings& found = reader.text.findings();
  EXPECT_TRUE(found.launcher_ends);
  EXPECT_EQ(found.error, "sluice: error: x [rank 1]");
  ASSERT_TRUE(found.killed);
  EXPECT_EQ(found.killed->rank, 1);
  EXPECT_EQ(found.killed->host, "node2");
  EXPECT_EQ(found.killed->signal, 9);
  EXPECT_THAT(reader.text.explanation(), HasSubstr("terminated normally"));
}

TEST(JobTextTest, ReadsTheFilledLinesOfOpenMpi5) {
  Reader reader;
  reader.text.feed(kFrame +
                       "prterun noticed that process rank 1 with PID 32405 on node vm exited on\n"
                       "signal 9 (Killed).\n" +
                       kFrame,
                   0);
  const JobFindings& found = reader.text.findings();
  EXPECT_TRUE(found.launcher_ends);
  ASSERT_TRUE(found.killed);
  EXPECT_EQ(found.killed->rank, 1);
  EXPECT_EQ(found.killed->host, "vm");
  EXPECT_EQ(found.killed->signal, 9);
}

TEST(JobTextTest, ShowsThemWhereAsked) {
  Reader reader(true);
  const std::string said =
      kFrame + "mpirun noticed that process rank 0 with PID 1 on node a exited on signal 6.\n" +
      kFrame;
  reader.text.feed(said + "sluice-event {\"event\":\"start\",\"step\":0}\n", 0);
  EXPECT_EQ(reader.shown, said);
  EXPECT_TRUE(reader.text.findings().killed);
}

TEST(JobTextTest, NamesHostsThatAreLost) {
  Reader reader;
  reader.text.feed(kFrame +
                       "ORTE has lost communication with a remote daemon.\n\n"
                       "  HNP daemon   : [[19312,0],0] on node node1\n  Remote daemon: "
                       "[[19312,0],1] on node node2\n" +
                       kFrame,
                   0);
  reader.text.feed("ssh: connect to host node3 port 22: No route to host\r\n", 0);
  reader.text.feed("ssh: connect to host node3 port 22: No route to host\r\n", 0);
  reader.text.feed("ssh: Could not resolve hostname node9: Name or service not known\n", 0);
  EXPECT_THAT(reader.text.findings().lost_hosts, ElementsAre("node2", "node3", "node9"));
}

TEST(JobTextTest, ShowsABlockThatDoesNotClose) {
  Reader reader;
  reader.text.feed(kFrame + "a table\n", 10);
  EXPECT_THAT(reader.shown, IsEmpty());
  EXPECT_EQ(reader.text.wait(10.25), 0.75);
  reader.text.tick(10.5);
  EXPECT_THAT(reader.shown, IsEmpty());
  reader.text.tick(11);
  EXPECT_EQ(reader.shown, kFrame + "a table\n");
  EXPECT_EQ(reader.text.wait(11), std::nullopt);
}

TEST(JobTextTest, KeepsItsMemoryBounded) {
  Reader reader;
  reader.text.feed(kFrame, 0);
  const std::string line = std::string(999, 'x') + "\n";
  for (int i = 0; i < 100; ++i) reader.text.feed(line, 0);
  EXPECT_GT(reader.shown.size(), 64U << 10);  // no block of a launcher is so long
  const std::string piece(50000, 'y');
  reader.shown.clear();
  for (int i = 0; i < 10; ++i) reader.text.feed(piece, 0);
  EXPECT_GT(reader.shown.size(), 400000U);  // a line without an end is shown in pieces
  reader.text.feed("\nafter\n", 0);
  EXPECT_TRUE(reader.shown.ends_with("y\nafter\n"));
}

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string all;
  for (const std::string_view part : parts) all += part;
  return all;
}

TEST(JobTextTest, SurvivesArbitraryTexts) {
  for (const std::string& text :
       {joined({kFrame, kFrame, kFrame}), joined({kFrame, " noticed that process rank \n", kFrame}),
        joined({kFrame, "lost communication with a remote daemon Remote daemon on node\n", kFrame}),
        std::string("ssh: connect to host \n"), std::string("[\n"), std::string("] \n"),
        std::string(1, '\0'),
        joined(
            {kFrame, " noticed that process rank -5 exited on signal 99999999999999\n", kFrame})}) {
    Reader reader;
    reader.text.feed(text, 0);
    reader.text.finish();
    EXPECT_FALSE(reader.text.findings().killed);
    EXPECT_THAT(reader.text.findings().lost_hosts, IsEmpty());
  }
}

}  // namespace
}  // namespace sluice::testing
