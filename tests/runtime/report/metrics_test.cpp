#include "runtime/report/metrics.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

using nlohmann::ordered_json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

StepRecord sample_record(std::uint64_t step) {
  StepRecord record;
  record.step = step;
  record.loss = 0.1 + 0.2;
  record.targets = 1024;
  record.seconds = 1.0 / 3;
  record.tokens_per_second = 3072;
  record.grad_norm = 5e-324;
  record.learning_rate = 1e-3;
  record.bubble_measured = 0.125;
  record.bubble_ideal = 0.1;
  record.peak_in_flight = {2, 1};
  record.peak_bytes = {1 << 20, 77};
  return record;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(MetricsWriterTest, WritesOneObjectPerStepWithTheFieldsInOrderAndTheRunInTheFirst) {
  const TemporaryDirectory dir;
  MetricsWriter writer(dir.path() / "m.jsonl", R"({"threads":1})");
  writer.step(sample_record(7));
  writer.validation(7, 1.25);
  // Flushed per line: readable while the writer is open.
  const auto lines = lines_of(dir.read("m.jsonl"));
  ASSERT_EQ(lines.size(), 2u);
  const ordered_json step = ordered_json::parse(lines[0]);
  std::vector<std::string> fields;
  for (const auto& [name, value] : step.items()) fields.push_back(name);
  EXPECT_THAT(fields, ElementsAre("step", "loss", "tokens", "seconds", "tokens_per_second",
                                  "grad_norm", "learning_rate", "bubble_measured", "bubble_ideal",
                                  "peak_in_flight", "peak_bytes", "run"));
  EXPECT_EQ(step["run"]["threads"], 1);
  EXPECT_EQ(step["step"], 7);
  EXPECT_EQ(step["peak_in_flight"], ordered_json({2, 1}));
  EXPECT_EQ(step["peak_bytes"], ordered_json({1 << 20, 77}));
  EXPECT_EQ(lines[1], R"({"step":7,"val_loss":1.25})");
}

TEST(MetricsWriterTest, FloatsComeBackToTheBit) {
  const TemporaryDirectory dir;
  MetricsWriter writer(dir.path() / "m.jsonl", "{}");
  const StepRecord record = sample_record(1);
  writer.step(record);
  const auto json = ordered_json::parse(lines_of(dir.read("m.jsonl"))[0]);
  EXPECT_EQ(json["loss"].get<double>(), record.loss);
  EXPECT_EQ(json["seconds"].get<double>(), record.seconds);
  EXPECT_EQ(json["grad_norm"].get<double>(), record.grad_norm);
  EXPECT_THAT(lines_of(dir.read("m.jsonl"))[0], HasSubstr("0.30000000000000004"));
}

TEST(MetricsWriterTest, WritesWhatIsNoNumberAsAString) {
  const TemporaryDirectory dir;
  MetricsWriter writer(dir.path() / "m.jsonl", "{}");
  writer.validation(1, std::numeric_limits<double>::quiet_NaN());
  writer.validation(2, std::numeric_limits<double>::infinity());
  writer.validation(3, -std::numeric_limits<double>::infinity());
  EXPECT_THAT(lines_of(dir.read("m.jsonl")),
              ElementsAre(R"({"step":1,"val_loss":"nan","run":{}})",
                          R"({"step":2,"val_loss":"inf"})", R"({"step":3,"val_loss":"-inf"})"));
}

TEST(MetricsWriterTest, GoesOnAfterTheStepThatARunResumesFrom) {
  const TemporaryDirectory dir;
  const std::string kept = R"({"step":1,"loss":5,"run":{}})"
                           "\n"
                           R"({"step":2,"loss":4})"
                           "\n"
                           R"({"step":2,"val_loss":4})"
                           "\n";
  for (const std::string lost :
       {"", "{\"step\":3,\"loss\":3}\n", "{\"step\":3,\"loss\":3}\n{\"step\":2,\"loss\":3}\n",
        "{\"step\":2,\"lo", "{\"step\":2}", "nonsense", "{\"step\":3}\nnonsense\n"}) {
    dir.write("m.jsonl", kept + lost);
    MetricsWriter writer(dir.path() / "m.jsonl", "{}", 2);
    EXPECT_EQ(dir.read("m.jsonl"), kept + lost);  // until the first line
    writer.validation(3, 2);
    EXPECT_EQ(dir.read("m.jsonl"), kept + R"({"step":3,"val_loss":2.0,"run":{}})"
                                          "\n")
        << lost;
  }
  MetricsWriter(dir.path() / "m.jsonl", "{}").validation(3, 1);
  EXPECT_EQ(lines_of(dir.read("m.jsonl")).size(), 1u);
}

TEST(MetricsWriterTest, ADamagedLineCostsNoOther) {
  const TemporaryDirectory dir;
  const std::string kept = "{\"step\":1}\ngarbage\n{\"step\":2}\n{\"step\":-1}\n\n";
  dir.write("m.jsonl", kept + "{\"step\":3}\n");
  MetricsWriter(dir.path() / "m.jsonl", "{}", 2).validation(3, 2);
  EXPECT_EQ(dir.read("m.jsonl"), kept + "{\"step\":3,\"val_loss\":2.0,\"run\":{}}\n");
}

TEST(MetricsWriterTest, ANewRunReplacesMetricsAlone) {
  const TemporaryDirectory dir;
  dir.write("notes.txt", "my notes\n");
  expect_error(ErrorCode::kIo, {"notes.txt", "holds no metrics"},
               [&] { MetricsWriter(dir.path() / "notes.txt", "{}"); });
  EXPECT_EQ(dir.read("notes.txt"), "my notes\n");
}

TEST(MetricsWriterTest, ALongFileGoesOnFromItsLastStep) {
  const TemporaryDirectory dir;
  std::string text;
  for (int step = 1; step <= 20000; ++step) {
    text += "{\"step\":" + std::to_string(step) + ",\"peak_bytes\":[1,2,3,4]}\n";
  }
  dir.write("m.jsonl", text + std::string(std::size_t{9} << 20, ' '));
  MetricsWriter(dir.path() / "m.jsonl", "{}", 20000).validation(20001, 1);
  EXPECT_EQ(dir.read("m.jsonl").substr(0, text.size()), text);
  EXPECT_EQ(lines_of(dir.read("m.jsonl")).size(), 20001u);
}

TEST(MetricsWriterTest, AFirstLineThatACrashCutShortIsReplaced) {
  const TemporaryDirectory dir;
  for (const char* torn : {"", "{", "{\"st", "{\"step\":1,\"loss\":5,\"run\":{\"op"}) {
    dir.write("m.jsonl", torn);
    MetricsWriter(dir.path() / "m.jsonl", "{}", 1).validation(2, 2);
    EXPECT_EQ(lines_of(dir.read("m.jsonl")).size(), 1u);
  }
}

TEST(MetricsWriterTest, AFileOfOtherContentsIsRefusedAndNotCut) {
  const TemporaryDirectory dir;
  for (const char* other :
       {"my notes\n", "my notes", "{\"loss\":1}\n", "[1]\n", "\n{\"step\":1}\n", "{\"steps\":1}"}) {
    dir.write("m.jsonl", other);
    expect_error(ErrorCode::kIo, {"m.jsonl", "no JSON object with a step"},
                 [&] { MetricsWriter(dir.path() / "m.jsonl", "{}", 1); });
    EXPECT_EQ(dir.read("m.jsonl"), other);
  }
}

TEST(MetricsWriterTest, DevicesAndPipesAreAppendedTo) {
  MetricsWriter("/dev/null", "{}", 3).validation(4, 1);
  const TemporaryDirectory dir;
  const std::string pipe = (dir.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  MetricsWriter(pipe, "{}", 3).validation(4, 1);
  std::string bytes(100, ' ');
  bytes.resize(static_cast<std::size_t>(::read(reader, bytes.data(), bytes.size())));
  ::close(reader);
  EXPECT_EQ(lines_of(bytes).size(), 1u);
}

TEST(MetricsWriterTest, TellsWhatGpusDidWhereItIsKnown) {
  const TemporaryDirectory dir;
  StepRecord record = sample_record(10);
  record.flops = 4.5e14;
  record.share_of_peak = 0.456;
  record.gpus = {GpuState{},
                 {.watts = 650.5,
                  .limit_watts = 700,
                  .sm_mhz = 1545,
                  .celsius = 61,
                  .memory_used = std::uint64_t{41} << 30,
                  .held_back = 0x4,
                  .known = 1}};
  MetricsWriter(dir.path() / "m.jsonl", "{}").step(record);
  const auto json = ordered_json::parse(dir.read("m.jsonl"));
  EXPECT_EQ(json["flops"], 4.5e14);
  EXPECT_EQ(json["share_of_peak"], 0.456);
  EXPECT_EQ(json["gpus"], ordered_json::parse(R"([{"rank":1,"watts":650.5,"limit_watts":700.0,
      "sm_mhz":1545,"celsius":61,"memory_mib":41984,"held_back":["power limit"]}])"));
  EXPECT_THAT(progress_line(record, 1, 20, 5), HasSubstr("3072 tokens/s  45.6 % of peak  bubble"));
}

TEST(MetricsWriterTest, ASkippedStepSaysSo) {
  const TemporaryDirectory dir;
  StepRecord record = sample_record(1);
  record.skipped = true;
  record.loss = std::numeric_limits<double>::quiet_NaN();
  MetricsWriter(dir.path() / "m.jsonl", "{}").step(record);
  const auto json = ordered_json::parse(dir.read("m.jsonl"));
  EXPECT_EQ(json["skipped"], true);
  EXPECT_EQ(json["loss"], "nan");
  EXPECT_THAT(progress_line(record, 1, 2, 1), HasSubstr("loss nan, skipped  3072 tokens/s"));
}

// As a program does that copies and truncates logs.
TEST(MetricsWriterTest, AFileThatIsEmptiedMeanwhileHasNoHole) {
  const TemporaryDirectory dir;
  MetricsWriter writer(dir.path() / "m.jsonl", "{}");
  writer.validation(1, 2);
  std::filesystem::resize_file(dir.path() / "m.jsonl", 0);
  writer.validation(2, 2);
  EXPECT_EQ(dir.read("m.jsonl"), "{\"step\":2,\"val_loss\":2.0}\n");
}

TEST(MetricsWriterTest, RefusesPathsThatCannotBeWritten) {
  const TemporaryDirectory dir;
  expect_error(ErrorCode::kIo, {"none/m.jsonl", "No such file"},
               [&] { MetricsWriter(dir.path() / "none" / "m.jsonl", "{}"); });
  expect_error(ErrorCode::kIo, {dir.path().string(), "directory"},
               [&] { MetricsWriter(dir.path(), "{}"); });
  if (std::filesystem::exists("/dev/full")) {
    expect_error(ErrorCode::kIo, {"/dev/full", "No space left"},
                 [&] { MetricsWriter("/dev/full", "{}").validation(1, 2); });
  }
  expect_error(ErrorCode::kInternal, {"no JSON object"},
               [&] { MetricsWriter(dir.path() / "m.jsonl", "[1]"); });
}

TEST(ProgressLineTest, TellsStepLossSpeedBubbleAndTime) {
  // 20 steps in 35 s leave 380 steps of 1.75 s.
  EXPECT_EQ(progress_line(sample_record(120), 101, 500, 35),
            "step 120/500  loss 0.3000  3072 tokens/s  bubble 12.5 %  0:35 elapsed  11:05 left");
}

TEST(ProgressLineTest, CountsHoursAndEndsAtZero) {
  EXPECT_THAT(progress_line(sample_record(10), 1, 10, 3600 * 27 + 61),
              HasSubstr("27:01:01 elapsed"));
  EXPECT_THAT(progress_line(sample_record(10), 1, 10, 5), HasSubstr("  0:00 left"));
}

TEST(ProgressTest, PlainLinesAreFewButTheFirstAndTheLastStepShow) {
  std::ostringstream out;
  Progress progress(1, 50, false, 1e9, out);
  for (std::uint64_t step = 1; step <= 50; ++step) progress.step(sample_record(step));
  progress.finish();
  const auto lines = lines_of(out.str());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], HasSubstr("step 1/50"));
  EXPECT_THAT(lines[1], HasSubstr("step 50/50"));
  EXPECT_EQ(out.str().find('\r'), std::string::npos);
}

