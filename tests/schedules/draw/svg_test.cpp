#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string drawn(const Schedule& schedule) {
  return draw_svg(schedule, simulate(schedule, {.stages = {StageTimes{}}, .message = 0}));
}

int times_in(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

TEST(SvgTest, HasARowPerRankAndANumberedBoxPerAction) {
  const std::string svg = drawn(generate("1f1b", {4, 6, 1}));
  EXPECT_THAT(svg, ::testing::StartsWith("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  EXPECT_THAT(svg, ::testing::EndsWith("</svg>\n"));
  EXPECT_EQ(times_in(svg, ">rank "), 4);
  EXPECT_EQ(times_in(svg, "<rect class=\"b\""), 4 * 6 * 2);
  EXPECT_EQ(times_in(svg, ">5</text>"), 4 * 2);
}

TEST(SvgTest, CaptionAndLegendSayBubblesMemoryAndKinds) {
  const std::string svg = drawn(generate("1f1b", {4, 6, 1}));
  EXPECT_THAT(svg, HasSubstr("bubble 33.3 % of the makespan"));
  EXPECT_THAT(svg, HasSubstr("peak memory 1 to 4 micro-batches per rank"));
  EXPECT_THAT(svg, HasSubstr(">forward<"));
  EXPECT_THAT(svg, HasSubstr(">idle<"));
  EXPECT_THAT(svg, Not(HasSubstr("backward, weight")));
  EXPECT_THAT(drawn(testing::v_split()), HasSubstr("backward, weight"));
  EXPECT_THAT(drawn(testing::v_split()), HasSubstr("shades: chunk 0 (dark) to 1 (light)"));
}

TEST(SvgTest, CaptionSaysBytesWhereTheyAreCounted) {
  SimulationTimes times{.stages = {StageTimes{}}, .message = 0};
  times.bytes.resize(1);
  times.bytes[0].until_weight = 1'500'000'000;
  const Schedule schedule = generate("1f1b", {4, 6, 1});
  EXPECT_THAT(draw_svg(schedule, simulate(schedule, times)),
              HasSubstr("1 to 4 micro-batches per rank, 1.5 to 6 GB"));
}

TEST(SvgTest, IsAsWideAsItMayBe) {
  const Schedule schedule = generate("1f1b", {4, 64, 1});
  const Simulation simulation = simulate(schedule, {.stages = {StageTimes{}}});
  EXPECT_THAT(draw_svg(schedule, simulation, 800),
              HasSubstr("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\""));
  EXPECT_THAT(draw_svg(schedule, simulation), Not(HasSubstr("width=\"800\"")));
}

TEST(SvgTest, ReductionsAreBarsBesideCompute) {
  SimulationTimes times{.stages = {StageTimes{}}, .message = 0};
  const Schedule schedule = generate("1f1b", {4, 6, 1});
  EXPECT_THAT(draw_svg(schedule, simulate(schedule, times)), Not(HasSubstr("gradient sum")));
  times.stages[0].reduce = 2;
  const std::string svg = draw_svg(schedule, simulate(schedule, times));
  EXPECT_THAT(svg, HasSubstr(">gradient sum<"));
  EXPECT_EQ(times_in(svg, "height=\"4\" fill=\"#d9822b\""), 4);
}

TEST(SvgTest, AnOverlappedPairIsTwoHalvesOfOneBox) {
  StageTimes together;
  together.overlap = 2;
  const Schedule schedule = testing::v_overlapped();
  const std::string svg = draw_svg(schedule, simulate(schedule, {.stages = {together}}));
  EXPECT_EQ(times_in(svg, "height=\"12\" fill="), 2);
  EXPECT_EQ(times_in(drawn(schedule), "height=\"12\" fill="), 0);  // one after the other
}

TEST(SvgTest, BoxesSayWhatTheyAreAndLinesWhereMessagesGo) {
  const Schedule schedule = generate("1f1b", {2, 3, 1});
  const SimulationDetail detail = {.timeline = true, .memory = true, .messages = true};
  SimulationTimes times{.stages = {StageTimes{}}, .message = 0.5};
  times.bytes = {{.until_weight = 1000, .output = 1}};
  const std::string svg = draw_svg(schedule, simulate(schedule, times, detail));
  EXPECT_EQ(times_in(svg, "<title>"), 2 * 3 * 2);
  EXPECT_THAT(svg, HasSubstr("<title>1B0 on rank 1: 2.5 to 4.5</title>"));
  EXPECT_EQ(times_in(svg, "class=\"m\""), 1);
  EXPECT_THAT(svg, HasSubstr("lines: messages"));
  EXPECT_THAT(svg, HasSubstr("bytes held, from 0 to 2.00"));
  times.message = 0;
  const std::string free = draw_svg(schedule, simulate(schedule, times, detail));
  EXPECT_THAT(free, Not(HasSubstr("class=\"m\"")));
  EXPECT_THAT(drawn(schedule), Not(HasSubstr("bytes held")));
}

// 2 x 128 x 400 are 102,400 actions.
TEST(SvgTest, RefusesTooManyActions) {
  const Schedule schedule = generate("1f1b", {128, 400, 1});
  try {
    (void)drawn(schedule);
    FAIL() << "102400 actions were drawn";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("102400 actions; at most 100000 are legal"));
  }
}

TEST(SvgTest, NamesCannotBreakOutOfTheirText) {
  Schedule schedule = generate("gpipe", {1, 1, 1});
  schedule.name = "<script>&\x1b";
  EXPECT_THAT(drawn(schedule), HasSubstr("&lt;script&gt;&amp;?"));
}

TEST(SvgTest, ActionsWithoutDurationAreDrawnAsNothing) {
  const Schedule schedule = generate("gpipe", {2, 2, 1});
  const std::string svg =
      draw_svg(schedule, simulate(schedule, {.stages = {StageTimes{0, 0, 0}}, .message = 0}));
  EXPECT_EQ(times_in(svg, "<rect class=\"b\""), 0);
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

TEST(SvgTest, RefusesForeignSimulations) {
  const Schedule large = generate("gpipe", {51, 1000, 1});
  const Schedule small = generate("gpipe", {2, 2, 1});
  EXPECT_THROW((void)draw_svg(small, simulate(large, {.stages = {StageTimes{}}, .message = 0})),
               Error);
}

}  // namespace
}  // namespace sluice
