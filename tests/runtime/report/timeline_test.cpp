#include "runtime/report/timeline.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/schedule.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/pipeline/training_cases.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

constexpr int kSteps = 3;
constexpr int kMicroBatches = 4;

// What the trace of kSteps steps holds.
nlohmann::json trace_of(const Layout& layout) {
  const TemporaryDirectory dir;
  TransformerConfig model = small_model();
  model.layers = 4;
  const auto source = synthetic_tokens(model);
  const Transformer transformer(model);
  run_loopback(layout.pipeline * layout.replicas, [&](Communicator& comm) {
    PipelineOptions options;
    options.shape.pipeline = layout.pipeline;
    options.shape.replicas = layout.replicas;
    options.shape.rank_order = layout.order;
    options.shape.micro_batches = kMicroBatches;
    options.order.schedule = layout.schedule;
    options.order.chunks = layout.chunks;
    options.checks.trace = true;
    Pipeline pipeline(comm, transformer, *source, options);
    Timeline timeline;
    (void)pipeline.train_step();
    timeline.begin(pipeline);
    for (int step = 0; step < kSteps; ++step) {
      (void)pipeline.train_step();
      timeline.add(pipeline);
    }
    const int stages = layout.pipeline * layout.chunks;
    const std::vector<int> first = transformer.partition(stages).first;
    const std::vector<StageTimes> costs(static_cast<std::size_t>(first.back()));
    const LayerTable layers{.first_layer = first, .costs = costs};
    const double error = timeline.write(pipeline, dir.path() / "trace.json", layers);
    EXPECT_EQ(error > 0, comm.size() > 1);
    pipeline.close();
  });
  return nlohmann::json::parse(dir.read("trace.json")).at("traceEvents");
}

struct Slice {
  int pid = 0, tid = 0, replica = 0;
  std::int64_t start = 0, end = 0;  // nanoseconds
  Action action;
};

std::int64_t nanoseconds(const nlohmann::json& event, const char* key) {
  return std::llround(event.at(key).get<double>() * 1000);
}

// Of one track, in order of time.
std::vector<Slice> slices_of(const nlohmann::json& trace, const std::string& track) {
  std::map<int, int> replicas;
  std::vector<Slice> slices;
  for (const nlohmann::json& event : trace) {
    if (event.at("name") == "process_name") {
      const std::string label = event.at("args").at("name");
      replicas[event.at("pid")] = std::stoi(label.substr(label.find("replica ") + 8));
    } else if (event.at("ph") == "X" && event.at("cat") == track) {
      const std::int64_t start = nanoseconds(event, "ts");
      slices.push_back({event.at("pid"), event.at("tid"), replicas.at(event.at("pid")), start,
                        start + nanoseconds(event, "dur"),
                        parse_action(event.at("name").get<std::string>())});
    }
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const Slice& a, const Slice& b) { return a.start < b.start; });
  return slices;
}

// "step 1, replica 0: 0F2 -> 1F2": [slice] its part before the arrow.
std::vector<std::string> names_of(const std::vector<Slice>& slices) {
  std::map<std::string, int> steps;
  std::vector<std::string> names;
  for (const Slice& slice : slices) {
    const std::string where =
        "replica " + std::to_string(slice.replica) + ": " + to_string(slice.action);
    names.push_back("step " + std::to_string(steps[where]++) + ", " + where);
  }
  return names;
}

// What is computed on one rank and used on another, by the names alone.
std::multiset<std::string> expected_arrows(const std::vector<Slice>& slices) {
  const std::vector<std::string> names = names_of(slices);
  std::multiset<std::string> arrows;
  for (std::size_t i = 0; i < slices.size(); ++i) {
    for (std::size_t j = 0; j < slices.size(); ++j) {
      const Action &from = slices[i].action, &to = slices[j].action;
      const bool weights =
          from.kind == ActionKind::kBackwardWeight || to.kind == ActionKind::kBackwardWeight;
      const bool forward = from.kind == ActionKind::kForward;
      const bool same_step =
          names[i].substr(0, names[i].find(':')) == names[j].substr(0, names[j].find(':'));
      if (weights || forward != (to.kind == ActionKind::kForward) || !same_step ||
          from.micro_batch != to.micro_batch || to.stage != from.stage + (forward ? 1 : -1) ||
          slices[i].pid == slices[j].pid) {
        continue;
      }
      arrows.insert(names[i] + " -> " + names[j]);
    }
  }
  return arrows;
}

