#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/schedule_file.hpp>

#include "tests/schedules/files/file_tools.hpp"
#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using testing::complaint_about;
using ::testing::HasSubstr;
using testing::refusal;
using testing::same_steps;
using testing::sample;

// The sample with its first `from` replaced.
std::string edited(const std::string& from, const std::string& to) {
  std::string text = sample("v_split.json");
  const std::size_t at = text.find(from);
  if (at == std::string::npos) throw std::runtime_error("the sample lacks " + from);
  return text.replace(at, from.size(), to);
}

std::string file_refusal(const std::string& text) {
  return refusal([&] { (void)parse_schedule_json(text); });
}

TEST(ScheduleFileTest, ReadsPlacementListsAndOverlappedPairs) {
  const Schedule schedule = parse_schedule_json(sample("v_split.json")).schedule;
  EXPECT_EQ(schedule.name, "v-split");
  EXPECT_EQ(schedule.placement, Placement::v_shape(2));
  EXPECT_EQ(schedule.micro_batches, 2);
  EXPECT_FALSE(schedule.forward_only);
  EXPECT_EQ(to_string(schedule.ranks[1][2]), "(1F1;2I0)OVERLAP_F_B");
  EXPECT_EQ(complaint_about(schedule), "");
}

TEST(ScheduleFileTest, ReadsBackEverythingItWrites) {
  std::vector<Schedule> schedules = testing::all_hand_made();
  for (const char* name : {"gpipe", "gpipe-lifo", "1f1b", "forward-only"}) {
    schedules.push_back(generate(name, {3, 5, 1}));
    schedules.push_back(generate(name, {1, 1, 1}));
  }
  for (const Schedule& schedule : schedules) {
    const Schedule back = parse_schedule_json(to_schedule_json(schedule)).schedule;
    EXPECT_EQ(back.name, schedule.name);
    EXPECT_TRUE(same_steps(back, schedule)) << to_schedule_json(schedule);
  }
}

TEST(ScheduleFileTest, WritesTheSampleAsItStands) {
  const std::string text = to_schedule_json(parse_schedule_json(sample("v_split.json")).schedule);
  EXPECT_TRUE(same_steps(parse_schedule_json(text).schedule,
                         parse_schedule_json(sample("v_split.json")).schedule));
  EXPECT_EQ(to_schedule_json(parse_schedule_json(text).schedule), text);
}

TEST(ScheduleFileTest, RefusesUnknownRepeatedAndMissingKeys) {
  EXPECT_THAT(file_refusal(edited("\"name\"", "\"nome\"")), HasSubstr("unknown key 'nome'"));
  EXPECT_THAT(file_refusal(edited("\"name\"", "\"format\"")),
              HasSubstr("'format' appears a second time"));
  EXPECT_THAT(file_refusal(edited(" \"ranks\": 2,\n", "")), HasSubstr("'ranks' is missing"));
  EXPECT_THAT(file_refusal("{}"), HasSubstr("'format' is missing"));
}

TEST(ScheduleFileTest, RefusesOtherFormatsAndVersions) {
  EXPECT_THAT(file_refusal(edited("sluice-schedule", "other")),
              HasSubstr("key 'format' has the text 'other'"));
  EXPECT_THAT(file_refusal(edited("\"version\": 1", "\"version\": 2")),
              AllOf(HasSubstr("version 2"), HasSubstr("reads version 1")));
}

TEST(ScheduleFileTest, RefusesValuesOfTheWrongKindByKey) {
  for (const char* value : {"null", "true", "-1", "0", "1.5", "\"2\"", "[2]", "{}", "3000000000"}) {
    const std::string message =
        file_refusal(edited("\"ranks\": 2", "\"ranks\": " + std::string(value)));
    EXPECT_THAT(message, AllOf(HasSubstr("'ranks'"), HasSubstr("an integer from 1 up"))) << value;
  }
  EXPECT_THAT(file_refusal(edited("[0, 1, 1, 0]", "[0, 1, \"1\", 0]")), HasSubstr("'placement'"));
  EXPECT_THAT(file_refusal(edited("\"0F1\"", "[\"0F1\"]")), HasSubstr("list 0, position 1"));
  EXPECT_THAT(file_refusal(edited("\"0F1\"", "7")), HasSubstr("list 0, position 1"));
  EXPECT_THAT(file_refusal("[]"), HasSubstr("legal is one object"));
  EXPECT_THAT(file_refusal("3"), HasSubstr("legal is one object"));
}

TEST(ScheduleFileTest, RefusesCellsByListAndPosition) {
  EXPECT_THAT(file_refusal(edited("\"0F1\"", "\"0Q1\"")),
              AllOf(HasSubstr("list 0, position 1"), HasSubstr("unknown kind 'Q'")));
  EXPECT_THAT(file_refusal(edited("\"0F1\"", "\"0SEND_F1\"")),
              AllOf(HasSubstr("list 0, position 1"), HasSubstr("does not compute")));
  EXPECT_THAT(file_refusal(edited("\"0F1\"", "\"\"")), HasSubstr("list 0, position 1"));
  EXPECT_THAT(file_refusal(edited("\"0F1\"", "\"" + std::string(100, '0') + "\"")),
              HasSubstr("list 0, position 1"));
}

