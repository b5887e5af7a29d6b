// The program as a user meets it: exit codes, one clear line, no partial output.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace sluice {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct Outcome {
  int code = -1;
  std::string out, err;
};

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

int lines_with(const std::string& text, const std::string& part) {
  std::istringstream in(text);
  int count = 0;
  for (std::string line; std::getline(in, line);) {
    count += line.find(part) != std::string::npos ? 1 : 0;
  }
  return count;
}

// A directory of its own for each test; $DIR in a command stands for it.
class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "sluice_cli_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
    write("text.txt", std::string(4000, 'a'));
  }
  void TearDown() override { fs::remove_all(directory_); }

  fs::path path(const std::string& name) const { return directory_ / name; }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  // A shell command; a hang ends after half a minute with code 124.
  Outcome shell(const std::string& command) const {
    const std::string line = "cd '" + directory_.string() + "' && exec timeout 30 " + command +
                             " > '.out' 2> '.err' < /dev/null";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(path(".out")),
            read_file(path(".err"))};
  }
  Outcome sluice(const std::string& arguments) const {
    return shell(std::string(SLUICE_PROGRAM) + " " + arguments);
  }
  Outcome mpirun(int ranks, const std::string& program, const std::string& arguments) const {
    return shell(std::string("env " SLUICE_MPI_ENVIRONMENT " " SLUICE_MPIEXEC " --timeout 25 -n ") +
                 std::to_string(ranks) + " " + program + " " + arguments);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      const std::string name = entry.path().filename().string();
      if (name[0] != '.') names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  fs::path directory_;
};

constexpr const char* kSmall =
    "train --data text.txt --layers 2 --heads 2 --width 16 --context 16 --steps 2 ";

void expect_refusal(const Outcome& outcome, int code, const std::string& part) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
  EXPECT_THAT(outcome.err, StartsWith("sluice: error: "));
  EXPECT_THAT(outcome.err, HasSubstr(part));
  EXPECT_THAT(outcome.out, IsEmpty());
}

// --- what is refused, one line each ---

struct Refusal {
  const char* name;
  std::string arguments;
  int code;
  const char* part;  // of the message
};

class RefusalTest : public CliTest, public ::testing::WithParamInterface<Refusal> {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    write("empty.txt", "");
    write("short.txt", "too short");
    write("odd.bin", "12345");
    write("tokens.bin", std::string(4000, '\x01'));  // every token is 257
    write("bad.conf", "layer = 2\n");
    fs::create_directory(path("garbled"));
    write("garbled/model.safetensors", "no header at all, but long enough to be read");
  }
};

TEST_P(RefusalTest, SaysOneClearLineAndLeavesNothing) {
  const std::vector<std::string> before = files();
  const Outcome outcome = sluice(GetParam().arguments);
  expect_refusal(outcome, GetParam().code, GetParam().part);
  EXPECT_EQ(lines_with(outcome.err, ""), 1) << outcome.err;
  EXPECT_EQ(files(), before);
}

std::string case_name(const ::testing::TestParamInfo<Refusal>& tested) { return tested.param.name; }

std::string small(const std::string& more) { return kSmall + more; }

