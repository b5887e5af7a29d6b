// `sluice schedule`, its `compare` and `auto`, as a user meets them.
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/runtime/program/cli/cli_tools.hpp"

namespace sluice::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(CliTest, ScheduleDrawsAndCounts) {
  const Outcome grid = sluice("schedule --ranks 2 --micro-batches 3");
  EXPECT_EQ(grid.code, 0) << grid.err;
  EXPECT_THAT(grid.out, HasSubstr("F0 B0 F1 B1 F2 B2"));
  EXPECT_THAT(grid.out, HasSubstr("peak_in_flight   2 1 ("));
}

TEST_F(CliTest, ScheduleAsJsonFollowsTheClosedForms) {
  const Outcome outcome =
      sluice("schedule --schedule gpipe --ranks 4 --micro-batches 8 --format json --timeline");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json.at("schedule"), "gpipe");
  EXPECT_EQ(json.at("makespan"), (8 + 4 - 1) * 3.0);
  EXPECT_EQ(json.at("peak_in_flight"), nlohmann::json({8, 8, 8, 8}));
  EXPECT_EQ(json.at("messages"), 2 * 3 * 8);
  EXPECT_EQ(json.at("transports"),
            nlohmann::json({"eager", "rendezvous", "bounded", "nccl", "nccl-edges"}));
  EXPECT_EQ(json.at("exact"), true);
  EXPECT_EQ(json.at("timeline").at(3).at(0).at("start"), 3.0);
}

TEST_F(CliTest, ScheduleWritesFilesThatItReadsBack) {
  for (const char* format : {"csv", "csv --messages", "file"}) {
    const Outcome written = sluice(
        std::string("schedule --ranks 3 --micro-batches 5 --output written --format ") + format);
    ASSERT_EQ(written.code, 0) << written.err;
    EXPECT_THAT(written.out, IsEmpty());
    const Outcome read = sluice("schedule --file written --format json");
    ASSERT_EQ(read.code, 0) << read.err;
    const auto json = nlohmann::json::parse(read.out);
    EXPECT_EQ(json.at("makespan"), (5 + 3 - 1) * 3.0);
    EXPECT_EQ(json.at("peak_in_flight"), nlohmann::json({3, 2, 1}));
    EXPECT_THAT(json.at("source").get<std::string>(), StartsWith("written: "));
  }
}

TEST_F(CliTest, ScheduleDrawsPicturesAndTraces) {
  const Outcome svg = sluice("schedule --ranks 2 --micro-batches 3 --format svg");
  EXPECT_EQ(svg.code, 0) << svg.err;
  EXPECT_THAT(svg.out, StartsWith("<svg "));
  const Outcome trace = sluice("schedule --ranks 2 --micro-batches 3 --format trace");
  ASSERT_EQ(trace.code, 0) << trace.err;
  const auto json = nlohmann::json::parse(trace.out);
  std::size_t slices = 0;
  for (const auto& event : json.at("traceEvents")) slices += event.at("ph") == "X" ? 1 : 0;
  EXPECT_EQ(slices, 2U * 3 * 2);
}

TEST_F(CliTest, ScheduleCompareSortsByMakespan) {
  const Outcome outcome = sluice("schedule compare --ranks 4 --micro-batches 8 --format json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = nlohmann::json::parse(outcome.out).at("rows");
  ASSERT_GE(rows.size(), 3U);
  for (std::size_t i = 1; i < rows.size(); ++i) {
    EXPECT_LE(rows[i - 1].at("makespan"), rows[i].at("makespan"));
  }
  const Outcome table = sluice("schedule compare --ranks 4 --micro-batches 8");
  EXPECT_THAT(table.out, HasSubstr("\n1f1b "));
}

TEST_F(CliTest, ScheduleCountsLinksReductionsAndBytes) {
  const Outcome outcome = sluice(
      "schedule --schedule forward-only --ranks 2 --micro-batches 3 --message-bytes 4 --bandwidth "
      "2 "
      "--format json --timeline");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json.at("makespan"), 8);
  EXPECT_EQ(json.at("waiting"), (std::vector<double>{0, 2}));
  EXPECT_EQ(json.at("memory")[1][1].at("time"), 1);

  const Outcome reduced = sluice(
      "schedule --ranks 2 --micro-batches 2 --activation-bytes 5,7 --weight-activation-bytes 1 "
      "--resident-bytes 1e2 --reduce-time 3 --overlap-time 2 --format json");
  ASSERT_EQ(reduced.code, 0) << reduced.err;
  const auto figures = nlohmann::json::parse(reduced.out);
  EXPECT_EQ(figures.at("makespan"), 12);
  EXPECT_EQ(figures.at("peak_bytes"), (std::vector<int>{112, 108}));
  EXPECT_FALSE(figures.contains("timeline"));
}

