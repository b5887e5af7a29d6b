// The trace of ranks whose clocks differ, as those of two hosts do: one runs in a time namespace.
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "tests/runtime/program/cli/cli_tools.hpp"

namespace sluice::testing {
namespace {

// Seconds that the second rank's clock is ahead.
class TraceClockTest : public CliTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    if (const Outcome probe = shell(shifted() + "true"); probe.code != 0) {
      GTEST_SKIP() << "no time namespace here: " << probe.err;
    }
  }
  static std::string shifted() {
    return std::string("unshare --time --monotonic ") + GetParam() + " ";
  }
};

// (forward, stage that made the tensor, micro-batch) -> when sends start and receives end, in
// microseconds, step by step.
struct Messages {
  std::map<std::tuple<bool, int, int>, std::vector<double>> sent, received;
};

Messages messages_of(const nlohmann::json& trace) {
  Messages messages;
  for (const nlohmann::json& event : trace) {
    if (event.at("ph") != "X") continue;
    const bool sends = event.at("cat") == "sends";
    if (!sends && event.at("cat") != "receives") continue;
    const std::string name = event.at("name");
    const bool forward = name.find(sends ? "SEND_F" : "RECV_F") != std::string::npos;
    const int stage = event.at("args").at("stage");
    const int maker = sends ? stage : stage + (forward ? -1 : 1);
    const double start = event.at("ts"), duration = event.at("dur");
    auto& times = sends ? messages.sent : messages.received;
    times[{forward, maker, event.at("args").at("micro_batch")}].push_back(sends ? start
                                                                                : start + duration);
  }
  return messages;
}

TEST_P(TraceClockTest, ReceivesEndAfterTheirSendsAndAllEventsLieInTheRun) {
  const std::string program =
      SLUICE_PROGRAM " " + small("--steps 8 --pipeline 2 --micro-batches 4 --trace t.json");
  const Outcome outcome = mpirun_beside(program, shifted() + program);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::string line = "ranks agree with rank 0 within ";
  const std::size_t at = outcome.out.find(line);
  ASSERT_NE(at, std::string::npos) << outcome.out;
  const double error = std::stod(outcome.out.substr(at + line.size()));

  const nlohmann::json trace = nlohmann::json::parse(read_file(path("t.json"))).at("traceEvents");
  constexpr double kMostMicroseconds = 30e6;  // mpirun() ends a job that takes longer
  for (const nlohmann::json& event : trace) {
    if (event.at("ph") == "M") continue;
    EXPECT_GE(event.at("ts"), 0) << event;
    EXPECT_LE(event.at("ts").get<double>() + event.value("dur", 0.0), kMostMicroseconds) << event;
  }
  const Messages messages = messages_of(trace);
  EXPECT_EQ(messages.sent.size(), 8u);
  ASSERT_EQ(messages.sent.size(), messages.received.size());
  for (const auto& [message, sent] : messages.sent) {
    const std::vector<double>& received = messages.received.at(message);
    ASSERT_EQ(sent.size(), received.size());
    for (std::size_t i = 0; i < sent.size(); ++i) EXPECT_GE(received[i], sent[i] - error);
  }
}

INSTANTIATE_TEST_SUITE_P(Clocks, TraceClockTest, ::testing::Values("86400", "-20"),
                         [](const auto& each) {
                           return each.param[0] == '-' ? "Behind" : "Ahead";
                         });

}  // namespace
}  // namespace sluice::testing