INSTANTIATE_TEST_SUITE_P(
    Usage, RefusalTest,
    ::testing::Values(
        Refusal{"NoRanksForReplicas", small("--replicas 2"), 2, "replicas"},
        Refusal{"PipelineWithoutRanks", small("--pipeline 3"), 2, "pipeline"},
        Refusal{"ZeroSize", small("--layers 0"), 2, "--layers"},
        Refusal{"NegativeSize", small("--width -8"), 2, "--width"},
        Refusal{"OverflowingSize", small("--context 99999999999999999999"), 2, "--context"},
        Refusal{"SizeBeyondMemory", small("--width 2147483646 --heads 2"), 2, "--width"},
        Refusal{"ZeroSteps", small("--steps 0"), 2, "--steps"},
        Refusal{"ZeroMicroBatches", small("--micro-batches 0"), 2, "--micro-batches"},
        Refusal{"HeadsThatDoNotDivide", small("--heads 3"), 2, "--heads"},
        Refusal{"UnknownOption", small("--layer 2"), 2, "'--layers'"},
        Refusal{"UnknownKey", small("--config bad.conf"), 2, "bad.conf"},
        Refusal{"UnknownSchedule", small("--schedule 2f2b"), 2, "2f2b"},
        Refusal{"UnknownModel", small("--model bert"), 2, "bert"},
        Refusal{"ChunksThatTheScheduleLacks", small("--chunks 2 --save run --metrics m.jsonl"), 2,
                "chunk"},
        Refusal{"PartitionOfOtherLayers", small("--partition 3"), 2, "partition"},
        Refusal{"NoData", "train", 2, "--data"}, Refusal{"UnknownCommand", "trian", 2, "'train'"},
        Refusal{"ScheduleOfNothing", "schedule --ranks 0", 2, "--ranks"},
        Refusal{"ScheduleFileWithAShape", "schedule --file overlapped.csv --ranks 2", 2, "--ranks"},
        Refusal{"ScheduleFileMissing", "schedule --file none.csv", 8, "none.csv"},
        Refusal{"ScheduleFileOfGarbage", "schedule --file text.txt", 8, "row 1, column 1"},
        Refusal{"ComparisonOfNothing", "schedule compare --ranks 0", 2, "--ranks"},
        Refusal{"AutoInTooLittleMemory", "schedule auto --ranks 2 --memory-limit 0.5", 2,
                "from 1 up"},
        Refusal{"AutoInTooFewBytes",
                "schedule auto --ranks 2 --memory-limit 7 --weight-activation-bytes 8", 2,
                "the nearest legal limit is 8 bytes"},
        Refusal{"AutoOfTooFewLayers", "schedule auto --ranks 3 --layers 2", 2, "at most 2 ranks"},
        Refusal{"ScheduleTooLarge", "schedule --ranks 100000 --micro-batches 100000", 2,
                "--micro-batches 83"},
        Refusal{"TimesOfOtherStages", "schedule --ranks 3 --forward-time 1,2", 2, "--forward-time"},
        Refusal{"TimesOfOtherRanks", "schedule compare --ranks 3 --forward-time 1,2", 2,
                "--forward-time"},
        Refusal{"BytesThatAreNotWhole", "schedule --activation-bytes 1.5", 2, "--activation-bytes"},
        Refusal{"OverlapOfNoTime", "schedule --overlap-time fast", 2, "--overlap-time"},
        Refusal{"LinkOfNothing", "schedule --links 0:1", 2, "--links"},
        Refusal{"LinkToItself", "schedule --links 1-1:2", 2, "rank 1 to 1"},
        Refusal{"MemoryLimitOfNothing", "schedule --memory-limit all", 2,
                "micro-batches in flight"},
        Refusal{"MemoryLimitOfMicroBatches",
                "schedule --schedule zb-h2 --ranks 4 --memory-limit 6.5", 8,
                "up to 7 micro-batches on rank 0"},
        Refusal{"MemoryLimitExceeded", "schedule --activation-bytes 2 --memory-limit 7", 8,
                "rank 0"},
        Refusal{"MemoryLimitOfAll", "schedule compare --activation-bytes 2 --memory-limit 1", 2,
                "--memory-limit"},
        Refusal{"ProfileMissing", "schedule --profile none.json", 3, "none.json"},
        Refusal{"ProfileOfGarbage", "schedule --profile text.txt", 3, "neither a trace"},
        Refusal{"ProfileBesideTimes", "schedule --profile text.txt --forward-time 2", 2,
                "--forward-time"},
        Refusal{"DigestOfNothing", "digest", 2, "DIR"},
        Refusal{"GenerateFromNothing", "generate", 2, "--weights"}),
    case_name);