TEST_F(CliTest, LinksBetweenNodesAreAsAllOthersUnlessGiven) {
  const auto makespan = [&](const std::string& more) {
    const Outcome outcome = sluice(
        "schedule --schedule forward-only --ranks 2 --micro-batches 1 --format json "
        "--message-time 2 --ranks-per-node 1 " +
        more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out).at("makespan").get<double>();
  };
  EXPECT_EQ(makespan(""), 4);
  EXPECT_EQ(makespan("--node-message-time 5"), 7);
  EXPECT_EQ(makespan("--links 0-1:1.5:8 --message-bytes 4"), 4);
}

TEST_F(CliTest, ScheduleAndCompareHaveTheSameChunksAndUnits) {
  const std::string work =
      " --ranks 3 --micro-batches 7 --forward-time 2 --message-time 0.25 --activation-bytes 12 "
      "--format json ";
  const auto rows = nlohmann::json::parse(sluice("schedule compare" + work).out).at("rows");
  ASSERT_GE(rows.size(), 13U);
  for (const auto& row : rows) {
    const std::string name = row.at("schedule");
    const auto alone =
        nlohmann::json::parse(sluice(fmt::format("schedule --schedule {}{}", name, work)).out);
    for (const char* key : {"chunks", "messages", "peak_bytes"}) {
      EXPECT_EQ(alone.at(key), row.at(key)) << name;
    }
    EXPECT_DOUBLE_EQ(alone.at("makespan").get<double>(), row.at("makespan").get<double>()) << name;
  }
  const auto one = sluice("schedule --schedule interleaved --chunks 1" + work);
  EXPECT_EQ(nlohmann::json::parse(one.out).at("chunks"), 1);
}

// Of 16 bytes that 1f1b keeps on the first rank half leave.
TEST_F(CliTest, ScheduleAutoFitsWhatLeavesInItsLimit) {
  const std::string work =
      "schedule auto --ranks 4 --micro-batches 8 --chunks 1 --whole-backward --activation-bytes 4 "
      "--memory-limit 12 --format json ";
  const auto found = [&](const std::string& more) {
    const Outcome outcome = sluice(work + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out);
  };
  const auto keeping = found(""), offloading = found("--offload");
  EXPECT_LT(offloading.at("makespan"), keeping.at("makespan"));
  for (const int bytes : offloading.at("peak_bytes").get<std::vector<int>>()) EXPECT_LE(bytes, 12);
  EXPECT_GT(found("--offload --offload-bandwidth 2").at("makespan"), offloading.at("makespan"));
}

TEST_F(CliTest, CompareSortsByTheObjectiveAndSaysWhatTheBarrierCosts) {
  const auto compare = [&](const std::string& more) {
    const Outcome outcome =
        sluice("schedule compare --ranks 4 --micro-batches 8 --format json " + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out);
  };
  const auto barrier = compare("");
  EXPECT_THAT(barrier.at("remarks").dump(), HasSubstr("zb-h2 gains nothing over zb-h1"));
  const auto span = compare("--objective span");
  for (const char* key : {"makespan", "span"}) {
    const auto& rows = (key == std::string("span") ? span : barrier).at("rows");
    for (std::size_t i = 1; i < rows.size(); ++i) EXPECT_LE(rows[i - 1].at(key), rows[i].at(key));
  }
  EXPECT_EQ(span.at("rows")[1].at("schedule"), "zb-h2");
  // Half of everything per chunk: 1f1b and zb-v hold 4 whole micro-batches, gpipe 8.
  const auto limited = compare("--activation-bytes 10 --memory-limit 40");
  EXPECT_THAT(limited.at("left_out").dump(), HasSubstr("'gpipe' holds up to 80 bytes on rank 0"));
  for (const auto& row : limited.at("rows")) {
    for (const auto& bytes : row.at("peak_bytes")) EXPECT_LE(bytes, 40);
  }
  EXPECT_THAT(limited.at("rows").dump(), HasSubstr("\"zb-v\""));
}

