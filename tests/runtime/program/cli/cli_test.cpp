// The program as a user meets it: exit codes, one clear line, no partial output.
#include <fmt/core.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/runtime/program/cli/cli_tools.hpp"

namespace sluice::testing {
namespace {

// What the program says and computes on the CPU, whatever GPUs, emulated ones too, are there.
[[maybe_unused]] const int kNoGpus =
    setenv("CUDA_VISIBLE_DEVICES", "", 1) | setenv("SLUICE_EMULATED_DEVICES", "0", 1);

using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

TEST(RefusalLineTest, IsFoundBehindALineOfTheMpiLibrary) {
  expect_refusal({2, "", "[host] a warning of the MPI library\nsluice: error: no such option\n"}, 2,
                 "no such option");
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
    fs::create_symlink("gone", path("dangling"));
    write("garbled/model.safetensors", "no header at all, but long enough to be read");
    fs::copy(path("garbled"), path("damaged"));
    write("damaged/config.json", "{}");
  }
};

TEST_P(RefusalTest, SaysOneClearLineAndLeavesNothing) {
  const std::vector<std::string> before = files();
  const Outcome outcome = sluice(GetParam().arguments);
  expect_refusal(outcome, GetParam().code, GetParam().part);
  EXPECT_THAT(outcome.err, EndsWith(error_line(outcome.err) + "\n"));
  EXPECT_EQ(files(), before);
}

std::string case_name(const ::testing::TestParamInfo<Refusal>& tested) { return tested.param.name; }

INSTANTIATE_TEST_SUITE_P(
    Usage, RefusalTest,
    ::testing::Values(
        Refusal{"NoRanksForReplicas", small("--replicas 2"), 2, "replicas"},
        Refusal{"PipelineWithoutRanks", small("--pipeline 3"), 2, "pipeline"},
        Refusal{"ZeroSize", small("--layers 0"), 2, "--layers"},
        Refusal{"NegativeSize", small("--width -8"), 2, "--width"},
        Refusal{"OverflowingSize", small("--context 99999999999999999999"), 2, "--context"},
        Refusal{"SizeBeyondMemory", small("--width 2147483646 --heads 2"), 2, "--width"},
        Refusal{"MicroBatchBeyondShapes", small("--micro-batch-size 4294967296"), 2,
                "--micro-batch-size"},
        Refusal{"ZeroSteps", small("--steps 0"), 2, "--steps"},
        Refusal{"ZeroMicroBatches", small("--micro-batches 0"), 2, "--micro-batches"},
        Refusal{"HeadsThatDoNotDivide", small("--heads 3"), 2, "--heads"},
        Refusal{"UnknownOption", small("--layer 2"), 2, "'--layers'"},
        Refusal{"UnknownKey", small("--config bad.conf"), 2, "bad.conf"},
        Refusal{"UnknownSchedule", small("--schedule 2f2b"), 2, "2f2b"},
        Refusal{"StreamNarrowerThanMatmuls", small("--stream-precision bf16"), 2,
                "--stream-precision"},
        Refusal{"UnknownModel", small("--model bert"), 2, "bert"},
        Refusal{"UnknownRecomputation", small("--recompute full"), 2, "none, attention, block"},
        Refusal{"RecomputationOfOtherBlocks", small("--recompute block*900"), 2, "for 900 blocks"},
        Refusal{"LessMemoryThanIsNeeded", small("--memory 4K"), 2, "most of it for"},
        Refusal{"LessMemoryThanAnySettingNeeds", small("--memory 4K --recompute auto"), 2,
                "no --recompute needs less"},
        Refusal{"ChunksThatTheScheduleLacks", small("--chunks 2 --save run --metrics m.jsonl"), 2,
                "chunk"},
        Refusal{"PartitionOfOtherLayers", small("--partition 3"), 2, "partition"},
        Refusal{"MetricsOverTheData", small("--metrics text.txt"), 2, "--data names"},
        Refusal{"TraceOverTheMetrics", small("--metrics a --trace ./a"), 2, "--metrics names"},
        Refusal{"NoData", "train", 2, "--data"}, Refusal{"UnknownCommand", "trian", 2, "'train'"},
        Refusal{"ScheduleOfNothing", "schedule --ranks 0", 2, "--ranks"},
        Refusal{"ScheduleFileWithAShape", "schedule --file overlapped.csv --ranks 2", 2, "--ranks"},
        Refusal{"ScheduleFileMissing", "schedule --file none.csv", 3, "none.csv"},
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
        Refusal{"ProfileOfGarbage", "schedule --profile text.txt", 3, "is no trace"},
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
        Refusal{"DataShorterThanABatch", small("--batch-size 10000"), 3, "fewer than one batch"},
        Refusal{"DataOdd", small("--data odd.bin"), 3, "odd.bin"},
        Refusal{"TokenBeyondVocabulary", small("--data tokens.bin"), 3, "257"},
        Refusal{"SaveBelowAFile", small("--save text.txt/run"), 4, "text.txt/run"},
        Refusal{"MetricsBelowAFile", small("--save run --metrics text.txt/m.jsonl"), 4,
                "text.txt/m.jsonl"},
        Refusal{"TraceBelowAFile", small("--trace text.txt/t.json"), 4, "text.txt/t.json"},
        Refusal{"ResumeFromNothing", small("--resume none --save run --metrics m.jsonl"), 5,
                "none"},
        Refusal{"DryRunThatSavesBelowAFile", small("--dry-run --save text.txt/run"), 4,
                "text.txt/run"},
        Refusal{"DryRunThatResumesFromNothing", small("--dry-run --resume none"), 5, "none"},
        Refusal{"MoreMemoryThanThereIs", small("--vocabulary 16777216 --width 65536 --save run"),
                10, "the host has "},
        Refusal{"SaveIntoALinkToNothing", small("--save dangling"), 4,
                "'dangling': it is a link to 'gone', which is not there"},
        Refusal{"ResumeFromAFile", small("--resume text.txt"), 5, "'text.txt' is no directory"},
        Refusal{"WeightsInAFile", small("--weights text.txt"), 5, "'text.txt' is no directory"},
        Refusal{"DigestOfAFile", "digest text.txt", 5, "'text.txt' is no directory"},
        Refusal{"VerifyOfAFile", "verify text.txt", 5, "'text.txt' is no directory"},
        Refusal{"DigestOfGarbage", "digest damaged", 5, "config.json"},
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

TEST_F(TrainedTest, ACommandWhoseOutputIsLostFails) {
  for (const std::string& command :
       {std::string("schedule"), std::string("digest run"), std::string("inspect run"),
        std::string("doctor"), std::string("generate --weights run --tokens 5"),
        std::string("evaluate --weights run"), small("--dry-run")}) {
    const Outcome full = shell("sh -c '" SLUICE_PROGRAM " " + command + " > /dev/full'");
    EXPECT_EQ(full.code, 4) << command << ": " << full.err;
    EXPECT_EQ(lines_with(full.err, "sluice: error: cannot write to standard output"), 1) << command;
  }
  // A training has its saves.
  const Outcome trained = shell("sh -c '" SLUICE_PROGRAM " " + small("--save b") + " > /dev/full'");
  EXPECT_EQ(trained.code, 0) << trained.err;
  EXPECT_EQ(sluice("digest b").out, sluice("digest run").out);
}

TEST_F(TrainedTest, ATimelineReplacesNoSave) {
  const std::string before = sluice("digest run").out;
  for (const char* file : {"model.safetensors", "state.json"}) {
    expect_refusal(sluice(small("--trace run/step-00000002/" + std::string(file))), 4,
                   "holds something else than a timeline");
  }
  EXPECT_EQ(sluice("digest run").out, before);
  for (int time = 0; time < 2; ++time) EXPECT_EQ(sluice(small("--trace t.json")).code, 0);
}

TEST_F(TrainedTest, GenerateTakesAndGivesTokenNumbers) {
  const std::string base = "generate --weights run --temperature 0 --tokens 6 --stop-ids none ";
  const Outcome text = sluice(base + "--prompt ab");
  EXPECT_EQ(text.code, 0) << text.err;
  const Outcome ids = sluice(base + "--prompt-ids '97 98' --ids");
  EXPECT_EQ(ids.code, 0) << ids.err;
  std::string numbers;
  for (const char letter : text.out.substr(0, text.out.size() - 1)) {
    numbers += std::to_string(static_cast<unsigned char>(letter)) + " ";
  }
  EXPECT_EQ(ids.out, numbers + "\n");
  write("ids.txt", " 97\n98\t\n");
  EXPECT_EQ(shell("sh -c '" SLUICE_PROGRAM " " + base + "--prompt-ids - --ids < ids.txt'").out,
            ids.out);
  const Outcome two =
      shell("sh -c 'env " SLUICE_MPI_ENVIRONMENT " " SLUICE_MPIEXEC " -n 2 " SLUICE_PROGRAM " " +
            base + "--prompt-ids - --ids < ids.txt'");
  EXPECT_EQ(two.out, ids.out) << two.err;
  // The text ends with the first token that is one of these.
  std::istringstream in(ids.out);
  std::vector<std::string> tokens;
  for (std::string token; in >> token;) tokens.push_back(token);
  ASSERT_EQ(tokens.size(), 8U);
  const Outcome stopped = sluice(
      "generate --weights run --temperature 0 --tokens 6 --ids "
      "--prompt-ids '97 98' --stop-ids '255 " +
      tokens[2] + "'");
  EXPECT_EQ(stopped.out, "97 98 " + tokens[2] + " \n") << stopped.err;
}

TEST_F(TrainedTest, GeneratePrintsTheTextOfTheModelsTokenizer) {
  const fs::path step = path("run/step-00000002");
  std::string vocabulary = R"("<e>": 0, "\u00c3": 1, "\u00a9": 2)";
  for (int id = 3; id < 256; ++id) {
    vocabulary += ", \"t" + std::to_string(id) + "\": " + std::to_string(id);
  }
  const std::string tokenizer = R"({"model": {"vocab": {)" + vocabulary +
                                R"(}}, "decoder": {"type": "ByteLevel"}, "added_tokens": )" +
                                R"([{"id": 0, "content": "<e>", "special": true}]})";
  std::ofstream(step / "tokenizer.json") << tokenizer;
  const std::string base =
      "generate --weights run --temperature 0 --tokens 1 --stop-ids none --prompt-ids ";
  const Outcome text = sluice(base + "'0 1 2 3 97'");
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, StartsWith("\xC3\xA9t3t97"));
  EXPECT_THAT(sluice(base + "'0 1 2' --special-tokens").out, StartsWith("<e>\xC3\xA9"));
  EXPECT_THAT(sluice(base + "'0 1 2' --ids").out, StartsWith("0 1 2 "));
  EXPECT_EQ(sluice("generate --weights run --tokens 1").code, 0);  // from token 0
  expect_refusal(sluice("generate --weights run --prompt abc"), 2, "--prompt-ids \"$(python3");
  std::ofstream(step / "tokenizer.json") << "{";
  expect_refusal(sluice(base + "1"), 5, "tokenizer.json' is no object of JSON");
  expect_refusal(mpirun(2, SLUICE_PROGRAM, base + "1"), 5, "tokenizer.json' is no object of JSON");
}

TEST_F(TrainedTest, TextIsRefusedWhereTheModelHasATokenizer) {
  std::ofstream(path("run/step-00000002/tokenizer.json")) << "{}";
  const std::string way_out =
      "--tokenizer run/step-00000002/tokenizer.json text.txt --output tokens/text.bin";
  expect_refusal(sluice(small("--weights run")), 3, way_out);
  expect_refusal(sluice("train --resume run --steps 3"), 3, way_out);
  expect_refusal(mpirun(2, SLUICE_PROGRAM, "evaluate --weights run"), 3, way_out);
}

TEST_F(TrainedTest, GenerateStopsWhereTheModelsConfigurationSays) {
  const Outcome exported = sluice("export run model");
  ASSERT_EQ(exported.code, 0) << exported.err;
  const std::string base =
      "generate --weights model --temperature 0 --tokens 4 --ids --prompt-ids 97 ";
  std::istringstream in(sluice(base + "--stop-ids none").out);
  std::string prompt, next;
  in >> prompt >> next;
  write("model/generation_config.json", R"({"eos_token_id": [)" + next + ", 300]}");
  EXPECT_EQ(sluice(base).out, "97 " + next + " \n");
  EXPECT_NE(sluice(base + "--stop-ids none").out, "97 " + next + " \n");
}

TEST_F(TrainedTest, GenerateRefusesTokensThatTheModelLacks) {
  const std::string base = "generate --weights run ";
  expect_refusal(sluice(base + "--prompt-ids '1 256'"), 2,
                 "option --prompt-ids: '256' is not a token");
  expect_refusal(sluice(base + "--prompt-ids '-1'"), 2, "option --prompt-ids: '-1'");
  expect_refusal(sluice(base + "--prompt-ids '1,2'"), 2, "option --prompt-ids: '1,2'");
  expect_refusal(sluice(base + "--prompt-ids ' '"), 2, "at least one token");
  expect_refusal(sluice(base + "--prompt-ids -"), 2, "at least one token");
  expect_refusal(sluice(base + "--prompt-ids 1 --stop-ids x"), 2, "option --stop-ids: 'x'");
  expect_refusal(sluice(base + "--prompt-ids 1 --prompt a"), 2, "both given");
}

TEST_F(TrainedTest, EvaluateGivesTheLossThatTheTrainingEndedWith) {
  const auto loss_in = [](const std::string& text, const std::string& before) {
    const std::size_t found = text.find(before);
    return found == std::string::npos ? "none" : text.substr(found + before.size(), 6);
  };
  const std::string trained = loss_in(trained_.out, "validation loss    ");
  const Outcome alone = sluice("evaluate --weights run");
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(loss_in(alone.out, ": loss "), trained);
  EXPECT_EQ(mpirun(3, SLUICE_PROGRAM, "evaluate --weights run --micro-batch-size 4").out,
            alone.out);
  expect_refusal(sluice("evaluate --weights run --data none.txt"), 3, "none.txt");
  expect_refusal(sluice("evaluate --weights run --validation-share 0"), 3, "no window");
  expect_refusal(sluice("evaluate --weights none"), 5, "none");
}

TEST_F(TrainedTest, RefusesWeightsOfAnotherModel) {
  expect_refusal(sluice("train --width 32 --change width --steps 4 --resume run"), 5,
                 "weights in 'run/step-00000002' do not fit the model: tensor "
                 "'token_embedding.weight'");
}

TEST_F(TrainedTest, ADryRunRefusesWhatARunWould) {
  const std::string more = "--dry-run --resume run --steps 4 --change width,layers ";
  expect_refusal(sluice(small(more + "--width 32")), 5,
                 "tensor 'token_embedding.weight' was saved as f32 [256, 16]");
  expect_refusal(sluice(small(more + "--layers 3")), 5, "is missing");
  expect_refusal(sluice(small("--dry-run --resume run --steps 4 --seed 9")), 2, "--change seed");
  expect_refusal(sluice(small("--dry-run --save run")), 4, "--resume auto");
  expect_refusal(sluice(small("--dry-run --resume run --steps 2")), 2, "choose at least 3");
  EXPECT_EQ(sluice(small("--dry-run --resume run --steps 4")).code, 0);
}

TEST_F(TrainedTest, ItsSavedOptionsTrainTheSameAgain) {
  EXPECT_THAT(trained_.out, StartsWith("Configuration  model gpt2  layers 2  heads 2"));
  const Outcome again =
      sluice("train --config run/options.conf --save again --metrics again.jsonl");
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(sluice("digest again").out, sluice("digest run").out);
}

// Names of files are bytes; this one is "cafe" with an accent in Latin-1.
TEST_F(CliTest, NamesOfFilesThatAreNotUtf8AreTrainedOnSavedAndReadBack) {
  const std::string name = "caf\xe9", replaced = "caf\xef\xbf\xbd";
  write(name + ".txt", std::string(4000, 'a'));
  const Outcome outcome = sluice(small("--data " + name + ".txt --save " + name + " --metrics " +
                                       name + ".jsonl --trace " + name + ".json"));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::istringstream metrics(read_file(path(name + ".jsonl")));
  std::string first_line;
  std::getline(metrics, first_line);
  for (const std::string& json :
       {read_file(path(name + "/step-00000002/state.json")), first_line}) {
    EXPECT_TRUE(nlohmann::json::accept(json));
    EXPECT_THAT(json, HasSubstr('"' + replaced + ".txt\""));
    EXPECT_THAT(json, HasSubstr('"' + replaced + '"'));
  }
  EXPECT_TRUE(nlohmann::json::accept(read_file(path(name + ".json"))));

  const Outcome again = sluice("train --config " + name + "/options.conf --save again");
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(sluice("digest again").out, sluice("digest " + name).out);
  EXPECT_EQ(sluice("generate --weights " + name + " --tokens 2").code, 0);
}

TEST_F(CliTest, RanksThatNameOtherFilesAreToldApartByBytesThatAreNotUtf8) {
  const std::string program = SLUICE_PROGRAM " " + small("--pipeline 2 --data caf");
  expect_refusal(mpirun_beside(program + "\xe9", program + "\xe8"), 6,
                 "ranks disagree about 'data': rank 0 has 'caf\xe9', rank 1 has 'caf\xe8'");
}

TEST_F(TrainedTest, RefusesTruncatedWeights) {
  const fs::path weights = path("run/step-00000002/model.safetensors");
  fs::resize_file(weights, fs::file_size(weights) - 4);
  expect_refusal(sluice("digest run"), 5, "model.safetensors");
  expect_refusal(sluice("generate --weights run"), 5, "model.safetensors");
}

TEST_F(TrainedTest, RefusesADamagedConfiguration) {
  const std::string state = "run/step-00000002/state.json";
  const nlohmann::json saved = nlohmann::json::parse(read_file(path(state)));
  for (const char* model : {"", "{", R"({"kind": "gpt2"})"}) {
    nlohmann::json damaged = saved;
    damaged["model"] = model;
    write(state, damaged.dump());
    expect_refusal(sluice("generate --weights run"), 5, "step-00000002");
  }
  write(state, "{");
  expect_refusal(sluice("generate --weights run"), 5, "step-00000002");
}

TEST_F(CliTest, ALossThatIsNotFiniteEndsTheRunAndIsNotSaved) {
  const Outcome outcome =
      sluice(small("--steps 50 --warmup 0 --learning-rate 1e30 --clip 0 --save run"));
  EXPECT_EQ(outcome.code, 7) << outcome.err;
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
  expect_refusal(sluice("digest run"), 5, "run");
}

TEST_F(CliTest, AFileInTheWayOfASaveIsNamedAsAnOutputThatCannotBeWritten) {
  fs::create_directory(path("run"));
  write("run/step-00000002", "mine");
  const Outcome outcome = sluice(small("--save run"));
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("step-00000002"));
  EXPECT_EQ(read_file(path("run/step-00000002")), "mine");
}

TEST_F(CliTest, ADirectoryInThePlaceOfAFileIsNoSave) {
  fs::create_directories(path("run/state.json"));
  for (const char* command : {"digest run", "generate --weights run", "train --resume run"}) {
    const Outcome outcome = sluice(command);
    EXPECT_EQ(outcome.code, 5) << outcome.err;
    EXPECT_THAT(error_line(outcome.err), HasSubstr("'run"));
  }
}

TEST_F(CliTest, OutputsBelowALinkToItselfAreRefusedWithTheCause) {
  fs::create_symlink("loop", path("loop"));
  expect_refusal(sluice(small("--metrics loop/a --trace loop/b")), 4, "symbolic links");
}

TEST_F(CliTest, AMissingWorkingDirectoryIsNoReasonToRefuseAbsolutePaths) {
  const std::string text = path("text.txt").string();
  const Outcome outcome =
      shell("sh -c 'mkdir gone && cd gone && rmdir ../gone && exec " SLUICE_PROGRAM " " +
            small("--data " + text + " --trace t.json") + "'");
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("cannot write file 't.json': No such file or directory"));
}