TEST(ScheduleFileTest, RefusesFilesWhoseNumbersDisagree) {
  EXPECT_THAT(file_refusal(edited("\"stages\": 4", "\"stages\": 5")),
              HasSubstr("'placement' has 4 entries, but the file says 5 stages"));
  EXPECT_THAT(file_refusal(edited("\"ranks\": 2", "\"ranks\": 3")),
              HasSubstr("'lists' has 2 entries, but the file says 3 ranks"));
  EXPECT_THAT(file_refusal(edited("[0, 1, 1, 0]", "[0, 1, 2, 0]")), HasSubstr("on rank 2"));
  EXPECT_THAT(file_refusal(edited("[0, 1, 1, 0]", "[1, 1, 1, 1]")), HasSubstr("without a stage"));
}

TEST(ScheduleFileTest, RefusesMoreMicroBatchesThanActionsBeforeAllocatingForThem) {
  EXPECT_THAT(file_refusal(edited("\"micro_batches\": 2", "\"micro_batches\": 2000000000")),
              HasSubstr("only 24 compute actions"));
}

TEST(ScheduleFileTest, RefusesTextThatIsNoJsonNamingTheByte) {
  EXPECT_THAT(file_refusal(""), HasSubstr("no JSON at byte 1"));
  EXPECT_THAT(file_refusal(sample("v_split.json") + "x"), HasSubstr("no JSON at byte"));
  EXPECT_THAT(file_refusal(edited("[0, 1", "[0,, 1")), HasSubstr("no JSON at byte"));
  EXPECT_THAT(file_refusal(edited("v-split", "v\xff")), HasSubstr("no JSON at byte"));
  EXPECT_THAT(file_refusal(std::string(1'000'000, '[')), HasSubstr("levels of lists"));
  EXPECT_THAT(file_refusal(edited("\"ranks\": 2", "\"ranks\": 1e999")),
              HasSubstr("no double holds"));
}

TEST(ScheduleFileTest, RefusesNamesThatAreEmptyLongOrUnprintable) {
  EXPECT_THAT(file_refusal(edited("v-split", "")), HasSubstr("the name ''"));
  EXPECT_THAT(file_refusal(edited("v-split", std::string(201, 'a'))), HasSubstr("1 to 200 bytes"));
  EXPECT_THAT(file_refusal(edited("v-split", "a\\u001b[31m")), HasSubstr("the name 'a?[31m'"));
  Schedule unnamed = generate("gpipe", {1, 1, 1});
  unnamed.name.clear();
  EXPECT_THROW((void)to_schedule_json(unnamed), Error);
}

TEST(ScheduleFileTest, WritesNoMessages) {
  EXPECT_THROW((void)to_schedule_json(lower(generate("gpipe", {2, 1, 1}), {})), Error);
}

TEST(ScheduleFileTest, IsToldFromCsvByItsFirstByte) {
  EXPECT_TRUE(looks_like_json(" \r\n\t{"));
  EXPECT_FALSE(looks_like_json("0F0"));
  EXPECT_FALSE(looks_like_json(""));
}

TEST(ScheduleFileTest, KeepsWhatASearchMadeItFor) {
  const Schedule schedule = generate("1f1b", {2, 3, 1});
  const MadeFor made_for = {
      .first_layer = {0, 3, 8}, .makespan = 47.25, .bubble = 0.25, .milliseconds = true};
  const ScheduleFile back = parse_schedule_json(to_schedule_json(schedule, made_for));
  EXPECT_TRUE(same_steps(back.schedule, schedule));
  EXPECT_EQ(back.made_for, made_for);
  MadeFor anywhere;
  anywhere.makespan = 1e300;
  EXPECT_EQ(parse_schedule_json(to_schedule_json(schedule, anywhere)).made_for, anywhere);
  EXPECT_EQ(parse_schedule_json(to_schedule_json(schedule)).made_for, std::nullopt);
}

TEST(ScheduleFileTest, RefusesAMadeForThatIsNone) {
  const std::string text = to_schedule_json(generate("1f1b", {2, 3, 1}), MadeFor{});
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    other.replace(other.find(from), from.size(), to);
    return file_refusal(other);
  };
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"bubble\":0.0", "\"bubble\":1.5"},
           {"\"bubble\":0.0", "\"bubble\":\"0\""},
           {"\"bubble\":0.0", "\"bubble\":{}"},
           {"\"bubble\":0.0", "\"bubble\":[]"},
           {"\"bubble\":0.0", "\"bubble\":0,\"bubble\":0"},
           {"\"bubble\":0.0,", ""},
           {"\"bubble\":0.0", "\"other\":0.0"},
           {"\"makespan\":0.0", "\"makespan\":-1"},
           {"\"makespan\":0.0", "\"makespan\":true"},
           {"\"milliseconds\":false", "\"milliseconds\":null"},
           {"\"first_layer\":[]", "\"first_layer\":[0,1]"},
           {"\"first_layer\":[]", "\"first_layer\":[1,1,2]"},
           {"\"first_layer\":[]", "\"first_layer\":[0,2,1]"},
           {"\"first_layer\":[]", "\"first_layer\":[0,1.5,2]"},
           {"\"first_layer\":[]", "\"first_layer\":[0,1,99999999999]"},
           {"\"first_layer\":[]", "\"first_layer\":[[0]]"},
           {"\"first_layer\":[]", "\"first_layer\":[true]"}}) {
    EXPECT_THAT(with(from, to), HasSubstr("made_for")) << to;
  }
}

}  // namespace
}  // namespace sluice