TEST_F(CliTest, ScheduleTakesTheTimesOfATrainedRun) {
  const Outcome trained = sluice(small("--micro-batches 2 --trace t.json --metrics m.jsonl"));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const Outcome outcome =
      sluice("schedule --ranks 2 --micro-batches 4 --format json --profile t.json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_GT(json.at("makespan"), 0);
  EXPECT_THAT(json.at("times").get<std::string>(), HasSubstr("t.json"));
  expect_refusal(sluice("schedule --ranks 2 --profile m.jsonl"), 3,
                 "'m.jsonl' is no trace; legal is what 'sluice train' writes for --trace");
  const Outcome shared = sluice("schedule --ranks 1 --tensor 2 --profile t.json");
  EXPECT_THAT(shared.out, HasSubstr("2 ranks share each stage: in a step one makes")) << shared.err;
  const Outcome table = sluice("schedule compare --ranks 2 --micro-batches 4 --profile t.json");
  EXPECT_THAT(table.out, HasSubstr("Times from t.json"));
}

// Links of 2 ms and 1000 bytes/ms of a pipeline of two, as `sluice doctor --output` writes them.
constexpr const char* kClusterOfTwo = R"({"format": "sluice-cluster", "version": 1,
  "sluice": "", "mpi": "", "pipeline": 2, "replicas": 1, "hosts": [{"name": "a", "cores": 1}],
  "ranks": [{"rank": 0, "host": "a", "replica": 0, "pipeline_rank": 0},
            {"rank": 1, "host": "a", "replica": 0, "pipeline_rank": 1}],
  "links": [
    {"from": 0, "to": 1, "latency_s": 0.002, "bandwidth_bytes_per_s": 1e6, "over": "",
     "shared_bandwidth_bytes_per_s": 0, "advanced_while_computing": 0},
    {"from": 1, "to": 0, "latency_s": 0.002, "bandwidth_bytes_per_s": 1e6, "over": "",
     "shared_bandwidth_bytes_per_s": 0, "advanced_while_computing": 0}],
  "pairs_left_out": 0})";

TEST_F(CliTest, ScheduleTakesTheLinksOfACluster) {
  std::ofstream(path("c.json")) << kClusterOfTwo;
  const std::string rest = " --micro-batches 1 --schedule gpipe --format json --message-bytes 3000";
  const Outcome outcome = sluice("schedule --cluster c.json" + rest);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  // Two forwards of 1, two backwards of 2, two messages of 2 + 3000 / 1000.
  EXPECT_DOUBLE_EQ(json.at("makespan").get<double>(), 1 + 5 + 1 + 2 + 5 + 2);
  EXPECT_THAT(json.at("times").get<std::string>(), HasSubstr("c.json: 2 measured links"));
  const auto by_options = nlohmann::json::parse(
      sluice("schedule --ranks 2 --message-time 2 --bandwidth 1000" + rest).out);
  EXPECT_EQ(json.at("makespan"), by_options.at("makespan"));
  for (const char* command : {"schedule compare", "schedule auto --effort 0"}) {
    const Outcome other = sluice(std::string(command) + " --micro-batches 2 --cluster c.json");
    EXPECT_EQ(other.code, 0) << other.err;
  }
}

// A run of one rank: an embedding, a block and a head, in milliseconds. Two ranks that share the
// block sum 1000 bytes of each in F and scatter as many in I; of a gather both have 500 in I.
constexpr const char* kProfileOfOne = R"({"layers": {"first": [0, 3],
  "times": [[0, 0, 0], [8, 8, 8], [4, 4, 4]], "tensor_ranks": 1, "tensor_shards": 8, "collectives":
  [[[], [], []], [[["sum", 1000]], [["reduce-scatter", 1000], ["all-gather", 1000]], []],
   [[], [], []]]}, "traceEvents": [
  {"ph": "X", "pid": 0, "tid": 1, "ts": 0, "dur": 12000, "name": "0F0", "cat": "compute"},
  {"ph": "X", "pid": 0, "tid": 1, "ts": 12000, "dur": 24000, "name": "0B0", "cat": "compute"}]})";