TEST_F(CliTest, ADryRunTellsTheMemoryOfTheRun) {
  const auto table = [](const std::string& text) {
    const std::size_t begin = text.find("  pipeline rank"), end = text.find("  (layers:");
    EXPECT_LT(begin, end) << text;
    return text.substr(begin, end - begin);
  };
  const std::string options = small(
      "--width 256 --context 64 --micro-batch-size 2 "
      "--validation-samples 20 ");
  EXPECT_EQ(table(sluice(options + "--dry-run").out), table(sluice(options).out));
}

// One process plans what the ranks would agree on.
TEST_F(CliTest, ADryRunOfOneProcessPlansAnyJob) {
  const auto table = [](const std::string& text) {
    const std::size_t begin = text.find(" ranks: pipeline of"), end = text.find("  (layers:");
    EXPECT_LT(begin, end) << text;
    return text.substr(begin, end - begin);
  };
  for (const std::string options :
       {"--pipeline 2 --replicas 2 --micro-batches 2 --save run --schedule zb-v ",
        "--pipeline 4 --schedule auto --micro-batches 4 --layers 6 "}) {
    const std::string words = small("--dry-run " + options);
    const Outcome alone = sluice(words), job = mpirun(4, SLUICE_PROGRAM, words);
    ASSERT_EQ(alone.code, 0) << alone.err;
    ASSERT_EQ(job.code, 0) << job.err;
    EXPECT_EQ(table(alone.out), table(job.out));
    EXPECT_THAT(alone.out, HasSubstr("planned in one process: 4 ranks"));
    EXPECT_THAT(job.out, Not(HasSubstr("planned in one process")));
  }
  const Outcome large = sluice(
      "train --dry-run --layers 96 --pipeline 64 --replicas 8 --micro-batches 128 --schedule 1f1b");
  ASSERT_EQ(large.code, 0) << large.err;
  EXPECT_THAT(large.out, HasSubstr("512 ranks: pipeline of 64 x 8 replicas"));
  EXPECT_EQ(lines_with(large.out, "  63 "), 1) << large.out;
  const std::string few = "train --dry-run --layers 2 --heads 2 --width 16 --tensor ";
  EXPECT_THAT(sluice(few + "4").out,
              HasSubstr("warning: 2 of 4 tensor ranks compute no attention: the model has 2 heads "
                        "of keys; --tensor 2 leaves none without"));
  EXPECT_THAT(sluice(few + "2").out, Not(HasSubstr("warning")));
  EXPECT_THAT(files(), ::testing::ElementsAre("text.txt"));
}

