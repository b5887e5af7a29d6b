#include "runtime/files/trace.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using testing::ElementsAre;

TraceEvent event(TraceTrack track, ActionKind kind, double start, double end, int micro_batch = 0) {
  return {.start = start,
          .end = end,
          .action = static_cast<std::uint8_t>(kind),
          .track = track,
          .stage = 2,
          .micro_batch = micro_batch};
}

// The file's events, parsed; `ph` "X" or "M".
std::vector<nlohmann::json> events_of(const std::vector<RankTrace>& ranks, const std::string& ph) {
  const TemporaryDirectory dir;
  write_trace(dir.path() / "trace.json", ranks);
  EXPECT_EQ(dir.file_count(), 1);
  std::vector<nlohmann::json> events;
  const nlohmann::json whole = nlohmann::json::parse(dir.read("trace.json"));
  for (const nlohmann::json& each : whole.at("traceEvents")) {
    if (each.at("ph") == ph) events.push_back(each);
  }
  return events;
}

// (pid, tid) -> name of the thread.
std::map<std::pair<int, int>, std::string> threads_of(const std::vector<RankTrace>& ranks) {
  std::map<std::pair<int, int>, std::string> names;
  for (const nlohmann::json& each : events_of(ranks, "M")) {
    if (each.at("name") == "thread_name") {
      names[{each.at("pid"), each.at("tid")}] = each.at("args").at("name");
    }
  }
  return names;
}

TEST(TraceTest, GivesEveryRankAProcessAndEveryTrackAThread) {
  const std::vector<RankTrace> ranks = {
      {0,
       "rank 0: \"quoted\"",
       {event(TraceTrack::kPlanned, ActionKind::kForward, 0, 1),
        event(TraceTrack::kCompute, ActionKind::kForward, 0, 1.5, 4),
        event(TraceTrack::kSends, ActionKind::kSendForward, 1.5, 2),
        event(TraceTrack::kReceives, ActionKind::kRecvBackward, 1, 3)}},
      {1, "rank 1", {event(TraceTrack::kCompute, ActionKind::kBackward, 2, 2.000001)}}};
  std::map<int, std::string> processes;
  for (const nlohmann::json& each : events_of(ranks, "M")) {
    if (each.at("name") == "process_name") processes[each.at("pid")] = each.at("args").at("name");
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "rank 0: \"quoted\""}, {1, "rank 1"}}));
  const auto threads = threads_of(ranks);
  std::multiset<std::string> names;
  for (const auto& [place, name] : threads) names.insert(name);
  EXPECT_THAT(names, ElementsAre("compute", "compute", "planned", "receives", "sends"));
  for (const nlohmann::json& each : events_of(ranks, "X")) {
    EXPECT_EQ(threads.at({each.at("pid"), each.at("tid")}), each.at("cat").get<std::string>());
  }
}

TEST(TraceTest, NamesActionsAndGivesTimesInMicroseconds) {
  const auto events =
      events_of({{3,
                  "",
                  {event(TraceTrack::kCompute, ActionKind::kForward, 1, 1.0000005, 7),
                   event(TraceTrack::kCompute, ActionKind::kOptimizer, 2, 2, -1)}}},
                "X");
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].at("name"), "2F7");
  EXPECT_EQ(events[0].at("pid"), 3);
  EXPECT_EQ(events[0].at("ts"), 1e6);
  EXPECT_EQ(events[0].at("dur"), 0.5);
  EXPECT_EQ(events[0].at("args"), (nlohmann::json{{"stage", 2}, {"micro_batch", 7}}));
  EXPECT_EQ(events[1].at("name"), "2OPTIMIZER");
  EXPECT_EQ(events[1].at("dur"), 0);
}

TEST(TraceTest, MessagesInFlightTogetherGetLanesSoThatNoSlicesCross) {
  RankTrace rank{0, "rank 0", {}};
  for (int i = 0; i < 40; ++i) {
    // Three at a time, none nested in another; handed over out of order.
    const double start = (i * 7 % 40) * 0.1;
    rank.events.push_back(event(TraceTrack::kSends, ActionKind::kSendForward, start, start + 0.29));
  }
  std::map<int, std::vector<std::pair<double, double>>> lanes;
  for (const nlohmann::json& each : events_of({rank}, "X")) {
    const double start = each.at("ts");
    lanes[each.at("tid")].emplace_back(start, start + each.at("dur").get<double>());
  }
  EXPECT_EQ(lanes.size(), 3u);
  std::size_t events = 0;
  for (auto& [tid, slices] : lanes) {
    events += slices.size();
    for (std::size_t i = 1; i < slices.size(); ++i) {
      EXPECT_GE(slices[i].first, slices[i - 1].second - 1e-6);
    }
  }
  EXPECT_EQ(events, 40u);
  std::vector<std::string> names;
  for (const auto& [place, name] : threads_of({rank})) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("sends", "sends 2", "sends 3"));
}