TEST_F(CliTest, ScheduleCountsWhatTensorRanksExchange) {
  std::ofstream(path("t.json")) << kProfileOfOne;
  const std::string work = " --micro-batches 2 --format json --profile t.json";
  const auto simulated = [&](const std::string& words) {
    const Outcome outcome = sluice("schedule " + words + work);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out);
  };
  const auto one = simulated("--ranks 1");
  EXPECT_DOUBLE_EQ(one.at("makespan").get<double>(), 2 * 36);
  EXPECT_FALSE(one.contains("tensor"));
  EXPECT_EQ(one, simulated("--ranks 1 --tensor 1"));
  // Half of the compute. Messages take 1, and of 1000 bytes in two parts the other half 500 / 250:
  // a sum of two of both, a reduce-scatter and a gather one each.
  EXPECT_THAT(simulated("--ranks 1 --tensor 2").at("remarks").dump(),
              HasSubstr("collectives of tensor ranks take no time here"));
  const std::string costs = " --tensor 2 --tensor-time 1 --tensor-bandwidth 250";
  const double each = (2 + 4) + (1 + 2) + (1 + 2);
  const auto two = simulated("--ranks 1" + costs);
  EXPECT_DOUBLE_EQ(two.at("makespan").get<double>(), 2 * (18 + each));
  EXPECT_EQ(two.at("tensor"),
            (nlohmann::json{{"ranks", 2}, {"calls", 6.0}, {"bytes", 5000.0}, {"time", 2 * each}}));
  // Over two stages a rank makes half of them. The block is the longer one.
  const auto stages = simulated("--ranks 2 --schedule gpipe" + costs);
  EXPECT_EQ(stages.at("tensor").at("calls"), 3.0);
  EXPECT_DOUBLE_EQ(stages.at("busy")[0].get<double>(), 2 * (12 + each));
  EXPECT_DOUBLE_EQ(stages.at("busy")[1].get<double>(), 2 * 6);
  EXPECT_EQ(simulated("auto --ranks 1" + costs).at("makespan"), two.at("makespan"));
  const Outcome table =
      sluice("schedule compare --ranks 2 --micro-batches 2 --profile t.json" + costs);
  EXPECT_THAT(table.out, HasSubstr("2 ranks share each stage: in a step one makes 3 collectives of "
                                   "0.0 MiB in all, which take 12 "))
      << table.err;
}

TEST_F(CliTest, ScheduleRefusesTensorRanksWhoseCostsItDoesNotKnow) {
  std::ofstream(path("t.json")) << kProfileOfOne;
  std::ofstream(path("c.json")) << kClusterOfTwo;
  const auto refused = [&](const std::string& words, const std::string& what) {
    expect_refusal(sluice("schedule --ranks 2 --tensor " + words), 2, what);
  };
  refused("2", "what ranks exchange that share a stage is known of a --profile alone");
  refused("0 --profile t.json", "option --tensor");
  refused("3 --profile t.json", "has 8 tensor shards; legal: 1, or 8 divided by a power of two");
  refused("2 --profile t.json --cluster c.json",
          "'c.json' was written for 1 tensor rank, the schedule has 2; start 'sluice doctor "
          "--tensor 2 --output FILE'");
  std::ofstream(path("old.json")) << R"({"traceEvents": [
  {"ph": "X", "pid": 0, "tid": 1, "ts": 0, "dur": 1, "name": "0F0", "cat": "compute"},
  {"ph": "X", "pid": 0, "tid": 1, "ts": 1, "dur": 1, "name": "0B0", "cat": "compute"}]})";
  refused("2 --profile old.json", "'old.json' does not say what ranks exchange that share a stage");
  std::string text = kProfileOfOne;
  std::ofstream(path("t.json")) << text.replace(text.find("ranks\": 1"), 9, "ranks\": 4");
  refused("2 --profile t.json", "was measured with 4 tensor ranks; legal: 4, or a profile of one");
}

TEST_F(CliTest, ScheduleRefusesAClusterThatDoesNotFit) {
  std::ofstream(path("c.json")) << kClusterOfTwo;
  expect_refusal(sluice("schedule --cluster c.json --links 0-1:2"), 2,
                 "option --links: --cluster determines it");
  for (const char* command : {"schedule", "schedule compare", "schedule auto"}) {
    expect_refusal(sluice(std::string(command) + " --cluster c.json --ranks 3"), 2,
                   "'c.json' has the links of a pipeline of 2 ranks, the schedule has 3");
  }
  expect_refusal(sluice("schedule --cluster none.json"), 3, "none.json");
  std::ofstream(path("c.json")) << "{}";
  expect_refusal(sluice("schedule --cluster c.json"), 3, "'format' is missing");
}