INSTANTIATE_TEST_SUITE_P(
    Files, RefusalTest,
    ::testing::Values(
        Refusal{"DataMissing", small("--data none.txt"), 3, "none.txt"},
        Refusal{"DataEmpty", small("--data empty.txt"), 3, "empty.txt"},
        Refusal{"DataShort", small("--data short.txt"), 3, "short.txt"},
        Refusal{"DataOdd", small("--data odd.bin"), 3, "odd.bin"},
        Refusal{"TokenBeyondVocabulary", small("--data tokens.bin"), 3, "257"},
        Refusal{"SaveBelowAFile", small("--save text.txt/run"), 4, "text.txt/run"},
        Refusal{"MetricsBelowAFile", small("--save run --metrics text.txt/m.jsonl"), 4,
                "text.txt/m.jsonl"},
        Refusal{"TraceBelowAFile", small("--trace text.txt/t.json"), 4, "text.txt/t.json"},
        Refusal{"ResumeFromNothing", small("--resume none --save run --metrics m.jsonl"), 5,
                "none"},
        Refusal{"DigestOfGarbage", "digest garbled", 5, "model.safetensors"},
        Refusal{"GenerateWithoutConfiguration", "generate --weights garbled", 5, "config.json"}),
    case_name);

// --- training and its files ---

class TrainedTest : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    trained_ = sluice(small("--save run --metrics metrics.jsonl"));
    ASSERT_EQ(trained_.code, 0) << trained_.err;
  }
  Outcome trained_;
};

TEST_F(TrainedTest, WritesWeightsThatDigestAndGenerateRead) {
  const Outcome digest = sluice("digest run");
  EXPECT_EQ(digest.code, 0) << digest.err;
  EXPECT_EQ(lines_with(digest.out, "  total"), 1);
  EXPECT_EQ(lines_with(digest.out, "  blocks.0.norm1.weight"), 1);

  const std::string arguments = "generate --weights run --prompt abc --tokens 20 --seed 5";
  const Outcome alone = sluice(arguments);
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(alone.out.size(), 3U + 20U + 1U);
  EXPECT_THAT(alone.out, StartsWith("abc"));
  const Outcome three = mpirun(3, SLUICE_PROGRAM, arguments);
  EXPECT_EQ(three.code, 0) << three.err;
  EXPECT_EQ(three.out, alone.out);
}

TEST_F(TrainedTest, RefusesWeightsOfAnotherModel) {
  expect_refusal(sluice("train --data text.txt --layers 2 --heads 2 --width 32 --context 16 "
                        "--steps 4 --resume run"),
                 5, "token_embedding.weight");
}

TEST_F(TrainedTest, RefusesTruncatedWeights) {
  const fs::path weights = path("run/model.safetensors");
  fs::resize_file(weights, fs::file_size(weights) - 4);
  expect_refusal(sluice("digest run"), 5, "model.safetensors");
  expect_refusal(sluice("generate --weights run"), 5, "model.safetensors");
}

TEST_F(TrainedTest, RefusesADamagedConfiguration) {
  write("run/config.json", "{\"model\": {\"kind\": \"gpt2\"}}");
  expect_refusal(sluice("generate --weights run"), 5, "config.json");
  write("run/config.json", "{");
  expect_refusal(sluice("generate --weights run"), 5, "config.json");
}

TEST_F(CliTest, ALossThatIsNotFiniteEndsTheRunBeforeItIsSaved) {
  const Outcome outcome =
      sluice(small("--steps 50 --warmup 0 --learning-rate 1e30 --clip 0 --save run"));
  EXPECT_EQ(outcome.code, 7) << outcome.err;
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
  EXPECT_FALSE(fs::exists(path("run/model.safetensors")));
}

TEST_F(CliTest, ADryRunNeedsNoDataAndWritesNothing) {
  const std::vector<std::string> before = files();
  const Outcome outcome = sluice("train --dry-run --save run --metrics m.jsonl");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("total MiB"));
  EXPECT_EQ(files(), before);
}

// --- what needs no training ---

TEST_F(CliTest, HelpOfEveryCommandIsPrintedWithoutMpi) {
  for (const char* command : {"train", "generate", "schedule", "digest", "doctor"}) {
    const Outcome outcome = sluice(std::string(command) + " --help");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, StartsWith(std::string("Usage: sluice ") + command));
    EXPECT_THAT(outcome.err, IsEmpty());
  }
}