TEST_F(CliTest, ShardsTrainToTheSameDigest) {
  const std::string layout = "--width 96 --pipeline 2 --replicas 2 --check-replicas 1 ";
  for (const char* level : {"none", "optimizer"}) {
    const std::string options = layout + "--shard " + level + " --save " + level;
    const Outcome outcome = mpirun(4, SLUICE_PROGRAM, small(options));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr(std::string("  shard ") + level));
  }
  const Outcome digest = sluice("digest optimizer");
  EXPECT_EQ(lines_with(digest.out, "  total"), 1) << digest.err;
  EXPECT_EQ(sluice("digest none").out, digest.out);
  expect_refusal(mpirun(2, SLUICE_PROGRAM, small("--replicas 2 --shard optimizer --all-reduce")), 2,
                 "with --all-reduce");
}

// A dry run lists what would take less first.
void expect_refusal_after_list(Outcome outcome, int code, const char* why) {
  EXPECT_THAT(outcome.out, HasSubstr("    as given "));
  outcome.out.clear();
  expect_refusal(outcome, code, why);
}

// Of 18.4 MiB on the first rank, 7.5 are activations.
TEST_F(CliTest, RecomputesTheLeastThatFitsToTheSameDigest) {
  const std::string layout =
      "--layers 6 --width 128 --context 128 --pipeline 2 --micro-batches 6 --validation-samples 1 ";
  const Outcome plain = mpirun(2, SLUICE_PROGRAM, small(layout + "--save plain"));
  ASSERT_EQ(plain.code, 0) << plain.err;
  const std::string fits = layout + "--memory 15M --recompute auto ";
  const Outcome least = mpirun(2, SLUICE_PROGRAM, small(fits + "--save least"));
  ASSERT_EQ(least.code, 0) << least.err;
  EXPECT_THAT(least.out, HasSubstr("recompute auto: "));
  EXPECT_THAT(least.out, HasSubstr("block*"));
  EXPECT_THAT(least.out, HasSubstr(" MiB a rank of 15.0 MiB"));
  EXPECT_EQ(sluice("digest least").out, sluice("digest plain").out);
  fs::create_directory("scratch");
  const Outcome both = mpirun(
      2, SLUICE_PROGRAM,
      small(fits + "--schedule gpipe --offload activations:disk-cached=scratch --save both"));
  ASSERT_EQ(both.code, 0) << both.err;
  EXPECT_THAT(both.out, HasSubstr("block*"));
  EXPECT_THAT(both.out, HasSubstr("; offload: on rank "));
  EXPECT_THAT(both.out, HasSubstr(" on the device and "));
  EXPECT_EQ(sluice("digest both").out, sluice("digest plain").out);
  expect_refusal_after_list(sluice(small("--dry-run --memory 15M " + layout)), 2,
                            "most of it for activations");
  const std::string resume = "train --resume least --steps 3 ";  // with --memory
  expect_refusal_after_list(sluice(resume + "--dry-run --recompute none"), 2, "--memory: 15.0 MiB");
  EXPECT_THAT(mpirun(2, SLUICE_PROGRAM, resume).out, HasSubstr("recompute auto: "));
}