TEST(TraceTest, EventsThatTouchShareALaneWhateverTheirTimesRoundTo) {
  RankTrace rank{0, "rank 0", {}};
  double start = 0;
  for (int i = 0; i < 1000; ++i) {
    const double end = start + 1.0 / 3e6;
    rank.events.push_back(event(TraceTrack::kCompute, ActionKind::kForward, start, end, i));
    start = end;
  }
  EXPECT_EQ(threads_of({rank}).size(), 1u);
}

std::int64_t nanoseconds(const nlohmann::json& each) {
  return std::llround(each.at("ts").get<double>() * 1000);
}

// The flow events of a trace with one arrow, from the first event of rank 0 to that of rank 1, as
// nanoseconds: where it leaves and where it arrives.
std::pair<std::int64_t, std::int64_t> arrow_between(const TraceEvent& from, const TraceEvent& to) {
  std::ostringstream text;
  write_trace([&](std::string_view piece) { text << piece; }, {{0, "", {from}}, {1, "", {to}}},
              {{.from = {0, 0}, .to = {1, 0}}});
  std::map<std::string, nlohmann::json> events;
  const nlohmann::json whole = nlohmann::json::parse(text.str());
  for (const nlohmann::json& each : whole.at("traceEvents")) {
    events[each.at("ph")] = each;
  }
  return {nanoseconds(events.at("s")), nanoseconds(events.at("f"))};
}

TEST(TraceTest, AnArrowIsAPairOfFlowEventsOnTheThreadsOfItsSlices) {
  const TraceEvent made = event(TraceTrack::kCompute, ActionKind::kForward, 1, 2);
  const TraceEvent used = event(TraceTrack::kReceives, ActionKind::kRecvForward, 3, 4);
  std::ostringstream text;
  write_trace([&](std::string_view piece) { text << piece; },
              {{4, "", {used, made}}, {7, "", {made, used}}},
              {{.from = {0, 1}, .to = {1, 1}}, {.from = {1, 0}, .to = {0, 0}}});
  std::vector<nlohmann::json> slices, flows;
  const nlohmann::json whole = nlohmann::json::parse(text.str());
  for (const nlohmann::json& each : whole.at("traceEvents")) {
    if (each.at("ph") == "X") slices.push_back(each);
    if (each.at("ph") == "s" || each.at("ph") == "f") {
      EXPECT_EQ(slices.size(), 4u) << "a flow event stands before a slice that it may belong to";
      flows.push_back(each);
    }
  }
  ASSERT_EQ(flows.size(), 4u);
  const auto tid_of = [&](int pid, const std::string& track) {
    for (const nlohmann::json& each : slices) {
      if (each.at("pid") == pid && each.at("cat") == track) return each.at("tid");
    }
    return nlohmann::json();
  };
  for (const std::size_t i : {0u, 2u}) {
    const nlohmann::json &leaves = flows[i], &arrives = flows[i + 1];
    const int from = i == 0 ? 4 : 7, to = i == 0 ? 7 : 4;
    EXPECT_EQ(leaves.at("ph"), "s");
    EXPECT_EQ(leaves.at("pid"), from);
    EXPECT_EQ(leaves.at("tid"), tid_of(from, "compute"));
    EXPECT_EQ(arrives.at("ph"), "f");
    EXPECT_EQ(arrives.at("bp"), "e");
    EXPECT_EQ(arrives.at("pid"), to);
    EXPECT_EQ(arrives.at("tid"), tid_of(to, "receives"));
    // Viewers pair them by these three.
    for (const char* key : {"id", "name", "cat"}) EXPECT_EQ(leaves.at(key), arrives.at(key));
  }
  EXPECT_NE(flows[0].at("id"), flows[2].at("id"));
}

TEST(TraceTest, AnArrowLeavesInsideItsSliceAndNoLaterThanItArrives) {
  const auto slice = [](std::int64_t start, std::int64_t end) {
    return event(TraceTrack::kCompute, ActionKind::kForward, static_cast<double>(start) * 1e-9,
                 static_cast<double>(end) * 1e-9);
  };
  const auto [leaves, arrives] = arrow_between(slice(1000, 2000), slice(3000, 4000));
  EXPECT_GE(leaves, 1000);
  EXPECT_LT(leaves, 2000);
  EXPECT_EQ(arrives, 3000);
  // Without duration.
  EXPECT_EQ(arrow_between(slice(1000, 1000), slice(3000, 4000)).first, 1000);
  // By clocks that disagree.
  EXPECT_EQ(arrow_between(slice(1000, 2000), slice(1500, 4000)), std::pair(1500L, 1500L));
  EXPECT_EQ(arrow_between(slice(1000, 2000), slice(500, 4000)), std::pair(1000L, 500L));
}

TEST(TraceTest, WithoutEventsIsStillATrace) {
  EXPECT_TRUE(events_of({}, "X").empty());
  EXPECT_TRUE(events_of({{0, "rank 0", {}}}, "X").empty());
}

TEST(TraceTest, RefusesPathsThatCannotBeWritten) {
  const TemporaryDirectory dir;
  expect_error(ErrorCode::kIo, {"none/t.json"},
               [&] { write_trace(dir.path() / "none" / "t.json", {}); });
}

}  // namespace
}  // namespace sluice