TEST_F(CliTest, WithoutACommandListsThem) {
  const Outcome outcome = sluice("");
  EXPECT_EQ(outcome.code, 2);
  for (const char* command : {"train", "generate", "schedule", "digest", "doctor"}) {
    EXPECT_EQ(lines_with(outcome.err, std::string("  ") + command), 1);
  }
  EXPECT_EQ(sluice("--help").code, 0);
  EXPECT_THAT(sluice("--version").out, StartsWith("sluice "));
}

TEST_F(CliTest, ScheduleDrawsAndCounts) {
  const Outcome grid = sluice("schedule --ranks 2 --micro-batches 3");
  EXPECT_EQ(grid.code, 0) << grid.err;
  EXPECT_THAT(grid.out, HasSubstr("F0 B0 F1 B1 F2 B2"));
  EXPECT_THAT(grid.out, HasSubstr("peak in flight   2 1"));
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
            nlohmann::json({"eager", "rendezvous", "bounded", "nccl-edges"}));
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
  for (const char* profile : {"t.json", "m.jsonl"}) {
    const Outcome outcome = sluice(
        std::string("schedule --ranks 2 --micro-batches 4 --format json --profile ") + profile);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const auto json = nlohmann::json::parse(outcome.out);
    EXPECT_GT(json.at("makespan"), 0);
    EXPECT_THAT(json.at("times").get<std::string>(), HasSubstr(profile));
  }
  const Outcome table = sluice("schedule compare --ranks 2 --micro-batches 4 --profile t.json");
  EXPECT_THAT(table.out, HasSubstr("Times from t.json"));
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

TEST_F(CliTest, OutputThatCannotBeWrittenIsAnError) {
  const Outcome outcome = shell("sh -c '" SLUICE_PROGRAM " schedule > /dev/full'");
  EXPECT_EQ(outcome.code, 4);
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
}

TEST_F(CliTest, DoctorWorksAlone) {
  const Outcome outcome = sluice("doctor");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("0 of 1"));
  EXPECT_THAT(outcome.out, HasSubstr("What looks wrong"));
}

// --- jobs of several ranks ---

TEST_F(CliTest, AJobIsRefusedOnceByAllItsRanks) {
  const Outcome layout = mpirun(3, SLUICE_PROGRAM, small("--pipeline 2"));
  expect_refusal(layout, 2, "--pipeline 3");
  const Outcome option = mpirun(3, SLUICE_PROGRAM, small("--layer 2"));
  expect_refusal(option, 2, "'--layers'");
}

TEST_F(CliTest, DoctorShowsEveryRankAndItsStage) {
  const Outcome outcome = mpirun(4, SLUICE_PROGRAM, "doctor --replicas 2");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("4 = pipeline 2 x replicas 2"));
  EXPECT_EQ(lines_with(outcome.out, "0 of 2"), 2) << outcome.out;
  EXPECT_EQ(lines_with(outcome.out, "1 of 2"), 2) << outcome.out;
}

TEST_F(CliTest, ARankThatThrowsEndsTheJobWithItsMessageFirstAndOnce) {
  const Outcome outcome = mpirun(3, SLUICE_FAILING_RANK, "one");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_THAT(outcome.err, StartsWith("sluice: error: stage 1 lost a number [rank 1]\n"));
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
}

TEST_F(CliTest, AForeignExceptionIsAnInternalError) {
  const Outcome outcome = mpirun(2, SLUICE_FAILING_RANK, "foreign");
  EXPECT_EQ(outcome.code, 70);
  EXPECT_THAT(outcome.err, StartsWith("sluice: error: not one of ours [rank 1]\n"));
}

TEST_F(CliTest, WhatAllRanksThrowIsPrintedOnceAndWhatNoneThrowsNever) {
  const Outcome all = mpirun(3, SLUICE_FAILING_RANK, "all");
  EXPECT_EQ(all.code, 2);
  EXPECT_THAT(all.err, StartsWith("sluice: error: refused by all\n"));
  EXPECT_EQ(lines_with(all.err, "sluice: error: "), 1) << all.err;
  const Outcome none = mpirun(3, SLUICE_FAILING_RANK, "none");
  EXPECT_EQ(none.code, 0);
  EXPECT_THAT(none.err, IsEmpty());
}

}  // namespace
}  // namespace sluice