// What an option takes is what the plan with that option says.
TEST_F(CliTest, ADryRunListsWhatMakesATrainingFit) {
  const std::string job = small(
      "--dry-run --layers 8 --pipeline 4 --replicas 2 --micro-batches 8 --micro-batch-size 1 "
      "--width 256 --context 128 ");
  const auto row = [](const std::string& text, const std::string& options) {
    const std::size_t line = text.find("\n    " + options + " ");
    EXPECT_NE(line, std::string::npos) << options << " is not in\n" << text;
    return line == std::string::npos ? 0 : std::stod(text.substr(line + 5 + options.size()));
  };
  const Outcome given = sluice(job);
  ASSERT_EQ(given.code, 0) << given.err;
  double least = row(given.out, "as given");
  for (const std::string options :
       {"--shard optimizer", "--shard parameters", "--offload activations:disk=DIR",
        "--recompute attention", "--recompute block"}) {
    const double planned = row(given.out, options);
    EXPECT_LT(planned, row(given.out, "as given")) << options;
    EXPECT_EQ(planned, row(sluice(job + options).out, "as given")) << options;
    least = std::min(least, planned);
  }
  const std::string rest = " --offload activations:disk=DIR --recompute block";
  const std::string all = "--shard parameters" + rest;
  EXPECT_LT(row(given.out, all), row(given.out, "--shard optimizer" + rest));
  EXPECT_LT(row(given.out, "--shard optimizer" + rest), least);
  EXPECT_THAT(sluice(job + all).out, Not(HasSubstr("as given")));
  EXPECT_THAT(given.out, Not(HasSubstr("optimizer:disk"))) << "which takes more than it has";
  // With more state than the memory through which it passes.
  const std::string wide = job + "--width 1024 --heads 16 ";
  const std::string more = sluice(wide).out, state = "--offload optimizer:disk=DIR";
  EXPECT_LT(row(more, state), row(more, "as given"));
  EXPECT_EQ(row(more, state), row(sluice(wide + state).out, "as given"));
  EXPECT_LT(row(more,
                "--shard parameters --offload activations,optimizer:disk=DIR "
                "--recompute block"),
            row(more, state));
  // What does not fit is refused after the list.
  expect_refusal_after_list(sluice(job + "--memory 1M"), 2, "option --memory: 1.0 MiB a rank");
  expect_refusal_after_list(sluice(small("--dry-run --vocabulary 16777216 --width 65536")), 10,
                            "the host has ");
}