TEST_F(CliTest, ScheduleAutoFindsOneWithinTheLimitAndSaysHowGoodItIs) {
  const char* const options =
      "--ranks 4 --micro-batches 12 --memory-limit 4 --effort 100000 --format json";
  const Outcome outcome = sluice(std::string("schedule auto ") + options);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json.at("schedule"), "auto");
  EXPECT_LE(json.at("makespan"), 3 * 12 + 3);  // zb-h1
  EXPECT_LE(json.at("lower_bound"), json.at("makespan"));
  for (const int each : json.at("peak_in_flight")) {
    EXPECT_LE(each, 4 * json.at("chunks").get<int>());
  }
  EXPECT_GE(json.at("candidates").size(), 8U);
  EXPECT_EQ(sluice(std::string("schedule --schedule auto ") + options).out, outcome.out);
}

TEST_F(CliTest, ScheduleAutoSaysWhatTheBarrierCosts) {
  const std::string shape = "schedule auto --ranks 4 --micro-batches 8 --chunks 1 --effort 0 ";
  EXPECT_THAT(sluice(shape).out, HasSubstr("zb-h2 gains nothing over zb-h1"));
  EXPECT_THAT(sluice(shape + "--objective span").out, Not(HasSubstr("gains nothing")));
}

TEST_F(CliTest, ScheduleAutoCutsLayersAndWritesAFile) {
  const std::string command =
      "schedule auto --ranks 2 --micro-batches 4 --layers 4 --forward-time 6,1,1,1 --effort 0 ";
  const Outcome grid = sluice(command + "--chunks 1");
  ASSERT_EQ(grid.code, 0) << grid.err;
  EXPECT_THAT(grid.out, HasSubstr("layers by stage: 0, 1-3"));
  EXPECT_THAT(grid.out, HasSubstr("heuristic"));
  const Outcome written = sluice(command + "--format file --output written");
  ASSERT_EQ(written.code, 0) << written.err;
  const Outcome read = sluice("schedule --file written --format json");
  ASSERT_EQ(read.code, 0) << read.err;
  EXPECT_EQ(nlohmann::json::parse(read.out).at("schedule"), "auto");
}

// --- sizes beyond any model: refused, or planned, before the time-out of a command ---

TEST_F(CliTest, ChunksBeyondTheLayersAreRefusedWithTheMostThatAreLegal) {
  const std::string dry = "train --dry-run --schedule interleaved ";
  expect_refusal(sluice(dry + "--chunks 100000 --layers 60000"), 2, "from 1 to 1024");
  expect_refusal(sluice(dry + "--chunks 100000000"), 2, "from 1 to 1024");
  expect_refusal(sluice(dry + "--chunks 9 --layers 6"), 2, "the nearest legal value is 8");
  expect_refusal(mpirun(2, SLUICE_PROGRAM, dry + "--chunks 5 --layers 6"), 2,
                 "10 stages, but --layers 6 with embedding and head fill at most 8; the nearest "
                 "legal value is 4");
  EXPECT_EQ(sluice(dry + "--chunks 8 --layers 6").code, 0);
  EXPECT_EQ(mpirun(3, SLUICE_PROGRAM, "train --dry-run --schedule zb-v --layers 1").code, 0);
  EXPECT_THAT(mpirun(3, SLUICE_PROGRAM, dry + "--layers 2").out,
              HasSubstr("warning: 2 of 6 stages have no layers"));
  expect_refusal(sluice("schedule --chunks 100000000"), 2, "from 1 to 1024");
  expect_refusal(sluice("schedule compare --chunks 100000000"), 2, "from 1 to 1024");
  expect_refusal(sluice("schedule auto --chunks 1000"), 2, "from 1 to 64");
  expect_refusal(sluice("train --dry-run --schedule auto --layers 1000 --chunks 1000"), 2,
                 "chunks is 1000; the nearest legal value is 64");
}

TEST_F(CliTest, MicroBatchesBeyondAPlanAreRefusedWithBothSizes) {
  expect_refusal(sluice("train --dry-run --schedule interleaved --chunks 4 --micro-batches 600000"),
                 2, "4 stages with 600000 micro-batches each");
  expect_refusal(sluice("schedule auto --ranks 4 --micro-batches 100001"), 2,
                 "more than 400000 pairs of stage and micro-batch");
}

// What the first keeps of a micro-batch is more than 2^64 bytes.
TEST_F(CliTest, AModelThatNoHostHoldsIsPlanned) {
  const std::string layers = "train --dry-run --layers 8192 ";
  for (const char* rest : {"--width 262144 --heads 4096 --context 1048576",
                           "--width 262144 --heads 4096 --context 65536",
                           "--width 4096 --schedule interleaved --chunks 1024"}) {
    const Outcome planned = sluice(layers + rest);
    EXPECT_EQ(planned.code, 10) << planned.err;
    EXPECT_NE(planned.err.find("but the plan needs"), std::string::npos) << planned.err;
  }
}