// The name of the slice of that thread that holds the flow event.
std::string around(const nlohmann::json& flow, const std::vector<Slice>& slices,
                   const std::vector<std::string>& names) {
  const std::int64_t when = nanoseconds(flow, "ts");
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (slices[i].pid == flow.at("pid") && slices[i].tid == flow.at("tid") &&
        slices[i].start <= when && when < slices[i].end) {
      return names[i];
    }
  }
  return "nothing";
}

std::multiset<std::string> drawn_arrows(const nlohmann::json& trace,
                                        const std::vector<Slice>& slices) {
  const std::vector<std::string> names = names_of(slices);
  std::map<int, std::string> leaving;
  std::multiset<std::string> arrows;
  for (const nlohmann::json& event : trace) {
    if (event.at("ph") == "s") {
      EXPECT_TRUE(leaving.emplace(event.at("id"), around(event, slices, names)).second);
    } else if (event.at("ph") == "f") {
      EXPECT_EQ(event.at("bp"), "e");
      arrows.insert(leaving.at(event.at("id")) + " -> " + around(event, slices, names));
    }
  }
  EXPECT_EQ(arrows.size(), leaving.size());
  return arrows;
}

struct ArrowCase {
  const char* name;
  Layout layout;
  std::size_t messages_per_micro_batch;  // over all replicas

  friend void PrintTo(const ArrowCase& each, std::ostream* out) { *out << each.name; }
};

class ArrowsTest : public ::testing::TestWithParam<ArrowCase> {};

TEST_P(ArrowsTest, GoFromWhatMadeATensorToWhatUsedItOnAnotherRank) {
  const nlohmann::json trace = trace_of(GetParam().layout);
  const std::vector<Slice> slices = slices_of(trace, "compute");
  const std::multiset<std::string> drawn = drawn_arrows(trace, slices);
  EXPECT_EQ(drawn, expected_arrows(slices));
  EXPECT_EQ(drawn.size(), GetParam().messages_per_micro_batch * kMicroBatches * kSteps);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, ArrowsTest,
    ::testing::Values(
        ArrowCase{"OneRank", {.pipeline = 1}, 0}, ArrowCase{"OneFOneB", {.pipeline = 2}, 2},
        ArrowCase{"Deeper", {.pipeline = 3, .schedule = "gpipe"}, 4},
        ArrowCase{"Chunks", {.pipeline = 2, .schedule = "interleaved", .chunks = 2}, 6},
        // Stages 1 and 2 share a rank.
        ArrowCase{"SplitBackward", {.pipeline = 2, .schedule = "zb-v", .chunks = 2}, 4},
        ArrowCase{"Replicas", {.pipeline = 2, .replicas = 2}, 4},
        ArrowCase{
            "ReplicasFirst", {.pipeline = 2, .replicas = 2, .order = RankOrder::kReplicaFirst}, 4}),
    [](const auto& each) { return each.param.name; });

// Step by step: the first planned action stands where the first action is.
TEST(TimelineTest, ThePlannedTrackStartsWithEachStep) {
  const nlohmann::json trace = trace_of({.pipeline = 2});
  const auto starts = [&](const std::string& track) {
    std::vector<std::int64_t> found;
    for (const Slice& slice : slices_of(trace, track)) {
      const Action& action = slice.action;
      if (action.kind == ActionKind::kForward && action.stage == 0 && action.micro_batch == 0) {
        found.push_back(slice.start);
      }
    }
    return found;
  };
  EXPECT_EQ(starts("compute").size(), std::size_t{kSteps});
  EXPECT_EQ(starts("planned"), starts("compute"));
}

}  // namespace
}  // namespace sluice::testing