// Each of the ranks may fit, and their host may not hold both.
TEST_F(CliTest, ADryRunListsWhatTheRanksOfAHostNeedTogether) {
  const std::string job = "--dry-run --pipeline 2 --vocabulary 16777216 --width 32768 ";
  const Outcome outcome = mpirun(2, SLUICE_PROGRAM, small(job));
  EXPECT_EQ(outcome.code, 10) << outcome.err;
  EXPECT_THAT(outcome.out, ContainsRegex("and of all 2 ranks of the (host|control group) of rank "
                                         "0, which has [0-9]+"));
  const std::string row = "\n    as given ";
  std::istringstream columns(outcome.out.substr(outcome.out.find(row) + row.size()));
  double fullest = 0, together = 0;
  ASSERT_TRUE(columns >> fullest >> together) << outcome.out;
  EXPECT_GT(together, fullest);
  EXPECT_THAT(outcome.err, HasSubstr(fmt::format("the plan needs {:.1f} MiB", together)));
}

TEST_F(CliTest, ADryRunOfOneProcessRefusesWhatCannotBe) {
  const std::string dry = "train --dry-run ";
  expect_refusal(sluice(dry + "--pipeline 2000000 --replicas 2000"), 2, "legal are 1 to 1048576");
  expect_refusal(sluice(dry + "--pipeline 4 --device cpu,cpu,cpu,cpu"), 2, "legal is one");
  expect_refusal(sluice(dry + "--pipeline 2000 --micro-batches 1000000"), 2, "pairs of stage");
  expect_refusal(sluice(small("--pipeline 2")), 2, "start 2 ranks");
}

TEST_F(CliTest, ADryRunNeedsNoDataAndWritesNothing) {
  const std::vector<std::string> before = files();
  const Outcome outcome =
      sluice("train --dry-run --save run --metrics m.jsonl --device cpu --cuda-graphs");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("total MiB   outside"));
  EXPECT_THAT(outcome.out, HasSubstr("--cuda-graphs has no effect, no rank computes on a GPU"));
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

TEST_F(CliTest, DoctorWorksAlone) {
  const Outcome outcome = sluice("doctor");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("  cpu     0        0       "));
  EXPECT_THAT(outcome.out, HasSubstr("What looks wrong"));
}