TEST_F(CliTest, ScheduleCompareTakesFilesSubsetsAndAuto) {
  ASSERT_EQ(sluice("schedule --schedule zb-h1 --format file --output mine.json").code, 0);
  ASSERT_EQ(sluice("schedule --schedule gpipe --format csv --output theirs.csv").code, 0);
  const auto names = [&](const std::string& options) {
    const Outcome outcome = sluice("schedule compare --format json " + options);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    std::multiset<std::string> found;
    const auto json = nlohmann::json::parse(outcome.out);
    for (const auto& row : json.at("rows")) {
      found.insert(row.at("schedule").get<std::string>());
    }
    return found;
  };
  using Names = std::multiset<std::string>;
  EXPECT_EQ(names("--schedules 1f1b,auto --files mine.json"), (Names{"1f1b", "auto", "mine.json"}));
  EXPECT_EQ(names("--files mine.json,theirs.csv"), (Names{"mine.json", "theirs.csv"}));
  EXPECT_EQ(names("--schedules gpipe"), Names{"gpipe"});
  const Outcome table =
      sluice("schedule compare --schedules 1f1b,zb-v --files mine.json --activation-bytes 6");
  EXPECT_THAT(table.out, StartsWith("schedule   chunks  makespan  span  bubble_makespan  "));
  EXPECT_THAT(table.out,
              ContainsRegex("\n1f1b +1 +33 +33 +0\\.272727 +0\\.272727 +4 +24 +48 +eager,"));
  EXPECT_EQ(lines_with(table.out, "  eager, rendezvous, bounded, nccl, nccl-edges"), 3);
  expect_refusal(sluice("schedule compare --schedules 1f1b,zbv"), 2, "did you mean 'zb-v'");
  expect_refusal(sluice("schedule compare --ranks 2 --files mine.json"), 2, "for 4 ranks");
  expect_refusal(sluice("schedule compare --files none.json"), 3, "none.json");
}

TEST_F(CliTest, TracesHaveArrowsOfMessagesAndTheBytesHeld) {
  const Outcome outcome = sluice(
      "schedule --ranks 2 --micro-batches 3 --message-time 0.5 --activation-bytes 7 --format "
      "trace");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::map<std::string, int> phases;
  std::int64_t most = 0;
  const auto json = nlohmann::json::parse(outcome.out);
  for (const auto& event : json.at("traceEvents")) {
    ++phases[event.at("ph").get<std::string>()];
    if (event.at("ph") == "C") most = std::max<std::int64_t>(most, event.at("args").at("value"));
  }
  EXPECT_EQ(phases["s"], 2 * 3);
  EXPECT_EQ(phases["f"], 2 * 3);
  EXPECT_GT(phases["C"], 0);
  EXPECT_EQ(most, 2 * 7);
}

TEST_F(CliTest, PicturesOfManyActionsAreRefused) {
  expect_refusal(sluice("schedule --ranks 256 --micro-batches 1024 --format svg --output l.svg"), 2,
                 "524288 actions; at most 100000 are legal, a trace holds more");
  EXPECT_FALSE(std::filesystem::exists(path("l.svg")));
}

TEST_F(CliTest, ScheduleSaysWhatIsNotProven) {
  const Outcome outcome = sluice("schedule --ranks 1024 --micro-batches 2048");
  EXPECT_THAT(outcome.out, HasSubstr("transports       not proven (no plan is made of more than"));
  expect_refusal(sluice("schedule auto --ranks 4096 --micro-batches 16384"), 2,
                 "nearest legal: 97 micro-batches");
}

TEST_F(CliTest, QueuesNeedAPlan) {
  const Outcome free = sluice("schedule --schedule zb-v --message-time 0.1 --format json");
  const Outcome queues =
      sluice("schedule --schedule zb-v --message-time 0.1 --format json --queues nccl");
  ASSERT_EQ(queues.code, 0) << queues.err;
  EXPECT_LT(nlohmann::json::parse(free.out).at("makespan").get<double>(),
            nlohmann::json::parse(queues.out).at("makespan").get<double>());
  expect_refusal(sluice("schedule --ranks 1024 --micro-batches 2048 --queues nccl"), 2,
                 "too many to plan; at most 2000000");
}

