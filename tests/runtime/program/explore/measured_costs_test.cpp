#include "runtime/program/explore/measured_costs.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;

// Microseconds, as a trace has them.
std::string event(int pid, const std::string& category, const std::string& name, double start,
                  double time) {
  return "{\"ph\":\"X\",\"pid\":" + std::to_string(pid) +
         ",\"tid\":1,\"ts\":" + std::to_string(start) + ",\"dur\":" + std::to_string(time) +
         ",\"name\":\"" + name + "\",\"cat\":\"" + category + "\"}";
}

std::string label(int pid, int replica) {
  return "{\"ph\":\"M\",\"pid\":" + std::to_string(pid) +
         ",\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":\"rank " + std::to_string(pid) +
         ": replica " + std::to_string(replica) + ", pipeline rank 0\"}}";
}

std::string trace(const std::vector<std::string>& events) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  for (const std::string& each : events) text += (each == events.front() ? "\n" : ",\n") + each;
  return text + "\n]}\n";
}

// Two replicas of two stages, one micro-batch; what is planned counts for nothing.
std::vector<std::string> whole_backward() {
  return {label(0, 0),
          label(1, 0),
          label(2, 1),
          label(3, 1),
          event(0, "planned", "0F0", 0, 9000),
          event(0, "compute", "0F0", 0, 2000),
          event(1, "receives", "1RECV_F0", 2000, 500),
          event(1, "compute", "1F0", 2500, 3000),
          event(1, "compute", "1B0", 5500, 8000),
          event(0, "receives", "0RECV_B0", 13000, 1250),
          event(0, "compute", "0B0", 15000, 4000),
          event(2, "compute", "0F0", 100000, 4000),
          event(3, "compute", "1F0", 200000, 5000),
          event(3, "compute", "1B0", 300000, 10000),
          event(2, "compute", "0B0", 400000, 4000)};
}

TEST(MeasuredCostsTest, TraceGivesMeansOfStagesAndTheQuickestMessage) {
  const TemporaryDirectory directory;
  const auto path = directory.write("t.json", trace(whole_backward()));
  const MeasuredCosts costs = read_measured_costs(path, 0.25);
  ASSERT_EQ(costs.stages.size(), 2U);
  EXPECT_DOUBLE_EQ(costs.stages[0].forward, 3);
  EXPECT_DOUBLE_EQ(costs.stages[1].forward, 4);
  EXPECT_DOUBLE_EQ(costs.stages[0].backward_input, 1);
  EXPECT_DOUBLE_EQ(costs.stages[0].backward_weight, 3);
  EXPECT_DOUBLE_EQ(costs.stages[1].backward_input, 9 * 0.25);
  EXPECT_DOUBLE_EQ(costs.message, 0.5);
  EXPECT_THAT(costs.source, HasSubstr("0.25 input half and 0.75 weight half"));
}

TEST(MeasuredCostsTest, WhatIsRecomputedBeforeABackwardIsPartOfItsInputHalf) {
  const TemporaryDirectory directory;
  std::vector<std::string> events = whole_backward();
  events.push_back(event(0, "compute", "0RECOMPUTE0", 10000, 2000));
  events.push_back(event(2, "compute", "0RECOMPUTE0", 390000, 1000));
  const auto path = directory.write("t.json", trace(events));
  const MeasuredCosts costs = read_measured_costs(path, 0.25);
  EXPECT_DOUBLE_EQ(costs.stages[0].backward_input, 1 + 1.5);
  EXPECT_DOUBLE_EQ(costs.stages[0].backward_weight, 3);
  EXPECT_DOUBLE_EQ(costs.message, 0.5);
}

TEST(MeasuredCostsTest, PartedBackwardsAreTakenAsTheyAre) {
  const TemporaryDirectory directory;
  const auto path = directory.write(
      "t.json", trace({event(0, "compute", "0F0", 0, 1000), event(0, "compute", "0I0", 1000, 5000),
                       event(0, "compute", "0W0", 6000, 7000)}));
  const MeasuredCosts costs = read_measured_costs(path, 0.25);
  EXPECT_DOUBLE_EQ(costs.stages[0].backward_input, 5);
  EXPECT_DOUBLE_EQ(costs.stages[0].backward_weight, 7);
  EXPECT_EQ(costs.message, 0);
  EXPECT_THAT(costs.source, ::testing::Not(HasSubstr("input half")));
}

// Stage 0 has layers 0 and 1, stage 1 has layer 2.
TEST(MeasuredCostsTest, ATraceSaysTheLayersOfTheModel) {
  const TemporaryDirectory directory;
  std::string text = trace(whole_backward());
  text.insert(1, R"("layers":{"first":[0,2,3],"times":[[1,2,1],[2,2,2],[4,4.5,4.5]]},)");
  const MeasuredCosts traced = read_measured_costs(directory.write("t.json", text), 0.5);
  ASSERT_EQ(traced.layers.size(), 3U);
  EXPECT_EQ(traced.layers[0].backward_input, 2);
  EXPECT_THAT(traced.source, HasSubstr("3 layers"));
}