TEST(ProgressTest, AValidationShowsHowFarItIs) {
  for (const bool terminal : {false, true}) {
    std::ostringstream out;
    Progress progress(1, 1, terminal, 0, out);
    for (const std::int64_t done : {0, 16, 32, 40}) progress.validation(done, 40);
    EXPECT_THAT(out.str(), AllOf(HasSubstr("validation 16/40  "), HasSubstr("validation 32/40  "),
                                 Not(HasSubstr("40/40"))));
    progress.finish();
    EXPECT_EQ(out.str().back(), terminal ? '\r' : '\n');
  }
}

TEST(ProgressTest, WhatComesAfterAnErrorStartsALine) {
  std::ostringstream out;
  try {
    Progress progress(1, 3, true, 5, out);
    progress.step(sample_record(1));
    throw std::runtime_error("the loss is not finite");
  } catch (const std::runtime_error&) {
    EXPECT_THAT(out.str(), ::testing::EndsWith("\n"));
  }
}

TEST(ProgressTest, ATerminalKeepsOneLineAndNotesGetTheirOwn) {
  std::ostringstream out;
  Progress progress(1, 3, true, 5, out);
  StepRecord wide = sample_record(1);
  wide.tokens_per_second = 123456789;
  progress.step(wide);
  progress.note("validation 1.5");
  progress.step(wide);
  progress.step(sample_record(2));
  progress.finish();
  // What a terminal shows in the end: every line after its last carriage return wins, column by
  // column.
  std::vector<std::string> screen;
  for (const std::string& line : lines_of(out.str())) {
    std::string shown;
    std::istringstream parts(line);
    for (std::string part; std::getline(parts, part, '\r');) {
      shown.replace(0, std::min(part.size(), shown.size()), part);
    }
    screen.push_back(shown.substr(0, shown.find_last_not_of(' ') + 1));
  }
  ASSERT_EQ(screen.size(), 2u);
  EXPECT_EQ(screen[0], "validation 1.5");
  EXPECT_THAT(screen[1], testing::StartsWith("step 2/3"));
  EXPECT_EQ(screen[1].find(" left") + 5, screen[1].size());
  EXPECT_EQ(out.str().back(), '\n');
}

}  // namespace
}  // namespace sluice