TEST_F(CliTest, UnevenRanksExplainTheirBubbles) {
  EXPECT_THAT(sluice("schedule --ranks 2").out, Not(HasSubstr("may idle more")));
  EXPECT_THAT(sluice("schedule --ranks 3 --micro-batches 2 --forward-time 1,9,9").out,
              HasSubstr("where ranks differ, that one may idle more"));
}

TEST_F(CliTest, ScheduleAutoTakesAListOfChunks) {
  const Outcome outcome = sluice(
      "schedule auto --ranks 2 --micro-batches 4 --layers 6 --chunks 3,1 --effort 0 --format json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::set<int> chunks;
  const auto json = nlohmann::json::parse(outcome.out);
  for (const auto& row : json.at("candidates")) {
    chunks.insert(row.at("chunks").get<int>());
  }
  EXPECT_EQ(chunks, (std::set<int>{1, 3}));
  expect_refusal(sluice("schedule auto --overlap-time 2"), 2,
                 "option --overlap-time: auto plans for training");
  EXPECT_THAT(sluice("schedule compare --schedules auto,1f1b --overlap-time 2").out,
              HasSubstr("auto counts no --overlap-time"));
  for (const char* wrong : {"0", "1,", ",1", "65", "two", "1.5", "-1", "''"}) {
    expect_refusal(sluice(std::string("schedule auto --chunks ") + wrong), 2, "option --chunks");
  }
}

TEST_F(CliTest, MemoryLimitsMayBeOnePerRank) {
  EXPECT_EQ(sluice("schedule --ranks 4 --memory-limit 4,3,2,1").code, 0);
  expect_refusal(sluice("schedule --ranks 4 --memory-limit 4,3,1,1"), 8,
                 "2 micro-batches on rank 2; --memory-limit allows 1");
  expect_refusal(sluice("schedule --ranks 4 --memory-limit 4,3,2"), 2,
                 "3 numbers; legal is one number, or 4 of them");
  expect_refusal(sluice("schedule auto --ranks 4 --memory-limit 4,3,0,1"), 2, "from 1 up");
  expect_refusal(sluice("schedule --ranks 2 --activation-bytes 5 --memory-limit 10,4"), 8,
                 "5 bytes on rank 1; --memory-limit allows 4");
  const Outcome found = sluice(
      "schedule auto --ranks 4 --micro-batches 8 --chunks 1 --memory-limit 1,2,3,4 --format json");
  ASSERT_EQ(found.code, 0) << found.err;
  const auto peaks = nlohmann::json::parse(found.out).at("peak_in_flight");
  for (std::size_t rank = 0; rank < 4; ++rank) EXPECT_LE(peaks[rank].get<std::size_t>(), rank + 1);
}

TEST_F(CliTest, ScheduleSaysWhereMessagesWereFree) {
  for (const char* command : {"schedule", "schedule compare", "schedule auto --effort 0"}) {
    EXPECT_THAT(sluice(command).out, HasSubstr("messages take no time here")) << command;
    for (const char* given : {" --message-time 0.1", " --message-time 0", " --links 0-1:0.5",
                              " --bandwidth 5 --message-bytes 3", " --ranks 1"}) {
      const Outcome outcome = sluice(std::string(command) + given);
      EXPECT_THAT(outcome.out, Not(HasSubstr("messages take no time"))) << command << given;
    }
  }
}

// A model of two blocks has four layers. So no more than four stages can be planned for it.
TEST_F(CliTest, AutoPlansTheModelThatTheProfileIsOf) {
  const Outcome run = mpirun(2, SLUICE_PROGRAM, small("--micro-batches 4 --trace t.json"));
  ASSERT_EQ(run.code, 0) << run.err;
  const Outcome planned =
      sluice("schedule auto --ranks 2 --micro-batches 4 --format json --profile t.json");
  ASSERT_EQ(planned.code, 0) << planned.err;
  const auto json = nlohmann::json::parse(planned.out);
  EXPECT_LE(json.at("stages"), 4);
  EXPECT_EQ(json.at("first_layer").back(), 4);
  const Outcome anywhere = sluice(
      "schedule auto --ranks 2 --micro-batches 4 --layers any --chunks 8 --profile t.json --format "
      "file --output empty.json");
  ASSERT_EQ(anywhere.code, 0) << anywhere.err;
  const Outcome shown = sluice("schedule --file empty.json --profile t.json");
  EXPECT_THAT(shown.out, HasSubstr("12 of 16 stages are empty")) << shown.err;
  const Outcome trained = mpirun(2, SLUICE_PROGRAM, small("--schedule-file empty.json"));
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(trained.out, HasSubstr("warning: 12 of 16 stages have no layers"));
}

TEST_F(CliTest, ATrainingSearchesByTheCostsThatTheCommandCounts) {
  std::ofstream(path("t.json")) << kProfileOfOne;
  std::string text = kClusterOfTwo;
  const auto alter = [&](const std::string& from, const std::string& to) {
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
  };
  alter("\"pipeline\": 2",
        "\"pipeline\": 1, \"tensor\": 2, \"collectives\": [{\"kind\": \"sum\", "
        "\"latency_s\": 0.002, \"bandwidth_bytes_per_s\": 1e6}]");
  alter("\"pipeline_rank\": 0", "\"pipeline_rank\": 0, \"tensor_rank\": 0");
  alter("\"pipeline_rank\": 1", "\"pipeline_rank\": 0, \"tensor_rank\": 1");
  std::ofstream(path("c.json")) << text;
  const Outcome planned = sluice(
      "schedule auto --micro-batches 4 --format json --profile t.json --cluster c.json --tensor 2");
  ASSERT_EQ(planned.code, 0) << planned.err;
  // Half of the compute, and a sum of 2 ms and 1000 bytes.
  EXPECT_DOUBLE_EQ(nlohmann::json::parse(planned.out).at("makespan").get<double>(), 4 * (18 + 3));
  std::ofstream(path("text.txt")) << std::string(400, 'a');
  const std::string train =
      "train --data text.txt --heads 2 --width 16 --context 16 --steps 1 --micro-batches 4 "
      "--tensor 2 --schedule auto --profile t.json --cluster c.json --layers ";
  const Outcome run = mpirun(2, SLUICE_PROGRAM, train + "1");
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out,
              AllOf(HasSubstr("by t.json: means of"), HasSubstr("c.json: 0 measured links"),
                    HasSubstr("promised by the profile"), HasSubstr("step 84 ms promised")));
  expect_refusal(mpirun(2, SLUICE_PROGRAM, train + "2"), 2,
                 "option --profile: 't.json' has 3 layers, embedding and head included, this model "
                 "has 4");
}