TEST_F(CliTest, DoctorNamesALauncherThatMpiDoesNotMeet) {
  const Outcome outcome =
      shell("env OMPI_COMM_WORLD_SIZE=4 PMIX_VERSION=3.1.5 " SLUICE_PROGRAM " doctor");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("PMIx       3.1.5 of the launcher"));
  EXPECT_THAT(outcome.out, HasSubstr("! the launcher started 4 processes, but each is a job of 1"));
}

// --- jobs of several ranks ---

TEST_F(CliTest, AJobIsRefusedOnceByAllItsRanks) {
  const Outcome layout = mpirun(3, SLUICE_PROGRAM, small("--pipeline 2"));
  expect_refusal(layout, 2, "use pipeline 3");
  const Outcome option = mpirun(3, SLUICE_PROGRAM, small("--layer 2"));
  expect_refusal(option, 2, "'--layers'");
}

TEST_F(CliTest, RanksThatRunOtherCommandsAreRefusedWithBoth) {
  const std::string train = SLUICE_PROGRAM " " + small("");
  const std::string generate = SLUICE_PROGRAM " generate --weights none";
  const std::string doctor = SLUICE_PROGRAM " doctor";
  expect_refusal(mpirun_beside(train, doctor), 6,
                 "ranks disagree about 'command': rank 0 has 'train', rank 1 has 'doctor'");
  expect_refusal(mpirun_beside(doctor, generate), 6, "rank 0 has 'doctor', rank 1 has 'generate'");
  expect_refusal(mpirun_beside(generate, train), 6, "rank 0 has 'generate', rank 1 has 'train'");
}

TEST_F(CliTest, RanksCompareTheirCommandsBeforeAnyOfThemIsRefused) {
  const std::string doctor = SLUICE_PROGRAM " doctor --pipeline 2";
  expect_refusal(mpirun_beside(doctor + " --steps 4", SLUICE_PROGRAM " " + small("")), 6,
                 "rank 0 has 'doctor', rank 1 has 'train'");
  expect_refusal(mpirun_beside(SLUICE_PROGRAM " trian", doctor), 6,
                 "rank 0 has 'trian', rank 1 has 'doctor'");
}

// On several nodes the same name may lead each rank to another file.
class DataTest : public CliTest {
 protected:
  // Trains a pipeline of two ranks that find `first` and `second` under the same name.
  Outcome train_on(const std::string& name, const std::string& first, const std::string& second) {
    fs::create_directory(path("first"));
    fs::create_directory(path("second"));
    write("first/" + name, first);
    write("second/" + name, second);
    const std::string program =
        SLUICE_PROGRAM " " + small("--pipeline 2 --validation-samples 8 --data " + name);
    return mpirun_beside("env -C first " + program, "env -C second " + program);
  }
};

TEST_F(DataTest, RanksThatFindDataOfOtherLengthsAreRefusedWithBoth) {
  const Outcome outcome = train_on("d.txt", std::string(4000, 'a'), std::string(5000, 'a'));
  expect_refusal(outcome, 6,
                 "ranks disagree about 'tokens in --data d.txt': rank 0 has '4000', rank 1 has "
                 "'5000'");
}

TEST_F(DataTest, RanksThatFindOtherDataOfTheSameLengthAreRefusedWithBothDigests) {
  const std::string common(3999, 'a');
  const Outcome text = train_on("d.txt", common + 'a', common + 'b');
  // As of sha256sum.
  expect_refusal(text, 6,
                 "ranks disagree about 'SHA-256 of --data d.txt': rank 0 has "
                 "'82396ec9191a22922e88923ef14b5d225e26e7fc2d1571d0d6cd51920f83880b', rank 1 has "
                 "'276a330aa322b06259738d23482f64889713eac74204429f745ba57f491611c6'");
  const std::string zeros(4000, '\0');
  const Outcome tokens = train_on("d.bin", zeros, zeros.substr(2) + std::string("\1\0", 2));
  expect_refusal(tokens, 6, "ranks disagree about 'SHA-256 of --data d.bin': rank 0 has '");
  const std::string long_text(std::size_t{2} << 20, 'a');
  const Outcome sampled = train_on("d.txt", long_text, 'b' + long_text.substr(1));
  expect_refusal(sampled, 6, "about 'SHA-256 of a sample of --data d.txt': rank 0 has '");
}

TEST_F(DataTest, ARankThatFindsNoDataIsRefusedAsSuch) {
  fs::create_directory(path("empty"));
  const std::string program = SLUICE_PROGRAM " " + small("--pipeline 2");
  const Outcome outcome = mpirun_beside(program, "env -C empty " + program);
  expect_refusal(outcome, 3, "text.txt");
  EXPECT_THAT(outcome.err, HasSubstr("[rank 1]"));
}

TEST_F(DataTest, RanksThatFindCopiesOfTheSameDataTrain) {
  const std::string text(std::size_t{2} << 20, 'a');
  const Outcome outcome = train_on("d.txt", text, text);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("Done: 2 steps"));
}

// Where there is no GPU, and none of that number where there are some.
TEST_F(CliTest, AGpuThatIsNotThereIsRefusedOnceWithRankHostAndDevice) {
  const Outcome outcome =
      mpirun(2, SLUICE_PROGRAM, "train --dry-run --pipeline 2 --device cpu,cuda:4000");
  expect_refusal(outcome, 2, "rank 1 on ");
  EXPECT_THAT(outcome.err, HasSubstr("device cuda:4000 "));
  EXPECT_EQ(lines_with(outcome.err, "cuda:4000"), 1) << outcome.err;
}

#ifdef SLUICE_EMULATED
TEST_F(CliTest, AGpuThatIsSharedIsRefusedToNccl) {
  const std::string program = "env SLUICE_EMULATED_DEVICES=1 " SLUICE_PROGRAM;
  for (const char* layout : {"--pipeline 2", "--pipeline 1 --replicas 2"}) {
    const Outcome outcome =
        mpirun(2, program, std::string("train --dry-run --device cuda --transport nccl ") + layout);
    expect_refusal(outcome, 2, "ranks 0 and 1 share cuda:0 on ");
    EXPECT_EQ(lines_with(outcome.err, "which NCCL refuses; legal: auto, mpi"), 1) << outcome.err;
  }
}

