#include "runtime/launch/command_template.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sluice/error.hpp>

#include "runtime/launch/layouts.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;

TEST(CommandTemplateTest, ReplacesPlaceholdersOnce) {
  const CommandTemplate command(
      {"mpirun", "-n", "{ranks}", "--hostfile={hostfile}", "{ranks}{replicas}"});
  EXPECT_THAT(command.fill({{"ranks", "{replicas}"}, {"hostfile", "/tmp/h"}, {"replicas", "2"}}),
              ElementsAre("mpirun", "-n", "{replicas}", "--hostfile=/tmp/h", "{replicas}2"));
  EXPECT_TRUE(command.uses("ranks"));
  EXPECT_TRUE(command.uses("hostfile"));
  EXPECT_FALSE(command.uses("pipeline"));
}

TEST(CommandTemplateTest, LeavesOtherBracesAlone) {
  const std::vector<std::string> words = {"sh",
                                          "-c",
                                          "awk '{print}' ${ranks} {}",
                                          R"({"a":{"b":1}})",
                                          "{",
                                          "}{",
                                          "{Ranks}",
                                          "{a b}",
                                          "$",
                                          "{x,y}",
                                          "{{"};
  const CommandTemplate command(words);
  EXPECT_EQ(command.fill({}), words);
  EXPECT_FALSE(command.uses("ranks"));
}

TEST(CommandTemplateTest, RefusesWhatIsNearlyAPlaceholder) {
  for (const char* word :
       {"{rank}", "x{hosts}", "{host-file}", "{pipelines}", "{replica}", "{pipe}"}) {
    expect_error(ErrorCode::kUsage, {"unknown placeholder"}, [&] {
      (void)CommandTemplate({"mpirun", word});
    });
  }
  expect_error(ErrorCode::kUsage, {"did you mean 'hostfile'?"}, [] {
    (void)CommandTemplate({"mpirun", "{hosts}"});
  });
}

TEST(CommandTemplateTest, RefusesACommandThatIsMissing) {
  expect_error(ErrorCode::kUsage, {"the command is missing"}, [] { (void)CommandTemplate({}); });
  expect_error(ErrorCode::kUsage, {"the command is missing"}, [] { (void)CommandTemplate({""}); });
}

TEST(LayoutsTest, AreTakenInTheirOrder) {
  const auto layouts = parse_layouts("4x2, 2x2,8x1");
  ASSERT_EQ(layouts.size(), 3U);
  EXPECT_EQ(first_that_fits(layouts, 8), (Layout{4, 2}));
  EXPECT_EQ(first_that_fits(layouts, 7), (Layout{2, 2}));
  EXPECT_EQ(first_that_fits(layouts, 3), std::nullopt);
  EXPECT_EQ(first_that_fits(layouts, std::nullopt), (Layout{4, 2}));
  EXPECT_EQ(to_string(layouts[2]), "8x1");
}

TEST(LayoutsTest, AreRefusedByPart) {
  for (const char* text : {"", "4", "4x", "x2", "4x2,", ",4x2", "4x2x2", "0x2", "-1x2", "4 x2",
                           "4X2", "4x2;2x2", "99999999999x1", "100000x100000", "4x1.5"}) {
    expect_error(ErrorCode::kUsage, {"is no layout; legal are PIPELINExREPLICAS"},
                 [&] { (void)parse_layouts(text); });
  }
  expect_error(ErrorCode::kUsage, {"'2x2' is given twice"},
               [] { (void)parse_layouts("2x2,4x1,2x2"); });
}

TEST(LayoutsTest, SlotsAreKnownWhereEachHostHasThem) {
  std::vector<HostLine> hosts = {{"a", 3, {}}, {"b", 4, {}}};
  EXPECT_EQ(slots_of(hosts), 7);
  hosts.push_back({"c", std::nullopt, {}});
  EXPECT_EQ(slots_of(hosts), std::nullopt);
}

}  // namespace
}  // namespace sluice::testing