TEST(MeasuredCostsTest, ATraceSaysWhatTensorRanksExchange) {
  const TemporaryDirectory directory;
  const auto read = [&](const std::string& more) {
    std::string text = trace(whole_backward());
    text.insert(1, R"("layers":{"first":[0,1,2],"times":[[1,1,1],[2,2,2]])" + more + "},");
    return read_measured_costs(directory.write("t.json", text), 0.5);
  };
  const auto told = [&](const std::string& ranks, const std::string& lists) {
    return read(R"(,"tensor_ranks":)" + ranks + R"(,"tensor_shards":8,"collectives":)" + lists);
  };
  EXPECT_EQ(read("").tensor_ranks, 1);
  EXPECT_TRUE(read("").collectives.empty());
  const MeasuredCosts costs =
      told("4", R"([[[["sum",8]],[["reduce-scatter",16],["all-gather",4]],[]],[[],[],[]]])");
  EXPECT_EQ(costs.tensor_ranks, 4);
  EXPECT_EQ(costs.tensor_shards, 8);
  EXPECT_EQ(costs.first_layer, (std::vector{0, 1, 2}));
  ASSERT_EQ(costs.collectives.size(), 2U);
  EXPECT_EQ(costs.collectives[0].forward, (std::vector{PlannedCollective{.bytes = 8}}));
  ASSERT_EQ(costs.collectives[0].backward_input.size(), 2U);
  EXPECT_EQ(costs.collectives[0].backward_input[1].kind, CollectiveKind::kAllGather);
  for (const char* lists :
       {"3", "[]", "[[[],[],[]]]", "[[[],[]],[[],[],[]]]", R"([[[["sum"]],[],[]],[[],[],[]]])",
        R"([[[["product",8]],[],[]],[[],[],[]]])", R"([[[["sum",-8]],[],[]],[[],[],[]]])",
        R"([[[["sum",1e30]],[],[]],[[],[],[]]])"}) {
    expect_error(ErrorCode::kData, {"t.json", "collectives of"}, [&] { (void)told("4", lists); });
  }
  expect_error(ErrorCode::kData, {"'tensor_ranks' 0; legal is a whole number from 1"},
               [&] { (void)told("0", "[[[],[],[]],[[],[],[]]]"); });
}

TEST(MeasuredCostsTest, RefusesLayersThatAreNone) {
  const TemporaryDirectory directory;
  for (const char* layers :
       {"3", "{}", R"({"first":[0,2],"times":[]})", R"({"first":[0,2],"times":[[1,1,1]]})",
        R"({"first":[1,2],"times":[[1,1,1],[1,1,1]]})", R"({"first":[0,2,1,2],"times":[[1,1,1]]})",
        R"({"first":[0,0,1],"times":[[1,1]]})", R"({"first":[0,1,1],"times":[[1,1,-1]]})",
        R"({"first":[0,1,1],"times":[["1",1,1]]})", R"({"first":[0,1e99],"times":[[1,1,1]]})",
        R"({"first":[0,1],"times":[[1,1,1]]})"}) {
    std::string text = trace(whole_backward());
    text.insert(1, std::string("\"layers\":") + layers + ",");
    const auto path = directory.write("t.json", text);
    expect_error(ErrorCode::kData, {"t.json", "layer"},
                 [&] { (void)read_measured_costs(path, 0.5); });
  }
}

TEST(MeasuredCostsTest, RefusesWhatIsNoProfile) {
  const TemporaryDirectory directory;
  const auto refused = [&](const std::string& text, const char* part) {
    const auto path = directory.write("p", text);
    expect_error(ErrorCode::kData, {path.string().c_str(), part},
                 [&] { (void)read_measured_costs(path, 0.5); });
  };
  refused("", "no trace");
  refused("[1,2]", "no trace");
  refused("{\"traceEvents\":3}", "no trace");
  refused(trace({}), "no compute");
  refused(trace({event(0, "compute", "1F0", 0, 1)}), "no compute of stage 0");
  refused(trace({event(0, "compute", "0F0", 0, 1)}), "no backward");
  refused(trace({event(0, "compute", "0B0", 0, 1)}), "no forward of stage 0");
  refused(trace({event(0, "compute", "nonsense", 0, 1)}), "nonsense");
  refused(trace({"{\"ph\":\"X\",\"cat\":\"compute\",\"name\":\"0F0\"}"}), "'ts'");
  refused("{\"step\":1,\"seconds\":1}\n{\"step\":2,\"seconds\":1}\n", "no trace");  // metrics
  expect_error(ErrorCode::kData, {"none.json"},
               [&] { (void)read_measured_costs(directory.path() / "none.json", 0.5); });
}

}  // namespace
}  // namespace sluice