// As under srun --gpus-per-task=1: all processes name their GPU 0.
TEST_F(CliTest, ProcessesThatSeeOneGpuEachDoNotShareIt) {
  const std::string own =
      "sh -c 'SLUICE_EMULATED_FIRST_BUS=$OMPI_COMM_WORLD_RANK exec env "
      "SLUICE_EMULATED_DEVICES=1 " SLUICE_PROGRAM " train --dry-run --pipeline 2 --device ";
  for (const char* device : {"cuda", "auto", "cuda:0"}) {
    const Outcome outcome = mpirun(2, own + device + "'", "");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("devices: 0 cuda:0 on "));
    EXPECT_THAT(outcome.out, HasSubstr(", 1 cuda:0 on "));
    EXPECT_THAT(outcome.out, HasSubstr("\n  stages 0-1: NCCL (a GPU of its own at both ends)\n"));
  }
  const Outcome shared = mpirun(2, "env SLUICE_EMULATED_DEVICES=1 " SLUICE_PROGRAM,
                                "train --dry-run --pipeline 2 --device cuda");
  EXPECT_EQ(lines_with(shared.out, "NCCL (a GPU"), 0) << shared.out;
}

TEST_F(CliTest, WhichCodeComputesAttentionOnGpusIsSaidAtTheStart) {
  const std::string program = "env SLUICE_EMULATED_DEVICES=2 " SLUICE_PROGRAM;
  const std::string arguments = "train --dry-run --pipeline 2 --device ";
  const Outcome all = mpirun(2, program, arguments + "cuda --recompute block");
  EXPECT_EQ(lines_with(all.out, "  attention: own kernels ("), 1) << all.out << all.err;
  const Outcome second = mpirun(2, program, arguments + "cpu,cuda");
  EXPECT_EQ(lines_with(second.out, "  stage 1, attention: own kernels ("), 1)
      << second.out << second.err;
  const Outcome none = mpirun(2, program, arguments + "cpu");
  EXPECT_EQ(none.code, 0) << none.err;
  EXPECT_EQ(lines_with(none.out, "attention:"), 0) << none.out;
}

TEST_F(CliTest, APlanThatDoesNotFitTheGpuIsRefusedBeforeItIsBegun) {
  const std::string program =
      "env SLUICE_EMULATED_DEVICES=1 SLUICE_EMULATED_DEVICE_MEMORY=1000000 " SLUICE_PROGRAM;
  const Outcome outcome = mpirun(2, program, small("--pipeline 2 --device cpu,cuda"));
  expect_refusal(outcome, 10, "rank 1 on ");
  EXPECT_EQ(lines_with(outcome.err, "but the plan needs"), 1) << outcome.err;
}
#endif

TEST_F(CliTest, DoctorShowsEveryRankAndItsStage) {
  const Outcome outcome = mpirun(4, SLUICE_PROGRAM, "doctor --replicas 2");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("4 = pipeline 2 x replicas 2"));
  for (const char* place :
       {"0        0       ", "0        1       ", "1        0       ", "1        1       "}) {
    EXPECT_EQ(lines_with(outcome.out, std::string("  cpu     ") + place), 1) << outcome.out;
  }
  EXPECT_THAT(outcome.out, HasSubstr("KiB over the replicas of each stage"));
  for (const char* replicas : {"  0, 2", "  1, 3"}) {
    EXPECT_EQ(lines_with(outcome.out, replicas), 1) << outcome.out;
  }
}

TEST_F(CliTest, SelfTestStartsTwoRanksAndFindsTheBitsOfOne) {
  const Outcome outcome = sluice("doctor --self-test");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("a step over 2 ranks has the digest it must have"));
  // Layers are as many for 3 ranks as for 2, so the bits are the same.
  EXPECT_EQ(mpirun(3, SLUICE_PROGRAM, "doctor --self-test").out.substr(outcome.out.find('\n')),
            outcome.out.substr(outcome.out.find('\n')));
  EXPECT_THAT(files(), ::testing::ElementsAre("text.txt"));
}

TEST_F(CliTest, SelfTestRefusesOneRankAndABadDevice) {
  expect_refusal(mpirun(1, SLUICE_PROGRAM, "doctor --self-test"), 2, "this job has one");
  expect_refusal(sluice("doctor --self-test --device cudaa"), 2, "cudaa");
  expect_refusal(shell("env PATH=/none " SLUICE_PROGRAM " doctor --self-test"), 9, "'mpirun'");
}

TEST_F(CliTest, SelfTestNamesRanksThatComputeOtherBits) {
  const std::string test = SLUICE_PROGRAM " doctor --self-test";
  expect_refusal(mpirun_beside(test, "env SLUICE_KERNELS=baseline " + test), 6,
                 "compute other bits, each alone");
}

TEST_F(CliTest, DoctorMeasuresLinksThatScheduleReads) {
  std::ofstream(path("text.txt")) << "text";
  const Outcome outcome = mpirun(2, SLUICE_PROGRAM,
                                 "doctor --probe-seconds 1 --data text.txt --save runs/a "
                                 "--output c.json");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(lines_with(outcome.out, " us "), 2) << outcome.out;  // both directions
  EXPECT_THAT(outcome.out, Not(HasSubstr("replicas of each stage")));
  EXPECT_THAT(outcome.out, HasSubstr("data file 'text.txt' has 4 bytes"));
  EXPECT_THAT(outcome.out, HasSubstr("directory 'runs/a' takes"));
  EXPECT_FALSE(fs::exists(path("runs")));
  const auto json = nlohmann::json::parse(read_file(path("c.json")));
  EXPECT_EQ(json.at("format"), "sluice-cluster");
  EXPECT_EQ(json.at("version"), 1);
  EXPECT_EQ(json.at("links").size(), 2U);
  EXPECT_EQ(json.at("links")[0].at("over"), "memory");
  const Outcome schedule = sluice("schedule --cluster c.json");
  EXPECT_EQ(schedule.code, 0) << schedule.err;
  EXPECT_THAT(schedule.out, HasSubstr("1f1b: 2 ranks"));
}