TEST_F(CliTest, APromiseStandsBesideWhatARunMeasured) {
  ASSERT_EQ(mpirun(2, SLUICE_PROGRAM, small("--micro-batches 4 --trace t.json")).code, 0);
  const Outcome planned = sluice(
      "schedule auto --ranks 2 --micro-batches 4 --profile t.json --format file --output a.json");
  ASSERT_EQ(planned.code, 0) << planned.err;
  const auto made_for = nlohmann::json::parse(read_file(path("a.json"))).at("made_for");
  const Outcome run = mpirun(2, SLUICE_PROGRAM, small("--schedule-file a.json --metrics m.jsonl"));
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, ContainsRegex("promised by the schedule file, .* measured; step .* ms "
                                     "promised, .* ms measured"));
  const std::string first = read_file(path("m.jsonl"));
  const auto layers =
      nlohmann::json::parse(first.substr(0, first.find('\n'))).at("run").at("layers");
  EXPECT_EQ(layers.at("first"), made_for.at("first_layer"));

  const Outcome searched = mpirun(2, SLUICE_PROGRAM, small("--micro-batches 4 --schedule auto"));
  EXPECT_THAT(searched.out, AllOf(HasSubstr("promised by layer costs"),
                                  HasSubstr("by the matmuls of layers alone; --profile and")))
      << searched.err;
  const Outcome other =
      mpirun(2, SLUICE_PROGRAM,
             "train --data text.txt --layers 3 --heads 2 --width 16 --context 16 --steps 1 "
             "--schedule-file a.json");
  EXPECT_THAT(other.out, HasSubstr("searched for a model of 4 layers")) << other.err;
  std::string edited = read_file(path("a.json"));
  const std::size_t list = edited.find("\"first_layer\":[") + 15;
  const std::size_t stages = nlohmann::json::parse(edited).at("stages");
  std::string without = "0";
  for (std::size_t i = 0; i < stages; ++i) without += i + 1 < stages ? ",0" : ",4";
  edited.replace(list, edited.find(']', list) - list, without);
  write("b.json", edited);
  expect_refusal(sluice("train --dry-run --layers 2 --heads 2 --width 16 --schedule-file b.json"),
                 2, "leaves its first or last stage without layers");
  const Outcome named = mpirun(2, SLUICE_PROGRAM, small("--micro-batches 4"));
  EXPECT_THAT(named.out, Not(HasSubstr("promised")));
}

}  // namespace
}  // namespace sluice::testing