TEST_F(CliTest, DoctorMeasuresNothingWhereItsOutputCannotBeWritten) {
  expect_refusal(mpirun(2, SLUICE_PROGRAM, "doctor --output none/c.json"), 4, "none/c.json");
  const Outcome outcome = mpirun(2, SLUICE_PROGRAM, "doctor --probe-seconds 0 --data none.txt");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(lines_with(outcome.out, " us "), 0) << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("rank 0 cannot read data file 'none.txt'"));
}

TEST_F(CliTest, ARankThatThrowsEndsTheJobWithItsMessageFirstAndOnce) {
  const Outcome outcome = mpirun(3, SLUICE_FAILING_RANK, "one");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_EQ(error_line(outcome.err), "sluice: error: stage 1 lost a number [rank 1]");
  EXPECT_LT(outcome.err.find("sluice: error: "), outcome.err.find("MPI_ABORT")) << outcome.err;
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
}

TEST_F(CliTest, AForeignExceptionIsTheProgramsOwn) {
  const Outcome outcome = mpirun(2, SLUICE_FAILING_RANK, "foreign");
  EXPECT_EQ(outcome.code, 13);
  EXPECT_EQ(error_line(outcome.err), "sluice: error: not one of ours [rank 1]");
}

TEST_F(CliTest, AForeignErrorOfTheFileSystemIsAnOutputThatCannotBeWritten) {
  const Outcome outcome = mpirun(2, SLUICE_FAILING_RANK, "filesystem");
  EXPECT_EQ(outcome.code, 4);
  EXPECT_EQ(lines_with(outcome.err, "Not a directory [a/file] [rank 1]"), 1) << outcome.err;
}

TEST_F(CliTest, WhatAllRanksThrowIsPrintedOnceAndWhatNoneThrowsNever) {
  const Outcome all = mpirun(3, SLUICE_FAILING_RANK, "all");
  EXPECT_EQ(all.code, 2);
  EXPECT_EQ(error_line(all.err), "sluice: error: refused by all");
  EXPECT_EQ(lines_with(all.err, "sluice: error: "), 1) << all.err;
  const Outcome none = mpirun(3, SLUICE_FAILING_RANK, "none");
  EXPECT_EQ(none.code, 0);
  EXPECT_EQ(lines_with(none.err, "sluice: "), 0) << none.err;
}

TEST_F(CliTest, RanksOfDifferentBuildsAreRefusedAndNamed) {
  const std::string version = sluice("--version").out;
  const std::string digest = version.substr(version.find("build ") + 6, 12);
  std::string program = read_file(SLUICE_JOB_PROGRAM);
  const std::size_t found = program.find(digest);
  ASSERT_NE(found, std::string::npos) << version;
  write("other", program.replace(found, digest.size(), "another12345"));
  fs::permissions(path("other"), fs::perms::owner_all);
  const Outcome outcome = mpirun_beside(SLUICE_PROGRAM " doctor", "./other doctor");
  EXPECT_EQ(outcome.code, 6);
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
  EXPECT_THAT(error_line(outcome.err), HasSubstr("different builds of Sluice: rank 0 on "));
  EXPECT_THAT(error_line(outcome.err), HasSubstr("build another12345"));
  EXPECT_THAT(error_line(outcome.err), HasSubstr("build " + digest));
}

TEST_F(CliTest, AStartWithoutAllRanksEndsAndNamesTheWait) {
  setenv("SLUICE_START_TIMEOUT", "1", 1);
  const Outcome outcome = mpirun_beside(SLUICE_PROGRAM " doctor", "sleep 25");
  unsetenv("SLUICE_START_TIMEOUT");
  EXPECT_EQ(outcome.code, 11) << outcome.err;
  EXPECT_THAT(error_line(outcome.err), HasSubstr("rank 0 on "));
  EXPECT_THAT(error_line(outcome.err), HasSubstr("MPI_Init waits for other ranks"));
}

TEST_F(CliTest, AProgramGoesOnAfterAPipelineWithAMessageUnderWayHasFailed) {
  for (const std::string how : {"embed", "unreceived"}) {
    std::string twice = how;
    twice.append(" ").append(how);
    const Outcome outcome = mpirun(2, SLUICE_EMBEDDING_PROGRAM, twice);
    EXPECT_EQ(outcome.code, 0) << how << ": " << outcome.err;
    EXPECT_EQ(
        lines_with(outcome.out, "caught: stage 0, forward of micro-batch 1: stage 0 has a problem"),
        2)
        << how;
    EXPECT_EQ(lines_with(outcome.out, "goes on"), 2) << how;
  }
}

TEST_F(CliTest, AnErrorIsPrintedWhereAMessageIsUnderWay) {
  const Outcome outcome = mpirun(2, SLUICE_EMBEDDING_PROGRAM, "main dropped");
  EXPECT_EQ(outcome.code, 13);
  EXPECT_THAT(
      outcome.err,
      StartsWith(
          "sluice: error: stage 0, forward of micro-batch 1: stage 0 has a problem [rank 0]\n"));
  EXPECT_EQ(lines_with(outcome.err, "sluice: error: "), 1) << outcome.err;
}

TEST_F(CliTest, APipelineOnAnotherThreadIsRefusedWhereMpiGrantsFunneledAlone) {
  const Outcome funneled = mpirun(2, SLUICE_EMBEDDING_PROGRAM, "thread funneled");
  EXPECT_EQ(funneled.code, 0) << funneled.err;
  EXPECT_EQ(lines_with(funneled.out, "caught: usage: MPI grants MPI_THREAD_FUNNELED: only the"), 2)
      << funneled.out;
  const Outcome multiple = mpirun(2, SLUICE_EMBEDDING_PROGRAM, "thread multiple");
  EXPECT_EQ(multiple.code, 0) << multiple.err;
  EXPECT_EQ(lines_with(multiple.out, "has trained"), 2) << multiple.out;
  const Outcome two = mpirun(2, SLUICE_EMBEDDING_PROGRAM, "threads multiple");
  EXPECT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(lines_with(two.out, "has trained"), 4) << two.out;
}

}  // namespace
}  // namespace sluice::testing
